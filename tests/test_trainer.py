"""The optimisation: what a step is made of, its rates, its data, what it reports."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dspark_fast import DSparkDraft
from dspark_fast.training import dspark_loss, trainer
from dspark_fast.training.blocks import run_blocks, sample_anchors
from dspark_fast.training.features import Batches, CachedFeatures, LiveFeatures, Sequences
from dspark_fast.training.recipe import Recipe, train_draft
from dspark_fast.training.trainer import Trainer
from dspark_fast.training.workers import Workers

VOCABULARY = 97
BLOCK = 5


def weights_of(draft):
    return {name: value.detach().clone() for name, value in draft.state_dict().items()}


def metrics_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "blocks_per_second"} for row in rows]


@pytest.fixture(scope="module")
def whole(cached, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    rates = []
    one = cached.trainer(folder)
    one.on_step = lambda metrics: rates.append((metrics["learning_rate"], one.optimizer.param_groups[0]["lr"]))
    one.run()
    return SimpleNamespace(folder=folder, draft=one.draft, weights=weights_of(one.draft), rates=rates, trainer=one)


def test_the_target_is_neither_trained_nor_given_gradients(whole, cached, make_target):
    fresh = make_target(fresh=True).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in cached.model.state_dict().items())
    assert all(parameter.grad is None for parameter in cached.model.parameters())
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in whole.trainer.parameters)


def test_every_weight_of_the_drafter_is_trained(whole, cached, make_draft):
    start = weights_of(make_draft(cached.model))
    assert all(not torch.equal(value, start[name]) for name, value in whole.weights.items())


def test_heads_only(cached, tmp_path, make_draft):
    one = cached.trainer(tmp_path, replace(cached.settings, heads_only=True))
    start = weights_of(one.draft)
    one.run()
    for name, value in weights_of(one.draft).items():
        head = name.startswith(("markov_head.", "confidence_head."))
        assert torch.equal(value, start[name]) != head, name
    with pytest.raises(ValueError, match="heads_only"):
        cached.trainer(tmp_path, cached.settings, draft=make_draft(cached.model)).run()
    bare = make_draft(cached.model, markov_rank=0, enable_confidence_head=False)
    with pytest.raises(ValueError, match="neither a Markov nor a confidence head"):
        cached.trainer(tmp_path / "bare", replace(cached.settings, heads_only=True), draft=bare)


def test_learning_rate(whole, cached, tmp_path):
    assert all(told == used for told, used in whole.rates)
    one = cached.trainer(tmp_path, replace(cached.settings, steps=50, warm_up=0.1, learning_rate=2e-3))
    rates = [one._learning_rate(step) for step in range(1, 51)]
    assert rates[:5] == pytest.approx([0.4e-3, 0.8e-3, 1.2e-3, 1.6e-3, 2e-3])  # the first step is not lost at 0
    assert rates[4 + 15] == pytest.approx(1e-3 * (1 + math.cos(math.pi / 3)))
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    short = cached.trainer(tmp_path, replace(cached.settings, steps=1))
    assert short._learning_rate(1) == cached.settings.learning_rate


def test_the_loss_falls(cached, tmp_path):
    settings = replace(cached.settings, steps=40, anchors=12, vocabulary=0, evaluate_every=40)
    one = cached.trainer(tmp_path, settings, initializer_range=0.02)
    one.run()
    rows = metrics_of(tmp_path)
    first, last = ([sum(row[key] for row in part) / 5 for key in ("loss", "tau")] for part in (rows[:5], rows[-5:]))
    assert last[0] < 0.85 * first[0]
    assert last[1] > first[1] + 0.05
    assert all(row["gradient_norm"] > 0 and len(row["accept"]) == BLOCK for row in rows)


def test_every_sequence_is_seen_once_per_epoch_in_a_new_order(cached, tmp_path):
    one = cached.trainer(tmp_path)
    assert len(one.train_batches) == 4
    epochs = [[one._batch(4 * epoch + i).sequences.input_ids for i in range(4)] for epoch in range(3)]
    orders = []
    for batches in epochs:
        order = [next(i for i in range(4) if torch.equal(one.train_batches[i].input_ids, ids)) for ids in batches]
        assert sorted(order) == [0, 1, 2, 3]
        orders.append(tuple(order))
    assert len(set(orders)) > 1


def test_every_step_has_anchors_of_its_own(cached, tmp_path, monkeypatch):
    seeds = []

    def watched(mask, count, generator):
        seeds.append(generator.initial_seed())
        return sample_anchors(mask, count, generator)

    monkeypatch.setattr(trainer, "sample_anchors", watched)
    cached.trainer(tmp_path, replace(cached.settings, evaluate_every=100)).run()
    cached.trainer(tmp_path / "other", replace(cached.settings, evaluate_every=100, seed=43)).run()
    assert len(set(seeds)) == len(seeds) == 14  # 6 steps each, and one batch that was read ahead


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


def test_the_reduced_vocabulary_is_the_most_frequent_tokens(whole, cached, tmp_path):
    counts = torch.zeros(VOCABULARY, dtype=torch.long)
    for response in cached.responses[:8]:
        for token in response.input_ids[response.start :]:
            counts[token] += 1
    ids = whole.trainer.vocabulary.ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == 40
    assert {token for token in range(VOCABULARY) if counts[token]} <= set(ids)
    for size in (0, VOCABULARY, VOCABULARY + 5):
        assert cached.trainer(tmp_path, replace(cached.settings, vocabulary=size)).vocabulary is None


def test_nothing_to_train_on(cached, tmp_path):
    with pytest.raises(ValueError, match="no features to train on"):
        cached.trainer(tmp_path, limit=0)


@torch.no_grad()
def test_the_trained_drafter_is_the_one_on_disk(cached, tmp_path, make_draft):
    """What is measured after training must be what a user loads, to the last bit, rotary frequencies included."""
    recipe = Recipe(train=replace(cached.settings, steps=2))
    draft = make_draft(cached.model)
    batches = [Batches(CachedFeatures(cached.train, limit=limit), 2) for limit in (None, 0)]
    with torch.enable_grad():
        trained = train_draft(cached.model, draft, *batches, tmp_path, recipe)
    loaded = DSparkDraft.from_pretrained(tmp_path / "draft", target=cached.model)
    assert load_file(tmp_path / "draft" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert trained.dtype == loaded.dtype == cached.model.dtype
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
    assert not any(parameter.requires_grad for parameter in trained.parameters())
    taps = torch.randn(1, 200, trained.fc.in_features)
    anchor, position = torch.tensor([[199]]), torch.ones(1, 1, dtype=torch.bool)
    ids = torch.randint(1, VOCABULARY, (1, 200))
    assert torch.equal(
        run_blocks(trained, ids, taps, anchor, position), run_blocks(loaded, ids, taps, anchor, position)
    )


def test_compiled_on_a_gpu_or_if_asked_for(cached, tmp_path, monkeypatch):
    """And where it is compiled, not into a piece for each bucket of gradients, which flex_attention would not stand."""
    compiled = []

    def compile_(function, **options):
        compiled.append((function, options))

        def call(*arguments):
            assert not torch._dynamo.config.optimize_ddp
            return function(*arguments)

        return call

    assert torch._dynamo.config.optimize_ddp
    monkeypatch.setattr(torch, "compile", compile_)
    for wanted in (None, False):
        cached.trainer(tmp_path, replace(cached.settings, compile=wanted))
    assert not compiled
    cached.trainer(tmp_path, replace(cached.settings, compile=True, steps=1)).run()
    [(function, options)] = compiled
    assert (function.func, function.keywords, options) == (run_blocks, {"flex": False}, {"dynamic": True})


# --- several batches in a step ----------------------------------------------------------------------------------------


def merged(batches):
    """Several batches as one, padded on the right."""
    width = max(batch.sequences.input_ids.shape[1] for batch in batches)

    def padded(value):
        return F.pad(value, (0, 0) * (value.ndim - 2) + (0, width - value.shape[1]))

    def parts(kind, values, pad):
        columns = {field.name: [getattr(value, field.name) for value in values] for field in fields(kind)}
        return kind(**{key: None if of[0] is None else torch.cat([*map(pad, of)]) for key, of in columns.items()})

    return trainer._Batch(
        sequences=parts(Sequences, [batch.sequences for batch in batches], padded),
        anchors=torch.cat([batch.anchors for batch in batches]),
        valid=torch.cat([batch.valid for batch in batches]),
        labels=parts(type(batches[0].labels), [batch.labels for batch in batches], lambda value: value),
    )


def updated(one, batches):
    """The metrics of a step and the gradients that it took."""
    tally, norm = one._update(batches)
    return tally, norm, {name: parameter.grad.clone() for name, parameter in one.parameters.items()}


@pytest.mark.parametrize("options", [{}, {"vocabulary": 0}, {"top_tokens": 4}], ids=str)
def test_accumulating_is_one_batch_of_all(cached, tmp_path, monkeypatch, options):
    """In fp32: with bf16 products the gradients of one batch alone are less far off than rounding."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    settings = replace(cached.settings, accumulate=2, clip=1e-2, **options)
    batches = cached.trainer(tmp_path, settings)._batches_of(1)
    one_by_one = [cached.trainer(tmp_path, replace(settings, accumulate=1))._batches_of(n)[0] for n in (2, 3)]
    for ours, theirs in zip(batches, one_by_one, strict=True):
        assert torch.equal(ours.sequences.input_ids, theirs.sequences.input_ids)
        assert torch.equal(ours.anchors, theirs.anchors)
    assert len({batch.labels.totals()[1].item() for batch in batches}) == 2  # a mean of means would be another
    tally, norm, ours = updated(cached.trainer(tmp_path, settings), batches)
    pooled, pooled_norm, theirs = updated(cached.trainer(tmp_path, settings), [merged(batches)])
    assert norm == pytest.approx(pooled_norm, rel=1e-5)
    assert tally.blocks == pooled.blocks
    for key, value in tally.means().items():
        assert value == pytest.approx(pooled.means()[key], rel=1e-5), key
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() < 1e-5 * grad.abs().max() + 1e-9, name
    _, other_norm, _ = updated(cached.trainer(tmp_path, settings), batches[:1])
    assert abs(other_norm - norm) > 1e-2 * norm


