"""What a training step is made of: the weights that move, its rate, its data, its vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from tiny_pairs import VOCABULARY
from training_data import metrics_of, weights_of

from dspark_fast import DSparkDraft
from dspark_fast.training import trainer
from dspark_fast.training.blocks import run_blocks, sample_anchors
from dspark_fast.training.features import Batches, CachedFeatures
from dspark_fast.training.recipe import Recipe, train_draft

BLOCK = 5


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
