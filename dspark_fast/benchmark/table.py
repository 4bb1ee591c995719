"""A report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark_fast.benchmark.rows import ALL
from dspark_fast.benchmark.workload import place

WIDTH = 100
_MOST_SETS = 4  # more would not fit beside the rest


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Tables by batch and context; below them who is ahead, what differs, what was left out, and the machine."""
    shapes = list(dict.fromkeys((row["batch"], row["context"]) for row in report["rows"]))
    for shape in shapes:
        rows = [row for row in report["rows"] if (row["batch"], row["context"]) == shape]
        console.print(table_of(report, rows))
        console.print()
    for sentence in report["verdict"]:
        console.print(Text(sentence, style="bold"))
    for line in [*_differences(report), *_reasons(report), *left_out(report["left_out"])]:
        console.print(Text(line))
    machine = report["machine"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    console.print(
        Text(
            f"{machine['device']}, {threads} | torch {machine['torch']}, transformers {machine['transformers']} | "
            f"fp32 tokens of all rows equal those of generate",
            style="dim",
        )
    )


def table_of(report: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """One shape: a line per provider, fastest last; speedups are over transformers' generate in the same repeat."""
    whole = sorted((row for row in rows if row["set"] == ALL), key=lambda row: row["speedup"]["median"])
    sets = [name for name in dict.fromkeys(row["set"] for row in rows) if name != ALL]
    shown = sets if len(sets) <= _MOST_SETS else []
    by_set = {(row["provider"], row["set"]): row for row in rows}
    table = Table(title=_title(report, whole[0]), title_justify="left", title_style="", box=None, pad_edge=False)
    table.header_style = "dim"
    table.add_column("* ours", no_wrap=True, vertical="bottom")
    for header in ("tokens/s", "first\nms", "speed-\nup", "least-most", *shown, "tau", "pre-\ndicted"):
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    for row in whole:
        speedup = row["speedup"]
        cells = [
            f"{row['tokens_per_second']['median']:.1f}",
            f"{row['first_token_ms']['median']:.0f}",
            f"{speedup['median']:.2f}",
            f"{speedup['least']:.2f}-{speedup['most']:.2f}",
            *(f"{by_set[row['provider'], name]['speedup']['median']:.2f}" for name in shown),
            _figure(row["acceptance_length"]),
            _figure(row["predicted_speedup"]) + ("!" if row["why"] else ""),
        ]
        table.add_row(f"{'*' if row['ours'] else ' '} {row['label']}", *cells, style="bold" if row["ours"] else None)
    return table


def _title(report: dict[str, Any], row: dict[str, Any]) -> str:
    settings = report["settings"]
    return (
        f"{report['model']}, {report['dtype']}\n{place(row['batch'], row['context'])}, {row['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens, median of {row['repeats']} repeats"
    )


def _differences(report: dict[str, Any]) -> list[str]:
    """Near-ties of the timed dtype, and what is none."""
    lines = []
    for shape, rows in _whole(report).items():
        tied = {row["provider"]: row["same_tokens"]["near_ties"] for row in rows if row["same_tokens"]["near_ties"]}
        if tied:
            named, count = ", ".join(f"{name} {one}" for name, one in tied.items()), rows[0]["prompts"]
            lines.append(f"{shape}: in {report['dtype']} near-ties fell the other way in, of {count} prompts: {named}.")
        for row in rows:
            lines += [f"{shape}: {row['label']} differs: {said}" for said in row["same_tokens"]["unexplained"]]
    return lines


def _reasons(report: dict[str, Any]) -> list[str]:
    """Why rows, those of single sets too, are not where they were predicted."""

    def of_set(row: dict[str, Any]) -> str:
        return "" if row["set"] == ALL else f", {row['set']}"

    return [
        f"! {_shape(row)}{of_set(row)}: {row['label']} runs at {row['why']}." for row in report["rows"] if row["why"]
    ]


def left_out(ways: Sequence[dict[str, Any]]) -> list[str]:
    """A line per reason why a way was not run.

    Args:
        ways: ``left_out`` of a report.
    """
    names: dict[str, list[str]] = {}
    for one in ways:
        where = "" if one["batch"] is None else f" at {place(one['batch'], one['context'])}"
        names.setdefault(f"{where}: {one['why']}", []).append(one["provider"])
    return [f"Left out: {', '.join(found)}{why}." for why, found in names.items()]


def _whole(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["set"] == ALL:
            found.setdefault(_shape(row), []).append(row)
    return found


def _shape(row: dict[str, Any]) -> str:
    return place(row["batch"], row["context"]).capitalize()


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
