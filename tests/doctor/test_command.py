"""``dspark-fast doctor``: what a person and what a program gets to see, and the exit status."""

from __future__ import annotations

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from dspark_fast import cli
from dspark_fast.cli import doctor as doctor_module
from dspark_fast.cli.app import app
from dspark_fast.doctor.faults import FAULTS


@pytest.fixture
def doctor(pair, monkeypatch):
    """``dspark-fast doctor`` on the pair; an option given again overrides."""
    monkeypatch.setattr(doctor_module, "quiet", lambda: None)

    def run(*options):
        given = ["--model", pair.target, "--draft", pair.folder, "--prompts", pair.prompts, "--dtype", "fp32"]
        given += ["--device", "cpu", "--max-new-tokens", "24", *options]
        return CliRunner().invoke(app, ["doctor", *map(str, given)], env={"COLUMNS": "200"})

    return run


def test_a_good_pair_ends_with_0(doctor):
    result = doctor()
    assert result.exit_code == 0, result.output
    for words in ("aliased from the target embed_tokens.weight, lm_head.weight", "slot 4", "early, ", "late, ", "all "):
        assert words in result.stdout
    assert "This is a good pair" in result.stdout and "Likely fault" not in result.stdout


def test_json_of_a_fault(doctor, pair, tmp_path):
    FAULTS["token 0 as the mask"].plant(pair.model, pair.tokenizer, pair.folder, tmp_path / "broken")
    result = doctor("--draft", tmp_path / "broken", "--json")
    assert result.exit_code == 1 and result.stdout.count("\n") == 1
    report = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["fault"] == "mask token" and "it is 0, not 33" in report["verdict"][0]
    assert report["loaded"]["tensors"]["missing"] == [] and len(report["thirds"]) == 3


def test_a_pair_that_cannot_be_loaded(doctor, pair, tmp_path):
    config = json.loads((pair.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "target_layer_ids": [1, 3]}))
    (tmp_path / "model.safetensors").symlink_to(pair.folder / "model.safetensors")
    result = doctor("--draft", tmp_path)
    assert result.exit_code == 1, result.output
    assert "cannot be loaded: " in result.stdout and "Likely fault: taps." in result.stdout
    assert "With the taps one layer earlier, [0, 2], it can, and agreement is " in result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--per-domain", "0"], "Invalid value for '--per-domain'"),
        (["--prompts", "/no/such/file"], "no such file: /no/such/file"),
        (["--draft", "/no/such/folder"], "Error: the drafter is '/no/such/folder', and there is no such folder"),
        (["--model", "/no/such/folder"], "Error: the target is '/no/such/folder', and there is no such folder"),
        (["--thinking", "--no-chat-template"], "thinking is switched on by the chat template"),
        (["--device", "tpuu"], "Error: device is 'tpuu'"),
        (["--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_bad_arguments(doctor, options, text):
    result = doctor(*options)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())


def test_the_command_is_registered(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0 and "--statistics" in capsys.readouterr().out


def test_statistics(doctor, monkeypatch):
    """The suite's rows are told as they come; one that fails is a fault."""
    suite = pytest.importorskip("dspark_fast.losslessness.run")
    rows = [suite.Result(name, "op", 1000, 0.01, 0.5, name != "b", 1.0) for name in "ab"]

    def run(*, subset, on_row):
        assert subset
        for row in rows:
            on_row(row)

    monkeypatch.setattr(suite, "run", run)
    result = doctor("--statistics")
    assert result.exit_code == 1
    assert "a: passed (p = 0.5, 1,000 draws)" in result.stderr and "b: FAILED" in result.stderr
    assert "Sampling does not keep the target's law: b." in result.stdout
    del rows[1]
    report = json.loads(doctor("--statistics", "--json").stdout)
    assert report["fault"] is None
    assert report["statistics"] == [{"name": "a", "p_value": 0.5, "draws": 1000, "passed": True}]


def test_statistics_without_scipy(doctor, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else find(name, *rest))
    result = doctor("--statistics")
    assert result.exit_code == 2 and "--statistics needs scipy" in result.stderr
