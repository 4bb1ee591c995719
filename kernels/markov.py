"""The Markov walk: logits U + W2 f(previous token) drawn slot by slot, left to right over the block.

One launch a slot and one at the end for the vanilla head, two a slot for the gated and rnn heads, whatever the batch:

    step     programs over V    every program finds the previous slot's winner again from all programs' winners, then
                                walks its tiles: W2 tile times features, plus U, rounded, written if kept, raced
    feature  rows x rank        gated, rnn: the feature of the previous token, before each step
    finish   rows               the winners of all slots, and the softmax statistics that verification reads

A launch ends where the next slot must know the token, so no atomic, no barrier across programs and no host is needed.
Bytes of a slot: W2 once (V R 2), U once, the kept logits once. V = 151,936, R = 256 in bf16: 77.8 MB of W2, which is
99 % of it at B = 1 and 57 % at B = 64 with kept fp32 logits. W2 does not depend on the token, so its first tiles may
be asked for before the previous launch is done (``PDL``, Hopper and later).

A row's bits do not depend on the batch: the dot always has 16 rows, a program always the same tiles in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from . import launch
from .markov_bound import known_score, may_win
from .markov_head import BM, dot, feature_launcher, rounded, token_before
from .noise import DRAFT, exponentials, exponentials_at
from .sampling import cut_rows
from .statistics import GROUP, new_groups, row_statistics


class MarkovWalk(NamedTuple):
    """What a walk drafted; as ``reference.MarkovWalk``: q(x) = exp((logits_x - row_max) / temperature - log_sum)."""

    tokens: torch.Tensor  # [B, T] int64, -1 from the first slot on whose logits have no finite maximum
    logits: torch.Tensor | None  # [B, T, V], or [B, T, D], in logits_dtype: corrected, before the temperature
    row_max: torch.Tensor  # [B, T] fp32
    log_sum: torch.Tensor  # [B, T] fp32, 0 at temperature 0


@triton.jit
def _merge(total, top, more_total, more_top, divisor, here):
    """Two sums of exp((l - top) / T) as one, where ``here``."""
    both = tl.maximum(top, more_top)
    shift = tl.where(both == float("-inf"), 0.0, both)
    merged = total * tl.exp((top - shift) / divisor) + more_total * tl.exp((more_top - shift) / divisor)
    return tl.where(here, merged, total), tl.where(here, both, top)


@triton.jit
def _wanted(base_logits, floor, o_v, m_v, batch, stride_base, stride_floor, GROUPS: tl.constexpr):
    """The tokens [BV] that are a candidate of any row: only their rows of W2 are read."""
    wanted = tl.zeros_like(o_v)
    for i_group in range(GROUPS):
        o_b = i_group * BM + tl.arange(0, BM).to(tl.int64)
        m_tile = (o_b < batch)[:, None] & m_v[None, :]
        b_u = tl.load(base_logits + o_b[:, None] * stride_base + o_v[None, :], mask=m_tile, other=0.0)  # [BM, BV]
        b_floor = tl.load(floor + o_b * stride_floor, mask=o_b < batch, other=0.0)[:, None]
        cut = b_u.to(tl.float32) < b_floor
        wanted = tl.maximum(wanted, tl.max((m_tile & (cut == 0)).to(tl.int32), 0))
    return wanted > 0


@triton.jit
def _features(w1, feature, run_previous, here, o_b, batch, rank, stride_w1, RP: tl.constexpr):
    """The features of a group of rows, [BM, RP]: W1 of their previous tokens, or what the head's kernel made of it."""
    o_r = tl.arange(0, RP)[None, :]
    if feature is None:
        b_previous = tl.sum(tl.where(here, run_previous, 0), 0)
        p_feature = w1 + b_previous[:, None] * stride_w1 + o_r
    else:
        p_feature = feature + o_b[:, None] * rank + o_r
    return tl.load(p_feature, mask=(o_b < batch)[:, None] & (o_r < rank), other=0.0)


