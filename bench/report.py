"""What a microbenchmark prints and writes, and its two entrances: a command, and pytest-benchmark."""

from __future__ import annotations

import argparse
import json
import logging
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_folder
from roofline import rate_of
from table import EAGER, LAUNCH_US, OURS, Bench, Case, Goal, Outcome, Provider, TimeUp, make_row, prepare, run
from timing import measure, synced

NO_GPU = "not measured: no GPU was at hand"
Rows = list[dict[str, Any]]


def main(bench: Bench, arguments: list[str] | None = None) -> None:
    """The command: run, print, write ``<op>.json``. Exit status 1 without a file where our kernel is not equal."""
    parser = argparse.ArgumentParser(description=f"Microbenchmark of {bench.op}.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("gpu", "cpu", "tiny"), help="sizes; the device's own by default")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no further row is begun")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds of timing per row")
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU too, which takes minutes")
    parser.add_argument("--predict", type=float, metavar="TB/S", help="only print what is predicted at this copy rate")
    parser.add_argument("--out", type=Path, help="folder of the JSON file; bench/results/<device> by default")
    options = parser.parse_args(arguments)

    if options.predict:
        print_predictions(bench, options.scale or "gpu", options.predict * 1e6)
        return
    device = torch.device(options.device)
    scale = options.scale or ("gpu" if device.type == "cuda" else "cpu")
    folder = options.out or results_folder(options.device)
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # a line per graph break, and the reference has many
    signal.signal(signal.SIGTERM, _stop)  # `timeout` sends it: what was measured until then is written
    rate = rate_of(folder, device)
    print(f"{bench.op} on {describe(options.device)['device']}, copy rate {rate / 1e6:.3f} TB/s, {scale} shapes")
    compiled = options.compile or device.type == "cuda"
    with torch.no_grad():
        outcome = run(
            bench, scale, device, rate, budget=options.budget, compiled=compiled, seconds=options.seconds, say=_say
        )
    if outcome.refused:
        lines = "\n  ".join(outcome.refused)
        raise SystemExit(f"{bench.op}: nothing is reported, because our kernel differs from the reference:\n  {lines}")
    result = {
        "op": bench.op,
        "machine": describe(options.device),
        "copy_tb_s": round(rate / 1e6, 4),
        "scale": scale,
        "notes": bench.notes,
        "stopped": outcome.stopped,
        "rows": outcome.rows,
        "left_out": outcome.left_out,
        "goals": judge(bench.goals, outcome.rows, device),
        "slower_than_another": behind(outcome.rows),
    }
    partial = folder / f"{bench.op}.json.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(folder / f"{bench.op}.json")
    print_table(result, outcome)
    if outcome.stopped:
        raise SystemExit(f"{bench.op}: {outcome.stopped}")


def print_predictions(bench: Bench, scale: str, rate: float) -> None:
    """What the bytes and launches of every case come to, without running one."""
    print(f"{'case':44} {'bytes':>13} {'launches':>8} {'predicted us':>12} {'without launches':>17}")
    for case in bench.cases(scale):
        bare = (case.bytes + case.own) / rate
        total = bare + LAUNCH_US * case.launches
        print(f"{case.name:44} {case.bytes:>13,} {case.launches:>8} {total:>12.1f} {bare:>17.1f}")


def judge(goals: list[Goal], rows: Rows, device: torch.device) -> list[dict[str, Any]]:
    """Every goal with its figure and "reached", "not reached" or "not measured"."""
    judged = []
    for goal in goals:
        value = goal.value(rows) if device.type == "cuda" else None
        if value is not None:
            verdict = "reached" if goal.reached(value) else "not reached"
        else:
            verdict = "not measured" if device.type == "cuda" else NO_GPU
        shown = None if value is None else round(value, 3)
        judged.append({"goal": goal.text, "value": shown, "unit": goal.unit, "verdict": verdict})
    return judged


def behind(rows: Rows) -> list[str]:
    """Where another provider of the same run is faster than our kernel."""
    found = []
    for ours in (row for row in rows if row["provider"] == OURS):
        for row in rows:
            other = row["case"] == ours["case"] and not row["provider"].startswith(OURS)  # nor a variant of ours
            if other and row["median_us"] < ours["median_us"]:
                found.append(f"{row['case']}: {row['provider']} {row['median_us']} us, ours {ours['median_us']} us")
    return found


def lost(rows: Rows) -> float | None:
    """A goal's value: in how many rows another provider is faster than our kernel; None if ours was not measured."""
    return float(len(behind(rows))) if any(row["provider"] == OURS for row in rows) else None


def of(rows: Rows, case: str, provider: str = OURS, key: str = "median_us") -> float | None:
    """One figure of one row, None if it is not there."""
    for row in rows:
        if row["case"] == case and row["provider"] == provider:
            return row[key]
    return None


def ratio(over: tuple[str, str], under: tuple[str, str]) -> Callable[[Rows], float | None]:
    """A goal's value: the median of (case, provider) ``over`` in units of that of ``under``."""

    def value(rows: Rows) -> float | None:
        one, other = of(rows, *over), of(rows, *under)
        return None if one is None or other is None else one / other

    return value


def speedups(provider: str = EAGER, *, among: str = "") -> Callable[[Rows], float | None]:
    """A goal's value: the smallest speedup over ``provider`` among the cases whose name holds ``among``."""

    def value(rows: Rows) -> float | None:
        cases = [row["case"] for row in rows if row["provider"] == OURS and among in row["case"]]
        found = [ratio((case, provider), (case, OURS))(rows) for case in cases]
        found = [value for value in found if value is not None]
        return min(found) if found else None

    return value


def print_table(result: dict[str, Any], outcome: Outcome) -> None:
    """Rows by case, then what was left out, the goals, and where we are behind."""
    print(f"\n{'case':44} {'provider':28} {'predicted':>9} {'median':>9} {'quartiles':>19} {'% of copy':>9}  timed")
    for row in sorted(outcome.rows, key=lambda row: row["case"]):
        predicted = "" if row["predicted_us"] is None else f"{row['predicted_us']:.1f}"
        low, high = row["quartiles_us"]
        print(
            f"{row['case']:44} {row['provider']:28} {predicted:>9} {row['median_us']:>9.1f} "
            f"{low:>9.1f} {high:>9.1f} {row['percent_of_copy_rate']:>9.1f}  {row['timed']}"
        )
    counted = Counter((line["provider"], line["why"]) for line in outcome.left_out)
    for (provider, why), count in counted.items():
        print(f"left out: {provider}, {count} case{'s' * (count > 1)}: {why}")
    for note in result["notes"]:
        print(f"note: {note}")
    for goal in result["goals"]:
        value = "" if goal["value"] is None else f": {goal['value']:g} {goal['unit']}"
        print(f"goal: {goal['goal']}{value}: {goal['verdict']}")
    for line in result["slower_than_another"]:
        print(f"slower than another: {line}")


def under_pytest(benchmark: Any, bench: Bench, case: Case, provider: Provider, device: torch.device) -> None:
    """The pytest-benchmark entrance: one case, one provider. The timer's own figures go into ``extra_info``."""
    import pytest

    reason = provider.why_not(case, device)
    if provider.compiles and (device.type != "cuda" or not case.compiled):
        reason = reason or "compiles: run on a few shapes, on a GPU"
    if reason:
        pytest.skip(reason)
    with torch.no_grad():
        inputs = case.build(device)
        prepared, verdict = prepare(bench, provider, inputs, bench.expect(inputs), device)
        assert verdict.equal, verdict.note
        row = make_row(bench, case, provider, prepared, verdict, measure(prepared, device, 0.05), _rate(device))
        benchmark.group = f"{bench.op}: {case.name}"
        benchmark.extra_info.update(row)
        benchmark.pedantic(synced(prepared, device), rounds=10, iterations=1, warmup_rounds=2)


def _rate(device: torch.device) -> float:
    if device not in _RATES:
        _RATES[device] = rate_of(None, device)
    return _RATES[device]


_RATES: dict[torch.device, float] = {}


def _say(line: str) -> None:
    print(line, flush=True)


def _stop(*_: Any) -> None:
    raise TimeUp("told to stop")
