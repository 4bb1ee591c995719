"""The optimisation half of training: packed anchor blocks, the losses, a warm start, the trainer, what it reports."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dspark_fast import DSparkDraft
from dspark_fast.reference import draft_block
from dspark_fast.taps import tapped
from dspark_fast.training import Loss, LossWeights, Vocabulary, dspark_loss, features, trainer
from dspark_fast.training.blocks import block_labels, run_blocks, sample_anchors
from dspark_fast.training.card import write_card
from dspark_fast.training.evaluate import Acceptance, measure_acceptance
from dspark_fast.training.features import FeatureStore, write_features
from dspark_fast.training.initialise import initialise_from_target
from dspark_fast.training.plot import plot_training
from dspark_fast.training.recipe import Recipe, fresh_draft, train_draft
from dspark_fast.training.responses import Response
from dspark_fast.training.trainer import Trainer, TrainSettings

VOCABULARY = 97
BLOCK = 5
HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "hidden_only_confidence": {"confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False},
    "no_markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "neither": {"markov_rank": 0, "enable_confidence_head": False},
}


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def batch_of(model, draft, lengths=(23, 17), starts=(6, 4)):
    """Random sequences with the target's own taps, padded on the right; ``loss_mask`` also has a hole."""
    generator = torch.Generator().manual_seed(4)
    width = max(lengths)
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator) * inside
    mask = inside & (torch.arange(width) >= torch.tensor(starts)[:, None])
    mask[0, 13] = False
    taps, last = [], []
    for row, length in zip(ids, lengths):
        with tapped(model, draft.config.target_layer_ids) as caught:
            hidden = model.get_decoder()(input_ids=row[None, :length], use_cache=False).last_hidden_state
            taps.append(F.pad(caught.take()[0], (0, 0, 0, width - length)))
            last.append(F.pad(hidden[0], (0, 0, 0, width - length)))
    last = torch.stack(last)
    log_total = F.linear(last, model.lm_head.weight).logsumexp(-1)
    return SimpleNamespace(
        lengths=lengths,
        input_ids=ids,
        loss_mask=mask,
        features=torch.stack(taps),
        last_hidden=last,
        log_total=log_total,
        anchors=torch.tensor([[6, 11, 14, 21], [4, 10, 15, 0]]),
        valid=torch.tensor([[True, True, True, True], [True, True, True, False]]),
    )


def arguments(batch):
    return (batch.input_ids, batch.features, batch.last_hidden, batch.loss_mask, batch.anchors, batch.valid)


def gradients(draft, loss):
    draft.requires_grad_(True)
    draft.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


# --- anchors and labels -----------------------------------------------------------------------------------------------


def test_anchors_are_distinct_allowed_and_ascending():
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    allowed = [{p for p in range(39) if row[p] and row[p + 1]} for row in mask]
    for count in (1, 5, 12):
        anchors, valid = sample_anchors(mask, count, torch.Generator().manual_seed(6))
        assert anchors.shape == valid.shape == (6, count)
        for row, keep, may in zip(anchors.tolist(), valid, allowed):
            assert bool(keep.all()) == (len(may) >= count)
            assert set(row[: int(keep.sum())]) <= may
            kept = row[: int(keep.sum())]
            assert kept == sorted(set(kept))
    again, _ = sample_anchors(mask, 12, torch.Generator().manual_seed(6))
    assert torch.equal(anchors, again)
    assert not torch.equal(anchors, sample_anchors(mask, 12, torch.Generator().manual_seed(7))[0])


def test_every_allowed_anchor_is_as_likely():
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1]])
    generator = torch.Generator().manual_seed(8)
    counts = torch.zeros(9)
    for _ in range(500):
        anchors, valid = sample_anchors(mask, 2, generator)
        assert valid.all()
        counts[anchors[0]] += 1
    assert counts.nonzero()[:, 0].tolist() == [1, 2, 5, 6, 7]
    assert counts[counts > 0].min() > 150  # 200 expected, standard deviation 11


def test_too_few_anchors_are_filled_up_with_invalid_ones_at_0():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    anchors, valid = sample_anchors(mask, 4, torch.Generator())
    assert anchors.tolist() == [[1, 5, 0, 0], [0, 0, 0, 0], [6, 0, 0, 0]]
    assert valid.tolist() == [[True, True, False, False], [False] * 4, [True, False, False, False]]
    anchors, valid = sample_anchors(mask, 100, torch.Generator())  # more than there are positions
    assert anchors.shape[1] <= 100 and valid.sum(1).tolist() == [2, 0, 1]
    anchors, valid = sample_anchors(torch.ones(1, 1), 3)
    assert not valid.any()


