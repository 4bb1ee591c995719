"""Every row: the fixed subset by default, all at 1 % by `pytest -m losslessness tests/losslessness`."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.losslessness import ROWS, run, run_row
from dspark_fast.losslessness.gtest import ALARM
from dspark_fast.losslessness.pairs import ADVERSARIAL, adversarial, table_pair
from dspark_fast.losslessness.rounds import POLICIES, committed

CHOSEN = [row for row in ROWS if row.level != "kernel" or not torch.cuda.is_available()]


def report(found) -> None:
    print(f"{found.name}: p = {found.p_value:.3g} of {found.draws} draws, which see {found.distance:.0%}")
    assert found.passed, f"{found.name}: p = {found.p_value:.3g} of {found.draws} draws"


@pytest.mark.parametrize("row", [row for row in CHOSEN if not row.slow], ids=lambda row: row.name.replace(" ", "-"))
def test_subset(row):
    report(run_row(row))


@pytest.mark.losslessness
@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name.replace(" ", "-"))
def test_whole(row):
    report(run_row(row, subset=False))


def test_the_levels_add_up_to_one_in_a_million():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert sum(row.level_of_alarm for row in ROWS) == pytest.approx(ALARM) == pytest.approx(1e-6)


def test_run_tells_of_each_row_and_refuses_unknown_names():
    heard = []
    found = run(["walk none-head", "loop coupled vanilla-head"], on_row=heard.append)
    assert heard == found and [one.name for one in found] == ["walk none-head", "loop coupled vanilla-head"]
    by_name = {row.name: row for row in ROWS}
    assert all(one.passed and one.draws == by_name[one.name].draws(subset=True) for one in found)
    with pytest.raises(ValueError, match="no row is called nothing"):
        run(["nothing"])


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_are_kept_and_rejected(policy):
    """Or the rows say nothing of either; and lengths from 0 to the block's occur where they are to."""
    kept: list[torch.Tensor] = []
    committed(table_pair(), 4000, 1, policy=policy, accepted=kept)
    shares = torch.cat(kept).bincount(minlength=4) / len(torch.cat(kept))
    assert (shares > 0.04).all(), shares


def test_what_is_adversarial_about_the_pairs():
    """Equal laws are always kept, disjoint supports never."""
    rates = {}
    for name in ADVERSARIAL:
        kept: list[torch.Tensor] = []
        committed(adversarial(name), 2000, 2, accepted=kept)
        rates[name] = float((torch.cat(kept) > 0).double().mean())
    print(rates)
    assert rates["p-is-q"] > 0.999 and rates["zeros"] > 0.999 and rates["disjoint-supports"] == 0
    assert 0.05 < rates["one-hot-q"] < 0.95 and 0.05 < rates["holes"] < 0.95
