"""Every kernel compiles as its launchers ask for it: for four GPUs here, for all dtypes in `bench/results/static.json`.

What is asserted is what the interpreter cannot see: types, registers, shared memory, matrix instructions, the width of
loads, barriers before atomics. `bench/aot/rules.py` has the rules and `bench/aot/calls.py` the calls.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("sm_80", "sm_90", "sm_100", "gfx942")
TARGETS = ("sm_75", *QUICK)


def launched_kernels(folder):
    """``module.function`` of every Triton function that a file launches, read from the source."""
    for path in sorted(folder.glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        jitted = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
        }
        launches = (node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript))
        yield from sorted(
            {f"{path.stem}.{ast.unparse(name.value)}" for name in launches} & {f"{path.stem}.{j}" for j in jitted}
        )


KERNELS = list(launched_kernels(ROOT / "kernels"))


@pytest.mark.slow
@pytest.mark.parametrize("target", QUICK)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel, target, compiled):
    result = compiled("--quick")
    assert [row for row in result["rows"] if (row["kernel"], row["target"]) == (kernel, target)], "no call reaches it"
    here = [row for row in result["problems"] if (row["kernel"], row["target"]) == (kernel, target)]
    assert not [f"{row['problem']} ({row['call']})" for row in here]


@pytest.mark.slow
def test_every_launcher_gets_through(compiled):
    assert not [row for row in compiled("--quick")["problems"] if row["kernel"] not in KERNELS]


@pytest.mark.slow
def test_no_other_kernel_is_launched(compiled):
    """Whatever is launched in a way that `launched_kernels` does not see would go unchecked above."""
    assert {row["kernel"] for row in compiled("--quick")["rows"]} == set(KERNELS)


def committed():
    return json.loads((ROOT / "bench" / "results" / "static.json").read_text())


def test_committed_figures_are_of_every_kernel():
    """If this fails: ``python bench/static.py``."""
    rows = committed()["rows"]
    here = {(kernel, target) for kernel in KERNELS for target in TARGETS}
    assert {(row["kernel"], row["target"]) for row in rows} == here
    for row in rows:
        assert {"dtype", "registers", "shared_bytes", "spill_bytes"} < set(row)
        assert row["registers"] > 0


def test_committed_figures_break_no_rule():
    assert committed()["problems"] == []


def test_readme_shows_the_committed_figures(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    spec = importlib.util.spec_from_file_location("static", ROOT / "bench" / "static.py")
    static = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(static)
    readme = (ROOT / "bench" / "README.md").read_text()
    assert static.with_section(readme, static.section(committed())) == readme
