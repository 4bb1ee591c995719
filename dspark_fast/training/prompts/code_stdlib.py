"""Questions about the functions of Python's standard library: by name, by docstring and by source."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from functools import cache
from typing import Any

from dspark_fast.training.prompts.grammar import load_parts

_PARTS = load_parts("code_stdlib")
_FUNCTIONS: dict[str, list[str]] = {module: names.split() for module, names in _PARTS["functions"].items()}
_NAMES = [(module, name) for module, names in _FUNCTIONS.items() for name in names]
_BUILTIN_TYPES = {"str": str, "list": list, "dict": dict, "set": set}


def draw_stdlib(rng: random.Random) -> str | None:
    """A question about one function, or None where the form does not fit the function, or this Python lacks it."""
    module, name = rng.choice(_NAMES)
    other_module, other_name = rng.choice(_NAMES)
    if rng.random() < 0.6:  # a neighbour makes the more natural comparison
        other_module, other_name = module, rng.choice(_FUNCTIONS[module])
    kind, roll = rng.random(), rng.random()
    function = _lookup(module, name)
    if function is None or _lookup(other_module, other_name) is None:
        return None
    f, g = _shown(module, name), _shown(other_module, other_name)
    if kind < 0.68:
        form = _at(_PARTS["form"], roll)
        if ("{g}" in form and f == g) or ("importing" in form and module in ("builtins", *_BUILTIN_TYPES)):
            return None
        return form.format(f=f, g=g)
    if kind < 0.86:
        doc = _first_sentence(function)
        return _at(_PARTS["doc_form"], roll).format(f=f, doc=doc) if doc else None
    code = _source(function)
    return _at(_PARTS["source_form"], roll).format(code=code) if code else None


def _lookup(module: str, name: str) -> Any:
    """The named function or class, or None where this Python has none."""
    try:
        owner = _BUILTIN_TYPES.get(module) or importlib.import_module(module)
    except ImportError:
        return None
    return getattr(owner, name, None)


def _shown(module: str, name: str) -> str:
    return name if module == "builtins" else f"{module}.{name}"


def _at(forms: list[str], roll: float) -> str:
    """The form at a position from 0 to 1. Drawn by the caller, so that a missing function leaves the rest alone."""
    return forms[int(roll * len(forms))]


def _first_sentence(function: Any) -> str:
    """The first paragraph of the docstring, or an empty string where that is a signature, too short or too long."""
    line = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    signature = re.match(r"[\w.]+\(", line) or "->" in line or "0x" in line
    return line if 20 <= len(line) <= 240 and not signature else ""


@cache
def _source(function: Any) -> str:
    """The function's source without its docstring if it is short and written in Python, or an empty string."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return ""
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    code = re.sub(r'\n +r?"""(.|\n)*?"""\n', "\n", code, count=1).strip()
    code = re.sub(r"\n\s*\n+", "\n", code)
    return code if 3 <= code.count("\n") <= 30 and len(code) <= 1300 else ""
