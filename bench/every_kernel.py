"""Every kernel once: its result against the reference, and the seconds until its first result.

    python bench/every_kernel.py --model Qwen3-4B     # the shapes of one model at batch size 1
    python bench/every_kernel.py --rows 2             # tiny shapes of at least two rows, for compute-sanitizer

The last line printed is JSON. ``compile_time.py`` runs this in processes of its own. With TRITON_INTERPRET=1 it runs
without a GPU, on the tiny shapes. Exit status 1 if a result differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from typing import Any

import torch
from table import OURS, Bench, Case

OPS = ("markov", "verify", "block_attention", "context_kv", "sampling", "draft_loss")
LONGEST = 4096  # a longer context compiles nothing new


def chosen(bench: Bench, model: str, rows: int) -> list[Case]:
    """The cases of one model at batch size 1; for the tiny shapes, those of at least ``rows`` rows."""
    if model == "tiny":
        return [case for case in bench.cases("tiny") if case.shape["batch"] >= rows]
    cases = [case for case in bench.cases("gpu") if case.shape["model"] == model and case.shape["batch"] == 1]
    return [case for case in cases if case.shape.get("S", 0) <= LONGEST]


def once(bench: Bench, case: Case, device: torch.device) -> dict[str, Any] | None:
    """First and second call of our kernel in seconds, and whether it is equal; None if the op has no kernel here."""
    ours = next(provider for provider in bench.providers if provider.name == OURS)
    if ours.why_not(case, torch.device("cuda")) is not None:
        return None
    inputs = case.build(device)
    expected = bench.expect(inputs)
    call = ours.prepare(inputs)
    _wait(device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        out = call()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    verdict = bench.equal(inputs, out, expected)
    return {
        "op": bench.op,
        "case": case.name,
        "first_s": round(seconds[0], 4),
        "second_s": round(seconds[1], 4),
        "equal": verdict.equal,
        "note": verdict.note,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=1, help="of the tiny shapes, those of at least so many rows")
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for op in arguments.ops:
        bench = importlib.import_module(f"bench_{op}").BENCH
        for case in chosen(bench, arguments.model, arguments.rows):
            row = once(bench, case, device)
            if row is not None:
                rows.append(row)
                print(
                    f"{row['first_s']:8.3f} s then {row['second_s']:.4f} s  {op}: {case.name}: {row['note']}",
                    flush=True,
                )
    total = sum(row["first_s"] - row["second_s"] for row in rows)
    print(json.dumps({"model": arguments.model, "seconds": round(total, 3), "rows": rows}))
    if not all(row["equal"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
