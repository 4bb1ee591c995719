"""Where ours and plain decoding part, and whether rounding explains it: ``generate(report_divergence=True)``."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers

import dspark_fast
from dspark_fast.divergence import divergence, first_difference
from dspark_fast.engine import round as rounds


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": False, "return_dict_in_generate": True, "output_scores": True},
        {"do_sample": True, "verification": "coupled", "seed": 4, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "verification": "coupled", "seed": 4, "num_return_sequences": 3},
    ],
    ids=["greedy", "processors", "dict", "coupled", "return-sequences"],
)
@pytest.mark.parametrize("lengths", [(6,), (5, 1, 8)], ids=["alone", "ragged"])
def test_sound_decoding_has_none(lengths, settings, make_target, make_draft, prompts):
    model, batch = make_target(), prompts(lengths)
    common = {"attention_mask": batch.attention_mask, "max_new_tokens": 20, "eos_token_id": [7, 30, 55, 80]}
    common |= {"pad_token_id": 0}
    out = dspark_fast.generate(model, make_draft(model), batch.input_ids, report_divergence=True, **common, **settings)
    rows = len(lengths) * settings.get("num_return_sequences", 1)
    assert out.stats.divergence == [None] * rows
    assert dspark_fast.generate(model, None, batch.input_ids, **common, **settings).stats.divergence is None


def test_a_fault_is_one(make_target, make_draft, prompts, monkeypatch):
    """Verification that accepts one draft too many: what is committed is not what the target says."""
    model, batch = make_target(), prompts((5, 9))
    verify = rounds.ops.verify

    def faulty(logits, tokens, draft_logits, lengths, **options):
        accepted, following = verify(logits, tokens, draft_logits, lengths, **options)
        return torch.minimum(accepted + 1, lengths.clamp(min=0)), following

    monkeypatch.setattr(rounds.ops, "verify", faulty)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    out = dspark_fast.generate(model, make_draft(model), batch.input_ids, report_divergence=True, **settings)
    for row, found in enumerate(out.stats.divergence):
        assert found is not None and not found.near_tie
        assert found.ours == int(out[row, 9 + found.index])
        assert found.ulps > 1000 and found.dtype == "float32"
        assert "a difference that rounding does not explain" in found.sentence()


def test_a_near_tie_is_one(make_target, make_draft, prompts):
    """bf16 and a head with the same row twice: the two tokens are apart by nothing, or by a unit in the last place."""
    model = copy.deepcopy(make_target()).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[12] = model.lm_head.weight[11]
    ids = prompts((6,)).input_ids
    found = first_difference(model, ids, [3, 11, 5], [3, 12, 5])
    assert found.index == 1 and found.near_tie and found.logit_gap == 0 and found.ulps == 0
    assert found.dtype == "bfloat16" and "0 units in the last place of bfloat16" in found.sentence()


def test_units_in_the_last_place(make_target, prompts):
    """Of the larger logit: 8 bits of a number from 2 to 4 are 2^-6 apart."""
    model = copy.deepcopy(make_target()).to(torch.bfloat16)
    ids = prompts((6,)).input_ids
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].float()
    order = logits.abs().argsort(descending=True)
    large, small = int(order[0]), int(order[40])
    found = first_difference(model, ids, [large], [small])
    ulp = 2.0 ** (torch.tensor(float(logits[large].abs())).log2().floor().item() - 7)
    assert found.ulps == pytest.approx(abs(float(logits[large] - logits[small])) / ulp)


def test_a_row_that_ends_elsewhere(make_target, make_draft, prompts):
    """Plain decoding stops at a token that ours goes on behind: there the texts part."""
    model, batch = make_target(), prompts((5, 9))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    free = dspark_fast.generate(model, None, batch.input_ids, eos_token_id=None, **settings)
    stop = int(free[0, 9 + 4])
    request = SimpleNamespace(stop_tokens=[stop], pad_token=0, do_sample=False, processors=[])
    found = divergence(model, batch.input_ids, free, {**settings, "eos_token_id": stop}, request)
    first = free[0, 9:].tolist().index(stop)
    assert found[0].index == first + 1 and found[0].ours is not None and found[0].baseline is None
    assert not found[0].near_tie


def test_it_needs_decoding_whose_tokens_can_be_compared(make_target, make_draft, prompts):
    model, batch = make_target(), prompts((4,))
    draft, calls = make_draft(model), []
    handle = model.register_forward_pre_hook(lambda *args: calls.append(1))
    try:
        with pytest.raises(ValueError, match="report_divergence is True, but rejection sampling keeps the law"):
            dspark_fast.generate(
                model, draft, batch.input_ids, do_sample=True, max_new_tokens=4, report_divergence=True
            )
        past = transformers.DynamicCache()
        with pytest.raises(ValueError, match="report_divergence is True, but plain decoding cannot go on from"):
            dspark_fast.generate(
                model, draft, batch.input_ids, max_new_tokens=4, past_key_values=past, report_divergence=True
            )
    finally:
        handle.remove()
    assert not calls


def test_cuts_that_plain_decoding_would_not_make_are_refused(make_target, make_draft, prompts):
    """typical_p stands behind top-k in transformers' list, and greedy decoding has neither."""
    model, batch = make_target(), prompts((4,))
    settings = {"do_sample": True, "verification": "coupled", "typical_p": 0.9, "top_k": 5, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="report_divergence is True, but a logits processor stands behind top-k"):
        dspark_fast.generate(model, make_draft(model), batch.input_ids, report_divergence=True, **settings)


def test_what_transformers_prepares_counts(make_target, make_draft, prompts):
    """A configuration without stop tokens takes the model's: the rows of the second run end and are padded by them."""
    model, batch = copy.deepcopy(make_target()), prompts((5, 1, 8))
    model.generation_config.eos_token_id = [7, 30, 55, 80]
    config = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0)
    out = dspark_fast.generate(
        model,
        make_draft(model),
        batch.input_ids,
        attention_mask=batch.attention_mask,
        generation_config=config,
        report_divergence=True,
    )
    assert out.stats.divergence == [None] * 3 and min(out.stats.new_tokens) < 20


def test_a_near_tie_after_a_penalty(make_target, prompts):
    """The gap is that of what both sides chose from."""
    from transformers import RepetitionPenaltyLogitsProcessor

    model, ids = make_target(), prompts((6,)).input_ids
    plain = first_difference(model, ids, [int(ids[0, 0])], [50])
    penalised = first_difference(model, ids, [int(ids[0, 0])], [50], before=[RepetitionPenaltyLogitsProcessor(1.5)])
    assert penalised.logit_gap != plain.logit_gap
