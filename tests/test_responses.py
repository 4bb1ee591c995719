"""The target's own answers: what is asked, how it is decoded, how a run goes on and how processes share it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark_fast import generate
from dspark_fast.training import responses
from dspark_fast.training.prompts import is_held_out, make_prompt
from dspark_fast.training.recipe import Recipe, remember
from dspark_fast.training.responses import (
    conversation_ids,
    generate_responses,
    merge_parts,
    read_responses,
    stop_tokens,
)
from dspark_fast.training.workers import Workers


@pytest.fixture(scope="module")
def tokenizer(characters):
    return characters.tokenizer


@pytest.fixture(scope="module")
def model(make_target, characters):
    """Stops at ``<|end|>`` or ``e``, which its random text has often enough."""
    return characters.target(make_target)


def user(text, domain="chat", follow_ups=()):
    return make_prompt(domain, ({"role": "user", "content": text},), follow_ups)


@pytest.fixture(scope="module")
def prompts():
    """30 prompts of two domains, a fifth with follow-up questions."""
    made = []
    for n in range(30):
        follow_ups = ("Why?", "More.")[: 1 + n % 2] if n % 5 == 0 else ()
        made.append(user("Say " + "a word " * (n % 7) + str(n), "short" if n % 4 == 3 else "chat", follow_ups))
    return made


NAMES = {"batch_size": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def whole(model, tokenizer, prompts, tmp_path_factory):
    """All the prompts answered without interruption."""
    path = tmp_path_factory.mktemp("responses") / "responses.jsonl"
    told = []
    total = generate_responses(model, tokenizer, prompts, path, tokens=10**9, on_progress=told.append, **NAMES)
    return SimpleNamespace(path=path, total=total, told=told, rows={r.id: r for r in read_responses(path)})


# --- responses --------------------------------------------------------------------------------------------------------


def test_every_prompt_is_answered_once(whole, prompts):
    expected = [p.id if turn == 0 else f"{p.id}+{turn}" for p in prompts for turn in range(1 + len(p.follow_ups))]
    assert sorted(json.loads(line)["id"] for line in whole.path.read_text().splitlines()) == sorted(expected)
    own = sum(len(r.input_ids) - r.start for r in whole.rows.values())
    assert whole.total == whole.told[-1] == own
    assert whole.told == sorted(whole.told)
    assert whole.told[0] == 0


def test_answers_are_the_targets_own_and_follow_ups_have_a_history(whole, model, tokenizer, prompts):
    stops = stop_tokens(model)
    stopped = 0
    for prompt in prompts:
        messages = list(prompt.messages)
        for turn in range(1 + len(prompt.follow_ups)):
            row = whole.rows[prompt.id if turn == 0 else f"{prompt.id}+{turn}"]
            assert row.domain == prompt.domain
            assert row.held_out == is_held_out(prompt)
            assert row.greedy == (hashlib.sha256(prompt.id.encode()).digest()[0] % 4 != 0)
            text = conversation_ids(tokenizer, messages)
            assert row.input_ids[: row.start] == text
            answer = row.input_ids[row.start :]
            assert 1 <= len(answer) <= 12
            assert not stops & set(answer[:-1])
            stopped += answer[-1] in stops
            assert answer[-1] in stops or len(answer) == 12
            if row.greedy:
                ids = torch.tensor([text])
                plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
                assert answer == plain[0, len(text) :].tolist()
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            if turn < len(prompt.follow_ups):
                messages.append({"role": "user", "content": prompt.follow_ups[turn]})
    assert 2 < stopped < len(whole.rows)
    assert {row.greedy for row in whole.rows.values()} == {True, False}


def test_three_quarters_are_greedy():
    greedy = sum(responses._is_greedy(user(f"Question {n}")) for n in range(2000))
    assert 1440 < greedy < 1560  # 1,500, standard deviation 19


def test_the_rest_is_sampled_as_the_paper_does(model, tokenizer, prompts, tmp_path, monkeypatch):
    calls = []

    def watched(*args, **kwargs):
        calls.append(kwargs)
        return generate(*args, **kwargs)

    monkeypatch.setattr(responses, "generate", watched)
    generate_responses(model, tokenizer, prompts, tmp_path / "r.jsonl", tokens=10**9, seed=5, **NAMES)
    sampled = [call for call in calls if call["do_sample"]]
    assert {(call["temperature"], call["top_p"], call["top_k"]) for call in sampled} == {(0.7, 0.8, 20)}
    assert len({call["seed"] for call in sampled}) == len(sampled)
    assert all("temperature" not in call for call in calls if not call["do_sample"])


def test_it_stops_at_the_number_of_tokens(model, tokenizer, prompts, whole, tmp_path):
    path = tmp_path / "r.jsonl"
    total = generate_responses(model, tokenizer, prompts, path, tokens=60, **NAMES)
    rows = list(read_responses(path))
    assert 60 <= total == sum(len(r.input_ids) - r.start for r in rows) < 60 + 3 * 3 * 12
    assert path.read_text() == "".join(whole.path.read_text().splitlines(keepends=True)[: len(rows)])
    before = path.read_bytes()
    assert generate_responses(model, tokenizer, prompts, path, tokens=60, **NAMES) == total
    assert path.read_bytes() == before


def assert_the_same(path, whole):
    rows = list(read_responses(path))
    assert Counter(row.id for row in rows) == Counter(whole.rows.keys())
    for row in rows:
        theirs = whole.rows[row.id]
        assert (row.domain, row.greedy, row.held_out) == (theirs.domain, theirs.greedy, theirs.held_out)
        if row.greedy:
            assert row == theirs


@pytest.mark.parametrize("batches", [1, 4])
def test_an_interrupted_file_is_continued(model, tokenizer, prompts, whole, tmp_path, batches):
    path = tmp_path / "r.jsonl"
    calls = []

    def stop(tokens):
        calls.append(tokens)
        if len(calls) > batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_responses(model, tokenizer, prompts, path, tokens=10**9, on_progress=stop, **NAMES)
    kept = path.read_text()
    assert kept and whole.path.read_text().startswith(kept)
    assert generate_responses(model, tokenizer, prompts, path, tokens=10**9, **NAMES) > calls[-1]
    assert path.read_text().startswith(kept)
    assert_the_same(path, whole)


def test_a_file_cut_anywhere_is_continued(model, tokenizer, prompts, whole, tmp_path):
    """Also between an answer and the answer to its follow-up question; half a line is dropped."""
    lines = whole.path.read_bytes().splitlines(keepends=True)
    follow_up = next(n for n, line in enumerate(lines) if b'+1"' in line)
    for number, (count, half) in enumerate([(0, True), (follow_up, False), (follow_up, True), (len(lines) - 1, True)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(lines[:count]) + (lines[count][: len(lines[count]) // 2] if half else b""))
        generate_responses(model, tokenizer, prompts, path, tokens=10**9, **NAMES)
        assert path.read_bytes().startswith(b"".join(lines[:count]))
        assert_the_same(path, whole)


def test_a_prompt_given_twice_is_answered_once(model, tokenizer, tmp_path):
    twice = [user(f"Question {n % 5}") for n in range(10)]
    generate_responses(model, tokenizer, twice, tmp_path / "r.jsonl", tokens=10**9, **NAMES)
    assert len(list(read_responses(tmp_path / "r.jsonl"))) == 5


def test_read_responses(whole, tmp_path):
    assert list(read_responses(tmp_path / "none.jsonl")) == []
    path = tmp_path / "r.jsonl"
    good = whole.path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(good + good[:40])
    assert len(list(read_responses(path))) == 1
    assert path.read_bytes() == good + good[:40]
    assert len(list(read_responses(path, repair=True))) == 1
    assert path.read_bytes() == good
    path.write_bytes(good[:40])
    assert list(read_responses(path, repair=True)) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b"", b"5", b'{"id": "a"}', b'{"id": "caf\xe9"}', b"[1, 2, 3, 4, 5, 6]"], ids=repr
)
def test_a_bad_line_is_named(whole, tmp_path, bad):
    good = whole.path.read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "r.jsonl"
    path.write_bytes(good + bad + b"\n" + good)
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2 is not a response"):
        list(read_responses(path))


def test_stop_tokens():
    for given, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        assert stop_tokens(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=given))) == expected


# --- several workers --------------------------------------------------------------------------------------------------


@pytest.fixture
def share(model, tokenizer, prompts, tmp_path):
    """One worker's part of the answering; gives what it wrote."""
    path = tmp_path / "responses.jsonl"

    def work(rank, count, tokens=10**9, **options):
        told = []
        options = {**NAMES, "on_progress": told.append, **options}
        total = generate_responses(
            model, tokenizer, prompts, path, tokens=tokens, workers=Workers(rank, count), **options
        )
        rows = list(read_responses(path if count == 1 else tmp_path / f"responses.part-{rank}.jsonl"))
        return SimpleNamespace(total=total, told=told, rows=rows, own=sum(len(r.input_ids) - r.start for r in rows))

    work.path = path
    return work


