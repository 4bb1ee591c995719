"""Numbers that are none: a step with such a loss or gradient ends the run before it is applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_data import metrics_of

from dspark_fast.training.features import CachedFeatures


def assert_nothing_of_step(step, one, folder):
    """The weights in memory and on disk are those of the step before."""
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, step))
    if step > 1:
        saved = load_file(folder / "checkpoint.safetensors")
        for name, value in one.parameters.items():
            assert torch.equal(value, saved[f"weight.{name}"]), name
    assert all(value.isfinite().all() for value in one.parameters.values())


def test_a_poisoned_batch_ends_the_run_before_it_is_applied(cached, tmp_path, monkeypatch):
    one = cached.trainer(tmp_path, replace(cached.settings, save_every=1))
    source, seen = one.train_batches.source, []

    def batch(indices):
        seen.append(indices)
        whole = CachedFeatures.batch(source, indices)
        return replace(whole, features=whole.features * torch.nan) if len(seen) == 3 else whole

    monkeypatch.setattr(source, "batch", batch)
    with pytest.raises(FloatingPointError, match="step 3 has loss nan"):
        one.run()
    assert one.step == 2
    assert_nothing_of_step(3, one, tmp_path)


def test_a_gradient_that_is_no_number_ends_the_run_too(cached, tmp_path):
    one = cached.trainer(tmp_path)
    one.draft.fc.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match=r"step 1 has loss \d.* and gradient norm (nan|inf)"):
        one.run()
    assert_nothing_of_step(1, one, tmp_path)
    assert not (tmp_path / "checkpoint.safetensors").exists()
