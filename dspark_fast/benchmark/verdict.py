"""Who is ahead, in words: by set of prompts, and also where it is not us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_fast.benchmark.rows import ALL
from dspark_fast.benchmark.ways import BASELINE, NO_DRAFTER
from dspark_fast.benchmark.workload import place

#: Plain decoding that is so many times as fast in one repeat as in another had the machine not to itself.
MOST_SPREAD = 1.5
_MOST_NAMED = 2  # of the providers ahead of a row in one set; the others are counted

Row = dict[str, Any]


def sentences(rows: Sequence[Row]) -> list[str]:
    """What is to be said of each shape (batch and context), from the medians of the speedups over ``generate``.

    First who is ahead over all prompts; where the machine was not left alone (:func:`disturbed`) no lead of ours is
    claimed. Then, for each of our rows that another provider is ahead of, in which sets and who. That is said in
    either case. Ours are those that draft: our own decoding without a drafter is one of the others.
    """
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    return [
        f"{place(*shape).capitalize()}: {said}."
        for shape in shapes
        for said in _said([row for row in rows if (row["batch"], row["context"]) == shape])
    ]


def ahead(rows: Sequence[Row], mine: str) -> dict[str, list[Row]]:
    """By set: the rows of providers that do not draft for us and are faster than our way ``mine``, fastest first.

    Args:
        rows: of one shape.
        mine: name of one of our ways.
    """
    found = {}
    for row in rows:
        if row["provider"] == mine:
            others = [one for one in rows if one["set"] == row["set"] and not _ours(one)]
            faster = [one for one in others if _speedup(one) > _speedup(row)]
            if faster:
                found[row["set"]] = sorted(faster, key=lambda one: -_speedup(one))
    return found


def disturbed(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Least and most tokens per second of ``generate`` over the repeats, where they are too far apart; else None.

    The prompts of all repeats are the same, so something else has used the machine.

    Args:
        rows: of one shape.
    """
    for row in rows:
        if row["provider"] == BASELINE and row["set"] == ALL:
            speed = row["tokens_per_second"]
            if speed["most"] > MOST_SPREAD * speed["least"]:
                return speed["least"], speed["most"]
    return None


def _said(rows: Sequence[Row]) -> list[str]:
    """Of one shape."""
    whole = [row for row in rows if row["set"] == ALL]
    mine = sorted((row for row in whole if _ours(row)), key=lambda row: -_speedup(row))
    if not mine:
        return ["none of ours was run"]
    spread = disturbed(rows)
    if spread is None:
        first = _lead(rows, whole, mine[0])
    else:
        first = (
            f"generate alone ran at {spread[0]:.1f} to {spread[1]:.1f} tokens/s, so something else was using this "
            "machine: do not trust these speedups, no lead of ours is claimed from them"
        )
    return [first, *filter(None, (_behind(rows, row) for row in mine))]


def _lead(rows: Sequence[Row], whole: Sequence[Row], best: Row) -> str:
    """Who is the fastest over all prompts."""
    next_best = max((row for row in whole if not _ours(row)), key=_speedup)
    if _speedup(best) < _speedup(next_best):
        return f"{_named(next_best)} is ahead of all of ours, {_times(next_best, best)} {best['label']}"
    said = f"{_named(best)} is ahead of every other provider, {_times(best, next_best)} {next_best['label']}"
    sets = [row["set"] for row in rows if row["provider"] == best["provider"] and row["set"] != ALL]
    if sets and not ahead(rows, best["provider"]):
        said += f", and ahead in every set ({', '.join(sets)})"
    return said


def _behind(rows: Sequence[Row], mine: Row) -> str | None:
    """The sets in which other providers are ahead of one of our ways, and who; None where there is no such set.

    Args:
        mine: its row over all prompts.
    """
    own = {row["set"]: row for row in rows if row["provider"] == mine["provider"]}
    found = ahead(rows, mine["provider"])
    sets = [name for name in own if name != ALL]
    if sets and len(found) == len(own):  # the providers are those over all prompts
        return (
            f"{mine['label']} is behind in every set ({', '.join(sets)}) and over all prompts ({_speedup(mine):.2f}): "
            f"{_first(found[ALL])}"
        )
    parts = (
        f"{'over all prompts' if name == ALL else f'in {name}'} ({_speedup(own[name]):.2f}): {_first(faster)}"
        for name, faster in found.items()
    )
    return f"{mine['label']} is behind {'; '.join(parts)}" if found else None


def _first(faster: Sequence[Row]) -> str:
    """The first of them by name, and how many more there are."""
    named = [_named(row) for row in faster[:_MOST_NAMED]]
    rest = [f"{len(faster) - _MOST_NAMED} more"] if len(faster) > _MOST_NAMED else []
    *others, last = named + rest
    return f"{', '.join(others)} and {last}" if others else last


def _ours(row: Row) -> bool:
    """What it gains without a drafter is not speculation's."""
    return row["ours"] and row["provider"] != NO_DRAFTER


def _named(row: Row) -> str:
    return f"{row['label']} ({_speedup(row):.2f})"


def _times(faster: Row, slower: Row) -> str:
    return f"{_speedup(faster) / _speedup(slower):.2f} times"


def _speedup(row: Row) -> float:
    return row["speedup"]["median"]
