"""Every deliberate fault is rejected, by the means that the table names; without it the same check passes."""

from __future__ import annotations

import pytest
from mutants import BY_NAME, MUTANTS

from dspark_fast.losslessness.run import run_row

IDS = [mutant.name.replace(" ", "-") for mutant in MUTANTS]


def rejected(mutant) -> tuple[str, int]:
    """What the mutant's check says under its fault, and the sample size. Raises AssertionError if it survives."""
    if mutant.means == "law":
        row = BY_NAME[mutant.by]
        draws = row.draws(subset=True)
        with mutant.fault():
            try:
                found = run_row(row, draws=draws)
            except ValueError as error:  # it drew what is no token
                return str(error), draws
        assert not found.passed, f"{mutant.name}: p = {found.p_value} at {draws} draws"
        return f"p = {found.p_value:.1g}" if found.p_value > 1e-300 else "p < 1e-300", draws
    mutant.by()  # the correct code passes
    with mutant.fault(), pytest.raises(AssertionError) as caught:
        mutant.by()
    return str(caught.value).splitlines()[0], mutant.draws


@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_is_rejected(mutant):
    said, draws = rejected(mutant)
    print(f"{mutant.name}: {mutant.means}, {draws} draws: {said}")
