"""What a training step costs: attention by ``flex_attention`` or in two products, compiled or not, loss fused or not.

    python bench/bench_training.py
    python bench/bench_training.py --scale large    # Qwen3-4B's shapes, as on a GPU by default

One step is forward and backward of the drafter over packed anchor blocks of several sequences, and AdamW. Every way is
checked against the first (loss and gradient norm) before any is timed, and they are timed in turn. Writes
``training_step.json``: median seconds, blocks per second, and on a GPU the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from machine import describe, results_folder
from torch import nn

from dspark_fast import DSparkDraft
from dspark_fast.config import DSparkConfig
from dspark_fast.reference.markov import markov_features
from dspark_fast.training.blocks import run_blocks, sample_anchors
from dspark_fast.training.loss import dspark_loss, make_labels

# The drafter's configuration, sequences x length, anchors per sequence; the loss runs over the whole vocabulary.
SCALES: dict[str, dict[str, Any]] = {
    "large": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151_936, "layers": 5, "rank": 256, "block": 7, "taps": 5,
        "sequences": 2, "length": 2048, "anchors": 512,
    },
    "small": {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "vocab_size": 49_152, "layers": 2, "rank": 64, "block": 7, "taps": 3,
        "sequences": 4, "length": 256, "anchors": 24,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 203, "layers": 2, "rank": 8, "block": 3, "taps": 2,
        "sequences": 2, "length": 48, "anchors": 5,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="large" if torch.cuda.is_available() else "small")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # gpu.sh gives it to every bench
    parser.add_argument("--out", type=Path, default=None, help="folder of training_step.json")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    problem = make(SCALES[arguments.scale], device)

    ways = {"two products": (False, False, True), "two products, loss not fused": (False, False, False)}
    if device.type == "cuda":
        ways |= {"flex": (True, False, True), "flex, compiled": (True, True, True)}
    elif arguments.scale != "tiny":
        ways |= {"two products, compiled": (False, True, True)}
    steps, checked = {}, None
    for name, (flex, compiled, fused) in ways.items():
        try:
            step = stepper(problem, flex, compiled, fused)
            found = step()
        except torch.OutOfMemoryError:
            print(f"{name}: not enough memory")
            continue
        checked = checked or found
        for what, ours, theirs in zip(("loss", "gradient norm"), found, checked, strict=True):
            if not abs(ours - theirs) <= 0.02 * abs(theirs):  # bf16 products in another order
                raise SystemExit(f"{name}: {what} is {ours}, not {theirs}: nothing is reported")
        steps[name] = step
        print(f"{name}: loss {found[0]:.4f}, gradient norm {found[1]:.4f}", flush=True)

    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, float] = {}
    for _ in range(arguments.repeats):
        for name, step in steps.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()  # reads the loss, so it has waited for the device
            seconds[name].append(time.perf_counter() - start)
            if device.type == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    first = seconds["two products"]
    rows = []
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(first, values, strict=True)]
        rows.append(
            {
                "way": name,
                "median_ms": round(statistics.median(values) * 1e3, 2),
                "blocks_per_second": round(problem.blocks / statistics.median(values), 1),
                "speedup_over_first": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                **({"peak_gib": round(peaks[name], 2)} if name in peaks else {}),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    folder = arguments.out or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    result = {"machine": describe(), "scale": arguments.scale, "shape": SCALES[arguments.scale], "rows": rows}
    (folder / "training_step.json").write_text(json.dumps(result, indent=2) + "\n")


def make(scale: dict[str, Any], device: torch.device) -> SimpleNamespace:
    """A drafter of random weights on random features; what is timed does not depend on either."""
    torch.manual_seed(0)
    layers, hidden = 4 * scale["taps"], scale["hidden_size"]
    config = DSparkConfig(
        **{key: value for key, value in scale.items() if key.endswith(("_size", "_heads", "head_dim"))},
        hidden_act="silu",
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        num_hidden_layers=scale["layers"],
        num_target_layers=layers,
        target_layer_ids=list(range(1, layers - 1, 4))[: scale["taps"]],
        block_size=scale["block"],
        markov_rank=scale["rank"],
        mask_token_id=scale["vocab_size"] - 1,
    )
    draft = DSparkDraft(config).float().to(device)
    for name in ("embed_tokens", "lm_head"):
        shape = (scale["vocab_size"], hidden)
        module = nn.Embedding(*shape) if name == "embed_tokens" else nn.Linear(*reversed(shape), bias=False)
        draft._modules.pop(name, None)
        object.__setattr__(draft, name, module.to(device, torch.bfloat16).requires_grad_(False))
    batch, length = scale["sequences"], scale["length"]
    ids = torch.randint(scale["vocab_size"] - 1, (batch, length), device=device)
    mask = (torch.arange(length, device=device) >= length // 4).expand(batch, -1)
    anchors, valid = sample_anchors(mask.cpu(), scale["anchors"], torch.Generator().manual_seed(0))
    anchors, valid = anchors.to(device), valid.to(device)
    features = torch.randn(batch, length, scale["taps"] * hidden, device=device, dtype=torch.bfloat16)
    last = torch.randn(batch, length, hidden, device=device, dtype=torch.bfloat16)
    arguments = (ids, features, last, mask, anchors, valid)
    before = [parameter.detach().clone() for parameter in draft.parameters() if parameter.requires_grad]
    return SimpleNamespace(draft=draft, arguments=arguments, before=before, blocks=int(valid.sum()), device=device)


def stepper(problem: SimpleNamespace, flex: bool, compiled: bool, fused: bool) -> Any:
    """A function that makes one step and says loss and gradient norm; the weights are put back before each."""
    torch._dynamo.reset()
    draft = problem.draft
    run = torch.compile(run_blocks, dynamic=True) if compiled else run_blocks
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)

    def blocks(*values: Any) -> torch.Tensor:
        return run(*values, flex=flex)

    def step() -> tuple[float, float]:
        with torch.no_grad():
            for parameter, value in zip(parameters, problem.before, strict=True):
                parameter.copy_(value)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(problem.device.type, dtype=torch.bfloat16):
            if fused:
                loss = dspark_loss(draft, *problem.arguments, run=blocks).total
            else:
                loss = unfused(draft, *problem.arguments, run=blocks)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
        optimizer.step()
        return loss.item(), norm

    return step


def unfused(draft: Any, ids: Any, features: Any, last: Any, mask: Any, anchors: Any, valid: Any, *, run: Any) -> Any:
    """The same loss with all logits held, as PyTorch's own functions have it."""
    block = draft.config.block_size
    labels = make_labels(ids, mask, anchors, valid, block, 4.0)
    hidden = run(draft, ids, features, anchors, valid)
    w1, w2 = draft.markov_weights()
    feature = markov_features(labels.previous, w1, hidden=hidden, **draft.markov_options())
    head = draft.lm_head.weight
    logits = F.linear(hidden.to(head.dtype), head).float() + F.linear(feature, w2).float()
    where = (anchors[..., None] + torch.arange(block, device=anchors.device)).clamp(max=ids.shape[1] - 1)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    with torch.no_grad():
        p = F.linear(last[rows, where], head).float().softmax(-1)
    log_q = logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    surprise = -log_q.gather(-1, labels.tokens[..., None])[..., 0]
    judged = draft.confidence(hidden, labels.previous).float()
    overlap = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    confidence = F.binary_cross_entropy_with_logits(judged, overlap, reduction="none")
    each = 0.1 * surprise + 0.9 * distance + confidence
    return (each * labels.weights).sum() / (labels.weights.sum() + 1e-6)


if __name__ == "__main__":
    main()
