"""One fault in the real code: a line of a function is replaced, and put back.

The function object keeps its identity and only its code is swapped, so the fault is there for whoever holds it. A patch
whose text is not found exactly once is an error, not a fault that nobody notices to be missing.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def edited(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """``function`` with ``old`` replaced by ``new`` in its source while the context lasts."""
    function = inspect.unwrap(function)
    code = function.__code__
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times {old!r}"
    lines = source.splitlines(keepends=True)
    while lines[0].startswith("@"):
        del lines[0]
    while not lines[0].startswith("def "):
        del lines[0]
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile("".join(lines).replace(old, new), code.co_filename, "exec", flags), function.__globals__, scope)
    function.__code__ = scope[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code
