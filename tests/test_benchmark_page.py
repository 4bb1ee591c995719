"""The kernels' page: what made-up files say stands in it, what they lack is not measured, and it is as committed."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from dspark_fast import generate
from dspark_fast.engine.masked_attention import masked_attention

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


def test_a_cpus_own_ops_stand_in_its_rounds(page, tmp_path):
    """In place of the table of kernels, and said to be none."""
    (tmp_path / "cpu").mkdir()
    spread = {"median": 300.0, "quartiles": [299.0, 1300.4]}
    row = {"what": "walk, greedy", "calls": 1, "bytes": 5_000_000, "predicted_us": 150.0, "in_round_us": spread}
    row |= {"percent_of_copy_rate": 50.0, "percent_of_round": 1.25, "equality": "tokens equal"}
    row |= {"torch_over_ours": {"median": 0.5, "quartiles": [0.4, 0.75]}}
    mode = {"mode": "greedy", "rounds": 9, "round_ms": {"median": 24.0, "quartiles": [23.0, 26.0]}}
    mode |= {"copy_tb_s": {"median": 0.0333}, "rows": [{**row, "what": "verify, greedy", "percent_of_round": 1.0}, row]}
    result = {"machine": MACHINE, "model": "x/Imagined-1B", "dtype": "bfloat16", "context": 77, "block_size": 5}
    result |= {"drafted_tokens": 8192, "share_of_the_core": 0.876, "modes": [mode]}
    (tmp_path / "cpu" / "round_ops.json").write_text(json.dumps(result))
    text = page.section(tmp_path).split("### No GPU yet")[0]
    assert "### Imagined GPU, 8 threads" in text and "the CPU path's reference ops, not the kernels" in text
    assert "77 tokens of context" in text and "33.3 GB/s" in text and "88 % of its core" in text
    assert "Greedy, 9 rounds of 24.0 ms (23.0 to 26.0):" in text
    cells = ["1", "5,000,000", "150.0", "300 (299 to 1,300)", "50.0 %", "1.2 %", "0.50 (0.40 to 0.75)", "tokens equal"]
    assert line(text, "walk, greedy")[1:] == cells
    assert text.index("walk, greedy") < text.index("verify, greedy") and "not measured" not in text.split("###")[1]


def test_goals_are_the_benches_own(page, gpu):
    """With what a device's file says of each; others are not measured."""
    goals = importlib.import_module("goals")
    (first, *_) = importlib.import_module("bench_markov").BENCH.goals
    path = gpu / "imagined-gpu" / "markov.json"
    told = {"goal": first.text, "value": 84.7, "unit": "%", "verdict": "reached"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "goals": [told]}))
    machine = {"machine": MACHINE, "cold_s": 25.4, "goal": "under 30 s: reached"}
    (path.parent / "compile_time.json").write_text(json.dumps(machine))
    text = goals.section(gpu)
    assert f"| walk | {first.text} | reached, 84.7 % (Imagined GPU) |" in text
    assert "compiled in under 30 s | reached, 25 s (Imagined GPU) |" in text
    assert text.count(goals.NO_GPU) == len(goals.WORDS)  # the walk's other goals, and those of five ops
    nothing = goals.section(gpu / "none")
    assert nothing.count(goals.NO_GPU) == len(goals.WORDS) + 1 and "another provider is faster: none" in nothing


@pytest.fixture
def ablation(page):
    module = importlib.import_module("against_paper")
    files = [BENCH / "results" / name for name in ("cpu/ablation.json", "cpu/acceptance.json", "paper.json")]
    return module, [json.loads(path.read_text()) for path in files]


def test_the_paper_is_read_against_the_files(ablation, tmp_path):
    """By hand, from the files' own figures; and half of W2's rank is half of its bytes."""
    module, files = ablation
    rows = {row["name"]: row for row in files[0]["rows"]}
    found = module.values(*files)
    assert found["second"] == rows["baseline"]["tau"]["mean"] - rows["depth-1"]["tau"]["mean"]
    assert found["small"] == 49_152 * 64 * 2 / 1e6 and found["large"] == 4 * found["small"]
    assert round(found["paper_least"]), round(found["paper_most"]) == (19, 29)
    # Target 269.0 MB without its norms, the head again 56.6, the drafter 28.7, W2 five times more 31.5.
    assert found["round"] == pytest.approx(269.0 + 56.6 + 28.7 + 31.5, abs=0.2)
    kept = files[1]["results"][0]["pooled"]
    cost = sum(rows["block-4"]["ms"].values())
    tau = 1 + sum(kept["survival"][:4])
    assert found["four"] == pytest.approx(tau * files[0]["times"]["plain_ms"]["median"] / cost, rel=1e-3)
    assert module.section(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("loss-tv", 0.2, "TV alone is worse, beyond noise"),
        ("head-rnn", 0.2, "the rnn head is worse here"),
        ("depth-3", -0.2, "each layer helps; neither layer beyond noise"),
    ],
)
def test_words_that_the_files_no_longer_say_are_not_written(ablation, name, change, words):
    module, files = ablation
    (row,) = (row for row in files[0]["rows"] if row["name"] == name)
    row["tau"]["mean"] += change
    with pytest.raises(module.NoLongerTrue, match=words):
        module.values(*files)


