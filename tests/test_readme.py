"""The READMEs' measured numbers are those of the files in bench/results, and the check can fail."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from dspark_fast.pairs import draft_name

ROOT = Path(__file__).parent.parent


@pytest.fixture
def readme(monkeypatch):
    """The module ``bench/readme.py``, and the repository's results."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    module = importlib.import_module("readme")
    return module, module.Results(ROOT / "bench" / "results")


@pytest.fixture
def text():
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "bench/README.md"])
def test_every_number_is_that_of_its_file(name, readme):
    module, results = readme
    text = (ROOT / name).read_text()
    assert module.written(text, results, name) == text, "run: python bench/readme.py"


def test_no_number_is_written_by_hand(readme):
    """One that looks measured belongs to a table, or to a sentence that is filled in."""
    module, _ = readme
    text = (ROOT / "README.md").read_text()
    assert module.unexplained(text, "README.md") == []
    figures = ("It is 7.3 times as fast.", "It takes 80 ms.", "It keeps 12 % of them.", "A tau of 3.25 is reached.")
    in_words = ("It is twice as fast.", "It runs at three times\nthe speed.", "It reads a quarter of the bytes.")
    for lie in (*figures, *in_words):
        assert len(module.unexplained(text + "\n" + lie, "README.md")) == 1


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("planted faults", "planted errors"),  # the sentence is no longer found
        ("<!-- mutants:end -->", ""),
    ],
)
def test_what_is_no_longer_found_is_said(was, instead, readme):
    module, results = readme
    text = (ROOT / "README.md").read_text()
    with pytest.raises(LookupError, match=r"README\.md"):
        module.written(text.replace(was, instead), results, "README.md")


def test_a_number_that_changed_is_written(readme):
    module, results = readme
    text = (ROOT / "README.md").read_text()
    results.acceptance = copy.deepcopy(results.acceptance)
    results.acceptance["results"][0]["mean_tau"] = 9.87
    rows = copy.deepcopy(results.five_prompts["rows"])
    rows[-1]["speedup"] = 6.54
    results.five_prompts = {**results.five_prompts, "rows": rows}
    new = module.written(text, results, "README.md")
    assert "it is 9.87 (" in new and "9.87" not in text
    assert "| 6.54 (" in new and new.count("\n") == text.count("\n")
    changed = [line for line, before in zip(new.splitlines(), text.splitlines()) if line != before]
    assert len(changed) == 4  # the row, the mean, the range at the top, the sentence


# --- what is not measured, and comes from a script or the code all the same -------------------------------------------


def test_predictions_are_those_of_their_file(readme, text):
    module, results = readme
    results.predicted = copy.deepcopy(results.predicted)
    for row in results.predicted["kernels"]:
        row["us"] += 1000
    results.predicted["assumed"]["copy_tb_s"] = 6.5
    results.predicted["features"]["bytes"] = 12_345
    new = module.written(text, results, "README.md")
    for words in (
        "| 1037 us at 32k",
        "| 1002 us |",
        "| 1143 us, 7 slots |",
        "| 1007 us, rejection",
        "rate of 6.5 TB/s",
    ):
        assert words in new and words not in text
    assert "with five taps 12 kB a token" in new


def test_every_number_of_the_benches_page_follows_its_file(readme):
    """All that claims_bench.py knows of, measured or predicted, changes with the figures."""
    module, results = readme
    text = (ROOT / "bench" / "README.md").read_text()

    def other(value):
        if isinstance(value, dict):
            return {key: other(one) for key, one in value.items()}
        if isinstance(value, list):
            return [other(one) for one in value]
        return 3 * abs(value) ** 1.5 + 1 if isinstance(value, float) else value  # ratios change too

    for name in ("predicted", "engine", "markov_tries", "training_step"):
        setattr(results, name, other(getattr(results, name)))
    memory = results.draft_loss = copy.deepcopy(results.draft_loss)
    memory["memory"]["rows"] = [{**row, "peak_bytes": 7 * row["peak_bytes"]} for row in memory["memory"]["rows"]]
    memory["memory"]["check"]["unfused_resident_bytes"] *= 1.07
    for number, row in enumerate(memory["rows"]):
        row["median_us"] *= 2 + number
    sentences = sys.modules["claims"].SENTENCES["bench/README.md"]
    new = module.written(text, results, "bench/README.md")
    for words in sentences:
        (before,), (after,) = (re.findall(module._pattern(words), one) for one in (text, new))
        assert before != after, words


