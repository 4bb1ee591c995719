"""The passes that we compile, the target's and the drafter's: the same tokens, taps and all; chosen by the clock."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

import dspark_fast
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.engine import compiled
from dspark_fast.engine.target import RaggedTarget


@pytest.fixture
def clock(monkeypatch):
    """``clock(plain, compiled)``: the seconds that each kind of pass is measured to take."""
    compiled._faster.clear()
    torch._dynamo.reset()
    counters.clear()

    def set_to(*seconds):
        told = itertools.cycle(seconds)
        monkeypatch.setattr(compiled, "_seconds", lambda work, device: next(told))

    yield set_to
    compiled._faster.clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_the_tokens_are_the_same_and_nothing_is_compiled_twice(
    family, clock, make_target, make_draft, prompts, monkeypatch
):
    clock(2.0, 1.0)
    model, batch = make_target(family), prompts((5, 1, 9))
    draft = make_draft(model, target_layer_ids=[-1, 1, 3])
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "do_sample": False, "off_switch": False}
    truth = dspark_fast.generate(model, draft, batch.input_ids, **settings)
    out = dspark_fast.generate(model, draft, batch.input_ids, compile_target=True, **settings)
    assert torch.equal(out, truth) and out.stats.compiled and not truth.stats.compiled
    assert out.stats.acceptance_lengths == truth.stats.acceptance_lengths  # the taps too
    assert out.stats.seconds.compilation > 0 and out.stats.capacity == 256
    graphs = counters["stats"]["unique_graphs"]

    def gone(*args):
        raise AssertionError("a plain pass ran")

    monkeypatch.setattr(RaggedTarget, "_pass", gone)
    monkeypatch.setattr(DSparkDrafter, "_block_pass", gone)
    again = dspark_fast.generate(model, draft, batch.input_ids, compile_target=True, **settings)
    assert torch.equal(again, truth) and counters["stats"]["unique_graphs"] == graphs
    assert again.stats.acceptance_lengths == truth.stats.acceptance_lengths
    assert list(compiled._faster[draft].values()) == [True]


def test_another_drafters_taps_are_another_trace(clock, make_target, make_draft, prompts):
    clock(2.0, 1.0)
    model, batch = make_target(), prompts((4,))
    settings = {"max_new_tokens": 16, "do_sample": False, "off_switch": False}
    for taps in ([1, 3], [0, 2, 4]):
        draft = make_draft(model, target_layer_ids=taps)
        truth = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        out = dspark_fast.generate(model, draft, batch.input_ids, compile_target=True, **settings)
        assert torch.equal(out, truth)
        assert out.stats.acceptance_lengths == truth.stats.acceptance_lengths


def test_the_plain_pass_is_kept_where_it_is_faster(clock, make_target, make_draft, prompts):
    clock(1.0, 2.0)
    model, batch = make_target(), prompts((4,))
    draft = make_draft(model)
    settings = {"max_new_tokens": 8, "do_sample": False, "off_switch": True}
    out = dspark_fast.generate(model, draft, batch.input_ids, compile_target=True, **settings)
    asked = {shape[1]: faster for (_, shape, *_), faster in compiled._faster[model].items()}
    assert not out.stats.compiled and asked == {draft.config.block_size + 1: False}  # no plain step is asked about
    assert torch.equal(out, dspark_fast.generate(model, draft, batch.input_ids, **settings))


def test_a_drafter_of_the_users_that_is_a_module(clock, make_target, make_draft, prompts):
    """Every module has a method ``compile``, which is another thing."""

    class Theirs(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            object.__setattr__(self, "inner", inner)

        def __getattr__(self, name):
            if name == "compile_block":
                raise AttributeError(name)
            return getattr(object.__getattribute__(self, "inner"), name)

    clock(2.0, 1.0)
    model, batch = make_target(), prompts((4,))
    settings = {"max_new_tokens": 8, "do_sample": False, "off_switch": False}
    truth = dspark_fast.generate(model, None, batch.input_ids, **settings)
    out = dspark_fast.generate(
        model, Theirs(DSparkDrafter(make_draft(model))), batch.input_ids, compile_target=True, **settings
    )
    assert torch.equal(out, truth) and out.stats.compiled


def test_a_call_takes_nothing_over_from_the_one_before(clock, make_target, make_draft, prompts):
    """A drafter that was told to make fewer drafts makes whole blocks again."""
    clock(2.0, 1.0)
    model, batch = make_target(), prompts((4,))
    drafter = DSparkDrafter(make_draft(model))
    drafter.most = 2
    settings = {"max_new_tokens": 16, "do_sample": False, "off_switch": False}
    out = dspark_fast.generate(model, drafter, batch.input_ids, compile_target=True, **settings)
    assert out.stats.proposed[-1] > 0 and counters["stats"]["unique_graphs"] == 2  # target and drafter, once each


def test_a_drafter_with_hooks_runs_plainly(clock, make_target, make_draft, prompts):
    clock(2.0, 1.0)
    model, batch, seen = make_target(), prompts((4,)), []
    draft = make_draft(model)
    handle = draft.register_forward_hook(lambda module, arguments, output: seen.append(1))
    out = dspark_fast.generate(
        model, draft, batch.input_ids, max_new_tokens=8, do_sample=False, off_switch=False, compile_target=True
    )
    handle.remove()
    assert out.stats.compiled and len(seen) == out.stats.rounds


def test_plain_steps_of_the_switch_are_compiled_too(clock, make_target, make_draft, prompts):
    clock(2.0, 1.0)
    model, batch = make_target(), prompts((4,))
    draft = make_draft(model)
    settings = {"max_new_tokens": 12, "do_sample": False, "off_switch": True}
    out = dspark_fast.generate(model, draft, batch.input_ids, compile_target=True, **settings)
    assert {shape[1] for _, shape, *_ in compiled._faster[model]} == {1, draft.config.block_size + 1}
    assert out.stats.plain_steps > 0


def test_what_cannot_be_compiled_runs_plainly_and_says_so(clock, make_target, make_draft, prompts, monkeypatch):
    model, batch = make_target(), prompts((4,))
    draft = make_draft(model)
    truth = dspark_fast.generate(model, draft, batch.input_ids, max_new_tokens=8, do_sample=False)
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward

    def asks_the_host(self, x, position_ids):
        if position_ids.max().item() < 0:  # a value that a trace cannot know
            raise ValueError
        return forward(self, x, position_ids)

    monkeypatch.setattr(rotary, "forward", asks_the_host)
    with pytest.warns(UserWarning, match="the target's pass cannot be compiled and runs plainly: "):
        out = dspark_fast.generate(
            model, draft, batch.input_ids, max_new_tokens=8, do_sample=False, compile_target=True
        )
    assert torch.equal(out, truth) and not out.stats.compiled


def test_hooks_of_the_users_are_refused(make_target, make_draft, prompts):
    model, batch = make_target(), prompts((4,))
    draft = make_draft(model)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    try:
        with pytest.raises(ValueError, match="compile_target is True, but the target has forward hooks"):
            dspark_fast.generate(model, draft, batch.input_ids, max_new_tokens=4, compile_target=True)
    finally:
        handle.remove()


@pytest.mark.parametrize("part", ["the model", "a layer"])
def test_what_the_user_has_compiled_is_refused(part, make_target, make_draft, prompts):
    model, batch = make_target(), prompts((4,))
    draft = make_draft(model)
    compiled_part = model if part == "the model" else model.model.layers[1]
    compiled_part.forward = torch.compile(compiled_part.forward)
    try:
        with pytest.raises(ValueError, match="compile_target is True, but parts of the target are compiled already"):
            dspark_fast.generate(model, draft, batch.input_ids, max_new_tokens=4, compile_target=True)
    finally:
        del compiled_part.forward
