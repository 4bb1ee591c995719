"""``dspark-fast generate`` and ``chat``: how it is decoded, the seed, and what ``--compare`` shows of each way."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from dspark_fast import generation, pairs
from dspark_fast.cli import chat, generate
from dspark_fast.cli import session as session_module
from dspark_fast.cli.app import app
from dspark_fast.cli.session import Session
from dspark_fast.engine import prepacked
from dspark_fast.stats import Stats

assert chat and generate  # importing them registers the commands


@pytest.fixture(scope="module")
def saved(make_target, make_draft, characters, tmp_path_factory):
    """Options that name a saved target, and its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    model = make_target(fresh=True, vocab_size=len(characters.tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder / "target")
    characters.tokenizer.save_pretrained(folder / "target")
    make_draft(model, num_hidden_layers=1).save_pretrained(folder / "draft")
    target = ["--model", str(folder / "target"), "--dtype", "fp32", "--device", "cpu", "--max-new-tokens", "12"]
    return SimpleNamespace(target=target, pair=[*target, "--draft", str(folder / "draft")])


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """The other tests of this process go on hearing transformers' remarks."""
    monkeypatch.setattr(session_module, "quiet", lambda: None)


@pytest.fixture
def calls(monkeypatch):
    """What each call of ``dspark_fast.generate`` was given, and gave."""
    true, seen = generation.generate, []

    def watching(model, draft, input_ids, **kwargs):
        output = true(model, draft, input_ids, **kwargs)
        seen.append(SimpleNamespace(draft=draft, stats=output.stats, **{"seed": None, **kwargs}))
        return output

    monkeypatch.setattr(generation, "generate", watching)
    return seen


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(each) for each in arguments], **options)


def say(*arguments):
    """The report of ``generate --json``."""
    result = run("generate", "Hello", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(result, text):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert text in " ".join(result.stderr.replace("│", " ").split())


# --- without a drafter ------------------------------------------------------------------------------------------------


def test_without_a_drafter_none_is_loaded_and_the_tokens_are_the_same(saved, monkeypatch):
    drafted = say(*saved.pair)
    monkeypatch.setattr(pairs, "load", lambda *_, **__: pytest.fail("a drafter was loaded"))
    report = say(*saved.target, "--no-draft")
    assert report["tokens"] == drafted["tokens"]
    assert report["draft"] is None and report["acceptance_length"] is None and drafted["acceptance_length"] >= 1
    assert report["tokens_per_second"] > 0
    result = run("generate", "Hello", *saved.target, "--no-draft")
    figures = result.stdout.splitlines()[-1]
    assert figures.startswith("12 tokens | ") and figures.endswith(" tokens/s | no drafter | greedy | fp32 | cpu")
    assert f"Loaded {saved.target[1]} without a drafter in " in result.stderr


def test_a_chat_without_a_drafter(saved, calls):
    result = run("chat", *saved.target, "--no-draft", input="One\nTwo\n")
    assert result.exit_code == 0, result.output
    assert [call.draft for call in calls] == [None, None]
    assert calls[1].stats.reused[0] > 0  # the history is not read again
    assert result.stdout.count("| no drafter | greedy | fp32 | cpu\n") == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--draft", "x"], "--draft"),
        (["--no-markov"], "--no-markov"),
        (["--confidence-threshold", "0.5", "--draft", "x"], "--draft and --confidence-threshold"),
    ],
)
def test_what_needs_a_drafter_is_refused_without_one(saved, command, options, named):
    prompt = ["Hello"] if command == "generate" else []
    result = run(command, *prompt, *saved.target, "--no-draft", *options)
    refused(result, f"Invalid value for '--no-draft': it cannot go with {named}: there is no drafter then.")


# --- on a CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_threads(saved, monkeypatch, command):
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    for options in ([], ["--threads", 3]):
        result = run(command, *saved.pair, *options, input="Hello")
        assert result.exit_code == 0, result.output
    assert told == [3]
    refused(run(command, *saved.pair, "--threads", 0, input="Hello"), "Invalid value for '--threads'")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_packing_is_handed_on(saved, calls, command):
    for options in ([], ["--no-pack-weights"]):
        assert run(command, *saved.pair, *options, input="Hello").exit_code == 0
    assert [call.pack_weights for call in calls] == [None, False]


