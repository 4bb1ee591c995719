"""What each choice of the DSpark recipe is worth on a small target: one baseline, one thing changed at a time.

    python bench/ablation.py --run FOLDER            # trains and measures every variant; started again, it goes on
    python bench/ablation.py --run FOLDER --time     # times their shapes, on an idle machine
    python bench/ablation.py --plot                  # table and figure again, from ablation.json alone

FOLDER is what ``dspark-fast train --out FOLDER`` left: responses and their features with all taps and the largest
probabilities that the variants ask for. A variant keeps ``metrics.jsonl`` and ``result.json`` in
``FOLDER/ablation/<name>/``; its checkpoint is deleted once it has been measured.

Held fixed: the responses and their order, steps, sequences per step, decay of the loss over the block,
the confidence head and its loss, the seed of the weights (equal shapes begin with equal noise), the held-out prompts.
Of the anchors, so many are taken per sequence that anchors times block size is the baseline's number of slots; a larger
block therefore sees fewer anchors, and they are other ones. A drafter with more weights gets no more steps.

Two figures say how good a variant is. **tau** is the greedy acceptance length on held-out prompts in bf16, pooled over
rounds within a domain, plain mean over domains. The **teacher-forced** tau is what the exact distributions of drafter
and target over the whole vocabulary promise at temperature 1 on held-out responses, whatever loss a variant was trained
with; it can be compared between variants of one block size alone. The baseline is trained with two further seeds, and
what they differ by is what a difference between two single runs has to exceed.

Time does not depend on weights: ``--time`` takes fresh drafters of each shape, all in one process, one after the other
and all again, and the median. The predicted speedup is ``tau * T_plain / (T_draft + T_verify + T_bookkeeping)`` at
batch 1.

Writes ``ablation.json`` and ``ablation.png`` to ``results/cpu/``, and the table into ``README.md``; with ``--out`` the
two files alone, there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from machine import describe, results_folder
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dspark_fast.compare import compare
from dspark_fast.training.evaluate import MEAN_OF, HeldOut, held_out_prompts, mean_tau, measure_acceptance
from dspark_fast.training.features import Batches, CachedFeatures
from dspark_fast.training.loss import LossWeights
from dspark_fast.training.recipe import Recipe, fresh_draft
from dspark_fast.training.trainer import Trainer, TrainSettings

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- ablation:begin -->", "<!-- ablation:end -->"
STUDENT = {2: 12.71, 3: 4.30}  # two-sided 95 % quantile of Student's t for a deviation from so many runs
HELD_OUT = 64  # responses of the teacher-forced figure, in the 8 batches that the trainer evaluates
TITLES = {"math": "maths"}


@dataclass(frozen=True)
class Choices:
    """One drafter and how it is trained; the defaults are the baseline."""

    depth: int = 2
    rank: int = 64
    block: int = 7
    head: str = "vanilla"
    cross_entropy: float = 0.1
    total_variation: float = 0.9
    taps: tuple[int, ...] = (8, 15, 28)
    initialise: str = "target"
    vocabulary: int = 6144
    top_tokens: int = 0
    learning_rate: float = 2e-3
    markov_rate: float = 8.0
    seed: int = 0

    def shape(self) -> dict[str, Any]:
        """Overrides of the drafter's configuration."""
        return {
            "num_hidden_layers": self.depth,
            "block_size": self.block,
            "markov_rank": self.rank,
            "markov_head_type": self.head,
            "target_layer_ids": list(self.taps),
        }

    def time_key(self) -> str:
        """Names what a round's time depends on."""
        return f"depth {self.depth}, rank {self.rank}, block {self.block}, {self.head}, {len(self.taps)} taps"