def test_labels_against_a_loop():
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    mask = torch.rand(3, 20, generator=generator) < 0.75
    anchors = torch.arange(20).expand(3, -1)
    valid = torch.rand(3, 20, generator=generator) < 0.9
    labels, previous, counted = block_labels(ids, mask, anchors, valid, BLOCK)
    for row in range(3):
        for p in range(20):
            going = bool(valid[row, p])
            for slot in range(BLOCK):
                going = going and p + 1 + slot < 20 and bool(mask[row, p + 1 + slot])
                assert bool(counted[row, p, slot]) == going
                if going:
                    assert labels[row, p, slot] == ids[row, p + 1 + slot]
                    assert previous[row, p, slot] == ids[row, p + slot]


# --- packed blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@torch.no_grad()
def test_packed_blocks_are_the_blocks_of_generation(make_target, make_draft, family):
    model = make_target(family)
    draft = make_draft(model)
    batch = batch_of(model, draft)
    anchors = torch.tensor([[1, 2, 9, 22], [1, 16, 8, 0]])  # the last positions too, and no order needed
    valid = torch.tensor([[True, True, True, True], [True, True, True, False]])
    hidden = run_blocks(draft, batch.input_ids, batch.features, anchors, valid)
    assert hidden.shape == (2, 4, BLOCK, 64)
    assert hidden.isfinite().all()
    for row in range(2):
        for index in range(4):
            if valid[row, index]:
                p = int(anchors[row, index])
                alone = draft_block(draft, batch.features[row : row + 1, :p], batch.input_ids[row : row + 1, p])
                assert_close(hidden[row, index], alone.hidden[0])


@torch.no_grad()
def test_what_a_block_may_not_see_has_no_influence(make_target, make_draft):
    """Not the padding, nothing from the anchor on, no other block, and an invalid block not even its anchor."""
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    hidden = run_blocks(draft, batch.input_ids, batch.features, batch.anchors, batch.valid)

    wider = F.pad(batch.features, (0, 0, 0, 9), value=3.0)
    wider[1, 17:] = -5.0
    ids = F.pad(batch.input_ids, (0, 9), value=5)
    assert_close(run_blocks(draft, ids, wider, batch.anchors, batch.valid), hidden)

    first = batch.anchors.clone(), batch.features.clone(), batch.input_ids.clone()
    first[0][:, 1:] = torch.tensor([[19, 8, 3], [2, 13, 6]])
    first[1][0, 6:], first[1][1, 4:] = 7.0, 7.0
    first[2][0, 7:], first[2][1, 5:] = 7, 7
    others = run_blocks(draft, first[2], first[1], first[0], torch.ones_like(batch.valid))
    assert_close(others[:, 0], hidden[:, 0])

    ids = batch.input_ids.clone()
    ids[1, 0] = 33
    assert_close(run_blocks(draft, ids, batch.features * 2, batch.anchors, batch.valid)[1, 3], hidden[1, 3])


# --- the losses -------------------------------------------------------------------------------------------------------


def by_hand(draft, batch, weights, ids=None):
    """The objective block by block: each drafted alone by the reference, each term summed in a loop."""
    config = draft.config
    ids = torch.arange(VOCABULARY) if ids is None else ids
    where = {int(token): index for index, token in enumerate(ids)}
    terms = {"cross_entropy": [], "total_variation": [], "confidence": []}
    for row, length in enumerate(batch.lengths):
        for p, valid in zip(batch.anchors[row].tolist(), batch.valid[row].tolist()):
            if not valid:
                continue
            text = batch.input_ids[row]
            hidden = draft_block(draft, batch.features[row : row + 1, :p], text[p][None]).hidden[0]
            state = torch.zeros(config.markov_rank)
            for slot in range(config.block_size):
                label = p + 1 + slot
                if label >= length or not batch.loss_mask[row, label]:
                    break
                logits = (draft.lm_head.weight @ hidden[slot])[ids]
                embedding = None
                if config.markov_rank:
                    head = draft.markov_head
                    embedding = head.markov_w1.weight[text[p + slot]]
                    feature = embedding
                    if config.markov_head_type == "gated":
                        feature = embedding * head.gate_proj(torch.cat([hidden[slot], embedding])).sigmoid()
                    elif config.markov_head_type == "rnn":
                        gate, new, out = head.joint_proj(torch.cat([state, embedding, hidden[slot]])).chunk(3)
                        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                        feature = out.tanh()
                    logits = logits + head.markov_w2.weight[ids] @ feature
                target = (draft.lm_head.weight @ batch.last_hidden[row, p + slot]).softmax(-1).detach()
                q = logits.softmax(-1)
                distance = (q - target[ids]).abs().sum() + (1 - target[ids].sum())
                weight = math.exp(-slot / weights.decay)
                if int(text[label]) in where:
                    terms["cross_entropy"].append((weight, -q[where[int(text[label])]].log()))
                terms["total_variation"].append((weight, distance))
                if config.enable_confidence_head:
                    inputs = hidden[slot]
                    if config.confidence_head_with_markov:
                        inputs = torch.cat([inputs, embedding])
                    c = draft.confidence_head.proj(inputs).sigmoid()[0]
                    true = 1 - distance.detach() / 2
                    terms["confidence"].append((weight, -(true * c.log() + (1 - true) * (1 - c).log())))
    means = {
        key: sum(w * v for w, v in pairs) / sum(w for w, _ in pairs) if pairs else torch.zeros(())
        for key, pairs in terms.items()
    }
    means["total"] = sum(getattr(weights, key) * means[key] for key in terms)
    return means