@triton.jit(do_not_specialize=["slot", "batch", "block"])
def _step_kernel(
    base_logits,
    w1,
    w2,
    feature,
    anchor,
    temperature,
    seed,
    position,
    floor,
    vocabulary,
    group_best,
    tile_best,
    tile_token,
    w2_norms,
    logits,
    best,
    token,
    top,
    total,
    batch,
    vocab,
    rank,
    slot,
    stride_base_b,
    stride_base_t,
    stride_w1,
    stride_w2,
    stride_floor,
    stride_groups,
    stride_logits,
    block,
    TILES: tl.constexpr,
    PRODUCT: tl.constexpr,
    LOGITS: tl.constexpr,
    FIRST: tl.constexpr,
    COUPLED: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_P: tl.constexpr,
    GROUPS: tl.constexpr,
    RP: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One slot for all rows, on this program's tiles of V; its winners and sums go to [slot, rows, PARTS]."""
    i_part, i_t = tl.program_id(0), slot.to(tl.int64)
    base_logits += i_t * stride_base_t
    if floor is not None:
        floor += i_t
    o_r, o_m = tl.arange(0, RP), tl.arange(0, BM)
    m_r = o_r < rank
    if PDL:
        # The first tile is on its way to L2 while the previous launch ends; what that launch wrote comes after.
        LINE: tl.constexpr = 1024 // w2.dtype.element_ty.primitive_bitwidth
        o_v = tl.minimum(i_part * BV + tl.arange(0, BV), vocab - 1)
        p_lines = w2 + o_v[:, None].to(tl.int64) * stride_w2 + tl.arange(0, RP // LINE)[None, :] * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_lines], dtype=tl.int32, is_pure=False, pack=1
        )
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()

    # Running winner, its token, largest logit and sum of every row: [GROUPS, BM]
    o_group = tl.arange(0, GROUPS)[:, None]
    run_best = tl.full([GROUPS, BM], float("-inf"), tl.float32)
    run_token = tl.full([GROUPS, BM], 2147483647, tl.int32)
    run_top = tl.full([GROUPS, BM], float("-inf"), tl.float32)
    run_total = tl.zeros([GROUPS, BM], tl.float32)
    # The previous token of every row
    run_previous = tl.zeros([GROUPS, BM], tl.int64)
    if w1 is not None and feature is None:
        for i_group in range(GROUPS):
            o_b = i_group * BM + o_m.to(tl.int64)
            b_previous = token_before(anchor, best, token, vocabulary, i_t, o_b, batch, FIRST, PARTS, PARTS_P)
            run_previous = tl.where(o_group == i_group, b_previous[None, :], run_previous)
    if w2_norms is not None:
        # |f| / T of every row and a score that its winner reaches: [GROUPS, BM]
        run_reach = tl.zeros([GROUPS, BM], tl.float32)
        run_known = tl.full([GROUPS, BM], float("-inf"), tl.float32)
        for i_group in range(GROUPS):
            o_b = i_group * BM + o_m.to(tl.int64)
            b_f = _features(w1, feature, run_previous, o_group == i_group, o_b, batch, rank, stride_w1, RP)
            p_tiles = o_b * block + i_t
            reach, known = known_score(
                b_f.to(PRODUCT),
                w2,
                tile_best,
                tile_token,
                temperature,
                p_tiles,
                o_b,
                batch,
                vocab,
                rank,
                stride_w2,
                COUPLED,
                TILES,
            )
            run_reach = tl.where(o_group == i_group, reach[None, :], run_reach)
            run_known = tl.where(o_group == i_group, known[None, :], run_known)

    for i_tile in tl.range(i_part, tl.cdiv(vocab, BV), PARTS, num_stages=STAGES):
        o_v = i_tile * BV + tl.arange(0, BV)
        m_v = o_v < vocab
        m_read = m_v
        if floor is not None:
            m_read = _wanted(base_logits, floor, o_v, m_v, batch, stride_base_b, stride_floor, GROUPS)
        if w2_norms is not None:
            # A tile whose W2 is not read is raced without its bias, which is no more than what ruled it out.
            p_groups = group_best + ((o_group * BM + o_m[None, :]) * block + i_t) * stride_groups
            m_row = o_group * BM + o_m[None, :] < batch
            wins = may_win(p_groups, w2_norms, run_reach, run_known, m_row, i_tile, vocab, BV, LOGITS)
            m_read = o_v < tl.where(wins, vocab, 0)
        if w2 is not None:
            p_w2 = w2 + o_v[:, None].to(tl.int64) * stride_w2 + o_r[None, :]
            b_w2 = tl.load(p_w2, mask=m_read[:, None] & m_r[None, :], other=0.0)  # [BV, RP]
        for i_group in range(GROUPS):
            o_b = i_group * BM + o_m.to(tl.int64)
            m_b = o_b < batch
            m_tile = m_b[:, None] & m_v[None, :]
            p_base = base_logits + o_b[:, None] * stride_base_b + o_v[None, :]
            b_u = tl.load(p_base, mask=m_tile, other=float("-inf")).to(tl.float32)  # [BM, BV]
            b_l = b_u
            if w2 is not None:
                b_f = _features(w1, feature, run_previous, o_group == i_group, o_b, batch, rank, stride_w1, RP)
                b_l += rounded(dot(b_f.to(PRODUCT), b_w2.to(PRODUCT), UPCAST), PRODUCT)
            b_l = rounded(b_l, LOGITS)
            if floor is not None:
                b_floor = tl.load(floor + o_b * stride_floor, mask=m_b, other=float("-inf"))
                b_l = tl.where(b_u < b_floor[:, None], float("-inf"), b_l)  # a NaN stays
            if logits is not None:
                p_logits = logits + o_b[:, None] * stride_logits + i_t * vocab + o_v[None, :]
                tl.store(p_logits, b_l.to(LOGITS), mask=m_tile)

            b_temperature = tl.load(temperature + o_b, mask=m_b, other=0.0)
            sampled = b_temperature > 0
            divisor = tl.where(sampled, b_temperature, 1.0)
            b_key = b_l
            b_top = tl.max(b_l, 1)
            b_total = tl.zeros([BM], tl.float32)
            if tl.max(b_temperature, 0) > 0:
                b_position = tl.load(position + o_b, mask=m_b, other=0)[:, None]
                b_anchor = b_position * 0 if COUPLED else b_position
                b_seed = tl.load(seed + o_b, mask=m_b, other=0)[:, None]
                if vocabulary is None:
                    b_e = exponentials(b_seed, b_position + 1 + slot, b_anchor, DRAFT, i_tile * BV, BM, BV)
                else:
                    b_tokens = tl.load(vocabulary + o_v, mask=m_v, other=0).to(tl.int32)[None, :]
                    b_e = exponentials_at(b_seed, b_position + 1 + slot, b_anchor, DRAFT, b_tokens)
                b_key = tl.where(sampled[:, None], tl.div_rn(b_l, divisor[:, None]) - tl.log(b_e), b_l)
                shift = tl.where(b_top == float("-inf"), 0.0, b_top)[:, None]
                b_total = tl.sum(tl.exp(tl.div_rn(b_l - shift, divisor[:, None])), 1)
            broken = m_tile & ((b_l != b_l) | (b_l == float("inf")))
            b_key = tl.where(broken, float("inf"), tl.where(m_tile, b_key, float("-inf")))
            b_best = tl.max(b_key, 1)
            b_token = tl.min(tl.where(b_key == b_best[:, None], o_v[None, :], 2147483647), 1)

            # Tiles come in rising order: a later one wins only if it is larger.
            here = o_group == i_group
            better = here & (b_best[None, :] > run_best)
            run_best = tl.where(better, b_best[None, :], run_best)
            run_token = tl.where(better, b_token[None, :], run_token)
            run_total, run_top = _merge(run_total, run_top, b_total[None, :], b_top[None, :], divisor[None, :], here)

    p_out = (i_t * batch + o_group * BM + o_m[None, :]) * PARTS + i_part
    m_out = o_group * BM + o_m[None, :] < batch
    tl.store(best + p_out, run_best, mask=m_out)
    tl.store(token + p_out, run_token, mask=m_out)
    tl.store(top + p_out, run_top, mask=m_out)
    tl.store(total + p_out, run_total, mask=m_out)


@triton.jit(do_not_specialize=["batch"])
def _finish_kernel(
    best,
    token,
    top,
    total,
    temperature,
    vocabulary,
    tokens,
    row_max,
    log_sum,
    batch,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_P: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One row: every slot's token, -1 from the first that failed on, and its softmax statistics."""
    i_b = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature + i_b)
    o_part = tl.arange(0, PARTS_P)
    m_part = o_part < PARTS
    failed = False
    for i_t in range(BLOCK):
        p_part = (i_t * batch + i_b) * PARTS + o_part
        b_best = tl.load(best + p_part, mask=m_part, other=float("-inf"))  # [PARTS_P]
        b_token = tl.load(token + p_part, mask=m_part, other=2147483647)
        winner = tl.max(b_best, 0)
        failed = failed | (tl.abs(winner) == float("inf"))
        chosen = tl.min(tl.where(b_best == winner, b_token, 2147483647), 0)
        chosen = chosen.to(tl.int64)
        if vocabulary is not None:
            chosen = tl.load(vocabulary + tl.where(failed, 0, chosen))
        tl.store(tokens + i_b * BLOCK + i_t, tl.where(failed, -1, chosen))
        b_top = tl.load(top + p_part, mask=m_part, other=float("-inf"))
        largest = tl.max(b_top, 0)
        log_total = 0.0
        if not WHOLE:  # not all tokens were looked at
            largest, log_total = float("nan"), float("nan")
        elif temperature > 0:
            b_total = tl.load(total + p_part, mask=m_part, other=0.0)
            log_total = tl.log(tl.sum(b_total * tl.exp(tl.div_rn(b_top - largest, temperature)), 0))
        tl.store(row_max + i_b * BLOCK + i_t, largest)
        tl.store(log_sum + i_b * BLOCK + i_t, log_total)


def markov_walk(
    base_logits: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    anchor: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    head: str = "vanilla",
    head_weight: torch.Tensor | None = None,
    head_bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    candidates: int = 0,
    keep_logits: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    coupled: bool = False,
    w2_norms: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> MarkovWalk:
    """Draft a block; the twin of ``reference.markov_walk``, which says what every argument and result is.

    Here temperature (fp32), seed and position (int64) are tensors [B]. Every tensor is contiguous along its last axis.
    A float8 ``w2`` is multiplied in w1's dtype: half the bytes of a step, and q is still what was sampled from.
    With ``w2_norms`` a tile of W2 that cannot hold the winner is not read, which leaves the tokens as they are: greedy
    and coupled only, where nothing asks for q. One launch more, over U.
    """
    batch, block, vocab = base_logits.shape
    device, table = base_logits.device, launch.parameters("markov_step", base_logits.device)
    rank = 0 if w2 is None else w2.shape[-1]
    ranks, width = max(16, triton.next_power_of_2(rank)), table["BV"]
    if w2 is not None:
        width = max(16, min(width, table["TILE_BYTES"] // (ranks * w2.dtype.itemsize)))
    parts = min(table["PARTS"], triton.cdiv(vocab, width))
    tokens = torch.empty(batch, block, dtype=torch.int64, device=device)
    row_max = torch.empty(batch, block, dtype=torch.float32, device=device)
    log_sum = torch.empty(batch, block, dtype=torch.float32, device=device)
    logits = torch.empty(batch, block, vocab, dtype=logits_dtype, device=device) if keep_logits else None
    if not tokens.numel():
        return MarkovWalk(tokens, logits, row_max, log_sum)

    floor = _candidate_floor(base_logits, candidates) if 0 < candidates < vocab else None
    bounds, whole = (None, None, None), w2_norms is None
    if width < GROUP.value:  # a tile is less than what a norm is of: all are read
        w2_norms = None
    if w2_norms is not None:
        race = {"temperature": temperature, "seed": seed, "position": position} if coupled else {"temperature": None}
        groups = new_groups(base_logits)
        bests, winners, _ = row_statistics(base_logits, **race, group_best=groups, sums=False)
        bounds = (groups.flatten(2), bests, winners)
    best, top, total = torch.empty(3, block, batch, parts, dtype=torch.float32, device=device)
    token = torch.empty(block, batch, parts, dtype=torch.int32, device=device)
    ahead = bool(table["PDL"]) and w2 is not None and ranks * w2.dtype.itemsize >= 128  # it asks for whole lines
    options = {name: table[name] for name in ("num_warps", "maxnreg") if name in table}
    if ahead:
        options["launch_pdl"] = True
    chain = {"PARTS": parts, "PARTS_P": triton.next_power_of_2(parts), "UPCAST": launch.interpreted()}
    product, feature, next_feature = torch.float32, None, None
    if w2 is not None:
        product = w1.dtype if w2.dtype.itemsize == 1 else w2.dtype
        if head != "vanilla":
            feature = torch.empty(batch, rank, dtype=product, device=device)
            next_feature = feature_launcher(head, w1, head_weight, head_bias, hidden, feature, vocabulary, ranks, chain)
    for slot in range(block):
        if next_feature is not None:
            next_feature(slot, anchor, best, token)
        _step_kernel[(parts,)](
            base_logits,
            w1,
            w2,
            feature,
            anchor,
            temperature,
            seed,
            position,
            floor,
            vocabulary,
            *bounds,
            w2_norms,
            logits,
            best,
            token,
            top,
            total,
            batch,
            vocab,
            rank,
            slot,
            *base_logits.stride()[:2],
            0 if w1 is None else w1.stride(0),
            0 if w2 is None else w2.stride(0),
            block,
            0 if w2_norms is None else bounds[0].stride(1),
            block * vocab,
            block,
            TILES=1 if w2_norms is None else bounds[1].shape[-1],
            PRODUCT=_TRITON[product],
            LOGITS=_TRITON[logits_dtype],
            FIRST=slot == 0,
            COUPLED=coupled,
            GROUPS=triton.next_power_of_2(triton.cdiv(batch, BM.value)),
            RP=ranks,
            BV=width,
            STAGES=table["num_stages"],
            PDL=ahead,
            **chain,
            **options,
        )
    _finish_kernel[(batch,)](
        best,
        token,
        top,
        total,
        temperature,
        vocabulary,
        tokens,
        row_max,
        log_sum,
        batch,
        BLOCK=block,
        PARTS=parts,
        PARTS_P=chain["PARTS_P"],
        WHOLE=whole,
        num_warps=4,
    )
    return MarkovWalk(tokens, logits, row_max, log_sum)


_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _candidate_floor(base_logits: torch.Tensor, candidates: int) -> torch.Tensor:
    """The candidates-th largest base logit of every slot, fp32 [B, T]: four launches and a fill before the walk."""
    groups = new_groups(base_logits)
    best, _, total = row_statistics(base_logits, temperature=None, group_best=groups)
    top_k = torch.full((base_logits.shape[0],), candidates, dtype=torch.int64, device=base_logits.device)
    return cut_rows(base_logits, best, total, groups, temperature=None, top_k=top_k)[0]
