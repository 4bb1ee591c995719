"""A block of queries against each row's own cached keys and values, split over the context.

    s = scale q k^T,  s = softcap tanh(s / softcap),  out = softmax(s over the keys that the query may read) v

Flash-decoding (Dao et al. 2023) in two launches. The T queries of the G heads that share a K/V head are packed as the
rows ``t * G + g`` of one matrix, so a program reads a key once for all of them. The first kernel gives each program one
row tile, one K/V head and one split of the context, which it walks in tiles of BS keys with an online softmax; the
second puts the splits of each query together, in order of position.

    q [B, T, Hq, D], k_cache [B, C, Hkv, D], v_cache [B, C, Hkv, Dv], lengths [B] -> out [B, T, Hq, Dv]
    part [B, Hkv, splits, T*G, Dv] fp32: sums of exp2(s - max) v;  stats [B, Hkv, splits, 2, T*G] fp32: max, sum of exp2

The host never learns a length. A split is SPLIT keys, or as many as let PROGRAMS // Hkv splits cover the keys that the
row reads: a function of that row's own length, so the row has the same bits in any batch and any capacity. The grid
follows from shapes and C; programs behind a row's last split leave at once.

Bytes, S keys read of each row: K and V, B S Hkv (D + Dv) itemsize, once; the partials, 4 B splits Hq T Dv, written and
read back. At B = 1, S = 32k, Hkv = 8, D = Dv = 128, bf16 that is 134 MB (31 us at 4.3 TB/s), and for T = 8, G = 4 in 32
splits of 1024 keys 4.2 MB written and read, which the L2 cache can hold: 6 %. Splits of 256 keys would make it 25 %.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(b_x):
    # The exponential form saturates without overflow but cancels near 0, where a quotient of polynomials does not.
    b_x2 = b_x * b_x
    b_near = b_x * ((b_x2 + 105.0) * b_x2 + 945.0) / ((15.0 * b_x2 + 420.0) * b_x2 + 945.0)
    b_far = 1.0 - 2.0 / (tl.exp(2.0 * b_x) + 1.0)
    return tl.where(tl.abs(b_x) < 0.75, b_near, b_far)


@triton.jit
def _cut(p_length, T, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, BS: tl.constexpr):
    # Of one batch row: its length, the first key that any of its queries may read, the keys of a split.
    length = tl.load(p_length).to(tl.int32)
    if WINDOW is None:
        first = length * 0
    else:
        first = tl.maximum(length - T - WINDOW + 1, 0)
    split = tl.maximum(tl.cdiv(tl.cdiv(length - first, MOST), BS) * BS, SPLIT)
    return length, first, split


@triton.jit(do_not_specialize=["T", "splits"])
def _split_kernel(
    q,
    k_cache,
    v_cache,
    lengths,
    part,
    stats,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_length,
    scale,
    T,
    splits,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Row tiles of one head are neighbours in the grid: the second one finds its keys in the L2 cache.
    tiles = tl.cdiv(T * G, BM)
    i_h = (tl.program_id(0) // tiles).to(tl.int64)
    i_m = tl.program_id(0) % tiles
    i_split = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    length, first, split = _cut(lengths + i_b * stride_length, T, WINDOW, SPLIT, MOST, BS)
    start = first + i_split * split
    if start >= length:
        return
    end = tl.minimum(start + split, length)

    o_m = i_m * BM + tl.arange(0, BM)
    o_t = o_m // G
    o_d = tl.arange(0, BD)
    o_dv = tl.arange(0, BDV)
    m_m = o_m < T * G
    m_d = o_d < D
    m_dv = o_dv < DV
    o_position = length - T + o_t

    # [BM, BD]
    p_q = q + i_b * stride_qb + (o_t * stride_qt + (i_h * G + o_m % G) * stride_qh)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)

    o_k = tl.arange(0, BS)[:, None]
    p_k = k_cache + i_b * stride_kb + start.to(tl.int64) * stride_ks + i_h * stride_kh + o_k * stride_ks + o_d[None, :]
    p_v = v_cache + i_b * stride_vb + start.to(tl.int64) * stride_vs + i_h * stride_vh + o_k * stride_vs + o_dv[None, :]
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, BDV], tl.float32)
    for i_s in tl.range(start, end, BS):
        o_s = i_s + tl.arange(0, BS)
        m_s = o_s < end
        # [BS, BD]
        b_k = tl.load(p_k, mask=m_s[:, None] & m_d[None, :], other=0.0)
        if UPCAST:
            b_k = b_k.to(tl.float32)
        # [BM, BS]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if SOFTCAP is None:
            b_s = b_s * (scale * LOG2E)
        else:
            b_s = _tanh(b_s * (scale / SOFTCAP)) * (SOFTCAP * LOG2E)
        m_read = m_s[None, :]
        if CAUSAL:
            m_read = m_read & (o_s[None, :] <= o_position[:, None])
        if WINDOW is not None:
            m_read = m_read & (o_s[None, :] > o_position[:, None] - WINDOW)
        b_s = tl.where(m_read, b_s, float("-inf"))

        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        # A query that has read no key yet has a maximum of -inf, and -inf - -inf is NaN.
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_scale = tl.exp2(b_max - b_ref)
        b_max = b_new
        b_sum = b_sum * b_scale + tl.sum(b_p, 1)
        # [BS, BDV]
        b_v = tl.load(p_v, mask=m_s[:, None] & m_dv[None, :], other=0.0)
        if UPCAST:
            b_v = b_v.to(tl.float32)
        b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_scale[:, None], input_precision="ieee")
        p_k += BS * stride_ks
        p_v += BS * stride_vs

    o_split = ((i_b * HKV + i_h) * splits + i_split) * (T * G)
    # [BM, BDV]
    tl.store(part + o_split * DV + o_m[:, None] * DV + o_dv[None, :], b_out, mask=m_m[:, None] & m_dv[None, :])
    # [BM]
    tl.store(stats + o_split * 2 + o_m, b_max, mask=m_m)
    tl.store(stats + o_split * 2 + T * G + o_m, b_sum, mask=m_m)


@triton.jit(do_not_specialize=["T", "splits"])
def _combine_kernel(
    part,
    stats,
    lengths,
    out,
    stride_length,
    T,
    splits,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    i_m = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    length, first, split = _cut(lengths + i_b * stride_length, T, WINDOW, SPLIT, MOST, BS)
    live = tl.cdiv(length - first, split)
    o_dv = tl.arange(0, BDV)
    m_dv = o_dv < DV

    b_max = tl.full([], float("-inf"), tl.float32)
    b_sum = tl.zeros([], tl.float32)
    b_out = tl.zeros([BDV], tl.float32)
    for i_p in tl.range(0, live, BP):
        o_p = i_p + tl.arange(0, BP)
        m_p = o_p < live
        o_split = ((i_b * HKV + i_h) * splits + o_p) * (T * G)
        # [BP]
        b_part_max = tl.load(stats + o_split * 2 + i_m, mask=m_p, other=float("-inf"))
        b_part_sum = tl.load(stats + o_split * 2 + T * G + i_m, mask=m_p, other=0.0)
        # [BP, BDV]
        p_part = part + (o_split + i_m)[:, None] * DV + o_dv[None, :]
        b_part = tl.load(p_part, mask=m_p[:, None] & m_dv[None, :], other=0.0)

        b_new = tl.maximum(b_max, tl.max(b_part_max, 0))
        b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_scale = tl.exp2(b_max - b_ref)
        b_weight = tl.exp2(b_part_max - b_ref)
        b_max = b_new
        b_sum = b_sum * b_scale + tl.sum(b_weight * b_part_sum, 0)
        b_out = b_out * b_scale + tl.sum(b_weight[:, None] * b_part, 0)

    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)
    # [BDV]
    o_query = (i_b * T + i_m // G) * (HKV * G) + i_h * G + i_m % G
    tl.store(out + o_query * DV + o_dv, b_out, mask=m_dv)


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The twin of :func:`dspark_fast.reference.block_attention`: same arguments, same result, up to rounding.

    Args:
        q: ``[B, T, Hq, D]``; fp32, fp16 or bf16, the caches too. The last axis of every tensor is contiguous, the
            others have any strides. T is meant to be at most 16: beyond that the prompt's attention is faster.
        k_cache, v_cache: ``[B, C, Hkv, D]`` and ``[B, C, Hkv, Dv]``, the block's own K/V stored already.
        lengths: int32 or int64 ``[B]``, at most C each. Nothing at or behind a row's length is read, nor, with a
            window, anything before its first query's.
        scale, causal, window, softcap: as in the reference.

    Returns:
        ``[B, T, Hq, Dv]`` in the dtype of ``q``, contiguous. A query that may read no key (a length of 0, or one below
        T with ``causal``, outside the reference's domain) gives zeros.
    """
    batch, block, heads, dim = q.shape
    capacity, kv_heads, dim_v = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    out = torch.empty(batch, block, heads, dim_v, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    rows = block * (heads // kv_heads)
    chosen = launch.parameters("block_attention", q.device)
    wide, wide_v = (max(16, triton.next_power_of_2(d)) for d in (dim, dim_v))
    widest, itemsize = max(wide, wide_v), k_cache.element_size()
    key_tile = min(128, max(16, chosen["TILE_BYTES"] // (widest * itemsize)))
    # fp32 products run on the FMA units, whose operands are registers: more than 16 rows would spill.
    most_rows = 16 if itemsize == 4 else min(64, max(16, chosen["ACCUMULATOR"] // widest))
    row_tile = min(most_rows, max(16, triton.next_power_of_2(rows)))
    most = max(1, chosen["PROGRAMS"] // kv_heads)
    reach = capacity if window is None else min(capacity, block + window - 1)
    splits = max(1, min(most, triton.cdiv(reach, chosen["SPLIT"])))

    part = torch.empty(batch, kv_heads, splits, rows, dim_v, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, kv_heads, splits, 2, rows, dtype=torch.float32, device=q.device)
    shared = {"T": block, "splits": splits, "HKV": kv_heads, "G": rows // block, "DV": dim_v, "BDV": wide_v}
    shared |= {"BS": key_tile, "SPLIT": chosen["SPLIT"], "MOST": most, "WINDOW": window}
    _split_kernel[triton.cdiv(rows, row_tile) * kv_heads, splits, batch](
        q,
        k_cache,
        v_cache,
        lengths,
        part,
        stats,
        *q.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *lengths.stride(),
        scale=scale,
        D=dim,
        BD=wide,
        BM=row_tile,
        CAUSAL=causal,
        SOFTCAP=softcap,
        UPCAST=launch.interpreted(),
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
        **shared,
    )
    _combine_kernel[rows, kv_heads, batch](
        part, stats, lengths, out, *lengths.stride(), **shared, **launch.parameters("block_attention_combine", q.device)
    )
    return out
