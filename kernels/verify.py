"""Verification from logits: how many drafted tokens the target keeps, and the token that follows them.

Three launches in rejection mode, two in greedy and coupled mode; three more where top-k, top-p or min-p cut a row (in
coupled mode four). No probability is written to memory and nothing is sorted or synchronised.

    statistics  rows of the target [B, T + 1] x tiles of V    the maximum, its token, sum exp((l - max) / T)
    resample    rows [B] x tiles of V                         judges the block from T scalars, then races the one row
                                                              that follows it: argmax of (p - q)+ / e, or of p / e
    finish      rows [B]                                      the best tile

Bytes: each target row up to the draft's length is read once; then one target row and one draft row. At B = 1, V =
151,936 and 7 drafts in bf16 with q in fp32 that is 3.3 MB, under 1 us: launches, not bytes, are its time. Every
program of ``resample`` judges its row again from the partial results of all tiles (8 x 38 numbers that lie in L2):
cheaper than a launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .noise import TARGET, accept_uniform, exponentials
from .sampling import cut_rows
from .statistics import new_groups, row_statistics


@triton.jit
def _judge_equal(tokens, draft_tokens, length, o_t, block):
    """How many drafts are the target's own tokens [TP], before the first that is not; and the token after them."""
    kept = (tokens == draft_tokens) & (draft_tokens >= 0) & (o_t < length)
    accepted = tl.min(tl.where(kept, block, o_t))
    return accepted, tl.sum(tl.where(o_t == accepted, tokens, 0))


