"""Philox4x32-10, the counter-based generator behind every random number of the library, in torch integers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants and known
answers from the authors' Random123. A counter is four 32-bit words, a key two; ten rounds turn them into four
32-bit words that are as good as independent for every other counter or key. There is no state to carry, so a
number depends on what it is for (which token, position, stream) and never on what was drawn before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
MASK = 0xFFFFFFFF
ROUNDS = 10

# While a word depends on some counters only, it is as small as they are: with c0 over the vocabulary and the rest per
# row, most of the first two rounds costs nothing. From the third on everything is full-sized and done in place.
BROADCAST_ROUNDS = 2


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for every counter.

    c0, c1, c2, c3: int64, any shapes that broadcast against each other and against ``key``; only the low 32 bits count.
    key: int64, a 64-bit seed (the low word is Philox's first key word, the high word its second).
    Returns four int64 tensors of the broadcast shape, values in 0 .. 2^32 - 1. Inputs are left as they are.
    Raises RuntimeError (torch) if the shapes do not broadcast.

    uint32 lives in int64 here: the 64-bit product wraps to the right bits and an arithmetic shift followed by the mask
    is its high word. A low word is only ever xored into a word that is masked afterwards, so it needs no mask of its
    own until the end: ten integer operations a round instead of twelve.
    """
    shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape, key.shape)
    c0, c2 = c0 & MASK, c2 & MASK
    low, high = key & MASK, (key >> 32) & MASK

    for _ in range(BROADCAST_ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1 = ((product_1 >> 32) ^ (c1 ^ low)) & MASK, product_1
        c2, c3 = ((product_0 >> 32) ^ (c3 ^ high)) & MASK, product_0
        low, high = (low + WEYL_0) & MASK, (high + WEYL_1) & MASK

    c0, c1, c2, c3 = (c.expand(shape).contiguous() for c in (c0, c1, c2, c3))  # ours: the rounds made new tensors
    scratch = torch.empty_like(c0)
    for _ in range(ROUNDS - BROADCAST_ROUNDS):
        c0.mul_(MULTIPLIER_0)
        c2.mul_(MULTIPLIER_1)
        torch.bitwise_right_shift(c2, 32, out=scratch)
        c1.bitwise_xor_(scratch).bitwise_xor_(low).bitwise_and_(MASK)
        torch.bitwise_right_shift(c0, 32, out=scratch)
        c3.bitwise_xor_(scratch).bitwise_xor_(high).bitwise_and_(MASK)
        c0, c1, c2, c3 = c1, c2, c3, c0
        low, high = (low + WEYL_0) & MASK, (high + WEYL_1) & MASK
    return c0, c1.bitwise_and_(MASK), c2, c3.bitwise_and_(MASK)
