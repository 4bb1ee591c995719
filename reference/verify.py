"""Verification: how many drafted tokens the target keeps, and the token that follows them.

Three modes. ``greedy``: a draft is kept iff it is the target's argmax. ``rejection``: Leviathan et al. 2023, Chen et
al. 2023: keep with probability min(1, p / q), else draw from the residual (p - q)+; the output has the target's law.
``coupled``: Daliri, Musco, Suresh 2024: the target takes its Gumbel-max token under the noise that the draft was drawn
with, and a draft is kept iff it is that token; the output is that of plain Gumbel-max sampling, whatever the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import (
    DRAFT,
    TARGET,
    Number,
    accept_uniform,
    cut_logits,
    exp_,
    exponentials,
    greedy_argmax,
    gumbel_argmax,
    per_row,
    softmax_statistics,
)

MODES = ("greedy", "rejection", "coupled")

# temperature, top_k, top_p, min_p
Cuts = tuple[Tensor, Tensor | Number, Tensor | Number, Tensor | Number]


@torch.no_grad()
def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lengths: Tensor,
    *,
    temperature: Tensor | Number,
    seed: Tensor | int,
    position: Tensor | int,
    mode: str = "rejection",
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    draft_row_max: Tensor | None = None,
    draft_log_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Judge a block.

    target_logits: [B, T + 1, V], row j after the anchor and j drafts; draft_tokens: int64 [B, T]; draft_logits:
    [B, T, V] before the temperature, as sampled from (None in greedy and coupled mode, or when T is 0);
    draft_lengths: int [B], 0 .. T, or negative for a finished row: nothing of it is read and both results are 0;
    temperature, seed, position (absolute, of the anchor), top_k, top_p, min_p: [B].
    draft_row_max, draft_log_sum: [B, T] fp32 as ``markov_walk`` returns them; without them they are recomputed.
    Returns accepted int64 [B] in 0 .. length and next_token int64 [B], which follows the accepted ones. T = 0 samples
    one token from each row: a plain step, or a first token. The cuts apply to the target alone.

    Rows at temperature 0 are greedy in every mode. A drafted -1 (a drafter that failed) ends its block as though it had
    been cut there, which costs speed and never correctness. A target row without a finite maximum (a NaN, a +inf, all
    -inf) that is needed ends its block with next_token -1; so does a NaN in a draft row that a resample needs. Nothing
    past a row's length, or its first rejection, has any influence. Raises ValueError for an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    batch, device = target_logits.shape[0], target_logits.device
    temperature = per_row(temperature, batch, torch.float32, device)
    greedy = temperature == 0 if mode != "greedy" else torch.ones_like(temperature, dtype=torch.bool)
    exact = drawn = None
    if greedy.any() or not batch:
        exact = _keep_equal(greedy_argmax(target_logits), draft_tokens, draft_lengths)
    if not greedy.all():
        seed = per_row(seed, batch, torch.int64, device)
        position = per_row(position, batch, torch.int64, device)
        cuts = (temperature, top_k, top_p, min_p)
        if mode == "coupled":
            drawn = _keep_coupled(target_logits, draft_tokens, draft_lengths, cuts, seed, position)
        else:
            divisor = temperature.masked_fill(greedy, 1.0)
            statistics = (draft_row_max, draft_log_sum)
            drawn = _keep_by_rejection(
                target_logits, draft_tokens, draft_logits, draft_lengths, cuts, divisor, seed, position, statistics
            )
    if exact is None or drawn is None:
        accepted, following = drawn or exact
    else:
        accepted, following = (torch.where(greedy, one, other) for one, other in zip(exact, drawn))
    finished = draft_lengths < 0
    return accepted.masked_fill(finished, 0), following.masked_fill(finished, 0)


def _prefix(kept: Tensor, lengths: Tensor) -> Tensor:
    """kept: bool [B, T] -> int64 [B], how many slots before ``lengths`` come before the first that is not kept."""
    inside = torch.arange(kept.shape[1], device=kept.device) < lengths[:, None]
    return (kept & inside).long().cumprod(-1).sum(-1)


def _keep_equal(target_tokens: Tensor, draft_tokens: Tensor, draft_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the drafts that are the target's own token [B, T + 1]. A failed target row (-1) equals nothing."""
    kept = (draft_tokens == target_tokens[:, :-1]) & (draft_tokens >= 0)
    accepted = _prefix(kept, draft_lengths)
    return accepted, target_tokens.gather(1, accepted[:, None])[:, 0]


