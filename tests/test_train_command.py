"""All stages of training, as a function and as ``dspark-fast train``: what they leave and what they go on from."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open

from dspark_fast import DSparkDraft, generate
from dspark_fast.training import evaluate, features, responses
from dspark_fast.training.prompts import is_held_out, make_prompt
from dspark_fast.training.recipe import Recipe, collect, measure
from dspark_fast.training.responses import read_responses
from dspark_fast.training.trainer import Trainer


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(features, "GROUP", 4)
    monkeypatch.setattr(features, "TOGETHER", 3)


@pytest.fixture(scope="module")
def tokenizer(characters):
    return characters.tokenizer


@pytest.fixture(scope="module")
def model(make_target, characters):
    return characters.target(make_target)


def held_out_questions(count):
    """Those of so many questions that are held out: short ones, which are answered first."""
    asked = (make_prompt("chat", ({"role": "user", "content": f"Q{n}"},)) for n in range(count))
    return [prompt.messages[0]["content"] for prompt in asked if is_held_out(prompt)]


def test_collect_and_measure(model, tokenizer, make_draft, tmp_path, monkeypatch):
    """Built-in prompts follow the user's own; every usable response is kept; live or cached, they are the same ones."""
    mine = tmp_path / "mine.jsonl"
    asked = [*held_out_questions(200), *(f"Question {n}?" for n in range(60))]
    mine.write_text("".join(json.dumps({"turns": [text, "Why?"]}) + "\n" for text in asked))
    draft, told, out = make_draft(model), [], tmp_path / "out"
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)

    def collected(**changes):
        recipe = Recipe(**{"tokens": 2500, "max_new_tokens": 16, **changes})
        given = {"prompt_files": [mine], "on_progress": lambda *figures: told.append(figures)}
        return collect(model, tokenizer, out, recipe, draft.config.target_layer_ids, **given)

    live = collected(live=True)
    assert not (out / "features").exists()
    parts = collected()
    rows = list(read_responses(out / "responses.jsonl"))
    assert sum(len(r.input_ids) - r.start for r in rows) >= 2500
    assert {stage for stage, _, _ in told} == {"responses", "features"}
    assert told[-1] == ("features", len(rows), len(rows))
    for chosen, batches, others in zip((False, True), parts, live):
        wanted = [r for r in rows if r.held_out == chosen]
        assert len(wanted) >= 2
        assert [name["id"] for name in batches.source.cache.names] == [r.id for r in wanted]
        assert batches.source.identity() == others.source.identity()
        assert len(batches) == len(others)
        assert torch.equal(batches[0].input_ids, others[0].input_ids)
    with pytest.raises(ValueError, match=r"train was made for something else|held-out was made for something else"):
        collect(model, tokenizer, out, Recipe(tokens=2500, max_new_tokens=16), [0, 1])

    two = [make_prompt("chat", ({"role": "user", "content": text},)) for text in ("One?", "Two?")]
    monkeypatch.setattr(evaluate, "_built_in", lambda count, seed: two)
    results = measure(model, tokenizer, draft, out)
    saved = json.loads((out / "acceptance.json").read_text())
    assert [(one["domain"], one["prompts"]) for one in saved] == [(one.domain, one.prompts) for one in results]
    assert results[-1].prompts == 2 and saved[-1]["tau"] == pytest.approx(results[-1].tau)


@pytest.fixture
def command(model, tokenizer, tmp_path, monkeypatch):
    """``dspark-fast train`` on a saved target; gives the exit status."""
    pytest.importorskip("typer")
    import matplotlib.figure

    from dspark_fast.cli import main

    folder = tmp_path / "target"
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mine = tmp_path / "mine.jsonl"
    chosen = [*held_out_questions(300), *(f"Question {n}?" for n in range(700))]
    mine.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
    # Looking through the package's own prompts for held-out ones takes seconds.
    monkeypatch.setattr(
        evaluate, "_built_in", lambda count, seed: [make_prompt("chat", ({"role": "user", "content": "Hi"},))] * count
    )
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path, **_: path.write_bytes(b"\x89PNG"))

    def run(*arguments, out=tmp_path / "out"):
        settings = {
            "--model": folder, "--out": out, "--tokens": 900, "--max-new-tokens": 14, "--prompts": mine, "--layers": 1,
            "--block-size": 3, "--rank": 4, "--taps": "2,0", "--steps": 4, "--sequences": 2, "--anchors": 4,
            "--save-every": 2, "--evaluate-every": 2, "--per-domain": 1, "--vocabulary": 50,
        }  # fmt: skip
        settings.update(zip(arguments[::2], arguments[1::2]))
        with pytest.raises(SystemExit) as ended:
            main(["train", *[str(part) for pair in settings.items() for part in pair]])
        return ended.value.code or 0

    run.out = tmp_path / "out"
    return run


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_train_on_the_command_line(command, model, tmp_path, monkeypatch):
    assert command() == 0
    out = command.out
    assert steps_of(out) == [1, 2, 3, 4]
    twin = type(model).from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    draft = DSparkDraft.from_pretrained(out / "draft", target=twin)
    assert (draft.config.block_size, draft.config.markov_rank, draft.config.target_layer_ids) == (3, 4, [0, 2])
    ids = torch.tensor([[5, 6, 7]])
    result = generate(twin, draft, ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert result.stats.rounds >= 1
    card = (out / "draft" / "README.md").read_text()
    tau = json.loads((out / "acceptance.json").read_text())[-1]["tau"]
    assert f"| all | 1 | {tau:.2f} |" in card
    assert (out / "draft" / "training.png").is_file()
    with safe_open(out / "checkpoint.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "4"

    files = ["responses.jsonl", "metrics.jsonl", "draft/model.safetensors", "acceptance.json"]
    files += sorted(str(path.relative_to(out)) for path in (out / "features").rglob("*") if path.is_file())
    before = {name: (out / name).read_bytes() for name in files}

    def never(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "_update", never)
    monkeypatch.setattr(features, "target_states", never)
    monkeypatch.setattr(responses, "_answer", never)
    assert command() == 0
    assert {name: (out / name).read_bytes() for name in files} == before


@pytest.mark.parametrize("stage", ["responses", "features", "training"])
def test_ctrl_c_leaves_what_the_next_run_goes_on_from(command, monkeypatch, stage):
    owner, name, calls = {
        "responses": (responses, "_answer", 1),
        "features": (features, "target_states", 2),
        "training": (Trainer, "_update", 3),
    }[stage]
    real, made = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        made.append(args)
        if len(made) > calls:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    assert command() == 130
    assert not (command.out / "draft").exists()
    monkeypatch.setattr(owner, name, real)
    assert command() == 0
    assert steps_of(command.out) == [1, 2, 3, 4]
    ids = [r.id for r in read_responses(command.out / "responses.jsonl")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--taps", "1,x"), "--taps is '1,x'"),
        (("--prompts", "nowhere.jsonl"), "no such file: nowhere.jsonl"),
        (("--tokens", 20, "--max-new-tokens", 2), "--tokens is too small"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(command, capfd, arguments, message):
    assert command(*arguments) == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())
