"""The loss of training: against a loop, over a reduced vocabulary, from the target's largest probabilities alone."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dspark_fast.reference import draft_block
from dspark_fast.training import Loss, LossWeights, Vocabulary, dspark_loss
from dspark_fast.training.loss import make_labels

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
PARTS = ("total", "cross_entropy", "total_variation", "confidence")


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def arguments(batch):
    return (batch.input_ids, batch.features, batch.last_hidden, batch.loss_mask, batch.anchors, batch.valid)


def freeze(draft):
    """The target's own: the fused loss computes no gradient for its head."""
    for module in (draft.embed_tokens, draft.lm_head):
        module.requires_grad_(False)
    return draft


def gradients(draft, loss):
    draft.requires_grad_(True)
    freeze(draft)
    draft.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}


def by_hand(draft, batch, weights, ids=None, top=None):
    """The objective block by block: each drafted alone by the reference, each term summed in a loop.

    ids: of a reduced vocabulary; top: know the target's so many largest probabilities alone.
    """
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
                if top is None:
                    distance = (q - target[ids]).abs().sum() + (1 - target[ids].sum())
                else:
                    distance, rest_q, rest_p = 0.0, 1.0, 1.0
                    for token in target.argsort(descending=True)[:top].tolist():
                        here = q[where[token]] if token in where else torch.zeros(())
                        distance = distance + (here - target[token]).abs()
                        rest_q, rest_p = rest_q - here, rest_p - target[token]
                    distance = distance + (rest_q - rest_p).abs()
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
def test_the_loss_and_its_gradients_against_a_loop(make_target, make_draft, batch_of, shape, part):
    """With half the vocabulary the drafter's softmax is over that half, and the target's other mass is a miss."""
    model = make_target()
    draft = freeze(make_draft(model, **shape))
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


def test_a_vocabulary_of_all_ids_changes_nothing(make_target, make_draft, batch_of):
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    every = {"vocabulary": Vocabulary(torch.arange(VOCABULARY), VOCABULARY), "log_total": batch.log_total}
    whole = dspark_loss(draft, *arguments(batch))
    part = dspark_loss(draft, *arguments(batch), **every)
    for key in (*PARTS, "counted", "labels", "predicted", "overlap"):
        assert_close(getattr(part, key), getattr(whole, key), 2e-6)
    ours = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), **every).total)
    theirs = gradients(draft, lambda: dspark_loss(draft, *arguments(batch)).total)
    for name in theirs:
        assert_close(ours[name], theirs[name], 2e-6)


def test_a_reduced_vocabulary_needs_the_whole_normaliser(make_target, make_draft, batch_of):
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    with pytest.raises(ValueError, match="log_total is None"):
        dspark_loss(draft, *arguments(batch), vocabulary=Vocabulary(torch.arange(9), VOCABULARY))


def test_vocabulary_positions():
    where = Vocabulary(torch.tensor([2, 5, 9]), 12).positions(torch.tensor([[0, 2, 5], [9, 11, 6]]))
    assert where.tolist() == [[-1, 0, 1], [2, -1, -1]]


def test_confidence_trains_what_it_reads_but_not_what_it_predicts(make_target, make_draft, batch_of):
    """Its gradient goes into the backbone and W1, but not through c*: W2 and the LM head only make c*."""
    model = make_target(fresh=True)
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    only = LossWeights(cross_entropy=0.0, total_variation=0.0)
    grads = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), weights=only).total)
    for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "markov_head.markov_w1.weight"):
        assert grads[name].abs().max() > 1e-6, name
    assert not grads.get("markov_head.markov_w2.weight", torch.zeros(1)).any()
    assert model.lm_head.weight.grad is None or not model.lm_head.weight.grad.any()
    loss = dspark_loss(draft, *arguments(batch))
    assert not any(getattr(loss, name).requires_grad for name in (*PARTS[1:], "overlap", "predicted"))


def test_slots_that_do_not_count_cannot_spoil_the_loss(make_target, make_draft, batch_of):
    """Prompt positions have no ``log_total``: large logits there must not turn the figures into NaN."""
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    batch.log_total[~batch.loss_mask] = 0.0
    expected = dspark_loss(draft, *arguments(batch), log_total=batch.log_total)
    batch.last_hidden[:, 0] *= 400.0
    assert F.linear(batch.last_hidden[:, 0], model.lm_head.weight).max() > 100
    loss = dspark_loss(draft, *arguments(batch), log_total=batch.log_total)
    for name in PARTS:
        assert_close(getattr(loss, name), getattr(expected, name), 1e-6)
    assert ((loss.overlap >= 0) & (loss.overlap <= 1)).all()


def test_a_batch_without_any_valid_anchor_has_no_loss(make_target, make_draft, batch_of):
    model = make_target()
    draft = freeze(make_draft(model))
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
    loss = Loss(none, none, none, none, overlap, None, counted, none)
    # (0.5 + 0.25 + 0.25 + 0.8 + 0.4 + 0.1) / 2; the middle block is not full
    assert loss.expected_acceptance_length() == pytest.approx(1 + 1.15)


