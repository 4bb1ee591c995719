"""Whether a figure may be quoted: not a speed of a disturbed machine, and no other drafter's without saying so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_fast.benchmark.verdict import MOST_SPREAD
from dspark_fast.pairs import draft_name


class Untrusted(LookupError):
    """A sentence would quote a speed of a machine that was not left alone, or a figure of another drafter."""


def disturbed(rows: Sequence[dict[str, Any]], least: str, most: str) -> list[dict[str, Any]]:
    """The rows whose speedup is so different from pair to pair that none of them is to be trusted.

    Args:
        rows: of a result file.
        least, most: what the file calls a row's smallest and largest speedup.
    """
    return [row for row in rows if row[most] > MOST_SPREAD * row[least]]


def other_drafter(result: dict[str, Any], model: str) -> bool:
    """Whether a result is not of the drafter that is known for ``model`` now."""
    return result.get("draft") != draft_name(model)


def refuse_other_drafter(result: dict[str, Any], model: str, name: str) -> None:
    """Raise :class:`Untrusted` for a result of :func:`other_drafter`, which the file ``name`` has."""
    if other_drafter(result, model):
        raise Untrusted(f"{name} is of {result.get('draft')}, and what ships is {draft_name(model)}: measure again")


def refuse(rows: Sequence[dict[str, Any]], least: str, most: str, name: str) -> None:
    """Raise :class:`Untrusted` if one of the rows is disturbed.

    Args:
        name: of the file.
    """
    found = disturbed(rows, least, most)
    if found:
        raise Untrusted(
            f"{len(found)} of {len(rows)} speedups in {name} vary more than {MOST_SPREAD:g} times from pair to pair: "
            "something else was using the machine, so none is quoted; measure again, or take the sentence out"
        )
