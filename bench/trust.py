"""Whether a speed may be quoted: not if the machine was doing something else while it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_fast.benchmark.verdict import MOST_SPREAD


class Untrusted(LookupError):
    """A sentence would quote a speed that was measured on a machine that was not left alone."""


def disturbed(rows: Sequence[dict[str, Any]], least: str, most: str) -> list[dict[str, Any]]:
    """The rows whose speedup is so different from pair to pair that none of them is to be trusted.

    Args:
        rows: of a result file.
        least, most: what the file calls a row's smallest and largest speedup.
    """
    return [row for row in rows if row[most] > MOST_SPREAD * row[least]]


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
