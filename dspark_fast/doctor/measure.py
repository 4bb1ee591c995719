"""Teacher-forced agreement of a drafter with what its target wrote, and whether a change of wiring raises it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark_fast.doctor.texts import Reading
from dspark_fast.doctor.wiring import Wiring, hidden_states, logits, rewired
from dspark_fast.draft import DSparkDraft


@dataclass(frozen=True)
class Outcome:
    """How a drafter did, block by block; no two blocks draft the same token.

    Attributes:
        right, counted: bool ``[N, T]``: column k is the k-th token after the anchor, given the right ones before it.
        overlap: fp32 ``[N, T]``, the drafter's probability of that token, 0 where not counted: 1 - TV between the
            drafter's law and the target's greedy choice.
        positions: int64 ``[N]``, of the anchors; prompts: int64 ``[N]``, whose they are.
        said: int64, the columns of the drafter's logits that were the largest somewhere, or are a label.
    """

    right: torch.Tensor
    counted: torch.Tensor
    overlap: torch.Tensor
    positions: torch.Tensor
    prompts: torch.Tensor
    said: torch.Tensor

    @property
    def agreement(self) -> float:
        """Over all slots."""
        return _mean(self.right, self.counted)

    @property
    def by_slot(self) -> list[float]:
        return [_mean(right, counted) for right, counted in zip(self.right.T, self.counted.T, strict=True)]

    @property
    def mean_overlap(self) -> float:
        return _mean(self.overlap, self.counted)

    @property
    def tau(self) -> float:
        """Tokens that a round would commit at these anchors, bonus included, over blocks that are whole."""
        whole = self.counted.all(dim=1)
        return 1 + self.right[whole].long().cumprod(dim=1).sum().item() / max(int(whole.sum()), 1)

    def part(self, chosen: torch.Tensor) -> Outcome:
        """Some of the blocks."""
        parts = (self.right, self.counted, self.overlap, self.positions, self.prompts)
        return Outcome(*(one[chosen] for one in parts), self.said)


def _mean(values: torch.Tensor, counted: torch.Tensor) -> float:
    return values[counted].double().mean().item() if counted.any() else math.nan


@torch.no_grad()
def measure(
    model: Any,
    draft: DSparkDraft,
    readings: Sequence[Reading],
    wiring: Wiring | None = None,
    columns: torch.Tensor | None = None,
) -> Outcome:
    """Draft every block of the readings.

    Args:
        wiring: changes, if any.
        columns: of the drafter's logits, the only ones to look at: int64, ascending, with all labels among them; None
            for all.
    """
    wiring = wiring or Wiring()
    draft = rewired(model, draft, wiring)
    vocabulary = draft.vocabulary
    if vocabulary is None:
        vocabulary = torch.arange(draft.config.vocab_size, device=draft.device)
    found = []
    for reading in readings:
        there = reading.counted[..., 0]  # [B, A]
        hidden = hidden_states(model, draft, reading, wiring)[there].roll(wiring.slot, dims=1)
        labels, previous, counted = (one[there] for one in (reading.labels, reading.previous, reading.counted))
        scores = logits(draft, hidden, previous, wiring, columns)
        column = torch.searchsorted(vocabulary, labels).clamp(max=len(vocabulary) - 1)
        known = vocabulary[column] == labels  # a label that the drafter cannot draft
        place = column if columns is None else torch.searchsorted(columns, column)
        chosen = scores.gather(-1, place[..., None])[..., 0]
        overlap = (chosen - scores.logsumexp(-1)).exp() * known
        best = scores.argmax(-1)
        best = best if columns is None else columns[best]
        if wiring.slot:  # what was rolled around is no one's
            counted = counted.clone()
            counted[:, 0 if wiring.slot > 0 else -1] = False
        right = (best == column) & known & counted
        prompts = reading.prompts.to(there.device)[:, None].expand_as(there)[there]
        said = torch.cat([best, column]).unique()
        found.append((right, counted, overlap * counted, reading.anchors[there], prompts, said))
    parts = [torch.cat(part).cpu() for part in zip(*found, strict=True)]
    return Outcome(*parts[:5], parts[5].unique().to(draft.device))


@dataclass(frozen=True)
class Change:
    """Two outcomes on the same blocks, compared on the tokens that both were asked for.

    Attributes:
        before, after: agreement over all slots; ``first_before`` and ``first_after``, of the first of these slots.
        gain: of the mean overlap.
        z: the gain of a block's overlap, in its standard errors.
        p_value: one-sided.
    """

    before: float
    after: float
    first_before: float
    first_after: float
    gain: float
    z: float
    p_value: float


def change(before: Outcome, after: Outcome) -> Change:
    """From one outcome to another: a paired test on each block's overlap.

    Overlap and not agreement, which on SmolLM2's pair needs three times the blocks for the same certainty.
    """
    both = before.counted & after.counted
    gains = ((after.overlap - before.overlap) * both).sum(dim=1).double()[both.any(dim=1)]
    slot = int(both.any(dim=0).int().argmax())
    z = standard_score(gains)
    return Change(
        before=_mean(before.right, both),
        after=_mean(after.right, both),
        first_before=_mean(before.right[:, slot], both[:, slot]),
        first_after=_mean(after.right[:, slot], both[:, slot]),
        gain=gains.sum().item() / max(int(both.sum()), 1),
        z=z,
        p_value=upper_tail(z),
    )


def standard_score(gains: torch.Tensor) -> float:
    """The mean of ``[N]`` independent differences in its standard errors; 0 for fewer than two, or none."""
    if len(gains) < 2 or not gains.any():
        return 0.0
    error = (gains.std() / len(gains) ** 0.5).item()
    return gains.mean().item() / error if error else math.copysign(math.inf, gains.mean().item())


def upper_tail(z: float) -> float:
    """Probability that a standard normal is larger."""
    return math.erfc(z / math.sqrt(2)) / 2
