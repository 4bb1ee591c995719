"""The goals that the op benches set themselves, and what the result files say of each: a table of bench/README.md."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from compile_time import GOAL_S

BEGIN, END = "<!-- goals:begin -->", "<!-- goals:end -->"
NO_GPU = "not measured: no GPU was at hand"
WORDS = {
    "markov": "walk",
    "verify": "verification",
    "block_attention": "attention",
    "context_kv": "new context",
    "sampling": "cuts and noise",
    "draft_loss": "training loss",
}


def section(results: Path) -> str:
    """All of them, as Markdown; ``kernels_page.py`` writes it.

    Args:
        results: the folder of a folder for each device.
    """
    folders = [path for path in sorted(results.iterdir()) if path.is_dir()] if results.is_dir() else []
    lines = ["| op | goals | state |", "|---|---|---|"]
    for op, words in WORDS.items():
        states: dict[str, list[str]] = {}  # what has no figure yet stands in one line
        for goal in importlib.import_module(f"bench_{op}").BENCH.goals:
            text = f"{goal.text}: none" if goal.at_most == 0 else goal.text
            states.setdefault(_state(folders, op, goal.text), []).append(text)
        lines += [f"| {words} | {'; '.join(texts)} | {state} |" for state, texts in states.items()]
    compiled = [json.loads(path.read_text()) for folder in folders if (path := folder / "compile_time.json").is_file()]
    states = [f"{one['goal'].split(': ')[1]}, {one['cold_s']:.0f} s ({one['machine']['device']})" for one in compiled]
    lines.append(f"| all | kernels of one model compiled in under {GOAL_S:.0f} s | {'; '.join(states) or NO_GPU} |")
    return "\n".join(lines)


def _state(folders: list[Path], op: str, text: str) -> str:
    """Of every device that has a figure."""
    found = []
    for folder in folders:
        if (path := folder / f"{op}.json").is_file():
            result = json.loads(path.read_text())
            for goal in result.get("goals", ()):
                if goal["goal"] == text and goal["value"] is not None:
                    value = f"{goal['value']:g} {goal['unit']}".rstrip()
                    found.append(f"{goal['verdict']}, {value} ({result['machine']['device']})")
    return "; ".join(found) or NO_GPU
