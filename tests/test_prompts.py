"""The stream of training prompts: determinism, variety, proportions, and the reader of users' prompts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from dspark_fast.training.prompts import (
    SHARES,
    Prompt,
    is_excluded,
    is_held_out,
    make_prompt,
    read_prompts,
    training_prompts,
)

DEMONSTRATIONS = (
    "A train travels 60 km in 45 minutes. What is its average speed in km/h?",
    "Write a Python function that checks whether a string is a palindrome.",
    "Explain why the sky is blue to a ten-year-old.",
    "List ten fruits and their colours.",
    "What is the capital of France?",
)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return list(islice(training_prompts(seed=0), 5000))


def test_same_seed_gives_the_same_stream(prompts: list[Prompt]) -> None:
    assert list(islice(training_prompts(seed=0), 1000)) == prompts[:1000]
    other = {prompt.id for prompt in islice(training_prompts(seed=1), 1000)}
    assert len(other & {prompt.id for prompt in prompts[:1000]}) < 200


def test_no_duplicates(prompts: list[Prompt]) -> None:
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.messages[-1]["content"].casefold() for prompt in prompts}) == len(prompts)


def test_domains_keep_their_proportion(prompts: list[Prompt]) -> None:
    assert sum(SHARES.values()) == 50
    assert Counter(p.domain for p in prompts) == {domain: share * 100 for domain, share in SHARES.items()}
    assert Counter(p.domain for p in prompts[:50]) == SHARES


def test_prompts_are_well_formed(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        assert prompt.id.startswith(prompt.domain + "-")
        assert prompt.messages[-1]["role"] == "user"
        assert [message["role"] for message in prompt.messages[:-1]] in ([], ["system"])
        for text in (*(message["content"] for message in prompt.messages), *prompt.follow_ups):
            assert text.strip() == text
            assert 2 < len(text) < 3000
        if prompt.domain != "code":
            assert not set("{}") & set(prompt.messages[-1]["content"]), prompt


def test_some_chats_have_follow_ups(prompts: list[Prompt]) -> None:
    chats = [prompt for prompt in prompts if prompt.domain == "chat"]
    assert 0.12 < sum(bool(prompt.follow_ups) for prompt in chats) / len(chats) < 0.18


def test_openings_are_varied(prompts: list[Prompt]) -> None:
    openings = Counter(" ".join(p.messages[-1]["content"].casefold().split()[:3]) for p in prompts)
    assert len(openings) > 1000
    assert openings.most_common(1)[0][1] < 0.05 * len(prompts)


def test_held_out_share(prompts: list[Prompt]) -> None:
    assert 0.012 < sum(map(is_held_out, prompts)) / len(prompts) < 0.03
    prompt = prompts[0]
    assert is_held_out(prompt) == is_held_out(Prompt("other", "other", prompt.messages, ("More?",)))


@pytest.mark.parametrize("text", DEMONSTRATIONS)
def test_demonstrations_are_excluded(text: str) -> None:
    assert is_excluded(text)
    assert is_excluded(text.upper())


def test_stream_has_no_excluded_prompt(prompts: list[Prompt]) -> None:
    assert not any(is_excluded(prompt.messages[-1]["content"]) for prompt in prompts)


@pytest.mark.parametrize("text", ["Name a fruit.", "what's France's capital?", "Is 'racecar' a palindrome?"])
def test_rewordings_are_excluded(text: str) -> None:
    assert is_excluded(text)


def test_gsm8k_questions_are_used_once(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    questions = [f"Ann has {n} pears and eats one. How many are left?" for n in range(2, 60)]
    questions.append("Bob has 3 fruits and buys 4 more. How many does he have?")
    path.write_text("".join(json.dumps({"question": q, "answer": "#### 1"}) + "\n" for q in questions))
    texts = [p.messages[-1]["content"] for p in islice(training_prompts(seed=0, gsm8k=path), 800) if p.domain == "math"]
    for question in questions[:-1]:
        assert sum(text.startswith(question) for text in texts) == 1
    assert not any(text.startswith(questions[-1]) for text in texts)
    assert sum(text in questions for text in texts) > len(questions) / 3


def test_read_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    records = [
        {"prompt": "One?"},
        {"messages": messages},
        {"turns": ["Two?", "And then?"], "domain": "chat"},
        {"question": "Three?", "answer": "4"},
    ]
    path.write_text("\n\n".join(map(json.dumps, records)), encoding="utf-8")
    one, two, three, four = read_prompts(path)
    assert one == make_prompt("user", ({"role": "user", "content": "One?"},))
    assert two.messages == tuple(messages[:2])
    assert (three.domain, three.messages[-1]["content"], three.follow_ups) == ("chat", "Two?", ("And then?",))
    assert four.messages[-1]["content"] == "Three?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"text": "Hi"}', 'expected one of the keys "prompt", "messages", "turns" or "question"'),
        ('{"prompt": ""}', '"prompt" must be a non-empty string'),
        ('{"prompt": 3}', '"prompt" must be a non-empty string'),
        ('{"turns": []}', '"turns" must be a non-empty list of strings'),
        ('{"turns": ["a", 1]}', r'"turns"\[1\] must be a non-empty string'),
        ('{"messages": "Hi"}', '"messages" must be a non-empty list'),
        ('{"messages": ["Hi"]}', r'"messages"\[0\] must be an object'),
        ('{"messages": [{"role": "robot", "content": "Hi"}]}', "found 'robot'"),
        ('{"messages": [{"role": "user"}]}', '"content" must be a non-empty string'),
        ('{"messages": [{"role": "system", "content": "Hi"}]}', "must contain a user message"),
        ('{"prompt": "Hi", "domain": 1}', '"domain" must be a non-empty string'),
    ],
)
def test_read_prompts_names_the_file_and_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        list(read_prompts(path))
    assert f"{path}:2: " in str(caught.value)


def test_read_prompts_refuses_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('{"prompt": "fine"}\n{"prompt": "caf\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine\.jsonl:2: not valid UTF-8"):
        list(read_prompts(path))
