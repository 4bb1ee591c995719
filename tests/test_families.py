"""Families through the ragged path: windows, softcaps, sinks and norms of their own, each row of its own length."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

import dspark_fast
from dspark_fast.engine import attention

pytestmark = pytest.mark.floor

NEW = 24
WINDOW = 8
LENGTHS = {
    "one-token": (1,),
    "alone": (7,),
    "short": (9, 6, 1, 8),
    "long": (40, 23, 2, 31),
}  # the long are more than the kernels' block
SIXTEEN = (1, 40, 5, 33, 2, 24, 7, 7, 12, 1, 48, 3, 21, 30, 9, 4)
# As the formula has it: on transformers 5.17 SDPA ignores the softcap, and everywhere it has no sinks.
EAGER = {"attn_implementation": "eager", "head_dim": 16, "sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention"] * 3
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
    "gemma3": (
        "Gemma3Text",
        {**EAGER, "query_pre_attn_scalar": 16, "layer_types": MIXED},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2-window": ("Qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}),
    "gemma2": ("Gemma2", {**EAGER, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gpt-oss": ("GptOss", {**EAGER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {"logit_scale": 1.0}),
}
# Those that the drafters below are tried on.
DRAFTED = ("llama", "qwen2-window", "qwen3", "mistral", "mistral-window", "phi3", "olmo2", "gemma2", "gemma3")


@pytest.fixture
def target_of(make_target):
    def make(name):
        family, changes = FAMILIES[name]
        model = make_target(family, **changes)
        if name == "gpt-oss":
            torch.manual_seed(7)
            for layer in model.get_decoder().layers:
                torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)  # as loaded: they are made uninitialised, or 0
        return model

    return make


@pytest.fixture
def decoded(prompts, scripted, unpadded):
    """``decoded(model, lengths)``: what the model says alone, and what it says under drafts of which 60 % are right."""

    def decode(model, lengths, *, right=0.6, watch=True, **options):
        batch = prompts(lengths)
        settings = {"attention_mask": batch.attention_mask, "max_new_tokens": NEW, "do_sample": False}
        truth = model.generate(batch.input_ids, **settings)
        rows = unpadded(truth, batch.attention_mask)
        assert min(len(set(row[-NEW:])) for row in rows) >= 4  # equality of constants would say nothing
        draft = scripted(rows, right=right, watch=watch, **options)
        return truth, dspark_fast.generate(model, draft, batch.input_ids, **settings)

    return decode


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_what_the_target_says(name, lengths, target_of, decoded):
    truth, ours = decoded(target_of(name), lengths)
    assert torch.equal(ours, truth)
    assert sum(ours.stats.accepted) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_rows(name, target_of, decoded, make_draft, prompts):
    """Two tiles of rows; with a drafter of its own speed in each, finished ones leave."""
    model, batch = target_of(name), prompts(SIXTEEN)
    truth, ours = decoded(model, SIXTEEN)
    assert torch.equal(ours, truth) and sum(ours.stats.accepted) > 0
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": NEW, "do_sample": False}
    settings |= {"eos_token_id": list(range(3, 97, 9)), "pad_token_id": 0}
    ours = dspark_fast.generate(model, make_draft(model), batch.input_ids, **settings)
    assert torch.equal(ours, model.generate(batch.input_ids, **settings)) and len(set(ours.stats.new_tokens)) > 4


@pytest.mark.parametrize("lengths", [LENGTHS["alone"], LENGTHS["short"], SIXTEEN], ids=["alone", "short", "sixteen"])
@pytest.mark.parametrize("name", DRAFTED)
def test_a_drafter_that_is_always_right_and_one_that_is_always_wrong(name, lengths, target_of, decoded):
    model = target_of(name)
    truth, ours = decoded(model, lengths, right=1.0, ragged=False)
    assert torch.equal(ours, truth) and ours.stats.rounds == math.ceil((NEW - 1) / 6)
    assert ours.stats.accepted == ours.stats.proposed and ours.stats.accepted[-1] > 0
    truth, ours = decoded(model, lengths, right=0.0, ragged=False)
    assert torch.equal(ours, truth) and ours.stats.rounds == NEW - 1
    assert not any(ours.stats.accepted) and ours.stats.proposed[0] == (NEW - 1) * len(lengths)


@pytest.mark.parametrize("lengths", [LENGTHS["one-token"], LENGTHS["short"]], ids=["one-token", "short"])
@pytest.mark.parametrize("name", DRAFTED)
def test_a_real_drafter(name, lengths, target_of, make_draft, prompts):
    """Of random weights, on the features of the layers it taps: also as transformers' own callable."""
    model, batch = target_of(name), prompts(lengths)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": NEW, "do_sample": False}
    truth, draft = model.generate(batch.input_ids, **settings), make_draft(model)
    ours = dspark_fast.generate(model, draft, batch.input_ids, **settings)
    assert torch.equal(ours, truth) and ours.stats.proposed[0] >= ours.stats.rounds > 0
    custom = dspark_fast.decoding(draft)
    assert torch.equal(model.generate(batch.input_ids, custom_generate=custom, **settings), truth)
    assert custom.stats.acceptance_lengths == ours.stats.acceptance_lengths


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mistral-window"])
def test_blocks_longer_than_the_kernels(name, target_of, decoded):
    truth, ours = decoded(target_of(name), LENGTHS["short"], block_size=20)
    assert torch.equal(ours, truth)


