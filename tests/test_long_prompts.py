"""Prompts longer than one chunk of the prefill, beside prompts of one token: as transformers reads them."""

from __future__ import annotations

import pytest
import torch

import dspark_fast

TARGETS = {
    "Qwen3": {},
    "Mistral": {"sliding_window": 300},
    "Gemma2": {"sliding_window": 300, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
}
SHORT_WINDOW = 40  # of 300 tokens each counts for so little that no token of the output would tell
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.floor
@pytest.mark.parametrize("family", TARGETS)
def test_thousands_of_tokens_beside_one(family, make_target, make_draft, prompts):
    model = make_target(family, num_hidden_layers=4, max_position_embeddings=4096, **TARGETS[family])
    if family == "Gemma2":
        model.set_attn_implementation("eager")  # sdpa would drop its softcap without a word
    batch = prompts((2100, 1) if family == "Gemma2" else (3000, 1, 2049, 2048))
    settings = {**SETTINGS, "attention_mask": batch.attention_mask}
    truth = model.generate(batch.input_ids, **settings)
    assert len(set(truth[:, batch.input_ids.shape[1] :].flatten().tolist())) >= 6
    draft = make_draft(model) if family == "Qwen3" else None
    ours = dspark_fast.generate(model, draft, batch.input_ids, **settings)
    assert torch.equal(ours, truth)


@pytest.mark.floor
@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
def test_drafts_are_rolled_back_behind_a_window(family, make_target, prompts, scripted, unpadded):
    """Three in five are right, of a number that is drawn for each row; and one row alone."""

    def windowed(window):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        sizes |= {**TARGETS[family], "sliding_window": window, "max_position_embeddings": 4096}
        model = make_target(family, **sizes)
        if family == "Gemma2":
            model.set_attn_implementation("eager")  # as above
        return model

    model = windowed(SHORT_WINDOW)
    for lengths in ((3000, 1), (3000,)):
        batch = prompts(lengths)
        settings = {**SETTINGS, "attention_mask": batch.attention_mask}
        truth = model.generate(batch.input_ids, **settings)
        draft = scripted(unpadded(truth, batch.attention_mask), right=0.6)
        ours = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        assert torch.equal(ours, truth) and 0 < sum(ours.stats.accepted) < sum(ours.stats.proposed)
    # The same weights that see one token more say something else: the tokens hang on the window.
    assert not torch.equal(windowed(SHORT_WINDOW + 1).generate(batch.input_ids, **settings), truth)


EAGER = {"attn_implementation": "eager", "head_dim": 16, "sliding_window": SHORT_WINDOW, "query_pre_attn_scalar": 16}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Phi3": {"sliding_window": None},
    "Olmo2": {},
    "Gemma3Text": {**EAGER, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.floor
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_behind_thousands_of_tokens(family, make_target, make_draft, prompts, scripted, unpadded):
    """Scripted ones, and those of a drafter."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_target(family, max_position_embeddings=4096, **{**sizes, **FAMILIES[family]})
    batch = prompts((3000, 1))
    settings = {**SETTINGS, "attention_mask": batch.attention_mask}
    truth = model.generate(batch.input_ids, **settings)
    script = scripted(unpadded(truth, batch.attention_mask), right=0.6)
    for draft in (script, make_draft(model, num_hidden_layers=1, target_layer_ids=[0])):
        ours = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        assert torch.equal(ours, truth) and sum(ours.stats.proposed) > 0
        assert draft is not script or 0 < sum(ours.stats.accepted) < sum(ours.stats.proposed)


@torch.no_grad()
def test_the_drafters_context_is_the_same_in_chunks(make_target, make_draft, prompts, monkeypatch):
    """Which drafts are right depends on all of the context: a chunk that was lost or shifted would show."""
    model = make_target(num_hidden_layers=4, max_position_embeddings=4096)
    batch, draft = prompts((700, 300)), make_draft(model)
    settings = {**SETTINGS, "attention_mask": batch.attention_mask, "return_dict_in_generate": True}
    whole = dspark_fast.generate(model, draft, batch.input_ids, **settings).past_key_values.context
    monkeypatch.setattr("dspark_fast.engine.target.PREFILL_CHUNK", 256)
    parts = dspark_fast.generate(model, draft, batch.input_ids, **settings).past_key_values.context
    for row, length in enumerate((700, 300)):
        for one, other in ((whole.keys, parts.keys), (whole.values, parts.values)):
            torch.testing.assert_close(other[:, row, :length], one[:, row, :length], rtol=1e-4, atol=1e-4)
