"""When two results count as equal although their bits differ.

Tokens must be equal, except where the reference's own scores of the two tokens are closer than the arithmetic resolves:
two sums in another order, or a bf16 product that one side rounds and the other keeps. Such a near-tie is looked
at one by one, in the reference's scores, and counted; more than one token in twenty and the results are not equal.
"""

from __future__ import annotations

import torch

# Of all tokens may be near-ties. In bf16 they are not rare: a bias of 4 is rounded to 2^-6 of 1, and the two best of
# 151,936 normal logits of deviation 3 are closer than that in one row of fifty. The tests, in fp32, allow 1 in 10,000.
MOST = 0.05


def rms_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of what was expected; NaN stays NaN, and NaN is below no bound."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def is_near_tie(scores: torch.Tensor, chosen: int, expected: int, tolerance: float) -> bool:
    """Whether ``scores`` [V] of the two tokens differ by at most ``tolerance``."""
    if min(chosen, expected) < 0 or max(chosen, expected) >= scores.shape[-1]:
        return False
    return abs(float(scores[expected]) - float(scores[chosen])) <= tolerance


def too_many(ties: int, tokens: int) -> bool:
    """More near-ties than arithmetic explains; one is always allowed."""
    return ties > max(1, MOST * tokens)
