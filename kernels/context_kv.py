"""Injected context to cached keys and values of one draft layer, in one launch.

    k = rope(weight * (k / sqrt(mean(k^2) + eps)), cos, sin);  k_cache[b, offsets[b] + n] = k,  v_cache likewise v

    k [B, N, Hkv, D], v [B, N, Hkv, Dv], cos, sin [B, N, D] -> k_cache [B, C, Hkv, D], v_cache [B, C, Hkv, Dv], in place

A program takes one batch row and a tile of BR of its N * Hkv head vectors; tiles behind ``counts[b]`` leave at once.
The two halves of a key are held apart, because RoPE turns each channel with its partner D / 2 away.

Every rounding of the reference is made where the reference makes it: after the norm, the weight, each product and the
sum. fp16 and bf16 then differ from it only where the order of the sum of squares moves a rounding; fp32 needs
``enable_fp_fusion=False`` for the same, and that costs nothing here.

Bytes: B N (2 Hkv (D + Dv) itemsize + 8 D), K and V in and out and the fp32 angles. A round at B = 1, N = 8, Hkv = 8,
D = 128, bf16 moves 74 KB, so its time is the launch; a prompt of 32k tokens moves 302 MB, 70 us at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _round(b_x, TYPE: tl.constexpr):
    return b_x.to(TYPE).to(tl.float32)


@triton.jit
def _store_kernel(
    k,
    v,
    weight,
    cos,
    sin,
    k_cache,
    v_cache,
    offsets,
    counts,
    eps,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_cos_b,
    stride_cos_n,
    stride_sin_b,
    stride_sin_n,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    stride_offset,
    stride_count,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    TYPE: tl.constexpr,
):
    i_r = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    o_r = i_r * BR + tl.arange(0, BR)
    rows = tl.load(counts + i_b * stride_count).to(tl.int32) * HKV
    if i_r * BR >= rows:
        return
    m_r = (o_r < rows)[:, None]
    o_n = (o_r // HKV).to(tl.int64)[:, None]
    o_h = (o_r % HKV).to(tl.int64)[:, None]
    o_slot = tl.load(offsets + i_b * stride_offset).to(tl.int64) + o_n

    # [BR, BDV]
    o_dv = tl.arange(0, BDV)[None, :]
    m_v = m_r & (o_dv < DV)
    b_v = tl.load(v + i_b * stride_vb + o_n * stride_vn + o_h * stride_vh + o_dv, mask=m_v, other=0.0)

    # [BR, BH], and [1, BH] for the weight
    HALF: tl.constexpr = D // 2
    o_d = tl.arange(0, BH)[None, :]
    m_d = o_d < HALF
    m_k = m_r & m_d
    p_k = k + i_b * stride_kb + o_n * stride_kn + o_h * stride_kh + o_d
    p_cos = cos + i_b * stride_cos_b + o_n * stride_cos_n + o_d
    p_sin = sin + i_b * stride_sin_b + o_n * stride_sin_n + o_d
    b_k1 = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
    b_k2 = tl.load(p_k + HALF, mask=m_k, other=0.0).to(tl.float32)
    b_cos1 = _round(tl.load(p_cos, mask=m_k, other=0.0).to(tl.float32), TYPE)
    b_cos2 = _round(tl.load(p_cos + HALF, mask=m_k, other=0.0).to(tl.float32), TYPE)
    b_sin1 = _round(tl.load(p_sin, mask=m_k, other=0.0).to(tl.float32), TYPE)
    b_sin2 = _round(tl.load(p_sin + HALF, mask=m_k, other=0.0).to(tl.float32), TYPE)
    b_weight1 = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_weight2 = tl.load(weight + HALF + o_d, mask=m_d, other=0.0).to(tl.float32)

    b_rms = tl.rsqrt(tl.sum(b_k1 * b_k1 + b_k2 * b_k2, 1, keep_dims=True) * (1.0 / D) + eps)
    b_k1 = _round(_round(b_k1 * b_rms, k.dtype.element_ty) * b_weight1, TYPE)
    b_k2 = _round(_round(b_k2 * b_rms, k.dtype.element_ty) * b_weight2, TYPE)
    b_new1 = _round(_round(b_k1 * b_cos1, TYPE) - _round(b_k2 * b_sin1, TYPE), TYPE)
    b_new2 = _round(_round(b_k2 * b_cos2, TYPE) + _round(b_k1 * b_sin2, TYPE), TYPE)

    # All loads stand before the first store, so that they are in flight together.
    p_v_cache = v_cache + i_b * stride_vcb + o_slot * stride_vcs + o_h * stride_vch + o_dv
    tl.store(p_v_cache, b_v, mask=m_v)
    p_k_cache = k_cache + i_b * stride_kcb + o_slot * stride_kcs + o_h * stride_kch + o_d
    tl.store(p_k_cache, b_new1, mask=m_k)
    tl.store(p_k_cache + HALF, b_new2, mask=m_k)


def store_context_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    *,
    eps: float,
) -> None:
    """The twin of :func:`dspark_fast.reference.store_context_kv`: same arguments, same effect.

    Args:
        k, v: ``[B, N, Hkv, D]`` and ``[B, N, Hkv, Dv]``; fp32, fp16 or bf16. The last axis of every tensor is
            contiguous, the others have any strides: k and v are views of projections, the caches may be transposed.
        k_norm_weight: ``[D]``; a wider dtype than that of k makes all that follows wider, as in the reference.
        cos, sin: ``[B, N, D]``, any float dtype.
        k_cache, v_cache: ``[B, C, Hkv, D]`` and ``[B, C, Hkv, Dv]``, written in place; nothing else in them is touched.
        offsets: int32 or int64 ``[B]``, the slot of each row's first new token.
        counts: int32 or int64 ``[B]`` in 0..N; only the first ``counts[b]`` rows of row b are read.
        eps: of the key norm.
    """
    batch, new, kv_heads, dim = k.shape
    if batch == 0 or new == 0:
        return
    chosen = launch.parameters("context_kv", k.device)
    dim_v = v.shape[3]
    half, wide_v = triton.next_power_of_2(dim // 2), triton.next_power_of_2(dim_v)
    row_tile = max(1, chosen["TILE"] // max(2 * half, wide_v))
    _store_kernel[triton.cdiv(new * kv_heads, row_tile), batch](
        k,
        v,
        k_norm_weight,
        cos,
        sin,
        k_cache,
        v_cache,
        offsets,
        counts,
        eps,
        *k.stride()[:3],
        *v.stride()[:3],
        *cos.stride()[:2],
        *sin.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *offsets.stride(),
        *counts.stride(),
        HKV=kv_heads,
        D=dim,
        DV=dim_v,
        BH=half,
        BDV=wide_v,
        BR=row_tile,
        TYPE=TYPES[torch.promote_types(k.dtype, k_norm_weight.dtype)],
        num_warps=chosen["num_warps"],
        num_stages=chosen["num_stages"],
        enable_fp_fusion=False,
    )
