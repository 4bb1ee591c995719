"""The test of the tests: level, power and pooling of the G-test, and the laws that it compares with."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import kstest

from dspark_fast.losslessness import law
from dspark_fast.losslessness.gtest import POWER, g_statistic, p_value, pooled, sample_size
from dspark_fast.losslessness.pairs import model_pair, table_pair
from dspark_fast.reference import cut_logits

LEVEL = 1e-8
TRIES = 400


def counts(p: torch.Tensor, draws: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(p, draws, replacement=True, generator=generator).bincount(minlength=len(p))


def some_law(cells: int) -> torch.Tensor:
    p = torch.rand(cells, generator=torch.Generator().manual_seed(cells), dtype=torch.float64) + 0.2
    return p / p.sum()


@pytest.mark.parametrize("cells", [4, 64])
def test_power(cells):
    """The hardest error of its total variation, proportional to p, is seen 99 times in 100; half of it seldom."""
    p, distance = some_law(cells), 0.1
    sign = torch.where(p.cumsum(0) <= 0.5, 1.0, -1.0).double()
    up, down = p[sign > 0].sum(), p[sign < 0].sum()
    moved = distance * torch.where(sign > 0, p / up, -p / down)
    draws = sample_size(cells - 1, distance, LEVEL)
    assert float((moved.abs().sum()) / 2) == pytest.approx(distance)

    def seen(error):
        alarms = [p_value([(counts(p + error, draws, seed), p)]) < LEVEL for seed in range(TRIES)]
        return sum(alarms) / TRIES

    assert seen(moved) > POWER - 3 * (POWER * (1 - POWER) / TRIES) ** 0.5 and seen(moved / 2) < 0.25


@pytest.mark.parametrize("draws", [900, 20_000])
def test_p_values_of_the_right_law_are_uniform(draws):
    """At 900 draws some of the 64 cells are pooled, and the rest expect little more than 10."""
    p = some_law(64)
    values = [p_value([(counts(p, draws, seed), p)]) for seed in range(1000)]
    assert kstest(values, "uniform").pvalue > 1e-3


def test_pooling():
    p = torch.tensor([0.5, 0.3, 0.193, 0.004, 0.003], dtype=torch.float64)
    seen, expected = pooled(torch.tensor([500, 300, 193, 4, 3]), p)
    assert expected.tolist() == pytest.approx([200.0, 300.0, 500.0]) and seen.tolist() == [200, 300, 500]
    assert pooled(torch.tensor([50, 30, 20]), p[:3])[1].tolist() == pytest.approx([19.3, 30, 50])


def test_what_cannot_be_alarms_at_once():
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert g_statistic(torch.tensor([500_000, 500_000, 1]), p)[0] == float("inf")
    assert p_value([(torch.tensor([500_000, 499_999, 1]), p)]) == 0
    assert p_value([(torch.tensor([7, 0]), p[:2] * 2 * torch.tensor([1.0, 0.0]))]) == 1


def test_laws_and_counts_number_their_cells_alike():
    tables = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    whole = law.chain_law(tables, 1)
    assert float(whole.sum()) == pytest.approx(1)
    assert float(whole[2 * 16 + 0 * 4 + 3]) == pytest.approx(float(tables[0, 1, 2] * tables[1, 2, 0] * tables[2, 0, 3]))
    assert law.counted(torch.tensor([[2, 0, 3], [2, 0, 3]]), 4).nonzero().tolist() == [[35]]
    assert law.marginal(whole, 4, 3, (1, 3)).tolist() == pytest.approx(whole.reshape(4, 16).sum(0).tolist())
    with pytest.raises(ValueError, match="run from -1 to 2"):
        law.counted(torch.tensor([[2, -1]]), 4)


def test_model_law_is_the_products_of_its_steps():
    model, _ = model_pair()
    found = law.model_law(model, (1, 3, 2), 3, {"temperature": 0.8}, stop=1)
    step = [(model(torch.tensor([[1, 3, 2, *given]])).logits[0, -1].double() / 0.8).softmax(-1) for given in ((), (2,))]
    assert float(found.sum()) == pytest.approx(1)
    assert float(found[16]) == pytest.approx(float(step[0][1])), "a stop token, then padding"
    assert float(found[2 * 16 + 4]) == pytest.approx(float(step[0][2] * step[1][1]))
    assert found[16 + 1 : 32].sum() == 0


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.0}])
def test_the_cuts_written_for_the_eye_are_the_references(cut):
    logits = table_pair(32, 2, 2).target.reshape(-1, 32)
    cut = {"temperature": 1.3, **cut}
    expected = cut_logits(logits, **cut).double().softmax(-1)
    assert torch.allclose(law.probabilities(logits, **cut), expected, atol=1e-6)
