"""The rows of ``acceptance.json`` and of drafters' cards, from counts made by hand."""

from __future__ import annotations

import json
import math

import pytest

from dspark_fast.evaluation import MEAN_OF, Counts, Evaluation
from dspark_fast.training.acceptance import Acceptance, acceptance_rows

# By domain: rounds, committed tokens, drafts accepted at each of the two positions.
HAND = {
    "rewrite": (10, 25, (9, 6)),
    "math": (7, 14, (5, 2)),
    "code": (10, 30, (10, 10)),
    "chat": (10, 10, (0, 0)),
    "list": (10, 20, (6, 4)),
    "short": (4, 6, (2, 0)),
}


def evaluated(names):
    """Two prompts in each domain."""
    counts = {name: Counts(2, n, committed, (n, n), accepted) for name, (n, committed, accepted) in HAND.items()}
    return Evaluation(0.0, 2, 128, 8, 0, 0.0, True, {name: counts[name] for name in names}, (), MEAN_OF)


def test_a_row_for_each_domain_their_mean_and_all():
    *domains, mean, last = acceptance_rows(evaluated(HAND))
    assert [one.domain for one in domains] == list(HAND)
    assert domains[1] == Acceptance("math", 2, 2.0, [0.714, 0.4], 7)  # 5 of 7, and 2 of those 5
    assert mean == Acceptance("mean", 10, pytest.approx((2 + 3 + 1 + 2 + 1.5) / 5), [], 41)  # not over rewrite
    assert last == Acceptance("all", 12, 105 / 51, [0.627, 0.688], 51)


def test_no_mean_without_one_of_its_domains():
    rows = acceptance_rows(evaluated(["math", "code", "chat", "list"]))
    assert [one.domain for one in rows] == ["math", "code", "chat", "list", "all"]


def test_json_has_none_for_what_is_no_number():
    chat, last = acceptance_rows(evaluated(["chat"]))
    assert math.isnan(chat.by_position[1])  # none survived to be judged there
    assert chat.to_dict() == {"domain": "chat", "prompts": 2, "tau": 1.0, "by_position": [0.0, None], "rounds": 10}
    nothing = Acceptance("all", 1, math.nan, [math.nan], 0)
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["tau"] is None
    assert last.to_dict() == {**chat.to_dict(), "domain": "all"}
