"""The bench of rounds: its bytes, its scripted drafts, and that it reports nothing where tokens differ."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

BENCH = Path(__file__).parent.parent / "bench"
RIGHT = 0.83
# `with torch.device(...)` learns once which functions make tensors: now, before a fixture puts others in their place.
_device_constructors()


@pytest.fixture
def load(monkeypatch):
    """``load("rounds")``: a module of bench/, whose files import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.fixture
def rounds(load):
    """``rounds(new_tokens)``: a run on the CPU, and its module."""
    module = load("rounds")

    def make(new_tokens=8, budget=600.0):
        options = Namespace(budget=budget, new_tokens=new_tokens, repeats=1, seconds=0.0, right=RIGHT, scale="tiny")
        return module.Rounds(torch.device("cpu"), 1e4, options)

    make.module = module
    return make


def test_a_rehearsal(load, tmp_path, monkeypatch, capsys):
    bench = load("bench_rounds")
    monkeypatch.setattr(bench, "rate_of", lambda folder, device: 1e4)
    here = set((BENCH / "results").rglob("*"))
    options = ["--device", "cpu", "--new-tokens", "8", "--repeats", "1", "--seconds", "0"]
    bench.main([*options, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "rounds.json").read_text())
    ways = {(row["batch"], row["provider"]) for row in result["rows"]}
    every = set(bench.EVERY) - {bench.GRAPH}
    assert ways == {(1, way) for way in every} | {(3, way) for way in every & set(bench.cases("tiny")[1].ways)}
    assert {row["same_tokens"] for row in result["rows"]} == {8}
    assert all(row["acceptance"] == bench.SCRIPTED and row["round_ms"] > 0 for row in result["rows"])
    assert {left["why"] for left in result["left_out"]} == {"a graph needs a GPU"}
    assert load("summary").lines(tmp_path)[0] == "rounds: 8 rows"
    bench.main([*options, "--budget", "0"])  # nothing is begun, and without --out nothing is written
    assert set((BENCH / "results").rglob("*")) == here
    assert "budget of 0 s was over" in capsys.readouterr().out


def test_a_scripted_round_is_a_graph(rounds, on_a_cpu, monkeypatch):
    module, run = rounds.module, rounds(20)
    monkeypatch.setattr("dspark_fast.generation.obstacle", lambda model, drafter, device: None)
    monkeypatch.setattr(module.Rounds, "why_not", lambda self, way: None)
    run.run(module.Case("tiny", 2, 24))
    assert not run.refused and not run.left_out
    graph, eager = ({row["provider"]: row for row in run.rows}[way] for way in (module.GRAPH, module.NO_GRAPH))
    assert graph["rounds"] == eager["rounds"] < 20 and graph["acceptance_length"] == eager["acceptance_length"] > 2
    assert len(on_a_cpu) == 1, "the timed calls met the graph of the warm-up"


@pytest.mark.parametrize("when", ["compared", "timed"])
def test_a_graph_that_says_something_else_is_not_reported(rounds, when, on_a_cpu, monkeypatch):
    module, run = rounds.module, rounds()
    calls, true = [], module.Rounds.call

    def another(self, way, pair, ids, table):
        made = true(self, module.NO_GRAPH if way == module.GRAPH else way, pair, ids, table)
        calls.append(way)
        wrong = way == module.GRAPH and (when == "compared" or calls.count(way) > 2)
        return made._replace(tokens=made.tokens + 1) if wrong else made

    monkeypatch.setattr(module.Rounds, "call", another)
    monkeypatch.setattr(module.Rounds, "why_not", lambda self, way: None)
    if when == "compared":
        with pytest.raises(SystemExit, match="in fp32"):
            run.run(module.Case("tiny", 1, 24))
        return
    run.run(module.Case("tiny", 1, 24))
    assert not run.rows and "says something else in its timed call 1" in run.refused[0]


def test_the_script(load):
    scripted = load("scripted")
    truth = torch.arange(4 * 400).view(4, 400) % 97
    table = scripted.script(truth, 100, 7, 97, RIGHT)
    assert table.shape == (4, 300, 7) and torch.equal(table, scripted.script(truth, 100, 7, 97, RIGHT))
    inside = table[:, :290]
    true = truth.unfold(1, 7, 1)[:, 101:391]
    right = inside == true
    assert torch.equal(inside[~right], (true[~right] + 1) % 97)
    assert abs(float(right.float().mean()) - RIGHT) < 0.02
    tau = float(right.long().cumprod(-1).sum(-1).float().mean()) + 1
    assert abs(tau - scripted.expected_tau(RIGHT, 7)) < 0.2
    assert scripted.expected_tau(0.8, 7) == pytest.approx(4.161, abs=1e-3)


def test_the_floor_is_that_of_the_budget(load):
    scripted = load("scripted")
    pair = scripted.shape_of(scripted.QWEN3_4B, scripted.QWEN3_4B_DRAFT)
    assert pair[1].config.target_layer_ids == [1, 9, 17, 25, 33] and pair[1].config.num_hidden_layers == 5
    floor = scripted.floor_of(*pair, batch=1, context=1000)
    weights = (floor.target, floor.layers, floor.head, floor.fc, floor.walk)
    assert [round(part / 1e9, 2) for part in weights] == [8.04, 1.01, 0.78, 0.07, 0.54]
    assert (floor.target_kv, floor.draft_kv) == (147_456_000, 20_480_000)
    assert floor.round == sum(floor) and floor.plain == floor.target + floor.target_kv
