"""Acceptance length by domain: DSpark against an autoregressive drafter."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar

from dspark_fast.evaluation import Evaluation
from dspark_fast.report.measurement import Measurement, Progress, Table, counted, number, plain
from dspark_fast.report.style import COLOURS, INK, NAMES, canvas, from_zero, label_bars
from dspark_fast.report.subject import Equality, Subject, described, in_fp32

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Domains(Measurement):
    """tau of each way of drafting in each domain, greedy at batch 1.

    Attributes:
        small: what the autoregressive drafter is.
        ways: evaluations by ``autoregressive`` and ``dspark``; the first is left out where there is none.
        equality: all of their answers against plain decoding.
        exact: of a pair in 16 bits, the first answer of each domain decoded again in fp32 and held against plain
            decoding there; nothing where the pair is in fp32, or too large.
    """

    small: str
    ways: dict[str, Evaluation]
    equality: Equality
    exact: Equality

    name: ClassVar[str] = "domains"
    title: ClassVar[str] = "Acceptance length by domain"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Domains:
        answers = {"autoregressive": subject.autoregressive(progress), "dspark": subject.dspark(progress)}
        answers = {way: one for way, one in answers.items() if one is not None}
        equality = reduce(or_, (one.equality for one in answers.values()))
        other = in_fp32(subject)
        exact = Equality() if other is None else other.dspark(lambda what: progress(f"in fp32, {what}")).equality
        return cls(subject.small_name, {way: one.evaluation for way, one in answers.items()}, equality, exact)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Domains:
        ways = {way: Evaluation.from_dict(one) for way, one in data["ways"].items()}
        return cls(data["small"], ways, *(Equality.from_dict(data[name]) for name in ("equality", "exact")))

    def to_dict(self) -> dict[str, Any]:
        ways = {way: one.to_dict() for way, one in self.ways.items()}
        return {
            "small": self.small,
            "ways": ways,
            "equality": plain(asdict(self.equality)),
            "exact": plain(asdict(self.exact)),
        }

    def draw(self) -> Figure:
        figure, (axis,) = canvas()
        dspark = self.ways["dspark"]
        domains, width = list(dspark.domains), 0.8 / len(self.ways)
        highest = 1.0
        for place, (way, evaluation) in enumerate(self.ways.items()):
            left = [index - 0.4 + (place + 0.5) * width for index in range(len(domains) + 1)]
            taus = [evaluation.domains[domain].tau for domain in domains] + [evaluation.mean_tau]
            ends = [evaluation.interval(domain) for domain in domains] + [(evaluation.mean_tau,) * 2]
            label = f"{NAMES[way]}, {counted(evaluation.block_size, 'draft')} a round"
            bars = axis.bar(left, [_or_zero(tau) for tau in taus], 0.92 * width, color=COLOURS[way], label=label)
            for x, tau, (low, high) in zip(left[:-1], taus, ends):
                if high > low:
                    axis.errorbar(x, tau, [[tau - low], [high - tau]], color=INK, capsize=3, linewidth=1)
            tops = [_or_zero(high) for _, high in ends]
            label_bars(axis, bars, [number(tau) for tau in taus], tops)
            highest = max(highest, *tops)
        plain = axis.axhline(1, color=COLOURS["plain"], linewidth=1.4, linestyle="--", label="plain decoding: 1")
        names = [f"{domain}\n{counted(dspark.domains[domain].prompts, 'prompt')}" for domain in domains]
        axis.set_xticks(range(len(domains) + 1), [*names, "mean"])
        axis.set(ylabel="tau: tokens committed per round")
        axis.set_xlabel("whiskers: 95 %, prompts drawn anew", fontsize=9)
        from_zero(axis, highest)
        keys = [*axis.containers, plain]
        keys = [one for one in keys if not one.get_label().startswith("_")]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        return figure

    def sentences(self) -> list[str]:
        ours = self.ways["dspark"]
        taus = {domain: one.tau for domain, one in ours.domains.items() if not math.isnan(one.tau)}
        said = []
        if len(taus) > 1:
            best, worst = max(taus, key=taus.__getitem__), min(taus, key=taus.__getitem__)
            said.append(
                f"DSpark commits {number(ours.mean_tau)} tokens a round on the mean of {len(taus)} domains: most in "
                f"{best} ({taus[best]:.2f}), least in {worst} ({taus[worst]:.2f})."
            )
        elif taus:
            said.append(f"DSpark commits {number(ours.pooled.tau)} tokens a round.")
        theirs = self.ways.get("autoregressive")
        if theirs is not None:
            behind = [name for name in taus if taus[name] < theirs.domains[name].tau]
            text = f"The autoregressive drafter ({described(self.small)}) commits {number(theirs.mean_tau)}"
            text += f" and is ahead in {', '.join(behind)}." if behind else " and is behind in every domain."
            said.append(
                f"{text} It drafts token by token, {counted(theirs.block_size, 'pass')} a round".replace(
                    "passs", "passes"
                )
                + f", where DSpark makes one for {counted(ours.block_size, 'draft')}."
            )
        if self.exact.answers:
            said.append(
                f"Decoded again in fp32, where no near-tie excuses a difference, {self.exact.identical} of "
                f"{counted(self.exact.answers, 'answer')} have the tokens of plain decoding."
            )
        return said

    def tables(self) -> list[Table]:
        rows = []
        for way, evaluation in self.ways.items():
            for domain, counts in evaluation.domains.items():
                low, high = evaluation.interval(domain)
                cells = (str(counts.prompts), f"{counts.rounds:,}", number(counts.tau))
                rows.append((f"{NAMES[way]}, {domain}", *cells, f"{number(low)} to {number(high)}"))
            prompts, rounds = evaluation.pooled.prompts, evaluation.pooled.rounds
            rows.append((f"{NAMES[way]}, mean", str(prompts), f"{rounds:,}", number(evaluation.mean_tau), ""))
        caption = "tau pooled over rounds, bonus included; the interval draws the prompts anew (bootstrap)"
        return [Table(("", "prompts", "rounds", "tau", "95 % interval"), tuple(rows), caption)]


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
