"""What one evaluation at one temperature found."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark_fast.evaluation.counts import Counts, known, pooled

RESAMPLES = 2000  # of the interval: its ends then move by less than 0.02 from seed to seed


@dataclass(frozen=True)
class PromptResult:
    """One conversation's part.

    Attributes:
        id: of the prompt.
        domain: of the prompt.
        new_tokens: tokens of each answer, the one that the prefill gives included.
        lengths: of each answer, the acceptance length of each of its rounds.
    """

    id: str
    domain: str
    new_tokens: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def rounds(self) -> int:
        return sum(map(len, self.lengths))

    @property
    def committed(self) -> int:
        """Acceptance lengths of all rounds together."""
        return sum(map(sum, self.lengths))

    @property
    def tau(self) -> float:
        """Of this conversation alone; NaN without a round."""
        return self.committed / self.rounds if self.rounds else math.nan

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PromptResult:
        return cls(data["id"], data["domain"], tuple(data["new_tokens"]), tuple(map(tuple, data["lengths"])))


@dataclass(frozen=True)
class Evaluation:
    """Acceptance by domain, at one temperature.

    Attributes:
        temperature: 0 is greedy; otherwise rejection sampling.
        block_size: most drafts of a round.
        max_new_tokens: of each answer.
        batch_size: prompts decoded together.
        seed: from which each answer's own is made.
        confidence_threshold, use_markov: how a DSpark drafter drafted.
        domains: counts by domain, in the order in which domains first come among the prompts.
        prompts: what each conversation contributed, in the order of the prompts.
        mean_of: the domains of :attr:`mean_tau`.
    """

    temperature: float
    block_size: int
    max_new_tokens: int
    batch_size: int
    seed: int
    confidence_threshold: float
    use_markov: bool
    domains: Mapping[str, Counts]
    prompts: tuple[PromptResult, ...]
    mean_of: tuple[str, ...]

    @property
    def pooled(self) -> Counts:
        """All domains' rounds together."""
        return pooled(list(self.domains.values()), self.block_size)

    @property
    def mean_tau(self) -> float:
        """Plain mean of tau over the domains :attr:`mean_of`: the macro average of the paper's tables.

        NaN unless each of them has a round.
        """
        taus = [self.domains[domain].tau if domain in self.domains else math.nan for domain in self.mean_of]
        return sum(taus) / len(taus) if taus else math.nan

    def interval(self, domain: str, share: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """Where tau of a domain lies if as many prompts are drawn anew, with replacement, from those that there are.

        A bootstrap over prompts and not over rounds, since the rounds of one answer are alike. NaN without a round.

        Args:
            domain: one of :attr:`domains`.
            share: of the draws that lie between the two ends.
            seed: of the draws.
        """
        mine = [(one.committed, one.rounds) for one in self.prompts if one.domain == domain]
        draw = random.Random(f"{seed}:{domain}")
        taus = []
        for _ in range(RESAMPLES):
            again = draw.choices(mine, k=len(mine)) if mine else []
            if rounds := sum(one[1] for one in again):
                taus.append(sum(one[0] for one in again) / rounds)
        if not taus:
            return math.nan, math.nan
        taus.sort()
        cut = round((1 - share) / 2 * (len(taus) - 1))
        return taus[cut], taus[-1 - cut]

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, figures included; :meth:`from_dict` reads it."""
        rows = {}
        for domain, counts in self.domains.items():
            low, high = self.interval(domain)
            rows[domain] = {**counts.to_dict(), "tau_interval_95": [known(low), known(high)]}
        return {
            "temperature": self.temperature,
            "block_size": self.block_size,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "confidence_threshold": self.confidence_threshold,
            "use_markov": self.use_markov,
            "mean_of": list(self.mean_of),
            "mean_tau": known(self.mean_tau),
            "domains": rows,
            "pooled": self.pooled.to_dict(),
            "prompts": [asdict(one) for one in self.prompts],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Evaluation:
        """From :meth:`to_dict`, also by way of JSON; the figures are worked out again."""
        fields = ("temperature", "block_size", "max_new_tokens", "batch_size", "seed", "confidence_threshold")
        return cls(
            **{name: data[name] for name in (*fields, "use_markov")},
            domains={domain: Counts.from_dict(counts) for domain, counts in data["domains"].items()},
            prompts=tuple(PromptResult.from_dict(one) for one in data["prompts"]),
            mean_of=tuple(data["mean_of"]),
        )
