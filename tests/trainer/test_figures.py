"""What a training run reports of text that it does not train on: loss, acceptance, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from training_data import metrics_of

from dspark_fast.training import dspark_loss
from dspark_fast.training.blocks import sample_anchors
from dspark_fast.training.features import Batches, CachedFeatures

BLOCK = 5


def test_held_out_text_is_looked_at(whole, cached, tmp_path):
    rows = metrics_of(whole.folder)
    assert [row["step"] for row in rows if "held_out" in row] == [2, 4, 6]
    assert rows[-1]["held_out"] == json.loads(json.dumps(whole.trainer.evaluate()))
    # The two held-out responses are one batch, with the anchors of seed 0.
    batch = Batches(CachedFeatures(cached.held_out), 2)[0]
    anchors, valid = sample_anchors(batch.loss_mask, cached.settings.anchors, torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = dspark_loss(
            whole.draft,
            batch.input_ids,
            batch.features,
            batch.last_hidden,
            batch.loss_mask,
            anchors,
            valid,
            vocabulary=whole.trainer.vocabulary,
            log_total=batch.log_total,
        )
    assert rows[-1]["held_out"]["loss"] == pytest.approx(loss.total.item(), rel=1e-6)
    assert rows[-1]["held_out"]["tau"] == pytest.approx(loss.expected_acceptance_length(), rel=1e-6)
    alone = cached.trainer(tmp_path, held_out=0)
    alone.run()
    assert len(metrics_of(tmp_path)) == 6 and not any("held_out" in row for row in metrics_of(tmp_path))


def test_held_out_figures_are_of_the_whole_distribution(cached, tmp_path):
    """However many tokens are trained on: equal weights have equal figures."""
    found = [cached.trainer(tmp_path, replace(cached.settings, top_tokens=k)).evaluate() for k in (0, 1, 4)]
    assert found[0] == found[1] == found[2]


def test_calibration_is_reported_of_held_out_text(whole):
    held_out = metrics_of(whole.folder)[-1]["held_out"]
    assert len(held_out["ece"]) == len(held_out["calibration"]) == BLOCK
    numbers = [sum(cell[0] for cell in slot) for slot in held_out["calibration"]]
    assert all(a >= b > 0 for a, b in pairwise(numbers))
    assert not any("ece" in row for row in metrics_of(whole.folder))
