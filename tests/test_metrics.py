"""What a training run says of itself: sums over batches, calibration, the best evaluation."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_fast.training import Loss
from dspark_fast.training.metrics import BINS, Tally, best_so_far, finite

BLOCK = 5


def made_up(anchors, *, seed, predicted=True):
    """A loss of random overlaps, confidences and slots that count; block 0 is full, some are empty."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, anchors, BLOCK)
    counted = torch.rand(shape, generator=generator) < 0.7
    counted[:, 0] = True
    parts = torch.rand(4, generator=generator).unbind()
    overlap = torch.rand(shape, generator=generator)
    confidence = torch.rand(shape, generator=generator)
    confidence[0, 0, :2] = torch.tensor([1.0, 0.0])  # the edges belong to the last and the first bin
    counted = counted.long().cumprod(-1).bool()
    return Loss(*parts, overlap, confidence if predicted else None, counted, torch.zeros(shape, dtype=torch.long))


def test_tally_against_a_loop():
    losses = [made_up(6, seed=1), made_up(4, seed=2)]
    tally = Tally(BLOCK)
    for loss in losses:
        tally.add(loss)
    cells = [[[] for _ in range(BINS)] for _ in range(BLOCK)]
    slots, taus = [[] for _ in range(BLOCK)], []
    for loss in losses:
        for row in range(2):
            for block, counted in enumerate(loss.counted[row]):
                tau, survival = 1.0, 1.0
                for slot in range(BLOCK):
                    c, p = loss.overlap[row, block, slot].item(), loss.predicted[row, block, slot].item()
                    survival *= c
                    tau += survival
                    if counted[slot]:
                        slots[slot].append(c)
                        cells[slot][min(int(p * BINS), BINS - 1)].append((p, c))
                if counted.all():
                    taus.append(tau)
    assert tally.blocks == len(slots[0])
    assert 2 <= len(taus) < len(slots[0])
    step, evaluated = tally.means(), tally.means(evaluated=True)
    for found, share in ((step, 1), (evaluated, 2)):
        for name, part in (("loss", "total"), ("cross_entropy",) * 2, ("total_variation",) * 2, ("confidence",) * 2):
            assert found[name] == pytest.approx(sum(getattr(loss, part).item() for loss in losses) / share)
        assert found["tau"] == pytest.approx(sum(taus) / len(taus))
        assert found["accept"] == pytest.approx([sum(one) / len(one) for one in slots], abs=6e-5)
    assert "calibration" not in step and "ece" not in step
    assert cells[0][0] and cells[0][-1]
    for slot in range(BLOCK):
        error = 0.0
        for cell, (number, p, c) in zip(cells[slot], evaluated["calibration"][slot], strict=True):
            means = [sum(column) / len(cell) for column in zip(*cell)] if cell else [0.0, 0.0]
            assert (number, p, c) == pytest.approx((len(cell), *means), abs=6e-5)
            error += len(cell) * abs(means[0] - means[1])
        assert evaluated["ece"][slot] == pytest.approx(error / len(slots[slot]), abs=6e-5)


def test_tally_of_nothing_and_without_a_confidence_head():
    bare = Tally(BLOCK)
    bare.add(made_up(3, seed=3, predicted=False))
    assert "ece" not in bare.means(evaluated=True)
    nothing = made_up(3, seed=4)
    nothing.counted[:] = False
    tally = Tally(BLOCK)
    tally.add(nothing)
    found = tally.means(evaluated=True)
    assert tally.blocks == 0 and math.isnan(found["tau"]) and found["accept"] == [0.0] * BLOCK and "ece" not in found


def test_an_evaluation_with_a_confidence_that_is_no_number():
    """Refused by name; where no slot counts it is not looked at, and a step does not report calibration."""
    loss = made_up(6, seed=5)
    loss.predicted[0, 0, 1] = torch.nan
    tally = Tally(BLOCK)
    tally.add(loss)
    assert math.isfinite(tally.means()["tau"])
    with pytest.raises(FloatingPointError, match="confidence head's prediction is not finite"):
        tally.means(evaluated=True)
    loss.counted[0, 0] = False
    unseen = Tally(BLOCK)
    unseen.add(loss)
    assert len(unseen.means(evaluated=True)["ece"]) == BLOCK


@pytest.mark.parametrize(
    ("taus", "expected"),
    [
        ([1.0], (2, 0)),
        ([1.0, 2.0, 1.5], (4, 1)),
        ([2.0, 2.0], (2, 1)),
        ([None, float("nan")], (2, 1)),
        ([None, 1], (4, 0)),
    ],
    ids=str,
)
def test_best_so_far(taus, expected):
    rows = [{"step": 2 * number + 2, "held_out": {"tau": tau}} for number, tau in enumerate(taus)]
    assert best_so_far([{"step": 1}, *rows]) == expected


def test_the_best_of_no_evaluation():
    assert best_so_far([]) == best_so_far([{"step": 1}]) == (0, 0)


def test_finite():
    given = {"a": float("nan"), "b": {"c": float("inf"), "d": 1.5}, "e": "nan", "f": [1.0], "g": -float("inf"), "h": 3}
    assert finite(given) == {"a": None, "b": {"c": None, "d": 1.5}, "e": "nan", "f": [1.0], "g": None, "h": 3}
