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


def choose(backend: str | None, tensor: torch.Tensor, *, beyond: str | None = None) -> str:
    """``"kernel"`` or ``"reference"`` for an op on ``tensor``'s device.

    Args:
        backend: the caller's wish, or None.
        tensor: the op's largest input: its device and dtype are looked at.
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
    missing = _missing(tensor.device, tensor.dtype)
    if wish == "kernel" and missing:
        raise ValueError(f"{asker} 'kernel', but {missing}")
    if beyond and backend == "kernel":
        raise ValueError(f"backend is 'kernel', but {beyond}")
    return "reference" if missing or beyond else "kernel"


@functools.lru_cache
def _missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the kernels from running on this device with this dtype; None if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return f"the tensors are on {device.type}: the kernels need a CUDA or ROCm device (or TRITON_INTERPRET=1)"
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (7, 5):
            return f"this GPU has compute capability {capability[0]}.{capability[1]}: Triton needs 7.5"
        if capability < (8, 0) and dtype == torch.bfloat16:
            # Without bf16 matrix instructions Triton compiles each product to scalar code: correct, and 238 KB of it.
            return f"this GPU (compute capability {capability[0]}.{capability[1]}) has no bfloat16 matrix instructions"
    return None
