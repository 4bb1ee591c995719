"""The Markov head: a low-rank bias of the previous token, walked left to right over the block.

Paper section on the sequential head; shapes and concatenation orders as in the released checkpoints. With e(x) = W1[x]
the corrected logits of slot j are U_j + B_j, where the bias B_j = W2 f_j and the feature f_j in R^R is

    vanilla   e(x)
    gated     sigmoid(Wg [h_j ; e(x)] + b) * e(x)
    rnn       tanh(o), with (a, c, o) = J [s ; e(x) ; h_j] + b and s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(c), s_0 = 0

and x is the token before slot j (slot 0: the anchor). The rnn's output is made from the old state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling import DRAFT, Number, exponentials, exponentials_at, per_row, softmax_statistics

HEADS = ("vanilla", "gated", "rnn")
NORM_GROUP = 32  # rows of W2 that share a norm in ``markov_norms``


class MarkovWalk(NamedTuple):
    """What a walk drafted: q(x) = exp((logits_x - row_max) / temperature - log_sum)."""

    tokens: Tensor  # [B, T] int64, -1 from the first slot on whose logits have no finite maximum
    logits: Tensor | None  # [B, T, V] ([B, T, D] with a vocabulary) in logits_dtype: corrected, before the temperature
    row_max: Tensor  # [B, T] fp32
    log_sum: Tensor  # [B, T] fp32, 0 at temperature 0


def markov_feature(
    embedding: Tensor,
    state: Tensor | None,
    *,
    head: str = "vanilla",
    head_weight: Tensor | None = None,
    head_bias: Tensor | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One step of a head: what W2 multiplies, and the next state.

    embedding: e(x), [..., R]; state: [..., R] for rnn (None starts at 0), passed through by the others;
    head_weight: gated [R, H + R], rnn [3R, 2R + H]; head_bias: [R], [3R] or None; hidden: [..., H].
    Returns (feature [..., R], state). Raises ValueError for a head that is not in HEADS.
    vanilla and gated have no state, so leading dimensions may include the slots; rnn takes one slot at a time.
    """
    if head == "vanilla":
        return embedding, state
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    dtype = head_weight.dtype
    embedding, hidden = embedding.to(dtype), hidden.to(dtype)
    if head == "gated":
        gate = F.linear(torch.cat([hidden, embedding], -1), head_weight, head_bias).sigmoid()
        return gate * embedding, state
    if state is None:
        state = torch.zeros_like(embedding)
    joint = F.linear(torch.cat([state, embedding, hidden], -1), head_weight, head_bias)
    gate, candidate, output = joint.chunk(3, -1)
    gate = gate.sigmoid()
    return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


