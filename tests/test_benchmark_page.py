"""The kernels' page: what made-up files say stands in it, what they lack is not measured, and it is as committed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

BENCH = Path(__file__).parent.parent / "bench"
# `with torch.device(...)` learns once which functions make tensors: now, before a fixture puts others in their place.
_device_constructors()
MACHINE = {"device": "Imagined GPU", "threads": 8}


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        before = set(sys.modules)
        yield importlib.import_module("kernels_page")
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
                del sys.modules[name]


def op_file(folder, op, case, *, provider="dspark-fast", predicted=140.0, lost=()):
    row = {
        "case": case,
        "provider": provider,
        "bytes": 546_000_000,
        "predicted_us": predicted,
        "median_us": 150.0,
        "quartiles_us": [149.0, 152.5],
        "percent_of_copy_rate": 84.7,
    }
    result = {"op": op, "machine": MACHINE, "copy_tb_s": 4.2, "rows": [row], "slower_than_another": list(lost)}
    (folder / f"{op}.json").write_text(json.dumps(result))


@pytest.fixture
def gpu(tmp_path):
    folder = tmp_path / "imagined-gpu"
    folder.mkdir()
    op_file(folder, "markov", "Qwen3-4B B=1 greedy", lost=["Qwen3-4B B=1 greedy: plain torch 149 us"])
    op_file(folder, "block_attention", "Qwen3-4B B=1 S=4096 causal")
    rows = [
        {"case": f"c{suffix}", "pair": "Qwen3-4B shape", "batch": 1, "context": 4096, "provider": way, "round_ms": ms}
        for suffix, way, ms in (("", "no graph", 9.0), (", compiled", "graph", 2.0), ("", "graph", 3.0))
    ]
    (folder / "rounds.json").write_text(json.dumps({"machine": MACHINE, "rows": rows}))
    return tmp_path


def line(text, start):
    """Cells of the one line that begins so."""
    (found,) = (row for row in text.split("\n") if row.startswith(f"| {start}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_measured_on_a_gpu(page, gpu):
    text = page.section(gpu)
    assert "### Imagined GPU\n" in text and "No GPU yet" not in text and "SmolLM2-135M**" not in text
    assert "round 3 ms (graph)" in text  # neither the compiled case nor the one without a graph
    walk = line(text, "walk, greedy")
    assert walk[1:] == ["1", "546,000,000", "140", "150 (149 to 152)", "84.7 %", "5.0 %"]
    assert line(text, "target's attention")[-1] == "180.0 %"  # 36 calls of it
    assert line(text, "verify, greedy")[4:] == ["not measured", "", "not measured"]
    assert line(text, "walk, sampled")[4:] == ["not measured", "", ""]
    assert "- markov: Qwen3-4B B=1 greedy: plain torch 149 us" in text


def test_a_cpu_has_the_reference_and_the_profile(page, tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    op_file(folder, "verify", "SmolLM2-135M B=1 greedy uncut", provider="reference, eager", predicted=None)
    profile = {"round_milliseconds": 50.0, "rows": [{"part": "op markov_walk", "milliseconds": 1.0}]}
    (folder / "engine.json").write_text(json.dumps({"model": "x/SmolLM2-135M-Instruct", "profile": profile}))
    text = page.section(tmp_path, rate=2.0)
    measured, predicted = text.split("### No GPU yet")
    assert "Imagined GPU, 8 threads" in measured and "Qwen3-4B**" not in measured
    assert line(measured, "verify, greedy")[3:] == ["130", "150 (149 to 152), reference", "84.7 %", "0.3 %"]
    assert line(measured, "walk, greedy")[4:] == ["not measured", "", "2.0 %"]
    assert "copies 2 TB/s" in predicted
    qwen = predicted.split("**SmolLM2-135M**")[0]
    assert line(qwen, "walk, greedy")[3] == "289"  # 546,669,312 bytes at 2 TB/s and 8 launches
    assert line(qwen, "walk, greedy")[4:6] == ["not measured", ""]


def test_nothing_at_all(page, tmp_path):
    text = page.section(tmp_path / "none")
    assert "### No GPU yet" in text and text.count("###") == 1


def test_it_writes_between_its_markers_alone(page, gpu, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("# Before\n\nText.\n")
    page.main(["--results", str(gpu), "--readme", str(readme)])
    once = readme.read_text()
    assert once.startswith(f"# Before\n\nText.\n\n{page.BEGIN}\n## Kernels") and once.endswith(f"{page.END}\n")
    readme.write_text(once.replace("150 (149", "999 (149") + "\nAfter.\n")
    page.main(["--results", str(gpu), "--readme", str(readme)])
    assert readme.read_text() == once + "\nAfter.\n"
    page.main(["--results", str(gpu), "--print"])
    assert "Imagined GPU" in capsys.readouterr().out


def test_the_committed_page_is_what_the_script_writes(page):
    readme = (BENCH / "README.md").read_text()
    assert page.with_section(readme, page.section(BENCH / "results")) == readme, "run python bench/kernels_page.py"


def test_the_committed_predictions_are_what_the_script_writes(page):
    """Which the READMEs' sentences are filled from; the page's own are the same."""
    predicted = importlib.import_module("predicted")
    found = predicted.result()
    assert predicted.text(found) == predicted.FILE.read_text(), "run python bench/predicted.py"
    (walk,) = (row for row in found["kernels"] if row["case"] == "Qwen3-4B B=1 greedy")
    assert (walk["bytes"], walk["us"]) == (546_669_312, 143.13)  # 546,669,312 bytes at 4.3 TB/s and 8 launches
    assert line(page.section(BENCH / "none"), "walk, greedy | 1 | 546,669,312")[3] == "143"


def test_predictions_for_another_rate(page, tmp_path, monkeypatch):
    predicted = importlib.import_module("predicted")
    monkeypatch.setattr(predicted, "OPS", ("context_kv",))
    monkeypatch.setattr(sys, "argv", ["predicted.py", "--rate", "2", "--out", str(tmp_path / "x.json")])
    predicted.main()
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["assumed"] == {"copy_tb_s": 2.0, "launch_us": 2.0, "of": "as asked"}
    (row,) = (row for row in found["kernels"] if row["case"] == "Qwen3-4B B=1 N=8")
    assert row["us_without_launches"] == round(row["bytes"] / 2e6, 2) and row["us"] == row["us_without_launches"] + 2
