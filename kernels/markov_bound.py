"""Ruling out tiles of W2 in a walk that needs the winner alone (greedy and coupled), so that they are not read.

A token's score is its logit (or race key) before the bias plus w f / T. By Cauchy and Schwarz no token of a tile scores
more than the tile's largest value before the bias + |f| max |w| / T, and the winner scores at least what the token that
was best before the bias does. What is left to read depends on the drafter: bench/markov_tries.py measures it for one
row; with more rows a tile is read if any of them needs it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .statistics import GROUP


@triton.jit
def known_score(
    b_f,
    w2,
    tile_best,
    tile_token,
    temperature,
    p_row,
    o_b,
    batch,
    vocab,
    rank,
    stride_w2,
    COUPLED: tl.constexpr,
    TILES: tl.constexpr,
):
    """|f| / T, and a score that the best token before the bias surely reaches, so the winner does: [BM] each."""
    m_b = o_b < batch
    TILES_P: tl.constexpr = triton.next_power_of_2(TILES)
    o_tiles = tl.arange(0, TILES_P)[None, :]
    m_tiles = m_b[:, None] & (o_tiles < TILES)
    b_bests = tl.load(tile_best + p_row[:, None] * TILES + o_tiles, mask=m_tiles, other=float("-inf"))  # [BM, TILES_P]
    b_tokens = tl.load(tile_token + p_row[:, None] * TILES + o_tiles, mask=m_tiles, other=2147483647)
    b_best = tl.max(b_bests, 1)
    b_token = tl.min(tl.where(b_bests == b_best[:, None], b_tokens, 2147483647), 1)
    b_token = tl.minimum(b_token, vocab - 1).to(tl.int64)  # a broken row has no token
    RP: tl.constexpr = b_f.shape[1]
    o_r = tl.arange(0, RP)[None, :]
    p_w2 = w2 + b_token[:, None] * stride_w2 + o_r
    b_w2 = tl.load(p_w2, mask=m_b[:, None] & (o_r < rank), other=0.0).to(tl.float32)  # [BM, RP]
    b_f = b_f.to(tl.float32)
    b_temperature = tl.load(temperature + o_b, mask=m_b, other=1.0)
    divisor = tl.where(b_temperature > 0, b_temperature, 1.0)
    # The walk's own dot is rounded, to 8 bits at worst: that much less is sure.
    b_dot = tl.sum(b_f * b_w2, 1) - 2.0**-7 * tl.sum(tl.abs(b_f * b_w2), 1)
    known = b_best + b_dot / divisor
    if not COUPLED:  # the values before the bias are without noise, so of a row that is sampled nothing is known
        known = tl.where(b_temperature > 0, float("-inf"), known)
    return tl.sqrt(tl.sum(b_f * b_f, 1)) / divisor, known


@triton.jit
def may_win(p_groups, w2_norms, run_reach, run_known, m_row, i_tile, vocab, BV: tl.constexpr, LOGITS: tl.constexpr):
    """Whether a token of the tile may win in any row: the largest U (or key) + |f| |w| / T against what is known.

    Widened by more than the roundings that it does not see: 2^-6 of the dot, which is rounded to 8 bits at worst, and
    of both sides 2^-6 where logits are rounded, too, else 2^-20; and as much of 32 for a key, whose parts l / T and
    log e (at most 23) may cancel. A NaN anywhere reads the tile.
    """
    SLACK: tl.constexpr = 2.0**-20 if tl.float32 == LOGITS else 2.0**-6
    norm = 0.0
    base = tl.full(run_reach.shape, float("-inf"), tl.float32)
    for i in tl.static_range(BV // GROUP):
        i_group = i_tile * (BV // GROUP) + i
        norm = tl.maximum(
            norm, tl.load(w2_norms + i_group, mask=i_group * GROUP < vocab, other=0.0), tl.PropagateNan.ALL
        )
        base = tl.maximum(base, tl.load(p_groups + i_group, mask=m_row, other=float("-inf")))
    bound = base + run_reach * norm * (1 + 2.0**-6) + SLACK * (tl.abs(base) + tl.abs(run_known) + 32)
    ruled_out = (bound < run_known) | (base == float("-inf")) | (m_row == 0)
    return tl.max(tl.max((ruled_out == 0).to(tl.int32), 1), 0) > 0
