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
        """
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1:
            return cls()
        if not dist.is_initialized():
            if device.startswith("cuda"):
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
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

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            dist.barrier()

    def leave(self) -> None:
        """Take leave of the others."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()
