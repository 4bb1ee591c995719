"""``past_key_values``: handed back and in again, a chat goes on without its history being read again."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import dspark_fast
from dspark_fast import ops
from dspark_fast.engine.past import Past

SETTINGS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def reads(monkeypatch):
    """How many tokens per row each prefill read."""
    from dspark_fast.engine.target import RaggedTarget

    seen, prefill = [], RaggedTarget.prefill

    def counted(self, tokens, counts, on_features):
        seen.append(counts.tolist())
        return prefill(self, tokens, counts, on_features)

    monkeypatch.setattr(RaggedTarget, "prefill", counted)
    return seen


def said(model, draft, ids, mask, **more):
    return dspark_fast.generate(model, draft, ids, attention_mask=mask, **{**SETTINGS, **more})


def next_turn(out, mask, more):
    """What was said and three more tokens for each row; padding stays on the left."""
    ids = torch.cat([out.sequences, more], dim=1)
    return ids, torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


@pytest.mark.floor
@pytest.mark.parametrize("lengths", [(7,), (9, 6, 1, 8)], ids=["alone", "padded"])
def test_a_chat_goes_on(lengths, make_target, make_draft, prompts, reads):
    model, batch = make_target(), prompts(lengths)
    draft = make_draft(model)
    first = said(model, draft, batch.input_ids, batch.attention_mask)
    assert isinstance(first.past_key_values, Past)
    ids, mask = next_turn(first, batch.attention_mask, torch.randint(1, 97, (len(lengths), 3)))
    truth = said(model, None, ids, mask).sequences
    again = said(model, draft, ids, mask, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, truth)
    # The last token of the first turn had not been read, and three are new.
    assert reads[-1] == [4] * len(lengths)
    assert again.stats.reused == [length + 11 for length in lengths] and again.stats.absent == [0] * len(lengths)
    # The drafter's context went along: it drafts as if it had read everything.
    anew = said(model, draft, ids, mask)
    assert again.stats.acceptance_lengths == anew.stats.acceptance_lengths
    through_transformers = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=first.past_key_values,
        custom_generate=dspark_fast.decoding(draft),
        **SETTINGS,
    )
    assert torch.equal(through_transformers.sequences, truth)
    assert reads[-1] == [4] * len(lengths)


def test_a_text_that_parts_from_it_is_read_from_there(make_target, make_draft, prompts, reads):
    model, batch = make_target(), prompts((9, 6))
    draft = make_draft(model)
    first = said(model, draft, batch.input_ids, batch.attention_mask)
    ids, mask = next_turn(first, batch.attention_mask, torch.randint(1, 97, (2, 3)))
    ids[0, 12] = ids[0, 12] % 96 + 1  # row 0 differs in its 13th token, row 1 does not
    truth = said(model, None, ids, mask).sequences
    again = said(model, draft, ids, mask, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, truth)
    assert reads[-1] == [24 - 12, 4]
    # and the one that was handed in is as it was: another branch goes on from it
    ids, mask = next_turn(first, batch.attention_mask, torch.randint(1, 97, (2, 3)))
    branch = said(model, draft, ids, mask, past_key_values=first.past_key_values)
    assert torch.equal(branch.sequences, said(model, None, ids, mask).sequences)
    assert reads[-2] == [4, 4]


def test_a_copy_serves_as_well(make_target, make_draft, prompts, reads):
    """Prefixes are kept by copy.deepcopy: the drafter is not copied with them, nor its context lost."""
    model, batch = make_target(), prompts((9, 6))
    draft = make_draft(model)
    first = said(model, draft, batch.input_ids, batch.attention_mask)
    copied = copy.deepcopy(first.past_key_values)
    assert copied.context.draft is draft and copied.context.keys is not first.past_key_values.context.keys
    ids, mask = next_turn(first, batch.attention_mask, torch.randint(1, 97, (2, 3)))
    again = said(model, draft, ids, mask, past_key_values=copied)
    assert torch.equal(again.sequences, said(model, None, ids, mask).sequences)
    assert reads[-2] == [4, 4] and again.stats.absent == [0, 0]


def test_an_empty_cache_is_none(make_target, prompts, reads):
    model, batch = make_target(), prompts((9, 6))
    truth = said(model, None, batch.input_ids, batch.attention_mask).sequences
    ours = said(model, None, batch.input_ids, batch.attention_mask, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(ours.sequences, truth) and reads[-1] == [9, 6]


def test_the_same_prompt_again(make_target, make_draft, prompts, reads):
    """At least one token is read: the first new one comes from its logits."""
    model, batch = make_target(), prompts((9, 6))
    first = said(model, make_draft(model), batch.input_ids, batch.attention_mask)
    again = said(model, None, batch.input_ids, batch.attention_mask, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, first.sequences)
    assert reads[-1] == [1, 1]


def test_another_drafter_goes_on_without_the_context(make_target, make_draft, prompts):
    model, batch = make_target(), prompts((9, 6))
    first = said(model, make_draft(model), batch.input_ids, batch.attention_mask)
    ids, mask = next_turn(first, batch.attention_mask, torch.randint(1, 97, (2, 3)))
    again = said(model, make_draft(model), ids, mask, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, said(model, None, ids, mask).sequences)
    assert again.stats.absent == again.stats.reused == [20, 17]
    third, mask = next_turn(again, mask, torch.randint(1, 97, (2, 3)))
    more = said(model, make_draft(model), third, mask, past_key_values=again.past_key_values)
    assert torch.equal(more.sequences, said(model, None, third, mask).sequences)


@pytest.mark.floor
@pytest.mark.parametrize("lengths", [(7,), (9, 6, 1, 8)], ids=["alone", "padded"])
def test_a_cache_of_transformers_is_taken(lengths, make_target, make_draft, prompts, reads):
    model, batch = make_target(), prompts(lengths)
    ids, mask = batch.input_ids, batch.attention_mask
    filled = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=filled, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    longer = torch.cat([ids, torch.randint(1, 97, (len(lengths), 3))], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 3), value=1)
    truth = said(model, None, longer, mask).sequences
    draft = make_draft(model)
    ours = said(model, draft, longer, mask, past_key_values=filled)
    assert torch.equal(ours.sequences, truth)
    assert reads[-1] == [3] * len(lengths)
    assert ours.stats.reused == ours.stats.absent == list(lengths)
    assert filled.get_seq_length() == ids.shape[1]


def test_what_does_not_fit_is_refused(make_target, make_draft, prompts):
    model, batch = make_target(), prompts((9, 6))
    draft = make_draft(model)
    first = said(model, draft, batch.input_ids, batch.attention_mask)
    with pytest.raises(ValueError, match="past_key_values has 2 rows, input_ids 1"):
        said(model, draft, batch.input_ids[:1], None, past_key_values=first.past_key_values)
    filled = DynamicCache(config=model.config)
    model(batch.input_ids, past_key_values=filled)
    with pytest.raises(ValueError, match="past_key_values has 9 tokens: accepted are 1 to one less"):
        said(model, draft, batch.input_ids, None, past_key_values=filled)
    with pytest.raises(ValueError, match=r"1 rows|does not hold"):
        said(model, draft, torch.cat([batch.input_ids, batch.input_ids], 1)[:1], None, past_key_values=filled)
    other, longer = make_target(num_hidden_layers=4), torch.randint(1, 97, (2, 12))
    with pytest.raises(ValueError, match="6 layers, the target has 4"):
        said(other, None, longer, None, past_key_values=filled)
    with pytest.raises(ValueError, match="another model"):
        said(other, None, batch.input_ids, None, past_key_values=first.past_key_values)


@pytest.mark.parametrize("family", ["Gemma2", "Mistral", "Qwen3"])
def test_one_row_is_known_and_another_is_new(family, make_target, prompts, monkeypatch):
    """The new row is read anew while the other's last token waits, of which all else is padding behind its keys."""
    windowed = {"sliding_window": 4} if family != "Qwen3" else {}
    model = make_target(family, num_hidden_layers=2, head_dim=16, **windowed)
    given, attend = [], ops.block_attention

    def watched(q, k_cache, v_cache, lengths, **options):
        given.append((int(lengths.max()), k_cache.shape[1]))
        return attend(q, k_cache, v_cache, lengths, **options)

    monkeypatch.setattr(ops, "block_attention", watched)
    batch = prompts((60, 16))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 3, "return_dict_in_generate": True}
    for backend in ("reference", "kernel"):  # by which attention is chosen; on a CPU both compute it in the same way
        monkeypatch.setattr("dspark_fast.engine.attention.choose", lambda *_, backend=backend: backend)
        past = dspark_fast.generate(model, None, batch.input_ids, **settings).past_key_values
        other = batch.input_ids.clone()
        other[1, 44] = other[1, 44] % 90 + 3
        truth = model.generate(other, **settings).sequences
        found = dspark_fast.generate(model, None, other, past_key_values=past, **settings)
        assert found.stats.reused == [59, 0] and torch.equal(found.sequences, truth)
    assert given and all(length <= keys for length, keys in given), "kernels read what lies behind the keys"
