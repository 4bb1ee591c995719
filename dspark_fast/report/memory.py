"""Peak memory of plain, autoregressive-draft and DSpark decoding: weights, caches, and the process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dspark_fast.report.measurement import Measurement, NotMeasurable, Progress, Table, plain
from dspark_fast.report.style import COLOURS, INK, NAMES, PLAIN, canvas, from_zero, label_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 1e6
PARTS = {
    "target": ("target's weights", "#5b6673"),
    "drafter": ("drafter's own weights", COLOURS["dspark"]),
    "packed": ("weights packed for the CPU", "#a7b4c4"),
    "target_cache": ("target's keys and values", "#8fb996"),
    "drafter_cache": ("drafter's keys and values", "#e0b15c"),
}


@dataclass(frozen=True)
class Peak:
    """One way of decoding, in a process of its own. Bytes.

    Attributes:
        way: ``plain``, ``autoregressive`` or ``dspark``.
        target: weights and buffers of the target; drafter: those that the drafter does not share with it.
        packed: copies of weights that are laid out for a CPU.
        target_cache, drafter_cache: cached keys and values at their largest.
        libraries: resident before a model was loaded, the interpreter and the libraries; 0 on a GPU.
        peak: of the process: on a CPU the largest resident set, on a GPU what torch had allocated at most.
        tokens: of prompt and answer.
    """

    way: str
    target: int
    drafter: int
    target_cache: int
    drafter_cache: int
    libraries: int
    peak: int
    tokens: int
    packed: int = 0


@dataclass(frozen=True)
class Memory(Measurement):
    """Peaks of each way, a process each: what one has held, another cannot hide behind.

    Attributes:
        device: ``cpu`` or a GPU, which says what the peak is of.
        small: what the autoregressive drafter is.
        peaks: of each way.
    """

    device: str
    small: str
    peaks: tuple[Peak, ...]

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "Peak memory"

    @classmethod
    def measure(cls, subject: Any, progress: Progress) -> Memory:
        """``subject`` is the report's settings: no pair is loaded here, which would count."""
        peaks, small, device = [], "none", "cpu"
        for way in ("plain", "autoregressive", "dspark"):
            progress(f"memory: {NAMES[way]}, in a process of its own")
            found = _measured(way, subject.to_dict())
            if "none" in found:  # the target cannot be driven by an autoregressive drafter
                small = found["none"]
                continue
            device = found.pop("device")
            small = found.pop("small") or small
            peaks.append(Peak(way, **found))
        return cls(device, small, tuple(peaks))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Memory:
        return cls(data["device"], data["small"], tuple(Peak(**one) for one in data["peaks"]))

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))

    def draw(self) -> Figure:
        figure, (axis,) = canvas(height=4.8)
        places = range(len(self.peaks))
        bottom = [0.0] * len(self.peaks)
        parts = {**PARTS, "libraries": ("interpreter and libraries", "#c9ced4")} if self._resident else PARTS
        for name, (label, color) in parts.items():
            heights = [getattr(one, name) / MB for one in self.peaks]
            axis.bar(places, heights, 0.55, bottom=bottom, color=color, label=label)
            bottom = [a + b for a, b in zip(bottom, heights)]
        what = "largest resident set of the process" if self._resident else "most that torch had allocated"
        tops = [one.peak / MB for one in self.peaks]
        bars = axis.bar(places, tops, 0.66, facecolor="none", edgecolor=INK, linewidth=1.3, linestyle="--", label=what)
        label_bars(axis, bars, [f"{one:,.0f} MB" for one in tops])
        axis.set_xticks(list(places), [NAMES[one.way] for one in self.peaks])
        axis.set(ylabel="megabytes ($10^6$ bytes)")
        from_zero(axis, max(*tops, *bottom))
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
        axis.axhline(0, color=PLAIN, linewidth=0.8)
        return figure

    @property
    def _resident(self) -> bool:
        return self.device == "cpu"

    def sentences(self) -> list[str]:
        by = {one.way: one for one in self.peaks}
        plainly, ours = by["plain"], by["dspark"]
        own = ours.drafter + ours.drafter_cache
        said = [
            f"DSpark adds {own / MB:,.0f} MB to the target's {plainly.target / MB:,.0f} MB: {ours.drafter / MB:,.0f} "
            f"MB of weights of its own (embedding and LM head are the target's) and {ours.drafter_cache / MB:.1f} MB "
            f"of cached context at {ours.tokens} tokens"
            + (f"; {ours.packed / MB:,.0f} MB more are weights packed for the CPU." if ours.packed else "."),
            f"The peak of the process is {ours.peak / MB:,.0f} MB with it and {plainly.peak / MB:,.0f} MB without "
            f"({100 * (ours.peak / plainly.peak - 1):+.0f} %)"
            + ("; that includes loading, and what the libraries take." if self._resident else "."),
        ]
        if "autoregressive" in by:
            small = by["autoregressive"]
            said.append(
                f"The autoregressive drafter ({self.small}) has {small.drafter / MB:,.0f} MB of weights of its own and "
                f"{small.drafter_cache / MB:.1f} MB of keys and values."
            )
        return said

    def tables(self) -> list[Table]:
        columns = ("MB", *(label for label, _ in PARTS.values()), "before loading", "peak")
        rows = tuple(
            (
                NAMES[one.way],
                *(f"{getattr(one, name) / MB:,.1f}" for name in PARTS),
                f"{one.libraries / MB:,.0f}",
                f"{one.peak / MB:,.0f}",
            )
            for one in self.peaks
        )
        return [Table(columns, rows, f"{self.peaks[0].tokens} tokens of prompt and answer, batch 1")]


def _measured(way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the worker says of one way.

    Raises:
        NotMeasurable: if it failed, with the last line of what it said.
    """
    arguments = [sys.executable, "-m", "dspark_fast.report.memory_worker", way, json.dumps(settings)]
    done = subprocess.run(arguments, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"it ended with status {done.returncode}"
        raise NotMeasurable(f"the process that weighs {way} decoding failed: {why}")
    return json.loads(done.stdout.strip().splitlines()[-1])