@pytest.mark.parametrize("count", [2, 3])
def test_workers_share_the_prompts(share, whole, tmp_path, count):
    parts = [share(rank, count) for rank in range(count)]
    assert list(read_responses(share.path)) == []
    ids = [row.id for part in parts for row in part.rows]
    assert sorted(ids) == sorted(whole.rows)
    assert all(part.total == part.told[-1] == part.own > 0 for part in parts)
    of_a_prompt = [{row.id.split("+")[0] for row in part.rows} for part in parts]
    assert sum(map(len, of_a_prompt)) == len(set().union(*of_a_prompt))
    merge_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["responses.jsonl"]
    assert [row.id for row in read_responses(share.path)] == ids
    assert_the_same(share.path, whole)
    before = share.path.read_bytes()
    merge_parts(tmp_path)
    assert share.path.read_bytes() == before
    assert [share(rank, count).rows for rank in range(count)] == [[]] * count


def test_workers_together_reach_the_number_of_tokens(share, tmp_path):
    first = share(0, 1, 40).own
    assert first >= 40
    parts = [share(rank, 2, first + 61) for rank in range(2)]
    assert all(31 <= part.own < 31 + 3 * 3 * 12 for part in parts)
    assert all(part.total == first + part.own and part.told[0] == first for part in parts)
    assert [share(rank, 2, first + 61).rows for rank in range(2)] == [part.rows for part in parts]
    merge_parts(tmp_path)
    total = sum(len(r.input_ids) - r.start for r in read_responses(share.path))
    assert total == first + parts[0].own + parts[1].own
    assert share(1, 2, total).rows == []