#: In the order in which they are trained.
VARIANTS = {
    "baseline": Choices(),
    "depth-3": Choices(depth=3),
    "depth-1": Choices(depth=1),
    "rank-0": Choices(rank=0),
    "loss-ce": Choices(cross_entropy=1.0, total_variation=0.0),
    "block-4": Choices(block=4),
    "markov-rate-1": Choices(markov_rate=1.0),
    "head-gated": Choices(head="gated"),
    "head-rnn": Choices(head="rnn"),
    "init-random": Choices(initialise="random"),
    "taps-last": Choices(taps=(28,)),
    "rate-6e-4": Choices(learning_rate=6e-4),
    "block-10": Choices(block=10),
    "rank-256": Choices(rank=256),
    "top-64": Choices(top_tokens=64),
    "vocabulary-2048": Choices(vocabulary=2048),
    "taps-five": Choices(taps=(1, 8, 15, 22, 28)),
    "loss-tv": Choices(cross_entropy=0.0, total_variation=1.0),
    "rank-32": Choices(rank=32),
    "vocabulary-all": Choices(vocabulary=0),
    "baseline-seed1": Choices(seed=1),
    "baseline-seed2": Choices(seed=2),
}

#: Each question with its answers, in the order of the axis: label and variant.
QUESTIONS = {
    "layers": {"1": "depth-1", "2": "baseline", "3": "depth-3"},
    "Markov rank": {"none": "rank-0", "32": "rank-32", "64": "baseline", "256": "rank-256"},
    "block size": {"4": "block-4", "7": "baseline", "10": "block-10"},
    "Markov head": {"vanilla": "baseline", "gated": "head-gated", "rnn": "head-rnn"},
    "loss": {"CE": "loss-ce", "0.1 CE + 0.9 TV": "baseline", "TV": "loss-tv"},
    "taps": {"last": "taps-last", "three": "baseline", "five": "taps-five"},
    "first weights": {"random": "init-random", "the target's": "baseline"},
    "tokens in the loss": {"2,048": "vocabulary-2048", "6,144": "baseline", "all": "vocabulary-all"},
    "target's probabilities": {"64 largest": "top-64", "exact": "baseline"},
    "learning rate": {"6e-4": "rate-6e-4", "2e-3": "baseline"},
    "of W1 and W2, times": {"1": "markov-rate-1", "8": "baseline"},
}


@dataclass(frozen=True)
class Settings:
    """What all variants have in common."""

    responses: int = 1216
    steps: int = 608
    sequences: int = 4
    anchors: int = 24
    per_domain: int = 12
    max_new_tokens: int = 64

    def training(self, choices: Choices) -> TrainSettings:
        """Of one variant: anchors for as many slots as the baseline has."""
        return TrainSettings(
            steps=self.steps,
            learning_rate=choices.learning_rate,
            markov_rate=choices.markov_rate,
            sequences=self.sequences,
            anchors=self.anchors_of(choices.block),
            loss=LossWeights(choices.cross_entropy, choices.total_variation),
            vocabulary=choices.vocabulary,
            top_tokens=choices.top_tokens,
            seed=choices.seed,
            save_every=100,
            evaluate_every=self.steps + 1,
        )

    def anchors_of(self, block: int) -> int:
        """Anchors per sequence at a block size."""
        return max(1, round(self.anchors * Choices().block / block))


