"""The noise, the cut (temperature, top-k, top-p, min-p) and the draw that drafting and verification share.

Noise is a function of (seed, position, anchor, stream, token) and of nothing else: Philox under the row's 64-bit seed
at counter (token // 4, position, anchor, stream), word token % 4. Inputs that are called ``[B]`` below may also be
Python numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import philox

DRAFT = 0  # drafted tokens; coupled mode uses it for the target too
ACCEPT = 1  # acceptance uniforms
TARGET = 2  # resampled, bonus and first tokens, plain steps
SEEDS = 3  # row seeds, expanded from one seed

LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1
NUCLEUS_GUESS = 128  # a nucleus is looked for among this many tokens first, then among 16 times as many, and so on
SMALLEST_EXPONENT = -87.0  # exp(-87) = 1.6e-38 is the last normal fp32

Number = int | float


def per_row(value: Tensor | Number, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number, or a tensor of shape [], [1] or [batch], as a [batch] tensor. Raises RuntimeError on another shape."""
    return torch.as_tensor(value, dtype=dtype, device=device).expand(batch)


def accept_uniform(seed: Tensor, position: Tensor, anchor: Tensor) -> Tensor:
    """The uniform that judges the drafted token at ``position``: fp32 in [0, 1), broadcast shape of the inputs.

    seed, position, anchor: int64. With the strict test ``u * q < p`` a token of p = 0 is never accepted and one of
    p >= q > 0 always is, since u is held below 1. All 32 bits are used: with the 24 that fp32 has below 1 a draft of
    p / q = 1e-8 would be kept six times too often. Small values are exact, large ones rounded.
    """
    zero = torch.zeros((), dtype=torch.int64, device=position.device)
    word = philox(zero, position, anchor, zero + ACCEPT, seed)[0]
    return (word.float() * 2.0**-32).clamp_(max=LARGEST_UNIFORM)


def _to_exponential(words: Tensor) -> Tensor:
    """Words 0 .. 2^32 - 1 as fp32 (any rounding to nearest), turned in place into Exp(1) variables.

    u = (word + 1/2) * 2^-32 in fp32, e = -log1p(-u). In a race the smallest e / p wins, so what has to be right is the
    tail u -> 0: there word + 1/2 is exact up to 2^23, u goes down to 2^-33 (e = 1.2e-10), and a token of probability
    1e-9 still has about four words under which it beats a token of probability 1. In the tail u -> 1 fp32 rounds u to
    1 from word 2^32 - 128 on, which would give e = inf: u is held at 1 - 2^-24, so e ends at 16.64 instead of 22.87.
    That happens once in 2^25 draws, to a token that was losing anyway; the law moves by less than 1e-7 in relative
    terms. (The mirrored form, e = -log(u), would put the coarse end where the winners are.)
    """
    return words.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_()


