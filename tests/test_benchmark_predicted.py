"""The predicted speedup of a row, and that its parts add up to what was measured."""

from __future__ import annotations

import math
import re

import pytest
import torch

from dspark_fast.benchmark.calls import Call, Rounds
from dspark_fast.benchmark.predicted import Costs, parts, predict, why
from dspark_fast.benchmark.rows import row_of, spread
from dspark_fast.benchmark.way import Way

STEP = 0.01
# 10 rounds of 3 drafts: 6 accepted the first, 3 of those the second, none the third; 19 tokens in 10 rounds.
TEN = {"rounds": 10, "row_rounds": 10, "committed": 19, "proposed": [10, 10, 10], "accepted": [6, 3, 0]}


def call(after, rounds=None, counted=19, rows=1):
    return Call(torch.zeros(rows, counted + 1, dtype=torch.long), after + 1.0, 1.0, after, counted, rounds)


def itself(rounds):
    """The prediction from rounds for themselves."""
    return predict(rounds, Costs(rounds, STEP))


def test_tau_over_what_a_round_costs():
    found = itself(Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15))
    assert (found.draft, found.verify) == (pytest.approx(0.3), pytest.approx(1.2))
    assert found.acceptance_length == 1.9
    assert found.speedup == pytest.approx(1.9 / 1.5)
    joined = itself(Rounds(**TEN, drafting=None, verifying=None, together=0.15))
    assert joined.draft is None and joined.speedup == pytest.approx(1.9 / 1.5)
    bare = itself(Rounds(rounds=10, row_rounds=10, committed=19, drafting=0.03, verifying=0.12, together=0.15))
    assert bare.speedup == pytest.approx(1.9 / 1.5)


def test_acceptance_is_the_rows_own_and_costs_are_those_of_other_calls():
    """What the row's own rounds took is what is to be predicted: it is not looked at."""
    own = Rounds(**TEN, drafting=9.0, verifying=9.0, together=18.0)
    other = Rounds(rounds=4, row_rounds=4, committed=4, proposed=[4], accepted=[0], drafting=0.02, verifying=0.04)
    other.together = 0.06
    plain = [call(0.1, counted=10), call(0.3, counted=10)]
    found = predict(own, Costs.of([call(0.06, other), call(0.06, other)], plain))
    assert (found.draft, found.verify) == (pytest.approx(0.25), pytest.approx(0.5))
    assert found.speedup == pytest.approx(1.9 / 0.75)
    assert Costs.of(plain, plain).rounds is None


def test_no_prediction_without_rounds_or_times():
    assert itself(None) is None
    assert itself(Rounds()) is None
    assert itself(Rounds(**TEN, drafting=None, verifying=None)) is None
    timed = Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15)
    assert predict(timed, Costs(None, STEP)) is predict(timed, Costs(Rounds(), STEP)) is None


def test_added_up():
    split, joined = Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15), Rounds(proposed=[1], drafting=None)
    twice = split + split
    assert twice.accepted == [12, 6, 0] and twice.drafting == 0.06 and twice.acceptance_length == 1.9
    assert (split + joined).proposed == [11, 10, 10] and (split + joined).drafting is None
    assert math.isnan(Rounds().acceptance_length)


def test_the_parts_add_up_to_the_time_that_was_not_predicted():
    """19 tokens, 4 of them by plain steps; 10 rounds where 15 / 1.9 would have done; 0.02 s elsewhere."""
    rounds = Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15, plain_steps=4, plain=0.044)
    calls = [call(0.15 + 0.044 + 0.02, rounds)] * 2
    found = itself(rounds + rounds)
    shares = parts(calls, found, STEP)
    predicted = 19 * STEP / found.speedup
    assert predicted * (1 + sum(shares.values())) == pytest.approx(0.214)
    assert shares["rounds that took longer or shorter than before"] == pytest.approx(0)
    assert shares["outside drafter and target"] == pytest.approx(0.02 / predicted)
    assert shares["tokens past the end"] == pytest.approx((10 - 15 / 1.9) * 0.015 / predicted)
    assert shares["steps without drafts"] == pytest.approx((0.044 - 4 / 1.9 * 0.015) / predicted)
    together = parts([call(0.214, rounds, rows=3)] * 2, found, STEP)
    assert together["rounds that only the slowest rows need"] == shares["tokens past the end"]


def test_rounds_that_cost_more_than_before_are_a_part_of_their_own():
    rounds = Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15, plain_steps=4, plain=0.044)
    before = Rounds(**TEN, drafting=0.03, verifying=0.07, together=0.10)
    found = predict(rounds, Costs(before, STEP))
    shares = parts([call(0.214, rounds)], found, STEP)
    predicted = 19 * STEP / found.speedup
    assert predicted * (1 + sum(shares.values())) == pytest.approx(0.214)
    assert shares["rounds that took longer or shorter than before"] == pytest.approx(15 / 1.9 * 0.005 / predicted)


def test_why_only_where_they_differ():
    rounds = Rounds(**TEN, drafting=0.03, verifying=0.12, together=0.15)
    found = itself(rounds)
    assert why([call(0.16, rounds)], found, STEP, 19 * STEP / 0.16) is None
    said = why([call(0.3, rounds)], found, STEP, 19 * STEP / 0.3)
    assert said.startswith("0.50 of the predicted; ") and said.endswith("outside drafter and target +100%")
    assert re.search(r"the median of the repeats is -\d+% off", why([call(0.3, rounds)], found, STEP, 0.5))


def test_ratios_are_taken_within_a_repeat():
    """The machine halves its speed in the second repeat and doubles it in the third: the ratio does not see that."""
    factors = (1.0, 2.0, 0.5)
    plain = [[call(0.2 * factor), call(0.4 * factor)] for factor in factors]
    mine = [[call(0.1 * factor, rows=1), call(0.2 * factor)] for factor in factors]
    row = row_of(Way("x", "x", lambda *_: None, ours=True), "all", mine, plain, Costs(None, STEP))
    assert row["speedup"] == spread([2.0] * 3) and row["repeats"] == 3 and row["prompts"] == 2
    assert row["tokens_per_second"]["median"] == pytest.approx(38 / 0.3)
    assert row["tokens_per_second"]["least"] == pytest.approx(19 / 0.3)
    assert row["call_speedup"]["median"] == pytest.approx(2.6 / 2.3)
    assert row["acceptance_length"] is row["predicted_speedup"] is row["why"] is None
    json_free = spread([3.0])
    assert json_free == {"median": 3.0, "quartiles": [3.0, 3.0], "least": 3.0, "most": 3.0}