def _keep_coupled(
    target_logits: Tensor, draft_tokens: Tensor, draft_lengths: Tensor, cuts: Cuts, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep the drafts that are the Gumbel-max token of their position; rows past every row's end are not looked at.

    A greedy row has one token left after the cut, so the noise cannot change it.
    """
    accepted, following = torch.zeros_like(seed), torch.zeros_like(seed)
    alive = torch.ones_like(seed, dtype=torch.bool)
    no_anchor = torch.zeros_like(position)
    for slot in range(target_logits.shape[1]):
        row = cut_logits(target_logits[:, slot], *cuts)
        token = gumbel_argmax(row, exponentials(seed, position + 1 + slot, no_anchor, DRAFT, row.shape[-1]))
        following = torch.where(alive, token, following)
        if slot == draft_tokens.shape[1]:
            break
        alive &= (slot < draft_lengths) & (draft_tokens[:, slot] == token) & (token >= 0)
        if not alive.any():
            break
        accepted += alive
    return accepted, following


def _keep_by_rejection(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lengths: Tensor,
    cuts: Cuts,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    statistics: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Strict ``u * q < p`` slot by slot, then one draw from the residual or, after a full block, from p.

    temperature: [B], above 0, of the drafts. The division p / q is avoided: it overflows where q is tiny. Target rows
    past every row's first rejection are neither cut nor summed: at tau = 2 and T = 5 that is half of them.
    """
    batch, block = draft_tokens.shape
    accepted, lengths = torch.zeros_like(seed), torch.zeros_like(seed)
    if block:
        row_max, log_sum = statistics
        if row_max is None or log_sum is None:
            row_max, log_sum = softmax_statistics(draft_logits, temperature[:, None])
        lengths = torch.minimum(_prefix(draft_tokens >= 0, draft_lengths), draft_lengths)
        index = draft_tokens.clamp(0, target_logits.shape[-1] - 1)[..., None]
        drafted = draft_logits.gather(-1, index)[..., 0].float()
        q = ((drafted - row_max) / temperature[:, None] - log_sum).exp_()
        slots = position[:, None] + 1 + torch.arange(block, device=seed.device)
        threshold = accept_uniform(seed[:, None], slots, position[:, None]) * q
        alive = lengths > 0
        for slot in range(block):
            if not alive.any():
                break
            # torch's softmax is one pass and half the time of its logsumexp; a row without a finite maximum is NaN.
            p = cut_logits(target_logits[:, slot], *cuts).softmax(-1).gather(-1, index[:, slot])[:, 0]
            alive = alive & (slot < lengths) & (threshold[:, slot] < p)
            accepted += alive

    # Only the row that follows the accepted drafts is drawn from.
    rows = torch.arange(batch, device=seed.device)
    p = cut_logits(target_logits[rows, accepted], *cuts).softmax(-1)
    rejected = accepted < lengths
    residual = p
    if rejected.any():
        slot = accepted.clamp(max=block - 1)
        q = draft_logits[rows, slot].float() - row_max[rows, slot][:, None]
        q = exp_(q.div_(temperature[:, None]).sub_(log_sum[rows, slot][:, None]))
        # p - q loses digits only where it is small against p; the law then moves by 1e-7 p(x) at most.
        residual = torch.where(rejected[:, None], (p - q).clamp_(min=0.0), p)

    noise = exponentials(seed, position + 1 + accepted, position, TARGET, target_logits.shape[-1])
    best, token = (residual / noise).max(-1)
    empty = rejected & (best == 0)  # p = q up to rounding: nothing is left to draw from, and p itself is right
    if empty.any():
        fallback, choice = (p / noise).max(-1)
        best, token = torch.where(empty, fallback, best), torch.where(empty, choice, token)
    return accepted, token.masked_fill(~(best > 0), -1)  # a broken row has best = NaN
