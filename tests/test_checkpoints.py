"""What a training run leaves behind: a run that was interrupted goes on as if it had not been."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from training_data import metrics_of, weights_of

from dspark_fast.training import LossWeights, checkpoints

FILES = ["best.safetensors", "checkpoint.safetensors", "metrics.jsonl"]


class Stop(BaseException):
    """As a Ctrl-C or a kill: no handler for errors may catch it."""


def stop_at(step):
    def on_step(metrics):
        if metrics["step"] == step:
            raise Stop

    return on_step


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5], ids="after_{}".format)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(whole, cached, tmp_path, stop):
    """Killed after the line of a step was written and before its checkpoint; the next begins with other weights."""
    with pytest.raises(Stop):
        cached.trainer(tmp_path, on_step=stop_at(stop)).run()
    checkpoint = tmp_path / "checkpoint.safetensors"
    assert checkpoint.is_file() == (stop > 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # the kill also tore a line
    second = cached.trainer(tmp_path)
    if stop > 3:
        with torch.no_grad():
            for parameter in second.draft.parameters():
                parameter.normal_()
    second.run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)
    for name, value in weights_of(second.draft).items():
        assert torch.equal(value, whole.weights[name]), name


def test_a_finished_run_is_left_as_it_is(whole, cached, tmp_path):
    first = cached.trainer(tmp_path)
    first.run()
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    again = cached.trainer(tmp_path, on_step=lambda metrics: pytest.fail("a step"))
    again.run()
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines
    for name, value in weights_of(again.draft).items():
        assert torch.equal(value, whole.weights[name]), name


def test_a_failed_checkpoint_leaves_the_one_before(whole, cached, tmp_path, monkeypatch):
    real = checkpoints.save_file

    def fail(tensors, path, metadata=None):
        if metadata["step"] == "6":
            path.write_bytes(b"half of it")
            raise OSError("disk full")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoints, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cached.trainer(tmp_path).run()
    monkeypatch.setattr(checkpoints, "save_file", real)
    second = cached.trainer(tmp_path)
    checkpoints.resume(second)
    assert second.step == 3
    second.run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchors": 7}, "anchors was 6, is 7"),
        ({"steps": 8, "seed": 1}, "steps was 6, is 8; seed was 42, is 1"),
        ({"loss": LossWeights(decay=3.0)}, "loss was .*4.0.* is .*3.0"),
        ({"vocabulary": 0}, "vocabulary was 40, is 0"),
        ({"heads_only": True}, "heads_only was False, is True"),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_settings_is_refused_by_name(whole, cached, change, message):
    before = (whole.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        cached.trainer(whole.folder, replace(cached.settings, **change)).run()
    assert (whole.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("shape", [{"markov_rank": 4}, {"num_hidden_layers": 1}, {"block_size": 4}], ids=str)
def test_a_checkpoint_of_another_drafter_is_refused(whole, cached, shape):
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        cached.trainer(whole.folder, **shape).run()


def test_how_often_to_save_may_change(whole, cached, tmp_path):
    with pytest.raises(Stop):
        cached.trainer(tmp_path, on_step=stop_at(4)).run()
    cached.trainer(tmp_path, replace(cached.settings, save_every=1)).run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)


def test_only_json_and_safetensors_are_written(cached, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("pickle")

    for name in ("torch.save", "torch.load", "pickle.dump", "pickle.dumps", "pickle.load", "pickle.loads"):
        monkeypatch.setattr(name, never)
    cached.trainer(tmp_path).run()
    cached.trainer(tmp_path).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert {key.split(".")[0] for key in saved} == {"weight", "mean", "square"}
    assert not any("embed_tokens" in key or "lm_head" in key for key in saved)


def test_a_checkpoint_belongs_to_its_responses(whole, cached):
    before = (whole.folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(ValueError, match="responses was"):
        cached.trainer(whole.folder, limit=7).run()
    assert (whole.folder / "checkpoint.safetensors").read_bytes() == before


def test_trained_heads_belong_to_their_frozen_layers(cached, tmp_path, make_draft):
    heads = replace(cached.settings, steps=3, save_every=3, heads_only=True)
    cached.trainer(tmp_path, heads).run()
    stranger = make_draft(cached.model)
    with torch.no_grad():
        stranger.fc.weight[0, 0] += 1
    with pytest.raises(ValueError, match="frozen was"):
        cached.trainer(tmp_path, heads, draft=stranger).run()
    checkpoints.resume(cached.trainer(tmp_path, heads))


def test_frozen_weights_are_hashed_once(cached, tmp_path, monkeypatch):
    cached.trainer(tmp_path, replace(cached.settings, steps=1)).run()
    hashed = []
    sha256 = checkpoints.hashlib.sha256
    monkeypatch.setattr(checkpoints, "hashlib", SimpleNamespace(sha256=lambda: hashed.append(None) or sha256()))
    cached.trainer(tmp_path / "other", replace(cached.settings, save_every=1)).run()  # six checkpoints
    assert len(hashed) == 1
    cached.trainer(tmp_path / "other", replace(cached.settings, save_every=1)).run()
    assert len(hashed) == 2


def test_what_a_kill_left_is_cleared_away(cached, tmp_path):
    """Files of ours and of safetensors; not those of others."""
    left = [".checkpoint.123", ".best.4", ".metrics.567", ".tmp8WE8mH"]
    for begin in (True, False):  # a fresh run, and one that goes on
        for name in (*left, ".tmp", ".gitignore", "responses.jsonl"):
            (tmp_path / name).write_text("half of it")
        cached.trainer(tmp_path, replace(cached.settings, steps=3)).run()
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {".tmp", ".gitignore", "responses.jsonl", *FILES}, begin


def test_an_interrupt_leaves_a_whole_checkpoint_and_no_thread(whole, cached, tmp_path):
    def interrupt(metrics):
        if metrics["step"] == 5:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        cached.trainer(tmp_path, on_step=interrupt).run()
    assert threading.active_count() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    with safe_open(tmp_path / "checkpoint.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "3"
    cached.trainer(tmp_path).run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)


# --- patience ---------------------------------------------------------------------------------------------------------

# by evaluation, at steps 2, 4, ...: the best is the third, two equal ones and one without any full block follow
TAUS = [1.5, 1.2, 2.0, 2.0, float("nan"), 1.9, 3.0]


@pytest.fixture
def patient(cached):
    """``patient(folder)``: a trainer whose evaluations are told, and the weights at each of them."""

    def make(folder, *, at=lambda step: None, **changes):
        one = cached.trainer(folder, replace(cached.settings, steps=14, patience=3, **changes))
        one.at = {}

        def evaluate():
            one.at[one.step] = weights_of(one.draft)
            return {"tau": TAUS[one.step // 2 - 1]}

        one.evaluate = evaluate
        one.on_step = lambda metrics: at(metrics["step"])
        return one

    return make


def assert_weights(draft, weights):
    for name, value in weights_of(draft).items():
        assert torch.equal(value, weights[name]), name


def test_patience(patient, tmp_path):
    one = patient(tmp_path)
    one.run()
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row.get("stopped") for row in rows] == [None] * 11 + ["no better held-out tau since step 6"]
    assert rows[9]["held_out"]["tau"] is None
    assert_weights(one.draft, one.at[6])
    assert not all(torch.equal(value, one.at[12][name]) for name, value in one.at[6].items())
    with safe_open(tmp_path / "checkpoint.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "12"  # where it stopped, though no multiple of save_every asks for it

    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = patient(tmp_path, at=lambda step: pytest.fail("a step"))
    again.run()
    assert_weights(again.draft, one.at[6])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_the_best_weights_are_the_drafters_where_the_run_ends_in_time(patient, tmp_path):
    one = patient(tmp_path, save_every=100)
    one.settings = replace(one.settings, patience=100)
    one.run()
    assert len(metrics_of(tmp_path)) == 14 and "stopped" not in metrics_of(tmp_path)[-1]
    assert_weights(one.draft, one.at[14])


def test_without_patience_the_last_weights_are_the_drafters(patient, tmp_path):
    one = patient(tmp_path)
    one.settings = replace(one.settings, patience=0)
    one.run()
    assert len(metrics_of(tmp_path)) == 14 and "stopped" not in metrics_of(tmp_path)[-1]
    assert_weights(one.draft, one.at[14])


@pytest.mark.parametrize("step", [4, 6, 8, 12])
def test_killed_between_the_best_weights_and_the_checkpoint(patient, tmp_path, step):
    """At step 6 the best weights are new and the checkpoint is of step 5; at 12 the reason to stop is written."""

    def stop(at):
        if at == step:
            raise Stop

    expected = patient(tmp_path / "expected")
    expected.run()
    with pytest.raises(Stop):
        patient(tmp_path / "killed", at=stop, save_every=5).run()
    if step == 6:
        with safe_open(tmp_path / "killed" / "best.safetensors", framework="pt") as file:
            assert file.metadata()["step"] == "6"
    second = patient(tmp_path / "killed", save_every=5)
    second.run()
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "expected")
    assert_weights(second.draft, expected.at[6])


# --- and a patience that changes from run to run ----------------------------------------------------------------------


def with_settings(one, **changes):
    one.settings = replace(one.settings, **changes)
    return one


@pytest.mark.parametrize("later", [5, 0])
def test_a_raised_patience_goes_on_where_the_old_one_was_out(patient, tmp_path, later):
    patient(tmp_path).run()
    assert metrics_of(tmp_path)[-1]["step"] == 12
    lowered = with_settings(patient(tmp_path, at=lambda step: pytest.fail("a step")), patience=2)
    lowered.run()
    expected = with_settings(patient(tmp_path / "expected"), patience=5)
    expected.run()
    assert_weights(lowered.draft, expected.at[6])
    one = with_settings(patient(tmp_path), patience=later)
    one.run()
    rows = metrics_of(tmp_path)
    assert rows[11].pop("stopped")
    assert rows == metrics_of(tmp_path / "expected") and len(rows) == 14
    assert_weights(one.draft, expected.at[14])


def test_a_patience_that_comes_later_finds_the_best_weights(patient, tmp_path):
    with pytest.raises(Stop):
        with_settings(patient(tmp_path, at=stop_at_step(11)), patience=0).run()
    second = patient(tmp_path)
    second.run()
    assert metrics_of(tmp_path)[-1]["step"] == 12
    expected = patient(tmp_path / "expected")
    expected.run()
    assert_weights(second.draft, expected.at[6])


def stop_at_step(step):
    return lambda at: stop_at(step)({"step": at})


def test_best_weights_of_an_evaluation_that_never_came_again_are_not_taken(patient, tmp_path):
    """Those of step 6, after the checkpoint of step 5; the next run does not evaluate, so step 2 is the best one."""
    with pytest.raises(Stop):
        patient(tmp_path, at=stop_at_step(6), save_every=5).run()
    second, last = with_settings(patient(tmp_path), evaluate_every=100), {}
    second.on_step = lambda metrics: last.update(weights_of(second.draft))
    with pytest.warns(UserWarning, match="best evaluation, at step 2, are lost"):
        second.run()
    assert not (tmp_path / "best.safetensors").exists()
    assert_weights(second.draft, last)


def test_best_weights_of_another_step_are_not_loaded(cached, tmp_path):
    one = cached.trainer(tmp_path)
    one.step = 4
    checkpoints.save_best(one)
    saved = weights_of(one.draft)
    with torch.no_grad():
        one.draft.fc.weight.add_(1)
    changed = weights_of(one.draft)
    with pytest.warns(UserWarning, match="at step 2, are lost"):
        checkpoints.load_best(one, [{"step": 2, "held_out": {"tau": 2.0}}, {"step": 4, "held_out": {"tau": 1.0}}])
    assert_weights(one.draft, changed)
    checkpoints.load_best(one, [{"step": 2}])  # no evaluation: nothing to say
    assert_weights(one.draft, changed)
    checkpoints.load_best(one, [{"step": 2, "held_out": {"tau": 1.0}}, {"step": 4, "held_out": {"tau": 2.0}}])
    assert_weights(one.draft, saved)