@pytest.mark.parametrize("part", [False, True], ids=["whole_vocabulary", "half_of_it"])
@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_the_loss_and_its_gradients_against_a_loop(make_target, make_draft, shape, part):
    """With half the vocabulary the drafter's softmax is over that half, and the target's other mass is a miss."""
    model = make_target()
    draft = make_draft(model, **shape).requires_grad_(True)
    batch = batch_of(model, draft)
    weights = LossWeights(cross_entropy=0.3, total_variation=0.8, confidence=1.5, decay=2.5)
    ids = torch.arange(0, VOCABULARY, 2) if part else None
    options = {"vocabulary": Vocabulary(ids, VOCABULARY), "log_total": batch.log_total} if part else {}
    loss = dspark_loss(draft, *arguments(batch), weights=weights, **options)
    expected = by_hand(draft, batch, weights, ids)
    for name, value in expected.items():
        assert_close(getattr(loss, name), value)
    ours = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), weights=weights, **options).total)
    theirs = gradients(draft, lambda: by_hand(draft, batch, weights, ids)["total"])
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_close(ours[name], theirs[name], 2e-5)


def test_a_vocabulary_of_all_ids_changes_nothing(make_target, make_draft):
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    every = {"vocabulary": Vocabulary(torch.arange(VOCABULARY), VOCABULARY), "log_total": batch.log_total}
    whole = dspark_loss(draft, *arguments(batch))
    part = dspark_loss(draft, *arguments(batch), **every)
    for key in ("total", "cross_entropy", "total_variation", "confidence", "counted", "labels", "logits"):
        assert_close(getattr(part, key), getattr(whole, key), 2e-6)
    assert_close(part.overlap[part.counted], whole.overlap[part.counted], 2e-6)
    ours = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), **every).total)
    theirs = gradients(draft, lambda: dspark_loss(draft, *arguments(batch)).total)
    for name in theirs:
        assert_close(ours[name], theirs[name], 2e-6)


def test_a_reduced_vocabulary_needs_the_whole_normaliser(make_target, make_draft):
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    with pytest.raises(ValueError, match="log_total is None"):
        dspark_loss(draft, *arguments(batch), vocabulary=Vocabulary(torch.arange(9), VOCABULARY))


def test_vocabulary_positions():
    where, known = Vocabulary(torch.tensor([2, 5, 9]), 12).positions(torch.tensor([[0, 2, 5], [9, 11, 6]]))
    assert known.tolist() == [[False, True, True], [True, False, False]]
    assert where[known].tolist() == [0, 1, 2]


def test_confidence_trains_what_it_reads_but_not_what_it_predicts(make_target, make_draft):
    """Its gradient goes into the backbone and W1, but not through c*: W2 and the LM head only make c*."""
    model = make_target(fresh=True)
    draft = make_draft(model)
    batch = batch_of(model, draft)
    only = LossWeights(cross_entropy=0.0, total_variation=0.0)
    grads = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), weights=only).total)
    for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "markov_head.markov_w1.weight"):
        assert grads[name].abs().max() > 1e-6, name
    assert not grads.get("markov_head.markov_w2.weight", torch.zeros(1)).any()
    assert model.lm_head.weight.grad is None or not model.lm_head.weight.grad.any()
    loss = dspark_loss(draft, *arguments(batch))
    assert not loss.overlap.requires_grad and not loss.logits.requires_grad


def test_slots_that_do_not_count_cannot_spoil_the_loss(make_target, make_draft):
    """Prompt positions have no ``log_total``: large logits there must not turn the figures into NaN."""
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    batch.log_total[~batch.loss_mask] = 0.0
    expected = dspark_loss(draft, *arguments(batch), log_total=batch.log_total)
    batch.last_hidden[:, 0] *= 400.0
    assert F.linear(batch.last_hidden[:, 0], model.lm_head.weight).max() > 100
    loss = dspark_loss(draft, *arguments(batch), log_total=batch.log_total)
    for name in ("total", "cross_entropy", "total_variation", "confidence"):
        assert_close(getattr(loss, name), getattr(expected, name), 1e-6)
    assert ((loss.overlap >= 0) & (loss.overlap <= 1)).all()


