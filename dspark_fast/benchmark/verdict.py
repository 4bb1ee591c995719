"""Who is ahead, in words: also where it is not us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_fast.benchmark.rows import ALL

DEFAULT = "ours"  #: the way that users get without options


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each shape, from the medians of the speedups over transformers' ``generate``."""
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    return [_sentence([row for row in rows if (row["batch"], row["context"]) == shape], shape) for shape in shapes]


def ahead(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By set: the rows of other providers that are faster than the fastest of ours, fastest first."""
    found = {}
    for name in dict.fromkeys(row["set"] for row in rows):
        of = [row for row in rows if row["set"] == name]
        best = max((_speedup(row) for row in of if row["ours"]), default=0.0)
        faster = [row for row in of if not row["ours"] and _speedup(row) > best]
        if faster:
            found[name] = sorted(faster, key=lambda row: -_speedup(row))
    return found


def _sentence(rows: Sequence[dict[str, Any]], shape: tuple[int, int | None]) -> str:
    batch, context = shape
    where = f"Batch {batch}" + ("" if context is None else f", {context} tokens of context")
    whole = [row for row in rows if row["set"] == ALL]
    mine = sorted((row for row in whole if row["ours"]), key=_speedup)
    theirs = sorted((row for row in whole if not row["ours"]), key=_speedup)
    if not mine:
        return f"{where}: none of ours was run."
    best, next_best = mine[-1], theirs[-1]
    if _speedup(best) >= _speedup(next_best):
        said = f"{_named(best)} is ahead of every other provider, {_times(best, next_best)} {next_best['label']}"
    else:
        said = f"{_named(next_best)} is ahead of all of ours, {_times(next_best, best)} {best['label']}"
    usual = next((row for row in mine if row["provider"] == DEFAULT), None)
    if usual is not None and _speedup(usual) < _speedup(next_best) <= _speedup(best):
        before = [_named(row) for row in reversed(theirs) if _speedup(row) > _speedup(usual)]
        said += f"; without options, {_named(usual)}, it is behind {', '.join(before)}"
    others = {name: rows for name, rows in ahead(rows).items() if name != ALL}
    if others:
        said += "; in " + ", in ".join(f"{name} {_named(faster[0])}" for name, faster in others.items())
        said += " is the fastest" if len(others) == 1 else " are the fastest"
    return f"{where}: {said}."


def _named(row: dict[str, Any]) -> str:
    return f"{row['label']} ({_speedup(row):.2f})"


def _times(faster: dict[str, Any], slower: dict[str, Any]) -> str:
    return f"{_speedup(faster) / _speedup(slower):.2f} times"


def _speedup(row: dict[str, Any]) -> float:
    return row["speedup"]["median"]
