"""An evaluation against rounds replayed by hand: the definitions, conversations, seeds, and going on after a stop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from dspark_fast import AutoregressiveDrafter, first_layers
from dspark_fast.engine.taps import tapped
from dspark_fast.evaluation import Evaluation, Prompt, answering, evaluate
from dspark_fast.evaluation.rows import fingerprint
from dspark_fast.reference import draft_block
from dspark_fast.training.responses import conversation_ids, stop_tokens

BLOCK, NEW = 5, 20
TEXTS = {
    "maths": ["what is 7 x 8?", "add 3 and 4.", "halve 90."],
    "chat": ["tell me a tale of two cats and the sea", "and now?"],
}


def asked(domain, number, *follow_ups):
    message = {"role": "user", "content": TEXTS[domain][number]}
    return Prompt(f"{domain}-{number}", domain, (message,), follow_ups)


@pytest.fixture(scope="module")
@torch.no_grad()
def pair(make_target, make_draft, characters):
    """A drafter that knows which token mostly follows which; prompts of two domains, mixed, two of several turns."""
    size = len(characters.tokenizer)
    few = {"num_hidden_layers": 3, "max_position_embeddings": 4096, "initializer_range": 0.15}
    model = make_target(fresh=True, vocab_size=size, **few)
    draft = make_draft(model, markov_rank=size, num_hidden_layers=1, target_layer_ids=[0, 1])
    prompts = [
        asked("maths", 0),
        asked("chat", 0),
        asked("maths", 1, "why?"),
        asked("chat", 1, "go on", "more!"),
        asked("maths", 2),
    ]
    follows = torch.zeros(size, size)
    for prompt in prompts:
        ids = conversation_ids(characters.tokenizer, list(prompt.messages))
        text = endless(model, ids, 4 * NEW)[len(ids) :]
        known = list(pairwise(text))
        if prompt is prompts[0]:
            model.generation_config.eos_token_id = [2, int(text[11])]  # it can be drafted
        else:
            known = [one for number, one in enumerate(known) if number % 3]  # so that it is wrong at times
        for a, b in known:
            follows[b, a] += 1
    draft.markov_head.markov_w1.weight.copy_(torch.eye(size))
    draft.markov_head.markov_w2.weight.copy_(1000 * follows)
    return SimpleNamespace(model=model, draft=draft, tokenizer=characters.tokenizer, prompts=prompts)


def endless(model, ids, new):
    """Plain greedy text that no stop token ends."""
    ids, mask = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)
    never = model.config.vocab_size + 1
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=never)[0]


def run(pair, drafter=None, prompts=None, **settings):
    drafter = pair.draft if drafter is None else drafter
    prompts = pair.prompts if prompts is None else prompts
    return evaluate(pair.model, drafter, pair.tokenizer, prompts, **{"max_new_tokens": NEW, **settings})


@torch.no_grad()
def by_hand(pair, ids):
    """Rounds of greedy speculation replayed on plain greedy text: (drafts judged, accepted, length); and the answer."""
    stops, row = stop_tokens(pair.model), endless(pair.model, ids, NEW + BLOCK + 2)
    with tapped(pair.model, pair.draft.config.target_layer_ids) as taps:
        pair.model.get_decoder()(input_ids=row[None], use_cache=False)
        seen = taps.take()
    text, rounds, at = row.tolist(), [], len(ids)
    while text[at] not in stops and at - len(ids) + 1 < NEW:
        drafts = draft_block(pair.draft, seen[:, :at], row[at][None]).tokens[0].tolist()
        right = 0
        while right < BLOCK and drafts[right] == text[at + 1 + right]:
            right += 1
        committed = text[at + 1 : at + 2 + right]
        stop = next((place for place, token in enumerate(committed) if token in stops), None)
        if stop is not None and stop < right:  # an accepted draft ends it: no bonus, and nothing proposed behind it
            rounds.append((stop + 1, stop + 1, stop + 1))
        else:
            rounds.append((BLOCK, right, right + 1))
        if stop is not None:
            at += stop + 1
            break
        at += right + 1
    return rounds, text[len(ids) : min(at + 1, len(ids) + NEW)]


def figures(rounds):
    """The authors' definitions, written down once more."""
    proposed = [sum(n > k for n, _, _ in rounds) for k in range(BLOCK)]
    survived = [sum(hits > k for _, hits, _ in rounds) / proposed[k] for k in range(BLOCK)]
    lengths = sum(length for _, _, length in rounds)
    drafts = sum(n for n, _, _ in rounds)
    return lengths / len(rounds), drafts / len(rounds), lengths / (drafts + len(rounds)), survived


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_definitions_on_rounds_replayed_by_hand(pair, batch_size):
    expected = {"maths": [], "chat": []}
    answers, lengths = {}, {}
    for prompt in pair.prompts:
        messages = list(prompt.messages)
        for question in (None, *prompt.follow_ups):
            if question is not None:  # the model's own answer is the history of the next question
                reply = pair.tokenizer.decode(answers[prompt.id][-1], skip_special_tokens=True)
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
            rounds, answer = by_hand(pair, conversation_ids(pair.tokenizer, messages))
            expected[prompt.domain] += rounds
            answers.setdefault(prompt.id, []).append(answer)
            lengths.setdefault(prompt.id, []).append(tuple(length for _, _, length in rounds))
    pooled = expected["maths"] + expected["chat"]
    # The case is there in which the definitions differ from simpler ones, and tau is not the mean of prompts' means.
    assert any(n == length <= BLOCK and n == hits for n, hits, length in pooled)
    assert len({length for _, _, length in pooled}) > 3

    told = []
    result = run(pair, batch_size=batch_size, on_progress=told.append)
    assert told == {1: [0, 1, 2, 3, 4, 5], 2: [0, 2, 3, 5]}[batch_size]
    assert [(name, counts.prompts) for name, counts in result.domains.items()] == [("maths", 3), ("chat", 2)]
    assert [one.id for one in result.prompts] == [prompt.id for prompt in pair.prompts]
    for one in result.prompts:
        assert one.lengths == tuple(lengths[one.id])
        assert one.new_tokens == tuple(map(len, answers[one.id]))
    for counts, rounds in ((result.pooled, pooled), *((result.domains[name], expected[name]) for name in expected)):
        tau, proposals, rate, survived = figures(rounds)
        assert counts.rounds == len(rounds)
        assert (counts.tau, counts.proposals, counts.verify_rate) == pytest.approx((tau, proposals, rate))
        assert counts.survival == pytest.approx(survived)
        ratios = [now / last if last else math.nan for last, now in pairwise([1, *survived])]
        assert counts.conditional == pytest.approx(ratios, nan_ok=True)
    assert result.mean_tau == pytest.approx((figures(expected["maths"])[0] + figures(expected["chat"])[0]) / 2)


