"""The built-in prompts that training holds out, which drafters' cards tell the acceptance of."""

from __future__ import annotations

import pytest

from dspark_fast.evaluation import held_out, held_out_prompts
from dspark_fast.training.prompts import SHARES, is_held_out, make_prompt, training_prompts
from dspark_fast.training.responses import conversation_ids

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


def test_the_prompts_are_held_out_from_training(tokenizer):
    found = held_out_prompts(tokenizer, 2)
    assert [one.domain for one in found] == [domain for domain in SHARES for _ in range(2)]
    expected = {domain: [] for domain in SHARES}
    for prompt in training_prompts(0):
        if is_held_out(prompt) and len(expected[prompt.domain]) < 2:
            expected[prompt.domain].append(conversation_ids(tokenizer, list(prompt.messages)))
        if all(len(group) == 2 for group in expected.values()):
            break
    rows = [conversation_ids(tokenizer, list(one.messages)) for one in found]
    assert rows == [ids for group in expected.values() for ids in group]
    assert not any(one.follow_ups for one in found)
    text = tokenizer.decode(rows[0])
    assert text.startswith("<|start|> ") and text.endswith("<|start|> assistant >")  # thinking is off
    assert held_out_prompts(tokenizer, 2) == found != held_out_prompts(tokenizer, 2, seed=1)


def test_a_system_message_that_the_template_refuses_is_left_out(tokenizer, monkeypatch):
    system, question = {"role": "system", "content": "be brief"}, {"role": "user", "content": "the 5"}
    some = [make_prompt("chat", (system, question)), make_prompt("chat", (question,), ("why?",))]
    monkeypatch.setattr(held_out, "built_in_prompts", lambda per_domain, seed: some)
    taken = [one.messages for one in held_out_prompts(tokenizer, 1)]
    assert taken == [(system, question), (question,)]
    refuse = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", refuse + TEMPLATE)
    assert [one.messages for one in held_out_prompts(tokenizer, 1)] == [(question,), (question,)]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('nothing at all') }}")
    with pytest.raises(ValueError, match="nothing at all"):
        held_out_prompts(tokenizer, 1)


def test_prompts_that_cannot_be(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="per_domain is 0"):
        held_out_prompts(tokenizer, 0)
    monkeypatch.setattr(held_out, "SEARCH", 1000)
    with pytest.raises(ValueError, match="per_domain is 3: rewrite has 1 held-out prompts"):
        held_out_prompts(tokenizer, 3)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        held_out_prompts(tokenizer, 1)