@triton.jit(do_not_specialize=["slots"])
def _resample_kernel(
    target_logits,
    draft_tokens,
    draft_logits,
    draft_row_max,
    draft_log_sum,
    lengths,
    temperature,
    seed,
    position,
    tile_best,
    tile_sum,
    floor,
    total,
    accepted_out,
    race_best,
    race_token,
    vocab,
    slots,
    stride_target_b,
    stride_target_t,
    stride_tokens_b,
    stride_draft_b,
    stride_draft_t,
    stride_statistics_b,
    TILES: tl.constexpr,
    TILES_P: tl.constexpr,
    RACE_TILES: tl.constexpr,
    TP: tl.constexpr,
    BV: tl.constexpr,
    CUT: tl.constexpr,
):
    i_b, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_temperature, b_length = tl.load(temperature + i_b), tl.load(lengths + i_b).to(tl.int32)
    if (b_temperature == 0) | (b_length < 0):
        return
    b_seed, b_position = tl.load(seed + i_b), tl.load(position + i_b)
    o_t = tl.arange(0, TP)
    m_t = o_t < b_length

    # A drafted -1 ends the block.
    b_token = tl.load(draft_tokens + i_b * stride_tokens_b + o_t, mask=m_t, other=-1).to(tl.int32)
    b_length = tl.min(tl.where(b_token < 0, o_t, TP))
    m_t = o_t < b_length
    b_token = tl.minimum(b_token, vocab - 1)

    # The target's rows, each from its tiles: [TP, TILES_P]
    m_row = o_t <= b_length
    o_tiles = tl.arange(0, TILES_P)[None, :]
    p_tiles = (i_b * slots + o_t[:, None]) * TILES + o_tiles
    m_tiles = m_row[:, None] & (o_tiles < TILES)
    b_tops = tl.load(tile_best + p_tiles, mask=m_tiles, other=float("-inf"))
    b_top = tl.max(b_tops, 1)
    b_scaled_top = tl.div_rn(b_top, b_temperature)
    if CUT:
        b_floor = tl.load(floor + i_b * slots + o_t, mask=m_row, other=0.0)
        b_total = tl.load(total + i_b * slots + o_t, mask=m_row, other=1.0)
    else:
        b_sums = tl.load(tile_sum + p_tiles, mask=m_tiles, other=0.0)
        b_sums *= tl.exp(tl.div_rn(b_tops, b_temperature) - b_scaled_top[:, None])
        b_floor = tl.full([TP], float("-inf"), tl.float32)
        b_total = tl.sum(tl.where(m_tiles, b_sums, 0.0), 1)

    # Leviathan et al., Algorithm 1: keep x iff u q(x) < p(x), strictly, so that p = 0 is never kept.
    p_target = target_logits + i_b * stride_target_b + o_t * stride_target_t
    b_scaled = tl.div_rn(tl.load(p_target + b_token, mask=m_t, other=0.0).to(tl.float32), b_temperature)
    b_p = tl.where(b_scaled < b_floor, 0.0, tl.exp(b_scaled - b_scaled_top) / b_total)
    p_draft = draft_logits + i_b * stride_draft_b + o_t * stride_draft_t
    p_statistics = i_b * stride_statistics_b + o_t
    b_row_max = tl.load(draft_row_max + p_statistics, mask=m_t, other=0.0)
    b_log_sum = tl.load(draft_log_sum + p_statistics, mask=m_t, other=0.0)
    b_drafted = tl.load(p_draft + b_token, mask=m_t, other=0.0).to(tl.float32)
    b_q = tl.exp(tl.div_rn(b_drafted - b_row_max, b_temperature) - b_log_sum)
    b_u = accept_uniform(b_seed, b_position + 1 + o_t, b_position)
    kept = m_t & (b_u * b_q < b_p)
    accepted = tl.min(tl.where(kept, TP, o_t))
    rejected = accepted < b_length

    # Only the row behind the kept drafts is drawn from: [BV]
    here = o_t == accepted
    scaled_top = tl.sum(tl.where(here, b_scaled_top, 0.0))
    row_floor = tl.sum(tl.where(here, b_floor, 0.0)) if CUT else float("-inf")
    row_total = tl.sum(tl.where(here, b_total, 0.0))
    o_v = i_tile * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    p_row = target_logits + i_b * stride_target_b + accepted * stride_target_t
    b_scaled = tl.div_rn(tl.load(p_row + o_v, mask=m_v, other=float("-inf")).to(tl.float32), b_temperature)
    b_p = tl.where(b_scaled < row_floor, 0.0, tl.exp(b_scaled - scaled_top) / row_total)
    b_e = tl.reshape(exponentials(b_seed, b_position + 1 + accepted, b_position, TARGET, i_tile * BV, 1, BV), [BV])
    b_race = tl.where(m_v, tl.div_rn(b_p, b_e), -1.0)
    p_out = i_b * 2 * RACE_TILES + i_tile
    _store_winner(b_race, o_v, race_best + p_out + RACE_TILES, race_token + p_out + RACE_TILES)
    if rejected:
        p_rest = draft_logits + i_b * stride_draft_b + accepted * stride_draft_t
        row_max = tl.sum(tl.where(here, b_row_max, 0.0))
        log_sum = tl.sum(tl.where(here, b_log_sum, 0.0))
        b_draft = tl.load(p_rest + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
        b_rest = b_p - tl.exp(tl.div_rn(b_draft - row_max, b_temperature) - log_sum)
        b_rest = tl.where(b_rest < 0.0, 0.0, b_rest)  # a NaN stays: maximum() would drop it
        b_race = tl.where(m_v, tl.div_rn(b_rest, b_e), -1.0)
    _store_winner(b_race, o_v, race_best + p_out, race_token + p_out)
    if i_tile == 0:
        tl.store(accepted_out + i_b, accepted.to(tl.int64))


@triton.jit
def _store_winner(b_race, o_v, best, token):
    """The largest of a tile and the lowest token that has it; a NaN anywhere wins, as token -1."""
    broken = tl.max((b_race != b_race).to(tl.int32), 0) > 0
    b_best = tl.max(b_race, 0)
    b_token = tl.min(tl.where(b_race == b_best, o_v, 2147483647), 0)
    tl.store(best, tl.where(broken, float("inf"), b_best))
    tl.store(token, tl.where(broken, -1, b_token))


@triton.jit(do_not_specialize=["slots"])
def _finish_kernel(
    draft_tokens,
    lengths,
    temperature,
    tile_best,
    tile_token,
    race_best,
    race_token,
    accepted_out,
    next_token,
    slots,
    stride_tokens_b,
    TILES: tl.constexpr,
    TILES_P: tl.constexpr,
    RACE_TILES: tl.constexpr,
    RACE_TILES_P: tl.constexpr,
    TP: tl.constexpr,
    REJECTION: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    b_length = tl.load(lengths + i_b).to(tl.int32)
    if b_length < 0:  # a finished row
        tl.store(accepted_out + i_b, tl.zeros([], tl.int64))
        tl.store(next_token + i_b, tl.zeros([], tl.int64))
        return
    if REJECTION:
        if tl.load(temperature + i_b) != 0:
            o_race = tl.arange(0, RACE_TILES_P)
            p_race = i_b * 2 * RACE_TILES + o_race
            m_tiles = o_race < RACE_TILES
            b_best = tl.load(race_best + p_race, mask=m_tiles, other=-1.0)
            if tl.max(b_best, 0) == 0.0:  # an empty residual (p = q up to rounding): p itself is right
                p_race += RACE_TILES
                b_best = tl.load(race_best + p_race, mask=m_tiles, other=-1.0)
            b_token = tl.load(race_token + p_race, mask=m_tiles, other=2147483647)
            b_token = tl.min(tl.where(b_best == tl.max(b_best, 0), b_token, 2147483647), 0)
            tl.store(next_token + i_b, b_token.to(tl.int64))
            return
    o_t, o_tiles = tl.arange(0, TP), tl.arange(0, TILES_P)
    p_tiles = (i_b * slots + o_t[:, None]) * TILES + o_tiles[None, :]
    m_tiles = (o_t <= b_length)[:, None] & (o_tiles < TILES)[None, :]
    b_bests = tl.load(tile_best + p_tiles, mask=m_tiles, other=float("-inf"))  # [TP, TILES_P]
    b_tokens = tl.load(tile_token + p_tiles, mask=m_tiles, other=2147483647)
    b_best = tl.max(b_bests, 1)
    b_own = tl.min(tl.where(b_bests == b_best[:, None], b_tokens, 2147483647), 1)
    b_own = tl.where(tl.abs(b_best) < float("inf"), b_own, -1)
    b_drafted = tl.load(draft_tokens + i_b * stride_tokens_b + o_t, mask=o_t < b_length, other=-1).to(tl.int32)
    accepted, token = _judge_equal(b_own, b_drafted, b_length, o_t, TP)
    tl.store(accepted_out + i_b, accepted.to(tl.int64))
    tl.store(next_token + i_b, token.to(tl.int64))


def _draft_statistics(
    draft_logits: torch.Tensor, draft_lengths: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``row_max`` and ``log_sum`` [B, T] of a drafter that does not say them."""
    tops, _, sums = row_statistics(draft_logits, lengths=draft_lengths - 1, temperature=temperature)
    row_max = tops.amax(-1)
    divisor = temperature.masked_fill(temperature == 0, 1.0)[:, None, None]
    return row_max, (sums * ((tops - row_max[..., None]) / divisor).exp()).sum(-1).log()


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_lengths: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    mode: str = "rejection",
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    draft_row_max: torch.Tensor | None = None,
    draft_log_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge a block; the twin of ``reference.verify``, which says what every argument and result is.

    Here the parameters of a row are tensors [B] (temperature fp32, seed and position int64, top_k int64, top_p and
    min_p fp32), and a cut that is None costs nothing. Without ``draft_row_max`` and ``draft_log_sum`` there are more
    launches: the walk returns them, so pass them.
    """
    batch, slots, vocab = target_logits.shape
    device = target_logits.device
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    next_token = torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return accepted, next_token
    rejection, race = mode == "rejection", {"seed": seed, "position": position, "sums": False}
    cut = mode != "greedy" and not (top_k is None and top_p is None and min_p is None)
    rows = {"lengths": draft_lengths, "temperature": None if mode == "greedy" else temperature}

    groups = new_groups(target_logits) if cut else None
    first = {"sums": mode != "greedy"} if rejection or cut or mode == "greedy" else race
    best, token, total = row_statistics(target_logits, **rows, **first, group_best=groups)
    floor = None
    if cut:
        floor, total = cut_rows(target_logits, best, total, groups, top_k=top_k, top_p=top_p, min_p=min_p, **rows)
        if not rejection:
            best, token, _ = row_statistics(target_logits, **rows, **race, floor=floor)

    table = launch.parameters("resample", device)
    tiles = triton.cdiv(vocab, table["BV"])
    shape = {
        "TILES": best.shape[-1],
        "TILES_P": triton.next_power_of_2(best.shape[-1]),
        "RACE_TILES": tiles,
        "TP": triton.next_power_of_2(slots),
    }
    race_best = race_token = best
    if rejection:
        if slots == 1:  # nothing was drafted, so nothing is read from here
            draft_logits = target_logits
            draft_row_max = draft_log_sum = best
        elif draft_row_max is None or draft_log_sum is None:
            draft_row_max, draft_log_sum = _draft_statistics(draft_logits, draft_lengths, temperature)
        race_best = torch.empty(batch, 2, tiles, dtype=torch.float32, device=device)
        race_token = torch.empty(batch, 2, tiles, dtype=torch.int32, device=device)
        _resample_kernel[(batch, tiles)](
            target_logits,
            draft_tokens,
            draft_logits,
            draft_row_max,
            draft_log_sum,
            draft_lengths,
            temperature,
            seed,
            position,
            best,
            total,
            floor,
            total,
            accepted,
            race_best,
            race_token,
            vocab,
            slots,
            *target_logits.stride()[:2],
            draft_tokens.stride(0),
            *draft_logits.stride()[:2],
            draft_row_max.stride(0),
            **shape,
            CUT=cut,
            **table,
        )
    _finish_kernel[(batch,)](
        draft_tokens,
        draft_lengths,
        temperature,
        best,
        token,
        race_best,
        race_token,
        accepted,
        next_token,
        slots,
        draft_tokens.stride(0),
        **shape,
        RACE_TILES_P=triton.next_power_of_2(tiles),
        REJECTION=rejection,
        num_warps=4,
    )
    return accepted, next_token
