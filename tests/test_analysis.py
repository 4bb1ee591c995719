"""The speedup model against closed forms and against a simulation that knows nothing of it."""

from __future__ import annotations

import math
import random

import pytest

from dspark_fast.analysis import (
    MOST_DRAFTS,
    best_drafts,
    expected_tokens,
    improvement_factor,
    speedup,
    speedup_heatmap,
)


def simulated(alphas, rounds, generator):
    """Tokens committed per round, and their standard error: drafts are judged one by one, up to the first rejection."""
    lengths = []
    for _ in range(rounds):
        length = 1
        for alpha in alphas:
            if generator.random() >= alpha:
                break
            length += 1
        lengths.append(length)
    mean = sum(lengths) / rounds
    return mean, math.sqrt(sum((length - mean) ** 2 for length in lengths)) / rounds


@pytest.mark.parametrize("alphas", [[0.7] * 5, [0.9, 0.8, 0.5, 0.3], [0.2] * 8, [0.95]], ids=str)
def test_expected_tokens_of_a_simulation(alphas):
    mean, error = simulated(alphas, 40_000, random.Random(1))
    assert abs(expected_tokens(alphas, len(alphas)) - mean) < 4 * error < 0.05
    if len(set(alphas)) == 1:
        assert expected_tokens(alphas[0], len(alphas)) == pytest.approx(expected_tokens(alphas, len(alphas)))
        # The other formula that is in use is not this: the simulation tells them apart.
        other = (1 - alphas[0] ** len(alphas)) / (1 - alphas[0]) + 1
        assert abs(other - mean) > 10 * error or len(alphas) == 1


@pytest.mark.parametrize("drafts", [0, 1, 4, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
def test_expected_tokens_in_closed_form(alpha, drafts):
    assert expected_tokens(alpha, drafts) == pytest.approx((1 - alpha ** (drafts + 1)) / (1 - alpha))


def test_expected_tokens_at_the_edges():
    assert expected_tokens(0, 7) == 1
    assert expected_tokens(1, 7) == 8
    assert expected_tokens([], 0) == 1
    assert expected_tokens([0.5, 0.0, 1.0], 3) == 1.5
    assert expected_tokens([0.5, 0.4, 0.9], 2) == pytest.approx(1.7), "positions behind the block do not count"


def test_speedup_is_time_saved_in_a_simulation():
    """Both ways of decoding are charged by the clock: 4 ms a draft, 20 ms a plain step, 25 ms a pass over a block."""
    alphas, tokens, clock, generator = [0.8, 0.7, 0.6], 0, 0.0, random.Random(2)
    while tokens < 60_000:
        clock += 3 * 4 + 25
        tokens += 1
        for alpha in alphas:
            if generator.random() >= alpha:
                break
            tokens += 1
    assert speedup(alphas, 3, 4 / 20, 25 / 20) == pytest.approx(20 * tokens / clock, rel=0.01)


def test_speedup_by_hand():
    assert speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert speedup(0.5, 2, 0.25, verify=2) == pytest.approx(1.75 / 2.5)
    assert speedup(1, 4, 0) == 5
    assert speedup(0.9, 0, 0.3, verify=2) == 1, "without drafts there is nothing to verify"


@pytest.mark.parametrize("verify", [0.9, 1.0, 1.6])
@pytest.mark.parametrize("cost", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.85, [0.9, 0.7, 0.6, 0.2, 0.9]], ids=str)
def test_best_drafts_is_the_best_of_all(alpha, cost, verify):
    most = len(alpha) if isinstance(alpha, list) else MOST_DRAFTS
    best = best_drafts(alpha, cost, verify)
    best_speedup = speedup(alpha, best, cost, verify)
    assert all(speedup(alpha, drafts, cost, verify) <= best_speedup for drafts in range(most + 1))
    assert all(speedup(alpha, drafts, cost, verify) < best_speedup for drafts in range(best))
    assert best_drafts(alpha, cost, verify, most=1) in (0, 1)


def test_drafting_pays_only_where_a_draft_is_likelier_than_it_is_dear():
    """Leviathan et al. 2023, corollary 3.9: with v = 1 some K gains if and only if alpha > c."""
    for percent in range(1, 100):
        alpha = percent / 100
        for cost in (0.105, 0.505, 0.955):
            assert (best_drafts(alpha, cost) > 0) == (alpha > cost)


def test_improvement_factor_is_the_speedup_of_its_acceptance_length():
    assert improvement_factor(3.0, 5, 0.1) == 2.0
    assert improvement_factor(1.0, 0, 0.5) == 1.0
    for alpha in (0.2, 0.7):
        assert improvement_factor(expected_tokens(alpha, 4), 4, 0.2) == pytest.approx(speedup(alpha, 4, 0.2))


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (lambda: expected_tokens(1.1, 3), "alpha is 1.1"),
        (lambda: expected_tokens(-0.1, 0), "alpha is -0.1"),
        (lambda: expected_tokens(math.nan, 2), "alpha is nan"),
        (lambda: expected_tokens([0.5, 2.0], 1), "alpha is 2.0"),
        (lambda: expected_tokens([0.5, 0.5], 3), "2 positions for 3 drafts"),
        (lambda: expected_tokens(0.5, -1), "drafts is -1"),
        (lambda: speedup(0.5, 3, -0.1), "cost is -0.1"),
        (lambda: speedup(0.5, 3, math.inf), "cost is inf"),
        (lambda: speedup(0.5, 3, 0.1, verify=0), "verify is 0"),
        (lambda: best_drafts(0.5, 0.1, most=-1), "most is -1"),
        (lambda: best_drafts(0.5, 0.1, verify=math.nan), "verify is nan"),
        (lambda: improvement_factor(0.5, 3, 0.1), "acceptance_length is 0.5: accepted is 1 to 4"),
        (lambda: improvement_factor(4.5, 3, 0.1), "acceptance_length is 4.5"),
        (lambda: improvement_factor(2.0, 3, -1), "cost is -1"),
        (lambda: improvement_factor(1.0, -1, 0.1), "drafts is -1"),
        (lambda: speedup_heatmap("no.png", costs=[]), "the number of costs is 0"),
        (lambda: speedup_heatmap("no.png", most=0), "most is 0"),
        (lambda: speedup_heatmap("no.png", costs=[-1]), "cost is -1"),
    ],
)
def test_values_out_of_range(work, match):
    with pytest.raises(ValueError, match=match):
        work()


def test_the_heatmap_shows_the_model(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.append(self))
    speedup_heatmap(tmp_path / "model.png", costs=[0.05, 0.4], verify=1.2, most=6, steps=10)
    panels = [axis for axis in drawn[0].axes if axis.images]
    assert len(panels) == 2
    for axis, cost in zip(panels, (0.05, 0.4)):
        shown = axis.images[0].get_array()
        assert shown.shape == (7, 11)
        assert all(shown[k, a] == pytest.approx(speedup(a / 10, k, cost, 1.2)) for k in range(7) for a in range(11))
        best = axis.lines[0].get_ydata()
        assert list(best) == [shown[:, a].argmax() for a in range(11)]
        low, high = axis.images[0].norm.vmin, axis.images[0].norm.vmax
        assert low * high == pytest.approx(1), "the colour of 1 is the middle one"


def test_the_heatmap_is_written(tmp_path):
    speedup_heatmap(tmp_path / "model.png", costs=[0.1], most=3, steps=10)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")