@contextlib.contextmanager
def changed(monkeypatch, **changes):
    """What a layer asks of its attention is changed on its way."""
    asked = attention.AttentionInterface._global_mapping[attention.NAME]

    def ask(*args, **kwargs):
        told = {name: change(kwargs[name]) for name, change in changes.items() if kwargs.get(name) is not None}
        assert told or not kwargs.get("sliding_window")
        heard.update(told)
        return asked(*args, **{**kwargs, **told})

    heard = {}
    with monkeypatch.context() as patch:
        # Both would notice a window that is gone; here it is the tokens that must.
        patch.setattr(attention, "_check_window", lambda module: None)
        patch.setattr("dspark_fast.engine.target.check_attended", lambda model, running: None)
        patch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, ask)
        yield
    assert set(heard) == set(changes)


WRONG = {
    "softcap-dropped": ("gemma2", {"softcap": lambda softcap: None}),
    "window-dropped": ("mistral-window", {"sliding_window": lambda window: None}),
    "window-longer": ("mistral-window", {"sliding_window": lambda window: window + 1}),
    "window-shorter": ("mistral-window", {"sliding_window": lambda window: window - 1}),
    "layers-window-longer": ("gemma3", {"sliding_window": lambda window: window + 1}),
    "sinks-dropped": ("gpt-oss", {"s_aux": lambda sinks: None}),
    "sinks-of-other-heads": ("gpt-oss", {"s_aux": lambda sinks: sinks.roll(1)}),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("name", "changes"), WRONG.values(), ids=WRONG)
def test_equality_would_notice(name, changes, lengths, target_of, decoded, monkeypatch):
    """The controls: what each family has of its own does change what it says."""
    model = target_of(name)
    with changed(monkeypatch, **changes):
        truth, ours = decoded(model, lengths, watch=False)
    assert not torch.equal(ours, truth)


def test_a_window_that_stands_in_the_mask_alone_is_refused(target_of, decoded, monkeypatch):
    asked = attention.AttentionInterface._global_mapping[attention.NAME]

    def ask(*args, **kwargs):
        return asked(*args, **{**kwargs, "sliding_window": None})

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, ask)
    with pytest.raises(RuntimeError, match=r"MistralForCausalLM has a sliding_window of \d+, but no layer passes one"):
        decoded(target_of("mistral-window"), LENGTHS["short"], watch=False)