def test_the_loss_is_least_where_the_drafter_is_the_target(make_target, make_draft, batch_of):
    """A drafter that gives the target's logits has L1 0, c* 1 and the largest acceptance length."""
    model = make_target()
    draft = freeze(make_draft(model, markov_rank=0, enable_confidence_head=False))
    batch = batch_of(model, draft)
    hidden = batch.last_hidden[
        torch.arange(2)[:, None, None], (batch.anchors[..., None] + torch.arange(BLOCK)).clamp(max=22)
    ]
    loss = dspark_loss(draft, *arguments(batch), run=lambda *_: hidden)
    assert_close(loss.total_variation, torch.zeros(()))
    assert_close(loss.overlap[loss.counted], torch.ones(int(loss.counted.sum())))
    assert loss.expected_acceptance_length() == pytest.approx(1 + BLOCK, abs=1e-4)


# --- of the target its largest probabilities alone --------------------------------------------------------------------


def with_top(batch, model, k):
    """What the features of a batch hold of the target's distribution."""
    top = F.linear(batch.last_hidden, model.lm_head.weight).softmax(-1).topk(k)
    return {"top_tokens": top.indices, "top_probs": top.values}


@pytest.mark.parametrize("part", [False, True], ids=["whole_vocabulary", "half_of_it"])
@pytest.mark.parametrize("k", [1, 7])
def test_top_tokens_against_a_loop(make_target, make_draft, batch_of, k, part):
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    weights = LossWeights(cross_entropy=0.3, total_variation=0.8, confidence=1.5, decay=2.5)
    ids = torch.arange(0, VOCABULARY, 2) if part else None
    vocabulary = Vocabulary(ids, VOCABULARY) if part else None
    options = {"weights": weights, "vocabulary": vocabulary}
    loss = dspark_loss(draft, *arguments(batch), **options, **with_top(batch, model, k))
    for name, value in by_hand(draft, batch, weights, ids, top=k).items():
        assert_close(getattr(loss, name), value)
    ours = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), **options, **with_top(batch, model, k)).total)
    theirs = gradients(draft, lambda: by_hand(draft, batch, weights, ids, top=k)["total"])
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert_close(ours[name], theirs[name], 2e-5)

    exact = dspark_loss(draft, *arguments(batch), **options, log_total=batch.log_total)
    assert_close(loss.cross_entropy, exact.cross_entropy)
    bound = loss.overlap - exact.overlap  # a distance that is too short is an overlap that is too large
    assert bound.min() > -1e-6
    assert bound[loss.counted].max() > 0.02


@pytest.mark.parametrize("part", [False, True], ids=["whole_vocabulary", "half_of_it"])
def test_all_tokens_are_the_whole_distribution(make_target, make_draft, batch_of, part):
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    options = {"vocabulary": Vocabulary(torch.arange(0, VOCABULARY, 2), VOCABULARY)} if part else {}
    # the target's state is not looked at: rubbish in its place changes nothing
    listed = [one if index != 2 else torch.full_like(one, torch.nan) for index, one in enumerate(arguments(batch))]
    every = with_top(batch, model, VOCABULARY)
    ours = dspark_loss(draft, *listed, **options, **every)
    theirs = dspark_loss(draft, *arguments(batch), **options, log_total=batch.log_total)
    for name in (*PARTS, "overlap", "predicted"):
        assert_close(getattr(ours, name), getattr(theirs, name), 2e-6)
    ours = gradients(draft, lambda: dspark_loss(draft, *listed, **options, **every).total)
    theirs = gradients(draft, lambda: dspark_loss(draft, *arguments(batch), **options, log_total=batch.log_total).total)
    for name in theirs:
        assert_close(ours[name], theirs[name], 5e-6)


# --- several batches in a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [False, True], ids=["whole_vocabulary", "half_of_it"])
def test_batches_over_common_totals_add_up_to_one_batch(make_target, make_draft, batch_of, part):
    """The rows have 16 and 13 counted slots: means of means would be something else."""
    model = make_target()
    draft = freeze(make_draft(model))
    batch = batch_of(model, draft)
    vocabulary = Vocabulary(torch.arange(0, VOCABULARY, 2), VOCABULARY) if part else None
    decay = LossWeights().decay

    def loss_of(rows, totals=None):
        inputs = [one[rows] for one in arguments(batch)]
        options = {"vocabulary": vocabulary, "log_total": batch.log_total[rows], "totals": totals}
        return dspark_loss(draft, *inputs, **options), make_labels(inputs[0], *inputs[3:], BLOCK, decay, vocabulary)

    whole, labels = loss_of(slice(None))
    totals = sum(loss_of(slice(row, row + 1))[1].totals() for row in range(2))
    assert_close(totals, labels.totals(), 1e-6)
    halves = [loss_of(slice(row, row + 1), totals)[0] for row in range(2)]
    alone = [loss_of(slice(row, row + 1))[0] for row in range(2)]
    for name in PARTS:
        assert_close(sum(getattr(half, name) for half in halves), getattr(whole, name), 2e-6)
        assert abs(sum(getattr(one, name) for one in alone) / 2 - getattr(whole, name)) > 1e-3
    ours = gradients(draft, lambda: sum(loss_of(slice(row, row + 1), totals)[0].total for row in range(2)))
    theirs = gradients(draft, lambda: loss_of(slice(None))[0].total)
    for name in theirs:
        assert_close(ours[name], theirs[name], 5e-6)
