"""One whole training run, which the others are held against."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from training_data import weights_of


@pytest.fixture(scope="session")
def whole(cached, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    rates = []
    one = cached.trainer(folder)
    one.on_step = lambda metrics: rates.append((metrics["learning_rate"], one.optimizer.param_groups[0]["lr"]))
    one.run()
    return SimpleNamespace(folder=folder, draft=one.draft, weights=weights_of(one.draft), rates=rates, trainer=one)
