"""What the Markov head multiplies W2 with: the feature of the previous token, and for gated and rnn heads its kernels.

    vanilla   e(x) = W1[x], read by the walk itself
    gated     sigmoid(Wg [h ; e(x)] + b) * e(x)
    rnn       tanh(o), with (a, c, o) = J [s ; e(x) ; h] + b and s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(c)

The hidden states h of a block are known before the walk, so their part of the product is one launch for all slots;
what a slot waits for is K = R (gated) or 2 R (rnn). Every rounding of the reference is made here at the same place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from . import launch

BM = tl.constexpr(16)  # rows of a dot: the least that a matrix instruction takes


@triton.jit
def rounded(x, like):
    """fp32 through the dtype of ``like``: where the reference's product ends, so does ours."""
    return x.to(like).to(tl.float32)


@triton.jit
def dot(x, w, UPCAST: tl.constexpr):
    """x [BM, K] times w [N, K], summed in fp32. fp32 stays fp32 (no tf32); the interpreter is given nothing less."""
    if UPCAST:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, tl.trans(w), input_precision="ieee")


@triton.jit
def token_before(
    anchor,
    best,
    token,
    vocabulary,
    i_t,
    o_b,
    batch,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_P: tl.constexpr,
):
    """The token before slot i_t, [BM]: the anchor, or the lowest token among the best of all programs' winners.

    Behind a slot that failed, or an anchor of -1, it is any valid token, for what follows is not used.
    """
    m_b = o_b < batch
    if FIRST:
        return tl.maximum(tl.load(anchor + o_b, mask=m_b, other=0), 0)
    o_part = tl.arange(0, PARTS_P)[None, :]
    m_part = m_b[:, None] & (o_part < PARTS)
    p_part = ((i_t - 1) * batch + o_b[:, None]) * PARTS + o_part
    b_best = tl.load(best + p_part, mask=m_part, other=float("-inf"))  # [BM, PARTS_P]
    b_token = tl.load(token + p_part, mask=m_part, other=2147483647)
    b_top = tl.max(b_best, 1)
    b_token = tl.min(tl.where(b_best == b_top[:, None], b_token, 2147483647), 1)
    b_token = tl.where(m_b & (tl.abs(b_top) < float("inf")), b_token, 0).to(tl.int64)
    if vocabulary is not None:  # winners are columns
        b_token = tl.load(vocabulary + b_token)
    return b_token


