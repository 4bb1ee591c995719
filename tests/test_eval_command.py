"""``dspark-fast eval``: which prompts, which drafter, what is shown and kept, and what is refused."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from dspark_fast import load
from dspark_fast.cli import eval as module
from dspark_fast.cli import session
from dspark_fast.cli.app import app
from dspark_fast.evaluation import MEAN_OF, Evaluation, evaluate, held_out_prompts, read_prompt_file, shipped_prompts
from dspark_fast.evaluation.lock import alone
from dspark_fast.training.prompts import SHARES

TURNS = [{"turns": ["5 + 6?", "sure?"], "domain": "one"}, {"turns": ["the moon, the stars"], "domain": "two"}]


@pytest.fixture(scope="module")
def saved(make_target, make_draft, characters, tmp_path_factory):
    """Folders of a pair, of a smaller target, and a file of two prompts."""
    folder = tmp_path_factory.mktemp("pair")
    size = {"vocab_size": len(characters.tokenizer), "max_position_embeddings": 4096, "pad_token_id": 3}
    model = make_target(fresh=True, num_hidden_layers=3, eos_token_id=2, **size)
    small = make_target(fresh=True, num_hidden_layers=1, eos_token_id=2, **size)
    for name, one in (("target", model), ("small", small)):
        one.save_pretrained(folder / name)
        characters.tokenizer.save_pretrained(folder / name)
    draft = make_draft(model, num_hidden_layers=1, target_layer_ids=[0, 1])
    draft.save_pretrained(folder / "draft")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(one) + "\n" for one in TURNS))
    return SimpleNamespace(
        target=folder / "target", draft=folder / "draft", small=folder / "small", prompts=prompts, folder=folder
    )


@pytest.fixture
def command(saved, monkeypatch):
    """``dspark-fast eval`` of the pair on the two prompts; an option given again overrides."""
    assert module  # importing it registers the command
    monkeypatch.setattr(session, "quiet", lambda: None)  # the other tests go on hearing transformers' remarks

    def run(*arguments, prompts=(saved.prompts,), draft=saved.draft):
        options = ["--model", saved.target, "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", 4]
        options += [word for path in prompts for word in ("--prompts", path)]
        options += ["--draft", draft] if draft else []
        return CliRunner().invoke(app, ["eval", *map(str, (*options, *arguments))], env={"COLUMNS": "80"})

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


def pair_of(saved):
    return load(str(saved.target), draft=saved.draft, dtype=torch.float32, device="cpu", progress=False)


def test_json_says_what_evaluate_finds(command, saved, tmp_path):
    settings = ["--seed", 3, "--confidence-threshold", 0.4, "--no-markov", "--batch-size", 1]
    report = as_json(command("--json", "--out", tmp_path / "out.json", *settings))
    assert json.loads((tmp_path / "out.json").read_text()) == report
    model, draft, tokenizer = pair_of(saved)
    prompts = read_prompt_file(saved.prompts)
    for found, temperature in zip(report["results"], (0.0, 1.0), strict=True):
        expected = evaluate(
            model,
            draft,
            tokenizer,
            prompts,
            temperature=temperature,
            max_new_tokens=4,
            seed=3,
            confidence_threshold=0.4,
            use_markov=False,
            batch_size=1,
        )
        assert Evaluation.from_dict(found) == expected
        assert [len(one["lengths"]) for one in found["prompts"]] == [2, 1]  # the second turn too
    assert report["prompts"] == [str(saved.prompts)] and report["dtype"] == "fp32" and report["speed"] is None
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["device"]
    assert report["model"] == str(saved.target)
    assert re.fullmatch(rf"{re.escape(str(saved.draft))} \([0-9a-f]{{8}}\)", report["draft"])


def test_the_tables(command):
    result = command()
    assert result.exit_code == 0, result.output
    blocks = [block.splitlines() for block in result.stdout.split("\n\n")]
    assert [block[0].strip() for block in blocks[:2]] == ["temperature 0 (greedy)", "temperature 1"]
    for block in blocks[:2]:
        assert block[2].split() == ["domain", "prompts", "rounds", "tau", "proposed", "rate", "slot", *"12345"]
        rows = [line.split() for line in block[3:] if line.strip()]
        assert [(row[0], row[1]) for row in (rows[0], rows[1], rows[3])] == [("one", "1"), ("two", "1"), ("all", "2")]
        assert rows[2][0] == "mean" and len(rows[2]) == 2
        assert all(len(row) == 11 for row in (rows[0], rows[1], rows[3]))
        assert all(len(line.rstrip()) <= 80 for line in block)
    assert " | up to 4 new tokens | seed 0 | fp32 | " in blocks[2][0]


def test_temperatures_are_as_asked_and_in_order(command):
    report = as_json(command("--json", "--temperature", 0.8, "--temperature", 0, "--temperature", 0.8))
    assert [one["temperature"] for one in report["results"]] == [0.0, 0.8]


def test_first_turns(command):
    (found,) = as_json(command("--json", "--temperature", 0, "--first-turns"))["results"]
    assert [len(one["lengths"]) for one in found["prompts"]] == [1, 1]


def test_the_shipped_prompts_are_the_default(command):
    report = as_json(command("--json", "--temperature", 0, "--max-new-tokens", 1, "--batch-size", 60, prompts=()))
    (found,) = report["results"]
    assert report["prompts"] == "shipped" and list(found["domains"]) == ["maths", "code", "chat"]
    assert [one["id"] for one in found["prompts"]] == [one.id for one in shipped_prompts()]
    assert found["mean_tau"] is None and found["pooled"]["rounds"] == 0  # the prefill's token is of no round


def test_the_held_out_prompts(command, saved):
    report = as_json(command("--json", "--held-out", "--per-domain", 1, "--temperature", 0, prompts=()))
    (found,) = report["results"]
    assert report["prompts"] == "held-out, 1 per domain" and list(found["domains"]) == list(SHARES)
    model, draft, tokenizer = pair_of(saved)
    expected = evaluate(model, draft, tokenizer, held_out_prompts(tokenizer, 1), max_new_tokens=4, mean_of=MEAN_OF)
    assert Evaluation.from_dict(found) == expected
    # The command that train writes on a drafter's card asks for them so.
    assert as_json(command("--json", "--per-domain", 1, "--temperature", 0, prompts=()))["results"] == [found]


@pytest.mark.parametrize(("options", "block"), [(["--first-layers", 2], 5), (["--autoregressive", "small"], 3)])
def test_an_autoregressive_drafter(command, saved, options, block):
    options = [saved.small if one == "small" else one for one in options]
    options += ["--block-size", block] if block != 5 else []
    report = as_json(command("--json", "--temperature", 0, *options, draft=None))
    (found,) = report["results"]
    assert found["block_size"] == block == len(found["pooled"]["conditional"])
    assert found["pooled"]["rounds"] > 0
    assert report["draft"] == ("the target's first 2 layers" if block == 5 else str(saved.small))
    plain = as_json(command("--json", "--temperature", 0))["results"][0]  # the answers are the target's own
    assert [one["new_tokens"] for one in found["prompts"]] == [one["new_tokens"] for one in plain["prompts"]]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_speed(command, temperature):
    options = ["--speed", "--temperature", temperature, "--max-new-tokens", 8]
    report = as_json(command(*options, "--json"))
    (speed,), (found,) = report["speed"], report["results"]
    assert speed["mode"] == ("coupled" if temperature else "greedy") and speed["identical"] is True
    ratio = speed["seconds_per_plain_step"] / sum(speed["seconds_per_round"].values())
    assert list(speed["predicted"]) == ["one", "two", "mean", "all"]
    for domain, counts in found["domains"].items():
        assert speed["predicted"][domain] == pytest.approx(counts["tau"] * ratio)
    assert speed["predicted"]["all"] == pytest.approx(found["pooled"]["tau"] * ratio)
    result = command(*options)
    assert result.exit_code == 0, result.output
    assert "predicted: tau x " in result.stdout and result.stdout.splitlines()[2].endswith(" predicted")


# --- going on, plots --------------------------------------------------------------------------------------------------


def test_an_interrupted_command_goes_on(command, tmp_path, monkeypatch):
    from dspark_fast.evaluation import answering

    options = ["--batch-size", 1, "--json"]
    expected = as_json(command(*options))
    generate, made = answering.generate, []

    def interrupted(*arguments, **settings):
        made.append(1)
        if len(made) == 5:  # the second turn of the first batch at temperature 1
            raise KeyboardInterrupt
        return generate(*arguments, **settings)

    monkeypatch.setattr(answering, "generate", interrupted)
    stopped = command(*options, "--out", tmp_path / "run.json")
    assert stopped.exit_code == 130 and "the same command goes on from there" in " ".join(stopped.stderr.split())
    assert not (tmp_path / "run.json").exists()
    assert len((tmp_path / "run.rows.jsonl").read_text().splitlines()) == 3
    assert as_json(command(*options, "--out", tmp_path / "run.json")) == expected
    assert len(made) == 5 + 3  # that batch again, and the last one
    one_sentence(command("--seed", 1, *options, "--out", tmp_path / "run.json"), "(seed was 0 and is 1)")


def test_the_object_is_written_whole_or_not_at_all(command, tmp_path, monkeypatch):
    import os

    out = tmp_path / "run.json"
    out.write_text("of before\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        one_sentence(command("--json", "--out", out), "No space left on device", code=1)
    assert out.read_text() == "of before\n"
    report = as_json(command("--json", "--out", out))
    assert json.loads(out.read_text()) == report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.rows.jsonl"]


def test_a_second_run_on_the_same_file_is_refused_at_once(command, unloaded, tmp_path):
    with alone(tmp_path / "run.rows.jsonl"):
        for name in ("run.json", "run.txt"):  # they keep the same rows
            one_sentence(command("--out", tmp_path / name), "is writing", code=1)
        assert list(tmp_path.iterdir()) == [tmp_path / "run.rows.jsonl.lock"]
    result = command("--out", tmp_path / "run.json")
    assert isinstance(result.exception, Loaded)  # it goes on
    assert not list(tmp_path.iterdir())


def test_the_lock_is_held_to_the_end(command, tmp_path, monkeypatch):
    from dspark_fast import evaluation

    real, seen = evaluation.evaluate, []

    def looking(*arguments, **settings):
        seen.append((tmp_path / "run.rows.jsonl.lock").is_file())
        return real(*arguments, **settings)

    monkeypatch.setattr(evaluation, "evaluate", looking)
    as_json(command("--json", "--out", tmp_path / "run.json"))
    assert seen == [True, True]


def test_plots(command, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "plots"
    result = command("--plots", folder)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == ["eval_positions.png", "eval_tau.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_a_folder_of_plots_is_tried_before_the_run(command, unloaded, tmp_path, monkeypatch):
    """Also where it is there: root may write in every folder, and not on every file system."""
    pytest.importorskip("matplotlib")

    def refused(dir):
        raise PermissionError(13, "Permission denied")

    assert isinstance(command("--plots", tmp_path / "new").exception, Loaded) and (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    one_sentence(command("--plots", tmp_path / "file"), "where no plot can be written: File exists")
    monkeypatch.setattr(module.tempfile, "TemporaryFile", refused)
    one_sentence(command("--plots", tmp_path), "where no plot can be written: Permission denied")


def test_plots_without_matplotlib(command, tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    one_sentence(command("--plots", tmp_path), 'pip install "dspark-fast[plots]"')


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--per-domain", "0"], "Invalid value for '--per-domain'"),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--temperature", "inf"], "inf is not a finite number"),
        (["--held-out"], "your own prompts or the held-out ones, not both"),
        (["--draft", "/no/such/folder"], "the drafter is '/no/such/folder', and there is no such folder"),
        (["--first-layers", "2"], "--draft and --first-layers are given: accepted is one drafter"),
        (["--block-size", "3"], "--block-size is 3: it is for --autoregressive and --first-layers"),
        (["--prompts", "nowhere.jsonl"], "Invalid value for '--prompts': no such file: nowhere.jsonl"),
        (["--out", "/no/such/folder/out.json"], "Invalid value for '--out'"),
        (["--out", "/dev/null"], "Invalid value for '--out': /dev/null cannot be written: it is no file"),
        (["--plots", "/dev/null/plots"], "--plots is /dev/null/plots, where no plot can be written: Not a directory"),
        (["--max-new-tokens", "4090"], "more than the context of"),
    ],
    ids=str,
)
def test_bad_arguments(command, options, text):
    one_sentence(command(*options), text)


def test_layers_that_there_are_not(command):
    one_sentence(command("--first-layers", 4, draft=None), "layers is 4: accepted is 1 to 3")


def test_settings_that_an_autoregressive_drafter_does_not_have(command):
    one_sentence(command("--first-layers", 2, "--no-markov", draft=None), "settings of a DSparkDraft")


class Loaded(Exception):
    """A model would be loaded now."""


@pytest.fixture
def unloaded(monkeypatch):
    """Whatever loads a model ends there."""
    from dspark_fast import evaluation

    def load_pair(*arguments, **settings):
        raise Loaded

    monkeypatch.setattr(evaluation, "load_pair", load_pair)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "?"}', "bad:2: expected one of the keys"),
        ('{"turns": ["what?"]', "bad:2: not valid JSON"),
        ('{"turns": ["what?"], "id": []}', 'bad:2: "id" must be'),
    ],
)
def test_a_broken_line_is_told_before_a_model_is_loaded(command, saved, unloaded, tmp_path, line, told):
    (tmp_path / "bad").write_text(f'{{"prompt": "hi"}}\n{line}\n')
    one_sentence(command(prompts=[saved.prompts, tmp_path / "bad"]), told)


def test_one_name_in_two_files(command, saved, unloaded):
    one_sentence(command(prompts=[saved.prompts, saved.prompts]), "two prompts of the domain 'one' have the id")


def test_a_drafter_is_needed(command):
    one_sentence(command(draft=None), "no drafter is known for")


def test_a_target_without_a_chat_template(command, saved, tmp_path):
    import shutil

    shutil.copytree(saved.target, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink()
    one_sentence(command("--model", tmp_path / "target"), "has no chat template, which the prompts need")


def test_the_help_says_what_the_figures_are_and_does_not_wait_for_torch(tmp_path):
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
    flat = " ".join(done.stdout.replace("│", " ").split())
    assert "The row mean is the plain mean of tau over the domains" in flat and "Left out: 0 and 1" in flat.replace(
        "left", "Left"
    )
