"""How long the kernels of one model take to compile: with an empty cache, and from the cache afterwards.

    python bench/compile_time.py

Two processes run every kernel once at batch size 1 (``every_kernel.py``), with one TRITON_CACHE_DIR that is empty for
the first of them. A kernel's seconds are those of its first call less those of its second. Needs a GPU. Writes
``compile_time.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_folder

GOAL_S = 30.0


def run(model: str, cache: str) -> dict[str, Any]:
    """``every_kernel.py`` in a process of its own: its JSON line."""
    script = Path(__file__).parent / "every_kernel.py"
    done = subprocess.run(
        [sys.executable, str(script), "--model", model],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"every_kernel.py failed with exit status {done.returncode}: nothing is reported")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen3-4B")
    parser.add_argument("--out", type=Path, help="folder of the JSON file; bench/results/<device> by default")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("compile time: not measured: no GPU was at hand")
        return
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = run(arguments.model, cache), run(arguments.model, cache)
    verdict = "reached" if cold["seconds"] <= GOAL_S else "not reached"
    result = {
        "machine": describe("cuda"),
        "model": arguments.model,
        "cold_s": cold["seconds"],
        "warm_s": warm["seconds"],
        "goal": f"under {GOAL_S:.0f} s: {verdict}",
        "cold": cold["rows"],
        "warm": warm["rows"],
    }
    folder = arguments.out or results_folder("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compile_time.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{arguments.model}: {cold['seconds']:.1f} s with an empty cache, {warm['seconds']:.1f} s from the cache")
    print(f"goal: all kernels of one model compiled in under {GOAL_S:.0f} s: {verdict}")


if __name__ == "__main__":
    main()