def test_bytes_of_a_token_in_the_cache(readme, tmp_path):
    """Against a cache on disk."""
    from dspark_fast.training.hidden_cache import CacheWriter, Sample

    predicted = importlib.import_module("predicted")
    hidden, taps, length = 24, 5, 11
    made_for = {"max_length": 64, "target_weights": "abc"}
    writer = CacheWriter(tmp_path, top_tokens=0, made_for=made_for, layer_ids=list(range(taps)), hidden_size=hidden)
    ids, mask = torch.zeros(length, dtype=torch.int32), torch.ones(length, dtype=torch.uint8)
    states = (torch.zeros(length, width, dtype=torch.bfloat16) for width in (taps * hidden, hidden))
    writer.append([Sample("a", "code", ids, mask, *states, torch.zeros(length))])
    found = sum((tmp_path / name).stat().st_size for name in ("shard-00000.bin", "log_total.f32"))
    assert predicted.feature_bytes(hidden, taps) * length == found


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("benchmark.predicted.TOLERANCE", 0.3, "is more than 30 % off"),
        ("engine.target.PREFILL_CHUNK", 4096, "read in chunks of 4,096 tokens"),
        ("doctor.examine.LEVEL", 0.05, "paired by block, 5 % over all changes together"),
        ("backend.OLDEST_CAPABILITY", (9, 0), "(compute capability 9.0 and later"),
    ],
)
def test_what_the_code_says_is_quoted(where, value, words, readme, text, monkeypatch):
    module, results = readme
    place, _, constant = where.rpartition(".")
    monkeypatch.setattr(importlib.import_module(f"dspark_fast.{place}"), constant, value)
    new = module.written(text, results, "README.md")
    assert words in " ".join(new.split()) and words not in " ".join(text.split())


# --- a machine that was not left alone --------------------------------------------------------------------------------


def test_a_speed_that_is_not_trusted_is_no_headline(readme, text):
    """The sentence of the first screen is refused, and so is its table's mean."""
    module, results = readme
    results.engine = copy.deepcopy(results.engine)
    row = results.engine["prompts"]["rows"][3]
    row["most"] = 1.49 * row["least"]
    module.written(text, results, "README.md")
    row["most"] = 1.51 * row["least"]
    with pytest.raises(LookupError, match=r"1 of 10 speedups in engine\.json vary .* none is quoted"):
        module.written(text, results, "README.md")
    bench = module.written((ROOT / "bench" / "README.md").read_text(), results, "bench/README.md")
    (line,) = (line for line in bench.splitlines() if line.startswith("| ten prompts alone"))
    assert line.endswith("by prompt, not trusted: the machine was not left alone) | 1.8, not known |")


def test_nor_in_the_table(readme):
    _, results = readme
    table = sys.modules["claims"].five_prompts
    before = table(results).splitlines()
    rows = copy.deepcopy(results.five_prompts["rows"])
    row = next(row for row in rows if row["dtype"] != "float32")
    row["speedup_most"] = 1.6 * row["speedup_least"]
    disturbed = type(results)(results.folder)
    disturbed.five_prompts = {**results.five_prompts, "rows": rows}
    after = table(disturbed).splitlines()
    spread = f"({row['speedup_least']:.2f} to {row['speedup_most']:.2f})"
    assert before[2].split(" | ")[3].startswith(f"{row['speedup']:.2f} (")
    assert after[2].split(" | ")[3] == f"not trusted {spread}" and after[3:7] == before[3:7]
    assert before[-1].split(" | ")[2] != "" == after[7].split(" | ")[2]  # the mean
    assert after[-1].startswith("Something else was using the machine")


@pytest.mark.parametrize("quiet", [True, False])
def test_nor_among_the_providers(quiet, readme):
    _, results = readme
    results.end_to_end = copy.deepcopy(results.end_to_end)
    for row in results.end_to_end["rows"]:
        row["tokens_per_second"]["most"] = (1.2 if quiet else 1.6) * row["tokens_per_second"]["least"]
        if (row["set"], row["provider"]) == ("chat", "lookup"):
            row["speedup"]["median"] = 9.0
    said = sys.modules["claims"].TABLES["README.md"]["providers"](results)
    assert ("is ahead of every other provider" in said) == quiet
    assert ("do not trust these speedups" in said) == (not quiet)
    assert "- Batch 1: dspark-fast is behind in chat (" in said and "lookup (9.00)" in said  # in either case


# --- another drafter than the one that ships --------------------------------------------------------------------------

BEFORE = "dspark_fast/drafts/SmolLM2-135M-Instruct (00000000)"


@pytest.mark.parametrize("name", ["five_prompts", "eval", "acceptance"])
def test_figures_of_another_drafter_are_refused(name, readme, text):
    module, results = readme
    setattr(results, name, {**getattr(results, name), "draft": BEFORE})
    with pytest.raises(LookupError, match=rf"{name}\.json is of .* \(00000000\), and what ships is .*: measure again"):
        module.written(text, results, "README.md")


def test_further_down_they_are_called_what_they_are(readme):
    _, results = readme
    claims = sys.modules["claims"]
    name = draft_name(results.engine["model"])
    results.end_to_end = {**results.end_to_end, "draft": name}
    results.engine = {
        part: {**one, "draft": name} if part in claims.ENGINE_PARTS else one for part, one in results.engine.items()
    }
    assert not any(claims.OTHER_DRAFTER in table(results) for table in (claims.providers, claims.engine))
    results.end_to_end["draft"] = results.engine["worst"]["draft"] = BEFORE
    assert f"- {claims.OTHER_DRAFTER}" in claims.providers(results).splitlines()
    assert claims.engine(results).endswith(f"\n\n{claims.OTHER_DRAFTER} (worst)")
