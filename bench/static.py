"""What every kernel takes of a GPU, compiled ahead of time for GPUs that are not here.

    python bench/static.py            # everything: about ten minutes on two cores; results/static.json and README.md
    python bench/static.py --quick    # the subset that the tests compile; with --out FILE, as nothing else is written

The public launchers are called with tensors that hold nothing, and what they launch is compiled as Triton would have
specialised it on each GPU (``aot/``). Exit status 1 if a kernel breaks a rule (``aot/rules.py``); the file is written
all the same, and lists what is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

# Before triton is imported, and so for the children: under the interpreter there is nothing to compile.
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

import triton
from aot.build import Build, build
from aot.record import Failure, Launch, Use, record
from aot.rules import absences, problems
from aot.targets import TARGETS

HERE = Path(__file__).parent
FIGURES = ("registers", "shared_bytes", "spill_bytes")
BEGIN, END = "<!-- static:begin -->", "<!-- static:end -->"
# What the quick run compiles, a minute's work: a dtype for each target. sm_75 is left to the full one.
QUICK = {"sm_80": "float16", "sm_90": "bfloat16", "sm_100": "bfloat16", "gfx942": "bfloat16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the calls marked quick, in one dtype per target")
    parser.add_argument("--out", type=Path, help="the JSON file; without it results/static.json and the README")
    parser.add_argument("--calls", default="aot.calls", help="module of the calls and of what is expected of kernels")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this; needs --out")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if (arguments.quick or arguments.kernel) and not arguments.out:
        parser.error("a part of the figures needs --out: the committed ones are of all kernels")

    asked = importlib.import_module(arguments.calls)
    launches, failures = chosen(asked, arguments.quick, arguments.kernel)
    print(f"{len(launches)} launches to compile", flush=True)
    builds = compile_all(list(launches), asked.STREAMED, arguments.processes)
    result = {
        "triton": triton.__version__,
        "ptxas": assembler_versions(),
        "figures": "the worst of all variants; registers and spill_bytes of a thread, shared_bytes of a program",
        "problems": found_problems(launches, builds, asked, failures),
        "rows": worst(launches, builds),
    }
    write(result, arguments.out)
    for row in result["problems"]:
        print(f"{row['kernel']} on {row['target']} in {row['dtype']}: {row['problem']} ({row['call']})")
    raise SystemExit(bool(result["problems"]))


def chosen(asked: ModuleType, quick: bool, kernel: str) -> tuple[dict[Launch, list[Use]], list[Failure]]:
    """The launches to compile, and where each comes from; the calls that fail."""
    if quick:
        found, failures = {}, []
        for target, dtype in QUICK.items():
            more = record([call for call in asked.calls() if call.quick], [TARGETS[target]], [dtype])
            found |= more[0]
            failures += more[1]
    else:
        found, failures = record(asked.calls())
    return {launch: uses for launch, uses in found.items() if kernel in launch.kernel}, failures


def compile_all(launches: list[Launch], streamed: dict[str, tuple[str, ...]], processes: int) -> dict[Launch, Build]:
    """Compile in processes of their own, with a cache of their own: a cached kernel has no assembler log."""
    builds = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_quiet) as pool:
            pointers = [streamed.get(launch.kernel, ()) for launch in launches]
            for launch, made in zip(launches, pool.map(build, launches, pointers)):
                builds[launch] = made
                if len(builds) % 50 == 0:
                    print(f"{len(builds)} of {len(launches)}", file=sys.stderr, flush=True)
    return builds


def _quiet() -> None:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")


def assembler_versions() -> dict[str, str]:
    """The release of each ptxas that Triton ships and uses for one of the targets."""
    from triton.backends.nvidia.compiler import get_ptxas

    versions = {}
    for target in TARGETS.values():
        if target.gpu.backend == "cuda":
            path = get_ptxas(target.gpu.arch).path
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            versions[target.name] = said.rpartition(", V")[2].split()[0]
    return versions


def found_problems(
    launches: dict[Launch, list[Use]], builds: dict[Launch, Build], asked: ModuleType, failures: list[Failure]
) -> list[dict[str, str]]:
    """Every broken rule once per kernel, target and dtype, with one of the calls that show it."""
    rows: dict[tuple[str, str, str, str], str] = {}
    groups: dict[tuple[str, str], list[Build]] = defaultdict(list)
    for launch, uses in launches.items():
        groups[launch.kernel, launch.target].append(builds[launch])
        for problem in problems(launch.kernel, launch.target, builds[launch], asked.ATOMICS):
            for use in uses:
                rows.setdefault((launch.kernel, launch.target, use.dtype, problem), use.call)
    for kernel, target, problem in absences(groups, asked.STREAMED, asked.MATRIX):
        rows.setdefault((kernel, target, "any", problem), "any")
    for failure in failures:
        rows[f"launcher of {failure.call}", failure.target, failure.dtype, f"raises: {failure.error}"] = failure.call
    names = ("kernel", "target", "dtype", "problem")
    return [dict(zip(names, key)) | {"call": call} for key, call in sorted(rows.items())]


def worst(launches: dict[Launch, list[Use]], builds: dict[Launch, Build]) -> list[dict[str, Any]]:
    """One row per kernel, target and dtype: the largest of each figure over its variants."""
    groups: dict[tuple[str, str, str], list[Build]] = defaultdict(list)
    for launch, uses in launches.items():
        for dtype in sorted({use.dtype for use in uses}):
            groups[launch.kernel, launch.target, dtype].append(builds[launch])
    order = list(TARGETS)
    return [
        {"kernel": kernel, "target": target, "dtype": dtype}
        | {figure: max(getattr(one, figure) for one in group) for figure in FIGURES}
        | {"variants": len(group)}
        for (kernel, target, dtype), group in sorted(
            groups.items(), key=lambda x: (x[0][0], order.index(x[0][1]), x[0])
        )
    ]


def write(result: dict[str, Any], out: Path | None) -> None:
    """The JSON, a row a line; and the README's table, unless ``out`` says that this is something else."""
    head = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path = out or HERE / "results" / "static.json"
    path.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')
    print(f"wrote {path.name}", file=sys.stderr)
    if out is None:
        readme = HERE / "README.md"
        before = readme.read_text() if readme.is_file() else f"# Benches\n\n{BEGIN}\n{END}\n"
        readme.write_text(with_section(before, section(result)))