@triton.jit
def _hidden_kernel(
    hidden,
    weight,
    bias,
    out,
    rows,
    width,
    columns,
    stride_hidden,
    stride_weight,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """What the hidden states of all slots add to the gated and rnn heads: bias + W h, fp32 [rows, columns]."""
    o_m, o_n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    m_m, m_n = (o_m < rows)[:, None], (o_n < columns)[:, None]
    b_out = tl.zeros([BM, BN], tl.float32)
    for first in range(0, width, BK):
        o_k = first + tl.arange(0, BK)[None, :]
        m_k = o_k < width
        b_h = tl.load(hidden + o_m[:, None] * stride_hidden + o_k, mask=m_m & m_k, other=0.0)  # [BM, BK]
        b_w = tl.load(weight + o_n[:, None].to(tl.int64) * stride_weight + o_k, mask=m_n & m_k, other=0.0)  # [BN, BK]
        b_out += dot(b_h.to(weight.dtype.element_ty), b_w, UPCAST)
    if bias is not None:
        b_out += tl.load(bias + o_n, mask=o_n < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + o_m[:, None] * columns + o_n[None, :], b_out, mask=m_m & (o_n < columns)[None, :])


@triton.jit
def _add_product(b_out, p_x, m_x, p_w, m_w, rank, RP: tl.constexpr, BK: tl.constexpr, UPCAST: tl.constexpr):
    """b_out + x w^T over R columns, BK at a time: x whole would be 128 registers of every thread."""
    for first in range(0, RP, BK):
        o_k = first + tl.arange(0, BK)[None, :]
        b_w = tl.load(p_w + o_k, mask=m_w & (o_k < rank), other=0.0)  # [BN, BK]
        b_x = tl.load(p_x + o_k, mask=m_x & (o_k < rank), other=0.0).to(b_w.dtype)  # [BM, BK]
        b_out += dot(b_x, b_w, UPCAST)
    return b_out


@triton.jit(do_not_specialize=["slot", "batch"])
def _feature_kernel(
    w1,
    weight,
    hidden_part,
    state,
    feature,
    anchor,
    best,
    token,
    vocabulary,
    batch,
    rank,
    slot,
    stride_w1,
    stride_weight,
    stride_part_b,
    stride_part_t,
    offset_embedding,
    FIRST: tl.constexpr,
    RNN: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_P: tl.constexpr,
    RP: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``BN`` of the R numbers of f for 16 rows; the rnn's next state besides."""
    i_t, o_b = slot.to(tl.int64), tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_b = o_b < batch
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < rank
    dtype = weight.dtype.element_ty
    b_previous = token_before(anchor, best, token, vocabulary, i_t, o_b, batch, FIRST, PARTS, PARTS_P)
    p_embedding = w1 + b_previous[:, None] * stride_w1
    m_rows, m_columns, m_out = m_b[:, None], m_n[:, None], m_b[:, None] & m_n[None, :]
    p_part = hidden_part + o_b[:, None] * stride_part_b + i_t * stride_part_t + o_n[None, :]
    p_weight = weight + o_n[:, None].to(tl.int64) * stride_weight
    p_out = feature + o_b[:, None] * rank + o_n[None, :]
    out_dtype = feature.dtype.element_ty
    if RNN:
        p_state = state + (i_t * batch + o_b[:, None]) * rank
        m_state = (o_b < tl.where(i_t > 0, batch, 0))[:, None]  # s_0 = 0
        gate = tl.zeros([BM, BN], tl.float32)
        candidate = tl.zeros([BM, BN], tl.float32)
        for i in tl.static_range(3):
            p_third = p_weight + i * rank * stride_weight
            b_joint = tl.load(p_part + i * rank, mask=m_out, other=0.0)  # [BM, BN]
            b_joint = _add_product(b_joint, p_state, m_state, p_third, m_columns, rank, RP, BK, UPCAST)
            p_third += offset_embedding
            b_joint = _add_product(b_joint, p_embedding, m_rows, p_third, m_columns, rank, RP, BK, UPCAST)
            b_joint = rounded(b_joint, dtype)
            if i == 0:
                gate = rounded(tl.sigmoid(b_joint), dtype)
            elif i == 1:
                candidate = rounded(2 * tl.sigmoid(2 * b_joint) - 1, dtype)  # tanh
            else:
                tl.store(p_out, (2 * tl.sigmoid(2 * b_joint) - 1).to(dtype).to(out_dtype), mask=m_out)
        b_own = tl.load(p_state + o_n[None, :], mask=m_state & m_n[None, :], other=0.0).to(tl.float32)
        b_next = rounded(gate * b_own, dtype) + rounded(rounded(1 - gate, dtype) * candidate, dtype)
        tl.store(p_state + batch * rank + o_n[None, :], b_next.to(dtype), mask=m_out)
    else:
        b_gate = tl.load(p_part, mask=m_out, other=0.0)  # [BM, BN]
        p_weight += offset_embedding
        b_gate = _add_product(b_gate, p_embedding, m_rows, p_weight, m_columns, rank, RP, BK, UPCAST)
        b_gate = rounded(tl.sigmoid(rounded(b_gate, dtype)), dtype)
        b_own = tl.load(p_embedding + o_n[None, :], mask=m_out, other=0.0).to(dtype).to(tl.float32)
        tl.store(p_out, (b_gate * b_own).to(dtype).to(out_dtype), mask=m_out)


def feature_launcher(
    head: str,
    w1: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    feature: torch.Tensor,
    vocabulary: torch.Tensor | None,
    ranks: int,
    chain: dict[str, int],
) -> Callable[..., None]:
    """What the hidden states add, for all slots at once; and the function that fills ``feature`` for one slot."""
    batch, block, width = hidden.shape
    device, rank = hidden.device, feature.shape[-1]
    table = launch.parameters("markov_feature", device)
    columns, rnn = weight.shape[0], head == "rnn"
    offset_embedding, offset_hidden = (rank, 2 * rank) if rnn else (width, 0)
    hidden_part = torch.empty(batch, block, columns, dtype=torch.float32, device=device)
    rows = hidden.reshape(batch * block, width)
    grid = (triton.cdiv(batch * block, BM.value), triton.cdiv(columns, table["BN"]))
    _hidden_kernel[grid](
        rows,
        weight[:, offset_hidden:],
        bias,
        hidden_part,
        batch * block,
        width,
        columns,
        rows.stride(0),
        weight.stride(0),
        BN=table["BN"],
        BK=table["BK"],
        UPCAST=chain["UPCAST"],
        num_warps=table["num_warps"],
    )
    state = None
    if rnn:
        state = torch.empty(block + 1, batch, rank, dtype=weight.dtype, device=device)

    def next_feature(slot: int, anchor: torch.Tensor, best: torch.Tensor, token: torch.Tensor) -> None:
        _feature_kernel[(triton.cdiv(batch, BM.value), triton.cdiv(rank, table["BN"]))](
            w1,
            weight,
            hidden_part,
            state,
            feature,
            anchor,
            best,
            token,
            vocabulary,
            batch,
            rank,
            slot,
            w1.stride(0),
            weight.stride(0),
            block * columns,
            columns,
            offset_embedding,
            FIRST=slot == 0,
            RNN=rnn,
            RP=ranks,
            BN=table["BN"],
            BK=min(ranks, table["BK"]),
            num_warps=table["num_warps"],
            **chain,
        )

    return next_feature