def test_packing_is_handed_on_by_a_comparison(saved, calls):
    say(*saved.pair, "--no-pack-weights", "--compare", "--repeats", 1)
    assert len(calls) == 5 and all(call.pack_weights is False for call in calls)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_packing_is_refused_before_anything_is_decoded_where_there_is_nothing_to_pack(saved, calls, command):
    result = run(command, *saved.pair, "--pack-weights", input="Hello\nYou\n")
    refused(result, "Error: --pack-weights is given, and the model is in fp32 on cpu: accepted is bf16, on a CPU that")
    assert result.stderr.count("Error") == 1 and not calls


def test_packing_can_be_asked_for(saved, monkeypatch):
    asked = []
    monkeypatch.setattr(prepacked, "prepackable", lambda models: list(models))

    def packing(model, draft, input_ids, *, pack_weights, **kwargs):
        asked.append(pack_weights)
        raise ValueError("enough")

    monkeypatch.setattr(generation, "generate", packing)
    refused(run("generate", "Hello", *saved.pair, "--pack-weights", "--json"), "Error: enough")
    assert asked == [True]


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_negative_seed_is_the_same_as_it_is_modulo_2_to_the_64(saved):
    one, same, other = (say(*saved.pair, "--temperature", 0.9, "--seed", seed) for seed in (-1, 2**64 - 1, -(2**63)))
    assert one["tokens"] == same["tokens"] != other["tokens"]
    assert (one["seed"], same["seed"]) == (-1, 2**64 - 1)


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_seed_that_the_stats_show_repeats_the_run(saved, calls, verification):
    sampling = ["--temperature", 0.9, "--verification", verification]
    first = [say(*saved.pair, *sampling, "--seed", seed)["tokens"] for seed in range(3)]
    rows = [call.stats.seeds for call in calls]
    assert any(seed < 0 for (seed,) in rows)
    for tokens, row in zip(first, rows):
        again = say(*saved.pair, *sampling, "--seed", str(row))
        assert again["tokens"] == tokens and again["seed"] == row
        # Any name of the same 64 bits will do; and the bare number is another seed, which is expanded.
        assert say(*saved.pair, *sampling, "--seed", f"[{row[0] % 2**64}]")["tokens"] == tokens
        assert say(*saved.pair, *sampling, "--seed", row[0])["tokens"] != tokens


def test_a_comparison_by_a_row_s_own_seed(saved):
    found = say(*saved.pair, "--temperature", 0.9, "--seed", f"[{2**64 - 5}]", "--compare", "--repeats", 1)
    assert found["identical"] and found["comparison"]["undrafted_identical"]
    assert found["seed"] == found["comparison"]["seed"] == [-5]
    other = say(*saved.pair, "--temperature", 0.9, "--seed", -5, "--compare", "--repeats", 1)
    assert other["identical"] and other["tokens"] != found["tokens"]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, "", "x", "1.5", "[]", "[1", "[1, 2]", f"[{2**64}]"])
def test_other_seeds_are_refused(saved, seed):
    result = run("generate", "Hello", *saved.pair, "--temperature", 1, "--seed", seed)
    refused(result, "accepted are integers of 64 bits, as N or '[N]'")


# --- --compare --------------------------------------------------------------------------------------------------------


def rows_of(text):
    """The table's rows: name, and the words behind it."""
    names = ("dspark-fast, no drafter", "dspark-fast", "transformers")
    found = {}
    for line in text.splitlines():
        name = next((name for name in names if line.startswith(f"{name} ")), None)
        if name is not None:
            found[name] = line.removeprefix(name).split()
    return found