def markov_features(
    prev_tokens: Tensor,
    w1: Tensor,
    *,
    head: str = "vanilla",
    head_weight: Tensor | None = None,
    head_bias: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """What W2 multiplies, teacher-forced, all slots of a block at once (the rnn unrolled). Differentiable.

    prev_tokens: int64 [..., T], the token before each slot; w1: [V, R]; hidden: [..., T, H] (gated, rnn);
    head_weight, head_bias as in ``markov_feature``. Returns [..., T, R].
    """
    embedding = F.embedding(prev_tokens, w1)
    options = {"head": head, "head_weight": head_weight, "head_bias": head_bias}
    if head != "rnn":
        return markov_feature(embedding, None, hidden=hidden, **options)[0]
    features, state = [], None
    for slot in range(prev_tokens.shape[-1]):
        feature, state = markov_feature(embedding[..., slot, :], state, hidden=hidden[..., slot, :], **options)
        features.append(feature)
    return torch.stack(features, -2) if features else embedding


def markov_bias(prev_tokens: Tensor, w1: Tensor, w2: Tensor, **options: object) -> Tensor:
    """Teacher-forced bias of a whole block: W2 times :func:`markov_features`, whose options it takes. Differentiable.

    w2: [V, R] or any subset of its rows. Returns [..., T, rows of w2] in w2's dtype.
    """
    feature = markov_features(prev_tokens, w1, **options)
    return F.linear(feature.to(w2.dtype), w2)  # one product for the block, so W2 is read once


@torch.no_grad()
def markov_norms(w2: Tensor) -> Tensor:
    """The largest Euclidean norm among each 32 rows of W2: [V, R] -> fp32 [ceil(V / 32)]. Once per drafter."""
    norms = w2.float().norm(dim=-1)
    return F.pad(norms, (0, -len(norms) % NORM_GROUP)).view(-1, NORM_GROUP).amax(-1)


@torch.no_grad()
def markov_walk(
    base_logits: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    anchor: Tensor,
    *,
    temperature: Tensor | Number,
    seed: Tensor | int,
    position: Tensor | int,
    head: str = "vanilla",
    head_weight: Tensor | None = None,
    head_bias: Tensor | None = None,
    hidden: Tensor | None = None,
    candidates: int = 0,
    keep_logits: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    coupled: bool = False,
    w2_norms: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> MarkovWalk:
    """Draft a block: at each slot add the bias of the token before it, then take the argmax or a sample.

    base_logits: U, [B, T, V]; w1, w2: [V, R], or None for independent slots (rank 0, the authors' DFlash); a float8 w2
    is multiplied in w1's dtype;
    anchor: int64 [B]; temperature (0 is greedy), seed, position (absolute, of the anchor): [B]; hidden: [B, T, H].
    candidates: 0 for all, else each slot draws among the tokens whose *base* logit is >= its candidates-th largest
    (whole ties); the others get -inf in ``logits``, so q is the truncated distribution, as sampled.
    logits_dtype: U + B is rounded to it first; the rounded values are sampled from, summed and kept.
    coupled: noise is keyed with anchor position 0, as ``verify(mode="coupled")`` expects.
    w2_norms: from ``markov_norms``, for a greedy or coupled walk without kept logits: lets a kernel leave out rows of
    W2 that cannot win. The tokens stay what they are; row_max and log_sum are NaN, since not all logits were made.
    vocabulary: int64 [D], ascending, if only these tokens can be drafted (FR-Spec, Zhao et al. 2025): base_logits and
    logits are then [B, T, D] and w2 [D, R], column i being token vocabulary[i]; w1 stays [V, R], tokens stay tokens.
    The bias comes from a product in w2's dtype and is then added in fp32. Slot j's token stands at position + 1 + j.

    A slot whose logits have no finite maximum (a NaN, a +inf, all -inf) gives token -1, and so do the slots after it,
    whose other values then mean nothing. Raises ValueError for an unknown head.
    """
    batch, block, vocab_size = base_logits.shape
    device = base_logits.device
    if w2 is not None and w2.dtype.itemsize == 1:
        w2 = w2.to(w1.dtype)
    temperature = per_row(temperature, batch, torch.float32, device)
    greedy = temperature == 0
    all_greedy = bool(greedy.all())
    divisor = temperature.masked_fill(greedy, 1.0)[:, None]

    ids = _candidate_ids(base_logits, candidates) if 0 < candidates < vocab_size else None
    log_noise = None
    if not all_greedy:  # the noise does not depend on the tokens: one batched call for the whole block
        seed = per_row(seed, batch, torch.int64, device)[:, None]
        position = per_row(position, batch, torch.int64, device)[:, None]
        slots = position + 1 + torch.arange(block, device=device)
        counter = (seed, slots, torch.zeros_like(position) if coupled else position, DRAFT)
        if vocabulary is not None:  # a token's noise is its own, whatever its column: coupled, the target has the same
            drafted = vocabulary.expand(batch, block, -1) if ids is None else vocabulary[ids.clamp(min=0)]
            noise = exponentials_at(*counter, drafted)
        else:
            noise = exponentials(*counter, vocab_size) if ids is None else exponentials_at(*counter, ids.clamp(min=0))
        log_noise = noise.log_()
        if greedy.any():
            log_noise = log_noise.masked_fill(greedy[:, None, None], 0.0)

    tokens = anchor.new_empty(batch, block, dtype=torch.int64)
    logits = None
    if keep_logits:
        fill = 0.0 if ids is None else -torch.inf
        logits = torch.full(base_logits.shape, fill, dtype=logits_dtype, device=device)
    row_max = torch.empty(batch, block, device=device)
    log_sum = torch.empty(batch, block, device=device)
    previous, state = anchor, None
    failed = torch.zeros(batch, dtype=torch.bool, device=device)
    for slot in range(block):
        slot_ids = None if ids is None else ids[:, slot]
        row = base_logits[:, slot].float() if ids is None else _take(base_logits[:, slot].float(), slot_ids)
        if w1 is not None:
            feature, state = markov_feature(
                F.embedding(previous, w1),
                state,
                head=head,
                head_weight=head_weight,
                head_bias=head_bias,
                hidden=None if hidden is None else hidden[:, slot],
            )
            row = row + _project(feature.to(w2.dtype), w2, slot_ids).float()
        row = row.to(logits_dtype)
        if keep_logits and ids is None:
            logits[:, slot] = row
        elif keep_logits:
            # Padding points at a token's own place too: amax leaves that token's value, padding being -inf.
            # (NaN wins an amax, so a broken row stays broken.)
            logits[:, slot].scatter_reduce_(-1, slot_ids.clamp(min=0), row, "amax")
        row = row.float()

        if all_greedy:
            best, choice = row.max(-1)
            row_max[:, slot], log_sum[:, slot] = best, 0.0
        else:
            best, choice = (row / divisor).sub_(log_noise[:, slot]).max(-1)
            row_max[:, slot], log_sum[:, slot] = softmax_statistics(row, temperature)
        failed = failed | ~best.isfinite()
        choice = choice if slot_ids is None else slot_ids.gather(-1, choice[:, None])[:, 0]
        choice = choice if vocabulary is None else vocabulary[choice]
        previous = choice.masked_fill(failed, 0)  # any valid row: what follows a failed slot is not used
        tokens[:, slot] = choice.masked_fill(failed, -1)
    if w2_norms is not None:
        row_max, log_sum = torch.full_like(row_max, torch.nan), torch.full_like(log_sum, torch.nan)
    return MarkovWalk(tokens, logits, row_max, log_sum)


def _candidate_ids(base_logits: Tensor, candidates: int) -> Tensor:
    """Ids of the tokens >= the candidates-th largest, rising (ties go to the lowest id), -1 in front as padding."""
    smallest = base_logits.topk(candidates, -1).values[..., -1:]
    kept = int((base_logits >= smallest).sum(-1).max()) if base_logits.numel() else candidates
    values, ids = base_logits.topk(max(kept, candidates), -1)
    return ids.masked_fill_(values < smallest, -1).sort(-1).values


def _take(row: Tensor, ids: Tensor) -> Tensor:
    """row [B, V] at ids [B, K]; padding (-1) reads -inf."""
    return row.gather(-1, ids.clamp(min=0)).masked_fill_(ids < 0, -torch.inf)


def _project(feature: Tensor, w2: Tensor, ids: Tensor | None) -> Tensor:
    """feature [B, R] -> bias [B, V], or [B, K] reading only the rows of w2 at ids [B, K]."""
    if ids is None:
        return F.linear(feature, w2)
    return (w2[ids.clamp(min=0)] @ feature[..., None])[..., 0]
