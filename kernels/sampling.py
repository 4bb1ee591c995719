"""The cut of a row of logits: temperature, top-k, top-p, min-p. (The noise is in noise.py.)

``cut_rows`` finds the value below which a row's tokens are cut, in three launches and without a sort:

    bound   rows            from the maxima of groups of 32 tokens: a value that at least `rank` tokens reach. It is the
                            rank-th largest group maximum, to 16 bits: a lower bound of the rank-th largest token
    gather  rows x tiles    the tokens that reach it, about `rank` of them, into a list
    select  rows            digit by digit the largest value at which the summed weight of the list reaches a target:
                            k tokens for top-k, top_p of the mass for top-p

so V logits are read twice (once by ``row_statistics``) and everything else works on a few thousand numbers. A nucleus
that is larger than the list (a nearly flat row) is searched for in the row itself, by one program: right, and slow.
Order does not matter to any of it: tokens are counted, and masses are summed as integers, so the list may be filled in
any order. A histogram over digits would take two passes over V by one program, since it cannot say the mass of a digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .statistics import new_groups, row_statistics

# A nucleus is looked for among at least this many tokens: one of 0.9 in 151,936 normal logits of deviation 3 has 800 to
# 1,750 at T = 0.8.
GUESS = tl.constexpr(2048)
MASS_UNIT = tl.constexpr(2.0**-40)  # of the largest probability: 2^19 tokens sum to 2^59 at most


@triton.jit
def ordered_key(x):
    """uint32 that orders as fp32 does, without NaN; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of_key(key):
    """The fp32 that has this key."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["slots"])
def _bound_kernel(
    lengths,
    temperature,
    top_k,
    top_p,
    min_p,
    group_best,
    bound,
    count,
    vocab,
    slots,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_t = i_row // slots, i_row % slots
    if lengths is not None:
        if i_t > tl.load(lengths + i_b):
            return
    k, p, least = _cuts(top_k, top_p, min_p, i_b, vocab)
    if temperature is not None:
        if tl.load(temperature + i_b) == 0:
            return
    rank = tl.where(k > 0, k, tl.where((p < 1) | (least > 0), tl.minimum(GUESS, GROUPS // 2), 0))
    value = tl.zeros([], tl.uint32)
    for i in range(16):
        candidate = value | (tl.full([], 0x80000000, tl.uint32) >> i)
        reached = tl.zeros([], tl.int32)
        for first in range(0, GROUPS, N):
            o_g = first + tl.arange(0, N)
            b_best = tl.load(group_best + i_row * GROUPS + o_g, mask=o_g < GROUPS, other=float("-inf"))  # [N]
            reached += tl.sum(((ordered_key(b_best) >= candidate) & (o_g < GROUPS)).to(tl.int32), 0)
        value = tl.where(reached >= rank, candidate, value)
    tl.store(bound + i_row, tl.where(rank > 0, value, 0xFFFFFFFF).to(tl.int64))
    tl.store(count + i_row, tl.zeros([], tl.int32))


@triton.jit
def _cuts(top_k, top_p, min_p, i_b, vocab):
    """A row's cuts, at 0, 1.0 and 0.0 where there is none."""
    k = tl.zeros([], tl.int64)
    if top_k is not None:
        k = tl.load(top_k + i_b)
        k = tl.where(k < vocab, k, 0)
    p = 1.0
    if top_p is not None:
        p = tl.load(top_p + i_b)
    least = 0.0
    if min_p is not None:
        least = tl.load(min_p + i_b)
    return k, p, least


