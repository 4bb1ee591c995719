"""The ablation as words, a table and a figure, from ``ablation.json`` alone."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from textwrap import fill
from typing import Any

from ablation_variants import QUESTIONS, Choices
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark_fast.evaluation import MEAN_OF
from dspark_fast.report.style import UNCROSSED

BEGIN, END = "<!-- ablation:begin -->", "<!-- ablation:end -->"
STUDENT = {2: 12.71, 3: 4.30}  # two-sided 95 % quantile of Student's t for a deviation from so many runs
TITLES = {"math": "maths"}


def noise(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the baseline's seeds differ by; None without two of them."""
    taus = [row["tau"]["mean"] for row in rows if row["name"].startswith("baseline")]
    if len(taus) < 2 or None in taus:
        return None
    deviation = statistics.stdev(taus)
    rare = STUDENT[len(taus)] * math.sqrt(2) * deviation
    return {"tau": taus, "deviation": round(deviation, 4), "difference": round(rare, 4)}


def lines_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, question by question, the baseline once at the top."""
    rows = {row["name"]: row for row in result["rows"]}
    domains = _domains(result)
    heads = ["", "tau", "against baseline", *(TITLES.get(domain, domain) for domain in domains)]
    heads += ["drafts 1, 2, 3 kept", "teacher-forced", "weights, M", "MB", "draft, ms", "verify, ms", "speedup"]
    places = [("baseline", "baseline")]
    for question, answers in QUESTIONS.items():
        places += [(f"{question}: {label}", name) for label, name in answers.items() if name != "baseline"]
    places += [(name.replace("-seed", ", seed "), name) for name in rows if name.startswith("baseline-")]
    cells = []
    for label, name in places:
        if (row := rows.get(name)) is None:
            continue
        tau, ms = row["tau"], row["ms"] or {}
        kept = ", ".join(f"{share:.0%}" if share is not None else "-" for share in row["by_position"]["all"][:3])
        cells.append(
            [
                label,
                _shown(tau["mean"]),
                difference(row, rows.get("baseline"), result["noise"]),
                *(_shown(tau.get(domain)) for domain in domains),
                kept,
                _shown(row["teacher_forced"]["tau"]),
                f"{row['parameters'] / 1e6:.1f}",
                f"{row['megabytes']:.0f}",
                _shown(ms.get("draft"), 1),
                _shown(ms.get("verify"), 1),
                _shown(row["predicted_speedup"]),
            ]
        )
    return heads, cells


def difference(row: dict[str, Any], baseline: dict[str, Any] | None, spread: dict[str, Any] | None) -> str:
    """A variant's mean tau less the baseline's, in brackets where seeds alone differ by as much."""
    if baseline is None or row is baseline or row["tau"]["mean"] is None or baseline["tau"]["mean"] is None:
        return ""
    gap = row["tau"]["mean"] - baseline["tau"]["mean"]
    within = spread is not None and abs(gap) <= spread["difference"]
    return f"({gap:+.2f})" if within or row["name"].startswith("baseline") else f"{gap:+.2f}"


def section(result: dict[str, Any]) -> str:
    """The README's words and table."""
    settings, times, spread = result["settings"], result["times"], result["noise"]
    tokens = result["rows"][0]["training_tokens"]
    base = Choices()
    words = (
        f"{result['model'].rpartition('/')[2]}: one baseline ({base.depth} layers, rank {base.rank}, "
        f"block {base.block}, vanilla head, {len(base.taps)} taps, begun as the target's last layers), "
        "one thing changed at a time. "
        f"{settings['steps']} steps of {settings['sequences']} sequences on {settings['responses']:,} responses "
        f"({tokens:,} tokens of the target's own): small runs, all alike, so read the differences and not the levels. "
        f"tau: greedy acceptance length on {settings['per_domain']} held-out prompts of each domain, the mean over "
        "domains and each for itself."
    )
    if spread:
        words += (
            f" {len(spread['tau'])} seeds of the baseline have a standard deviation of {spread['deviation']:.3f}; "
            f"differences up to {spread['difference']:.2f}, the 95 % limit for two single runs, stand in brackets."
        )
    if times:
        words += (
            f" Milliseconds of a round at batch 1 in {times['dtype']}, where a plain step takes "
            f"{times['plain_ms']['median']:.1f}, on {times['machine']['device']} with "
            f"{_plural(times['machine']['threads'], 'thread')}; the speedup is predicted from them and tau."
        )
    heads, cells = lines_of(result)
    table = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    table += [f"| {' | '.join(row)} |" for row in cells]
    end = (
        "![tau and predicted speedup for each choice](results/cpu/ablation.png)\n\n"
        "`python bench/ablation.py --run FOLDER` makes this table, the figure and "
        "[the data](results/cpu/ablation.json), which has\nacceptance by block position too; "
        "its first lines say what is held fixed."
    )
    return "\n".join(["## What each choice of the recipe is worth", "", fill(words, 140), "", *table, "", end])


