"""One launch compiled: its registers, spills and shared memory, and the instructions that rules ask about."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton

from .record import Launch
from .targets import TARGETS, pretend

MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma_|v_smfmac_|v_wmma_)")
HALF_DOT = re.compile(r"tt\.dot .*: tensor<[^>]*x(bf16|f16|f8\w+)> \*")
AMD_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


class Build(NamedTuple):
    """What compiling a launch gave."""

    error: str = ""
    registers: int = 0  # of a thread
    shared_bytes: int = 0  # of a program
    spill_bytes: int = 0  # of a thread, in memory; on NVIDIA stored plus loaded again
    half_dot: bool = False  # the source multiplies 16-bit (or 8-bit) tiles
    matrix: bool = False  # there are matrix instructions
    loads: tuple[tuple[str, int], ...] = ()  # of the streamed pointers: pointer, narrowest load in bytes
    atomics: int = 0
    seconds: float = 0.0  # of processor time, the assembler's included
    unguarded: int = 0  # releasing atomics with a store before them and no barrier in between


def build(launch: Launch, streamed: tuple[str, ...] = ()) -> Build:
    """Compile ``launch``; ``streamed`` names the pointers whose loads are measured."""
    pretend(TARGETS[launch.target])
    triton.knobs.compilation.always_compile = True  # a cached result has no assembler log
    triton.knobs.nvidia.dump_ptxas_log = True
    kernel = getattr(importlib.import_module(launch.module), launch.function)
    log, start = io.StringIO(), _processor_time()
    try:
        with contextlib.redirect_stdout(log):
            compiled = kernel.preload(launch.specialization)
    except Exception as error:
        return Build(error=f"{type(error).__name__}: {str(error).strip()[-500:]}")
    asm = compiled.asm
    nvidia = "ptx" in asm
    code = asm["ptx"] if nvidia else asm["amdgcn"]
    registers, spilled = _nvidia_registers(log.getvalue()) if nvidia else _amd_registers(code)
    atomics = [line for line in asm["ttgir"].splitlines() if "atomic" in line and "loc(" in line]
    return Build(
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_bytes=spilled,
        half_dot=bool(HALF_DOT.search(asm["ttir"])),
        matrix=bool(MATRIX.search(code)),
        loads=_narrowest(kernel, streamed, list(loads(code))),
        atomics=len(atomics),
        seconds=_processor_time() - start,
        unguarded=unguarded_atomics(asm["ttgir"]),
    )


def _processor_time() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _nvidia_registers(log: str) -> tuple[int, int]:
    """From the assembler's ``-v``: registers, and the bytes of spill stores and loads."""
    stores, reloads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[-1]
    return int(re.findall(r"Used (\d+) registers", log)[-1]), int(stores) + int(reloads)


def _amd_registers(code: str) -> tuple[int, int]:
    """From the kernel's metadata: vector registers, and the bytes of memory that stand in for some.

    A scalar register is spilled to a lane of a vector register, not to memory, and is not counted.
    """

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", code)[-1])

    return number("vgpr_count"), max(4 * number("vgpr_spill_count"), number("private_segment_fixed_size"))


def loads(code: str) -> Iterator[tuple[str, int, int]]:
    """Every global load in PTX or amdgcn: file and line of the source that it comes from, and its bytes."""
    files: dict[str, str] = {}
    names = re.compile(r"\.file\s+(\d+)\s+(.*)")
    for name in names.finditer(code):
        files[name[1]] = re.findall(r'"([^"]*)"', name[2])[-1].rpartition("/")[2]
    place, inside, begun = ("", 0), False, False
    for line in code.splitlines():
        if "inline asm" in line:
            inside, begun = "begin" in line, False
        elif at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            # After the first instruction of an inline block LLVM counts the block's own lines on.
            if not (inside and begun):
                place = (files.get(at[1], ""), int(at[2]))
        else:
            begun = True
            if size := _load_bytes(line):
                yield *place, size


def _load_bytes(line: str) -> int | None:
    if found := re.search(r"\bcp\.async\.c[ag]\.shared\.global\S* .*?\], 0x([0-9a-f]+)", line):
        return int(found[1], 16)
    if found := re.search(r"\bcp\.async\.c[ag]\.shared\.global\S* .*?\], (\d+)", line):
        return int(found[1])
    if found := re.search(r"\bld\.global(\S*)", line):
        count, bits = re.search(r"\.v(\d)", found[1]), re.search(r"\.[bfsu](\d+)$", found[1])
        return (int(count[1]) if count else 1) * int(bits[1]) // 8
    if found := re.search(r"\b(?:global|buffer|flat)_load_(?:lds_)?(\w+)", line):
        return AMD_WIDTHS.get(found[1], 2)  # the rest are bytes and shorts
    return None


def _narrowest(
    kernel: Any, pointers: tuple[str, ...], found: list[tuple[str, int, int]]
) -> tuple[tuple[str, int], ...]:
    """For each of ``pointers`` that is loaded from at all, the bytes of its narrowest load instruction."""
    rows = []
    for pointer in pointers:
        sizes = [size for place in load_lines(kernel, pointer) for *where, size in found if tuple(where) == place]
        if sizes:
            rows.append((pointer, min(sizes)))
    return tuple(rows)


def load_lines(kernel: Any, pointer: str) -> set[tuple[str, int]]:
    """File and lines of the kernel's ``tl.load`` calls whose address is made from ``pointer``."""
    lines, first = inspect.getsourcelines(kernel.fn)
    file = inspect.getsourcefile(kernel.fn).rpartition("/")[2]
    calls = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Call) and node.args]
    return {
        (file, line + first - 1)
        for node in calls
        if isinstance(node.func, ast.Attribute) and node.func.attr == "load"
        if any(isinstance(part, ast.Name) and part.id == pointer for part in ast.walk(node.args[0]))
        for line in range(node.lineno, node.end_lineno + 1)
    }


def unguarded_atomics(ttgir: str) -> int:
    """How many releasing atomics follow a store of their kernel without a barrier in between.

    Such an atomic says "my partial results are there" for one thread; the others' stores need the barrier. Counted in
    Triton's own IR, in the order of the text: what later passes insert is theirs to leave out again.
    """
    unguarded, stored = 0, False
    for line in ttgir.splitlines():
        if re.search(r"\b(gpu|ttg)\.barrier\b", line) or "tt.func" in line:
            stored = False
        elif re.search(r"\batomic_\w+ .*\b(acq_rel|release)\b", line):
            unguarded += stored
        elif re.search(r"\b(tt|amdg)\.(buffer_)?store\b", line):
            stored = True
    return unguarded