def exponentials(seed: Tensor, position: Tensor, anchor: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Exp(1) noise of a whole vocabulary row.

    seed, position, anchor: int64, broadcast to [...]; ``position`` is the position of the token to be drawn, ``anchor``
    that of the round's anchor (0 in coupled mode). Returns fp32 [..., vocab_size], finite and above 0.
    """
    groups = torch.arange((vocab_size + 3) // 4, device=position.device)
    stream = torch.full((), stream, dtype=torch.int64, device=position.device)
    words = philox(groups, position[..., None], anchor[..., None], stream, seed[..., None])
    noise = torch.empty(*words[0].shape, 4, dtype=torch.float32, device=position.device)
    for lane, word in enumerate(words):
        noise[..., lane].copy_(word)
    return _to_exponential(noise).flatten(-2)[..., :vocab_size]


def exponentials_at(seed: Tensor, position: Tensor, anchor: Tensor, stream: int, tokens: Tensor) -> Tensor:
    """The same noise at chosen tokens only: tokens int64 [..., K] -> fp32 [..., K]. Worth it for K well below V / 4."""
    stream = torch.full((), stream, dtype=torch.int64, device=position.device)
    words = philox(tokens >> 2, position[..., None], anchor[..., None], stream, seed[..., None])
    return _to_exponential(torch.stack(words, -1).gather(-1, (tokens & 3)[..., None])[..., 0].float())


def gumbel_argmax(scaled_logits: Tensor, exponentials: Tensor) -> Tensor:
    """argmax(l - log e): a draw from softmax(l), since -log e is a standard Gumbel variable.

    scaled_logits, exponentials: fp32 [..., V]. Returns int64 [...]; ties go to the lowest id. A row with a NaN or
    +inf, or of -inf alone, gives -1.
    """
    best, token = (scaled_logits - exponentials.log()).max(-1)
    return token.masked_fill_(~best.isfinite(), -1)


def greedy_argmax(logits: Tensor) -> Tensor:
    """argmax [..., V] -> int64 [...]; ties to the lowest id, -1 for a row that has no finite maximum."""
    best, token = logits.max(-1)
    return token.masked_fill_(~best.isfinite(), -1)


def exp_(x: Tensor) -> Tensor:
    """exp in place for x <= 0, with 1.6e-38 as its least value, which changes no sum that holds a 1.

    On a CPU torch's exp takes five times as long where the result is a zero made from -inf and thirty times as long
    where it is subnormal (5.4 ms against 0.2 ms for 6 x 49152), and a low temperature makes most of a row so.
    """
    return x.clamp_(min=SMALLEST_EXPONENT).exp_()


def softmax_statistics(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """row_max and log_sum, fp32 [...], such that softmax(l / T) is exp((l - row_max) / T - log_sum).

    logits: [..., V]; temperature: fp32, broadcasts against [...]. Where the temperature is 0 log_sum is 0, which gives
    the maximum probability 1.
    """
    row_max = logits.amax(-1).float()
    greedy = temperature == 0
    if greedy.all():
        return row_max, torch.zeros_like(row_max)
    divisor = temperature.masked_fill(greedy, 1.0)[..., None]
    log_sum = exp_((logits.float() - row_max[..., None]).div_(divisor)).sum(-1).log_()
    return row_max, log_sum.masked_fill(greedy, 0.0)


def cut_logits(
    logits: Tensor,
    temperature: Tensor | Number,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
) -> Tensor:
    """Logits divided by the temperature, cut tokens at -inf. Cuts in the order of transformers' processors.

    logits: [B, V] or [B, T, V], any float dtype; the parameters: scalars or [B], neutral at 0, 1.0 and 0.0, where they
    cost nothing. Returns fp32 of the same shape, ``logits`` itself if there is nothing to do: do not write to it.

    top-k keeps every value >= the k-th. top-p renormalises what is left and keeps a token iff the mass strictly above
    its value is < top_p. min-p keeps a token iff its probability is >= min_p times the largest. All three are
    thresholds on the value, so whole ties stay (transformers keeps an arbitrary part of a tie at the edge of top-p),
    and the maximum always does. At temperature 0 a row keeps its first maximum alone, undivided. NaN stays NaN.
    """
    batch, vocab_size = logits.shape[0], logits.shape[-1]
    shape = (batch, *[1] * (logits.ndim - 1))

    def rows(value: Tensor | Number, dtype: torch.dtype) -> Tensor:
        return per_row(value, batch, dtype, logits.device).reshape(shape)

    temperature, top_k = rows(temperature, torch.float32), rows(top_k, torch.int64)
    top_p, min_p = rows(top_p, torch.float32), rows(min_p, torch.float32)

    scaled = logits.float()
    greedy = temperature == 0
    if not (greedy | (temperature == 1)).all():
        scaled = scaled / temperature.masked_fill(greedy, 1.0)  # never times the inverse: it rounds differently

    threshold = ordered = None
    cut_k = (top_k > 0) & (top_k < vocab_size)
    if cut_k.any():
        # One more than asked for: where it is smaller than the k-th value, no tie reaches past the k-th.
        ordered = scaled.topk(int(top_k[cut_k].max()) + 1, -1).values
        last = (top_k - 1).clamp(0, ordered.shape[-1] - 1).expand(*ordered.shape[:-1], 1)
        threshold = ordered.gather(-1, last).masked_fill_(~cut_k, -torch.inf)
    if (top_p < 1).any():
        threshold = _nucleus_threshold(scaled, top_p, threshold, ordered)
    if (min_p > 0).any():
        relative = scaled.amax(-1, keepdim=True) + min_p.log()
        threshold = relative if threshold is None else torch.maximum(threshold, relative)
    if threshold is not None:
        scaled = torch.where(scaled < threshold, -torch.inf, scaled)  # half the time of masked_fill; NaN stays
    if greedy.any():
        first = torch.arange(vocab_size, device=logits.device) == scaled.argmax(-1, keepdim=True)
        scaled = scaled.masked_fill(greedy & ~first, -torch.inf)
    return scaled


def _nucleus_threshold(scaled: Tensor, top_p: Tensor, floor: Tensor | None, ordered: Tensor | None) -> Tensor:
    """The smallest value that top-p keeps, [..., 1].

    scaled: [..., V]; top_p: [B, 1(, 1)]; floor: top-k's threshold, or None; ordered: the largest values of each row in
    falling order, or None. Sorting 49152 values takes 1.4 ms a row, the largest 128 of them 0.05 ms: more are looked at
    only where those at hand do not hold the nucleus. After a top-k they always do, and hold its whole mass besides.
    """
    vocab_size = scaled.shape[-1]
    if floor is None:
        floor = torch.full_like(scaled[..., :1], -torch.inf)
    if ordered is None:
        ordered = scaled.topk(min(NUCLEUS_GUESS, vocab_size), -1).values
    top = ordered[..., :1]

    def weights(values: Tensor) -> Tensor:
        return exp_(values - top).masked_fill_(values < floor, 0.0)

    total = weights(ordered).sum(-1, keepdim=True)
    holds_all = ordered[..., -1:] < floor
    if not holds_all.all():
        total = torch.where(holds_all, total, weights(scaled).sum(-1, keepdim=True))
    while True:
        above = weights(ordered)
        above = above.cumsum(-1) - above  # mass that stands before a value; for the first of a tie, mass above it
        inside = above < top_p * total
        # Enough if the last value is outside, or cut by the floor, or if nothing is asked (or to be had: NaN).
        enough = ~inside[..., -1:] | (ordered[..., -1:] <= floor) | (top_p >= 1)
        if ordered.shape[-1] == vocab_size or enough.all():
            break
        ordered = scaled.topk(min(16 * ordered.shape[-1], vocab_size), -1).values
    count = inside.sum(-1, keepdim=True).clamp_(min=1)  # top_p = 0 keeps the maximum
    edge = ordered.gather(-1, count - 1)
    return torch.where(top_p < 1, torch.maximum(edge, floor), floor)


def expand_seeds(seed: int, prompts: int, returns: int = 1) -> Tensor:
    """One seed to a seed per row: int64 [prompts * returns], prompt by prompt, on the CPU.

    seed: any int, taken modulo 2^64. Row (i, j) is Philox under ``seed`` at counter (i, j, 0, 3), its first word low
    and its second high: it depends on its two indices and not on how many prompts or returns there are.
    """
    key = torch.tensor((seed + 2**63) % 2**64 - 2**63)
    zero = torch.zeros((), dtype=torch.int64)
    low, high, _, _ = philox(torch.arange(prompts)[:, None], torch.arange(returns), zero, zero + SEEDS, key)
    return (low | high << 32).flatten()
