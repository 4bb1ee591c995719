"""Kernels beside the round: per op what was predicted and measured, and what share of a round it is.

    python bench/kernels_page.py                 # writes its parts of bench/README.md, from bench/results
    python bench/kernels_page.py --print         # only shows it
    python bench/kernels_page.py --rate 3.35     # predictions for a GPU that copies so many TB/s

Nothing is run. Each folder of ``results`` is a device; what it lacks is "not measured". Where no GPU has results, the
same table stands with the bytes model alone (``bytes_moved`` of each bench), at ``--rate``. A CPU has no kernels: its
table is of the reference ops inside the rounds of ``bench_round_ops.py``. Two more parts are the benches' goals
(``goals.py``) and the ablation read against the paper (``against_paper.py``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE))

import against_paper
import cpu_path
import goals
from scripted import QWEN3_4B, QWEN3_4B_DRAFT, SMOLLM2, floor_of, shape_of
from table import LAUNCH_US, OURS

BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"
RATE = 4.3  # TB/s: an H200's copy rate, as measured by others
SMOLLM2_DRAFT = HERE.parent / "dspark_fast" / "drafts" / "SmolLM2-135M-Instruct"
NOT_MEASURED = "not measured"
OPS = ("markov", "verify", "block_attention", "context_kv", "sampling", "draft_loss")
# How the engine's own profile of a round calls an op.
IN_PROFILE = {"markov": "op markov_walk", "verify": "op verify", "context_kv": "op store_context_kv"}


class Pair(NamedTuple):
    """A pair whose ops are listed: its name in the op files and in ``rounds.json``, and the context of its round."""

    name: str
    in_rounds: str
    context: int
    target: dict[str, Any]
    draft: dict[str, Any] | str


PAIRS = (
    Pair("Qwen3-4B", "Qwen3-4B shape", 4096, QWEN3_4B, QWEN3_4B_DRAFT),
    Pair("SmolLM2-135M", "SmolLM2-135M", 512, SMOLLM2, str(SMOLLM2_DRAFT)),
)


class Line(NamedTuple):
    """One op in one mode: ``case`` names it in the op's file, ``calls`` is how often a greedy round of a row has it."""

    op: str
    words: str
    case: str
    calls: int


class Figures(NamedTuple):
    """Of a line on a device; None where it was not measured."""

    bytes: int | None = None
    predicted_us: float | None = None
    measured_us: float | None = None
    quartiles_us: tuple[float, float] | None = None
    percent: float | None = None
    provider: str | None = None


def lines_of(pair: Pair, layers: tuple[int, int]) -> list[Line]:
    """What a round at batch 1 calls, then what a sampling round has in its place; ``layers``: target's, drafter's."""
    one, (target, draft) = f"{pair.name} B=1", layers
    return [
        Line("markov", "walk, greedy", f"{one} greedy", 1),
        Line("block_attention", "drafter's attention", f"{one} S={pair.context} drafter", draft),
        Line("block_attention", "target's attention", f"{one} S={pair.context} causal", target),
        Line("context_kv", "store context, and the block's own", f"{one} N=8", 2 * draft),
        Line("verify", "verify, greedy", f"{one} greedy uncut", 1),
        Line("markov", "walk, sampled", f"{one} sampled", 0),
        Line("verify", "verify, rejection", f"{one} rejection uncut", 0),
        Line("verify", "verify, coupled", f"{one} coupled uncut", 0),
        Line("sampling", "cut to top-p 0.9", f"{one} top-p 0.9", 0),
    ]


# --- figures ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The op files of a device, by op."""
    return {op: json.loads(path.read_text()) for op in OPS if (path := folder / f"{op}.json").is_file()}


def from_files(files: dict[str, dict[str, Any]]) -> Callable[[Line], Figures]:
    """Figures of our kernel where it was timed, else of the reference, else the bytes alone."""
    rates = [result["copy_tb_s"] * 1e6 for result in files.values()]
    counted = from_bytes(rates[0] if rates else None)

    def figures(line: Line) -> Figures:
        result = files.get(line.op)
        rows = [] if result is None else [row for row in result["rows"] if row["case"] == line.case]
        of = {row["provider"]: row for row in rows}
        row = of.get(OURS) or of.get("reference, eager")
        if row is None or result is None:
            return counted(line)
        predicted = row["predicted_us"]
        if predicted is None:  # the reference has no launches to count
            predicted = row["bytes"] / (result["copy_tb_s"] * 1e6)
        low, high = row["quartiles_us"]
        return Figures(
            row["bytes"], predicted, row["median_us"], (low, high), row["percent_of_copy_rate"], row["provider"]
        )

    return figures


