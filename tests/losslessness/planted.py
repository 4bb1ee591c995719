"""Noise chosen by hand: the reference's Philox gives the words that are planted, 2^31 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from dspark_fast.reference import sampling

MIDDLE = 1 << 31


@contextmanager
def words(chosen: dict[tuple[int, int], int | torch.Tensor]) -> Iterator[None]:
    """``chosen``: (stream, token) -> its word at every position; token 0 of the accept stream judges every draft.

    A word may be a tensor [B], by row.
    """

    def planted(c0, c1, c2, c3, key):
        shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape, key.shape)
        found = [torch.full(shape, MIDDLE) for _ in range(4)]
        for (stream, token), word in chosen.items():
            here = ((c0 == token // 4) & (c3 == stream)).expand(shape)
            word = torch.as_tensor(word)
            rows = word.reshape(-1, *[1] * (len(shape) - 1)) if word.dim() else word
            found[token % 4] = torch.where(here, rows, found[token % 4])
        return tuple(found)

    with mock.patch.object(sampling, "philox", planted):
        yield
