"""Plots of the microbenchmarks, made from the JSON files alone.

    python bench/plot_ops.py bench/results/<device>

One image per op, ``<op>.png`` beside ``<op>.json``: for each kind of case the median against the batch size, a line for
each provider with its quartiles, and what was predicted for our kernel.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any


def panels(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by kind of case (its name without the batch size), then by provider, in order of batch size."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["batch"]):
        found[re.sub(r" B=\d+", "", row["case"])][row["provider"]].append(row)
    return {kind: dict(providers) for kind, providers in found.items()}


def plot(result: dict[str, Any], path: Path) -> None:
    """One image of one op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = panels(result["rows"])
    columns = min(3, len(kinds))
    height = -(-len(kinds) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(5 * columns, 3.6 * height), constrained_layout=True, squeeze=False
    )
    for axis in axes.flat[len(kinds) :]:
        axis.axis("off")
    names = list(dict.fromkeys(row["provider"] for row in result["rows"]))
    for axis, (kind, providers) in zip(axes.flat, kinds.items()):
        batches = sorted({row["batch"] for rows in providers.values() for row in rows})
        for provider, rows in providers.items():
            x, colour = [row["batch"] for row in rows], f"C{names.index(provider)}"
            axis.plot(x, [row["median_us"] for row in rows], "o-", label=provider, color=colour)
            low, high = zip(*(row["quartiles_us"] for row in rows))
            axis.fill_between(x, low, high, alpha=0.2, color=colour)
            # Only our kernel's prediction is drawn: it is the one that the bytes model beside the bench is about.
            if provider == "dspark-fast":
                axis.plot(x, [row["predicted_us"] for row in rows], "k--", label="predicted", linewidth=1)
        axis.set(title=kind, xlabel="batch size", ylabel="µs", xscale="log", yscale="log")
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.suptitle(f"{result['op']}, {result['machine']['device']}", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for path in sorted(parser.parse_args().folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("rows") and "copy_tb_s" in result:
            plot(result, path.with_suffix(".png"))
            print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
