"""How often the losslessness suite alarms on correct code: never, and its p-values are uniform.

    python bench/false_alarms.py

200 reseeded runs of each op-level row and 20 of each loop-level row, at the sample size that sees a total variation of
5 %: a false alarm is as likely at any size, since the level is the same. Stopped and called again it goes on; it writes
``false_alarms.json`` and ``false_alarms.png``, and ends with status 1 if a row alarmed or the p-values are not uniform.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_folder
from scipy.stats import kstest

from dspark_fast.losslessness import ROWS, run_row
from dspark_fast.losslessness.gtest import ALARM, sample_size

RUNS = {"op": 200, "loop": 20}
DISTANCE = 0.05
UNIFORM = 1e-3  # least p-value of the Kolmogorov-Smirnov test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="do not go on from what is there")
    arguments = parser.parse_args()
    path = results_folder() / "false_alarms.json"
    found: dict[str, Any] = {} if arguments.again or not path.exists() else json.loads(path.read_text())["p_values"]

    rows = [row for row in ROWS if row.level in RUNS]
    found = {row.name: found.get(row.name, []) for row in rows}
    for seed in range(max(RUNS.values())):
        for row in rows:
            if len(found[row.name]) != seed or seed >= RUNS[row.level]:
                continue
            freedom = sum(int((one > 0).sum()) - 1 for one in row.compared())
            draws = sample_size(freedom, DISTANCE, row.level_of_alarm)
            found[row.name].append(float(f"{run_row(row, seed=seed, draws=draws).p_value:.6g}"))
        write(path, found)
        if seed % 10 == 9:
            print(f"{seed + 1} runs of each row", flush=True)
    result = json.loads(path.read_text())
    plot(result, path.with_suffix(".png"))
    for level, summary in result["levels"].items():
        print(level, summary)
    if any(one["alarms"] or one["ks_p_value"] < UNIFORM for one in result["levels"].values()):
        sys.exit(1)


def write(path: Path, found: dict[str, list[float]]) -> None:
    """The p-values, and by level how many there are, alarms, and whether they are uniform."""
    levels = {}
    for level in RUNS:
        rows = [row for row in ROWS if row.level == level and found[row.name]]
        values = [value for row in rows for value in found[row.name]]
        if not values:
            continue
        levels[level] = {
            "rows": len(rows),
            "runs_of_each": len(found[rows[0].name]),
            "p_values": len(values),
            "smallest": min(values),
            "alarms": sum(value < row.level_of_alarm for row in rows for value in found[row.name]),
            "ks_p_value": float(f"{kstest(values, 'uniform').pvalue:.3g}"),
        }
    result = {
        "machine": describe(),
        "family_wise_level": ALARM,
        "level_of_a_row": ALARM / len(ROWS),
        "total_variation_seen": DISTANCE,
        "levels": levels,
        "p_values": found,
    }
    waiting = path.with_suffix(".json.new")
    waiting.write_text(json.dumps(result, indent=1).replace(",\n   ", ", ") + "\n")
    waiting.replace(path)


def plot(result: dict[str, Any], path: Path) -> None:
    """Ordered p-values against what uniform ones would be, by level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    by_level = {row.name: row.level for row in ROWS}
    for axis, (level, summary) in zip(axes, result["levels"].items()):
        values = sorted(v for name, some in result["p_values"].items() if by_level[name] == level for v in some)
        uniform = [(place + 0.5) / len(values) for place in range(len(values))]
        axis.loglog(uniform, values, ".", markersize=3, color="#1f5fa8")
        axis.loglog([uniform[0], 1], [uniform[0], 1], color="#888888", linewidth=1)
        axis.axhline(result["level_of_a_row"], color="#c03028", linewidth=1)
        axis.text(1, result["level_of_a_row"] * 1.3, "alarm", color="#c03028", ha="right", va="bottom")
        axis.set_ylim(result["level_of_a_row"] / 5, 1.5)
        axis.set_title(
            f"{level} rows: {summary['rows']} x {summary['runs_of_each']} runs, {summary['alarms']} alarms, "
            f"KS p = {summary['ks_p_value']:.2g}",
            fontsize=10,
        )
        axis.set_xlabel("expected of uniform p-values")
        axis.set_ylabel("p-values of correct code, in order")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
