"""Coupled mode, token for token: plain Gumbel-max decoding of the target, whatever the drafter, block and batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checks import RAGGED, alone_as_in_a_batch, as_gumbel_max, gumbel_max, speculated

import dspark_fast
from dspark_fast.gumbel import GumbelMax
from dspark_fast.losslessness.loop import LoopPair
from dspark_fast.losslessness.pairs import model_pair

COUPLED = {"verification": "coupled"}
DRAFTERS = {
    **{f"{head or 'no'}-head": ({"head": head}, {}) for head in ("vanilla", "gated", "rnn", None)},
    **{f"block-{block}": ({"block": block}, {}) for block in (1, 2, 5, 7)},
    "restricted-vocabulary": ({"vocabulary": (0, 2, 3)}, {}),
    "confidence-cut": ({"block": 4}, {"confidence_threshold": 0.5}),
    "all-cut-away": ({}, {"confidence_threshold": 1.0}),
    "without-markov": ({}, {"use_markov": False}),
}
CUTS = {"warm": {"temperature": 2.0}, "cut": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05}}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("pair", "options"), DRAFTERS.values(), ids=DRAFTERS)
def test_tokens_are_those_of_plain_gumbel_max(pair, options, cuts):
    for prompts, rows in ((((1, 3, 2),), 1), (RAGGED, 7), (RAGGED, 200)):
        made = LoopPair(partial(model_pair, **pair), 12, cuts, prompts=prompts, options=options, **COUPLED)
        seeds = torch.arange(rows) * 2**40 - 5
        assert torch.equal(speculated(made, seeds), gumbel_max(made, seeds))


def test_stop_tokens_too():
    made = LoopPair(partial(model_pair, block=5), 12, {"temperature": 2.0}, prompts=RAGGED, stop=1, **COUPLED)
    seeds = torch.arange(200)
    assert torch.equal(speculated(made, seeds), gumbel_max(made, seeds))


def test_a_drafter_that_is_never_right_changes_nothing():
    model, draft = model_pair()
    seeds = torch.arange(50)
    ids = torch.tensor([[1, 3, 2]]).expand(50, -1)
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_new_tokens": 9, "pad_token_id": 0}
    settings |= {"seed": seeds, **COUPLED}
    plain = dspark_fast.generate(model, None, ids, **settings)
    assert torch.equal(dspark_fast.generate(model, draft, ids, **settings), plain)


def test_the_checks_of_the_mutants_pass_without_a_fault():
    as_gumbel_max()
    alone_as_in_a_batch()


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_too():
    """In fp32; with the drafter in this package, and without."""
    model, draft, tokenizer = dspark_fast.load("HuggingFaceTB/SmolLM2-135M-Instruct", dtype=torch.float32)
    messages = [{"role": "user", "content": "Explain why the sky is blue to a ten-year-old."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "max_new_tokens": 40}
    given |= {"eos_token_id": None, "pad_token_id": 0}
    noise = GumbelMax(seed=[9], temperature=0.8, attention_mask=inputs["attention_mask"])
    plain = model.generate(**given, do_sample=False, logits_processor=[noise])
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": [9], **COUPLED}
    for drafter in (draft, None):
        assert torch.equal(dspark_fast.generate(model, drafter, **given, **settings), plain)