def train_variant(
    model: Any, prompts: Sequence[HeldOut], name: str, choices: Choices, run: Path, work: Path, settings: Settings
) -> dict[str, Any]:
    """Train and measure one variant, or take its result if there is one.

    Raises:
        SystemExit: for a result of other settings, or too few responses.
    """
    folder = work / name
    path = folder / "result.json"
    asked = json.loads(json.dumps({"name": name, "choices": asdict(choices), "settings": asdict(settings)}))
    if path.is_file():
        result = json.loads(path.read_text())
        if any(result[key] != value for key, value in asked.items()):
            raise SystemExit(f"{path} was made with other settings: delete its folder or take another with --work")
        return result
    began = time.perf_counter()
    source = CachedFeatures(run / "features" / "train", choices.taps, settings.responses)
    if len(source.lengths) < settings.responses:
        raise SystemExit(
            f"{run} holds features of {len(source.lengths)} responses, --responses is {settings.responses}"
        )
    train = Batches(source, settings.sequences)
    held_out = Batches(CachedFeatures(run / "features" / "held-out", choices.taps, HELD_OUT), HELD_OUT // 8)
    training = settings.training(choices)
    recipe = Recipe(shape=choices.shape(), initialise=choices.initialise, train=training, seed=choices.seed)
    draft = fresh_draft(model, recipe, train[0].input_ids[:2])
    trainer = Trainer(draft, train, held_out, folder, training)
    trainer.run()
    trained = sum(parameter.numel() for parameter in trainer.parameters.values())

    # The same question for every variant: exact, over the whole vocabulary, at the same number of anchors.
    judge = replace(training, vocabulary=0, top_tokens=0, anchors=settings.anchors)
    teacher_forced = Trainer(draft, held_out, held_out, folder, judge).evaluate()
    trained_in = time.perf_counter() - began
    draft.requires_grad_(False).eval().to(torch.bfloat16).to(model.dtype)
    with torch.no_grad():
        found = measure_acceptance(
            model, draft, prompts, max_new_tokens=settings.max_new_tokens, batch_size=settings.per_domain
        )
    result = {
        **asked,
        "tau": {"mean": _number(mean_tau(found)), **{one.domain: _number(one.tau) for one in found}},
        "by_position": {one.domain: [_number(share) for share in one.by_position] for one in found},
        "rounds": {one.domain: one.rounds for one in found},
        "prompts": {one.domain: one.prompts for one in found},
        "teacher_forced": {
            "responses": len(held_out.source.lengths),
            "tau": _number(teacher_forced["tau"]),
            "accept": teacher_forced["accept"],
        },
        "parameters": trained,
        "megabytes": round(trained * 2 / 1e6, 1),
        "training_tokens": sum(len(source.own_tokens(index)) for index in range(len(source.lengths))),
        "anchors": training.anchors,
        "seconds": {
            "training": round(trained_in),
            "measuring": round(time.perf_counter() - began - trained_in),
            "cores": torch.get_num_threads(),
        },
        "machine": describe(),
    }
    _write(path, result)
    for left in ("checkpoint.safetensors", "best.safetensors"):
        (folder / left).unlink(missing_ok=True)
    return result


def time_shapes(
    model: Any, input_ids: torch.Tensor, variants: dict[str, Choices], *, repeats: int, new_tokens: int
) -> dict[str, Any]:
    """Milliseconds of a round for every shape, and of a plain step, in alternation."""
    shapes: dict[str, Any] = {}
    for choices in variants.values():
        if choices.time_key() not in shapes:
            recipe = Recipe(shape=choices.shape(), initialise="random")
            draft = fresh_draft(model, recipe, input_ids).requires_grad_(False).eval().to(model.dtype)
            shapes[choices.time_key()] = draft
    parts: dict[str, list[dict[str, float]]] = {key: [] for key in shapes}
    plain = []
    for repeat in range(repeats):
        order = list(shapes) if repeat % 2 == 0 else list(shapes)[::-1]
        for key in order:
            found = compare(model, shapes[key], input_ids, max_new_tokens=new_tokens, repeats=2)
            if not found.seconds_per_round or not found.seconds_per_plain_step:
                raise SystemExit("the prompt is answered by one token: nothing can be timed on it")
            parts[key].append(found.seconds_per_round)
            plain.append(found.seconds_per_plain_step)
        print(f"timed {repeat + 1} of {repeats}", flush=True)
    rounds = {
        key: {part: _spread([one[part] for one in values]) for part in values[0]} for key, values in parts.items()
    }
    return {
        "machine": describe(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": input_ids.shape[1],
        "new_tokens": new_tokens,
        "repeats": repeats,
        "plain_ms": _spread(plain),
        "rounds_ms": rounds,
    }


def _spread(seconds: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {"median": round(middle * 1e3, 3), "quartiles": [round(low * 1e3, 3), round(high * 1e3, 3)]}


def join(model: str, work: Path, variants: dict[str, Choices]) -> dict[str, Any]:
    """The results of all finished variants with their times, as ``ablation.json`` holds them.

    Raises:
        SystemExit: if none is finished, or two were made with different settings.
    """
    rows = [json.loads(path.read_text()) for name in variants if (path := work / name / "result.json").is_file()]
    if not rows:
        raise SystemExit(f"{work} holds no result.json yet")
    settings = rows[0]["settings"]
    for row in rows:
        if row.pop("settings") != settings:
            raise SystemExit(f"{row['name']} and {rows[0]['name']} in {work} were made with different settings")
    path = work / "ablation_times.json"
    times = json.loads(path.read_text()) if path.is_file() else None
    for row in rows:
        key = Choices(**{**row["choices"], "taps": tuple(row["choices"]["taps"])}).time_key()
        row["ms"] = row["predicted_speedup"] = None
        if times and key in times["rounds_ms"]:
            spread = times["rounds_ms"][key]
            row["ms"] = {part: value["median"] for part, value in spread.items()}
            if row["tau"]["mean"] is not None:
                whole = sum(row["ms"].values())
                row["predicted_speedup"] = round(row["tau"]["mean"] * times["plain_ms"]["median"] / whole, 3)
    return {
        "machine": rows[0]["machine"],
        "model": model,
        "settings": settings,
        "noise": noise(rows),
        "rows": [{key: value for key, value in row.items() if key != "machine"} for row in rows],
        "times": times,
    }


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
                around["xytext"] = (0, 3)
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


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(aside, path)


def main() -> None:
    fixed = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="what `dspark-fast train --out FOLDER` left")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--responses", type=int, default=fixed.responses, help="the first so many are trained on")
    parser.add_argument("--steps", type=int, default=fixed.steps)
    parser.add_argument("--sequences", type=int, default=fixed.sequences, help="per step")
    parser.add_argument("--anchors", type=int, default=fixed.anchors, help="per sequence, at the baseline's block size")
    parser.add_argument("--per-domain", type=int, default=fixed.per_domain, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=fixed.max_new_tokens, help="per held-out prompt")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=VARIANTS, help="train these variants alone")
    parser.add_argument("--time", action="store_true", help="time every variant's shape instead of training")
    parser.add_argument("--repeats", type=int, default=7, help="of the timing")
    parser.add_argument("--plot", action="store_true", help="table and figure from ablation.json alone")
    parser.add_argument("--work", type=Path, help="folder of the variants; FOLDER/ablation by default")
    parser.add_argument("--out", type=Path, help="folder of JSON and figure; by default results/cpu, and README.md too")
    options = parser.parse_args()
    folder, readme = options.out or results_folder(), None if options.out else README
    folder.mkdir(parents=True, exist_ok=True)
    if options.plot:
        report(json.loads((folder / "ablation.json").read_text()), folder, readme)
        return
    if options.run is None:
        parser.error("--run is needed but for --plot")
    work = options.work or options.run / "ablation"
    settings = Settings(**{key: getattr(options, key) for key in asdict(fixed)})

    from dspark_fast.targets import load_target

    model, tokenizer = load_target(options.model, torch.bfloat16, torch.device("cpu"))
    prompts = [one for one in held_out_prompts(tokenizer, settings.per_domain) if one.domain in MEAN_OF]
    if options.time:
        chat = next(one for one in prompts if one.domain == "chat")
        times = time_shapes(model, torch.tensor([chat.input_ids]), VARIANTS, repeats=options.repeats, new_tokens=16)
        _write(work / "ablation_times.json", times)
    else:
        names = [name for name in VARIANTS if not options.only or name in options.only]
        for number, name in enumerate(names, 1):
            result = train_variant(model, prompts, name, VARIANTS[name], options.run, work, settings)
            seconds = result["seconds"]
            print(
                f"{number} of {len(names)}, {name}: tau {result['tau']['mean']}, "
                f"{seconds['training']} s to train, {seconds['measuring']} s to measure",
                flush=True,
            )
    result = join(options.model, work, VARIANTS)
    _write(folder / "ablation.json", result)
    report(result, folder, readme)


if __name__ == "__main__":
    main()