def test_workers_and_accumulation_share_the_numbers_of_batches(cached, tmp_path, monkeypatch):
    numbers = []
    one = cached.trainer(tmp_path)
    monkeypatch.setattr(one, "_batch", numbers.append)
    for count, each in ((1, 6), (2, 3), (3, 2)):
        numbers.clear()
        one.settings = replace(one.settings, accumulate=each)
        for step in range(3):
            for rank in range(count):
                one.workers = Workers(rank, count)
                one._batches_of(step)
        assert numbers == list(range(18))


def test_top_tokens(cached, tmp_path):
    batches = [cached.trainer(tmp_path, replace(cached.settings, top_tokens=k))._batch(0).sequences for k in (0, 4, 6)]
    assert batches[0].top_tokens is None and batches[0].top_probs is None
    assert batches[1].top_tokens.shape[-1] == batches[1].top_probs.shape[-1] == 4
    assert torch.equal(batches[1].top_tokens, batches[2].top_tokens[..., :4])
    with pytest.raises(ValueError, match="top_tokens is 7, the features hold 6"):
        cached.trainer(tmp_path, replace(cached.settings, top_tokens=7)).run()
    cached.trainer(tmp_path / "4", replace(cached.settings, top_tokens=4, evaluate_every=100)).run()
    cached.trainer(tmp_path / "all", replace(cached.settings, evaluate_every=100)).run()
    first = [metrics_of(tmp_path / name)[0] for name in ("4", "all")]
    assert first[0]["cross_entropy"] == pytest.approx(first[1]["cross_entropy"], rel=1e-6)
    assert first[0]["total_variation"] < first[1]["total_variation"] - 0.01  # a lower bound
    assert first[0]["tau"] > first[1]["tau"]


def test_held_out_figures_are_of_the_whole_distribution(cached, tmp_path):
    """However many tokens are trained on: equal weights have equal figures."""
    found = [cached.trainer(tmp_path, replace(cached.settings, top_tokens=k)).evaluate() for k in (0, 1, 4)]
    assert found[0] == found[1] == found[2]


# --- reading ahead ----------------------------------------------------------------------------------------------------


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


# --- numbers that are none --------------------------------------------------------------------------------------------


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


# --- what it reports --------------------------------------------------------------------------------------------------


def test_calibration_is_reported_of_held_out_text(whole):
    held_out = metrics_of(whole.folder)[-1]["held_out"]
    assert len(held_out["ece"]) == len(held_out["calibration"]) == BLOCK
    numbers = [sum(cell[0] for cell in slot) for slot in held_out["calibration"]]
    assert all(a >= b > 0 for a, b in pairwise(numbers))
    assert not any("ece" in row for row in metrics_of(whole.folder))
