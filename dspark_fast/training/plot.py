"""Training curves from ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def plot_training(metrics: Path, picture: Path) -> None:
    """Draw the three losses, the acceptance length and acceptance by position; held-out values as points.

    Args:
        metrics: as the trainer writes it.
        picture: PNG to write.

    Raises:
        ImportError: without matplotlib (extra ``plots``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return
    held_out = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    steps = [row["step"] for row in rows]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
    names = {
        "cross_entropy": "cross-entropy (nats)",
        "total_variation": "L1 distance (0 to 2)",
        "confidence": "BCE (nats)",
    }
    for color, (key, label) in zip(("C0", "C1", "C2"), names.items(), strict=True):
        axes[0].plot(steps, _smooth([row[key] for row in rows]), color=color, label=label)
        axes[0].plot([s for s, _ in held_out], [m[key] for _, m in held_out], "o", color=color, markersize=4)
    axes[0].set(title="losses", xlabel="step", yscale="log")
    axes[0].legend()
    axes[1].plot(steps, _smooth([row["tau"] for row in rows]), label="training text")
    known = [(step, metrics["tau"]) for step, metrics in held_out if metrics["tau"] is not None]
    axes[1].plot([s for s, _ in known], [tau for _, tau in known], "o", markersize=4, label="held out")
    axes[1].set(title="acceptance length, teacher-forced, T = 1", xlabel="step", ylabel="tokens per round")
    axes[1].legend()
    for slot in range(len(rows[0]["accept"])):
        axes[2].plot(steps, _smooth([row["accept"][slot] for row in rows]), label=f"slot {slot + 1}")
    axes[2].set(title="acceptance by block position", xlabel="step", ylabel="1 - L1 / 2")
    axes[2].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _smooth(values: list[Any], keep: float = 0.95) -> list[float]:
    """Exponential mean, unbiased at the start; NaN (a batch without full blocks) repeats the last."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if value is not None and value == value:
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight if weight else float("nan"))
    return out