def test_a_comparison_shows_ours_without_a_drafter_too(saved):
    result = run("generate", "Hello", *saved.pair, "--compare")
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert list(rows) == ["dspark-fast", "dspark-fast, no drafter", "transformers"]
    assert [len(row) for row in rows.values()] == [3, 3, 2]
    assert all(row[2].endswith("x") for row in list(rows.values())[:2])
    assert f"speedup {rows['dspark-fast'][2]} (median of 3 pairs of runs" in result.stdout
    assert "the same 12 tokens, with the drafter and without\n" in result.stdout
    assert "| first run, cold\n" in result.stdout
    expected = (
        "Comparing: 3 runs each of ours, ours without a drafter, and transformers' generate, after one to warm up"
    )
    assert result.stderr.splitlines()[-1] == expected


def test_a_comparison_is_announced_before_it_begins(saved, monkeypatch):
    noted = []
    monkeypatch.setattr(generate, "note", noted.append)
    monkeypatch.setattr("dspark_fast.compare.compare", lambda *_, **__: pytest.fail(f"noted: {noted}"))
    with pytest.raises(pytest.fail.Exception, match=r"noted: .*Comparing: 1 run each of ours"):
        run("generate", "Hello", *saved.pair, "--compare", "--repeats", 1, catch_exceptions=False)


def test_a_comparison_without_a_drafter(saved, calls):
    result = run("generate", "Hello", *saved.target, "--no-draft", "--compare", "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert len(calls) == 3 and all(call.draft is None for call in calls)
    assert list(rows_of(result.stdout)) == ["dspark-fast, no drafter", "transformers"]
    assert "predicted" not in result.stdout and "the same 12 tokens\n" in result.stdout
    expected = "Comparing: 1 run each of ours without a drafter and transformers' generate, after one to warm up"
    assert expected in result.stderr
    report = say(*saved.target, "--no-draft", "--compare", "--repeats", 1)
    assert report["identical"] is True and report["speedup"] > 0 and report["predicted_speedup"] is None
    assert report["acceptance_length"] is None and report["comparison"]["undrafted_speedup"] is None


@pytest.mark.parametrize("wrong", ["drafted", "undrafted"])
def test_a_difference_in_one_of_ours_is_said_of_that_one(saved, monkeypatch, wrong):
    true = generation.generate

    def planted(model, draft, input_ids, **kwargs):
        output = true(model, draft, input_ids, **kwargs)
        if isinstance(output, torch.Tensor) and (draft is None) == (wrong == "undrafted"):
            output[0, input_ids.shape[1] + 2] = 65
        return output

    monkeypatch.setattr(generation, "generate", planted)
    result = run("generate", "Hello", *saved.pair, "--compare", "--repeats", 1)
    lines = result.stdout.splitlines()[-2:]
    if wrong == "drafted":
        assert lines[0].startswith("not the same tokens: the first 2 tokens are the same, then ours has")
        assert lines[1] == "without the drafter the same 12 tokens"
    else:
        assert lines == [
            "the same 12 tokens",
            "without the drafter not the same tokens: the first 2 are, then there is a difference that rounding does "
            "not explain",
        ]


# --- the line of figures ----------------------------------------------------------------------------------------------


def paused(stats):
    stats.new_tokens, stats.rounds, stats.plain_steps, stats.pauses = [48], 4, 40, 1
    stats.acceptance_lengths, stats.seconds.plain = [[2, 2, 2, 1]], 2.0
    return stats


def test_figures_of_a_call_that_stopped_drafting():
    session = SimpleNamespace(settings=SimpleNamespace(use_draft=True), dtype="bf16", device="cpu")
    assert Session.figures(session, paused(Stats(1, "greedy", [0], 5))) == (
        "48 tokens | 40 of them without drafts, which seemed to lose time | 23.5 tokens/s | acceptance length 1.75 | "
        "greedy | bf16 | cpu"
    )


def test_a_cold_run_that_stopped_drafting_is_told_from_what_is_compared(saved, monkeypatch):
    answer = Session.answer

    def cold(*arguments):
        found = answer(*arguments)
        paused(found.stats)
        return found

    monkeypatch.setattr(Session, "answer", cold)
    result = run("generate", "Hello", *saved.pair, "--compare", "--repeats", 1)
    assert "| first run, cold; below, ours drafts throughout\n" in result.stdout
