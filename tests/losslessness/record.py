"""Runs every mutant and writes what killed it.

    pytest -q tests/losslessness/record.py

writes ``bench/results/cpu/mutants.json`` and prints the README's table. It is no part of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path

from mutants import MUTANTS
from test_mutants import rejected

from dspark_fast.losslessness import ROWS
from dspark_fast.machine import describe

RECORD = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "mutants.json"


def table(rows) -> str:
    """Markdown."""
    lines = ["| fault | dies by | draws |", "|---|---|---|"]
    for row in rows:
        means = f"{row['means']}: `{row['row']}`, {row['said']}" if row["means"] == "law" else row["means"]
        lines.append(f"| {row['fault']} | {means} | {row['draws']:,} |".replace("|p - q|", "\\|p - q\\|"))
    return "\n".join(lines)


def test_record(capsys):
    rows = []
    for mutant in MUTANTS:
        said, draws = rejected(mutant)
        row = {"fault": mutant.name, "means": mutant.means, "draws": draws, "said": said}
        rows.append(row | ({"row": mutant.by} if mutant.means == "law" else {"check": mutant.by.__name__}))
    result = {"machine": describe(), "level_of_a_row": ROWS[0].level_of_alarm, "mutants": rows}
    RECORD.write_text(json.dumps(result, indent=2) + "\n")
    with capsys.disabled():
        print("\n" + table(rows))
