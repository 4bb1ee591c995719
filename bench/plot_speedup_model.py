"""The speedup model as a picture: speedup over acceptance and drafts per round, for drafters of three costs.

    python bench/plot_speedup_model.py

Nothing in it is measured. It writes ``bench/results/cpu/speedup_model.png``, or where ``--out`` says.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark_fast.analysis import speedup_heatmap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu" / "speedup_model.png")
    parser.add_argument("--costs", type=float, nargs="+", default=[0.02, 0.1, 0.3], help="of a draft, in plain steps")
    parser.add_argument("--verify", type=float, default=1.0, help="cost of a verify pass, in plain steps")
    options = parser.parse_args()
    speedup_heatmap(options.out, costs=options.costs, verify=options.verify)
    print(options.out)


if __name__ == "__main__":
    main()
