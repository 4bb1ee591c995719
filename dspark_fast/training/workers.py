"""The processes of one training run: this one alone, or those that torchrun started."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A first worker may generate answers and extract features for hours while the others wait for it.
PATIENCE = timedelta(days=2)


class Workers:
    """This process's place among the run's processes.

    Attributes:
        rank: 0 to ``count - 1``; the first one writes files and speaks.
        count: of processes.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @classmethod
    def from_environment(cls, device: str) -> Workers:
        """Join the processes that torchrun started; alone where it did not.

        Args:
            device: ``cuda`` takes NCCL and this process's own GPU, anything else gloo.

        Raises:
            ValueError: for ``cuda`` where there is none, one GPU (``cuda:1``) for several processes, more processes
                than GPUs, and for numbers from the environment that are none.
        """
        count, on_gpu = _number("WORLD_SIZE", least=1, default=1), device.startswith("cuda")
        if on_gpu and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but PyTorch finds no GPU here")
        if count == 1:
            return cls()
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        # All is looked at before the others are waited for: a process that raises while they wait leaves them there.
        rank, local = _number("RANK", least=0), _number("LOCAL_RANK", least=0, default=0)
        if rank >= count:
            raise ValueError(f"RANK is {rank}, of processes there are {count} (WORLD_SIZE)")
        if on_gpu:
            if device != "cuda":
                raise ValueError(f"device is {device!r} for {count} processes: ask for 'cuda', and each takes its own")
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"LOCAL_RANK is {local}, but the GPUs are {torch.cuda.device_count()}: start one process for each"
                )
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), dist.get_world_size())

    def device(self, device: str) -> str:
        """This worker's device: its own GPU where ``cuda`` is asked for."""
        return f"cuda:{torch.cuda.current_device()}" if device == "cuda" and self.count > 1 else device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, its gradients averaged over the processes where there are several."""
        return module if self.count == 1 else DistributedDataParallel(module)

    def synchronised(self, module: nn.Module, now: bool) -> AbstractContextManager[Any]:
        """Around a forward and backward pass: gradients travel only in the last one of a step."""
        return nullcontext() if now or self.count == 1 else module.no_sync()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the processes."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def first_says(self, flag: bool, device: torch.device) -> bool:
        """The first one's flag, for all: another's rounding could decide otherwise, and leave the others waiting."""
        return bool(self.sum(torch.tensor(float(self.first and flag), device=device)))

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def leave(self) -> None:
        """Take leave of the others."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _number(name: str, *, least: int, default: int | None = None) -> int:
    """A whole number that torchrun sets in the environment."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"{name} is not set in the environment, though WORLD_SIZE is: torchrun sets both")
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} is {value!r} in the environment: a whole number from {least} on is needed")
    return int(value)
