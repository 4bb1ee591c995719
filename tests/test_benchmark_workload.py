"""Prompts behind a longer context: so long exactly, and of other prompts' text alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dspark_fast.benchmark.workload import cases_of
from dspark_fast.evaluation import Prompt

TEXTS = {"maths": ("What is 1+1?", "And 2*3?"), "chat": ("Hello you!", "Why is that?")}


def sets_of(**texts):
    return {
        domain: [Prompt(f"{domain}-{n}", domain, ({"role": "user", "content": text},)) for n, text in enumerate(all_of)]
        for domain, all_of in texts.items()
    }


@pytest.fixture(params=[True, False], ids=["template", "no template"])
def encode(request, characters):
    """A token per character, with and without a chat template."""
    if request.param:
        return characters.tokenizer
    return lambda text: {"input_ids": characters.tokenizer.encode(text, add_special_tokens=False)}


@pytest.fixture
def shown(encode, characters):
    """``shown(sets, **options)``: the rows of all cases as text."""

    def decode(sets, **options):
        cases = cases_of(encode, sets, **{"batch": 1, "per_set": 2, "context": None, **options})
        return [characters.tokenizer.decode(list(row)) for case in cases for row in case.rows]

    return decode


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("context", [80, 97, 400])
def test_a_prompt_is_lengthened_by_the_text_of_others_alone(encode, shown, batch, context):
    """To so many tokens exactly, its own text standing at the end alone, however often the others' come round."""
    sets = sets_of(**TEXTS)
    cases = cases_of(encode, sets, batch=batch, per_set=2, context=context)
    assert {len(row) for case in cases for row in case.rows} == {context}
    order = [text for texts in TEXTS.values() for text in texts]
    if batch > 1:
        order = [text for turn in zip(*TEXTS.values()) for text in turn]
    short, long = shown(sets, batch=batch), shown(sets, batch=batch, context=context)
    for text, alone, row in zip(order, short, long, strict=True):
        others = [one for texts in TEXTS.values() for one in texts if one != text]
        assert row.count(text) == 1 and alone.count(text) == 1
        assert row.endswith(alone[alone.index(text) :])
        filler = row[: row.index(text)]
        assert filler.endswith("\n\n".join(others)[-40:] + "\n\n")
        if context == 400:
            assert all(filler.count(one) > 1 for one in others)


def test_a_prompt_that_is_there_twice_is_in_the_filler_of_neither(shown):
    again = "".join(["Twi", "ce?"])  # a string of its own, as two files give
    long = shown(sets_of(maths=("Twice?", "Once."), chat=(again,)), context=100)
    assert [row.count("Twice?") for row in long[::2]] == [1, 1] and long[1].count("Once.") == 1
    assert long[1].count("Twice?") > 1


def test_where_there_is_nothing_to_lengthen_a_prompt_with(encode):
    """Of that length it is taken as it is; a shorter one is refused."""
    question = "What is 1+1?"
    (alone,) = cases_of(encode, sets_of(maths=(question,)), batch=1, per_set=1, context=None)
    assert cases_of(encode, sets_of(maths=(question,)), batch=1, per_set=1, context=alone.width) == [alone]
    for texts in ((question,), (question, question), (question, "")):
        with pytest.raises(ValueError, match="context is 90, but no other prompt has text to begin 'maths-0' with"):
            cases_of(encode, sets_of(maths=texts), batch=1, per_set=1, context=90)


def test_earlier_messages_stay_where_they_are(characters):
    """Text goes before the question, not before what was said ahead of it."""
    asked = Prompt("a", "chat", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}))
    other = Prompt("b", "chat", ({"role": "user", "content": "Tell me."},))
    sets, tokenizer = {"chat": [asked, other]}, characters.tokenizer
    (short,) = cases_of(tokenizer, sets, batch=1, per_set=1, context=None)
    (long,) = cases_of(tokenizer, sets, batch=1, per_set=1, context=short.width + len("Tell me.\n\n"))
    before, after = (tokenizer.decode(list(case.rows[0])) for case in (short, long))
    assert "Be brief.<|end|>\n<|start|>user\nWho?" in before
    assert after == before.replace("Who?", "Tell me.\n\nWho?")


def test_a_prompt_that_the_template_refuses(characters):
    from jinja2 import TemplateError

    def refuse(*_, **__):
        raise TemplateError("no system role")

    tokenizer = SimpleNamespace(chat_template="there", apply_chat_template=refuse)
    with pytest.raises(ValueError, match="the chat template refuses the prompt 'chat-0': no system role"):
        cases_of(tokenizer, sets_of(chat=("Hello",)), batch=1, per_set=1, context=None)
