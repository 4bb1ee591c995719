"""The training loss: products of a chunk of rows with the head, and one kernel from logits to their gradient.

The products are the library's. A kernel that never wrote a logit would have to multiply again for each of its passes
(statistics, distance, gradient): 7 units of N V H multiplications, both models' logits three times and the gradient,
where this takes 3. They are nearly all of the time; the Markov terms are R / H of a unit each.

Of a chunk there are fp32 logits of both models, the bias and dz in the head's dtype: 12 bytes a logit in bf16, at most
CHUNK_BYTES in all. One program a row reads it in three passes of tiles of V and keeps scalars between them:

    statistics   maximum and sum exp(z - maximum) of both, online
    distance     sum |q - p|, sum q sign(q - p)
    gradient     dz, and dz through the softcap

No atomics, and nothing looks at a value on the host: rows without weight are multiplied as zeros and then left out.
A row's bits depend on its logits alone, but those are as the library multiplies them, which may differ with the number
of rows in a chunk. Where V is no multiple of 8, rows are not aligned and are read an element at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launch
from .block_attention import _tanh

CHUNK_BYTES = 256 * 2**20  # 128 rows of 151,936 tokens in bf16, a row of tiles for the products; untuned


class DraftLoss(NamedTuple):
    """The loss to be differentiated, and its two parts of each row, which no gradient flows through."""

    loss: torch.Tensor  # fp32 scalar
    surprise: torch.Tensor  # [N] fp32, 0 for label -1
    distance: torch.Tensor  # [N] fp32, 0 to 2


class DraftGradients(NamedTuple):
    """The gradients of the loss, each in the dtype of what it belongs to."""

    hidden: torch.Tensor  # [N, H]
    feature: torch.Tensor | None  # [N, R]
    w2: torch.Tensor | None  # [V, R]


@triton.jit
def _capped(b_z, p_bias, o_v, m_v, SOFTCAP: tl.constexpr):
    """Products with the head to logits, -inf where masked, and the slope of the softcap there."""
    b_slope = tl.full(b_z.shape, 1.0, tl.float32)
    if SOFTCAP is not None:
        b_t = _tanh(b_z / SOFTCAP)
        b_slope = 1.0 - b_t * b_t
        b_z = b_t * SOFTCAP
    if p_bias is not None:
        b_z += tl.load(p_bias + o_v, mask=m_v, other=0.0).to(tl.float32)
    return tl.where(m_v, b_z, float("-inf")), b_slope


@triton.jit
def _sign(b_x):
    return tl.where(b_x > 0.0, 1.0, tl.where(b_x < 0.0, -1.0, 0.0))


@triton.jit
def _row_kernel(
    logits,
    bias,
    target_logits,
    log_total,
    target_tokens,
    target_probs,
    labels,
    ce_weights,
    tv_weights,
    surprise,
    distance,
    of_z,
    of_capped,
    vocab,
    stride_tokens,
    stride_probs,
    K: tl.constexpr,
    KP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BV: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    row = i_row * vocab
    b_ce, b_tv = tl.load(ce_weights + i_row), tl.load(tv_weights + i_row)
    if (b_ce == 0.0) & (b_tv == 0.0):
        tl.store(surprise + i_row, 0.0)
        tl.store(distance + i_row, 0.0)
        for i_v in range(0, vocab, BV):
            o_v = i_v + tl.arange(0, BV)
            b_zero = tl.zeros([BV], tl.float32)
            if of_z is not None:
                tl.store(of_z + row + o_v, b_zero.to(of_z.dtype.element_ty), mask=o_v < vocab)
            if of_capped is not None:
                tl.store(of_capped + row + o_v, b_zero.to(of_capped.dtype.element_ty), mask=o_v < vocab)
        return
    p_z = logits + row
    p_bias = None if bias is None else bias + row
    p_l = p_z if target_logits is None else target_logits + row

    # -- statistics ----------------------------------------------------------------------------------------------------
    b_top = float("-inf")
    b_total = 0.0
    b_target_top = float("-inf")
    b_target_total = 0.0
    for i_v in range(0, vocab, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < vocab
        b_z = tl.load(p_z + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_z = _capped(b_z, p_bias, o_v, m_v, SOFTCAP)[0]
        b_new = tl.maximum(b_top, tl.max(b_z, 0))
        b_total = b_total * tl.exp(b_top - b_new) + tl.sum(tl.exp(b_z - b_new), 0)
        b_top = b_new
        if target_logits is not None:
            if log_total is None:
                b_l = tl.load(p_l + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_l = _capped(b_l, None, o_v, m_v, SOFTCAP)[0]
                b_new = tl.maximum(b_target_top, tl.max(b_l, 0))
                b_target_total = b_target_total * tl.exp(b_target_top - b_new) + tl.sum(tl.exp(b_l - b_new), 0)
                b_target_top = b_new
    if log_total is not None:
        b_target_top = tl.load(log_total + i_row)
        b_target_total = 1.0

    b_label = tl.load(labels + i_row)
    known = (b_label >= 0) & (b_label < vocab)
    b_at_label = tl.load(logits + row + b_label, mask=known, other=0.0).to(tl.float32)
    b_at_label = _capped(b_at_label, p_bias, b_label, known, SOFTCAP)[0]
    tl.store(surprise + i_row, tl.where(known, tl.log(b_total) - (b_at_label - b_top), 0.0))
    b_ce = tl.where(known, b_ce, 0.0)

    # -- distance ------------------------------------------------------------------------------------------------------
    b_rest = 0.0  # sign of q - p where no token is listed
    if target_logits is not None:
        b_distance = 0.0
        b_mean = 0.0
        b_inside = 0.0
        for i_v in range(0, vocab, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < vocab
            b_z = tl.load(p_z + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_z = _capped(b_z, p_bias, o_v, m_v, SOFTCAP)[0]
            b_l = tl.load(p_l + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_l = _capped(b_l, None, o_v, m_v, SOFTCAP)[0]
            b_q = tl.exp(b_z - b_top) / b_total
            b_p = tl.exp(b_l - b_target_top) / b_target_total
            b_distance += tl.sum(tl.abs(b_q - b_p), 0)
            b_mean += tl.sum(b_q * _sign(b_q - b_p), 0)
            b_inside += tl.sum(b_p, 0)
        if log_total is not None:
            b_distance += tl.where(b_inside < 1.0, 1.0 - b_inside, 0.0)
    else:
        o_k = tl.arange(0, KP)
        b_token = tl.load(target_tokens + i_row * stride_tokens + o_k, mask=o_k < K, other=-1)
        b_p = tl.load(target_probs + i_row * stride_probs + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        m_k = (b_token >= 0) & (b_token < vocab)
        b_z = tl.load(logits + row + b_token, mask=m_k, other=0.0).to(tl.float32)
        b_z, b_slope = _capped(b_z, p_bias, b_token, m_k, SOFTCAP)
        b_q = tl.exp(b_z - b_top) / b_total  # 0 where no token is listed
        b_difference = tl.where(m_k, b_q - b_p, 0.0)
        b_q_rest, b_p_rest = 1.0 - tl.sum(b_q, 0), 1.0 - tl.sum(b_p, 0)
        b_gap = tl.where(b_q_rest < 0.0, 0.0, b_q_rest) - tl.where(b_p_rest < 0.0, 0.0, b_p_rest)
        b_distance = tl.sum(tl.abs(b_difference), 0) + tl.abs(b_gap) + tl.sum(tl.where(m_k, 0.0, b_p), 0)
        b_rest = _sign(b_gap)
        b_sign = _sign(b_difference)
        b_mean = tl.sum(b_q * (b_sign - b_rest), 0) + b_rest
    tl.store(distance + i_row, b_distance)

    # -- gradient ------------------------------------------------------------------------------------------------------
    if of_z is not None or of_capped is not None:
        for i_v in range(0, vocab, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < vocab
            b_tile = tl.load(p_z + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_tile, b_steep = _capped(b_tile, p_bias, o_v, m_v, SOFTCAP)
            b_dz = tl.exp(b_tile - b_top) / b_total
            if target_logits is not None:
                b_l = tl.load(p_l + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_l = _capped(b_l, None, o_v, m_v, SOFTCAP)[0]
                b_s = _sign(b_dz - tl.exp(b_l - b_target_top) / b_target_total)
                b_dz *= b_tv * (b_s - b_mean) + b_ce
            else:
                b_dz *= b_tv * (b_rest - b_mean) + b_ce
            b_dz -= tl.where(o_v == b_label, b_ce, 0.0)
            if of_z is not None:
                tl.store(of_z + row + o_v, b_dz.to(of_z.dtype.element_ty), mask=m_v)
            if of_capped is not None:
                tl.store(of_capped + row + o_v, (b_dz * b_steep).to(of_capped.dtype.element_ty), mask=m_v)
        if target_logits is None:  # the listed tokens once more, with the signs of their own
            tl.debug_barrier()  # other threads of this program wrote them just now
            b_dz = b_q * (b_tv * (b_sign - b_mean) + b_ce) - tl.where(b_token == b_label, b_ce, 0.0)
            if of_z is not None:
                tl.store(of_z + row + b_token, b_dz.to(of_z.dtype.element_ty), mask=m_k)
            if of_capped is not None:
                tl.store(of_capped + row + b_token, (b_dz * b_slope).to(of_capped.dtype.element_ty), mask=m_k)


def draft_loss(
    hidden: torch.Tensor,
    target_hidden: torch.Tensor | None,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    tv_weights: torch.Tensor,
    head: torch.Tensor,
    *,
    feature: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    log_total: torch.Tensor | None = None,
    target_tokens: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    softcap: float | None = None,
) -> DraftLoss:
    """The weighted sum of cross-entropy and total variation; the twin of ``reference.draft_loss``."""
    options = {"feature": feature, "w2": w2, "log_total": log_total, "softcap": softcap}
    options |= {"target_tokens": target_tokens, "target_probs": target_probs, "gradients": False}
    return draft_loss_gradients(hidden, target_hidden, labels, ce_weights, tv_weights, head, **options)[0]


@torch.no_grad()
def draft_loss_gradients(
    hidden: torch.Tensor,
    target_hidden: torch.Tensor | None,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    tv_weights: torch.Tensor,
    head: torch.Tensor,
    *,
    feature: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    log_total: torch.Tensor | None = None,
    target_tokens: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    softcap: float | None = None,
    gradients: bool = True,
) -> tuple[DraftLoss, DraftGradients | None]:
    """The twin of ``reference.draft_loss_gradients``, which says what every argument and result is.

    Here labels, weights and log_total are contiguous, the others along their last axis.
    """
    rows, device = len(hidden), hidden.device
    surprise = torch.empty(rows, dtype=torch.float32, device=device)
    distance = torch.empty(rows, dtype=torch.float32, device=device)
    found = None
    if gradients:
        found = DraftGradients(torch.empty(hidden.shape, dtype=hidden.dtype, device=device), None, None)
        if w2 is not None:
            d_feature = torch.empty(feature.shape, dtype=feature.dtype, device=device)
            found = found._replace(feature=d_feature, w2=torch.zeros(w2.shape, dtype=torch.float32, device=device))
    w2_dtype = None if w2 is None else w2.dtype
    w2 = None if w2 is None else w2.to(head.dtype)
    step = _rows_of_a_chunk(head, target_hidden is not None, w2 is not None, softcap is not None, gradients)
    with torch.autocast(device.type, enabled=False):
        for start in range(0, rows, step):
            here = functools.partial(_part, start=start, count=min(step, rows - start))
            part = [here(one) for one in (log_total, target_tokens, target_probs, labels, ce_weights, tv_weights)]
            counting = ((part[-2] != 0) | (part[-1] != 0)).unsqueeze(-1)
            h, target, f = (_counting(here(one), counting, head) for one in (hidden, target_hidden, feature))
            part += [here(surprise), here(distance)]
            d_z, d_capped = _chunk(h, target, f, head, w2, part, softcap, gradients)
            if not gradients:
                continue
            here(found.hidden).copy_(torch.mm(d_capped, head))
            if w2 is not None:
                here(found.feature).copy_(torch.mm(d_z, w2))
                found.w2.add_(_product(d_z.T, f))
            del d_z, d_capped, h, target, f  # or they would live beside the next chunk's
    loss = (ce_weights * surprise + tv_weights * distance).sum()
    if w2 is not None and gradients:
        found = found._replace(w2=found.w2.to(w2_dtype))
    return DraftLoss(loss, surprise, distance), found


def _chunk(
    hidden: torch.Tensor,
    target_hidden: torch.Tensor | None,
    feature: torch.Tensor | None,
    head: torch.Tensor,
    w2: torch.Tensor | None,
    part: list[torch.Tensor | None],
    softcap: float | None,
    gradients: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Fill a chunk's results; dz of its logits, and of what goes into the softcap, in the head's dtype."""
    log_total, tokens, probs, *rest = part
    logits = _product(hidden, head.T)
    bias = None if w2 is None else torch.mm(feature, w2.T)
    target_logits = None if target_hidden is None else _product(target_hidden, head.T)
    d_z = d_capped = None
    if gradients and (softcap is None or w2 is not None):
        d_z = torch.empty(logits.shape, dtype=head.dtype, device=head.device)
    if gradients and softcap is not None:
        d_capped = torch.empty(logits.shape, dtype=head.dtype, device=head.device)
    listed = 0 if tokens is None else tokens.shape[1]
    _row_kernel[(len(logits),)](
        logits,
        bias,
        target_logits,
        None if target_logits is None else log_total,
        tokens,
        probs,
        *rest,
        d_z,
        d_capped,
        logits.shape[1],
        0 if tokens is None else tokens.stride(0),
        0 if probs is None else probs.stride(0),
        K=listed,
        KP=triton.next_power_of_2(max(listed, 1)),
        SOFTCAP=softcap,
        **launch.parameters("draft_loss", head.device),
    )
    return d_z, d_z if d_capped is None else d_capped


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """one @ other, as fp32 from 16-bit factors where the library writes its accumulator as it is."""
    if one.is_cuda and torch.version.hip is None and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    product = torch.mm(one, other)
    return product.float() if one.device.type == "cpu" else product  # the types that an NVIDIA GPU has


def _part(tensor: torch.Tensor | None, start: int, count: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.narrow(0, start, count)


def _counting(tensor: torch.Tensor | None, counting: torch.Tensor, head: torch.Tensor) -> torch.Tensor | None:
    """A chunk's rows in the head's dtype, zeros where a row has no weight: 0 x NaN would reach w2's gradient."""
    return None if tensor is None else torch.where(counting, tensor, 0).to(head.dtype)


def _rows_of_a_chunk(head: torch.Tensor, target: bool, bias: bool, softcap: bool, gradients: bool) -> int:
    """As many as CHUNK_BYTES allow, in whole tiles of the products."""
    size = head.element_size()
    bytes_of_logit = 4 + 4 * target + size * (bias + gradients * (1 + (bias and softcap)))
    rows = CHUNK_BYTES // (bytes_of_logit * len(head))
    tile = 128 if rows >= 128 else 16
    return max(tile, rows // tile * tile)
