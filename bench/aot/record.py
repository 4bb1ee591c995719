"""The launches of a call, specialised by Triton's own launch path for a GPU that is not there.

``jit_cache_hook`` is called when a launch is about to compile, with all that the compilation depends on: argument
types, divisibility by 16, ones and Nones, constexprs and options. It says "already done", so nothing is compiled or
launched; what it saw is JSON that ``JITFunction.preload`` compiles in any other process. The launch table is the one
that the target's device would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton

from dspark_fast.kernels import launch

from .calls import Call
from .targets import TARGETS, Target, pretend


class Launch(NamedTuple):
    """A kernel with one specialisation on one target: what is compiled once, however often it is launched."""

    module: str
    function: str
    target: str
    specialization: str

    @property
    def kernel(self) -> str:
        """Its name in tables, such as ``block_attention._split_kernel``."""
        return f"{self.module.rpartition('.')[2]}.{self.function}"


class Use(NamedTuple):
    """Where a launch comes from."""

    call: str
    dtype: str


class Failure(NamedTuple):
    """A call that raised before its last launch."""

    call: str
    target: str
    dtype: str
    error: str


def record(
    calls: Iterable[Call], targets: Iterable[Target] = tuple(TARGETS.values()), dtypes: Iterable[str] | None = None
) -> tuple[dict[Launch, list[Use]], list[Failure]]:
    """Every distinct launch of ``calls`` on ``targets``, in all dtypes of each target or the named ones."""
    calls, found, failures = list(calls), {}, []
    for target in targets:
        pretend(target)
        for dtype in target.dtypes:
            name = str(dtype).removeprefix("torch.")
            if dtypes is not None and name not in dtypes:
                continue
            for call in calls:
                if call.only and target.name not in call.only:
                    continue
                with _noting(target) as launches:
                    try:
                        call.run(dtype)
                    except Exception as error:
                        failures.append(Failure(call.name, target.name, name, f"{type(error).__name__}: {error}"))
                for one in dict.fromkeys(launches):
                    found.setdefault(one, []).append(Use(call.name, name))
    return found, failures


@contextmanager
def _noting(target: Target) -> Iterator[list[Launch]]:
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, so there is nothing to compile")
    launches: list[Launch] = []

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(Launch(fn.module, fn.jit_function.fn.__name__, target.name, compile["specialization_data"]))
        return True

    triton.knobs.runtime.jit_cache_hook = hook
    name_of, launch._name = launch._name, lambda device: target.device
    try:
        with torch.no_grad():
            yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        launch._name = name_of
