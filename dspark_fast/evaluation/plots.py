"""Plots of evaluations: acceptance length by domain, acceptance by block position."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from dspark_fast.evaluation.counts import Counts
from dspark_fast.evaluation.result import Evaluation

FEW = 30  # drafts, below which a share may be off by 0.18 (95 % of draws, at a half)


def plot_tau(
    results: Sequence[Evaluation], path: str | os.PathLike[str], *, labels: Sequence[str] | None = None, title: str = ""
) -> None:
    """Draw tau as bars: a group for each domain and for their mean, a bar for each evaluation.

    The whiskers are :meth:`Evaluation.interval`. A domain that an evaluation lacks has no bar there.

    Args:
        results: one or more, of one set of prompts.
        path: PNG to write.
        labels: of the evaluations; None: their temperatures.
        title: above the plot.

    Raises:
        ValueError: without results, or for another number of labels.
        ImportError: without matplotlib (extra ``plots``).
    """
    names = _labels(results, labels)
    # Not pyplot, which would change the backend of a process that draws for itself.
    from matplotlib.figure import Figure

    domains = list(dict.fromkeys(domain for one in results for domain in one.domains))
    groups = [*domains, "mean"] if len(domains) > 1 else domains
    figure = Figure(figsize=(max(6.0, 1.2 + 0.65 * len(groups) * (len(results) + 0.8)), 4.6), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(results)
    colours = _colours(len(results))
    top = 1.0
    for index, (one, name) in enumerate(zip(results, names)):
        for group, domain in enumerate(groups):
            value, low, high = _bar(one, domain)
            if math.isnan(value):
                continue
            place = group + (index - (len(results) - 1) / 2) * width
            axis.bar(place, value, 0.92 * width, color=colours[index], alpha=0.65 if domain == "mean" else 1.0)
            end = value if math.isnan(high) else high
            if not math.isnan(low):
                axis.errorbar(place, value, [[value - low], [high - value]], color="0.25", capsize=3, linewidth=1)
            axis.annotate(f"{value:.2f}", (place, end), (0, 3), textcoords="offset points", ha="center", fontsize=9)
            top = max(top, end)
        axis.bar(0, 0, color=colours[index], label=name)
    axis.axhline(1, color="0.3", linestyle="--", linewidth=1, zorder=0)
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axis.annotate("plain\ndecoding", (1, 1), (3, 0), va="center", fontsize=8, color="0.3", **where)
    axis.set_xticks(range(len(groups)), [_tick(results[0], domain) for domain in groups])
    axis.set(ylim=(0, 1.12 * top), ylabel="tau: tokens per round, bonus included", title=title)
    axis.spines[["top", "right"]].set_visible(False)
    told = {"title": "whiskers: 95 % of tau, prompts drawn anew (bootstrap)", "title_fontsize": 8}
    figure.legend(loc="outside lower center", ncols=_columns(len(results), 4), frameon=False, **told)
    figure.savefig(path, dpi=120)


def plot_positions(
    results: Sequence[Evaluation], path: str | os.PathLike[str], *, labels: Sequence[str] | None = None, title: str = ""
) -> None:
    """Draw conditional acceptance and survival by block position: a row for each evaluation, a line for each domain.

    Args:
        results: one or more.
        path: PNG to write.
        labels: of the evaluations; None: their temperatures.
        title: above the plot.

    Raises:
        ValueError: without results, or for another number of labels.
        ImportError: without matplotlib (extra ``plots``).
    """
    names = _labels(results, labels)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 0.7 + 3.6 * len(results)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1)
    grid = figure.subplots(len(results), 2, squeeze=False)
    domains = list(dict.fromkeys(domain for one in results for domain in one.domains))
    colours = dict(zip(domains, _colours(len(domains))))
    handles: dict[str, Any] = {}
    for (left, right), one, name in zip(grid, results, names):
        slots = list(range(1, one.block_size + 1))
        lines = [(domain, counts, {"color": colours[domain]}) for domain, counts in one.domains.items()]
        if len(lines) > 1:
            lines.append(("all, pooled", one.pooled, {"color": "black", "linestyle": "--"}))
        for domain, counts, style in lines:
            panels = ((left, counts.conditional, _reached(counts)), (right, counts.survival, counts.proposed))
            for axis, values, judged in panels:
                (line,) = axis.plot(slots, values, linewidth=1.6, label=domain, clip_on=False, **style)
                for few, fill in ((False, style["color"]), (True, "white")):
                    some = [(x, y) for x, y, n in zip(slots, values, judged) if (n < FEW) == few]
                    marks = {"linestyle": "", "marker": "o", "markersize": 5, "clip_on": False, "zorder": 3}
                    axis.plot(*zip(*some), color=style["color"], markerfacecolor=fill, **marks) if some else None
            handles.setdefault(domain, line)
        total = one.pooled
        for axis, what, judged in (
            (left, "conditional acceptance", _reached(total)),
            (right, "survival", total.proposed),
        ):
            axis.set_xticks(slots, [f"{slot}\n{n:,}" for slot, n in zip(slots, judged)])
            axis.set(ylim=(0, 1), title=f"{what}, {name}", xlabel="block position; below it, drafts of all domains")
            axis.set_xlim(0.6, one.block_size + 0.4)
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        left.set_ylabel("share accepted, if those before it were")
        right.set_ylabel("share accepted, with all before it")
    (few,) = grid[0, 0].plot([], [], "o", color="0.4", markerfacecolor="white", markersize=5)
    handles[f"of fewer than {FEW} drafts"] = few
    if title:
        figure.suptitle(title)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=_columns(len(handles), 7), frameon=False)
    figure.savefig(path, dpi=120)


def _labels(results: Sequence[Evaluation], labels: Sequence[str] | None) -> list[str]:
    if not results:
        raise ValueError("there are no results: accepted is one or more")
    if labels is None:
        return [f"temperature {one.temperature:g}" + ("" if one.temperature else " (greedy)") for one in results]
    if len(labels) != len(results):
        raise ValueError(f"there are {len(labels)} labels for {len(results)} results: accepted is one for each")
    return list(labels)


def _bar(one: Evaluation, domain: str) -> tuple[float, float, float]:
    """Height and the ends of the whisker; NaN where there is none."""
    if domain == "mean":
        return one.mean_tau, math.nan, math.nan
    if domain not in one.domains:
        return math.nan, math.nan, math.nan
    return one.domains[domain].tau, *one.interval(domain)


def _tick(one: Evaluation, domain: str) -> str:
    if domain == "mean":
        return f"mean of\n{len(one.mean_of)} domains"
    prompts = one.domains[domain].prompts if domain in one.domains else 0
    return f"{domain}\n{prompts} prompt{'' if prompts == 1 else 's'}"


def _reached(counts: Counts) -> tuple[int, ...]:
    """By block position, how often a draft there was judged with all before it accepted, but for stop tokens."""
    return counts.proposed[:1] + counts.accepted[:-1]


def _columns(count: int, most: int) -> int:
    """Of a legend, so that no row is all but empty."""
    return math.ceil(count / math.ceil(count / most))


def _colours(count: int) -> list[Any]:
    """Told apart by colour-blind readers too, up to eight."""
    known = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#F0E442"]
    return [known[index % len(known)] for index in range(count)]