def test_a_batch_without_any_valid_anchor_has_no_loss(make_target, make_draft):
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    batch.anchors, batch.valid = torch.zeros_like(batch.anchors), torch.zeros_like(batch.valid)
    loss = dspark_loss(draft, *arguments(batch))
    assert loss.total == 0
    assert math.isnan(loss.expected_acceptance_length())
    assert not any(
        grad.any() for grad in gradients(draft, lambda: dspark_loss(draft, *arguments(batch)).total).values()
    )


def test_expected_acceptance_length_by_hand():
    none = torch.zeros(())
    overlap = torch.tensor([[[0.5, 0.5, 1.0], [1.0, 0.9, 0.0], [0.8, 0.5, 0.25]]])
    counted = torch.tensor([[[True, True, True], [True, True, False], [True, True, True]]])
    loss = Loss(none, none, none, none, overlap, counted, none, none)
    # (0.5 + 0.25 + 0.25 + 0.8 + 0.4 + 0.1) / 2; the middle block is not full
    assert loss.expected_acceptance_length() == pytest.approx(1 + 1.15)


def test_the_loss_is_least_where_the_drafter_is_the_target(make_target, make_draft):
    """A drafter that gives the target's logits has L1 0, c* 1 and the largest acceptance length."""
    model = make_target()
    draft = make_draft(model, markov_rank=0, enable_confidence_head=False)
    batch = batch_of(model, draft)
    hidden = batch.last_hidden[
        torch.arange(2)[:, None, None], (batch.anchors[..., None] + torch.arange(BLOCK)).clamp(max=22)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_fast.training.loss.run_blocks", lambda *_: hidden)
        loss = dspark_loss(draft, *arguments(batch))
    assert_close(loss.total_variation, torch.zeros(()))
    assert_close(loss.overlap[loss.counted], torch.ones(int(loss.counted.sum())))
    assert loss.expected_acceptance_length() == pytest.approx(1 + BLOCK, abs=1e-4)


# --- a warm start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral", "Qwen2", "Gemma"])
@torch.no_grad()
def test_a_drafter_that_begins_as_the_targets_last_layers(make_target, make_draft, family):
    """Where it says that it did, norms and projections are the target's own functions, biases and all."""
    model = make_target(family, fresh=True)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    draft = make_draft(model)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    sample = torch.randint(1, VOCABULARY, (2, 20))
    done = initialise_from_target(draft, model, sample)
    if not done:
        assert family in ("Qwen2", "Gemma")
        assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
        return
    assert not any(module._forward_hooks for module in model.modules())
    decoder = model.get_decoder()
    x = torch.randn(1, 7, 64)
    for ours, theirs in zip(draft.layers, decoder.layers[-2:]):
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            assert_close(getattr(ours, name)(x), getattr(theirs, name)(x), 1e-6)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert_close(getattr(ours.self_attn, name)(x), getattr(theirs.self_attn, name)(x), 1e-6)
    assert_close(draft.norm(x), decoder.norm(x), 1e-6)
    assert_close(draft.hidden_norm(x), decoder.layers[-2].input_layernorm(x), 1e-6)
    identity = torch.cat([torch.zeros(64, draft.fc.in_features - 64), torch.eye(64)], dim=1)
    assert_close(draft.fc.weight, 0.1 * before["fc.weight"] + identity, 1e-6)
    assert not draft.markov_head.markov_w2.weight.any()
    assert torch.equal(draft.markov_head.markov_w1.weight, before["markov_head.markov_w1.weight"])

    entering = decoder(sample, output_hidden_states=True).hidden_states
    for index, theirs in enumerate(decoder.layers[-2:]):
        normed = theirs.input_layernorm(entering[4 + index])
        for name, source in (("q_norm", theirs.self_attn.q_proj), ("k_norm", theirs.self_attn.k_proj)):
            weight = getattr(draft.layers[index].self_attn, name).weight
            if family == "Qwen3":
                assert torch.equal(weight, getattr(theirs.self_attn, name).weight)
            else:
                heads = source(normed).unflatten(-1, (-1, 16))
                assert_close(weight, heads.square().mean(-1).sqrt().mean().expand(16), 1e-4)


@pytest.mark.parametrize(
    "shape", [{"intermediate_size": 80}, {"num_hidden_layers": 7}, {"num_key_value_heads": 4}, {"head_dim": 8}], ids=str
)
@torch.no_grad()
def test_other_shapes_are_left_as_they_were(make_target, make_draft, shape):
    model = make_target()
    draft = make_draft(model, **shape)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    assert initialise_from_target(draft, model, torch.ones(1, 4, dtype=torch.long)) is False
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


def test_fresh_draft(make_target):
    model = make_target(fresh=True).to(torch.bfloat16)
    sample = torch.ones(1, 4, dtype=torch.long)
    shape = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4}
    recipe = Recipe(shape=shape, seed=3)
    warm = fresh_draft(model, recipe, sample)
    assert warm.config.block_size == 3
    assert {value.dtype for value in warm.state_dict().values()} == {torch.float32}
    assert torch.equal(warm.norm.weight, model.model.norm.weight.float())
    assert torch.equal(warm.layers[0].mlp.up_proj.weight, model.model.layers[-1].mlp.up_proj.weight.float())
    cold = [fresh_draft(model, replace(recipe, initialise="random", seed=seed), sample) for seed in (3, 3, 4)]
    assert torch.equal(cold[0].fc.weight, cold[1].fc.weight)
    assert not torch.equal(cold[0].fc.weight, cold[2].fc.weight)
    assert cold[0].markov_head.markov_w2.weight.any()
    with pytest.raises(ValueError, match="initialise is 'zeros'"):
        fresh_draft(model, replace(recipe, initialise="zeros"), sample)


