"""What the confidence head says along a block, its running product, and what the target then accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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
    shown,
)
from dspark_fast.report.recording import Block
from dspark_fast.report.style import BAD, DSPARK, GOOD, INK, PLAIN, canvas, key_above, literal
from dspark_fast.report.subject import Equality, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Along:
    """Means over rounds, by block position.

    Attributes:
        reached: rounds in which the drafts before this one were accepted, and it was judged.
        said: mean confidence c_k over these rounds.
        accepted: share of these rounds in which it was accepted.
        proposed: rounds in which it was judged.
        product: mean of the running product c_1 ... c_k over these.
        survived: share of these in which it was accepted with all before it.
    """

    reached: tuple[int, ...]
    said: tuple[float, ...]
    accepted: tuple[float, ...]
    proposed: tuple[int, ...]
    product: tuple[float, ...]
    survived: tuple[float, ...]

    @classmethod
    def of(cls, blocks: Sequence[Block], size: int) -> Along:
        """Of blocks of ``size`` drafts."""
        columns: list[tuple[int, float, float, int, float, float]] = []
        for slot in range(size):
            judged = [one for one in blocks if one.proposed > slot]
            there = [one for one in judged if one.accepted >= slot]
            columns.append(
                (
                    len(there),
                    _mean([one.confidence[slot] for one in there]),
                    _mean([float(one.accepted > slot) for one in there]),
                    len(judged),
                    _mean([math.prod(one.confidence[: slot + 1]) for one in judged]),
                    _mean([float(one.accepted > slot) for one in judged]),
                )
            )
        return cls(*(tuple(column) for column in zip(*columns, strict=True)))

    @classmethod
    def from_dict(cls, data: dict[str, list[Any]]) -> Along:
        known = {key: tuple(math.nan if one is None else one for one in values) for key, values in data.items()}
        return cls(**known)


@dataclass(frozen=True)
class Confidence(Measurement):
    """The confidence head against what was accepted, greedy at batch 1, no threshold, all domains together.

    Attributes:
        rounds: blocks that were looked at.
        along: by position.
        example: one block, and its confidences c_k.
        equality: all answers against plain decoding.
    """

    rounds: int
    along: Along
    example: Strip
    example_confidence: tuple[float, ...]
    equality: Equality

    name: ClassVar[str] = "confidence"
    title: ClassVar[str] = "Confidence along a block"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Confidence:
        if not subject.draft.config.enable_confidence_head:
            raise NotMeasurable("the drafter has no confidence head")
        answers = subject.dspark(progress)
        blocks = [block for rounds in answers.blocks for block in rounds]
        if not blocks:
            raise NotMeasurable("every answer ends with its first token: there is no block to look at")
        size = subject.draft.config.block_size
        # The first block of which more than one draft was accepted and not all, if there is one: it shows both.
        mixed = (one for one in blocks if 1 < one.accepted < one.proposed == size)
        block = next(mixed, blocks[0])
        following = None if block.following is None else subject.text(block.following)
        drafts = tuple(map(subject.text, block.drafts))
        strip = Strip("one block", subject.text(block.anchor), drafts, block.accepted, following)
        return cls(len(blocks), Along.of(blocks, size), strip, block.confidence, answers.equality)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Confidence:
        example = Strip.from_dict(data["example"]), tuple(data["example_confidence"])
        return cls(data["rounds"], Along.from_dict(data["along"]), *example, Equality.from_dict(data["equality"]))

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))

    @property
    def product(self) -> tuple[float, ...]:
        """Of the example: c_1 ... c_k."""
        return tuple(math.prod(self.example_confidence[: k + 1]) for k in range(len(self.example_confidence)))

    def strips(self) -> list[Strip]:
        return [self.example]

    def draw(self) -> Figure:
        figure, (left, right) = canvas(2, width=10.4, height=4.6, sharey=True)
        slots = range(1, len(self.along.said) + 1)
        left.plot(slots, self.along.said, "o-", color=DSPARK, linewidth=2, label="confidence $c_k$")
        left.plot(slots, self.along.accepted, "o--", color=GOOD, linewidth=2, label="accepted, given those before")
        left.plot(slots, self.along.product, "s-", color=DSPARK, alpha=0.55, label="running product of $c$")
        left.plot(slots, self.along.survived, "s--", color=GOOD, alpha=0.55, label="accepted with all before")
        left.set_xticks(list(slots))
        left.set(title=f"means over {counted(self.rounds, 'block')}", xlabel="position in the block", ylim=(0, 1))
        left.set(ylabel="probability, or share of rounds")
        colours = [GOOD if slot <= self.example.accepted else BAD for slot in slots]
        right.bar(slots, self.example_confidence, 0.7, color=colours, alpha=0.8)
        right.plot(slots, self.product, "s-", color=INK, linewidth=1.5)
        right.tick_params(labelleft=True)
        names = right.set_xticks(list(slots), [_short(text) for text in self.example.drafts], rotation=35, ha="right")
        literal(label for tick in names for label in (tick.label1,))
        right.set(title=f"one block, after {_short(self.example.anchor)}", xlabel="drafted token")
        literal([right.title])
        from matplotlib.patches import Patch

        judged = ((GOOD, "$c_k$, accepted"), (BAD, "$c_k$, rejected"))
        keys = [*(Patch(color=color, alpha=0.8, label=label) for color, label in judged), right.lines[0]]
        right.lines[0].set_label("running product")
        key_above(left, 1, ncols=2)
        key_above(right, 1, ncols=3, handles=keys)
        for axis in (left, right):
            axis.axhline(0, color=PLAIN, linewidth=0.8)
        return figure

    def sentences(self) -> list[str]:
        along = self.along
        reached = sum(along.reached)
        said, got = (
            sum(one * n for one, n in zip(means, along.reached) if n) / reached
            for means in (along.said, along.accepted)
        )
        verdict = (
            "promises too much" if said > got + 0.02 else "promises too little" if said < got - 0.02 else "is right"
        )
        last = max((k for k, n in enumerate(along.proposed) if n), default=0)
        return [
            f"Of the drafts that the target came to, {percent(got)} were accepted; the head said {percent(said)} of "
            f"them would be: on average it {verdict}.",
            f"The running product falls from {percent(along.product[0])} at the first position to "
            f"{percent(along.product[last])} at position {last + 1}, where {percent(along.survived[last])} of the "
            "blocks really got so far. The head was trained on the overlap of the two laws at temperature 1; greedy "
            "acceptance, as here, is a yes or no.",
        ]

    def tables(self) -> list[Table]:
        along, slots = self.along, [str(slot + 1) for slot in range(len(self.along.said))]
        rows = (
            ("mean confidence", *(number(one) for one in along.said)),
            ("accepted, given those before", *(number(one) for one in along.accepted)),
            ("of so many rounds", *(f"{one:,}" for one in along.reached)),
            ("mean running product", *(number(one) for one in along.product)),
            ("accepted with all before", *(number(one) for one in along.survived)),
            ("of so many rounds", *(f"{one:,}" for one in along.proposed)),
        )
        tokens = [shown(text) for text in self.example.drafts]
        one = (
            ("confidence", *(number(c) for c in self.example_confidence)),
            ("running product", *(number(c) for c in self.product)),
        )
        return [Table(("position", *slots), rows, "means"), Table(("the block", *tokens), one, "the example")]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _short(text: str, most: int = 14) -> str:
    return shown(text if len(text) <= most else f"{text[: most - 1]}…")
