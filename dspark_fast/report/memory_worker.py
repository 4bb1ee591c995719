"""One way of decoding in a process of its own: ``python -m dspark_fast.report.memory_worker WAY SETTINGS``.

It prints one line of JSON, the fields of :class:`~dspark_fast.report.memory.Peak`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load what the way needs, answer one prompt, and weigh.

    Args:
        way: ``plain``, ``autoregressive`` or ``dspark``.
        settings: of the report, see :class:`~dspark_fast.report.making.ReportSettings`.
    """
    import torch

    from dspark_fast import generation  # all that decoding imports, before the first weighing
    from dspark_fast.report.making import ReportSettings, load_subject

    libraries = _resident("VmRSS")
    subject = load_subject(ReportSettings.from_dict(settings), ways={way})
    device = subject.model.device
    if way == "autoregressive" and subject.small is None:
        return {"none": subject.small_name}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what loading held for a moment is given back
    ids = subject.ids(0)
    caches = {"target": 0, "drafter": 0, "packed": 0}
    if way == "plain":
        output = subject.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=subject.max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        width = output.sequences.shape[1]
        caches["target"] = _cache_bytes(output.past_key_values)
    else:
        drafter = subject.small if way == "autoregressive" else subject.draft
        output = generation.generate(
            subject.model,
            drafter,
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=subject.max_new_tokens,
            do_sample=False,
            off_switch=False,
            pad_token_id=0,
        )
        width, caches = output.shape[1], caches | output.stats.memory
    seen = {tensor.data_ptr() for tensor in _tensors(subject.model)}
    module = {"plain": None, "autoregressive": getattr(subject.small, "draft", None), "dspark": subject.draft}[way]
    own = [] if module is None else [one for one in _tensors(module) if one.data_ptr() not in seen]
    return {
        "target": _bytes(_tensors(subject.model)),
        "drafter": _bytes(own),
        "target_cache": caches["target"],
        "drafter_cache": caches["drafter"],
        "packed": caches["packed"],
        "libraries": 0 if device.type == "cuda" else libraries,
        "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM"),
        "tokens": width,
        "device": str(device),
        "small": subject.small_name if way == "autoregressive" else "",
    }


def _tensors(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _bytes(tensors: list[Any]) -> int:
    """Of tensors, each storage once: an LM head may be the embedding."""
    return sum({one.data_ptr(): one.nbytes for one in tensors}.values())


def _cache_bytes(cache: Any) -> int:
    layers = getattr(cache, "layers", [])
    found = (getattr(layer, name, None) for layer in layers for name in ("keys", "values"))
    return sum(one.nbytes for one in found if one is not None)


def _resident(what: str) -> int:
    """Bytes of this process, ``VmRSS`` now or ``VmHWM`` at most.

    On Linux not ``getrusage``: its peak outlives exec, so that a child has its parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(f"{what}:"):
                return 1024 * int(line.split()[1])
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    from dspark_fast.cli.session import quiet

    quiet()
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
