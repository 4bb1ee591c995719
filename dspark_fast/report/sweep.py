"""The confidence threshold: how many drafts are verified, what is committed, and what that costs the target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar

from dspark_fast.evaluation import Counts
from dspark_fast.report.measurement import Measurement, NotMeasurable, Progress, Table, number, plain
from dspark_fast.report.style import BAD, DSPARK, INK, PLAIN, UNCROSSED, canvas, from_zero
from dspark_fast.report.subject import Equality, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = (0.0, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Sweep(Measurement):
    """Counts at each threshold, greedy at batch 1, all domains together.

    A block is cut before its first draft that the head trusts less than the threshold, maybe before all of them. The
    target then reads the anchor and the drafts that are left, so a committed token costs ``(proposed + 1) / tau``
    positions of its passes: one over the authors' verify rate.

    Attributes:
        block_size: most drafts of a round.
        thresholds: as swept; counts: of each.
        equality: all answers against plain decoding.
    """

    block_size: int
    thresholds: tuple[float, ...]
    counts: tuple[Counts, ...]
    equality: Equality

    name: ClassVar[str] = "sweep"
    title: ClassVar[str] = "The confidence threshold"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Sweep:
        if not subject.draft.config.enable_confidence_head:
            raise NotMeasurable("the drafter has no confidence head to cut blocks by")
        answers = [subject.dspark(progress, confidence_threshold=one) for one in THRESHOLDS]
        counts = tuple(one.evaluation.pooled for one in answers)
        if not all(one.rounds for one in counts):
            raise NotMeasurable("every answer ends with its first token: there is no round to look at")
        block = subject.draft.config.block_size
        return cls(block, THRESHOLDS, counts, reduce(or_, (one.equality for one in answers)))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sweep:
        thresholds = tuple(one["threshold"] for one in data["rows"])
        counts = tuple(map(Counts.from_dict, data["rows"]))
        return cls(data["block_size"], thresholds, counts, Equality.from_dict(data["equality"]))

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"threshold": one, **counts.to_dict(), "positions_per_token": positions_per_token(counts)}
            for one, counts in zip(self.thresholds, self.counts)
        ]
        return {"block_size": self.block_size, "rows": rows, "equality": plain(asdict(self.equality))}

    def draw(self) -> Figure:
        figure, (left, right) = canvas(2, width=9.2)
        proposed, taus = [one.proposals for one in self.counts], [one.tau for one in self.counts]
        costs = [positions_per_token(one) for one in self.counts]
        places = range(len(self.thresholds))  # as equal steps: 0.7 and 0.9 would stand too close for their labels
        left.plot(places, proposed, "s--", color=PLAIN, linewidth=2, label="drafts verified")
        left.plot(places, taus, "o-", color=DSPARK, linewidth=2, label="tokens committed (tau)")
        left.set(ylabel="drafts or tokens per round")
        left.legend(frameon=False, fontsize=9)
        right.plot(places, costs, "D-", color=BAD, linewidth=2)
        right.set(ylabel="target positions per committed token")
        right.axhline(1, color=PLAIN, linewidth=1.2, linestyle="--")
        right.annotate(
            "plain decoding", (places[-1], 1), xytext=(0, -11), textcoords="offset points", ha="right", fontsize=8
        )
        for axis, values, others in ((left, proposed, taus), (left, taus, proposed), (right, costs, costs)):
            for place, value, other in zip(places, values, others):
                above = value >= other or value < 0.12 * max(values)  # below it there is the axis
                # A falling line leaves room above on the right and below on the left.
                where = {"xytext": (4, 5) if above else (-4, -13), "ha": "left" if above else "right"}
                how = {"textcoords": "offset points", "color": INK, "fontsize": 9, "bbox": UNCROSSED}
                axis.annotate(f"{value:.2f}", (place, value), **how, **where)
        for axis, highest in ((left, max(*proposed, *taus)), (right, max(costs))):
            axis.set_xticks(list(places), [f"{one:g}" for one in self.thresholds])
            axis.set(xlabel="confidence threshold (not to scale)")
            axis.margins(x=0.15)
            from_zero(axis, highest, room=1.2)
        return figure

    def sentences(self) -> list[str]:
        taus, costs = [one.tau for one in self.counts], [positions_per_token(one) for one in self.counts]
        changes = (
            f"{100 * (cost / costs[0] - 1):+.0f} % at {threshold:g} (tau {100 * (tau / taus[0] - 1):+.0f} %)"
            for threshold, tau, cost in zip(self.thresholds[1:], taus[1:], costs[1:])
        )
        said = [
            f"Without a threshold the target reads {costs[0]:.2f} positions for each token that is committed; plain "
            f"decoding reads 1. With one that changes by {', '.join(changes)}."
        ]
        if self.counts[-1].proposals < 0.5:
            said.append(f"At {self.thresholds[-1]:g} hardly a draft is left: that is all but plain decoding.")
        said.append(
            "Positions saved are work saved on a server that is bound by arithmetic. One user alone waits for the "
            "weights to be read, which a shorter block does not change: there a larger tau is worth more."
        )
        return said

    def tables(self) -> list[Table]:
        rows = tuple(
            (f"{one:g}", f"{c.rounds:,}", number(c.proposals), number(c.tau), number(positions_per_token(c)))
            for one, c in zip(self.thresholds, self.counts)
        )
        columns = ("threshold", "rounds", "drafts verified a round", "tau", "target positions per committed token")
        return [Table(columns, rows, "positions per committed token = (drafts verified + 1) / tau")]


def positions_per_token(counts: Counts) -> float:
    """Positions that the target verified for each token that was committed: ``(proposed + 1) / tau``."""
    return (counts.proposals + 1) / counts.tau
