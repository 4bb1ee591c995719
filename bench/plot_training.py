"""The training curves of the drafter in this package, drawn again: its card's picture, from the committed figures.

    python bench/plot_training.py

``results/cpu/training_curves.jsonl`` is the last run's ``metrics.jsonl`` to four digits, without what is not drawn. It
writes ``dspark_fast/drafts/SmolLM2-135M-Instruct/training.png``, or where ``--out`` says; ``--metrics`` takes the
file of a run of one's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark_fast.training.plot import plot_training

HERE = Path(__file__).parent
METRICS = HERE / "results" / "cpu" / "training_curves.jsonl"
PICTURE = HERE.parent / "dspark_fast" / "drafts" / "SmolLM2-135M-Instruct" / "training.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", type=Path, default=METRICS, help="as the trainer writes them")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the PNG")
    options = parser.parse_args()
    if not options.metrics.is_file():
        parser.error(f"--metrics is {options.metrics}: accepted is a file of a training run, metrics.jsonl")
    plot_training(options.metrics, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
