"""The roof of this machine: how fast it copies, and what launching costs. Every op's bytes are judged against it.

    python bench/roofline.py

Measured, never quoted: a large copy from memory to memory, bytes read plus bytes written over the median time. Writes
``roofline.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_folder
from timing import GRAPH, measure, ready

CPU_BYTES = 256 * 2**20
GPU_BYTES = 4 * 2**30
CHAIN = 21


def copy_rate(device: torch.device, size: int | None = None) -> dict[str, Any]:
    """A copy of ``size`` bytes of random data: TB/s, read plus written, at the median and the quartiles."""
    if size is None:
        size = CPU_BYTES
        if device.type == "cuda":
            size = min(GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    timing = measure(ready(lambda: target.copy_(source), device), device, seconds=0.5)
    moved = 2 * source.numel() * source.element_size()
    low, high = timing.quartiles_us
    return {
        "bytes_moved": moved,
        "copy_tb_s": round(moved / timing.median_us / 1e6, 4),
        "quartiles_tb_s": [round(moved / high / 1e6, 4), round(moved / low / 1e6, 4)],
        "samples": timing.samples,
    }


def launches(device: torch.device) -> dict[str, float] | None:
    """A graph of one kernel on one number, and what every further kernel that waits for the one before it adds."""
    if device.type != "cuda":
        return None
    number = torch.zeros(1, device=device)

    def chain() -> None:
        for _ in range(CHAIN):
            number.add_(1)

    one, many = ready(lambda: number.add_(1), device), ready(chain, device)
    if one.how != GRAPH or many.how != GRAPH:
        return None
    first, all_of_them = measure(one, device).median_us, measure(many, device).median_us
    return {"smallest_graph_us": round(first, 2), "next_launch_us": round((all_of_them - first) / (CHAIN - 1), 2)}


def rate_of(folder: Path | None, device: torch.device) -> float:
    """Bytes per microsecond: from ``roofline.json`` in ``folder`` if it is of this very device, else measured now."""
    if folder is not None and (folder / "roofline.json").is_file():
        known = json.loads((folder / "roofline.json").read_text())
        if known["machine"]["device"] == describe(str(device))["device"]:
            return known["copy"]["copy_tb_s"] * 1e6
    return copy_rate(device)["copy_tb_s"] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder of the JSON file; bench/results/<device> by default")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result = {"machine": describe(arguments.device), "copy": copy_rate(device), "launches": launches(device)}
    folder = arguments.out or results_folder(arguments.device)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "roofline.json").write_text(json.dumps(result, indent=2) + "\n")
    low, high = result["copy"]["quartiles_tb_s"]
    print(
        f"{result['machine']['device']}: copies {result['copy']['copy_tb_s']:.3f} TB/s (quartiles {low:.3f} {high:.3f})"
    )
    if result["launches"]:
        print(
            "graph of one tiny kernel {smallest_graph_us} us, each further one {next_launch_us} us".format_map(
                result["launches"]
            )
        )
    else:
        print("launches: not measured, no GPU is at hand")


if __name__ == "__main__":
    main()
