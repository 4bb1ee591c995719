"""What follows from shapes alone, said beforehand: kernels' times, rounds' floors, the size of a feature cache.

    python bench/predicted.py    # writes results/predicted.json, which the READMEs' predictions come from
    python bench/predicted.py --rate 3.35 --out other.json    # for another GPU, which copies so many TB/s

Nothing is run. A kernel takes its bytes over the copy rate and 2 us for each launch, both assumed; a round's floor is
the time of the bytes that any implementation must read (``scripted.floor_of``).
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from kernels_page import PAIRS, RATE
from scripted import SMOLLM2, floor_of, shape_of
from table import LAUNCH_US

FILE = Path(__file__).parent / "results" / "predicted.json"
OPS = ("markov", "verify", "block_attention", "context_kv", "sampling")
CONTEXTS = (512, 4096, 32_768)
TAPS = 5  # the authors' number


def kernels(rate: float) -> list[dict[str, Any]]:
    """Every case that is timed on a GPU; microseconds.

    Args:
        rate: TB/s.
    """
    rows = []
    for op in OPS:
        for case in importlib.import_module(f"bench_{op}").BENCH.cases("gpu"):
            copied = (case.bytes + case.own) / rate / 1e6
            counted = {"bytes": case.bytes, "own_bytes": case.own, "launches": case.launches}
            times = {"us": copied + LAUNCH_US * case.launches, "us_without_launches": copied}
            rows.append({"op": op, "case": case.name, **counted, **{key: round(us, 2) for key, us in times.items()}})
    return rows


def rounds(rate: float) -> list[dict[str, Any]]:
    """Floors at batch 1; milliseconds."""
    rows = []
    for pair in PAIRS:
        model, draft = shape_of(pair.target, pair.draft)
        room = model.config.max_position_embeddings
        for context in (one for one in CONTEXTS if one < room):
            read = floor_of(model, draft, 1, context).round
            rows.append({"pair": pair.name, "context": context, "bytes": read, "floor_ms": round(read / rate / 1e9, 4)})
    return rows


def feature_bytes(hidden: int, taps: int) -> int:
    """Of a token in the authors' cache layout: the taps and the target's last state in bf16, id, two masks, log-sum."""
    return (taps + 1) * hidden * torch.bfloat16.itemsize + torch.int32.itemsize + 2 + torch.float32.itemsize


def result(rate: float = RATE) -> dict[str, Any]:
    """All of it."""
    return {
        "assumed": {"copy_tb_s": rate, "launch_us": LAUNCH_US, "of": "an H200, as measured by others"},
        "features": {"model": "SmolLM2-135M", "taps": TAPS, "bytes": feature_bytes(SMOLLM2["hidden_size"], TAPS)},
        "rounds": rounds(rate),
        "kernels": kernels(rate),
    }


def text(found: dict[str, Any]) -> str:
    """The JSON, a row a line."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list):
            value = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        else:
            value = json.dumps(value)
        parts.append(f' "{name}": {value}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=RATE, metavar="TB/S")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    arguments = parser.parse_args()
    if arguments.rate <= 0:
        parser.error(f"--rate is {arguments.rate:g}: accepted is more than 0")
    found = result(arguments.rate)
    if arguments.rate != RATE:
        found["assumed"]["of"] = "as asked"
    arguments.out.write_text(text(found), encoding="utf-8")
    print(f"wrote {arguments.out.name}: {len(found['kernels'])} kernels, {len(found['rounds'])} rounds")


if __name__ == "__main__":
    main()
