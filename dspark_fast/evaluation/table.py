"""Evaluations as tables for a terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from dspark_fast.evaluation.counts import Counts
from dspark_fast.evaluation.result import Evaluation


def acceptance_table(result: Evaluation, predicted: dict[str, float | None] | None = None) -> Table:
    """Domains with their figures; a slot's is conditional acceptance there.

    Args:
        result: at one temperature.
        predicted: speedups by domain, ``mean`` and ``all``; a last column if given.
    """
    title = f"temperature {result.temperature:g}" + ("" if result.temperature else " (greedy)")
    table = Table(box=None, pad_edge=False, header_style="dim", title=title, title_justify="left", title_style="bold")
    table.add_column("domain", no_wrap=True)
    slots = ["slot 1", *(str(slot + 2) for slot in range(result.block_size - 1))]  # a block of 5 fits 80 columns
    names = ["prompts", "rounds", "tau", "proposed", "verify\nrate", *slots]
    for name in names if predicted is None else [*names, "predicted"]:
        table.add_column(name, justify="right", no_wrap=True)
    for domain, counts in result.domains.items():
        table.add_row(domain, *_cells(counts, domain, predicted))
    if len(result.domains) > 1:
        table.add_section()
        if not math.isnan(result.mean_tau):
            # The other figures' plain means are nobody's definition.
            empty = [""] * (2 + len(slots))
            cells = ["", "", _number(result.mean_tau), *empty]
            table.add_row("mean", *cells, *_last("mean", predicted), style="bold")
        table.add_row("all", *_cells(result.pooled, "all", predicted), style="bold")
    return table


def _cells(counts: Counts, domain: str, predicted: Any) -> list[str]:
    figures = (counts.tau, counts.proposals, counts.verify_rate, *counts.conditional)
    return [str(counts.prompts), f"{counts.rounds:,}", *map(_number, figures), *_last(domain, predicted)]


def _last(domain: str, predicted: dict[str, float | None] | None) -> list[str]:
    if predicted is None:
        return []
    return ["-" if predicted[domain] is None else f"{predicted[domain]:.2f}x"]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
