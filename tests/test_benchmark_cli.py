"""``dspark-fast bench``: what a person and what a program gets to see."""

from __future__ import annotations

import json
import os
import re

import pytest
from typer.testing import CliRunner

from dspark_fast import generation
from dspark_fast.benchmark import WAYS
from dspark_fast.cli import bench as bench_module
from dspark_fast.cli import session as session_module
from dspark_fast.cli.app import app

PROVIDERS = "generate,lookup,ours,autoregressive"


@pytest.fixture(scope="module")
def pair(make_target, make_draft, characters, tmp_path_factory):
    """Options that name a saved pair and its prompts."""
    folder = tmp_path_factory.mktemp("pair")
    model = make_target(fresh=True, vocab_size=len(characters.tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder / "target")
    characters.tokenizer.save_pretrained(folder / "target")
    make_draft(model, num_hidden_layers=1).save_pretrained(folder / "draft")
    (folder / "sums.jsonl").write_text('{"turns": ["1+1?"]}\n{"turns": ["2+2?"]}\n')
    (folder / "talk.jsonl").write_text('{"turns": ["Hello you!"]}\n')
    prompts = [part for name in ("sums", "talk") for part in ("--prompts", folder / f"{name}.jsonl")]
    pair = ["--model", folder / "target", "--draft", folder / "draft", "--device", "cpu"]
    return [*map(str, [*pair, *prompts]), "--max-new-tokens", "6", "--repeats", "2"]


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """The other tests of this process go on hearing transformers' remarks."""
    monkeypatch.setattr(session_module, "quiet", lambda: None)
    monkeypatch.setattr(bench_module, "quiet", lambda: None)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def one_sentence(result, text, code=2):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert text in flat and "Traceback" not in flat


@pytest.mark.floor
def test_the_table(pair, tmp_path):
    out = tmp_path / "bench.json"
    result = run(*pair, "--dtype", "fp32", "--providers", PROVIDERS, "--batch", "1,2", "--out", out)
    assert result.exit_code == 0, result.output
    lines = result.stdout.split("\n")
    assert max(map(len, lines)) <= 100
    report = json.loads(out.read_text())
    for row in report["rows"]:
        if row["set"] == "all":
            (line,) = (
                line
                for line in lines
                if line.startswith(f"{'*' if row['ours'] else ' '} {row['label']}  ")
                and f" {row['tokens_per_second']['median']:.1f} " in line
                and f" {row['speedup']['least']:.2f}-{row['speedup']['most']:.2f} " in line
            )
            assert line.rstrip().endswith("!") == bool(row["why"])
    flat = " ".join(result.stdout.split())
    assert "float32 batch 1, 3 prompts, 6 new tokens, median of 2 repeats" in flat
    assert all(sentence in flat for sentence in report["verdict"])
    assert all(row["why"] in flat for row in report["rows"] if row["why"])  # of single sets too
    assert "Left out: lookup at batch 2: transformers speculates for one row alone, not for 2." in flat
    assert "not among --providers" in flat and "sums talk tau" in flat
    assert report["assistant"] == "the target's first 1 of 6 layers"


def test_json_alone_and_the_fast_dtype(pair):
    """In bf16: compared in fp32 first, so loaded twice."""
    result = run(*pair, "--dtype", "bf16", "--providers", "generate,ours", "--context", "40", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["dtype"] == "bfloat16" and {row["context"] for row in report["rows"]} == {40}
    assert [line.endswith("(fp32, cpu)") for line in result.stderr.splitlines() if "Loaded" in line] == [True, False]
    assert report["prompt_tokens"] == {"batch 1, 40 tokens of context": [40, 40, 40]}


def test_a_difference_ends_it(pair, monkeypatch, tmp_path):
    true = generation.generate

    def wrong(model, draft, input_ids, **given):
        output = true(model, draft, input_ids, **given)
        output[0, -1] += 1
        return output

    monkeypatch.setattr(generation, "generate", wrong)
    result = run(*pair, "--dtype", "fp32", "--providers", "generate,ours", "--out", tmp_path / "x.json")
    one_sentence(result, "fp32 tokens differ from those of generate after 5 of 6", code=1)
    assert not (tmp_path / "x.json").exists()


def test_refused_before_any_work(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "Session", lambda *_: pytest.fail("loaded"))
    one_sentence(run(*pair, "--temperature", 0.8), "accepted is 0 (generate --compare takes a temperature)")
    one_sentence(run(*pair, "--batch", "1,x"), "'1,x': accepted are numbers of 1 or more, as 1,4,8")
    one_sentence(run(*pair, "--context", "0"), "'0': accepted are numbers of 1 or more")
    one_sentence(run(*pair, "--prompts", tmp_path / "none.jsonl"), "no such file")
    one_sentence(run(*pair, "--out", tmp_path), "cannot be written: it is a folder")
    one_sentence(run(*pair, "--out", tmp_path / "none" / "x.json"), "cannot be written: there is no folder")
    one_sentence(run(*pair, "--out", "/dev/null"), "cannot be written: it is no file")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    one_sentence(run(*pair, "--out", tmp_path / "x.json"), "is read-only")
    assert not list(tmp_path.iterdir())
    one_sentence(run(*pair, "--without", "generate"), "generate is left out")
    one_sentence(run(*pair, "--providers", "theirs"), "the provider is 'theirs': accepted are generate, static")


def test_help_has_every_provider():
    listed = re.findall(r"^ +([a-z-]+)  +", bench_module.bench.__doc__.partition("Providers:")[2], re.MULTILINE)
    assert listed == list(WAYS)


def test_assistants(pair):
    options = [*pair, "--dtype", "fp32", "--providers", "generate,autoregressive"]
    one_sentence(run(*options, "--assistant-layers", 7), "layers is 7: accepted is 1 to 6")
    model = pair[1]
    both = ["--assistant", model, "--assistant-layers", 2]
    one_sentence(run(*options, *both), "assistant and assistant_layers are both given")
    result = run(*options, "--assistant", model, "--json")  # the target's own weights: every draft is right
    report = json.loads(result.stdout)
    (row,) = (row for row in report["rows"] if (row["provider"], row["set"]) == ("autoregressive", "all"))
    assert report["assistant"] == model and row["acceptance_length"] == 4.0
