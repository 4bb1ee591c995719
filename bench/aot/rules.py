"""What is wrong with a compiled kernel. Every rule is one line of a report; an empty report is a pass."""

from __future__ import annotations

from collections.abc import Iterator

from .build import Build
from .targets import TARGETS

WIDE = 16  # bytes: the widest load that every target has


def problems(kernel: str, target: str, build: Build, atomics: frozenset[str] | set[str] = frozenset()) -> Iterator[str]:
    """What is wrong with one build; ``atomics`` names the kernels that may have some."""
    if build.error:
        yield f"does not compile: {build.error}"
    if build.error or not TARGETS[target].ruled:
        return
    if build.spill_bytes:
        yield f"spills: {build.spill_bytes} bytes a thread ({build.registers} registers)"
    limit = TARGETS[target].shared_limit
    if build.shared_bytes > limit:
        yield f"shared memory: {build.shared_bytes} bytes, {target} has {limit}"
    if build.half_dot and not build.matrix:
        yield "matrix: multiplies half-precision tiles without matrix instructions"
    for pointer, size in build.loads:
        if size < WIDE:
            yield f"narrow loads: {pointer} is read {size} bytes at a time"
    if build.unguarded:
        yield f"barrier: none between the stores and {build.unguarded} releasing atomic(s)"
    if build.atomics and kernel not in atomics:
        yield f"atomics: {build.atomics}, and it is not known to have any"


def absences(
    builds: dict[tuple[str, str], list[Build]], streamed: dict[str, tuple[str, ...]], matrix: set[str]
) -> Iterator[tuple[str, str, str]]:
    """Kernel, target and what none of its builds shows: a rule that looks at nothing would always pass.

    A kernel that was not built at all is not looked at.
    """
    for (kernel, target), group in builds.items():
        if any(build.error for build in group) or not TARGETS[target].ruled:
            continue
        seen = {pointer for build in group for pointer, _ in build.loads}
        for pointer in streamed.get(kernel, ()):
            if pointer not in seen:
                yield kernel, target, f"wide loads: none of {pointer} was found"
        if kernel in matrix and not any(build.matrix for build in group):
            yield kernel, target, "matrix: no matrix instructions in any of its variants"
