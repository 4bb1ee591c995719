"""An evaluation as ``acceptance.json`` and a drafter's card tell it: a row for each domain, their mean, and all."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dspark_fast.evaluation import Counts, Evaluation
from dspark_fast.evaluation.counts import known

NEW_TOKENS = 128  # of each answer that is measured


@dataclass(frozen=True)
class Acceptance:
    """What a drafter reaches in one domain.

    Attributes:
        domain: of the prompts; ``all`` is pooled over them, ``mean`` the plain mean over the domains that the
            evaluation takes it of.
        prompts: how many.
        tau: committed tokens per round, bonus included, pooled over rounds.
        by_position: share of the drafts at each block position that were accepted, given that those before were; empty
            for ``mean``.
        rounds: how many.
    """

    domain: str
    prompts: int
    tau: float
    by_position: list[float]
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: NaN, of which JSON knows nothing, becomes None."""
        return {**asdict(self), "tau": known(self.tau), "by_position": [known(share) for share in self.by_position]}


def acceptance_rows(result: Evaluation) -> list[Acceptance]:
    """A row for each domain, in order; ``mean`` if each of its domains has a round; ``all`` is the last."""
    rows = [_row(domain, counts) for domain, counts in result.domains.items()]
    if not math.isnan(result.mean_tau):
        of = [result.domains[domain] for domain in result.mean_of]
        prompts, rounds = sum(one.prompts for one in of), sum(one.rounds for one in of)
        rows.append(Acceptance("mean", prompts, result.mean_tau, [], rounds))
    return [*rows, _row("all", result.pooled)]


def _row(domain: str, counts: Counts) -> Acceptance:
    # Three digits are what so many rounds tell.
    return Acceptance(
        domain, counts.prompts, counts.tau, [round(share, 3) for share in counts.conditional], counts.rounds
    )