# --- the trainer ------------------------------------------------------------------------------------------------------

SETTINGS = TrainSettings(
    steps=6, learning_rate=3e-3, warm_up=0.34, sequences=2, anchors=6, vocabulary=40, save_every=3, evaluate_every=2
)


@pytest.fixture(scope="module")
def data(make_target, make_draft, tmp_path_factory):
    """Features of 8 responses to train on and 2 held out; the responses use few tokens, so they can be learnt."""
    model = make_target(fresh=True)
    generator = torch.Generator().manual_seed(10)
    responses = []
    for number in range(10):
        length = 30 + number
        ids = torch.randint(1, 12, (length,), generator=generator).repeat_interleave(2)[:length]
        responses.append(Response(f"r{number}", "chat", ids.tolist(), 6, True, number >= 8))
    folder = tmp_path_factory.mktemp("features")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "SHARD", 4)
        patch.setattr(features, "HELD_OUT_SHARD", 2)
        shards = write_features(model, responses, folder, make_draft(model).config.target_layer_ids)
    assert len(shards) == 3
    return SimpleNamespace(model=model, responses=responses, train=shards[:2], held_out=shards[2:])


@pytest.fixture
def trainer_of(data, make_draft):
    def make(folder, settings=SETTINGS, *, draft=None, on_step=lambda metrics: None, **shape):
        draft = draft or make_draft(data.model, **shape)
        stores = (FeatureStore(data.train, settings.sequences), FeatureStore(data.held_out, settings.sequences))
        return Trainer(draft, *stores, folder, settings, on_step)

    return make


def weights_of(draft):
    return {name: value.detach().clone() for name, value in draft.state_dict().items()}


def metrics_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "blocks_per_second"} for row in rows]


class Stop(BaseException):
    """As a Ctrl-C or a kill: no handler for errors may catch it."""


def stop_at(step):
    def on_step(metrics):
        if metrics["step"] == step:
            raise Stop

    return on_step


@pytest.fixture(scope="module")
def whole(data, make_draft, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    draft = make_draft(data.model)
    lengths = []
    one = Trainer(draft, FeatureStore(data.train, 2), FeatureStore(data.held_out, 2), folder, SETTINGS)
    one.on_step = lambda metrics: lengths.append((metrics["learning_rate"], one.optimizer.param_groups[0]["lr"]))
    one.run()
    return SimpleNamespace(folder=folder, draft=draft, weights=weights_of(draft), rates=lengths, trainer=one)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5], ids="after_{}".format)
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(whole, trainer_of, tmp_path, stop):
    """Killed after the line of a step was written and before its checkpoint; the next begins with other weights."""
    with pytest.raises(Stop):
        trainer_of(tmp_path, on_step=stop_at(stop)).run()
    checkpoint = tmp_path / "checkpoint.safetensors"
    assert checkpoint.is_file() == (stop > 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')  # the kill also tore a line
    second = trainer_of(tmp_path)
    if stop > 3:
        with torch.no_grad():
            for parameter in second.draft.parameters():
                parameter.normal_()
    second.run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)
    for name, value in weights_of(second.draft).items():
        assert torch.equal(value, whole.weights[name]), name


def test_a_finished_run_is_left_as_it_is(whole, trainer_of, tmp_path):
    first = trainer_of(tmp_path)
    first.run()
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    again = trainer_of(tmp_path, on_step=stop_at(1))
    again.run()
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines
    for name, value in weights_of(again.draft).items():
        assert torch.equal(value, whole.weights[name]), name


