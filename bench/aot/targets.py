"""The GPUs that kernels are compiled for, and a driver that says it has one of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

HALVES = (torch.bfloat16, torch.float16)


class Target(NamedTuple):
    """One architecture, and a device of it whose launch table is used if there is one."""

    name: str
    gpu: GPUTarget
    device: str
    shared_limit: int  # bytes that a program may use
    dtypes: tuple[torch.dtype, ...] = HALVES
    ruled: bool = True  # whether the rules hold on it; otherwise kernels only have to compile


TARGETS = {
    target.name: target
    for target in (
        # Triton multiplies without matrix instructions on Turing: kernels run, spilling, if they fit.
        Target("sm_75", GPUTarget("cuda", 75, 32), "tesla-t4", 64 * 1024, (torch.float16,), ruled=False),
        Target("sm_80", GPUTarget("cuda", 80, 32), "nvidia-a100-sxm4-80gb", 163 * 1024),
        Target("sm_90", GPUTarget("cuda", 90, 32), "nvidia-h200", 227 * 1024),
        Target("sm_100", GPUTarget("cuda", 100, 32), "nvidia-b200", 227 * 1024),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), "amd-instinct-mi300x", 64 * 1024),
    )
}


def pretend(target: Target) -> None:
    """Make Triton believe that ``target`` is the current device. Launching on it fails; specialising works."""
    triton.runtime.driver.set_active(_Driver(target))


class _Driver:
    """The part of a driver that a launch asks before it compiles."""

    def __init__(self, target: Target) -> None:
        self._target = target.gpu
        self._device = list(TARGETS).index(target.name)  # Triton keeps a kernel's binders by this number

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0