def test_nothing_at_all(page, tmp_path):
    text = page.section(tmp_path / "none")
    assert "### No GPU yet" in text and text.count("###") == 1


def test_it_writes_between_its_markers_alone(page, gpu, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("# Before\n\nText.\n")
    page.main(["--results", str(gpu), "--readme", str(readme)])
    once = readme.read_text()
    assert once.startswith("# Before\n\nText.\n\n<!-- goals:begin -->\n| op ") and once.endswith(f"{page.END}\n")
    assert f"<!-- goals:end -->\n\n{page.BEGIN}\n## Kernels" in once
    readme.write_text(once.replace("150 (149", "999 (149") + "\nAfter.\n")
    page.main(["--results", str(gpu), "--readme", str(readme)])
    assert readme.read_text() == once + "\nAfter.\n"
    page.main(["--results", str(gpu), "--print"])
    assert "Imagined GPU" in capsys.readouterr().out


def test_the_committed_page_is_what_the_script_writes(page):
    readme = (BENCH / "README.md").read_text()
    assert page.written(readme, BENCH / "results") == readme, "run python bench/kernels_page.py"


def test_no_number_of_the_page_is_written_by_hand(page):
    """Nor one in words. What is left are bounds and a goal that stand in the code, and a GPU's name for itself."""
    readme = importlib.import_module("readme")
    text = (BENCH / "README.md").read_text()
    for name in ("static", "ablation", "kernels", "paper", "goals", "engine"):
        text = re.sub(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", "", text, flags=re.DOTALL)
    bound = importlib.import_module("bench_block_attention").BOUND
    for known in (f"within an RMS error of\n{100 * bound:g} %", "(goal: under 5 %)", "compute capability 9.0"):
        assert text.count(known) == 1, known
        text = text.replace(known, "")
    assert readme.unexplained(text, "bench/README.md") == []
    in_words = re.compile(r"\b(twice|thrice|(two|three|four|five|ten)\s+times)\s+(as|faster|slower)\b|\bhalf\s+the\b")
    assert in_words.findall(text) == [] and in_words.search("It is three\ntimes as fast.")
    for lie in ("It takes 80 ms.", "It keeps 12 % of them.", "A tau of 3.25 is reached."):
        assert len(readme.unexplained(text + "\n" + lie, "bench/README.md")) == 1


# --- the ops of the CPU path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
def test_ops_of_rounds_are_seen_and_are_torchs_own(page, make_target, make_draft, prompts, mode):
    bench = importlib.import_module("bench_round_ops")
    model = make_target()
    draft = make_draft(model)
    ids = prompts((9,)).input_ids
    common = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, "off_switch": False}
    runs = []
    for kept in (2, None):
        with bench.watched(mode, draft.config.block_size, kept) as seen:
            stats = generate(model, draft, ids, **common, **bench.MODES[mode]).stats
        runs.append(seen)
    layers, rounds = (model.config.num_hidden_layers, draft.config.num_hidden_layers), stats.rounds
    assert len(runs[1].began) == rounds > 2 and len(runs[1].seconds) == rounds - 1
    calls = {what: len(one.seconds) for (_, what), one in runs[1].ops.items()}
    assert calls["target's attention"] == layers[0] * rounds and calls["drafter's attention"] == layers[1] * rounds
    assert calls["store the block's own"] == layers[1] * rounds
    assert {calls["walk, greedy" if mode == "greedy" else "walk, sampled"], calls[f"verify, {mode}"]} == {rounds}
    copies = []
    for (name, what), one in runs[0].ops.items():
        found = bench.alone(name, *one.call, 2, copies)
        own_noise = mode == "rejection" and name in ("markov_walk", "verify")
        assert found["equality"].startswith("not compared" if own_noise else ("RMS", "tokens equal", "accepted")), what
        assert bench.bytes_of(name, *one.call) > 0
    assert len(copies) == 4 * len(runs[0].ops)
    args, options = runs[0].ops["masked_attention", "target's attention"].call
    q, k, _, cache = args
    assert k.shape[2] == int(cache.lengths) + q.shape[2]
    assert bench.bytes_of("masked_attention", args, options) == 2 * (k.numel() + q.numel()) * q.itemsize
    spoilt = (q, k, args[2] + 1, cache)
    plain = bench.plain_of("masked_attention", spoilt, options)
    with pytest.raises(ValueError, match="RMS error"):
        plain.equal(masked_attention(*args, **options), plain.call())


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
