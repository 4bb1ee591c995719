"""The microbenchmarks: their bytes models, what counts as equal, and that they report nothing where it is not."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"
OPS = ["markov", "verify", "block_attention", "context_kv", "sampling", "draft_loss"]


@pytest.fixture
def load(monkeypatch):
    """``load("bench_markov")``: a module of bench/, whose files import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


class FakeDevice(str):
    """``FakeDevice("cpu")`` makes tensors on the CPU and passes for a GPU."""

    type = "cuda"


@pytest.fixture
def fake_gpu(monkeypatch, load):
    """A GPU to rehearse on: events that read the clock, graphs that call again what they captured."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    class Graph:
        replays = 0

        def replay(self):
            Graph.replays += 1

    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: contextlib.nullcontext(),
        "graph": lambda graph: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: None,
        "mem_get_info": lambda device: (2**34, 2**34),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**20),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(load("timing"), "FLUSH_BYTES", 2**10)
    return Graph


def simple_bench(load, ours, *, other=None, why_not=None):
    """A bench of one case that adds 1 to a number."""
    table = load("table")
    case = table.Case("one", {"batch": 1}, lambda device: torch.zeros(4), 32, 1, 0, True)
    providers = [
        table.Provider(table.OURS, lambda x: lambda: ours(x), why_not or (lambda case, device: None)),
        table.Provider("other", lambda x: lambda: (other or torch.add)(x, 1)),
    ]
    return table.Bench(
        "simple",
        lambda scale: [case],
        providers,
        lambda x: x + 1,
        lambda x, out, right: table.Verdict(torch.equal(out, right), "all equal"),
        [table.Goal("under a second", lambda rows: rows[0]["median_us"], at_most=1e6, unit="us")],
        [],
    )


@pytest.mark.parametrize("op", OPS)
def test_it_loads(op, load):
    bench = load(f"bench_{op}").BENCH
    table = load("table")
    assert bench.op == op
    for scale in ("gpu", "cpu", "tiny"):
        names = [case.name for case in bench.cases(scale)]
        assert names and len(set(names)) == len(names)
        assert all(case.bytes > 0 and case.launches > 0 and case.shape["batch"] > 0 for case in bench.cases(scale))
    # A goal that looks for a case by a name that no case has would never be measured.
    rows = [
        {"case": case.name, "provider": provider.name, "median_us": 1.0, "percent_of_copy_rate": 50.0}
        for case in bench.cases("gpu")
        for provider in bench.providers
    ]
    assert all(goal.value(rows) is not None for goal in bench.goals)
    assert all((goal.at_least is None) != (goal.at_most is None) for goal in bench.goals)
    assert {table.OURS, table.EAGER} <= {provider.name for provider in bench.providers}


@pytest.mark.parametrize("op", OPS)
def test_a_reduced_run(op, load, tmp_path, monkeypatch):
    """The command itself, on the tiny shapes: every torch provider is equal and timed, and the file says all of it."""
    monkeypatch.setattr(load("report"), "rate_of", lambda folder, device: 1.0)
    load("report").main(
        load(f"bench_{op}").BENCH,
        ["--device", "cpu", "--scale", "tiny", "--seconds", "0.001", "--out", str(tmp_path)],
    )
    result = json.loads((tmp_path / f"{op}.json").read_text())
    assert result["op"] == op and not result["stopped"] and result["machine"]["torch"]
    assert {row["provider"] for row in result["rows"]} >= {"reference, eager"}
    assert not [line for line in result["left_out"] if "failed" in line["why"] or "not equal" in line["why"]]
    assert {line["provider"] for line in result["left_out"]} >= {"dspark-fast"}
    assert {goal["verdict"] for goal in result["goals"]} == {"not measured: no GPU was at hand"}
    for row in result["rows"]:
        assert row["median_us"] > 0 and row["bytes"] > 0 and row["equality"] and row["timed"]


def test_markov_bytes(load):
    count = load("bench_markov").bytes_moved
    # 3 steps over W2 [5, 2] and a row of W1 each, bf16; base logits [1, 3, 5] bf16.
    assert count(1, 3, 5, 2) == 3 * 5 * 2 * 2 + 3 * 2 * 2 + 3 * 5 * 2
    # Two rows share W2; fp32 logits kept; a matrix of 100 bytes read at each step.
    assert count(2, 3, 5, 2, kept=4, head=100) == 3 * 5 * 2 * 2 + 2 * (3 * 2 * 2 + 3 * 5 * (2 + 4)) + 3 * 100
    assert round(count(1, 7, 151_936, 256) / 1e6) == 547  # design.md's 0.54 GB of W2, and 2 MB of logits


def test_verify_bytes(load):
    count = load("bench_verify").bytes_moved
    assert count([3], 10, "greedy") == 4 * 10 * 2
    assert count([3, 0], 10, "coupled") == 5 * 10 * 2
    assert count([3, 0], 10, "rejection") == 5 * 10 * 2 + 2 * 10 * (2 + 4)
    assert count([3], 10, "rejection", cut=True) == 2 * 4 * 10 * 2 + 10 * (2 + 4)
    assert count([3], 10, "coupled", cut=True) == 3 * 4 * 10 * 2


def test_attention_bytes(load):
    module = load("bench_block_attention")
    assert [module.splits(length, 8) for length in (1, 256, 257, 8192, 32768)] == [1, 1, 2, 32, 32]
    # Rows of 5 and 300 keys: 1 and 2 splits. Hkv 2, Hq 4, D 8, T 3, bf16.
    cached, queries, partials = 305 * 2 * 2 * 8 * 2, 2 * 3 * 4 * 8 * 2 * 2, 3 * 3 * 4 * (8 + 2) * 4 * 2
    assert module.bytes_moved([5, 300], 3, 4, 2, 8) == cached + queries
    assert module.partial_bytes([5, 300], 3, 4, 2, 8) == partials


def test_context_and_sampling_bytes(load):
    # 3 new rows of 2 heads of 8: K and V in and out in bf16, cosines and sines in fp32.
    assert load("bench_context_kv").bytes_moved([1, 2, 0], 2, 8) == 3 * (4 * 2 * 8 * 2 + 2 * 8 * 4)
    sampling = load("bench_sampling")
    assert sampling.bytes_moved(2, 10) == 2 * 10 * (3 * 2 + 4)
    assert sampling.bytes_moved(2, 10, cut=False) == 2 * 10 * (2 * 2 + 4)
    assert sampling.noise_bytes(2, 10) == 80


def test_predictions_are_the_models(load):
    table = load("table")
    outcome = table.run(simple_bench(load, lambda x: x + 1), "cpu", torch.device("cpu"), 16.0, budget=9, seconds=0.001)
    ours, other = outcome.rows
    assert ours["predicted_us"] == 32 / 16 + 2 and other["predicted_us"] is None
    assert ours["percent_of_copy_rate"] == pytest.approx(100 * 32 / 16 / ours["median_us"], abs=0.2)


def test_it_reports_nothing_where_ours_is_wrong(load, tmp_path, monkeypatch):
    report = load("report")
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--seconds", "0.001"]
    monkeypatch.setattr(report, "rate_of", lambda folder, device: 1.0)
    for wrong in (lambda x: x + 2, lambda x: x.missing):
        with pytest.raises(SystemExit, match="nothing is reported"):
            report.main(simple_bench(load, wrong), arguments)
        assert not list(tmp_path.iterdir())
    report.main(simple_bench(load, lambda x: x + 1), arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["simple.json"]


def test_another_that_is_wrong_is_not_timed(load):
    table = load("table")
    bench = simple_bench(load, lambda x: x + 1, other=torch.sub)
    outcome = table.run(bench, "cpu", torch.device("cpu"), 1.0, budget=9, seconds=0.001)
    assert [row["provider"] for row in outcome.rows] == [table.OURS] and not outcome.refused
    assert "not equal" in outcome.left_out[0]["why"]


def test_time_limits(load):
    table = load("table")
    with pytest.raises(table.Slow), table.time_limit(0.02):
        time.sleep(5)
    outcome = table.run(simple_bench(load, lambda x: x + 1), "cpu", torch.device("cpu"), 1.0, budget=-1)
    assert not outcome.rows and "budget" in outcome.left_out[0]["why"]

    def slow(x):
        time.sleep(5)

    bench = simple_bench(load, lambda x: x + 1)
    bench = bench._replace(providers=[table.Provider("slow", lambda x: lambda: slow(x), compiles=1)])
    outcome = table.run(bench, "cpu", torch.device("cpu"), 1.0, budget=9, compile_limit=0.05)
    assert outcome.left_out == [{"case": "one", "provider": "slow", "why": "took over 0 s"}]


def test_where_another_is_faster(load):
    report = load("report")
    rows = [
        {"case": "a", "provider": "dspark-fast", "median_us": 2.0},
        {"case": "a", "provider": "x", "median_us": 1.0},
        {"case": "b", "provider": "x", "median_us": 1.0},
    ]
    assert report.lost(rows) == 1 and report.lost(rows[1:]) is None
    assert report.behind(rows) == ["a: x 1.0 us, ours 2.0 us"]
    assert report.ratio(("a", "x"), ("a", "dspark-fast"))(rows) == 0.5
    goal = load("table").Goal("", report.lost, at_most=0)
    judged = report.judge([goal], rows, FakeDevice("cpu"))
    assert judged[0]["verdict"] == "not reached"


def test_a_walk_may_differ_by_near_ties_only(load):
    module = load("bench_markov")
    for mode in ("greedy kept", "sampled"):
        inputs = module.build("tiny", 3, mode, "vanilla", torch.device("cpu"))
        expected = module.expect(inputs)
        assert module.equal(inputs, expected, expected) == (True, "tokens equal")
        assert not module.equal(inputs, expected._replace(tokens=(expected.tokens + 1) % 203), expected).equal
        assert not module.equal(inputs, expected._replace(row_max=expected.row_max + 0.1), expected).equal
        assert not module.equal(inputs, expected._replace(logits=expected.logits * 1.02), expected).equal
        assert not module.equal(inputs, expected._replace(logits=expected.logits * torch.nan), expected).equal
    # A true near-tie: the reference's best two scores of one slot made equal, and the other one chosen.
    inputs = module.build("tiny", 1, "greedy kept", "vanilla", torch.device("cpu"))
    expected = module.expect(inputs)
    logits, tokens = expected.logits.clone(), expected.tokens.clone()
    best, second = logits[0, 4].topk(2).indices
    logits[0, 4, second] = logits[0, 4, best]
    tokens[0, 4:] = second
    verdict = module.equal(inputs, expected._replace(tokens=tokens), expected._replace(logits=logits))
    assert verdict.equal and "near-tie" in verdict.note


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_a_verdict_may_differ_by_near_ties_only(mode, load):
    module = load("bench_verify")
    inputs = module.build("tiny", [7, 7, 3, 0], mode, "", torch.device("cpu"))
    accepted, token = module.expect(inputs)
    assert module.equal(inputs, (accepted, token), (accepted, token)).equal
    assert not module.equal(inputs, (accepted, (token + 1) % 203), (accepted, token)).equal
    fewer = torch.where(torch.arange(4) == accepted.argmax(), accepted - 1, accepted)
    assert not module.equal(inputs, (fewer, token), (accepted, token)).equal


def test_cuts_may_differ_at_the_edge_only(load):
    module = load("bench_sampling")
    inputs = module.build("tiny", 2, "top-p 0.9", torch.device("cpu"))
    expected = module.expect(inputs)
    cut = expected.clone()
    cut[0, cut[0].argmax()] = -torch.inf
    assert module.equal(inputs, expected, expected).equal and not module.equal(inputs, cut, expected).equal


def test_a_stray_store_is_seen(load):
    module = load("bench_context_kv")
    inputs = module.build("tiny", [2, 5], 5, torch.device("cpu"))
    expected = module.expect(inputs)
    for cache in range(2):
        stray = [tensor.clone() for tensor in expected]
        stray[cache][0, 3] += 1
        assert "none of the new ones" in module.equal(inputs, stray, expected).note


def test_rehearsal_on_a_fake_gpu(load, fake_gpu, capsys):
    """What runs on a GPU, as far as it can without one: capture, flush, events, our kernels (interpreted), goals."""
    pytest.importorskip("triton")
    table, report, device = load("table"), load("report"), FakeDevice("cpu")
    bench = load("bench_context_kv").BENCH
    outcome = table.run(bench, "tiny", device, 1000.0, budget=60, seconds=0.001, compiled=False)
    assert not outcome.refused and fake_gpu.replays > 0
    rows = [row for row in outcome.rows if row["provider"] == table.OURS]
    assert len(rows) == len(bench.cases("tiny"))
    assert all(row["timed"] == "graph" and row["back_to_back_us"] is not None for row in rows)
    goals = report.judge(bench.goals, outcome.rows, device)
    assert goals[0]["verdict"] == "not measured"  # its case is none of the tiny ones
    report.print_table({"notes": [], "goals": goals, "slower_than_another": []}, outcome)
    assert "predicted" in capsys.readouterr().out
    roofline = load("roofline")
    assert roofline.copy_rate(device, 2**16)["copy_tb_s"] >= 0 and roofline.launches(device)["smallest_graph_us"] >= 0


def test_a_call_that_waits_for_the_host_is_not_captured(load, fake_gpu, monkeypatch):
    timing = load("timing")
    strict = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: strict.append(mode))

    def call():
        if strict[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return 5

    prepared = timing.ready(call, FakeDevice("cpu"))
    assert prepared.out == 5 and prepared.how == "call, not captured: it waits for the host"
    assert strict == ["error", "default"]


def test_every_kernel(load, monkeypatch, capsys):
    pytest.importorskip("triton")
    module = load("every_kernel")
    monkeypatch.setattr(sys, "argv", ["every_kernel.py", "--ops", "context_kv"])
    module.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["rows"]) == 3 and all(row["equal"] for row in result["rows"])
    assert module.chosen(load("bench_verify").BENCH, "Qwen3-4B", 1)
    assert all(case.shape["batch"] >= 2 for case in module.chosen(load("bench_markov").BENCH, "tiny", 2))


def test_under_pytest(load, monkeypatch):
    """The pytest-benchmark entrance, with a stand-in for its fixture: the bench extra may not be installed."""
    report, bench = load("report"), load("bench_context_kv").BENCH
    monkeypatch.setattr(report, "rate_of", lambda folder, device: 1.0)
    ran = []
    fixture = SimpleNamespace(extra_info={}, pedantic=lambda call, **options: ran.append(call()))
    case = bench.cases("tiny")[0]
    report.under_pytest(fixture, bench, case, bench.providers[1], torch.device("cpu"))
    assert ran and fixture.extra_info["case"] == case.name
    with pytest.raises(pytest.skip.Exception, match="GPU only"):
        report.under_pytest(fixture, bench, case, bench.providers[0], torch.device("cpu"))


def test_the_script_for_gpus_parses():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    subprocess.run([bash, "-n", str(BENCH / "gpu.sh")], check=True)


def test_plots_and_summary(load, tmp_path):
    row = {"case": "m B=1 greedy", "batch": 1, "provider": "dspark-fast", "median_us": 2.0, "quartiles_us": [1.0, 3.0]}
    rows = [{**row, "predicted_us": 1.0}, {**row, "case": "m B=4 greedy", "batch": 4, "predicted_us": 1.5}]
    goals = [{"goal": "fast", "value": 2.0, "unit": "us", "verdict": "reached"}]
    result = {"op": "simple", "machine": {"device": "a GPU"}, "copy_tb_s": 1.0, "rows": rows, "stopped": "",
              "goals": goals, "slower_than_another": ["m: x"]}  # fmt: skip
    (tmp_path / "simple.json").write_text(json.dumps(result))
    assert load("summary").lines(tmp_path) == ["simple: 2 rows", "  fast: 2 us: reached", "  slower than another: m: x"]
    plots = load("plot_ops")
    assert list(plots.panels(rows)) == ["m greedy"]
    pytest.importorskip("matplotlib")
    plots.plot(result, tmp_path / "simple.png")
    assert (tmp_path / "simple.png").stat().st_size > 1000
