"""Lossless speculative decoding for transformers models with a DSpark drafter.

>>> model, draft, tokenizer = dspark_fast.load("HuggingFaceTB/SmolLM2-135M-Instruct")
>>> output = dspark_fast.generate(model, draft, input_ids, max_new_tokens=256)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_fast.autoregressive import AutoregressiveDrafter, first_layers
    from dspark_fast.config import DSparkConfig
    from dspark_fast.draft import DSparkDraft
    from dspark_fast.engine.graphs import clear_graphs
    from dspark_fast.generation import decoding, generate
    from dspark_fast.pairs import load
    from dspark_fast.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "AutoregressiveDrafter",
    "DSparkConfig",
    "DSparkDraft",
    "Stats",
    "clear_graphs",
    "decoding",
    "first_layers",
    "generate",
    "load",
]

_HOMES = {
    "AutoregressiveDrafter": "dspark_fast.autoregressive",
    "DSparkConfig": "dspark_fast.config",
    "DSparkDraft": "dspark_fast.draft",
    "Stats": "dspark_fast.stats",
    "clear_graphs": "dspark_fast.engine.graphs",
    "decoding": "dspark_fast.generation",
    "first_layers": "dspark_fast.autoregressive",
    "generate": "dspark_fast.generation",
    "load": "dspark_fast.pairs",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds, which `dspark-fast --help` need not wait for.
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("reference", "training"):
        return import_module(f"dspark_fast.{name}")
    raise AttributeError(f"module 'dspark_fast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
