"""Acceptance by block position with the Markov head on and off, and one block drafted both ways."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dspark_fast.evaluation import Counts
from dspark_fast.report.measurement import (
    Measurement,
    NotMeasurable,
    Progress,
    Strip,
    Table,
    counted,
    number,
    percent,
    plain,
)
from dspark_fast.report.style import DSPARK, INK, OFF, UNCROSSED, canvas
from dspark_fast.report.subject import Equality, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


THIN = 30  # rounds; of fewer a share may be off by 0.2 and more, one time in 20


@dataclass(frozen=True)
class Positions(Measurement):
    """Conditional acceptance by block position, greedy at batch 1, all domains together.

    Attributes:
        on, off: counts with the Markov head and without its bias.
        question: the prompt whose first block is shown.
        first: that block with the head off and on; the target's answer so far is the same, so the anchor is too.
        equality: all answers against plain decoding.
    """

    on: Counts
    off: Counts
    question: str
    first: tuple[Strip, Strip]
    equality: Equality

    name: ClassVar[str] = "positions"
    title: ClassVar[str] = "Acceptance by block position"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Positions:
        if not subject.draft.config.markov_rank:
            raise NotMeasurable("the drafter has no Markov head to switch off")
        on = subject.dspark(progress)
        off = subject.dspark(progress, use_markov=False)
        both = [index for index, (a, b) in enumerate(zip(on.blocks, off.blocks, strict=True)) if a and b]
        if not both:
            raise NotMeasurable("every answer ends with its first token: there is no block to look at")
        # The first prompt whose block shows that the head matters, if there is one.
        shown = next((i for i in both if on.blocks[i][0].drafts != off.blocks[i][0].drafts), both[0])
        strips = []
        for label, answers in (("Markov head off", off), ("Markov head on", on)):
            block = answers.blocks[shown][0]
            following = None if block.following is None else subject.text(block.following)
            drafts = tuple(map(subject.text, block.drafts))
            strips.append(Strip(label, subject.text(block.anchor), drafts, block.accepted, following))
        question = subject.prompts[shown].messages[-1]["content"]
        counts = (on.evaluation.pooled, off.evaluation.pooled)
        return cls(*counts, question, (strips[0], strips[1]), on.equality | off.equality)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Positions:
        strips = tuple(map(Strip.from_dict, data["first"]))
        counts = (Counts.from_dict(data["on"]), Counts.from_dict(data["off"]))
        return cls(*counts, data["question"], (strips[0], strips[1]), Equality.from_dict(data["equality"]))

    def to_dict(self) -> dict[str, Any]:
        rest = plain({key: value for key, value in asdict(self).items() if key not in ("on", "off")})
        return {"on": self.on.to_dict(), "off": self.off.to_dict(), **rest}

    def strips(self) -> list[Strip]:
        return list(self.first)

    def draw(self) -> Figure:
        figure, (axis,) = canvas()
        slots = range(1, len(self.on.proposed) + 1)
        for counts, other, label, style, color in (
            (self.on, self.off, "Markov head on", "o-", DSPARK),
            (self.off, self.on, "Markov head off", "s--", OFF),
        ):
            # No line to a share of a handful of rounds, which says little.
            known = [
                share if reached >= THIN else math.nan for share, reached in zip(counts.conditional, _reached(counts))
            ]
            axis.plot(slots, known, style, color=color, linewidth=2, label=f"{label}, tau {counts.tau:.2f}")
            for slot, share, theirs, reached in zip(slots, counts.conditional, other.conditional, _reached(counts)):
                if not math.isnan(share):
                    below = share > 0.15 and (share < theirs or (share == theirs and counts is self.off))
                    offset = (0, -14) if below else (0, 8)
                    text = f"{share:.2f}\nn {reached:,}"
                    where = {"xytext": offset, "textcoords": "offset points", "ha": "center", "fontsize": 8}
                    if reached < THIN:
                        axis.plot(slot, share, style[0], markerfacecolor="white", color=color, clip_on=False)
                    where |= {"va": "top" if below else "bottom", "bbox": UNCROSSED}
                    axis.annotate(text, (slot, share), color=INK, **where)
        axis.set_xticks(list(slots))
        axis.set(
            xlabel=f"position in the block (n: rounds that got there; hollow: fewer than {THIN})",
            ylabel="accepted, given that all before were",
            ylim=(0, 1.1),
        )
        axis.margins(x=0.08)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        return figure

    def sentences(self) -> list[str]:
        on, off = self.on.conditional, self.off.conditional
        enough = [min(both) >= THIN for both in zip(_reached(self.on), _reached(self.off))]
        later = [k for k in range(1, len(on)) if enough[k]]
        said = [
            f"With the Markov head tau is {number(self.on.tau)}, without it {number(self.off.tau)}: the head is worth "
            f"{100 * (self.on.tau / self.off.tau - 1):+.0f} %."
        ]
        text = f"The first draft is accepted in {percent(on[0])} of the rounds with it and {percent(off[0])} without"
        if later:
            last = later[-1]
            helped = all(on[k] > off[k] for k in later)
            verdict = "holds up the later positions" if helped else "does not help at every later position"
            text += (
                f"; at position {last + 1} it is {percent(on[last])} against {percent(off[last])}. The head {verdict}"
            )
        said.append(f"{text}.")
        if not all(enough):
            first = enough.index(False) + 1
            said.append(
                f"From position {first} on, fewer than {THIN} rounds got so far in one of the two: too few to compare."
            )
        return said

    def tables(self) -> list[Table]:
        slots = [str(slot + 1) for slot in range(len(self.on.proposed))]
        rows = []
        for label, counts in (("on", self.on), ("off", self.off)):
            rows.append((f"{label}: accepted, given those before", *(number(one) for one in counts.conditional)))
            rows.append((f"{label}: accepted with all before", *(number(one) for one in counts.survival)))
            rows.append((f"{label}: rounds that got there", *(f"{one:,}" for one in _reached(counts))))
        caption = f"{counted(self.on.rounds, 'round')} with the head, {counted(self.off.rounds, 'round')} without"
        return [Table(("position", *slots), tuple(rows), caption)]


def _reached(counts: Counts) -> list[int]:
    """By position: rounds in which all drafts before it were accepted, or it is the first; what its share is of."""
    return [counts.proposed[0], *counts.accepted[:-1]]
