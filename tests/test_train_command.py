"""All stages of training, as a function and as ``dspark-fast train``: what they leave and what they go on from."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open

from dspark_fast import DSparkDraft, generate
from dspark_fast.config import DSparkConfig
from dspark_fast.evaluation import MEAN_OF, evaluate, held_out
from dspark_fast.training import features, responses
from dspark_fast.training import recipe as stages
from dspark_fast.training.preflight import accepted, preflight
from dspark_fast.training.prompts import is_held_out, make_prompt
from dspark_fast.training.recipe import Recipe, collect, measure, remember
from dspark_fast.training.responses import read_responses
from dspark_fast.training.trainer import Trainer, TrainSettings


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

    # --sequences is of the training batches alone: figures on held-out text are of the same batches
    narrow, same = collected(train=TrainSettings(sequences=1))
    assert len(narrow[0]) == 1 and len(same) == len(parts[1])
    assert torch.equal(same[0].input_ids, parts[1][0].input_ids)
    # a part of what is there is read, and more is written with all of it
    some = draft.config.target_layer_ids[1:]
    recipe = Recipe(tokens=1 + sum(len(r.input_ids) - r.start for r in rows), max_new_tokens=16)
    train, _ = collect(model, tokenizer, out, recipe, some, prompt_files=[mine])
    width = model.config.hidden_size
    assert torch.equal(train[0].features, parts[0][0].features[..., width:])
    assert len(train.source.lengths) > len(parts[0].source.lengths)
    manifest = json.loads((out / "features" / "train" / "manifest.json").read_text())
    assert manifest["target_layer_ids"] == draft.config.target_layer_ids
    with pytest.raises(ValueError, match="held-out was made for something else"):
        collect(model, tokenizer, out, recipe, [-1, 0])

    monkeypatch.setattr(stages, "NEW_TOKENS", 8)
    asked = [make_prompt(name, ({"role": "user", "content": f"{name}?"},), ("And?",)) for name in ("rewrite", *MEAN_OF)]
    monkeypatch.setattr(held_out, "built_in_prompts", lambda count, seed: asked)
    results = measure(model, tokenizer, draft, out, on_progress=lambda *figures: told.append(figures))
    saved = json.loads((out / "acceptance.json").read_text())
    assert saved == [one.to_dict() for one in results] and not list(out.glob(".acceptance*"))
    assert [(one.domain, one.prompts) for one in results[:-2]] == [(one.domain, 1) for one in asked]
    assert [(one.domain, one.prompts) for one in results[-2:]] == [("mean", 5), ("all", 6)]
    # What dspark-fast eval says of the same prompts: greedy, first turns alone.
    whole = evaluate(model, draft, tokenizer, asked, first_turns=True, max_new_tokens=8, mean_of=MEAN_OF)
    assert (results[-2].tau, results[-1].tau) == (whole.mean_tau, whole.pooled.tau)
    assert results[-1].rounds == whole.pooled.rounds and told[-1] == ("measure", 6, 6)


@pytest.fixture
def command(model, tokenizer, tmp_path, monkeypatch):
    """``dspark-fast train`` on a saved target; gives the exit status."""
    pytest.importorskip("typer")
    import matplotlib.figure

    from dspark_fast.cli import main, session

    folder = tmp_path / "target"
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mine = tmp_path / "mine.jsonl"
    chosen = [*held_out_questions(300), *(f"Question {n}?" for n in range(700))]
    mine.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
    # Looking through the package's own prompts for held-out ones takes seconds.
    hello = make_prompt("chat", ({"role": "user", "content": "Hi"},))
    monkeypatch.setattr(held_out, "built_in_prompts", lambda count, seed: [hello] * count)
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

    run.out, run.said = tmp_path / "out", []
    monkeypatch.setattr(session, "note", run.said.append)
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


def test_a_step_without_a_full_block_has_no_tau(command, capfd):
    assert command("--block-size", 16, "--sequences", 1, "--vocabulary", 0) == 0
    rows = [json.loads(line) for line in (command.out / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tau"] is None for row in rows)  # answers end after 14 tokens
    assert steps_of(command.out) == [1, 2, 3, 4]


def test_what_belongs_to_a_fresh_drafter_cannot_go_with_a_given_one(command, capfd):
    assert command("--draft", "somewhere", "--initialise", "random") == 2
    found = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert "--layers, --block-size, --rank, --taps, --initialise cannot go with --draft" in found


def test_the_command_line_under_torchrun(monkeypatch):
    from dspark_fast.cli import train

    monkeypatch.setattr("sys.argv", ["/a/dspark-fast", "train", "--model", "a b"])
    assert train._command(1) == "dspark-fast train --model 'a b'"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert train._command(4) == "torchrun --nproc-per-node 4 --no-python dspark-fast train --model 'a b'"
    assert train._command(8).startswith("torchrun --nnodes 2 --nproc-per-node 4 --no-python dspark-fast train ")


# --- before the first stage -------------------------------------------------------------------------------------------


@pytest.fixture
def look(model, tokenizer, tmp_path):
    """``preflight`` of a recipe and a drafter's shape."""

    def run(shape=None, per_domain=1, workers=1, **changes):
        config = DSparkConfig.from_target(model.config, **{"target_layer_ids": [0, 2], **(shape or {})})
        preflight(model, tokenizer, tmp_path, Recipe(**changes), config, per_domain=per_domain, workers=workers)

    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initialise": "zeros"}, "initialise is 'zeros': accepted are 'target' and 'random'"),
        ({"train": TrainSettings(top_tokens=1000)}, r"top_tokens is 1000, and the vocabulary has \d+ tokens"),
        (
            {"train": TrainSettings(heads_only=True), "shape": {"markov_rank": 0, "enable_confidence_head": False}},
            "heads_only is set, but the drafter has neither",
        ),
        ({"per_domain": 100_000}, "per_domain is 100000"),
    ],
    ids=["initialise", "top", "heads", "prompts"],
)
def test_what_cannot_be_is_said_before_any_work(look, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(held_out, "SEARCH", 1500)
    with pytest.raises(ValueError, match=message):
        look(**changes)
    assert not list(tmp_path.iterdir())


def test_a_context_in_which_the_last_stage_would_not_fit(look, model, monkeypatch):
    monkeypatch.setattr(held_out, "SEARCH", 1500)
    look()
    monkeypatch.setattr(model.config, "max_position_embeddings", 200)
    with pytest.raises(ValueError, match="with 128 new ones, which is more than the context of the target, 200"):
        look()


def test_a_drafter_of_another_target_is_told_first(model, tokenizer, tmp_path):
    config = DSparkConfig.from_target(model.config, target_layer_ids=[0, 2])
    config.vocab_size += 1
    with pytest.raises(ValueError, match="vocab_size"):
        preflight(model, tokenizer, tmp_path, Recipe(), config)


def test_chat_templates_that_refuse(look, tokenizer, monkeypatch):
    """System messages can be done without; anything else cannot."""
    monkeypatch.setattr(held_out, "SEARCH", 1500)
    whole = tokenizer.chat_template
    refusal = "{{% if messages[0].role == '{}' %}}{{{{ raise_exception('not here') }}}}{{% endif %}}"
    monkeypatch.setattr(tokenizer, "chat_template", refusal.format("system") + whole)
    look()
    user, system = {"role": "user", "content": "Who?"}, {"role": "system", "content": "Be brief."}
    bare, under = make_prompt("chat", (user,)), make_prompt("chat", (system, user))
    assert list(accepted(tokenizer, [bare, under, bare])) == [bare, bare]
    monkeypatch.setattr(tokenizer, "chat_template", refusal.format("user") + whole)
    with pytest.raises(ValueError, match=r"refuses the prompt 'Who\?': not here"):
        list(accepted(tokenizer, [under, bare]))
    with pytest.raises(ValueError, match="chat template refuses the prompt"):
        look()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        look()


def test_features_and_checkpoints_of_something_else(command, look, tmp_path, monkeypatch):
    """What an earlier run left is compared before a token is generated, and a part of its features will do."""
    monkeypatch.setattr(held_out, "SEARCH", 1500)
    assert command("--top-tokens", 3) == 0
    monkeypatch.setattr(responses, "_answer", lambda *_: pytest.fail("generated"))
    command_says = [
        (("--taps", "0,1"), r"held-out was made for something else: it holds the target's layers [0, 2], not [1]"),
        (("--top-tokens", 4), "top_tokens is 3, asked for is 4"),
        (("--top-tokens", 2), "made with other settings: top_tokens was 3, is 2"),
        (("--top-tokens", 3, "--steps", 9), "made with other settings: steps was 4, is 9"),
        (("--top-tokens", 3, "--rank", 5), "made with other settings: markov_rank was 4, is 5"),
        (("--top-tokens", 3, "--tokens", 5000), "to go on with it, or delete it to train anew on more"),
        (("--top-tokens", 3, "--max-new-tokens", 15), "holds answers with max_new_tokens 14, asked for is 15"),
    ]
    for arguments, message in command_says:
        command.said.clear()
        assert command(*arguments) == 2
        assert message in command.said[-1], arguments
    assert command("--top-tokens", 3) == 0


def test_whose_answers_they_are(model, tmp_path, make_target, characters):
    """A fine-tune is told apart by any layer; a target whose folder was moved is the same."""
    made_for = remember(tmp_path, model, Recipe())
    twin = characters.target(make_target)
    twin.load_state_dict(model.state_dict())
    twin.config._name_or_path = "elsewhere"
    again = remember(tmp_path, twin, Recipe())
    assert again.pop("target_model_name_or_path") == "elsewhere"
    assert again == {key: made_for[key] for key in again}
    with torch.no_grad():
        twin.model.layers[2].mlp.up_proj.weight[0, 3] += 0.1
    with pytest.raises(ValueError, match="holds answers with weights"):
        remember(tmp_path, twin, Recipe())
    (tmp_path / "run.json").write_text(json.dumps({"target": "x", "weights": "y", "max_new_tokens": 192, "seed": 0}))
    with pytest.raises(ValueError, match="earlier version of this package"):
        remember(tmp_path, model, Recipe())
