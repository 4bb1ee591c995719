"""The READMEs' tables of ways to decode: what a file of ``dspark-fast bench`` holds is said, in every shape."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def claims(monkeypatch):
    """The module ``bench/claims_providers.py``."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module("claims_providers")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.fixture
def committed():
    return json.loads((BENCH / "results" / "cpu" / "end_to_end.json").read_text(encoding="utf-8"))


@pytest.fixture
def results(claims, committed, tmp_path):
    """``results(**files)``: of these files alone; ``end_to_end`` is the committed one at batch 1 unless it is given."""
    alone = [row for row in committed["rows"] if (row["batch"], row["context"]) == (1, None)]
    for row in alone:
        row["why"], row["same_tokens"] = None, {"same": 6, "near_ties": 0, "unexplained": []}

    def make(**files):
        (tmp_path / "cpu").mkdir(exist_ok=True)
        for name, value in {"end_to_end": {**committed, "rows": alone, "left_out": []}, **files}.items():
            (tmp_path / "cpu" / f"{name}.json").write_text(json.dumps(value))
        return importlib.import_module("claims").Results(tmp_path)

    return make


def moved(found, batch, context, dtype="float32"):
    """The same rows as another shape's."""
    rows = [{**row, "batch": batch, "context": context} for row in copy.deepcopy(found["rows"])]
    return {**found, "rows": rows, "dtype": dtype}


def test_every_shape_of_every_file_has_its_table(claims, results):
    plain = results().end_to_end
    both = {**plain, "rows": plain["rows"] + moved(plain, 8, None)["rows"]}
    text = claims.shapes(results(end_to_end=both, end_to_end_long=moved(plain, 1, 2048)))
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert titles == ["### Batch 1, bfloat16", "### Batch 8, bfloat16", "### Batch 1, 2,048 tokens of context, float32"]
    assert text.count("([data](results/cpu/end_to_end_long.json)):") == 1
    assert f"{plain['rows'][0]['prompts']} prompts in " in text  # of a batch, how many calls that is


def test_a_row_has_its_own_figures(claims, results):
    plain = results().end_to_end
    for row in plain["rows"]:
        if (row["provider"], row["set"]) == ("ours", "all"):
            row["speedup"] = {**row["speedup"], "median": 7.125, "least": 6.5, "most": 8.25}
            row["call_speedup"]["median"], row["compile_seconds"], row["predicted_speedup"] = 5.5, 61.4, 7.0
            row["tokens_per_second"] = {**row["tokens_per_second"], "median": 99.94, "least": 98.0, "most": 101.0}
            row["first_token_ms"]["median"] = 1234.4
    text = claims.shapes(results(end_to_end=plain))
    (line,) = (line for line in text.splitlines() if line.startswith("| **dspark-fast** |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "7.12 (6.50 to 8.25)" and cells[-1] == "1,234"
    assert cells[-5:-1] == ["7.00", "5.50", "99.9 (98.0 to 101.0)", "61"]
    assert line == text.splitlines()[8], "the fastest comes first"


def test_what_the_tables_do_not_show_is_said(claims, results):
    plain = results().end_to_end
    plain["left_out"] = [
        {"provider": "assisted", "batch": 1, "context": None, "why": "it fell over"},
        {"provider": "lookup", "batch": 8, "context": None, "why": "for one row alone"},
        {"provider": "no-cache", "batch": None, "context": None, "why": "nobody asked"},
    ]
    for row in plain["rows"]:
        if (row["provider"], row["set"]) == ("ours", "chat"):
            row["why"] = "0.70 of the predicted; time beyond it: something +30%"
        if (row["provider"], row["set"]) == ("always", "all"):
            row["same_tokens"] = {"same": 4, "near_ties": 1, "unexplained": ["token 7 is another"]}
    text = claims.shapes(results(end_to_end=plain))
    assert "- dspark-fast, chat: 0.70 of the predicted; time beyond it: something +30%." in text
    assert "- dspark-fast, always drafting differs: token 7 is another" in text
    assert f"near-ties fell the other way in, of {plain['rows'][0]['prompts']}: dspark-fast, always drafting 1." in text
    assert "- Left out: assisted at batch 1: it fell over." in text
    assert "one row alone" not in text and "nobody asked" not in text
    short = claims.providers(results(end_to_end=plain))
    assert "token 7 is another" in short and "0.70 of the predicted" not in short


def test_files_of_two_machines_are_not_put_side_by_side(claims, results):
    plain = results().end_to_end
    other = {**moved(plain, 1, 512), "machine": {**plain["machine"], "device": "another"}}
    with pytest.raises(importlib.import_module("trust").Untrusted, match=r"end_to_end_other\.json is of .*another"):
        claims.shapes(results(end_to_end_other=other))


def test_the_headline_is_ours_over_all_prompts_and_no_disturbed_one(claims, results):
    found = results()
    (row,) = (row for row in found.end_to_end["rows"] if (row["provider"], row["set"]) == ("ours", "all"))
    assert claims.over_all(found)["times"] == f"{row['speedup']['median']:.2f}"
    untrusted = importlib.import_module("trust").Untrusted
    found.end_to_end["draft"], kept = "another", found.end_to_end["draft"]
    with pytest.raises(untrusted, match="measure again"):
        claims.over_all(found)
    found.end_to_end["draft"] = kept
    (plain,) = (row for row in found.end_to_end["rows"] if (row["provider"], row["set"]) == ("generate", "all"))
    plain["tokens_per_second"]["most"] = 2 * plain["tokens_per_second"]["least"]
    with pytest.raises(untrusted, match="measure again"):
        claims.over_all(found)
