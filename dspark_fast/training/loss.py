"""The three losses of the DSpark paper: cross-entropy, total variation and confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dspark_fast.draft import DSparkDraft
from dspark_fast.reference.markov import markov_bias
from dspark_fast.training.blocks import block_labels, run_blocks


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms and the decay over the block, slot j weighing ``exp(-j / decay)``."""

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class Vocabulary:
    """A part of the vocabulary that the loss is taken over, the rest being one mass.

    The drafter's softmax runs over ``ids`` alone, so training costs V'/V of the full head. The target's probabilities
    stay exact: they are normalised by ``log_total`` over the whole vocabulary, and what falls outside counts as a miss.

    Attributes:
        ids: int64 ``[V']``, ascending.
        size: V of the whole vocabulary.
    """

    ids: torch.Tensor
    size: int

    def positions(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ``tokens`` stand in ``ids``, and whether they do."""
        where = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return where, self.ids[where] == tokens


@dataclass(frozen=True)
class Loss:
    """One batch's losses.

    Attributes:
        total: the weighted sum, to be differentiated.
        cross_entropy, total_variation, confidence: weighted means over the counted slots; the last is 0 without a
            confidence head. total_variation is the L1 distance, 0 to 2.
        overlap: ``[B, A, T]`` detached, c* = 1 - L1 / 2: the probability that the slot's draft is accepted.
        counted: bool ``[B, A, T]``.
        logits: ``[B, A, T, V']``, corrected by the Markov bias.
        labels: int64 ``[B, A, T]``.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    overlap: torch.Tensor
    counted: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor

    def expected_acceptance_length(self) -> float:
        """``1 + sum_k prod_{i<=k} c*_i`` over full blocks: tau at temperature 1 if drafts were teacher-forced."""
        full = self.counted.all(-1)
        survival = self.overlap[full].cumprod(-1).sum(-1)
        return 1.0 + survival.mean().item() if survival.numel() else float("nan")


def dspark_loss(
    draft: DSparkDraft,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    last_hidden: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    *,
    weights: LossWeights | None = None,
    vocabulary: Vocabulary | None = None,
    log_total: torch.Tensor | None = None,
) -> Loss:
    """The paper's training objective over a batch of packed anchor blocks.

    Args:
        draft: joined to its target, whose LM head gives the target's distribution.
        input_ids: int64 ``[B, L]``.
        features: ``[B, L, m*H]``, the target's taps.
        last_hidden: ``[B, L, H]``, after the target's final norm.
        loss_mask: ``[B, L]``, nonzero on the target's own tokens.
        anchors, valid: ``[B, A]``, see :func:`~dspark_fast.training.blocks.sample_anchors`.
        weights: of the terms.
        vocabulary: restrict the loss to these tokens; ``log_total`` is needed then.
        log_total: fp32 ``[B, L]``, log of the target's softmax denominator over the whole vocabulary.

    Raises:
        ValueError: for a vocabulary without ``log_total``.
    """
    if vocabulary is not None and log_total is None:
        raise ValueError("log_total is None: a reduced vocabulary needs the target's whole normaliser")
    weights = weights or LossWeights()
    block = draft.config.block_size
    labels, previous, counted = block_labels(input_ids, loss_mask, anchors, valid, block)
    hidden = run_blocks(draft, input_ids, features, anchors, valid)

    head = draft.lm_head.weight if vocabulary is None else draft.lm_head.weight[vocabulary.ids]
    logits = F.linear(hidden.to(head.dtype), head).float()
    if draft.config.markov_rank:
        w1, w2 = draft.markov_weights()
        w2 = w2 if vocabulary is None else w2[vocabulary.ids]
        logits = logits + markov_bias(previous, w1, w2, hidden=hidden, **draft.markov_options())

    # Target distribution of slot j: what its last hidden state at p + j says of the token at p + j + 1.
    with torch.no_grad():
        where = (anchors[..., None] + torch.arange(block, device=anchors.device)).clamp(max=input_ids.shape[1] - 1)
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None]
        target_logits = F.linear(last_hidden[rows, where].to(head.dtype), head).float()
        if log_total is None:
            normaliser = target_logits.logsumexp(-1)
        else:  # 0 outside the target's own text, where exp(logit) may be inf, and inf x weight 0 is NaN
            normaliser = log_total[rows, where].masked_fill(~counted, torch.inf)
        p = target_logits.sub_(normaliser[..., None]).exp_()
        outside = (1.0 - p.sum(-1)).clamp(min=0.0) if vocabulary is not None else 0.0

    log_q = logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1) + outside
    index, known = (labels, counted) if vocabulary is None else vocabulary.positions(labels)
    surprise = -log_q.gather(-1, index[..., None])[..., 0]

    decay = torch.exp(-torch.arange(block, device=logits.device) / weights.decay)
    slot_weights = counted * decay
    cross_entropy = _mean(surprise, slot_weights * known)
    total_variation = _mean(distance, slot_weights)
    overlap = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    total = weights.cross_entropy * cross_entropy + weights.total_variation * total_variation
    confidence = logits.new_zeros(())
    if draft.config.enable_confidence_head:
        judged = draft.confidence(hidden, previous).float()
        confidence = _mean(F.binary_cross_entropy_with_logits(judged, overlap, reduction="none"), slot_weights)
        total = total + weights.confidence * confidence
    return Loss(total, cross_entropy, total_variation, confidence, overlap, counted, logits.detach(), labels)


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / (weights.sum() + 1e-6)
