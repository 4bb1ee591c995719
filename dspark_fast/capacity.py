"""How much room the caches get: few sizes, so that a growing row seldom copies and a captured graph is met again."""

from __future__ import annotations

_SMALLEST = 256
_LARGEST_STEP = 4096


def bucket(tokens: int) -> int:
    """The capacity, in tokens per row, that holds ``tokens``.

    A power of two from 256 up to 4,096, and multiples of 4,096 beyond: doubling there would leave as much memory idle
    as a 4-billion-parameter target takes at 32k tokens (5 GB).
    """
    capacity = _SMALLEST
    while capacity < tokens and capacity < _LARGEST_STEP:
        capacity *= 2
    return capacity if capacity >= tokens else -(-tokens // _LARGEST_STEP) * _LARGEST_STEP


def room(tokens: int, most: int) -> int:
    """The bucket for ``tokens``, but no more than ``most``, which the call will never exceed."""
    return min(bucket(tokens), most)