def from_bytes(rate: float | None, launch_us: float = 0.0) -> Callable[[Line], Figures]:
    """Figures without measurements: each bench's own count of bytes and launches.

    Args:
        rate: bytes per microsecond; None where nobody has measured it.
        launch_us: of each launch of a kernel; 0 on a CPU, where there are none.
    """
    known: dict[str, dict[str, Any]] = {}

    def figures(line: Line) -> Figures:
        if line.op not in known:
            bench = importlib.import_module(f"bench_{line.op}").BENCH
            known[line.op] = {case.name: case for scale in ("cpu", "gpu") for case in bench.cases(scale)}
        case = known[line.op].get(line.case)
        if case is None:
            return Figures()
        predicted = None if rate is None else (case.bytes + case.own) / rate + launch_us * case.launches
        return Figures(case.bytes, predicted)

    return figures


def round_ms(folder: Path, pair: Pair) -> tuple[float, str] | None:
    """Milliseconds of a round at batch 1 and how it ran: ``rounds.json``, else the profile in ``engine.json``."""
    if (path := folder / "rounds.json").is_file():
        rows = json.loads(path.read_text())["rows"]
        rows = [r for r in rows if (r["pair"], r["batch"], r["context"]) == (pair.in_rounds, 1, pair.context)]
        for way in ("graph", "no graph"):
            for row in rows:
                if row["provider"] == way and not row["case"].endswith("compiled"):
                    return row["round_ms"], way
    if (path := folder / "engine.json").is_file():
        result = json.loads(path.read_text())
        if pair.name in result.get("model", "") and "profile" in result:
            return result["profile"]["round_milliseconds"], "eager, behind a short prompt"
    return None


def profile_of(folder: Path, pair: Pair) -> dict[str, float]:
    """Milliseconds of each op inside the rounds that ``engine.json`` has looked into, by op."""
    path = folder / "engine.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    if pair.name not in result.get("model", ""):
        return {}
    parts = {row["part"]: row["milliseconds"] for row in result.get("profile", {}).get("rows", [])}
    return {op: parts[name] for op, name in IN_PROFILE.items() if name in parts}


# --- the page ---------------------------------------------------------------------------------------------------------


def section(results: Path, rate: float = RATE) -> str:
    """All of it, as Markdown."""
    folders = [path for path in sorted(results.iterdir()) if path.is_dir()] if results.is_dir() else []
    shapes = [(pair, *shape_of(pair.target, pair.draft)) for pair in PAIRS]
    text = [
        "## Kernels beside the round",
        "",
        "One row, bf16. Predicted: bytes that must move over the device's copy rate, and 2 us for each launch of a",
        "kernel. Measured: the median (quartiles) of our kernel where there is a GPU, else of the reference. Share:",
        "calls in a greedy round times the measured time, of a whole round; where an op was not timed by itself, what",
        "the engine's own profile says. Lines without calls stand in place of greedy ones where a round samples. Ops",
        "run at blocks of 7 and the whole vocabulary, but for a CPU's, which are timed in the rounds of the pair.",
    ]
    on_gpu = False
    for folder in folders:
        files, inside = read(folder), folder / "round_ops.json"
        rounds = {pair.name: round_ms(folder, pair) for pair in PAIRS}
        if not files and not any(rounds.values()) and not inside.is_file():
            continue
        ours = any(row["provider"] == OURS for result in files.values() for row in result["rows"])
        on_gpu |= ours
        text += ["", f"### {_device(folder, files)}", ""]
        if inside.is_file():
            text += cpu_path.lines(json.loads(inside.read_text())) + loss_lines(files) + lost_rows(files)
            continue
        rates = {result["copy_tb_s"] for result in files.values()}
        if rates:
            text += [f"Copy rate {' and '.join(f'{one:g}' for one in sorted(rates))} TB/s, measured.", ""]
        for pair, model, draft in shapes:
            known = any(row["case"].startswith(pair.name) for result in files.values() for row in result["rows"])
            if not known and rounds[pair.name] is None:
                continue  # nobody runs that pair there
            text += table(pair, _layers(model, draft), from_files(files), rounds[pair.name], profile_of(folder, pair))
        text += loss_lines(files) + lost_rows(files)
    if not on_gpu:
        text += ["", "### No GPU yet", ""]
        text += [
            f"What a GPU that copies {rate:g} TB/s should need, of a round's floor: the time of its bytes. More",
            "than all of it says that launches, which the floor leaves out, weigh more than bytes.",
            "",
        ]
        for pair, model, draft in shapes:
            floor = floor_of(model, draft, 1, pair.context).round / rate / 1e9
            text += table(pair, _layers(model, draft), from_bytes(rate * 1e6, LAUNCH_US), (floor, "floor"), {})
    text += ["`python bench/readme.py` writes this from the JSON files."]
    return "\n".join(text)


