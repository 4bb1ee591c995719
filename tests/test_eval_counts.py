"""Figures of counts made by hand, the interval of tau, and what the plots show."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from dspark_fast.evaluation import Counts, Evaluation, PromptResult, plot_positions, plot_tau

# Three rounds of 3 drafts: all accepted (4 tokens); one accepted (2); a stop token as the first draft (1, no bonus).
HAND = Counts(prompts=2, rounds=3, committed=7, proposed=(3, 2, 2), accepted=(3, 1, 1))


def result(domains, prompts=(), temperature=0.0, mean_of=None):
    mean_of = tuple(domains) if mean_of is None else mean_of
    return Evaluation(temperature, 3, 16, 8, 0, 0.0, True, domains, tuple(prompts), mean_of)


def test_the_definitions():
    assert HAND.tau == 7 / 3
    assert HAND.proposals == 7 / 3  # 3 + 3 + 1 drafts were judged
    assert HAND.verify_rate == 7 / (7 + 3)
    assert HAND.survival == (1.0, 0.5, 0.5)
    assert HAND.conditional == (1.0, 0.5, 1.0)
    # A whole block each time: verify rate is tau over block size plus one, as in figure 5 of the paper.
    full = Counts(1, 4, 9, (4, 4, 4), (3, 1, 1))
    assert full.verify_rate == full.tau / 4


def test_counts_are_pooled_and_not_averaged():
    other = Counts(1, 9, 9, (9, 9, 9), (0, 0, 0))
    both = HAND + other
    assert both == Counts(3, 12, 16, (12, 11, 11), (3, 1, 1))
    assert both.tau == 16 / 12 != (HAND.tau + other.tau) / 2
    assert both.conditional == pytest.approx((3 / 12, (1 / 11) / (3 / 12), 1.0))
    assert math.isnan(other.conditional[1])  # none survived to be judged there
    with pytest.raises(ValueError):
        HAND + Counts.none(4)


def test_nothing_is_no_number_and_json_has_none():
    nothing = Counts.none(3)
    data = nothing.to_dict()
    assert (data["tau"], data["proposals"], data["verify_rate"]) == (None, None, None)
    assert data["survival"] == data["conditional"] == [None] * 3
    assert "NaN" not in json.dumps(result({"a": nothing}).to_dict())
    assert Counts.from_dict(json.loads(json.dumps(data))) == nothing
    assert math.isnan(result({"a": nothing, "b": HAND}).mean_tau)
    assert result({"a": nothing, "b": HAND}, mean_of=("b",)).mean_tau == HAND.tau
    assert math.isnan(result({"b": HAND}, mean_of=("b", "c")).mean_tau)  # one of them was not asked
    assert all(map(math.isnan, result({"a": nothing}).interval("a")))


def test_the_interval_is_over_prompts():
    """With all rounds of a prompt alike, resampling rounds would give a far narrower one."""
    prompts = [PromptResult(str(n), "a", (41,), ((1 + n % 3,) * 20,)) for n in range(12)]
    counts = Counts(12, 240, 480, (240,) * 3, (160, 80, 0))
    low, high = result({"a": counts}, prompts).interval("a")
    spread = math.sqrt(2 / 3 / 12)  # of a mean of 12 draws of 1, 2 or 3
    assert (low, high) == pytest.approx((2 - 1.96 * spread, 2 + 1.96 * spread), abs=0.1)
    assert result({"a": counts}, prompts).interval("a") == (low, high)
    alike = [PromptResult(str(n), "a", (41,), ((2,) * 20,)) for n in range(12)]
    assert result({"a": counts}, alike).interval("a") == (2.0, 2.0)


# --- plots ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """Figures in place of files."""
    figure = pytest.importorskip("matplotlib.figure")
    made = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **settings: made.append(self))
    return made


@pytest.fixture
def two():
    prompts = [PromptResult("1", "maths", (7,), ((4, 2, 1),)), PromptResult("2", "code", (4,), ((1, 1, 1),))]
    domains = {"maths": HAND, "code": Counts(1, 3, 3, (3, 3, 3), (0, 0, 0))}
    return [result(domains, prompts, temperature) for temperature in (0.0, 1.0)]


def test_bars_are_tau_and_begin_at_zero(drawn, two):
    plot_tau(two, "tau.png", title="of a pair")
    (axis,) = drawn[0].axes
    bars = [patch for patch in axis.patches if patch.get_height()]
    assert [bar.get_height() for bar in bars] == pytest.approx([7 / 3, 1, 5 / 3] * 2)
    assert all(bar.get_y() == 0 for bar in bars) and axis.get_ylim()[0] == 0
    assert axis.get_ylim()[1] > max(bar.get_height() for bar in bars)
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
    assert all(right <= left for (_, right), (left, _) in pairwise(edges))  # none over another
    ticks = [label.get_text() for label in axis.get_xticklabels()]
    assert ticks == ["maths\n2 prompts", "code\n1 prompt", "mean of\n2 domains"]
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["temperature 0 (greedy)", "temperature 1"]
    assert axis.get_title() == "of a pair"


def test_lines_are_acceptance_by_position_with_their_numbers(drawn, two):
    plot_positions(two, "positions.png", labels=["A", "B"])
    conditional, survival = drawn[0].axes[:2]
    shown = {line.get_label(): list(line.get_ydata()) for line in conditional.lines if line.get_label()[0] != "_"}
    assert shown["maths"] == [1.0, 0.5, 1.0]
    shown = {line.get_label(): list(line.get_ydata()) for line in survival.lines if line.get_label()[0] != "_"}
    assert shown["maths"] == [1.0, 0.5, 0.5] and shown["code"] == [0.0] * 3
    assert shown["all, pooled"] == pytest.approx([3 / 6, 1 / 5, 1 / 5])
    assert [label.get_text() for label in conditional.get_xticklabels()] == ["1\n6", "2\n3", "3\n1"]
    assert [label.get_text() for label in survival.get_xticklabels()] == ["1\n6", "2\n5", "3\n5"]
    assert all(axis.get_ylim() == (0, 1) for axis in drawn[0].axes)
    titles = [axis.get_title() for axis in drawn[0].axes]
    assert titles == ["conditional acceptance, A", "survival, A", "conditional acceptance, B", "survival, B"]


@pytest.mark.parametrize("plot", [plot_tau, plot_positions])
def test_plots_of_nothing(plot, two):
    with pytest.raises(ValueError, match="there are no results"):
        plot([], "x.png")
    with pytest.raises(ValueError, match="there are 1 labels for 2 results"):
        plot(two, "x.png", labels=["one"])