@triton.jit(do_not_specialize=["slots"])
def _gather_kernel(
    logits,
    lengths,
    temperature,
    bound,
    count,
    values,
    vocab,
    slots,
    stride_b,
    stride_t,
    CAPACITY: tl.constexpr,
    BV: tl.constexpr,
):
    i_row, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_t = i_row // slots, i_row % slots
    if lengths is not None:
        if i_t > tl.load(lengths + i_b):
            return
    b_temperature = 1.0
    if temperature is not None:
        b_temperature = tl.load(temperature + i_b)
        if b_temperature == 0:
            return
    least = tl.load(bound + i_row).to(tl.uint32)
    if least == 0xFFFFFFFF:  # nothing is cut
        return
    o_v = i_tile * BV + tl.arange(0, BV)
    m_v = o_v < vocab
    # [BV]
    b_l = tl.load(logits + i_b * stride_b + i_t * stride_t + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    # Compared behind the division, as it is cut: two logits may have one quotient.
    edge = value_of_key(least)
    edge = tl.where(edge == edge, edge, float("-inf"))  # 16 bits of the key of -inf are the start of a NaN's
    b_s = tl.div_rn(b_l, b_temperature)
    m_v &= b_s >= tl.div_rn(edge, b_temperature)
    found = tl.sum(m_v.to(tl.int32), 0)
    if found > 0:
        first = tl.atomic_add(count + i_row, found, sem="relaxed")
        o_list = first + tl.cumsum(m_v.to(tl.int32), 0) - 1
        p_list = values + i_row * CAPACITY + o_list
        tl.store(p_list, b_s, mask=m_v & (o_list < CAPACITY))


@triton.jit
def _weight(values, row, n, listed, temperature, top, floor, least, MASS: tl.constexpr, N: tl.constexpr):
    """Number (or mass, in MASS_UNIT) of the values that are >= floor and whose key is >= least: int64."""
    weight = tl.zeros([], tl.int64)
    for first in range(0, n, N):
        o_n = first + tl.arange(0, N)
        if listed:
            b_s = tl.load(values + o_n, mask=o_n < n, other=float("-inf"))  # [N]
        else:
            b_s = tl.div_rn(tl.load(row + o_n, mask=o_n < n, other=float("-inf")).to(tl.float32), temperature)
        b_w = tl.full([N], 1, tl.int64)
        if MASS:
            b_w = (tl.exp(b_s - top) * (1.0 / MASS_UNIT) + 0.5).to(tl.int64)
        m_n = (o_n < n) & (b_s >= floor) & (ordered_key(b_s) >= least)
        weight += tl.sum(tl.where(m_n, b_w, 0), 0)
    return weight


@triton.jit
def _value_at(values, row, n, listed, temperature, top, floor, target, MASS: tl.constexpr, N: tl.constexpr):
    """The largest value such that what is >= it (and >= floor) weighs at least ``target``, one binary digit a pass."""
    key = tl.zeros([], tl.uint32)
    for i in range(32):
        candidate = key | (tl.full([], 0x80000000, tl.uint32) >> i)
        weight = _weight(values, row, n, listed, temperature, top, floor, candidate, MASS, N)
        key = tl.where(weight >= target, candidate, key)
    return value_of_key(key)


@triton.jit
def _target(p, mass):
    """The mass that a nucleus must reach, in MASS_UNIT: the maximum alone at least."""
    return tl.maximum((p * mass * (1.0 / MASS_UNIT)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["slots"])
def _select_kernel(
    logits,
    lengths,
    temperature,
    top_k,
    top_p,
    min_p,
    tile_best,
    tile_sum,
    count,
    values,
    floor,
    total,
    vocab,
    slots,
    stride_b,
    stride_t,
    TILES: tl.constexpr,
    TILES_P: tl.constexpr,
    CAPACITY: tl.constexpr,
    N: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_t = i_row // slots, i_row % slots
    if lengths is not None:
        if i_t > tl.load(lengths + i_b):
            return
    b_temperature = 1.0
    if temperature is not None:
        b_temperature = tl.load(temperature + i_b)
        if b_temperature == 0:
            return
    o_tiles = tl.arange(0, TILES_P)
    b_bests = tl.load(tile_best + i_row * TILES + o_tiles, mask=o_tiles < TILES, other=float("-inf"))  # [TILES_P]
    b_sums = tl.load(tile_sum + i_row * TILES + o_tiles, mask=o_tiles < TILES, other=0.0)
    best = tl.max(b_bests, 0)
    top = tl.div_rn(best, b_temperature)
    whole = tl.sum(tl.where(o_tiles < TILES, b_sums * tl.exp(tl.div_rn(b_bests, b_temperature) - top), 0.0), 0)
    k, p, least = _cuts(top_k, top_p, min_p, i_b, vocab)
    cut = tl.full([], float("-inf"), tl.float32)
    if (tl.abs(best) < float("inf")) & ((k > 0) | (p < 1) | (least > 0)):
        row = logits + i_b * stride_b + i_t * stride_t
        list_ = values + i_row * CAPACITY
        listed_count = tl.load(count + i_row)
        relative = top + tl.log(least)  # -inf without min-p
        # The list will do if it fits and everything that is kept is in it.
        listed = listed_count <= CAPACITY
        inside = tl.minimum(listed_count, CAPACITY)
        if k > 0:
            listed &= listed_count >= k
        else:
            reached = _weight(list_, row, inside, True, b_temperature, top, cut, 0, True, N)
            listed &= (p >= 1) | (reached >= _target(p, whole))
            below = _weight(list_, row, inside, True, b_temperature, top, relative, 0, False, N)
            listed &= (p < 1) | (below < listed_count)
        n = tl.where(listed, listed_count, vocab)
        if k > 0:
            cut = _value_at(list_, row, n, listed, b_temperature, top, cut, k, False, N)
        if p < 1:
            reached = _weight(list_, row, n, listed, b_temperature, top, cut, 0, True, N)
            mass = tl.where(k > 0, reached.to(tl.float32) * MASS_UNIT, whole)
            # No more than there is: the sum in fp32 may be a rounding above the one in integers.
            target = tl.minimum(_target(p, mass), reached)
            cut = _value_at(list_, row, n, listed, b_temperature, top, cut, target, True, N)
        cut = tl.maximum(cut, relative)
        whole = _weight(list_, row, n, listed, b_temperature, top, cut, 0, True, N).to(tl.float32) * MASS_UNIT
    tl.store(floor + i_row, cut)
    tl.store(total + i_row, whole)


@triton.jit(do_not_specialize=["slots"])
def _apply_kernel(
    logits,
    temperature,
    tile_best,
    tile_token,
    floor,
    out,
    vocab,
    slots,
    TILES: tl.constexpr,
    TILES_P: tl.constexpr,
    BV: tl.constexpr,
):
    i_row, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_temperature = tl.load(temperature + i_row // slots)
    o_v = i_tile * BV + tl.arange(0, BV)
    b_l = tl.load(logits + i_row * vocab + o_v, mask=o_v < vocab, other=0.0).to(tl.float32)  # [BV]
    if b_temperature == 0:
        o_tiles = tl.arange(0, TILES_P)
        b_bests = tl.load(tile_best + i_row * TILES + o_tiles, mask=o_tiles < TILES, other=float("-inf"))
        b_tokens = tl.load(tile_token + i_row * TILES + o_tiles, mask=o_tiles < TILES, other=2147483647)
        first = tl.min(tl.where(b_bests == tl.max(b_bests, 0), b_tokens, 2147483647), 0)
        b_l = tl.where((o_v == first) | (b_l != b_l), b_l, float("-inf"))
    else:
        b_l = tl.div_rn(b_l, b_temperature)
        b_l = tl.where(b_l < tl.load(floor + i_row), float("-inf"), b_l)
    tl.store(out + i_row * vocab + o_v, b_l, mask=o_v < vocab)


def cut_rows(
    logits: torch.Tensor,
    tile_best: torch.Tensor,
    tile_sum: torch.Tensor,
    group_best: torch.Tensor,
    *,
    temperature: torch.Tensor | None,
    lengths: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest l / T that each row keeps, and sum exp((l - max) / T) of what it keeps: fp32 [B, S] each.

    tile_best, tile_sum, group_best: from ``row_statistics`` of the same logits, temperature and lengths. A row without
    a cut (or without a finite maximum) gives -inf and its whole sum; rows at temperature 0 are left unwritten.
    """
    batch, slots, vocab = logits.shape
    device, table = logits.device, launch.parameters("cut_rows", logits.device)
    capacity = table["CAPACITY"]
    bound = torch.empty(batch, slots, dtype=torch.int64, device=device)
    count = torch.empty(batch, slots, dtype=torch.int32, device=device)
    values = torch.empty(batch, slots, capacity, dtype=torch.float32, device=device)
    floor = torch.empty(batch, slots, dtype=torch.float32, device=device)
    total = torch.empty(batch, slots, dtype=torch.float32, device=device)
    tiles, groups = tile_best.shape[-1], group_best.shape[-1] * group_best.shape[-2]
    one_row = {name: value for name, value in table.items() if name != "CAPACITY"}
    _bound_kernel[(batch * slots,)](
        lengths, temperature, top_k, top_p, min_p, group_best, bound, count, vocab, slots, GROUPS=groups, **one_row
    )
    gather = launch.parameters("row_statistics", device)
    _gather_kernel[(batch * slots, triton.cdiv(vocab, gather["BV"]))](
        logits,
        lengths,
        temperature,
        bound,
        count,
        values,
        vocab,
        slots,
        *logits.stride()[:2],
        CAPACITY=capacity,
        **gather,
    )
    _select_kernel[(batch * slots,)](
        logits,
        lengths,
        temperature,
        top_k,
        top_p,
        min_p,
        tile_best,
        tile_sum,
        count,
        values,
        floor,
        total,
        vocab,
        slots,
        *logits.stride()[:2],
        TILES=tiles,
        TILES_P=triton.next_power_of_2(tiles),
        CAPACITY=capacity,
        **one_row,
    )
    return floor, total


def cut_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits divided by the temperature, cut tokens at -inf; the twin of ``reference.cut_logits``.

    logits: [B, V] or [B, S, V]; the parameters: [B] (fp32, int64, fp32, fp32), None for no such cut. Returns fp32 of
    the same shape. Verification has no need of it: it compares with the floor of ``cut_rows`` where it reads a logit.
    """
    shape, vocab = logits.shape, logits.shape[-1]
    if not logits.numel():
        return torch.empty(shape, dtype=torch.float32, device=logits.device)
    logits = logits.reshape(shape[0], -1, vocab).contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    groups = new_groups(logits)
    best, token, total = row_statistics(logits, temperature=temperature, group_best=groups)
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    floor, _ = cut_rows(logits, best, total, groups, temperature=temperature, **cuts)
    table = launch.parameters("row_statistics", logits.device)
    tiles = best.shape[-1]
    _apply_kernel[(logits.shape[0] * logits.shape[1], tiles)](
        logits,
        temperature,
        best,
        token,
        floor,
        out,
        vocab,
        logits.shape[1],
        TILES=tiles,
        TILES_P=triton.next_power_of_2(tiles),
        **table,
    )
    return out.reshape(shape)