def test_first_turns_alone(pair):
    whole, first = run(pair), run(pair, first_turns=True)
    assert [len(one.lengths) for one in whole.prompts] == [1, 1, 2, 3, 1]
    assert [one.lengths for one in first.prompts] == [one.lengths[:1] for one in whole.prompts]
    assert first.pooled.rounds == sum(one.rounds for one in first.prompts)


def same(a, b):
    """But for the batch size, which is a setting."""
    return replace(a, batch_size=1) == replace(b, batch_size=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_batch_nor_company_changes_a_prompt(pair, temperature):
    settings = {"temperature": temperature, "max_new_tokens": 10}
    alone = run(pair, **settings, batch_size=1)
    assert same(alone, run(pair, **settings, batch_size=4))
    one = run(pair, prompts=pair.prompts[3:4], **settings)
    assert one.prompts == alone.prompts[3:4]
    again = run(pair, prompts=pair.prompts[::-1], **settings)
    assert again.prompts == alone.prompts[::-1] and again.pooled == alone.pooled
    if temperature:
        assert run(pair, prompts=pair.prompts[:2], **settings, seed=1).prompts != alone.prompts[:2]
        twins = [replace(pair.prompts[1], id=name) for name in ("a", "b")]
        a, b = run(pair, prompts=twins, **settings).prompts
        assert a.lengths != b.lengths


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_the_law_is_the_bare_targets(pair, temperature, monkeypatch):
    """What the model's own configuration says of cuts and penalties counts for nothing."""
    bare = run(pair, temperature=temperature, seed=3)
    theirs = {"top_p": 0.01, "top_k": 1, "min_p": 0.99, "repetition_penalty": 5.0, "temperature": 0.1}
    for name, value in theirs.items():
        monkeypatch.setattr(pair.model.generation_config, name, value)
    assert run(pair, temperature=temperature, seed=3) == bare


@pytest.mark.parametrize("make", [lambda model: first_layers(model, 2), "drafter"])
def test_an_autoregressive_drafter_by_the_same_definitions(pair, make):
    if make == "drafter":
        drafter = AutoregressiveDrafter(first_layers(pair.model, 3), block_size=3)  # all layers: the target itself
    else:
        drafter = make(pair.model)
    result = run(pair, drafter=drafter)
    assert result.block_size == (3 if make == "drafter" else 5)
    greedy = run(pair)
    assert [one.new_tokens for one in result.prompts] == [one.new_tokens for one in greedy.prompts]  # lossless
    if make == "drafter":  # it is always right
        assert result.pooled.survival == (1.0, 1.0, 1.0)
        assert 3 < result.pooled.tau <= 4 and result.pooled.verify_rate < 1  # less where a draft ends an answer
    assert same(result, run(pair, drafter=drafter, batch_size=1))


def test_rows_of_like_length_go_together(pair, monkeypatch):
    batches, generate = [], answering.generate

    def watching(model, drafter, ids, *, attention_mask, **settings):
        batches.append(attention_mask.sum(1).tolist())
        assert (attention_mask.diff(dim=1) >= 0).all()  # padded on the left
        return generate(model, drafter, ids, attention_mask=attention_mask, **settings)

    monkeypatch.setattr(answering, "generate", watching)
    run(pair, first_turns=True, max_new_tokens=2, batch_size=2)
    lengths = {one.id: len(conversation_ids(pair.tokenizer, list(one.messages))) for one in pair.prompts}
    maths, chat = (sorted(n for name, n in lengths.items() if name.startswith(domain)) for domain in TEXTS)
    assert batches == [maths[:2], maths[2:], chat]  # no batch has two domains


def test_the_drafters_own_settings(pair):
    cut = run(pair, confidence_threshold=0.5)
    assert cut.pooled.proposals < 4 < run(pair).pooled.proposals
    assert cut.pooled.verify_rate == cut.pooled.committed / (sum(cut.pooled.proposed) + cut.pooled.rounds)
    assert run(pair, use_markov=False).pooled.tau < run(pair).pooled.tau


# --- going on after a stop --------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Calls of ``generate``, counted."""
    made, generate = [], answering.generate
    monkeypatch.setattr(answering, "generate", lambda *a, **k: made.append(1) or generate(*a, **k))
    return made


def test_a_stopped_run_goes_on_and_gives_the_same(pair, tmp_path, calls):
    settings = {"batch_size": 2, "max_new_tokens": 4}
    whole = {T: run(pair, temperature=T, rows=tmp_path / "whole", **settings) for T in (0.0, 1.0)}
    assert whole[0.0] == run(pair, temperature=0.0, **settings)
    everything = (tmp_path / "whole").read_bytes()
    told = []
    for T, result in whole.items():  # all of it is there: nothing is decoded
        before = len(calls)
        assert run(pair, temperature=T, rows=tmp_path / "whole", on_progress=told.append, **settings) == result
        assert len(calls) == before
    assert told == [5, 5] and (tmp_path / "whole").read_bytes() == everything

    ends = [at + 1 for at, byte in enumerate(everything) if byte == ord("\n")]
    assert len(ends) == 7  # the settings, and three batches at each temperature
    # The last has a half line that is longer than what comes in its place.
    cuts = [everything[:size] for size in (3, ends[0], ends[1], ends[3] - 1, ends[4] + 2, ends[6] - 1)]
    for number, begun in enumerate([*cuts, everything[: ends[5]] + b'{"temperature": ' + b"9" * 9999]):
        rows = tmp_path / f"cut-{number}"
        rows.write_bytes(begun)
        kept = max(begun.count(b"\n") - 1, 0)
        seen = []
        for T, result in whole.items():
            before = []
            assert run(pair, temperature=T, rows=rows, on_progress=before.append, **settings) == result
            seen += before[1:]
        assert len(seen) == 6 - kept  # no batch that was whole was decoded again
        assert rows.read_bytes() == everything


def test_an_interrupt_loses_the_batch_under_way_at_most(pair, tmp_path):
    rows, settings = tmp_path / "rows", {"batch_size": 2, "max_new_tokens": 4}
    expected = run(pair, temperature=1.0, **settings)

    def stop(done):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(pair, temperature=1.0, rows=rows, on_progress=stop, **settings)
    assert len(rows.read_text().splitlines()) == 3
    told = []
    assert run(pair, temperature=1.0, rows=rows, on_progress=told.append, **settings) == expected
    assert told == [3, 5]


def test_other_settings_are_refused(pair, tmp_path, make_draft):
    rows = tmp_path / "rows"
    run(pair, rows=rows, max_new_tokens=4, prompts=pair.prompts[:2])
    before = rows.read_bytes()
    other = replace(pair.prompts[1], messages=({"role": "user", "content": "hi"},))
    trained = make_draft(pair.model)
    drafters = {"drafter": trained}
    for name, change in {
        "seed was 0 and is 7": {"seed": 7},
        "max_new_tokens was 4 and is 5": {"max_new_tokens": 5},
        "batch_size was 8 and is 3": {"batch_size": 3},
        "confidence_threshold was 0.0 and is 0.5": {"confidence_threshold": 0.5},
        "use_markov was True and is False": {"use_markov": False},
        "prompts was '2, ": {"prompts": [pair.prompts[0], other]},
        "drafter was 'DSparkDraft, block size 5, ": drafters,
    }.items():
        with pytest.raises(ValueError, match="begun with other settings") as error:
            run(pair, rows=rows, **{"max_new_tokens": 4, "prompts": pair.prompts[:2], **change})
        said = str(error.value)
        assert name in said and said.count(";") == ("; prompt_ids was " in said) == ("prompts" in change)
    assert rows.read_bytes() == before
    with torch.no_grad():
        first = fingerprint(trained)
        trained.norm.weight[3] += 1e-4
    assert fingerprint(trained) != first


def test_what_changes_the_tokens_unasked_is_noted_too(pair, tmp_path, monkeypatch):
    """Tokenizer and chat template, by the prompts' ids; and what answers take from the model's own configuration."""
    rows, asked = tmp_path / "rows", {"max_new_tokens": 4, "prompts": pair.prompts[:3]}
    result, whole = run(pair, rows=rows, **asked), run(pair, prompts=pair.prompts[:3])
    template, config = pair.tokenizer.chat_template, pair.model.generation_config
    # One that every prompt sees, and one that the third prompt's second turn alone does.
    other = template.replace("{% for m", "{% if messages|length > 1 %}Again: {% endif %}{% for m")
    for change, told in (
        ((pair.tokenizer, "chat_template", "Hi. " + template), "prompt_ids was '"),
        ((pair.tokenizer, "chat_template", other), "prompt_ids was '"),
        ((config, "eos_token_id", 2), f"stop_tokens was {sorted(config.eos_token_id)} and is [2]"),
        ((config, "no_repeat_ngram_size", 1), "generation was {} and is {'no_repeat_ngram_size': 1}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            assert run(pair, prompts=pair.prompts[:3]) != whole
            with pytest.raises(ValueError, match="begun with other settings") as error:
                run(pair, rows=rows, **asked)
        assert told in str(error.value) and ";" not in str(error.value)
    monkeypatch.setattr(config, "top_k", 7)  # answers are by the bare law
    monkeypatch.setattr(config, "eos_token_id", config.eos_token_id[::-1])
    assert run(pair, rows=rows, **asked) == result


def test_a_file_that_does_not_note_all_of_it_is_refused(pair, tmp_path):
    """Of an earlier version: nothing says by which chat template its rows were made."""
    rows, asked = tmp_path / "rows", {"max_new_tokens": 4, "prompts": pair.prompts[:2]}
    run(pair, rows=rows, **asked)
    header, line = rows.read_text().splitlines()[:2]
    settings = json.loads(header)["settings"]
    del settings["prompt_ids"]
    rows.write_text(json.dumps({"settings": settings}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"\(prompt_ids was not noted and is '[^;]*\): give"):
        run(pair, rows=rows, **asked)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda lines: ['{"my": "own file"}'], "not a file of this evaluation's rows"),
        (lambda lines: ["a note"], "not a file of this evaluation's rows"),
        (lambda lines: ['{"settings": {]}'], ":1: not the settings of an evaluation"),
        (lambda lines: [lines[0], "{}", lines[1]], r":2: not a row of an evaluation \('prompts'\)"),
        (lambda lines: [lines[0], lines[1][:-9], lines[1]], ":2: not a row of an evaluation"),
    ],
)
def test_a_file_that_is_not_its_own_is_left_alone(pair, tmp_path, spoil, told):
    rows = tmp_path / "rows"
    run(pair, rows=rows, max_new_tokens=4, prompts=pair.prompts[:2])
    spoilt = "\n".join(spoil(rows.read_text().splitlines())) + "\n"
    rows.write_text(spoilt)
    with pytest.raises(ValueError, match=told):
        run(pair, rows=rows, max_new_tokens=4, prompts=pair.prompts[:2])
    assert rows.read_text() == spoilt


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_bad_arguments_before_any_work(pair, tmp_path, calls, monkeypatch):
    one = pair.prompts[:1]
    for change, told in (
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": one + one}, "two prompts of the domain 'maths' have the id 'maths-0'"),
        ({"max_new_tokens": 4090}, "'maths-0' of the domain 'maths' may have 4124 tokens with 4090 new ones, which is"),
        ({"prompts": pair.prompts, "max_new_tokens": 1400}, "may have .* tokens with 1400 new ones in each of 3 turns"),
        ({"drafter": first_layers(pair.model, 2), "use_markov": False}, "settings of a DSparkDraft"),
        ({"rows": tmp_path / "nowhere" / "rows"}, "rows cannot be written: it is a folder, or in none"),
        ({"rows": tmp_path}, "cannot be written: it is a folder, or in none"),
    ):
        with pytest.raises(ValueError, match=told):
            run(pair, **{"rows": tmp_path / "rows", "prompts": one, **change})
    with pytest.raises(ValueError, match="the drafter is None"):
        evaluate(pair.model, None, pair.tokenizer, one)
    monkeypatch.setattr(pair.tokenizer, "chat_template", "{{ raise_exception('no talk') }}")
    with pytest.raises(ValueError, match="refuses the prompt 'what is 7 x 8\\?': no talk"):
        run(pair, prompts=one)
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        run(pair, prompts=one)
    assert not calls and not list(tmp_path.iterdir())


def test_json_and_back(pair):
    result = run(pair, temperature=1.0, mean_of=("maths",))
    data = json.loads(json.dumps(result.to_dict()), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert Evaluation.from_dict(data) == result
    assert data["domains"]["maths"]["tau"] == data["mean_tau"] == result.domains["maths"].tau