def section(result: dict[str, Any]) -> str:
    """The README's words and table."""
    kernels = sorted({row["kernel"] for row in result["rows"]})
    dtypes = sorted({row["dtype"] for row in result["rows"]})
    lines = [
        "## What the kernels take of a GPU",
        "",
        f"Compiled ahead of time by Triton {result['triton']}, with no GPU at hand, for every specialisation that the",
        "launchers ask for at the shapes of Qwen3-4B and SmolLM2-135M. Each cell: registers a thread / KB of shared",
        f"memory a program, the worst of all variants in {' and '.join(dtypes)}. On sm_75 (float16 alone) Triton",
        "has no matrix instructions; the reference runs there instead (`dspark_fast/backend.py`), "
        "and the column says why.",
        "",
        f"| kernel | variants | {' | '.join(TARGETS)} |",
        f"|---|---:|{'---:|' * len(TARGETS)}",
    ]
    for kernel in kernels:
        cells = [
            _cell([row for row in result["rows"] if (row["kernel"], row["target"]) == (kernel, t)]) for t in TARGETS
        ]
        variants = max(row["variants"] for row in result["rows"] if row["kernel"] == kernel)
        lines.append(f"| `{kernel}` | {variants} | {' | '.join(cells)} |")
    spilling = sum(row["spill_bytes"] > 0 for row in result["rows"])
    lines += [
        "",
        "No kernel spills a register." if not spilling else "A bold cell has a variant that spills registers.",
    ]
    lines += [
        "",
        "`python bench/static.py` writes this table and `results/static.json`, which has each dtype for itself.",
    ]
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "–"
    registers, shared, spilled = (max(row[figure] for row in rows) for figure in FIGURES)
    text = f"{registers} / {shared / 1024:.1f}"
    return f"**{text}**" if spilled else text


def with_section(readme: str, text: str) -> str:
    """``readme`` with what stands between the markers replaced; a readme without them gets them at its end."""
    if BEGIN not in readme:
        readme = f"{readme.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
