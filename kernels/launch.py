"""Launch parameters: tile sizes, warps and stages of every kernel, from one small JSON table per device.

A table maps a kernel's name to its parameters and to ``why``, one line of reasoning or the measurement behind them.
``tuned`` says which of the two it is. Tables are data, so a measured one is added without touching a kernel; there is
no autotuner, because it would time kernels in a user's process and because its choice, and so the bits of a row, would
change from one run to the next.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path

import torch
import triton

TABLES = Path(__file__).parent / "tables"
log = logging.getLogger("dspark_fast")


def parameters(kernel: str, device: torch.device) -> dict[str, int]:
    """What ``kernel`` is launched with on ``device``: its constants, ``num_warps`` and other options of the compiler.

    Raises KeyError if no table knows the kernel. A device without a table of its own gets its maker's, which is made
    for the smallest shared memory and register file of the kind, and the log says so once.
    """
    chosen = _table(_name(device))[kernel]
    return {name: value for name, value in chosen.items() if name != "why"}


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1) instead of compiling them for a GPU."""
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache
def _name(device: torch.device) -> str:
    """The name of the device's table: "NVIDIA H200" is nvidia-h200.json."""
    if device.type != "cuda":
        return "nvidia"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


@functools.lru_cache
def _table(name: str) -> dict[str, dict[str, int]]:
    maker = "amd" if name.startswith("amd") else "nvidia"
    default = json.loads((TABLES / f"{maker}.json").read_text())["kernels"]
    path = TABLES / f"{name}.json"
    if path.is_file():
        return {**default, **json.loads(path.read_text())["kernels"]}
    log.warning("no launch table for %s: %s.json, which is not tuned for it, is used", name, maker)
    return default