def table(
    pair: Pair,
    layers: tuple[int, int],
    figures: Callable[[Line], Figures],
    whole: tuple[float, str] | None,
    profile: dict[str, float],
) -> list[str]:
    """The ops of one pair on one device.

    Args:
        whole: milliseconds of a round and how it ran; "floor" for what its bytes take.
        profile: milliseconds of an op within a round, where the op itself was not timed.
    """
    predicted = whole is not None and whole[1] == "floor"
    part = "floor" if predicted else "round"
    said = f"round {NOT_MEASURED}" if whole is None else f"round {whole[0]:.3g} ms ({whole[1]})"
    text = [
        f"**{pair.name}**, {pair.context} tokens of context, {said}:",
        "",
        f"| op | calls | bytes | predicted, us | measured, us | of the copy rate | of the {part} |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for line in lines_of(pair, layers):
        found = figures(line)
        share = None
        if line.calls and whole is not None:
            one = found.predicted_us if predicted else found.measured_us
            within = profile.get(line.op)
            share = line.calls * one / whole[0] / 10 if one is not None else None
            if share is None and within is not None:
                share = 100 * within / whole[0]  # inside the rounds themselves
        measured = NOT_MEASURED
        if found.measured_us is not None and found.quartiles_us is not None:
            low, high = found.quartiles_us
            measured = f"{_number(found.measured_us)} ({_number(low)} to {_number(high)})"
            measured += "" if found.provider == OURS else ", reference"
        cells = [
            f"{line.words}",
            str(line.calls) if line.calls else "",
            "" if found.bytes is None else f"{found.bytes:,}",
            "" if found.predicted_us is None else _number(found.predicted_us),
            measured,
            "" if found.percent is None else f"{found.percent:.1f} %",
            NOT_MEASURED if share is None and line.calls else "" if share is None else f"{share:.1f} %",
        ]
        text.append(f"| {' | '.join(cells)} |")
    return [*text, ""]


def loss_lines(files: dict[str, dict[str, Any]]) -> list[str]:
    """The training loss, which is in no round."""
    result = files.get("draft_loss")
    if result is None:
        return []
    said = f"The training loss, in no round; by the wall clock, copy rate {result['copy_tb_s']:g} TB/s:"
    text = [said, "", "| case | provider | bytes | measured, ms | of the copy rate |"]
    text.append("|---|---|---:|---:|---:|")
    for row in result["rows"]:
        cells = [row["case"], row["provider"], f"{row['bytes']:,}", f"{row['median_us'] / 1e3:,.1f}"]
        text.append(f"| {' | '.join(cells)} | {row['percent_of_copy_rate']:.1f} % |")
    return [*text, ""]


def lost_rows(files: dict[str, dict[str, Any]]) -> list[str]:
    """Where another provider was faster than our kernel."""
    lost = [f"- {op}: {line}" for op, result in files.items() for line in result["slower_than_another"]]
    return ["Behind another provider:", "", *lost, ""] if lost else []


def _layers(model: Any, draft: Any) -> tuple[int, int]:
    return model.config.num_hidden_layers, draft.config.num_hidden_layers


def _device(folder: Path, files: dict[str, dict[str, Any]]) -> str:
    """The machine's own name, from any of its files."""
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and "machine" in result:
            machine = result["machine"]
            threads = machine["threads"]
            where = f", {threads} thread{'' if threads == 1 else 's'}" if folder.name == "cpu" else ""
            return f"{machine['device']}{where}"
    return folder.name


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def with_section(readme: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """``readme`` with what stands between the markers replaced; one without them gets them at its end."""
    if begin not in readme:
        readme = f"{readme.rstrip()}\n\n{begin}\n{end}\n"
    before, _, rest = readme.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def written(readme: str, results: Path, rate: float = RATE) -> str:
    """``readme`` with all parts as the results have them."""
    readme = with_section(readme, goals.section(results), goals.BEGIN, goals.END)
    paper = against_paper.section(results)
    if paper is not None:
        readme = with_section(readme, paper, against_paper.BEGIN, against_paper.END)
    return with_section(readme, section(results, rate))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md")
    parser.add_argument("--rate", type=float, default=RATE, metavar="TB/S")
    parser.add_argument("--print", action="store_true", dest="show", help="write nothing")
    options = parser.parse_args(arguments)
    if options.show:
        print(section(options.results, options.rate))
        return
    before = options.readme.read_text() if options.readme.is_file() else "# Benchmarks\n"
    options.readme.write_text(written(before, options.results, options.rate))
    print(f"wrote {options.readme}")


if __name__ == "__main__":
    main()
