"""Training curves from ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOSSES = {
    "cross_entropy": ("cross-entropy (nats)", "tab:blue"),
    "total_variation": ("L1 distance (0 to 2)", "tab:orange"),
    "confidence": ("BCE (nats)", "tab:purple"),
}


def plot_training(metrics: Path, picture: Path) -> None:
    """Draw the losses, the acceptance length, acceptance by block position and the confidence head's calibration.

    Lines of training text are exponential means; held-out values are points. Without a confidence head, or in metrics
    of before calibration was noted, the last panel says so.

    Args:
        metrics: as the trainer writes it; nothing is drawn if it is empty.
        picture: PNG to write.

    Raises:
        ImportError: without matplotlib (extra ``plots``).
    """
    # Not pyplot, which would change the backend of a process that draws for itself.
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return
    held_out = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    axes = figure.subplots(2, 2)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    _losses(axes[0, 0], rows, held_out)
    _acceptance_length(axes[0, 1], rows, held_out)
    _positions(axes[1, 0], rows, held_out)
    _calibration(axes[1, 1], held_out)
    if rows[-1].get("stopped"):
        figure.suptitle(f"stopped at step {rows[-1]['step']:,}: {rows[-1]['stopped']}", fontsize=12)
    figure.savefig(picture, dpi=120)


def _losses(axis: Any, rows: list[dict[str, Any]], held_out: list[tuple[int, dict[str, Any]]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    steps = [row["step"] for row in rows]
    for key, (label, color) in LOSSES.items():
        values = [row[key] for row in rows]
        if not any(values):  # a drafter without a confidence head
            continue
        axis.plot(steps, _smooth(values), color=color, label=label)
        _points(axis, held_out, lambda one, key=key: one[key], color=color)
    if held_out:
        axis.plot([], [], "o", color="0.4", markersize=4, label="held out")
    axis.set(title="losses", xlabel="step", yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    _legend_above(axis)


def _acceptance_length(axis: Any, rows: list[dict[str, Any]], held_out: list[tuple[int, dict[str, Any]]]) -> None:
    axis.plot([row["step"] for row in rows], _smooth([row["tau"] for row in rows]), color="0.6", label="training text")
    known = [(step, one["tau"]) for step, one in held_out if _is_known(one["tau"])]
    if known:
        best = max(known, key=lambda point: point[1])
        axis.plot(*zip(*known, strict=True), "o-", color="tab:blue", markersize=4, linewidth=1, label="held out")
        label = f"best held out: {best[1]:.2f} at step {best[0]:,}"
        axis.plot(*best, "o", markersize=11, fillstyle="none", color="tab:red", linestyle="", label=label)
    axis.set(title="acceptance length (teacher-forced, temperature 1)", xlabel="step", ylabel="tokens per round")
    _legend_above(axis)


def _positions(axis: Any, rows: list[dict[str, Any]], held_out: list[tuple[int, dict[str, Any]]]) -> None:
    """On held-out text; on training text, smoothed, if none was held out."""
    ends = []
    for slot, color in enumerate(_sequence(len(rows[0]["accept"]))):
        if held_out:
            steps, values = _points(axis, held_out, lambda one, slot=slot: one["accept"][slot], color=color, line=True)
        else:
            steps, values = [row["step"] for row in rows], _smooth([row["accept"][slot] for row in rows])
            axis.plot(steps, values, color=color)
        if values and _is_known(values[-1]):
            ends.append((values[-1], f"slot {slot + 1}: {values[-1]:.2f}", color, steps[-1]))
    text = "held-out" if held_out else "training"
    axis.set(title=f"acceptance by block position ({text} text)", xlabel="step", ylabel="1 - L1 / 2")
    axis.set_xlim(left=0)
    low, high = axis.get_ylim()
    apart = 0.055 * (high - low)  # of the panel's height is one line of text
    for (value, label, color, step), y in zip(ends, _spread([end[0] for end in ends], apart), strict=True):
        axis.annotate(
            label,
            (step, value),
            xytext=(1.03, (y - low) / (high - low)),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontweight="bold",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.7,
                "shrinkA": 2,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )
    axis.set_ylim(low, high)


def _calibration(axis: Any, held_out: list[tuple[int, dict[str, Any]]]) -> None:
    axis.set(title="calibration of the confidence head", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.set(xlabel="mean predicted confidence", ylabel="mean c* on held-out text")
    axis.plot([0, 1], [0, 1], "--", color="0.6", linewidth=1)
    looked = [(step, one) for step, one in held_out if one.get("calibration")]
    if not looked:
        axis.text(0.3, 0.7, "no data", ha="center", va="center", color="0.4", fontsize=13)
        return
    step, last = looked[-1]
    bins = last["calibration"]
    largest = max((count for slot in bins for count, _, _ in slot), default=0)
    errors = last["ece"]
    for slot, color in enumerate(_sequence(len(bins))):
        filled = [one for one in bins[slot] if one[0]]
        x, y = [one[1] for one in filled], [one[2] for one in filled]
        error = f"{errors[slot]:.3f}" if _is_known(errors[slot]) else "-"
        axis.plot(x, y, color=color, linewidth=1.4, label=f"slot {slot + 1}: {error}")
        # A point's area is its bin's share of the drafts: what lies off the diagonal matters by it.
        axis.scatter(x, y, s=[8 + 90 * one[0] / largest for one in filled], color=color, alpha=0.8, linewidths=0)
    axis.set_title(f"calibration of the confidence head (step {step:,})")
    axis.legend(
        frameon=False, loc="upper left", bbox_to_anchor=(1.02, 1), title="expected\ncalibration error", alignment="left"
    )


def _legend_above(axis: Any) -> None:
    """Between the title and the panel: inside it there is no place where no curve may come."""
    handles, labels = axis.get_legend_handles_labels()
    axis.set_title(axis.get_title(), pad=26)
    axis.legend(
        handles,
        labels,
        frameon=False,
        fontsize=9,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.99),
        ncols=len(labels),
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _points(
    axis: Any, held_out: list[tuple[int, dict[str, Any]]], value: Any, *, color: Any, line: bool = False
) -> tuple[list[int], list[float]]:
    """Draw what ``value`` finds in each look at held-out text, unknown ones left out."""
    found = [(step, value(one)) for step, one in held_out if _is_known(value(one))]
    steps, values = [step for step, _ in found], [number for _, number in found]
    axis.plot(steps, values, "o-" if line else "o", color=color, markersize=4, linewidth=1.2)
    return steps, values


def _sequence(count: int) -> list[Any]:
    """Colours in the order of block positions, dark to light; not up to the palest, which paper swallows."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * slot / max(1, count - 1)) for slot in range(count)]


def _spread(values: list[float], apart: float) -> list[float]:
    """The values moved as little as need be for labels to stand ``apart``; order and mean of what touches are kept."""
    order = sorted(range(len(values)), key=values.__getitem__)
    groups: list[list[int]] = []

    def start(group: list[int]) -> float:
        return sum(values[i] for i in group) / len(group) - apart * (len(group) - 1) / 2

    for index in order:
        groups.append([index])
        while len(groups) > 1 and start(groups[-2]) + apart * len(groups[-2]) > start(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    placed = list(values)
    for group in groups:
        for row, index in enumerate(group):
            placed[index] = start(group) + apart * row
    return placed


def _is_known(value: Any) -> bool:
    return value is not None and value == value


def _smooth(values: list[Any], keep: float = 0.95) -> list[float]:
    """Exponential mean, unbiased at the start; NaN (a batch without full blocks) repeats the last."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if _is_known(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight if weight else float("nan"))
    return out
