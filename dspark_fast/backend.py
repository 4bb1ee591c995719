"""Which of the two rooms runs an op: the Triton kernels or the reference.

An explicit argument decides; without one the environment variable ``DSPARK_FAST_BACKEND`` (``auto``, ``kernel`` or
``reference``); with ``auto``, the default, the kernels run on a CUDA or ROCm device that has Triton, and the reference
everywhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

VARIABLE = "DSPARK_FAST_BACKEND"
BACKENDS = ("kernel", "reference")
# On 7.5 Triton has no matrix instructions: the kernels compile, to scalar code that spills up to 16 KB a thread, and
# the walk of 64 rows asks for more shared memory than there is (bench/results/static.json).
OLDEST_CAPABILITY = (8, 0)
ROCM_TARGETS = ("gfx942",)  # what is compiled and checked (bench/static.py)


def choose(backend: str | None, tensor: torch.Tensor, *, beyond: str | None = None) -> str:
    """``"kernel"`` or ``"reference"`` for an op on ``tensor``'s device.

    Args:
        backend: the caller's wish, or None.
        tensor: the op's first input: its device is looked at.
        beyond: why the kernel does not cover these arguments (a block too long, say), or None.

    Raises:
        ValueError: for an unknown name; for ``kernel`` where no kernel can run; for the argument ``kernel`` with
            arguments beyond it (the variable then means the kernel wherever there is one).
    """
    wish = os.environ.get(VARIABLE, "auto") if backend is None else backend
    asker = f"{VARIABLE} is" if backend is None else "backend is"
    if wish not in BACKENDS and not (wish == "auto" and backend is None):
        accepted = ", ".join(BACKENDS if backend is not None else ("auto", *BACKENDS))
        raise ValueError(f"{asker} {wish!r}: accepted are {accepted}")
    if wish == "reference" or (wish == "auto" and tensor.device.type != "cuda"):
        return "reference"
    missing = _missing(tensor.device)
    if wish == "kernel" and missing:
        raise ValueError(f"{asker} 'kernel', but {missing}")
    if beyond and backend == "kernel":
        raise ValueError(f"backend is 'kernel', but {beyond}")
    return "reference" if missing or beyond else "kernel"


@functools.lru_cache
def _missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on this device; None if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        needed = "a CUDA or ROCm device (or TRITON_INTERPRET=1, very slow, for tests)"
        return f"the tensors are on {device.type}: the kernels need {needed}"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return None if name.startswith(ROCM_TARGETS) else f"this GPU is a {name}: the kernels are compiled for gfx942"
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), OLDEST_CAPABILITY))
        return f"this GPU has compute capability {have}: the kernels need {need}"
    return None


@functools.lru_cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether kernels may read float8_e4m3fn there: compute capability 8.9 and later, and the interpreter's CPU."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