def test_a_failed_checkpoint_leaves_the_one_before(whole, trainer_of, tmp_path, monkeypatch):
    real = trainer.save_file

    def fail(tensors, path, metadata=None):
        if metadata["step"] == "6":
            path.write_bytes(b"half of it")
            raise OSError("disk full")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(trainer, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer_of(tmp_path).run()
    monkeypatch.setattr(trainer, "save_file", real)
    second = trainer_of(tmp_path)
    second.resume()
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
def test_a_checkpoint_of_other_settings_is_refused_by_name(whole, trainer_of, change, message):
    before = (whole.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        trainer_of(whole.folder, replace(SETTINGS, **change)).run()
    assert (whole.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("shape", [{"markov_rank": 4}, {"num_hidden_layers": 1}, {"block_size": 4}], ids=str)
def test_a_checkpoint_of_another_drafter_is_refused(whole, trainer_of, shape):
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        trainer_of(whole.folder, **shape).run()


def test_how_often_to_save_may_change(whole, trainer_of, tmp_path):
    with pytest.raises(Stop):
        trainer_of(tmp_path, on_step=stop_at(4)).run()
    trainer_of(tmp_path, replace(SETTINGS, save_every=1)).run()
    assert metrics_of(tmp_path) == metrics_of(whole.folder)


def test_only_json_and_safetensors_are_written(trainer_of, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("pickle")

    for name in ("torch.save", "torch.load", "pickle.dump", "pickle.dumps", "pickle.load", "pickle.loads"):
        monkeypatch.setattr(name, never)
    trainer_of(tmp_path).run()
    trainer_of(tmp_path).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.safetensors", "metrics.jsonl"]
    saved = load_file(tmp_path / "checkpoint.safetensors")
    assert {key.split(".")[0] for key in saved} == {"weight", "mean", "square"}
    assert not any("embed_tokens" in key or "lm_head" in key for key in saved)


def test_the_target_is_neither_trained_nor_given_gradients(whole, data, make_target):
    fresh = make_target(fresh=True).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in data.model.state_dict().items())
    assert all(parameter.grad is None for parameter in data.model.parameters())
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in whole.trainer.parameters)


def test_every_weight_of_the_drafter_is_trained(whole, data, make_draft):
    start = weights_of(make_draft(data.model))
    assert all(not torch.equal(value, start[name]) for name, value in whole.weights.items())


def test_heads_only(trainer_of, tmp_path, data, make_draft):
    one = trainer_of(tmp_path, replace(SETTINGS, heads_only=True))
    start = weights_of(one.draft)
    one.run()
    for name, value in weights_of(one.draft).items():
        head = name.startswith(("markov_head.", "confidence_head."))
        assert torch.equal(value, start[name]) != head, name
    with pytest.raises(ValueError, match="heads_only"):
        trainer_of(tmp_path, SETTINGS, draft=make_draft(data.model)).run()
    bare = make_draft(data.model, markov_rank=0, enable_confidence_head=False)
    with pytest.raises(ValueError, match="neither a Markov nor a confidence head"):
        trainer_of(tmp_path / "bare", replace(SETTINGS, heads_only=True), draft=bare)


def test_learning_rate(whole, trainer_of, tmp_path):
    assert all(told == used for told, used in whole.rates)
    one = trainer_of(tmp_path, replace(SETTINGS, steps=50, warm_up=0.1, learning_rate=2e-3))
    rates = [one._learning_rate(step) for step in range(1, 51)]
    assert rates[:5] == pytest.approx([0.4e-3, 0.8e-3, 1.2e-3, 1.6e-3, 2e-3])  # the first step is not lost at 0
    assert rates[4 + 15] == pytest.approx(1e-3 * (1 + math.cos(math.pi / 3)))
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    short = trainer_of(tmp_path, replace(SETTINGS, steps=1))
    assert short._learning_rate(1) == SETTINGS.learning_rate


def test_the_loss_falls(trainer_of, tmp_path, data):
    settings = replace(SETTINGS, steps=40, anchors=12, vocabulary=0, evaluate_every=40)
    one = trainer_of(tmp_path, settings, initializer_range=0.02)
    one.run()
    rows = metrics_of(tmp_path)
    first, last = ([sum(row[key] for row in part) / 5 for key in ("loss", "tau")] for part in (rows[:5], rows[-5:]))
    assert last[0] < 0.85 * first[0]
    assert last[1] > first[1] + 0.05
    assert all(row["gradient_norm"] > 0 and len(row["accept"]) == BLOCK for row in rows)


def test_every_sequence_is_seen_once_per_epoch_in_a_new_order(trainer_of, tmp_path):
    one = trainer_of(tmp_path)
    assert len(one.train_store) == 4
    epochs = [[one._batch(4 * epoch + i).input_ids for i in range(4)] for epoch in range(3)]
    orders = []
    for batches in epochs:
        order = [next(i for i in range(4) if torch.equal(one.train_store[i].input_ids, ids)) for ids in batches]
        assert sorted(order) == [0, 1, 2, 3]
        orders.append(tuple(order))
    assert len(set(orders)) > 1


def test_every_step_has_anchors_of_its_own(trainer_of, tmp_path, monkeypatch):
    seeds = []

    def watched(mask, count, generator):
        seeds.append(generator.initial_seed())
        return sample_anchors(mask, count, generator)

    monkeypatch.setattr(trainer, "sample_anchors", watched)
    trainer_of(tmp_path, replace(SETTINGS, evaluate_every=100)).run()
    trainer_of(tmp_path / "other", replace(SETTINGS, evaluate_every=100, seed=43)).run()
    assert len(set(seeds)) == len(seeds) == 12


def test_held_out_text_is_looked_at(whole, data, trainer_of, tmp_path):
    rows = metrics_of(whole.folder)
    assert [row["step"] for row in rows if "held_out" in row] == [2, 4, 6]
    assert rows[-1]["held_out"] == json.loads(json.dumps(whole.trainer.evaluate()))
    # The two held-out responses are one batch, with the anchors of seed 0.
    batch = FeatureStore(data.held_out, 2)[0]
    anchors, valid = sample_anchors(batch.loss_mask, SETTINGS.anchors, torch.Generator().manual_seed(0))
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
    alone = Trainer(trainer_of(tmp_path).draft, FeatureStore(data.train, 2), FeatureStore([]), tmp_path, SETTINGS)
    alone.run()
    assert not any("held_out" in row for row in metrics_of(tmp_path))


def test_the_reduced_vocabulary_is_the_most_frequent_tokens(whole, data, trainer_of, tmp_path):
    counts = torch.zeros(VOCABULARY, dtype=torch.long)
    for response in data.responses[:8]:
        for token in response.input_ids[response.start :]:
            counts[token] += 1
    ids = whole.trainer.vocabulary.ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == 40
    assert {token for token in range(VOCABULARY) if counts[token]} <= set(ids)
    for size in (0, VOCABULARY, VOCABULARY + 5):
        assert trainer_of(tmp_path, replace(SETTINGS, vocabulary=size)).vocabulary is None


def test_nothing_to_train_on(data, make_draft, tmp_path):
    with pytest.raises(ValueError, match="no features to train on"):
        Trainer(make_draft(data.model), FeatureStore([]), FeatureStore([]), tmp_path, SETTINGS)


@torch.no_grad()
def test_the_trained_drafter_is_the_one_on_disk(data, tmp_path, make_draft):
    """What is measured after training must be what a user loads, to the last bit, rotary frequencies included."""
    recipe = Recipe(train=replace(SETTINGS, steps=2))
    draft = make_draft(data.model)
    with torch.enable_grad():
        trained = train_draft(data.model, draft, FeatureStore(data.train, 2), FeatureStore([]), tmp_path, recipe)
    loaded = DSparkDraft.from_pretrained(tmp_path / "draft", target=data.model)
    assert load_file(tmp_path / "draft" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert trained.dtype == loaded.dtype == data.model.dtype
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
    assert not any(parameter.requires_grad for parameter in trained.parameters())
    taps = torch.randn(1, 200, trained.fc.in_features)
    anchor, position = torch.tensor([[199]]), torch.ones(1, 1, dtype=torch.bool)
    ids = torch.randint(1, VOCABULARY, (1, 200))
    assert torch.equal(
        run_blocks(trained, ids, taps, anchor, position), run_blocks(loaded, ids, taps, anchor, position)
    )


# --- what it reports --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
@torch.no_grad()
def measured(data, make_draft):
    """A drafter that knows which token mostly follows which, and held-out responses of two domains."""
    model = data.model
    draft = make_draft(model, markov_rank=VOCABULARY, enable_confidence_head=False)
    held_out = [
        Response(f"{domain}-{n}", domain, torch.randint(1, VOCABULARY, (9 + n,)).tolist(), 4 + n, True, True)
        for domain, count in (("math", 3), ("chat", 2))
        for n in range(count)
    ]
    greedy = []
    follows = torch.zeros(VOCABULARY, VOCABULARY)
    for one in held_out:
        ids = torch.tensor([one.input_ids[: one.start]])
        mask = torch.ones_like(ids)
        row = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)[0]
        for a, b in list(pairwise(row))[one.start :][::2]:  # half of it, so that it is wrong at times
            follows[b, a] += 1
        greedy.append(row)
    draft.markov_head.markov_w1.weight.copy_(torch.eye(VOCABULARY))
    draft.markov_head.markov_w2.weight.copy_(1000 * follows)
    return SimpleNamespace(model=model, draft=draft, held_out=held_out, greedy=greedy)


@torch.no_grad()
def counted_by_hand(measured, one, row, new):
    """Rounds of greedy speculation replayed on the plain greedy text: how much each commits."""
    draft = measured.draft
    with tapped(measured.model, draft.config.target_layer_ids) as taps:
        measured.model.get_decoder()(input_ids=row[None], use_cache=False)
        seen = taps.take()
    lengths, at = [], one.start
    while at - one.start + 1 < new:
        drafts = draft_block(draft, seen[:, :at], row[at][None]).tokens[0].tolist()
        right = 0
        while right < BLOCK and drafts[right] == row[at + 1 + right]:
            right += 1
        lengths.append(right + 1)
        at += right + 1
    return lengths


def test_acceptance_is_pooled_over_rounds(measured):
    new = 24
    lengths = {"math": [], "chat": []}
    for one, row in zip(measured.held_out, measured.greedy):
        if one.id != "math-2":  # beyond per_domain
            lengths[one.domain] += counted_by_hand(measured, one, row, new)
    told = []
    results = measure_acceptance(
        measured.model,
        measured.draft,
        iter(measured.held_out),
        per_domain=2,
        max_new_tokens=new,
        on_progress=told.append,
    )
    assert told == [1, 2, 3, 4]
    assert [(r.domain, r.prompts) for r in results] == [("chat", 2), ("math", 2), ("all", 4)]
    for result in results:
        pooled = lengths["chat"] + lengths["math"] if result.domain == "all" else lengths[result.domain]
        assert len(set(pooled)) > 2  # the drafter is right at times, and wrong at times
        assert result.tau == pytest.approx(sum(pooled) / len(pooled))
        for slot, share in enumerate(result.by_position):
            reached = sum(length > slot for length in pooled)
            right = sum(length > slot + 1 for length in pooled)
            assert share == pytest.approx(right / reached, abs=6e-4) if reached else math.isnan(share)


def test_acceptance_by_sampling_and_of_nothing(measured):
    sampled = [
        measure_acceptance(
            measured.model, measured.draft, measured.held_out, per_domain=1, max_new_tokens=8, temperature=0.8
        )
        for _ in range(2)
    ]
    assert [asdict(one)["tau"] for one in sampled[0]] == [asdict(one)["tau"] for one in sampled[1]]
    (nothing,) = measure_acceptance(measured.model, measured.draft, [])
    assert nothing.domain == "all" and nothing.prompts == 0 and math.isnan(nothing.tau)


def test_plot(whole, tmp_path):
    pytest.importorskip("matplotlib")
    rows = (whole.folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    first["tau"] = float("nan")  # a batch without full blocks
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(first), *rows[1:]]) + "\n")
    plot_training(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_card(whole, tmp_path):
    acceptance = [
        Acceptance("chat", 3, 2.345, [0.61, 0.52, 0.43, 0.34, 0.25]),
        Acceptance("all", 11, 3.21, [0.71, 0.72, 0.73, 0.74, float("nan")]),
    ]
    recipe = Recipe(tokens=123_456, seed=77, train=SETTINGS)
    write_card(
        tmp_path,
        target="someone/some-model",
        config=whole.draft.config,
        recipe=recipe,
        command="dspark-fast train --model 'some model'",
        metrics=whole.folder / "metrics.jsonl",
        acceptance=acceptance,
    )
    card = (tmp_path / "README.md").read_text()
    for part in (
        "# DSpark drafter for someone/some-model\n",
        "dspark-fast train --model 'some model'\n",
        "123,456 tokens",
        "seed 77)",
        "\n6 steps of 2 sequences x 6 anchor blocks",
        "peak learning rate\n0.003, warm-up 34%",
        "| chat | 3 | 2.35 | 0.61 | 0.52 | 0.43 | 0.34 | 0.25 |",
        "| all | 11 | 3.21 | 0.71 | 0.72 | 0.73 | 0.74 | nan |",
        "| vanilla, rank 8 |",
        "over the 40 most frequent tokens",
    ):
        assert part in card, part
    rows = [line for line in card.splitlines() if line.startswith(("| prompts", "|---|---|---|", "| chat", "| all"))]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1


def test_a_checkpoint_belongs_to_its_shards(trainer_of, tmp_path, data, make_draft):
    trainer_of(tmp_path, replace(SETTINGS, steps=3, save_every=3)).run()
    fewer = FeatureStore(data.train[:-1], SETTINGS.sequences)
    other = Trainer(make_draft(data.model), fewer, FeatureStore([]), tmp_path, replace(SETTINGS, steps=3, save_every=3))
    with pytest.raises(ValueError, match="shards was"):
        other.resume()


def test_trained_heads_belong_to_their_frozen_layers(trainer_of, tmp_path, data, make_draft):
    heads = replace(SETTINGS, steps=3, save_every=3, heads_only=True)
    trainer_of(tmp_path, heads).run()
    stranger = make_draft(data.model)
    with torch.no_grad():
        stranger.fc.weight[0, 0] += 1
    with pytest.raises(ValueError, match="frozen was"):
        trainer_of(tmp_path, heads, draft=stranger).resume()
    trainer_of(tmp_path, heads).resume()
