"""What rounds of speculation are counted as, and the figures that follow: the definitions of the authors' own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Rounds of some prompts, pooled. All figures are over rounds, never means of the prompts' own means.

    The definitions are those of the evaluation code that the authors published with DSpark (DeepSpec). Where an answer
    ends on a draft that was accepted, the round counts what it accepted, without a bonus, and nothing behind that draft
    counts as proposed; a round that the length limit cuts is counted whole. The token that the prefill gives is of no
    round.

    Attributes:
        prompts: how many were answered.
        rounds: draft-verify-commit rounds.
        committed: their acceptance lengths together, in tokens.
        proposed: by block position, how often a draft there was judged.
        accepted: by block position, how often it was accepted, with all before it.
    """

    prompts: int
    rounds: int
    committed: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def none(cls, block_size: int) -> Counts:
        """Nothing yet, for blocks of that size."""
        return cls(0, 0, 0, (0,) * block_size, (0,) * block_size)

    def __add__(self, other: Counts) -> Counts:
        """Both together; ValueError for blocks of different sizes."""
        return Counts(
            self.prompts + other.prompts,
            self.rounds + other.rounds,
            self.committed + other.committed,
            tuple(a + b for a, b in zip(self.proposed, other.proposed, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Acceptance length: committed tokens per round, bonus included (the authors' ``accept_len``).

        The sum over rounds of what was accepted plus one, over the number of rounds; NaN without any.
        """
        return _ratio(self.committed, self.rounds)

    @property
    def proposals(self) -> float:
        """Drafts per round that were judged, the bonus not among them (the authors' ``#propose``, without their +1)."""
        return _ratio(sum(self.proposed), self.rounds)

    @property
    def verify_rate(self) -> float:
        """Committed tokens over positions that the target verified (the authors' ``verify_rate``).

        The sum of acceptance lengths over the sum of drafts judged plus one a round. With all drafts verified that is
        tau over block size plus one; it is what figure 5 of the paper calls the acceptance rate.
        """
        return _ratio(self.committed, sum(self.proposed) + self.rounds)

    @property
    def survival(self) -> tuple[float, ...]:
        """By block position k: the share of rounds whose drafts 1 to k were all accepted, of those that proposed k.

        Unconditional (the authors' ``accept_rate@k``); NaN where nothing was proposed.
        """
        return tuple(_ratio(hit, n) for hit, n in zip(self.accepted, self.proposed, strict=True))

    @property
    def conditional(self) -> tuple[float, ...]:
        """By block position k: how often draft k was accepted, given that those before it were.

        The ratio of survival at k and at k - 1 (figure 2 of the paper); NaN where nothing survived so far.
        """
        return tuple(_ratio(now, last) for last, now in pairwise((1.0, *self.survival)))

    def to_dict(self) -> dict[str, Any]:
        """Counts and figures as plain data for JSON: NaN, of which JSON knows nothing, becomes None."""
        return {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "committed": self.committed,
            "proposed": list(self.proposed),
            "accepted": list(self.accepted),
            "tau": known(self.tau),
            "proposals": known(self.proposals),
            "verify_rate": known(self.verify_rate),
            "survival": [known(share) for share in self.survival],
            "conditional": [known(share) for share in self.conditional],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Counts:
        """From :meth:`to_dict`; the figures are worked out again."""
        return cls(data["prompts"], data["rounds"], data["committed"], tuple(data["proposed"]), tuple(data["accepted"]))


def pooled(counts: Sequence[Counts], block_size: int) -> Counts:
    """All of them together."""
    return sum(counts, Counts.none(block_size))


def known(value: float) -> float | None:
    """A figure for JSON: None in place of NaN."""
    return None if math.isnan(value) else value


def _ratio(part: float, whole: float) -> float:
    """NaN where there is nothing to divide by, or no number."""
    return part / whole if whole else math.nan
