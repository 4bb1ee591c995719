"""Acceptance on held-out prompts, and the command that measures it."""

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
from dspark_fast.reference import draft_block
from dspark_fast.training import evaluate
from dspark_fast.training.evaluate import (
    Acceptance,
    HeldOut,
    held_out_prompts,
    mean_tau,
    measure_acceptance,
    with_mean,
)
from dspark_fast.training.prompts import SHARES, is_held_out, training_prompts
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

    monkeypatch.setattr(evaluate, "generate", watching)
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


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(make_target, make_draft, tokenizer, tmp_path_factory):
    """Folders of a pair."""
    folder = tmp_path_factory.mktemp("pair")
    model = make_target(
        fresh=True, vocab_size=WORDS + len(SPECIAL), max_position_embeddings=1024, eos_token_id=2, pad_token_id=3
    )
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(model, num_hidden_layers=1).save_pretrained(folder / "draft")
    return SimpleNamespace(target=folder / "target", draft=folder / "draft")


@pytest.fixture
def command(saved, monkeypatch):
    """``dspark-fast eval`` on the pair; an option given again overrides."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dspark_fast.cli import eval as module
    from dspark_fast.cli import session
    from dspark_fast.cli.app import app

    assert module  # importing it registers the command
    monkeypatch.setattr(session, "quiet", lambda: None)  # the other tests go on hearing transformers' remarks

    def run(*arguments):
        options = ["--model", saved.target, "--draft", saved.draft, "--dtype", "fp32", "--device", "cpu"]
        options += ["--per-domain", 1, "--max-new-tokens", 6, *arguments]
        return CliRunner().invoke(app, ["eval", *map(str, options)], env={"COLUMNS": "200"})

    return run


def as_json(result):
    """The one JSON object that standard output must be."""
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def one_sentence(result, text, code=2):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert text in flat
    assert "Traceback" not in flat


def test_json_and_file(command, saved, tokenizer, tmp_path):
    from dspark_fast import load

    report = as_json(command("--json", "--out", tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == report
    model, draft, _ = load(str(saved.target), draft=saved.draft, dtype=torch.float32, device="cpu", progress=False)
    results = with_mean(measure_acceptance(model, draft, held_out_prompts(tokenizer, 1), max_new_tokens=6))
    assert report["rows"] == [{**one.to_dict(), "predicted_speedup": None} for one in results]
    assert [row["domain"] for row in report["rows"]] == [*SHARES, "mean", "all"]
    assert report["mean_tau"] == mean_tau(results) and report["tau"] == results[-1].tau
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["device"]
    assert report["dtype"] == "fp32" and report["speed"] is None


def test_the_table(command):
    result = command()
    assert result.exit_code == 0, result.output
    head, *rest = result.stdout.splitlines()
    assert head.split() == ["domain", "prompts", "tau", *(word for n in range(1, 6) for word in ("slot", str(n)))]
    rows = [line.split() for line in rest if line.strip()]
    assert [row[0] for row in rows[:8]] == [*SHARES, "mean", "all"]
    assert all(len(row) == 8 for row in rows[:6]) and len(rows[6]) == 3
    assert rows[7][1] == "6"
    assert result.stdout.splitlines()[-1].startswith("greedy | up to 6 new tokens | fp32 | ")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_speed(command, tmp_path, temperature):
    prompts = lines(tmp_path / "prompts", {"prompt": "5 6", "domain": "one"}, {"prompt": "the 7", "domain": "two"})
    options = ["--prompts", prompts, "--speed", "--temperature", temperature, "--max-new-tokens", 12]
    report = as_json(command(*options, "--json"))
    assert [row["domain"] for row in report["rows"]] == ["one", "two", "all"] and report["mean_tau"] is None
    speed = report["speed"]
    assert speed["mode"] == ("coupled" if temperature else "greedy") and speed["identical"] is True
    ratio = speed["seconds_per_plain_step"] / sum(speed["seconds_per_round"].values())
    for row in report["rows"]:
        assert row["predicted_speedup"] == pytest.approx(row["tau"] * ratio)
    result = command(*options)
    assert result.exit_code == 0, result.output
    assert "predicted: tau x " in result.stdout and result.stdout.split("\n")[0].endswith(" predicted")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--per-domain", "0"], "Invalid value for '--per-domain'"),
        (["--per-domain", "many"], "Invalid value for '--per-domain'"),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--draft", "/no/such/folder"], "the drafter is '/no/such/folder', and there is no such folder"),
        (["--prompts", "nowhere.jsonl"], "Invalid value for '--prompts': no such file: nowhere.jsonl"),
        (["--out", "/no/such/folder/out.json"], "Invalid value for '--out'"),
        (["--max-new-tokens", "1020"], "more than the context of"),
    ],
    ids=str,
)
def test_bad_arguments(command, options, text):
    one_sentence(command(*options), text)


def test_prompts_that_are_none(command, tmp_path):
    one_sentence(command("--prompts", lines(tmp_path / "bad", {"text": "?"})), "bad:1: expected one of the keys")


def test_a_drafter_is_needed(saved, command):
    from typer.testing import CliRunner

    from dspark_fast.cli.app import app

    one_sentence(CliRunner().invoke(app, ["eval", "--model", str(saved.target)]), "no drafter is known for")


def test_a_target_without_a_chat_template(command, saved, tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(saved.target).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    one_sentence(command("--model", tmp_path), "has no chat template, which the prompts need")


def test_the_help_says_what_the_mean_is_and_does_not_wait_for_torch(tmp_path):
    import os
    import subprocess
    import sys

    code = (
        "import sys; from dspark_fast.cli import main\n"
        "try: main(['eval', '--help'])\n"
        "except SystemExit as end: print('status', end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True
    )
    assert done.stdout.endswith("status 0 False\n"), done.stderr
    assert "plain mean of tau over math, code, chat, list and short" in " ".join(done.stdout.split())
