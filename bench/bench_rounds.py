"""Seconds per round: as a graph, without one, and what else a user could call; each against the bytes of a round.

    python bench/bench_rounds.py
    python bench/bench_rounds.py --predict 4.3                   # the floors at that copy rate, without a GPU
    python bench/bench_rounds.py --scale tiny --out folder       # a rehearsal on a CPU, all but the graph

A pair in Qwen3-4B's shape with random weights and scripted acceptance (``scripted.py``), and SmolLM2-135M with the
drafter that ships, if its weights can be had. Greedy, to a fixed length. Time counts from the first new token on, as
the host hears of it. Ways are warmed up, compared, and then timed in alternation (``rounds.py``); a case whose graph
does not say what the loop without graphs says is not reported. Writes ``rounds.json``, anew after each case.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
from pathlib import Path
from typing import Any

import torch
from machine import describe, results_folder
from report import judge, of
from roofline import rate_of
from rounds import EVERY, GRAPH, LARGE, NO_GRAPH, NOTEBOOK, SCRIPTED, SMALL, SMALLEST, STATIC, Case, Rounds
from scripted import QWEN3_4B, QWEN3_4B_DRAFT, SMOLLM2, TINY, TINY_DRAFT, expected_tau, floor_of, shape_of
from table import Goal, TimeUp


def cases(scale: str) -> list[Case]:
    """In order of interest, since a budget may end anywhere. SmolLM2 has 8,192 positions, so no 32,768 of them."""
    if scale == "tiny":
        return [Case(SMALLEST, 1, 40, EVERY), Case(SMALLEST, 3, 40)]
    compiled = (GRAPH, NO_GRAPH, STATIC)  # takes as long as all before it, so it has a case of its own
    return [
        Case(LARGE, 1, 512, EVERY),
        Case(LARGE, 1, 4096),
        Case(LARGE, 1, 32_768),
        Case(LARGE, 1, 512, compiled),
        Case(SMALL, 1, 512, EVERY),
        Case(SMALL, 1, 4096),
        *(Case(LARGE, batch, context) for context in (512, 4096, 32_768) for batch in (4, 16)),
        *(Case(SMALL, batch, context) for context in (512, 4096) for batch in (4, 16)),
        Case(LARGE, 1, 4096, compiled),
    ]


FIRST = Case(LARGE, 1, 512).name


def over_notebook(rows: list[dict[str, Any]]) -> float | None:
    """How many times the notebook's tokens per second a graph gives at B = 1."""
    ours, theirs = (of(rows, FIRST, way, "tokens_per_second") for way in (GRAPH, NOTEBOOK))
    return ours / theirs if ours and theirs else None


GOALS = [
    Goal(
        f"a round in a graph, {FIRST}: at most 1.25 of its floor",
        lambda rows: of(rows, FIRST, GRAPH, "of_floor"),
        at_most=1.25,
        unit="of the floor",
    ),
    Goal("the same: 15 times the tokens per second of the notebook's loop", over_notebook, at_least=15, unit="times"),
]
NOTES = [
    f"{LARGE}: {SCRIPTED}; the target repeats its last token by a wide margin, so its text is no text",
    "floor of a round: target weights, draft layers, LM head once more, fc, Markov W2 once per slot, K and V of both; "
    "of a step without a drafter: target weights, K and V; no activations, no logits",
    "time is from the first new token to the last, as the host hears of them; peak memory is of a warm-up, weights "
    "included, without the graphs of other ways",
    "notebook's loop: the target behind its own cache, cropped, and the drafter over the whole context every round; "
    "reference, no cache: the target reads the whole text every round, too",
    "same_tokens: new tokens before the first that differs from ours, in the row where they are fewest",
]


def behind(rows: list[dict[str, Any]]) -> list[str]:
    """Where another way gives more tokens per second than the graph next to it."""
    found = []
    for ours in (row for row in rows if row["provider"] == GRAPH):
        for row in rows:
            if row["case"] == ours["case"] and row["tokens_per_second"] > ours["tokens_per_second"]:
                speeds = f"{row['tokens_per_second']} tokens/s, the graph {ours['tokens_per_second']}"
                found.append(f"{row['case']}: {row['provider']} {speeds}")
    return found


