"""``past_key_values`` behind a target's own cache: a chat goes on from the end of what was read."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, cache_utils

import dspark_fast
from dspark_fast.engine.own_cache import OwnCacheTarget
from dspark_fast.engine.own_past import OwnPast

pytestmark = pytest.mark.floor

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
PROMPT = torch.tensor([[5, 17, 40, 3, 88, 61, 7, 29, 90, 12, 33]])
MORE = torch.tensor([[11, 2, 71]])
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 3,
}
TARGETS = {
    "recurrent": ("Qwen3_5Text", LINEAR),
    "no-attention": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "convolutions": ("Lfm2", {"block_dim": 64, "layer_types": ["conv", "full_attention"] * 3}),
    "its-own-positions": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}


@pytest.fixture
def reads(monkeypatch):
    """How many tokens each prefill read."""
    seen, prefill = [], OwnCacheTarget.prefill

    def counted(self, tokens, counts, on_features):
        seen.append(int(counts))
        return prefill(self, tokens, counts, on_features)

    monkeypatch.setattr(OwnCacheTarget, "prefill", counted)
    return seen


def said(model, drafter, ids, **more):
    settings = {"attention_mask": torch.ones_like(ids), **SETTINGS, **more}
    return dspark_fast.generate(model, drafter, ids, **settings)


def plainly(model, ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(("family", "changes"), TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("drafted", [True, False], ids=["drafts", "plain"])
def test_a_chat_goes_on(family, changes, drafted, make_target, make_draft, reads):
    """The second turn, a second branch of it, a copy, and a text that parts from it, which is read anew."""
    model = make_target(family, **changes)
    draft = make_draft(model) if drafted else None
    first = said(model, draft, PROMPT)
    past, name = first.past_key_values, "cache_params" if family == "Mamba2" else "past_key_values"
    assert isinstance(past, OwnPast) and torch.equal(first.sequences, plainly(model, PROMPT))
    known = PROMPT.shape[1] + 11
    for more in (MORE, MORE + 1):
        ids = torch.cat([first.sequences, more], dim=1)
        truth = plainly(model, ids)
        for one in (past, copy.deepcopy(past)):
            again = said(model, draft, ids, **{name: one})
            assert torch.equal(again.sequences, truth)
            assert reads[-1] == ids.shape[1] - known == 4 and again.stats.reused == [known]
    parted = torch.cat([first.sequences[:, :-4], MORE, MORE], dim=1)
    anew = said(model, draft, parted, **{name: past})
    assert torch.equal(anew.sequences, plainly(model, parted))
    assert reads[-1] == parted.shape[1] and anew.stats.reused == [0]
    third = torch.cat([anew.sequences, MORE], dim=1)
    assert torch.equal(said(model, draft, third, **{name: anew.past_key_values}).sequences, plainly(model, third))


def test_the_drafter_goes_on_too(make_target, make_draft, reads):
    model = make_target("Qwen3_5Text", **LINEAR)
    draft = make_draft(model)
    first = said(model, draft, PROMPT)
    ids = torch.cat([first.sequences, MORE], dim=1)
    again, anew = said(model, draft, ids, past_key_values=first.past_key_values), said(model, draft, ids)
    assert reads[-2:] == [4, ids.shape[1]] and torch.equal(again.sequences, anew.sequences)
    assert again.stats.acceptance_lengths == anew.stats.acceptance_lengths and again.stats.absent == [0]


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no such cache")
def test_a_quantised_chat(make_target, reads):
    model = make_target("Qwen3", fresh=True)
    first = said(model, None, PROMPT, past_key_values=cache_utils.QuantizedCache("fp8", model.config))
    ids = torch.cat([first.sequences, MORE], dim=1)
    again = said(model, None, ids, past_key_values=first.past_key_values)
    theirs = cache_utils.QuantizedCache("fp8", model.config)
    model.generate(PROMPT, past_key_values=theirs, max_new_tokens=12, do_sample=False)
    truth = model.generate(ids, past_key_values=theirs, max_new_tokens=12, do_sample=False)
    assert torch.equal(again.sequences, truth) and reads == [11, 4]


def test_what_does_not_fit_is_refused(make_target):
    model, other = make_target("Qwen3_5Text", **LINEAR), make_target("OPT", ffn_dim=96, word_embed_proj_dim=64)
    first = said(model, None, PROMPT)
    ids = torch.cat([first.sequences, MORE], dim=1)
    with pytest.raises(ValueError, match="past_key_values is of another model"):
        said(other, None, ids, past_key_values=first.past_key_values)
    with pytest.raises(ValueError, match="past_key_values has 1 rows, input_ids 2"):
        said(model, None, ids.repeat(2, 1), past_key_values=first.past_key_values)
    cache = DynamicCache()
    other.generate(PROMPT, past_key_values=cache, max_new_tokens=12, do_sample=False)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache, but OPTForCausalLM is driven behind its"):
        said(other, None, ids, past_key_values=cache)
