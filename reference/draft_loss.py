"""The loss of DSpark training: LM head, softmax, cross-entropy and total variation at once, never [N, V] in fp32.

With z the drafter's logits (a Markov bias included), q = softmax(z) and p the target's distribution, of each row

    z = softcap(h . head^T) + f . w2^T          softcap(x) = cap tanh(x / cap), or x
    surprise = logsumexp(z) - z[label]
    distance = sum |q - p|                      L1: twice the total variation, 0 to 2
    loss = sum over rows of ce surprise + tv distance

    dz = ce (q - onehot(label)) + tv q (s - sum q s),  s = sign(q - p),  sign(0) = 0

A chunk of rows at a time, and the gradients with it: nothing of a chunk outlives it, so backward is one multiplication.
That is how Liger Kernel fuses the head with cross-entropy (Hsu et al. 2024). Kernels for cross-entropy and total
variation together (Liger Kernel #1384, SpecForge #829) begin at logits [N, V], which here are never whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Of fp32 logits. N = 1,920, V = 6,144, H = 576, R = 64, bf16, gradients, one thread: 188 ms; 2 MiB 211 ms, 32 MiB 237.
CHUNK_BYTES = 8 * 2**20


class DraftLoss(NamedTuple):
    """The loss to be differentiated, and its two parts of each row, which no gradient flows through."""

    loss: Tensor  # fp32 scalar
    surprise: Tensor  # [N] fp32, 0 for label -1
    distance: Tensor  # [N] fp32, 0 to 2


class DraftGradients(NamedTuple):
    """The gradients of the loss, each in the dtype of what it belongs to."""

    hidden: Tensor  # [N, H]
    feature: Tensor | None  # [N, R]
    w2: Tensor | None  # [V, R]


def draft_loss(
    hidden: Tensor,
    target_hidden: Tensor | None,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    head: Tensor,
    *,
    feature: Tensor | None = None,
    w2: Tensor | None = None,
    log_total: Tensor | None = None,
    target_tokens: Tensor | None = None,
    target_probs: Tensor | None = None,
    softcap: float | None = None,
) -> DraftLoss:
    """The weighted sum of cross-entropy and total variation over N rows (anchors x block).

    hidden: [N, H], what the drafter's head multiplies; head: [V, H]; feature [N, R] and w2 [V, R]: the Markov bias, or
    None; labels: int64 [N], -1 for a token outside of the vocabulary (surprise 0); ce_weights, tv_weights: fp32 [N].
    The target's distribution comes from one of
    target_hidden: [N, H], its softmax over the same head. With log_total, fp32 [N], the log of its whole normaliser,
    head is a part of the vocabulary, and the mass outside of it is added to the distance;
    target_tokens, target_probs: int64 and fp32 [N, K], its K largest probabilities, all others as one mass: a lower
    bound of the distance. Token -1 is outside of the vocabulary, its probability part of the distance. A row's tokens
    are distinct. log_total is not used.
    softcap: of both logits, before the bias.

    Rows whose weights are both 0 are not looked at: their results are 0, whatever stands in them. Matrix products run
    in the head's dtype (the others are cast to it), all else in fp32; autocast changes nothing.
    No gradient flows through this function: ``draft_loss_gradients`` computes them, ``dspark_fast.ops`` carries them.
    """
    options = {"feature": feature, "w2": w2, "log_total": log_total, "softcap": softcap}
    options |= {"target_tokens": target_tokens, "target_probs": target_probs, "gradients": False}
    return draft_loss_gradients(hidden, target_hidden, labels, ce_weights, tv_weights, head, **options)[0]


@torch.no_grad()
def draft_loss_gradients(
    hidden: Tensor,
    target_hidden: Tensor | None,
    labels: Tensor,
    ce_weights: Tensor,
    tv_weights: Tensor,
    head: Tensor,
    *,
    feature: Tensor | None = None,
    w2: Tensor | None = None,
    log_total: Tensor | None = None,
    target_tokens: Tensor | None = None,
    target_probs: Tensor | None = None,
    softcap: float | None = None,
    gradients: bool = True,
) -> tuple[DraftLoss, DraftGradients | None]:
    """``draft_loss`` and its gradients for hidden, feature and w2; None in their place without ``gradients``.

    Those of rows whose weights are both 0 are 0. dz is rounded to the head's dtype before it meets the head, w2 and
    the feature; the sum for w2 runs in fp32.
    """
    device = hidden.device
    surprise, distance = torch.zeros(len(hidden), device=device), torch.zeros(len(hidden), device=device)
    found = None
    if gradients:
        found = DraftGradients(hidden.new_zeros(hidden.shape), None, None)
        if w2 is not None:
            d_w2 = torch.zeros(w2.shape, dtype=torch.float32, device=device)
            found = found._replace(feature=feature.new_zeros(feature.shape), w2=d_w2)
    cast_w2 = None if w2 is None else w2.to(head.dtype)
    step = max(1, CHUNK_BYTES // (4 * max(1, len(head))))
    counting = ((ce_weights != 0) | (tv_weights != 0)).nonzero()[:, 0]
    with torch.autocast(device.type, enabled=False):
        for rows in counting.split(step):
            h = hidden[rows].to(head.dtype)
            z = F.linear(h, head).float()
            slope = None
            if softcap is not None:
                z.div_(softcap).tanh_()
                slope = 1 - z.square() if gradients else None
                z.mul_(softcap)
            if w2 is not None:
                f = feature[rows].to(head.dtype)
                z += F.linear(f, cast_w2)
            label = labels[rows]
            known, index = label >= 0, label.clamp(min=0)[:, None]
            at_label = z.gather(-1, index)
            q, top, total = _softmax(z)
            surprise[rows] = torch.where(known, (total.log() - (at_label - top))[:, 0], 0.0)
            ce = torch.where(known, ce_weights[rows], 0.0)[:, None]
            tv = tv_weights[rows][:, None]
            if target_hidden is not None:
                p = F.linear(target_hidden[rows].to(head.dtype), head).float()
                if softcap is not None:
                    p.div_(softcap).tanh_().mul_(softcap)
                whole = log_total is None
                if whole:
                    p, _, _ = _softmax(p)
                else:
                    p.sub_(log_total[rows][:, None]).exp_()
                outside = 0.0 if whole else (1 - p.sum(-1)).clamp(min=0)
                sign = torch.sub(q, p, out=p)
                distance[rows] = sign.norm(1, -1) + outside
                if not gradients:
                    continue
                sign.sign_()
                mean_sign = torch.linalg.vecdot(q, sign)[:, None]
                dz = sign.sub_(mean_sign).mul_(tv).add_(ce).mul_(q)
            else:
                tokens, p = target_tokens[rows], target_probs[rows].float()
                listed, tokens = tokens >= 0, tokens.clamp(min=0)
                q_listed = q.gather(-1, tokens) * listed
                outside = p.masked_fill(listed, 0.0).sum(-1)
                sign = (q_listed - p).masked_fill(~listed, 0.0)
                rest = ((1 - q_listed.sum(-1)).clamp(min=0) - (1 - p.sum(-1)).clamp(min=0))[:, None]
                distance[rows] = sign.abs().sum(-1) + rest[:, 0].abs() + outside
                if not gradients:
                    continue
                sign, rest_sign = sign.sign(), rest.sign()
                mean_sign = (q_listed * (sign - rest_sign)).sum(-1, keepdim=True) + rest_sign
                dz = q.mul_(tv * (rest_sign - mean_sign) + ce)
                dz.scatter_add_(-1, tokens, tv * q_listed * (sign - rest_sign))
            dz.scatter_add_(-1, index, -ce)
            if w2 is not None:
                rounded = dz.to(head.dtype)
                found.feature[rows] = (rounded @ cast_w2).to(feature.dtype)
                found.w2.add_(rounded.T @ f)
            if slope is not None:
                dz.mul_(slope)
            found.hidden[rows] = (dz.to(head.dtype) @ head).to(hidden.dtype)
    loss = (ce_weights * surprise + tv_weights * distance).sum()
    if gradients and w2 is not None:
        found = found._replace(w2=found.w2.to(w2.dtype))
    return DraftLoss(loss, surprise, distance), found


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place: the distribution, and its two statistics [..., 1], the maximum and sum exp(logit - maximum)."""
    top = logits.amax(-1, keepdim=True)
    logits.sub_(top).exp_()
    total = logits.sum(-1, keepdim=True)
    return logits.div_(total), top, total
