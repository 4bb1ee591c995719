"""Reading ahead: where a batch is while the step before it runs, and how an error in reading reaches the caller."""

from __future__ import annotations

import math
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_data import metrics_of

from dspark_fast.training import trainer
from dspark_fast.training.features import Batches, CachedFeatures, LiveFeatures
from dspark_fast.training.trainer import Trainer


def test_batches_stay_where_the_source_made_them(cached, tmp_path, monkeypatch):
    """A drafter elsewhere has their anchors and labels, and the sequences once they are moved."""
    one = cached.trainer(tmp_path, replace(cached.settings, accumulate=3, top_tokens=4, vocabulary=0))
    there = torch.device("meta")
    monkeypatch.setattr(one, "draft", SimpleNamespace(device=there, config=one.draft.config))
    batches = one._batches_of(0)
    assert len(batches) == 3
    for batch in batches:
        parts = vars(batch.sequences).values()
        assert all(value.device.type == "cpu" for value in parts)
        assert batch.labels.totals().device == batch.anchors.device == batch.valid.device == there
        moved = vars(batch.to(there).sequences)
        assert all(value.device == there for value in moved.values()) and moved["top_probs"].shape[-1] == 4


def test_a_batch_is_moved_just_before_its_pass(cached, tmp_path, monkeypatch):
    one, events = cached.trainer(tmp_path, replace(cached.settings, accumulate=3)), []
    move, run = trainer._Batch.to, one.replica

    def moved(batch, device):
        events.append("moved")
        return move(batch, device)

    def passed(*arguments):
        events.append("passed")
        return run(*arguments)

    monkeypatch.setattr(trainer._Batch, "to", moved)
    one.replica = passed
    one._update(one._batches_of(0))
    assert events == ["moved", "passed"] * 3


def test_the_reader_has_the_drafters_gpu_for_its_own(cached, tmp_path, monkeypatch):
    """The current one is a thread's own setting."""
    one, chosen = cached.trainer(tmp_path), []
    monkeypatch.setattr(one, "draft", SimpleNamespace(device=torch.device("cuda:1")))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((threading.get_ident(), device)))
    monkeypatch.setattr(one, "_batches_of", lambda step: threading.get_ident())
    batches = one._batches(0)
    reader = next(batches)
    batches.close()
    assert chosen == [(reader, torch.device("cuda:1"))] and reader != threading.get_ident()


def test_an_error_in_reading_reaches_the_caller(cached, tmp_path):
    folder = shutil.copytree(cached.train, tmp_path / "train")
    settings = replace(cached.settings, vocabulary=0)
    one = cached.trainer(tmp_path / "out", settings)
    one.train_batches = Batches(CachedFeatures(folder), 2)
    (folder / "shard-00000.bin").unlink()
    before = threading.active_count()
    with pytest.raises(FileNotFoundError, match="shard-00000"):
        one.run()
    assert threading.active_count() == before


def test_an_error_in_reading_comes_after_the_steps_before_it(whole, cached, tmp_path, monkeypatch):
    one = cached.trainer(tmp_path, replace(cached.settings, save_every=1))
    source, left = one.train_batches.source, iter(range(3))

    def batch(indices):
        if next(left, None) is None:
            raise OSError("the disk is gone")
        return CachedFeatures.batch(source, indices)

    monkeypatch.setattr(source, "batch", batch)
    with pytest.raises(OSError, match="the disk is gone"):
        one.run()
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]
    cached.trainer(tmp_path).run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)


def test_a_live_target_never_runs_twice_at_once(cached, tmp_path, make_draft, monkeypatch):
    """Its taps are hooks: a pass for the held-out text beside one that reads ahead would mix their states."""
    inside, most, model = [], [], cached.model
    real = LiveFeatures.batch

    def batch(self, indices):
        inside.append(None)
        time.sleep(0.01)
        most.append(len(inside))
        try:
            return real(self, indices)
        finally:
            inside.pop()

    monkeypatch.setattr(LiveFeatures, "batch", batch)
    layers = make_draft(model).config.target_layer_ids
    rows = []
    for name in ("one", "two"):
        sources = [LiveFeatures(model, part, layers) for part in (cached.responses[:8], cached.responses[8:])]
        settings = replace(cached.settings, evaluate_every=1)
        Trainer(make_draft(model), *(Batches(source, 2) for source in sources), tmp_path / name, settings).run()
        rows.append(metrics_of(tmp_path / name))
    assert len(most) == 2 * (6 + 1 + 6) and set(most) == {1}
    assert rows[0] == rows[1]


@pytest.mark.gpu
def test_batches_wait_in_page_locked_memory(cached, make_target, make_draft, tmp_path):
    draft = make_draft(make_target(fresh=True).cuda())
    one = cached.trainer(tmp_path, replace(cached.settings, accumulate=2, top_tokens=4, compile=False), draft=draft)
    for batch in one._batches_of(0):
        assert all(value is None or value.is_pinned() for value in vars(batch.sequences).values())
        assert batch.labels.tokens.is_cuda and batch.anchors.is_cuda
    one.run()
    assert all(math.isfinite(row["loss"]) for row in metrics_of(tmp_path))
