"""The doctor's parts: the packed pass and its changes, the tests it decides by, formats, loading."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dspark_fast import DSparkDraft
from dspark_fast.doctor.examine import Format, examine, examine_texts
from dspark_fast.doctor.faults import FAULTS
from dspark_fast.doctor.hypotheses import hypotheses
from dspark_fast.doctor.loading import PairRefused, join, memory_of
from dspark_fast.doctor.measure import Outcome, change, measure, standard_score, upper_tail
from dspark_fast.doctor.texts import conversations, knows_thinking, read_texts, write_texts
from dspark_fast.doctor.wiring import Wiring, hidden_states, layers_needed, logits, rewired, stored_orders
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.reference import draft_block, markov_walk
from dspark_fast.training.blocks import run_blocks


@pytest.fixture(scope="module")
def loaded(pair):
    return join(pair.model, pair.tokenizer, pair.folder)


@pytest.fixture(scope="module")
def readings(pair, loaded):
    taps = loaded.draft.config.target_layer_ids
    return read_texts(pair.model, pair.texts[:11], layers_needed(taps, 4), loaded.draft.config.block_size)


# --- the packed pass --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_pass_is_that_of_training(pair, loaded, readings):
    for reading in readings:
        features = torch.cat([reading.layers[tap] for tap in loaded.draft.config.target_layer_ids], dim=-1)
        valid = reading.counted[..., 0]
        expected = run_blocks(loaded.draft, reading.input_ids, features, reading.anchors, valid)
        found = hidden_states(pair.model, loaded.draft, reading, Wiring())
        assert torch.equal(found[valid], expected[valid])


@torch.no_grad()
def test_agreement_is_that_of_blocks_drafted_one_by_one(pair, loaded, readings):
    """Slot 1 of a block is what generation would draft there; the others are teacher-forced."""
    outcome = measure(pair.model, loaded.draft, readings)
    row = 0
    for reading in readings:
        features = torch.cat([reading.layers[tap] for tap in loaded.draft.config.target_layer_ids], dim=-1)
        for index, block in reading.counted[..., 0].nonzero().tolist():
            at = int(reading.anchors[index, block])
            ids = reading.input_ids[index]
            alone = draft_block(loaded.draft, features[index : index + 1, :at], ids[at : at + 1])
            assert outcome.positions[row] == at
            for slot in range(4):
                if not reading.counted[index, block, slot]:
                    assert not outcome.counted[row, slot]
                    continue
                walk = markov_walk(
                    alone.base_logits[:, slot : slot + 1],
                    *loaded.draft.markov_weights(),
                    ids[at + slot : at + slot + 1],
                    temperature=0,
                    seed=0,
                    position=0,
                )
                assert bool(outcome.right[row, slot]) == bool(walk.tokens[0, 0] == ids[at + slot + 1])
            row += 1
    assert row == len(outcome.right) > 20


def test_no_token_is_drafted_twice(readings):
    for reading in readings:
        for row, anchors in enumerate(reading.anchors.tolist()):
            drafted = [at + 1 + k for at, there in zip(anchors, reading.counted[row]) for k in range(4) if there[k]]
            assert len(drafted) == len(set(drafted)) and drafted == sorted(drafted)


@torch.no_grad()
def test_a_part_of_the_vocabulary_gives_the_same_logits(pair, loaded, readings):
    reading, columns = readings[0], torch.tensor([1, 5, 30])
    hidden = hidden_states(pair.model, loaded.draft, reading, Wiring())
    whole = logits(loaded.draft, hidden, reading.previous, Wiring(), None)
    part = logits(loaded.draft, hidden, reading.previous, Wiring(), columns)
    torch.testing.assert_close(part, whole[..., columns])


@torch.no_grad()
def test_a_restricted_drafter(pair, loaded, readings):
    """What it cannot draft it never gets right; a vocabulary of everything changes nothing."""
    from dspark_fast.vocabulary import restricted

    base = measure(pair.model, loaded.draft, readings)
    every = measure(pair.model, restricted(loaded.draft, torch.arange(37)), readings)
    assert torch.equal(every.right, base.right)
    even = restricted(loaded.draft, torch.arange(0, 32, 2))
    few = measure(pair.model, even, readings)
    labels = torch.cat([reading.labels[reading.counted[..., 0]] for reading in readings])
    assert not few.right[labels % 2 == 1].any() and few.overlap[labels % 2 == 1].sum() == 0
    assert (few.right | ~base.right)[labels % 2 == 0].all()
    again = measure(pair.model, even, readings, columns=few.said)
    assert torch.equal(again.right, few.right)


@torch.no_grad()
def test_every_change_changes_something(pair, loaded, readings):
    base = measure(pair.model, loaded.draft, readings).overlap
    for one in hypotheses(pair.model, loaded.draft, pair.tokenizer):
        assert not torch.equal(measure(pair.model, loaded.draft, readings, one.wiring).overlap, base), one.change


@torch.no_grad()
def test_a_change_of_the_base_is_that_of_the_configuration(pair, loaded, readings, tmp_path):
    other = FAULTS["RoPE base 100 times too small"].plant(pair.model, pair.tokenizer, pair.folder, tmp_path / "x").draft
    theta = other.config.rope_parameters["rope_theta"]
    before = loaded.draft.rotary_emb.inv_freq.clone()
    found = measure(pair.model, loaded.draft, readings, Wiring(theta=theta))
    torch.testing.assert_close(found.overlap, measure(pair.model, other, readings).overlap)
    assert torch.equal(loaded.draft.rotary_emb.inv_freq, before)
    assert rewired(pair.model, loaded.draft, Wiring(mask=3)) is loaded.draft


@pytest.mark.parametrize(("head", "orders"), [("vanilla", 2), ("gated", 3), ("rnn", 12)])
def test_orders_of_the_markov_head(make_target, make_draft, head, orders):
    draft = make_draft(make_target(), markov_head_type=head)
    found = stored_orders(draft)
    assert len(found) == len(set(found)) == orders
    assert not stored_orders(make_draft(make_target(), markov_rank=0, confidence_head_with_markov=False))


@pytest.mark.parametrize("head", ["gated", "rnn"])
@torch.no_grad()
def test_a_stored_order_is_put_right(make_target, make_draft, head):
    """A weight stored in another order gives the logits of the right one if that is said, and others if it is not."""
    model = make_target()
    draft = make_draft(model, markov_head_type=head)
    hidden, previous = torch.randn(3, 5, 64), torch.randint(1, 97, (3, 5))
    expected = logits(draft, hidden, previous, Wiring(), None)
    extra = draft.markov_head.gate_proj if head == "gated" else draft.markov_head.joint_proj
    weight, bias = extra.weight.clone(), extra.bias.clone()
    parts = {"gated": [64, 8], "rnn": [8, 8, 64]}[head]
    names = {"gated": ["hidden", "embedding"], "rnn": ["state", "embedding", "hidden"]}[head]
    for kind, *order in stored_orders(draft)[:-2]:
        pieces = dict(zip(names, weight.split(parts, dim=1)))
        if kind == "rows":
            rows = ["gate", "candidate", "output"]
            pieces, biases = dict(zip(rows, weight.chunk(3))), dict(zip(rows, bias.chunk(3)))
            extra.bias.copy_(torch.cat([biases[name] for name in order]))
        extra.weight.copy_(torch.cat([pieces[name] for name in order], dim=0 if kind == "rows" else 1))
        torch.testing.assert_close(logits(draft, hidden, previous, Wiring(markov=(kind, *order)), None), expected)
        assert not torch.allclose(logits(draft, hidden, previous, Wiring(), None), expected, atol=1e-3)
        extra.weight.copy_(weight), extra.bias.copy_(bias)


# --- what decides -----------------------------------------------------------------------------------------------------


def outcome_of(overlap, prompts=None):
    """One slot per block."""
    overlap = torch.as_tensor(overlap, dtype=torch.float32)[:, None]
    counted = torch.ones_like(overlap, dtype=torch.bool)
    places = torch.arange(len(overlap))
    return Outcome(overlap > 0.5, counted, overlap, places, places if prompts is None else prompts, places)


def test_the_paired_test():
    a = torch.rand(400, generator=torch.Generator().manual_seed(1))
    assert change(outcome_of(a), outcome_of(a)).p_value == 0.5
    better = (a + 0.1).clamp(max=1)
    found = change(outcome_of(a), outcome_of(better))
    assert found.p_value < 1e-10 and found.gain == pytest.approx((better - a).mean().item(), abs=1e-6)
    assert change(outcome_of(better), outcome_of(a)).p_value > 1 - 1e-10
    assert standard_score(torch.tensor([1.0])) == 0
    assert standard_score(torch.tensor([1.0, 3.0])) == pytest.approx(2.0)
    assert upper_tail(1.959964) == pytest.approx(0.025, rel=1e-4)


def test_false_alarms_keep_their_level():
    """Differences without a mean are called a gain at 1 % as often as they should: 30 of 3,000, within 4 sigma."""
    noise = torch.randn(3000, 200, generator=torch.Generator().manual_seed(2)) ** 3
    alarms = sum(upper_tail(standard_score(row)) < 0.01 for row in noise)
    assert abs(alarms - 30) < 4 * math.sqrt(30)


def test_thirds_of_the_context(pair, loaded):
    found = examine_texts(pair.model, loaded.draft, None, pair.texts[:20])
    thirds = found.thirds()
    assert sum(len(part.right) for _, _, part in thirds) == len(found.outcome.right)
    assert all(a[1] <= b[0] for a, b in pairwise(thirds))
    json.dumps(found.to_dict(), allow_nan=False)


def test_an_untrained_drafter_is_told_from_a_wrong_target(pair, make_draft):
    found = examine_texts(pair.model, make_draft(pair.model), pair.tokenizer, pair.texts)
    assert found.fault == "target"
    assert "untrained: all its norms are 1" in found.verdict[0] and "rules out: an anchor" in found.verdict[1]


def test_too_little_text(pair, loaded):
    with pytest.raises(ValueError, match="fewer than 20 blocks"):
        examine_texts(pair.model, loaded.draft, pair.tokenizer, pair.texts[:2])


# --- formats ----------------------------------------------------------------------------------------------------------


def test_answers_are_greedy_and_stop(pair):
    model, tokenizer = pair.model, pair.tokenizer
    prompts = [Format().ids(tokenizer, one) for one in conversations(1, [pair.prompts])[:3]]
    alone = [model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist() for ids in prompts]
    assert [text.input_ids for text in write_texts(model, prompts, 8)] == alone
    stop = alone[0][len(prompts[0]) + 3]
    model.generation_config.eos_token_id = stop
    try:
        found = next(text for text in write_texts(model, prompts, 8) if text.prompt == 0)
    finally:
        model.generation_config.eos_token_id = None
    assert found.input_ids == alone[0][: alone[0].index(stop, len(prompts[0])) + 1]


def test_thinking_is_named(pair, loaded):
    messages = conversations(1, [pair.prompts])
    assert knows_thinking(pair.tokenizer)
    found = examine(pair.model, loaded.draft, pair.tokenizer, messages, format=Format(thinking=True), max_new_tokens=24)
    assert found.fault == "thinking", found.verdict
    assert "by the chat template, without thinking" in found.verdict[0]


def test_no_template(pair, loaded):
    bare = replace(Format(), template=False)
    ids = bare.ids(pair.tokenizer, [{"role": "user", "content": "w1 w2"}, {"role": "user", "content": "w3"}])
    assert ids == [1, 2, 3]
    pair.tokenizer.chat_template, kept = None, pair.tokenizer.chat_template
    try:
        assert not knows_thinking(pair.tokenizer)
        with pytest.raises(ValueError, match="no chat template"):
            examine(pair.model, loaded.draft, pair.tokenizer, [])
    finally:
        pair.tokenizer.chat_template = kept


# --- loading ----------------------------------------------------------------------------------------------------------


def test_what_was_loaded(loaded):
    found = loaded.inventory
    assert found.stored == len(loaded.draft.state_dict())
    assert not (found.missing or found.unexpected or found.misshaped or found.differing)
    assert found.aliased == ["embed_tokens.weight", "lm_head.weight"]
    assert loaded.draft.embed_tokens is loaded.model.get_input_embeddings()


def test_memory_is_what_is_allocated(loaded):
    memory = memory_of(loaded.model, loaded.draft)
    drafter = DSparkDrafter(loaded.draft)
    drafter.begin(1, 100, torch.device("cpu"))
    assert memory.drafter_token * 100 == drafter.memory
    past = loaded.model(torch.ones(1, 100, dtype=torch.long)).past_key_values
    assert memory.target_token * 100 == sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    assert memory.target == sum(one.nbytes for one in loaded.model.parameters())
    assert memory.aliased == 2 * 37 * 64 * 4 and memory.capacity == 256
    assert memory.at_capacity == memory.target + memory.drafter + 256 * (memory.target_token + memory.drafter_token)


def test_taps_beyond_the_targets_layers_are_tried_one_earlier(pair, loaded, tmp_path):
    """Of 4 layers 0 to 2 can be tapped."""
    high = {"target_layer_ids": [2, 3]}
    broken = replace(FAULTS["taps one layer too high"], config=lambda config: high)
    with pytest.raises(PairRefused, match=r"\[2, 3\] for 4 target layers") as refused:
        broken.plant(pair.model, pair.tokenizer, pair.folder, tmp_path / "broken")
    assert refused.value.fault == "taps" and refused.value.repair == "the taps one layer earlier, [1, 2]"
    assert refused.value.repaired.draft.config.target_layer_ids == [1, 2]


def test_a_checkpoint_that_lacks_a_tensor(pair, tmp_path):
    broken = replace(FAULTS["another embedding"], weights=lambda model, config, tensors: tensors.pop("norm.weight"))
    with pytest.raises(PairRefused, match=r"missing norm\.weight") as refused:
        broken.plant(pair.model, pair.tokenizer, pair.folder, tmp_path / "broken")
    assert refused.value.fault == "checkpoint"


def test_copies_that_are_not_the_targets(pair, tmp_path):
    found = FAULTS["another embedding"].plant(pair.model, pair.tokenizer, pair.folder, tmp_path / "broken")
    assert found.inventory.differing == ["embed_tokens.weight"] and found.inventory.aliased == ["lm_head.weight"]
    assert isinstance(found.draft, DSparkDraft)
    assert any(one.wiring.target_weights for one in hypotheses(found.model, found.draft, None))
