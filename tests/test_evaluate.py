"""Acceptance on the prompts that training holds out, as drafters' cards tell it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from dspark_fast import generate
from dspark_fast.engine.taps import tapped
from dspark_fast.evaluation import answering
from dspark_fast.reference import draft_block
from dspark_fast.training import evaluate
from dspark_fast.training.evaluate import (
    Acceptance,
    HeldOut,
    held_out_prompts,
    held_out_questions,
    mean_tau,
    measure_acceptance,
    with_mean,
)
from dspark_fast.training.prompts import SHARES, is_held_out, make_prompt, training_prompts
from dspark_fast.training.responses import conversation_ids

BLOCK = 5
VOCABULARY = 97
SPECIAL = ("<unk>", "<|start|>", "<|end|>", "<pad>")
WORDS = 200
TEMPLATE = (
    "{% for m in messages %}{% if 'forbidden' in m.content %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|start|> {{ m.role }} {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant{% if enable_thinking is false %} >{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word; the few words that it knows are numbered, the rest are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["user", "assistant", "system", ">", "the", "a", "of", "in", *map(str, range(WORDS - 8))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *words))}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|start|>"],
        chat_template=TEMPLATE,
    )


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
@torch.no_grad()
def measured(make_target, make_draft):
    """A drafter that knows which token mostly follows which, and prompts of two domains, mixed, of many lengths."""
    torch.manual_seed(0)
    model = make_target(fresh=True)
    draft = make_draft(model, markov_rank=VOCABULARY, enable_confidence_head=False)
    domains = ("math", "chat", "math", "chat", "math")
    prompts = [
        HeldOut(domain, torch.randint(1, VOCABULARY, (length,)).tolist()) for domain, length in zip(domains, LENGTHS)
    ]
    greedy = []
    follows = torch.zeros(VOCABULARY, VOCABULARY)
    for one in prompts:
        ids = torch.tensor([one.input_ids])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
        for a, b in list(pairwise(row))[len(one.input_ids) :][::2]:  # half of it, so that it is wrong at times
            follows[b, a] += 1
        greedy.append(row)
    draft.markov_head.markov_w1.weight.copy_(torch.eye(VOCABULARY))
    draft.markov_head.markov_w2.weight.copy_(1000 * follows)
    return SimpleNamespace(model=model, draft=draft, prompts=prompts, greedy=greedy)


LENGTHS = (7, 4, 12, 9, 5)
NEW = 24


@torch.no_grad()
def counted_by_hand(measured, one, row):
    """Rounds of greedy speculation replayed on the plain greedy text: how much each commits."""
    draft = measured.draft
    with tapped(measured.model, draft.config.target_layer_ids) as taps:
        measured.model.get_decoder()(input_ids=row[None], use_cache=False)
        seen = taps.take()
    lengths, at = [], len(one.input_ids)
    while at - len(one.input_ids) + 1 < NEW:
        drafts = draft_block(draft, seen[:, :at], row[at][None]).tokens[0].tolist()
        right = 0
        while right < BLOCK and drafts[right] == row[at + 1 + right]:
            right += 1
        lengths.append(right + 1)
        at += right + 1
    return lengths


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_acceptance_is_pooled_over_rounds(measured, batch_size):
    lengths = {"math": [], "chat": []}
    for one, row in zip(measured.prompts, measured.greedy):
        lengths[one.domain] += counted_by_hand(measured, one, row)
    told = []
    results = measure_acceptance(
        measured.model,
        measured.draft,
        iter(measured.prompts),
        max_new_tokens=NEW,
        batch_size=batch_size,
        on_progress=told.append,
    )
    assert told == {1: [1, 2, 3, 4, 5], 2: [2, 3, 5], 8: [3, 5]}[batch_size]  # no batch has two domains
    assert [(r.domain, r.prompts) for r in results] == [("math", 3), ("chat", 2), ("all", 5)]
    for result in results:
        pooled = lengths["chat"] + lengths["math"] if result.domain == "all" else lengths[result.domain]
        assert len(set(pooled)) > 2  # the drafter is right at times, and wrong at times
        assert result.rounds == len(pooled)
        assert result.tau == pytest.approx(sum(pooled) / len(pooled))
        for slot, share in enumerate(result.by_position):
            reached = sum(length > slot for length in pooled)
            right = sum(length > slot + 1 for length in pooled)
            assert share == pytest.approx(right / reached, abs=6e-4) if reached else math.isnan(share)


def test_rows_of_like_length_go_together(measured, monkeypatch):
    batches = []

    def watching(model, draft, ids, *, attention_mask, **kwargs):
        batches.append(attention_mask.sum(1).tolist())
        assert (attention_mask.diff(dim=1) >= 0).all()  # padded on the left
        return generate(model, draft, ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(answering, "generate", watching)
    measure_acceptance(measured.model, measured.draft, measured.prompts, max_new_tokens=2, batch_size=2)
    assert batches == [[5, 7], [12], [4, 9]]


def test_sampling_has_a_seed_for_each_prompt(measured):
    """Whatever the batch; and two prompts that are the same are not answered with the same noise."""

    def sampled(prompts, batch_size, temperature=0.8):
        found = measure_acceptance(
            measured.model,
            measured.draft,
            prompts,
            max_new_tokens=12,
            temperature=temperature,
            batch_size=batch_size,
        )
        return [one.to_dict() for one in found]

    alone = sampled(measured.prompts, 1)
    assert alone == sampled(measured.prompts, 3)
    assert alone != sampled(measured.prompts, 1, temperature=0.0)
    twins = [replace(measured.prompts[0], domain=domain) for domain in ("a", "b")]
    a, b, _ = sampled(twins, 1)
    assert (a["tau"], a["by_position"], a["rounds"]) != (b["tau"], b["by_position"], b["rounds"])


def test_nothing_to_measure(measured):
    (nothing,) = measure_acceptance(measured.model, measured.draft, [])
    assert (nothing.domain, nothing.prompts, nothing.rounds) == ("all", 0, 0) and math.isnan(nothing.tau)
    assert nothing.to_dict()["tau"] is None and nothing.to_dict()["by_position"] == [None] * BLOCK
    with pytest.raises(ValueError, match="batch_size is 0"):
        measure_acceptance(measured.model, measured.draft, measured.prompts, batch_size=0)


def test_the_mean_is_over_five_domains_and_all_of_them():
    taus = {"math": 2.0, "code": 3.0, "chat": 1.0, "list": 4.0, "short": 1.5, "rewrite": 9.0, "all": 5.0}
    results = [Acceptance(domain, 4, tau, [0.5], 10) for domain, tau in taus.items()]
    assert mean_tau(results) == pytest.approx(2.3)
    *rest, mean, last = with_mean(results)
    assert [*rest, last] == results
    assert mean == Acceptance("mean", 20, pytest.approx(2.3), [], 50)
    assert math.isnan(mean_tau(results[1:]))
    assert with_mean(results[1:]) == results[1:]


# --- its prompts ------------------------------------------------------------------------------------------------------


def test_the_prompts_are_held_out_from_training(tokenizer):
    found = held_out_prompts(tokenizer, 2)
    assert [one.domain for one in found] == [domain for domain in SHARES for _ in range(2)]
    expected = {domain: [] for domain in SHARES}
    for prompt in training_prompts(0):
        if is_held_out(prompt) and len(expected[prompt.domain]) < 2:
            expected[prompt.domain].append(conversation_ids(tokenizer, list(prompt.messages)))
        if all(len(group) == 2 for group in expected.values()):
            break
    assert [one.input_ids for one in found] == [ids for group in expected.values() for ids in group]
    text = tokenizer.decode(found[0].input_ids)
    assert text.startswith("<|start|> ") and text.endswith("<|start|> assistant >")  # thinking is off
    assert held_out_prompts(tokenizer, 2) == found != held_out_prompts(tokenizer, 2, seed=1)
    questions = held_out_questions(tokenizer, 2)
    assert [conversation_ids(tokenizer, list(one.messages)) for one in questions] == [one.input_ids for one in found]
    assert not any(one.follow_ups for one in questions)


def test_a_system_message_that_the_template_refuses_is_left_out(tokenizer, monkeypatch):
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "the 5"}
    some = [make_prompt("chat", (system, question)), make_prompt("chat", (question,), ("why?",))]
    monkeypatch.setattr(evaluate, "built_in_prompts", lambda per_domain, seed: some)
    taken = [one.messages for one in held_out_questions(tokenizer, 1)]
    assert taken == [(system, question), (question,)]
    refuse = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", refuse + TEMPLATE)
    assert [one.messages for one in held_out_questions(tokenizer, 1)] == [(question,), (question,)]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('nothing at all') }}")
    with pytest.raises(ValueError, match="nothing at all"):
        held_out_questions(tokenizer, 1)


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_ones_own_prompts_are_all_taken_and_alone(tokenizer, tmp_path):
    one = lines(tmp_path / "one", {"prompt": "the 5"}, {"turns": ["7 8", "9"], "domain": "math"})
    two = lines(tmp_path / "two", *({"prompt": f"of {n}"} for n in range(30)))
    found = held_out_prompts(tokenizer, 1, prompt_files=[one, two])
    assert [one.domain for one in found] == ["user", "math", *["user"] * 30]
    assert tokenizer.decode(found[1].input_ids) == "<|start|> user 7 8 <|end|> <|start|> assistant >"


def test_prompts_that_cannot_be(tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="per_domain is 0"):
        held_out_prompts(tokenizer, 0)
    monkeypatch.setattr(evaluate, "SEARCH", 1000)
    with pytest.raises(ValueError, match="per_domain is 3: rewrite has 1 held-out prompts"):
        held_out_prompts(tokenizer, 3)
    with pytest.raises(ValueError, match="no prompt stands in"):
        held_out_prompts(tokenizer, 1, prompt_files=[lines(tmp_path / "empty")])
    with pytest.raises(ValueError, match=r"refuses the prompt 'forbidden fruit': no such talk"):
        held_out_prompts(tokenizer, 1, prompt_files=[lines(tmp_path / "bad", {"prompt": "forbidden fruit"})])
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        held_out_prompts(tokenizer, 1)
