"""The benches run, and refuse to report where what they time is not equal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    """``bench("draft_context")``: the module ``bench/bench_draft_context.py``."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])

    def load(name):
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"bench_{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", ["draft_context", "sampling_cost", "five_prompts"])
def test_it_loads(name, bench):
    assert bench(name).main


def test_draft_context(bench, make_target, make_draft, tmp_path):
    module = bench("draft_context")
    draft = make_draft(make_target())
    with torch.no_grad():
        assert module.measure(draft, 8, 0) == {}
        rows = [module.measure(draft, length, 2) for length in (8, 16)]
    assert [row["context"] for row in rows] == [8, 16]
    assert all(row[way]["median_ms"] > 0 for row in rows for way in ("cached", "stateless"))
    module.plot({"rows": rows, "dtype": "float32", "machine": {"device": "a CPU"}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_draft_context_refuses_unequal_drafts(bench, make_target, make_draft, monkeypatch):
    module = bench("draft_context")
    true = module.draft_block

    def another(*arguments):
        block = true(*arguments)
        return block._replace(tokens=block.tokens + 1)

    monkeypatch.setattr(module, "draft_block", another)
    with torch.no_grad(), pytest.raises(SystemExit, match="nothing is reported"):
        module.measure(make_draft(make_target()), 8, 2)