def print_floors(scale: str, rate: float, right: float, new_tokens: int) -> None:
    """What the bytes of every case come to at ``rate`` bytes per microsecond; nothing is loaded or run."""
    drafts = Path(__file__).parent.parent / "dspark_fast" / "drafts" / "SmolLM2-135M-Instruct"
    given = {LARGE: (QWEN3_4B, QWEN3_4B_DRAFT), SMALL: (SMOLLM2, str(drafts)), SMALLEST: (TINY, TINY_DRAFT)}
    listed = [case for case in cases(scale) if STATIC not in case.ways]
    shapes = {name: shape_of(*given[name]) for name in {case.pair for case in listed}}
    print(f"floors at {rate / 1e6:.3f} TB/s; scripted drafts are right with probability {right}")
    heads = ("GB", "verify ms", "draft ms", "round ms", "tau", "tokens/s", "plain")
    print(f"{'case':36} {' '.join(f'{head:>{width}}' for head, width in zip(heads, (7, 9, 8, 8, 5, 8, 7)))}")
    for case in listed:
        model, draft = shapes[case.pair]
        floor = floor_of(model, draft, case.batch, case.context + new_tokens // 2)
        whole, verify = floor.round / rate / 1e3, floor.plain / rate / 1e3
        tau = None if case.pair == SMALL else expected_tau(right, draft.config.block_size)
        drafted = f"{'':5} {'':8}" if tau is None else f"{tau:5.2f} {1e3 * case.batch * tau / whole:8.0f}"
        print(
            f"{case.name:36} {floor.round / 1e9:7.3f} {verify:9.3f} {whole - verify:8.3f} {whole:8.3f} {drafted} "
            f"{1e3 * case.batch / verify:7.0f}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("gpu", "tiny"), help="sizes; the device's own by default")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further case is begun")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each way, at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="more of them until a case has taken so long")
    parser.add_argument("--right", type=float, default=0.83, help="probability that a scripted draft is right")
    parser.add_argument("--predict", type=float, metavar="TB/S", help="only print the floors at this copy rate")
    parser.add_argument("--out", type=Path, help="folder of the JSON file; on a GPU bench/results/<device> by default")
    options = parser.parse_args(arguments)
    if options.predict:
        print_floors(options.scale or "gpu", options.predict * 1e6, options.right, options.new_tokens)
        return
    device = torch.device(options.device)
    options.scale = options.scale or ("gpu" if device.type == "cuda" else "tiny")
    folder = options.out or (results_folder(options.device) if device.type == "cuda" else None)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _stop)  # `timeout` sends it: what was measured until then is written
    rate = rate_of(folder, device)
    print_floors(options.scale, rate, options.right, options.new_tokens)
    bench, stopped = Rounds(device, rate, options), ""
    try:
        for case in cases(options.scale):
            bench.run(case)
            write(folder, summary(bench, ""))
    except (KeyboardInterrupt, TimeUp) as error:
        stopped = f"stopped early: {error or type(error).__name__}"
    result = summary(bench, stopped)
    write(folder, result)
    for goal in result["goals"]:
        value = "" if goal["value"] is None else f": {goal['value']:g} {goal['unit']}"
        print(f"goal: {goal['goal']}{value}: {goal['verdict']}")
    for slower in result["slower_than_another"]:
        print(f"slower than another: {slower}")
    if bench.refused:
        raise SystemExit("rounds: not reported:\n  " + "\n  ".join(bench.refused))
    if stopped:
        raise SystemExit(f"rounds: {stopped}")


def summary(bench: Rounds, stopped: str) -> dict[str, Any]:
    """What the file holds."""
    return {
        "op": "rounds",
        "machine": describe(str(bench.device)),
        "copy_tb_s": round(bench.rate / 1e6, 4),
        "scale": bench.options.scale,
        "right": bench.options.right,
        "notes": NOTES,
        "stopped": stopped,
        "rows": bench.rows,
        "left_out": bench.left_out,
        "refused": bench.refused,
        "goals": judge(GOALS, bench.rows, bench.device),
        "slower_than_another": behind(bench.rows),
    }


def write(folder: Path | None, result: dict[str, Any]) -> None:
    """The file, whole or not at all."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "rounds.json.partial"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(folder / "rounds.json")


def _stop(*_: Any) -> None:
    raise TimeUp("told to stop")


if __name__ == "__main__":
    main()
