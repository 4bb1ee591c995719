"""Runs the rows."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dspark_fast.losslessness.rows import ROWS, Row

LEVELS = ("op", "loop")  # the kernels need a GPU or Triton's interpreter
SEED = 20_261_121


@dataclass(frozen=True)
class Result:
    """What came of a row.

    Attributes:
        name, level: of the row.
        draws: sample size.
        distance: the total variation that so many draws see with power 0.99.
        p_value: of the G-test; 1 where nothing is left to chance, 0 where what cannot be was drawn.
        passed: whether the p-value is above the row's level.
        seconds: wall clock.
    """

    name: str
    level: str
    draws: int
    distance: float
    p_value: float
    passed: bool
    seconds: float


def run_row(row: Row, *, subset: bool = True, seed: int = SEED, draws: int | None = None) -> Result:
    """One row; ``draws`` overrides its sample size."""
    started = time.perf_counter()
    own = row.draws(subset=subset)
    draws = own if draws is None else draws
    p = row.p_value(draws, seed)
    distance = row.distance(subset=subset) * (own / draws) ** 0.5
    return Result(row.name, row.level, draws, distance, p, p >= row.level_of_alarm, time.perf_counter() - started)


def run(
    names: Collection[str] | None = None,
    subset: bool = True,
    seed: int = SEED,
    on_row: Callable[[Result], None] | None = None,
    levels: Sequence[str] = LEVELS,
) -> list[Result]:
    """Run rows and hand back their results; needs scipy.

    Args:
        names: of the rows; None for all of ``levels``.
        subset: the smaller sample sizes; False for those that see a total variation of 1 %.
        seed: of all noise. On correct code every seed passes, but for one in a million.
        on_row: told of each result as it comes.
        levels: of ``op``, ``kernel`` and ``loop``.

    Raises:
        ImportError: without scipy, before anything runs.
        ValueError: for a name that no row has.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("the losslessness rows need scipy: pip install 'dspark-fast[statistics]'")
    known = {row.name: row for row in ROWS}
    if names is not None and (unknown := set(names) - known.keys()):
        raise ValueError(f"no row is called {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    chosen = [row for row in ROWS if row.level in levels and not (subset and row.slow)]
    if names is not None:
        chosen = [known[name] for name in names]
    results = []
    for row in chosen:
        results.append(run_row(row, subset=subset, seed=seed))
        if on_row is not None:
            on_row(results[-1])
    return results
