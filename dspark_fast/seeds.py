"""The seed of each row of a call, from what the caller gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark_fast.reference import expand_seeds


def row_seeds(
    seed: int | Sequence[int] | torch.Tensor | None,
    generator: torch.Generator | None,
    rows: int,
    returns: int,
    *,
    sampling: bool,
) -> torch.Tensor:
    """One 64-bit seed per row, int64 ``[rows]`` on the CPU.

    Args:
        seed: an integer, expanded over (prompt, return sequence); one per row, taken as they are; or None.
        generator: draws the integer if there is none; None for torch's global generator.
        rows: B, which ``returns`` divides.
        returns: sequences per prompt.
        sampling: false if nothing will be drawn with them, which leaves torch's generator alone.

    Raises:
        ValueError: for another number of seeds than rows, or one that has not 64 bits.
    """
    if seed is not None and not isinstance(seed, int):
        values = torch.atleast_1d(seed).tolist() if isinstance(seed, torch.Tensor) else list(seed)
        if len(values) != rows:
            raise ValueError(f"seed has {len(values)} values for {rows} rows: accepted are an int or one per row")
        return torch.tensor([_signed(value) for value in values])
    if seed is None and not sampling:
        seed = 0
    if seed is None:
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device))
    elif not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}: accepted are integers of 64 bits")
    return expand_seeds(seed, rows // returns, returns)


def _signed(seed: Any) -> int:
    """A 64-bit seed as the signed integer that torch keeps it as."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed holds {seed}: accepted are integers of 64 bits")
    return (seed + 2**63) % 2**64 - 2**63
