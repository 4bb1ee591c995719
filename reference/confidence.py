"""The confidence head: how likely each drafted token is to be accepted, given that those before it were."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def confidence_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prev_embedding: torch.Tensor | None = None
) -> torch.Tensor:
    """``w . [h_k ; W1[x_{k-1}]] + b`` (DSpark paper, Eq. 7; the released heads have the bias that the paper omits).

    Slot k sees the token *before* the one it judges, never x_k itself: that is what keeps a cut by confidence lossless.

    Args:
        hidden: ``[..., T, H]``, final-normed.
        weight: ``[1, H + R]``, or ``[1, H]`` for a head without the Markov input.
        bias: ``[1]``, or None.
        prev_embedding: ``[..., T, R]``, ``W1`` of the previous token of each slot; None for a head without it.

    Returns:
        ``[..., T]`` before the sigmoid, in the dtype of ``hidden``.
    """
    inputs = hidden if prev_embedding is None else torch.cat([hidden, prev_embedding.to(hidden.dtype)], dim=-1)
    return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype)).squeeze(-1)
