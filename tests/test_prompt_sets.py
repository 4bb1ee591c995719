"""The prompts that ship for evaluation, and files in their format."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice

import pytest

from dspark_fast.evaluation import read_prompt_file, shipped_prompts
from dspark_fast.training.prompts import training_prompts


def words(text):
    """What two wordings have in common whatever their case, spaces and punctuation."""
    return " ".join(re.findall(r"[a-z0-9]+", text.casefold()))


def test_twenty_of_each_domain_all_different():
    found = shipped_prompts()
    assert Counter(one.domain for one in found) == {"maths": 20, "code": 20, "chat": 20}
    assert len({one.id for one in found}) == 60 == len({words(one.messages[0]["content"]) for one in found})
    for one in found:
        assert [message["role"] for message in one.messages] == ["user"]
        for turn in (one.messages[0]["content"], *one.follow_ups):
            assert turn.strip() == turn and 20 < len(turn) < 400
    assert Counter(len(one.follow_ups) for one in found if one.follow_ups) == {1: 9}  # a few of two turns
    assert all(any(one.follow_ups for one in found if one.domain == domain) for domain in ("maths", "code", "chat"))


def test_they_are_in_the_authors_format():
    from importlib import resources

    for domain in ("maths", "code", "chat"):
        lines = (resources.files("dspark_fast.prompts") / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            assert list(record) == ["id", "turns"] and record["id"] == f"{domain}-{number:02}"


def in_training(text, mine):
    """Prompts that a text contains, or that contain it."""
    text = words(text)
    return [one for one in mine if one in text or (len(text) > 15 and text in one)]


def test_no_training_prompt_has_one_of_them():
    mine = [words(turn) for one in shipped_prompts() for turn in (one.messages[0]["content"], *one.follow_ups)]
    for prompt in islice(training_prompts(0), 20_000):
        for text in (*(message["content"] for message in prompt.messages), *prompt.follow_ups):
            assert in_training(text, mine) == [], text
    assert in_training(f"Please: {shipped_prompts()[7].messages[0]['content'].upper()}", mine) == [mine[8]]
    assert in_training(mine[5][:30], mine)


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_every_form_of_a_prompt(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"turns": ["one", "two", "three"]},
        "\n",
        {"prompt": "four", "id": 7},
        {"question": "five", "domain": "other", "id": "q"},
        {"messages": [{"role": "system", "content": "six"}, {"role": "user", "content": "seven"}]},
    )
    turns, prompt, question, messages = read_prompt_file(str(path))
    assert (turns.domain, turns.id, turns.follow_ups) == ("mine", "mine-1", ("two", "three"))
    assert turns.messages == ({"role": "user", "content": "one"},)
    assert (prompt.domain, prompt.id) == ("mine", "7")
    assert (question.domain, question.id) == ("other", "q")
    assert (messages.id, [one["content"] for one in messages.messages]) == ("mine-5", ["six", "seven"])


def test_a_file_as_windows_writes_it(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff{"turns": ["Öl"]}\r\n\r\n{"turns": ["b\u2028c"]}\r\n'.encode())
    assert [(one.id, one.messages[0]["content"]) for one in read_prompt_file(path)] == [
        ("mine-1", "Öl"),
        ("mine-3", "b\u2028c"),
    ]


GOOD = '{"turns": ["a"]}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no prompt stands in it"),
        (GOOD + '{"turns": ["a"]\n', "mine.jsonl:2: not valid JSON"),
        (GOOD + "7\n", "mine.jsonl:2: expected a JSON object, found int"),
        ("\n" + '{"text": "a"}\n', "mine.jsonl:2: expected one of the keys"),
        (GOOD + '{"turns": "a"}\n', 'mine.jsonl:2: "turns" must be a non-empty list'),
        (GOOD + '{"turns": ["a", " "]}\n', r'mine.jsonl:2: "turns"\[1\] must be a non-empty string'),
        ('{"turns": ["a"], "domain": 3}\n', 'mine.jsonl:1: "domain" must be'),
        ('{"turns": ["a"], "id": ["x"]}\n', 'mine.jsonl:1: "id" must be a non-empty string or an integer'),
        ('{"turns": ["a"], "id": ""}\n', 'mine.jsonl:1: "id" must be'),
        ('{"turns": ["a"], "id": 1}\n{"turns": ["b"], "id": "1"}\n', "mine.jsonl:2: \"id\" '1' is that of line 1 too"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path, text, told):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_prompt_file(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(GOOD.encode() + b'{"turns": ["\xff"]}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl:2: not valid UTF-8"):
        read_prompt_file(path)
