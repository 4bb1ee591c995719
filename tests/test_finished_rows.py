"""Finished rows that have to stay in the batch: neither target nor drafter reads what is cached of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dspark_fast
from dspark_fast import ops
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.target import RaggedTarget

LENGTHS = (14, 3, 6)
STOPS = [54, 71]  # the third token of the first row's, the sixth of the second's


@pytest.fixture
def staying(make_target, make_draft, prompts):
    """``staying(**options)``: a call whose rows end at unlike times, counted by somebody, so that none leaves."""
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}  # the interpreter runs programs one by one
    model, batch = make_target("Qwen3", num_hidden_layers=2, **one_head), prompts(LENGTHS)
    draft = make_draft(model, num_hidden_layers=1, **one_head)

    def decode(**options):
        settings = {"max_new_tokens": 10, "eos_token_id": STOPS, "pad_token_id": 0, "return_dict_in_generate": True}
        return dspark_fast.generate(
            model, draft, batch.input_ids, attention_mask=batch.attention_mask, **settings, **options
        )

    return decode


@pytest.fixture
def kernels(monkeypatch):
    """Attention, and nothing else, runs on kernels, which the interpreter takes its time for."""
    monkeypatch.setattr(ops, "block_attention", partial(ops.block_attention, backend="kernel"))
    monkeypatch.setattr("dspark_fast.engine.attention.choose", lambda *_: "kernel")


@pytest.fixture
def poisoning(monkeypatch):
    """Puts NaN over all that is cached of finished rows before each pass; gives, of each: finished rows, all finite."""
    seen = []
    verify, propose = RaggedTarget.verify, DSparkDrafter.propose

    def poison(finished, *caches):
        for cache in caches:
            cache[finished] = float("nan")

    def verified(self, ids, end):
        poison(self.finished, *(part for layer in self.cache.layers for part in (layer.keys, layer.values)))
        logits, features = verify(self, ids, end)
        seen.append((int(self.finished.sum()), bool(logits.isfinite().all() and features.isfinite().all())))
        return logits, features

    def proposed(self, anchor, position, noise):
        poison(self.finished, *self.context.keys, *self.context.values)
        proposal = propose(self, anchor, position, noise)
        seen.append((int(self.finished.sum()), bool((proposal.tokens >= 0).all())))  # from NaN nothing is drawn
        return proposal

    monkeypatch.setattr(RaggedTarget, "verify", verified)
    monkeypatch.setattr(DSparkDrafter, "propose", proposed)
    return seen


def test_kernels_read_nothing_of_finished_rows(staying, kernels, poisoning):
    out = staying(output_scores=True)
    assert out.stats.new_tokens == [3, 6, 10] and {finished for finished, _ in poisoning} == {0, 1, 2}
    assert all(finite for _, finite in poisoning)


def test_tokens_and_past_are_as_if_all_were_read(staying, kernels, monkeypatch):
    """What kernels leave out must not reach what is handed back: neither zeros nor garbage in front of a length."""
    found = staying(output_scores=True)
    monkeypatch.undo()  # the reference attends for every row
    expected = staying(output_scores=True)
    assert torch.equal(found.sequences, expected.sequences)
    mine, theirs = found.past_key_values, expected.past_key_values
    for row, length in enumerate(theirs.cache.lengths.tolist()):
        for one, other in zip(mine.cache.layers, theirs.cache.layers):
            torch.testing.assert_close(one.keys[row, :length], other.keys[row, :length])
            torch.testing.assert_close(one.values[row, :length], other.values[row, :length])


def test_on_a_cpu_no_more_keys_are_read_than_the_rows_that_go_on_have(staying, monkeypatch):
    """The longest row ends first: the passes after that see fewer keys."""
    ends, begin = [], RaggedCache.begin

    def watched(self, block, end, finished=None, **more):
        if finished is not None:
            going = (self.lengths + block)[~finished]
            assert end == int(going.max()), "as many keys as the longest row that goes on"
            ends.append((end, int((self.lengths + block).max())))
        return begin(self, block, end, finished, **more)

    monkeypatch.setattr(RaggedCache, "begin", watched)
    staying(output_scores=True)
    assert any(end < longest for end, longest in ends)


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"window": 4}, {"causal": True}, {}], ids=str)
def test_the_reference_gives_zeros_where_no_key_may_be_read(options):
    from dspark_fast.reference import block_attention

    q, k, v = (torch.randn(2, 3, 2, 16) for _ in range(3))
    lengths = torch.tensor([0, 3])
    out = block_attention(q, k, v, lengths, **{"scale": 0.3, "causal": False, **options})
    alone = block_attention(q[1:], k[1:], v[1:], lengths[1:], **{"scale": 0.3, "causal": False, **options})
    assert not out[0].any() and torch.allclose(out[1:], alone, atol=1e-6)
    assert not block_attention(q[:1], k[:1], v[:1], lengths[:1], **{"scale": 0.3, "causal": False, **options}).any()
