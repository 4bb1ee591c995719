"""The poison that all other tests rely on is there."""

from __future__ import annotations

import torch


def test_new_memory_is_poisoned():
    """The fixture in conftest.py works on the package's own calls and on no others."""
    space = {"__name__": "dspark_fast.somewhere", "torch": torch}
    exec("a = torch.empty(2)\nb = torch.empty_like(a)\nc = a.new_empty(2, dtype=torch.long)", space)
    assert space["a"].isnan().all() and space["b"].isnan().all() and (space["c"] > 1 << 60).all()