def test_workers_sample_with_seeds_of_their_own(share, monkeypatch):
    seeds = []

    def watched(*args, **kwargs):
        seeds.append(kwargs["seed"])
        return generate(*args, **kwargs)

    monkeypatch.setattr(responses, "generate", watched)
    for rank in range(2):
        share(rank, 2)
    assert len(set(seeds)) == len(seeds) > 4


def test_a_workers_cut_part_is_continued(share, whole, tmp_path):
    complete = [share(rank, 2).rows for rank in range(2)]
    part = tmp_path / "responses.part-1.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    assert share(1, 2).rows[:4] == complete[1][:4]
    merge_parts(tmp_path)
    assert_the_same(share.path, whole)


@pytest.mark.parametrize("where", ["in a part", "in a line", "before a removal"])
def test_an_interrupted_merge_is_repeated_without_duplicates(share, whole, tmp_path, monkeypatch, where):
    for rank in range(3):
        share(rank, 3)
    if where == "before a removal":
        owner, name, left = Path, "unlink", [1]
    else:
        owner, name, left = responses, "_line", [len(whole.rows) // 2]
    real = getattr(owner, name)

    def interrupted(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*args)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_parts(tmp_path)
    monkeypatch.setattr(owner, name, real)
    there = share.path.read_bytes()
    assert there.count(b"\n") < len(whole.rows)
    assert list(tmp_path.glob("responses.part-*"))
    if where == "in a line":
        share.path.write_bytes(there[:-20])
    merge_parts(tmp_path)
    assert not list(tmp_path.glob("responses.part-*"))
    assert_the_same(share.path, whole)


@pytest.mark.parametrize(("before", "after", "merged"), [(4, 2, True), (2, 3, True), (3, 1, True), (3, 2, False)])
def test_another_number_of_workers_goes_on(share, whole, tmp_path, monkeypatch, before, after, merged):
    """No prompt is answered twice, if the parts of the run before are merged first; and none is kept twice, if not."""
    kept = [row for rank in range(before) for row in share(rank, before, 50).rows]
    assert 0 < len(kept) < len(whole.rows)
    if merged:
        merge_parts(tmp_path)
        assert not list(tmp_path.glob("responses.part-*"))
        asked, real = [], responses._answer
        monkeypatch.setattr(
            responses, "_answer", lambda *args: (asked.extend(prompt.id for prompt in args[2]), real(*args))[1]
        )
    for rank in range(after):
        share(rank, after)
    if merged:
        unfinished = {row.id.split("+")[0] for row in whole.rows.values()} - {row.id.split("+")[0] for row in kept}
        assert sorted(asked) == sorted(unfinished)
    merge_parts(tmp_path)
    assert not list(tmp_path.glob("responses.part-*"))
    assert_the_same(share.path, whole)


# --- whose answers a folder holds -------------------------------------------------------------------------------------


def test_a_folder_of_another_targets_answers_is_refused(make_target, tmp_path):
    model = make_target()
    recipe = Recipe(seed=3)
    remember(tmp_path, model, recipe)
    remember(tmp_path, model, recipe)
    with pytest.raises(ValueError, match="holds answers with seed 3, asked for is 4"):
        remember(tmp_path, model, Recipe(seed=4))
    other = make_target(fresh=True)
    with torch.no_grad():
        other.get_input_embeddings().weight[5, 5] += 1
    with pytest.raises(ValueError, match="holds answers with weights"):
        remember(tmp_path, other, recipe)
