"""A drafter's compiled pass beyond plain greedy calls: sampling, a part of the vocabulary, chats, bf16."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

import dspark_fast
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.engine import compiled
from dspark_fast.engine.target import RaggedTarget

pytestmark = pytest.mark.slow

SETTINGS = {"max_new_tokens": 24, "off_switch": False, "return_dict_in_generate": True}
SAMPLING = {
    "greedy": {"do_sample": False},
    "rejection": {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "seed": 11},
    "coupled": {"do_sample": True, "temperature": 0.9, "verification": "coupled", "seed": 11},
}


@pytest.fixture(scope="module")
def pairs(make_target, make_draft):
    """``pairs(dtype)``: a target in fp32 and a drafter of 60 tokens of 97, once, so that each is compiled once."""
    model, made = make_target("Llama", fresh=True, num_hidden_layers=2), {}

    def make(dtype):
        if dtype not in made:
            draft = make_draft(model, num_hidden_layers=1, target_layer_ids=[0], draft_vocab_size=60)
            assert len(draft.vocabulary) == 60 < model.config.vocab_size
            made[dtype] = draft.to(dtype)
        return model, made[dtype]

    torch._dynamo.reset()
    counters.clear()
    yield make
    compiled._faster.clear()
    torch._dynamo.reset()


@pytest.fixture
def drafts(monkeypatch):
    """``drafts()``: all that was drafted since the last question. Few drafts of random weights are ever accepted."""
    seen, propose = [], DSparkDrafter.propose

    def watched(self, *args):
        proposal = propose(self, *args)
        seen.append(proposal.tokens.tolist())
        return proposal

    def asked():
        all_of_them = list(seen)
        seen.clear()
        return all_of_them

    monkeypatch.setattr(DSparkDrafter, "propose", watched)
    return asked


@pytest.fixture
def compiles(monkeypatch):
    """``compiles(model, draft, ...)``: whatever the clock says, and without a plain pass once they are compiled."""
    told = iter([2.0, 1.0] * 1000)
    monkeypatch.setattr(compiled, "_seconds", lambda work, device: next(told))

    def gone(*args):
        raise AssertionError("a plain pass ran")

    def generate(model, draft, ids, **settings):
        with monkeypatch.context() as patch:
            if model in compiled._faster:
                patch.setattr(RaggedTarget, "_pass", gone)
            if draft in compiled._faster:
                patch.setattr(DSparkDrafter, "_block_pass", gone)
            out = dspark_fast.generate(model, draft, ids, compile_target=True, **settings)
        assert out.stats.compiled
        return out

    return generate


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_tokens_and_drafts_are_those_of_plain_passes(sampling, pairs, compiles, drafts, prompts):
    """At whole blocks, on which rejection's tokens depend."""
    (model, draft), batch = pairs(torch.float32), prompts((5, 9))
    settings = {**SETTINGS, **sampling, "attention_mask": batch.attention_mask}
    truth, plain = dspark_fast.generate(model, draft, batch.input_ids, **settings), drafts()
    for _ in range(2):
        out = compiles(model, draft, batch.input_ids, **settings)
        assert torch.equal(out.sequences, truth.sequences) and drafts() == plain
        assert out.stats.acceptance_lengths == truth.stats.acceptance_lengths
        assert out.stats.proposed == truth.stats.proposed and out.stats.proposed[-1] > 0


@pytest.mark.parametrize("absent", ["nothing", "the-history", "a-part-of-it"])
def test_a_chat_goes_on(absent, pairs, compiles, drafts, prompts):
    """From a context that begins at the first token, or at a later one: the pass counts its slots from there."""
    (model, draft), batch = pairs(torch.float32), prompts((5, 9))
    settings = {**SETTINGS, "do_sample": False}
    ids, mask, past = batch.input_ids, batch.attention_mask, None
    # The turns before the one that is compared: a drafter knows nothing of what another one has read.
    for at, by in enumerate([draft] if absent == "nothing" else [None] if absent == "the-history" else [None, draft]):
        said = dspark_fast.generate(model, by, ids, attention_mask=mask, past_key_values=past, **settings)
        more = torch.randint(1, 97, (2, 4 + at), generator=torch.Generator().manual_seed(at))
        ids, past = torch.cat([said.sequences, more], dim=1), said.past_key_values
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    settings |= {"attention_mask": mask, "past_key_values": past}
    drafts()
    truth, plain = dspark_fast.generate(model, draft, ids, **settings), drafts()
    out = compiles(model, draft, ids, **settings)
    assert torch.equal(out.sequences, truth.sequences) and drafts() == plain
    assert torch.equal(out.sequences, model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False))
    assert out.stats.acceptance_lengths == truth.stats.acceptance_lengths
    assert out.stats.absent == truth.stats.absent and out.stats.reused == truth.stats.reused
    for known, gone in zip(out.stats.reused, out.stats.absent):
        assert {"nothing": 0 == gone < known, "the-history": 0 < gone == known, "a-part-of-it": 0 < gone < known}[
            absent
        ]


def test_calls_of_one_shape_share_a_trace(pairs, compiles, prompts):
    """Whatever the mode, and however long a turn of a chat is: what the prefill left in the caches is no part of it."""
    (model, draft), batch = pairs(torch.float32), prompts((5, 9))
    ids, mask, past = batch.input_ids, batch.attention_mask, None
    compiles(model, draft, ids, attention_mask=mask, do_sample=False, **SETTINGS)
    traces = counters["stats"]["unique_graphs"]
    for length, sampling in zip((3, 4, 7), SAMPLING.values()):
        said = compiles(model, draft, ids, attention_mask=mask, past_key_values=past, **SETTINGS, **sampling)
        more = torch.randint(1, 97, (2, length), generator=torch.Generator().manual_seed(length))
        ids, past = torch.cat([said.sequences, more], dim=1), said.past_key_values
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    assert counters["stats"]["unique_graphs"] == traces


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_a_drafter_in_16_bit(sampling, pairs, compiles, drafts, prompts):
    """Its sums come in another order, so that a draft may turn at a near-tie; what greedy and coupled give may not."""
    (model, draft), batch = pairs(torch.bfloat16), prompts((5, 9))
    settings = {**SETTINGS, **sampling, "attention_mask": batch.attention_mask}
    truth, plain = dspark_fast.generate(model, draft, batch.input_ids, **settings), drafts()
    out, quick = compiles(model, draft, batch.input_ids, **settings), drafts()
    if out.stats.mode != "rejection":
        assert torch.equal(out.sequences, truth.sequences)
    again = compiles(model, draft, batch.input_ids, **settings)
    assert torch.equal(again.sequences, out.sequences) and drafts() == quick
    # Those of a context that was lost or shifted would be others nearly everywhere.
    blocks = list(zip(itertools.chain(*quick[:6]), itertools.chain(*plain[:6])))
    assert sum(one == other for one, other in blocks) >= 0.8 * len(blocks) > 8
