"""The three losses of the DSpark paper: cross-entropy, total variation and confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dspark_fast import ops
from dspark_fast.draft import DSparkDraft
from dspark_fast.reference.markov import markov_features
from dspark_fast.training.blocks import RunBlocks, block_labels, run_blocks


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

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where ``tokens`` stand in ``ids``, -1 for those that do not."""
        where = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return where.masked_fill(self.ids[where] != tokens, -1)


@dataclass(frozen=True)
class Labels:
    """What the blocks of a batch are to predict.

    Attributes:
        tokens, previous: int64 ``[B, A, T]``.
        counted: bool ``[B, A, T]``.
        index: ``tokens`` within the loss's vocabulary, -1 outside of it.
        weights: fp32 ``[B, A, T]``, decay over the block, 0 where not counted.
    """

    tokens: torch.Tensor
    previous: torch.Tensor
    counted: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    def totals(self) -> torch.Tensor:
        """What the mean losses divide by, fp32 ``[2]``: the weights of slots with a known label, and of all slots."""
        return torch.stack([(self.weights * (self.index >= 0)).sum(), self.weights.sum()])


@dataclass(frozen=True)
class Loss:
    """One batch's losses.

    Attributes:
        total: the weighted sum, to be differentiated.
        cross_entropy, total_variation, confidence: this batch's part of the weighted means over the counted slots
            (summed over the batches of a step, the means); the last is 0 without a confidence head. total_variation is
            the L1 distance, 0 to 2.
        overlap: ``[B, A, T]`` detached, c* = 1 - L1 / 2: the probability that the slot's draft is accepted.
        predicted: ``[B, A, T]`` detached, the confidence head's probability of that; None without one.
        counted: bool ``[B, A, T]``.
        labels: int64 ``[B, A, T]``.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    overlap: torch.Tensor
    predicted: torch.Tensor | None
    counted: torch.Tensor
    labels: torch.Tensor

    def expected_acceptance_length(self) -> float:
        """``1 + sum_k prod_{i<=k} c*_i`` over full blocks: tau at temperature 1 if drafts were teacher-forced."""
        full = self.counted.all(-1)
        survival = self.overlap[full].cumprod(-1).sum(-1)
        return 1.0 + survival.mean().item() if survival.numel() else float("nan")


def make_labels(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block: int,
    decay: float,
    vocabulary: Vocabulary | None = None,
) -> Labels:
    """The labels of a batch of anchor blocks and what each weighs; nothing here needs the drafter."""
    tokens, previous, counted = block_labels(input_ids, loss_mask, anchors, valid, block)
    slots = torch.exp(-torch.arange(block, device=input_ids.device) / decay)
    index = tokens if vocabulary is None else vocabulary.positions(tokens)
    return Labels(tokens, previous, counted, index, counted * slots)


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
    top_tokens: torch.Tensor | None = None,
    top_probs: torch.Tensor | None = None,
    labels: Labels | None = None,
    totals: torch.Tensor | None = None,
    run: RunBlocks = run_blocks,
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
        vocabulary: restrict the loss to these tokens; ``log_total`` is needed then, or top tokens.
        log_total: fp32 ``[B, L]``, log of the target's softmax denominator over the whole vocabulary.
        top_tokens: int64 ``[B, L, K]`` and ``top_probs`` fp32 ``[B, L, K]``: take these for the target's distribution,
            the rest being one mass, instead of the LM head on ``last_hidden``.
        labels: from :func:`make_labels` where they are already made.
        totals: what the means divide by, :meth:`Labels.totals` summed over all batches of a step; this batch's if None.
        run: runs the blocks; a compiled :func:`~dspark_fast.training.blocks.run_blocks`, for one.

    Raises:
        ValueError: for a vocabulary with neither ``log_total`` nor top tokens.
    """
    if vocabulary is not None and log_total is None and top_tokens is None:
        raise ValueError("log_total is None: a reduced vocabulary needs the target's whole normaliser")
    weights = weights or LossWeights()
    block = draft.config.block_size
    if labels is None:
        labels = make_labels(input_ids, loss_mask, anchors, valid, block, weights.decay, vocabulary)
    divisor = (labels.totals() if totals is None else totals) + 1e-6
    hidden = run(draft, input_ids, features, anchors, valid)

    ids = None if vocabulary is None else vocabulary.ids
    head = draft.lm_head.weight if ids is None else draft.lm_head.weight[ids]
    feature = w2 = None
    if draft.config.markov_rank:
        w1, w2 = draft.markov_weights()
        w2 = w2 if ids is None else w2[ids]
        feature = markov_features(labels.previous, w1, hidden=hidden, **draft.markov_options()).flatten(0, 2)

    # Target distribution of slot j: what the target's last state at p + j says of the token at p + j + 1.
    where = (anchors[..., None] + torch.arange(block, device=anchors.device)).clamp(max=input_ids.shape[1] - 1)
    rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None]
    target: dict[str, torch.Tensor] = {}
    if top_tokens is not None:
        tokens = top_tokens[rows, where].flatten(0, 2)
        target["target_tokens"] = tokens if vocabulary is None else vocabulary.positions(tokens)
        target["target_probs"] = top_probs[rows, where].flatten(0, 2)
    elif log_total is not None:
        target["log_total"] = log_total[rows, where].flatten()

    known = labels.index >= 0
    fused = ops.draft_loss(
        hidden.flatten(0, 2),
        None if top_tokens is not None else last_hidden[rows, where].flatten(0, 2).to(head.dtype),
        labels.index.flatten(),
        (weights.cross_entropy / divisor[0] * labels.weights * known).flatten(),
        (weights.total_variation / divisor[1] * labels.weights).flatten(),
        head,
        feature=feature,
        w2=w2,
        **target,
    )
    shape = labels.tokens.shape
    distance = fused.distance.view(shape)
    cross_entropy = (fused.surprise.view(shape) * labels.weights * known).sum() / divisor[0]
    total_variation = (distance * labels.weights).sum() / divisor[1]
    overlap = (1.0 - 0.5 * distance).clamp(0.0, 1.0)
    total, confidence, predicted = fused.loss, hidden.new_zeros(()), None
    if draft.config.enable_confidence_head:
        judged = draft.confidence(hidden, labels.previous).float()
        surprise = F.binary_cross_entropy_with_logits(judged, overlap, reduction="none")
        confidence = (surprise * labels.weights).sum() / divisor[1]
        total = total + weights.confidence * confidence
        confidence, predicted = confidence.detach(), judged.detach().sigmoid()
    return Loss(total, cross_entropy, total_variation, confidence, overlap, predicted, labels.counted, labels.tokens)
