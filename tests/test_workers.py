"""Training in processes of its own: killed at random moments, and shared by two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from dspark_fast.training.workers import Workers

SCRIPT = Path(__file__).parent / "training_runs.py"


def runs(what, folder):
    """What one of the script's functions says of its runs."""
    done = subprocess.run(
        [sys.executable, SCRIPT, what, folder],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(folder=folder, **json.loads(done.stdout))


def told(folder, rank=0):
    return json.loads((folder / f"told-{rank}.json").read_text())


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "blocks_per_second"} for row in rows]


def assert_same_tensors(one, other):
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


# --- one worker, killed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    """SIGKILL at ten random moments of a run of 48 steps that saves every 2 and keeps its best weights.

    A kill can leave files ``.checkpoint.<pid>``, ``.best.<pid>``, ``.metrics.<pid>``, and safetensors' own ``.tmp`` and
    six characters; the next run removes them.
    """
    found = runs("killed", tmp_path / "runs")
    assert len(found.lost) == 10 and max(found.lost) <= 2
    ours, theirs = found.folder / "killed", found.folder / "whole"
    assert [row["step"] for row in rows_of(ours)] == list(range(1, 49))
    assert rows_of(ours) == rows_of(theirs)
    for name in ("weights-0", "checkpoint.safetensors", "best.safetensors"):
        assert_same_tensors(ours / name, theirs / name)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())


# --- two workers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return runs("two", tmp_path_factory.mktemp("two") / "runs")


@pytest.mark.slow
def test_two_workers_take_the_steps_of_one_that_accumulates_two_batches(shared):
    """To the last bit: a sum of two gradients is the same in either order, and so is the half of its double."""
    one, two = shared.folder / "one", shared.folder / "two-0"
    assert len(rows_of(one)) == 12
    assert rows_of(two) == rows_of(one)
    assert_same_tensors(two / "weights-0", one / "weights-0")
    assert_same_tensors(shared.folder / "two-1" / "weights-1", two / "weights-0")


@pytest.mark.slow
def test_every_worker_is_told_the_same_and_only_the_first_one_writes(shared):
    assert told(shared.folder / "two-0") == told(shared.folder / "two-1", rank=1) == rows_of(shared.folder / "two-0")
    assert sorted(path.name for path in (shared.folder / "two-1").iterdir()) == ["told-1.json", "weights-1"]


@pytest.mark.slow
def test_two_workers_take_up_what_one_began(shared):
    assert shared.begun == 4
    resumed, one = shared.folder / "resumed", shared.folder / "one"
    assert [row["step"] for row in told(resumed, rank=1)] == list(range(5, 13))
    assert rows_of(resumed) == rows_of(one)
    assert_same_tensors(resumed / "weights-0", one / "weights-0")
    with safe_open(resumed / "checkpoint.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["settings"])["accumulate"] == 2


@pytest.mark.slow
def test_the_first_worker_decides_when_patience_is_out(shared):
    """The second one's own figures rise without end; both stop, with the same weights."""
    folder = shared.folder / "stopped"
    assert [row["step"] for row in told(folder, rank=1)] == [row["step"] for row in told(folder)] == list(range(1, 9))
    assert "stopped" in told(folder)[-1] and "stopped" in told(folder, rank=1)[-1]
    assert_same_tensors(folder / "weights-1", folder / "weights-0")
    best = load_file(folder / "best.safetensors")
    ended = load_file(folder / "weights-0")
    assert all(torch.equal(value, ended[name.removeprefix("weight.")]) for name, value in best.items())
    with safe_open(folder / "best.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "4"


# --- what torchrun says of itself -------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """``environment(gpus, **numbers)``: so many GPUs; two processes of which this is the first, but for ``numbers``."""

    def set_to(gpus, **numbers):
        def never(*_, **__):
            raise AssertionError("the others are waited for")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dist, "init_process_group", never)
        for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", **numbers}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("device", "gpus", "numbers", "message"),
    [
        ("cuda", 0, {}, "device is 'cuda', but PyTorch finds no GPU here"),
        ("cuda:1", 0, {"WORLD_SIZE": None}, "device is 'cuda:1', but PyTorch finds no GPU here"),
        ("cuda:1", 2, {}, "device is 'cuda:1' for 2 processes: ask for 'cuda', and each takes its own"),
        ("cuda", 2, {"WORLD_SIZE": "3", "LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but the GPUs are 2"),
        ("cuda", 2, {"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first' in the environment: a whole number from 0 on"),
        ("cpu", 0, {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment: a whole number from 1 on"),
        ("cpu", 0, {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment"),
        ("cpu", 0, {"WORLD_SIZE": ""}, "WORLD_SIZE is '' in the environment"),
        ("cpu", 0, {"RANK": "-1"}, "RANK is '-1' in the environment: a whole number from 0 on"),
        ("cpu", 0, {"RANK": "2"}, r"RANK is 2, of processes there are 2 \(WORLD_SIZE\)"),
        ("cpu", 0, {"RANK": None}, "RANK is not set in the environment, though WORLD_SIZE is"),
    ],
    ids=str,
)
def test_a_place_that_cannot_be_is_refused_before_the_others_are_waited_for(
    environment, device, gpus, numbers, message
):
    environment(gpus, **numbers)
    with pytest.raises(ValueError, match=message):
        Workers.from_environment(device)


def test_every_process_takes_its_own_gpu(environment, monkeypatch):
    environment(2, RANK="1", LOCAL_RANK="1")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.insert(0, backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    workers = Workers.from_environment("cuda")
    assert chosen == ["nccl", 1] and (workers.rank, workers.count) == (1, 2)
    assert workers.device("cuda") == "cuda:1"


def test_a_worker_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Workers.from_environment("cpu")
    assert (alone.rank, alone.count, alone.first) == (0, 1, True)
    module, values = nn.Linear(2, 2), torch.ones(3)
    assert alone.wrap(module) is module and alone.sum(values) is values
    with alone.synchronised(module, False):
        alone.wait()
    alone.leave()