def with_section(readme: str, text: str) -> str:
    """``readme`` with what stands between the markers replaced; a readme without them gets them at its end."""
    if BEGIN not in readme:
        readme = f"{readme.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def plot(result: dict[str, Any], path: Path) -> None:
    """A panel for each question: tau by domain and its mean, and under it the predicted speedup."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patheffects import withStroke

    rows = {row["name"]: row for row in result["rows"]}
    domains = _domains(result)
    questions = {
        question: {label: rows[name] for label, name in answers.items() if name in rows}
        for question, answers in QUESTIONS.items()
    }
    questions = {question: answers for question, answers in questions.items() if len(answers) > 1}
    questions = questions or {"": {"baseline": result["rows"][0]}}
    columns = min(3, len(questions))
    lines = -(-len(questions) // columns)
    seeds = (result["noise"] or {}).get("tau")
    taus = [row["tau"][key] for row in rows.values() for key in ("mean", *domains) if row["tau"].get(key)]
    speeds = [row["predicted_speedup"] for row in rows.values() if row["predicted_speedup"]]
    figure = pyplot.figure(figsize=(3.6 * columns, 3.9 * lines + 0.5), layout="constrained")
    cells = figure.subfigures(lines, columns, squeeze=False)
    handles: dict[str, Any] = {}
    for index, (question, answers) in enumerate(questions.items()):
        upper, lower = cells.flat[index].subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
        x = list(range(len(answers)))
        for number, domain in enumerate(domains):
            y = [row["tau"][domain] for row in answers.values()]
            handles[TITLES.get(domain, domain)] = upper.plot(
                x, y, "o-", color=f"C{number}", alpha=0.5, linewidth=1, markersize=3.5
            )[0]
        means = [row["tau"]["mean"] for row in answers.values()]
        if seeds:
            handles["baseline, all seeds"] = upper.axhspan(min(seeds), max(seeds), color="0.8", zorder=0, linewidth=0)
        handles["mean"] = upper.plot(x, means, "o-", color="black", linewidth=2.2, markersize=6)[0]
        for place, row in zip(x, answers.values()):
            around = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            if row["tau"]["mean"]:
                bold = "bold" if row["name"] == "baseline" else "normal"
                text = upper.annotate(f"{row['tau']['mean']:.2f}", (place, row["tau"]["mean"]), weight=bold, **around)
                text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
            if row["predicted_speedup"]:
                around |= {"xytext": (0, 3), "bbox": UNCROSSED}  # the line at 1 runs where most of these stand
                lower.annotate(f"{row['predicted_speedup']:.2f}×", (place, row["predicted_speedup"]), **around)
        if speeds:
            heights = [row["predicted_speedup"] or 0 for row in answers.values()]
            shades = ["0.35" if row["name"] == "baseline" else "0.65" for row in answers.values()]
            lower.bar(x, heights, width=0.5, color=shades)
            lower.axhline(1, color="black", linewidth=0.8, linestyle=":")
            lower.set_ylim(0, max(1.0, *speeds) * 1.3)
        else:
            lower.set_yticks([])
            lower.text(0.5, 0.5, "not timed yet", transform=lower.transAxes, ha="center", va="center", color="0.5")
        upper.set_title(question, fontsize=10, weight="bold")
        if taus:
            room = 0.12 * (max(taus) - min(taus)) + 0.02
            upper.set_ylim(min(taus) - room, max(taus) + room)
        if index % columns == 0:
            upper.set_ylabel("tau", fontsize=9)
            lower.set_ylabel("speedup", fontsize=9)
        else:
            upper.tick_params(labelleft=False)
            lower.tick_params(labelleft=False)
        lower.set_xticks(x, list(answers), fontsize=8)
        lower.set_xlim(-0.5, len(x) - 0.5)
        for axis in (upper, lower):
            axis.tick_params(axis="y", labelsize=8)
            axis.tick_params(axis="x", length=0)
            axis.grid(axis="y", alpha=0.25)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    name = result["model"].rpartition("/")[2]
    figure.suptitle(
        f"{name}: acceptance length (greedy) and predicted speedup, one choice changed at a time", fontsize=10
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(result: dict[str, Any], folder: Path, readme: Path | None = None) -> None:
    """Print the table, draw the figure, and write the README's section if there is a README to write to."""
    heads, cells = lines_of(result)
    table = Table(title=f"{result['model']}, {result['settings']['steps']} steps each", box=SIMPLE)
    # What fits a terminal; the README has the rest.
    left_out = {"drafts 1, 2, 3 kept", "teacher-forced", "weights, M", "draft, ms", "verify, ms"}
    shown = [index for index, head in enumerate(heads) if head not in left_out]
    for index in shown:
        table.add_column(heads[index], justify="right" if index else "left", no_wrap=index == 0)
    for row in cells:
        table.add_row(*(row[index] for index in shown))
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    plot(result, folder / "ablation.png")
    if readme is not None:
        readme.write_text(with_section(readme.read_text(), section(result)))


def _domains(result: dict[str, Any]) -> list[str]:
    """The domains of the mean; those that were measured where it has none."""
    known = [key for key in result["rows"][0]["tau"] if key not in ("mean", "all")]
    return [domain for domain in known if domain in MEAN_OF] or known


def _shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(aside, path)
