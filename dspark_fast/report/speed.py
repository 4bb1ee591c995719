"""Decoding speed of plain, autoregressive-draft and DSpark decoding, prefill apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.generation.streamers import BaseStreamer

from dspark_fast import generation
from dspark_fast.benchmark.verdict import MOST_SPREAD
from dspark_fast.first_token import timed
from dspark_fast.report.measurement import Measurement, NotMeasurable, Progress, Table, counted, number, plain
from dspark_fast.report.style import COLOURS, INK, NAMES, canvas, from_zero, label_bars
from dspark_fast.report.subject import Equality, Subject, described, untrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPEATS = 3


@dataclass(frozen=True)
class Run:
    """One timed call.

    Attributes:
        prompt: its id; repeat: the how many-th time.
        way: ``plain`` (transformers' own generate), ``undrafted`` (ours without a drafter), ``autoregressive`` or
            ``dspark``.
        prefill: seconds to the first token.
        decode: seconds from there to the end.
        tokens: new ones, the first included.
    """

    prompt: str
    repeat: int
    way: str
    prefill: float
    decode: float
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / self.decode


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Speed(Measurement):
    """Each way answers the same prompts, one after the other, several times, every time in another order.

    The same instrument on all sides: a streamer that notes when the first token comes. Ratios are of runs of the same
    prompt and repeat; their median is the speedup.

    Attributes:
        small: what the autoregressive drafter is.
        runs: all of them.
        equality: every run's tokens against plain decoding.
    """

    small: str
    runs: tuple[Run, ...]
    equality: Equality

    name: ClassVar[str] = "speed"
    title: ClassVar[str] = "Decoding speed"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Speed:
        first = [next(i for i, one in enumerate(subject.prompts) if one.domain == name) for name in subject.domains]
        expected = subject.plain(progress)
        chosen = [index for index in first if len(expected[index]) > 1]
        if not chosen:
            raise NotMeasurable("every answer ends with its first token: there is nothing to time")
        ways = _ways(subject)
        for way, call in ways.items():
            progress(f"warming up: {way}")
            _timed(call, subject.ids(chosen[0]))
        runs, equality, order = [], Equality(), list(ways)
        for repeat in range(REPEATS):
            for index in chosen:
                for way in order:
                    progress(f"{way}: prompt {subject.prompts[index].id}, run {repeat + 1} of {REPEATS}")
                    tokens, prefill, decode = _timed(ways[way], subject.ids(index))
                    equality += subject.equality(index, tokens, expected[index], f"timed, {way}")
                    runs.append(Run(subject.prompts[index].id, repeat, way, prefill, decode, len(tokens)))
                order = order[1:] + order[:1]  # so that a drift of the machine's speed favours nobody
        return cls(subject.small_name, tuple(runs), equality)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Speed:
        runs = tuple(Run(**{key: one[key] for key in Run.__dataclass_fields__}) for one in data["runs"])
        return cls(data["small"], runs, Equality.from_dict(data["equality"]))

    def to_dict(self) -> dict[str, Any]:
        return plain(
            {
                "small": self.small,
                "speedup": {way: asdict(self.speedup(way)) for way in self.ways},
                "gain": asdict(self.gain) if self.gain else None,
                "tokens_per_second": {way: asdict(self.speed(way)) for way in self.ways},
                "prefill_seconds": {way: asdict(self.prefill(way)) for way in self.ways},
                "runs": [asdict(one) for one in self.runs],
                "equality": asdict(self.equality),
            }
        )

    @property
    def ways(self) -> list[str]:
        """Those that ran, plain first."""
        return [way for way in COLOURS if any(run.way == way for run in self.runs)]

    def speed(self, way: str) -> Spread:
        """Tokens per second after the first."""
        return Spread.of([run.speed for run in self.runs if run.way == way])

    def prefill(self, way: str) -> Spread:
        """Seconds to the first token."""
        return Spread.of([run.prefill for run in self.runs if run.way == way])

    def speedup(self, way: str, over: str = "plain") -> Spread:
        """Over another way, run by run."""
        base = {(run.prompt, run.repeat): run.speed for run in self.runs if run.way == over}
        return Spread.of([run.speed / base[run.prompt, run.repeat] for run in self.runs if run.way == way])

    @property
    def gain(self) -> Spread | None:
        """DSpark over ours without a drafter: what speculation alone gives. None where that was not run."""
        return self.speedup("dspark", over="undrafted") if "undrafted" in self.ways else None

    def draw(self) -> Figure:
        figure, (left, right) = canvas(2, width=10.8, width_ratios=[3, 2])
        names = [NAMES[way].replace(" ", "\n", 1) for way in self.ways]
        panels = (
            (left, [self.speedup(way) for way in self.ways], 1.0),
            (right, [self.prefill(way) for way in self.ways], 1000.0),
        )
        for axis, spreads, scale in panels:
            medians, tops = [scale * one.median for one in spreads], [scale * one.most for one in spreads]
            bars = axis.bar(range(len(names)), medians, 0.65, color=[COLOURS[way] for way in self.ways])
            ends = [
                [scale * (one.median - one.least) for one in spreads],
                [scale * (one.most - one.median) for one in spreads],
            ]
            axis.errorbar(range(len(names)), medians, ends, fmt="none", color=INK, capsize=4, linewidth=1)
            texts = [f"{one:.0f} ms" for one in medians]
            if axis is left:
                speeds = [self.speed(way).median for way in self.ways]
                texts = [f"{one:.2f}x\n{speed:.1f} tokens/s" for one, speed in zip(medians, speeds)]
            label_bars(axis, bars, texts, tops)
            axis.set_xticks(range(len(names)), names, fontsize=9)
            from_zero(axis, max(tops), room=1.22)
        pairs = sum(run.way == "dspark" for run in self.runs)
        left.set(title="decoding, after the first token", ylabel="speed over plain decoding")
        caption = f"median of {counted(pairs, 'pair')} of runs; whiskers: least and most"
        figure.supxlabel(caption + self._which_drafter(), fontsize=9)
        right.set(title="prefill, to the first token", ylabel="milliseconds")
        return figure

    def _which_drafter(self) -> str:
        """To be added to a caption: what stands in it as the autoregressive drafter."""
        return f"; autoregressive drafter: {described(self.small)}" if "autoregressive" in self.ways else ""

    def sentences(self) -> list[str]:
        ours = self.speedup("dspark")
        verb = "times as fast as" if ours.median >= 1 else "times the speed of"
        pairs = sum(run.way == "dspark" for run in self.runs)
        said = [
            f"DSpark decodes {ours.median:.2f} {verb} transformers' own generate (median of {counted(pairs, 'pair')} "
            f"of runs, {ours.least:.2f} to {ours.most:.2f})" + ("." if ours.median >= 1 else ": here it loses.")
        ]
        if self.gain is not None:
            alone = self.speedup("undrafted")
            said.append(
                f"Ours without a drafter runs at {alone.median:.2f} of generate's speed ({alone.least:.2f} to "
                f"{alone.most:.2f}); over that, DSpark is {self.gain.median:.2f} times as fast "
                f"({self.gain.least:.2f} to {self.gain.most:.2f}), which is what speculation gives."
            )
        if "autoregressive" in self.ways:
            theirs = self.speedup("autoregressive")
            won = "gains more than it costs" if theirs.median > 1 else "costs more than it gains"
            which = "untrained drafter" if untrained(self.small) else "drafter"
            said.append(
                f"The autoregressive drafter ({self.small}) runs at {theirs.median:.2f} of plain decoding's speed "
                f"({theirs.least:.2f} to {theirs.most:.2f}): this {which} {won}; no other was measured."
            )
        prefill = {way: 1000 * self.prefill(way).median for way in self.ways}
        extra = prefill["dspark"] - prefill["plain"]
        said.append(
            f"The first token takes {prefill['dspark']:.0f} ms with DSpark and {prefill['plain']:.0f} ms without "
            f"({extra:+.0f} ms), which no speed on this page contains."
        )
        if self.disturbed:
            plainly = self.speed("plain")
            said.append(
                f"Plain decoding alone varies from {plainly.least:.1f} to {plainly.most:.1f} tokens per second, so "
                "something else was using this machine: do not trust these speeds."
            )
        return said

    @property
    def disturbed(self) -> bool:
        """Whether plain decoding alone varied so much that no speed of this run is to be trusted."""
        plainly = self.speed("plain")
        return plainly.most > MOST_SPREAD * plainly.least

    def tables(self) -> list[Table]:
        rows = []
        for way in self.ways:
            speed, ratio, prefill = self.speed(way), self.speedup(way), self.prefill(way)
            rows.append(
                (
                    NAMES[way],
                    f"{speed.median:.1f} ({speed.least:.1f} to {speed.most:.1f})",
                    "1"
                    if way == "plain"
                    else f"{number(ratio.median)} ({number(ratio.least)} to {number(ratio.most)})",
                    f"{1000 * prefill.median:.0f} ({1000 * prefill.least:.0f} to {1000 * prefill.most:.0f})",
                )
            )
        prompts = len({run.prompt for run in self.runs})
        caption = (
            f"median (least to most) over {counted(prompts, 'prompt')}, {counted(REPEATS, 'run')} of each, batch 1"
        )
        return [Table(("", "tokens/s", "speedup", "prefill, ms"), tuple(rows), caption + self._which_drafter())]


Call = Callable[[torch.Tensor, BaseStreamer], torch.Tensor]


def _ways(subject: Subject) -> dict[str, Call]:
    """What to time, by name."""
    model, pad = subject.model, subject.model.generation_config.pad_token_id

    def options(ids: torch.Tensor, streamer: BaseStreamer) -> dict[str, Any]:
        return {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": subject.max_new_tokens,
            "do_sample": False,
            "pad_token_id": 0 if pad is None else pad,
            "streamer": streamer,
        }

    def drafted(drafter: Any) -> Call:
        # never switched off: the drafter is what is measured, also where it loses
        return lambda ids, streamer: generation.generate(
            model, drafter, ids, off_switch=False, **options(ids, streamer)
        )

    ways: dict[str, Call] = {"plain": lambda ids, streamer: model.generate(ids, **options(ids, streamer))}
    if subject.small is not None:
        ways["autoregressive"] = drafted(subject.small)
    ways["dspark"] = drafted(subject.draft)
    ways["undrafted"] = drafted(None)
    return ways


def _timed(call: Call, ids: torch.Tensor) -> tuple[list[int], float, float]:
    """New tokens; seconds to the first of them, and from there."""
    found = timed(lambda streamer: call(ids, streamer), ids.device)
    return found.output[0, ids.shape[1] :].tolist(), found.first, found.after
