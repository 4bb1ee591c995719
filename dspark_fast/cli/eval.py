"""``dspark-fast eval``: acceptance by domain, temperature and block position."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_fast.cli import options as o
from dspark_fast.cli import session
from dspark_fast.cli.app import app
from dspark_fast.writing import unwritable

if TYPE_CHECKING:
    from dspark_fast.evaluation import Evaluation, Pair, Prompt

_PER_DOMAIN = 16  # held-out prompts, as on the drafters' cards


@dataclass(frozen=True)
class Questions:
    """What to ask.

    Attributes:
        prompts: in order.
        told: where they are from, for the report.
        mean_of: domains of the row ``mean``; None: all.
    """

    prompts: list[Prompt]
    told: str | list[str]
    mean_of: tuple[str, ...] | None = None


@app.command("eval")
def evaluate(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    autoregressive: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Evaluate this smaller model of the same vocabulary as the drafter, token by token.",
            rich_help_panel="Models",
        ),
    ] = None,
    first_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Evaluate the target's own first N layers as the drafter, token by token.",
            rich_help_panel="Models",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Drafts per round of --autoregressive and --first-layers; left out: 5.",
            rich_help_panel="Models",
        ),
    ] = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Your own prompts in place of ours: JSONL with turns (or prompt, messages, question), a domain and an "
            "id if you like; the domain is the file's name without one. May be repeated.",
            rich_help_panel="Prompts",
        ),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Ask what dspark-fast train keeps from every training run, in six domains, as drafters' cards do.",
            rich_help_panel="Prompts",
        ),
    ] = False,
    per_domain: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Held-out prompts of each domain, which it asks for by itself; left out: 16.",
            rich_help_panel="Prompts",
        ),
    ] = None,
    first_turns: Annotated[
        bool,
        typer.Option(
            "--first-turns",
            help="Ask nothing after the first answer, as the authors' published figures.",
            rich_help_panel="Prompts",
        ),
    ] = False,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            metavar="X",
            min=0.0,
            callback=lambda values: values and [o._number(value) for value in values],
            help="0 takes the likeliest token each time, otherwise rejection sampling. May be repeated; left out: 0 "
            "and 1.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=2**64 - 1, help="The same seed gives the same tokens.", rich_help_panel="Sampling"
        ),
    ] = 0,
    confidence_threshold: o.Confidence = 0.0,
    no_markov: o.NoMarkov = False,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts decoded together.")] = 8,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time one prompt with and without the drafter, and predict the speedups.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the JSON object to this file too, and what is done so far beside it (FILE run.json: "
            "run.rows.jsonl): the same command goes on from there.",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw eval_tau.png and eval_positions.png there, in a new folder too."),
    ] = None,
) -> None:
    """Measure the acceptance length tau of a drafter, by domain, temperature and block position.

    The prompts are the package's own: 20 each of maths, code and chat, some of two turns. All figures are pooled over
    rounds, as the authors of DSpark define them. tau: tokens per round, bonus included. proposed: drafts per round.
    verify rate: committed tokens over verified positions. slot: the share of drafts there that were accepted, given
    that those before it were. The row mean is the plain mean of tau over the domains (with --held-out: over math, code,
    chat, list and short); all is pooled over all rounds.
    """
    _check(prompts or [], held_out, per_domain, out)
    with session.plain_errors():
        session.quiet()
        from dspark_fast.evaluation.lock import alone
        from dspark_fast.writing import write_whole

        if plots is not None:
            _make_folder(plots)
        own = _own_prompts(prompts or [])
        with contextlib.nullcontext() if out is None else alone(_rows(out)):  # from the first row to the last word
            pair = _load(model, draft, autoregressive, first_layers, block_size, dtype.value, device)
            asked = own or _questions(pair.tokenizer, held_out or per_domain is not None, per_domain)
            settings = {
                "max_new_tokens": max_new_tokens,
                "batch_size": batch_size,
                "seed": seed,
                "confidence_threshold": confidence_threshold,
                "use_markov": not no_markov,
                "first_turns": first_turns,
            }
            results = _measure(pair, asked, sorted({*(temperature or (0.0, 1.0))}), out, settings)
            timed = _time(pair, asked.prompts, results) if speed else None
            report = _report(model, pair, asked, first_turns, results, timed)
            line = json.dumps(report)
            if out is not None:
                write_whole(out, line + "\n")
        if plots is not None:
            _draw(results, plots, f"{model.rpartition('/')[2]}, drafter: {pair.name}")
    if as_json:
        print(line)
    else:
        _show(results, report)


def _check(files: list[Path], held_out: bool, per_domain: int | None, out: Path | None) -> None:
    """What can be told of the arguments alone."""
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"no such file: {', '.join(missing)}", param_hint="'--prompts'")
    if files and (held_out or per_domain is not None):
        raise typer.BadParameter("your own prompts or the held-out ones, not both", param_hint="'--prompts'")
    if out is not None and (why := unwritable(out)):
        raise typer.BadParameter(f"{out} cannot be written: {why}", param_hint="'--out'")


def _make_folder(plots: Path) -> None:
    """Raises ValueError now rather than after minutes of work: without matplotlib, or if nothing can be drawn there."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError('--plots needs matplotlib: pip install "dspark-fast[plots]"')
    try:
        plots.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=plots):
            pass
    except OSError as error:
        raise ValueError(f"--plots is {plots}, where no plot can be written: {error.strerror}") from None


def _own_prompts(files: list[Path]) -> Questions | None:
    """What stands in the user's files, which is read before a model is; None without files.

    Raises:
        ValueError: for a line that is no prompt, with file and line number; for two prompts of one name.
    """
    if not files:
        return None
    from dspark_fast.evaluation.prompts import check_names, read_prompt_file

    prompts = [one for path in files for one in read_prompt_file(path)]
    check_names(prompts)
    return Questions(prompts, [str(path) for path in files])


def _rows(out: Path) -> Path:
    """Where the batches that are done stand."""
    return out.with_name(f"{out.stem}.rows.jsonl")


def _load(
    model: str,
    draft: str | None,
    autoregressive: str | None,
    layers: int | None,
    block_size: int | None,
    dtype: str,
    device: str | None,
) -> Pair:
    options = {"--draft": draft, "--autoregressive": autoregressive, "--first-layers": layers}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given: accepted is one drafter")
    if block_size is not None and not (autoregressive or layers):
        raise ValueError(f"--block-size is {block_size}: it is for --autoregressive and --first-layers")
    import torch

    from dspark_fast.evaluation import load_pair

    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return load_pair(
        model,
        draft,
        autoregressive=autoregressive,
        layers=layers,
        block_size=block_size,
        dtype=names.get(dtype),
        device=device,
    )


def _questions(tokenizer: Any, held_out: bool, per_domain: int | None) -> Questions:
    """Our own prompts."""
    from dspark_fast.evaluation import MEAN_OF, held_out_prompts, shipped_prompts

    if held_out:
        number = per_domain or _PER_DOMAIN
        return Questions(held_out_prompts(tokenizer, number), f"held-out, {number} per domain", MEAN_OF)
    return Questions(shipped_prompts(), "shipped")


def _measure(
    pair: Pair, asked: Questions, temperatures: list[float], out: Path | None, settings: dict[str, Any]
) -> list[Evaluation]:
    """At one temperature after the other, with a bar for each on a terminal."""
    from dspark_fast.evaluation import evaluate

    rows = None if out is None else _rows(out)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts, elapsed"))
    columns += (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    results = []
    # A batch takes longer than the 30 s that the time left is usually judged by.
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=1800) as progress:
        for temperature in temperatures:
            bars: list[Any] = []

            def show(done: int, name: str = f"temperature {temperature:g}", bars: list[Any] = bars) -> None:
                if bars:
                    progress.update(bars[0], completed=done)
                else:  # what an earlier call did says nothing about how long the rest takes
                    bars.append(progress.add_task(name, completed=done, total=len(asked.prompts)))

            try:
                results.append(
                    evaluate(
                        pair.model,
                        pair.drafter,
                        pair.tokenizer,
                        asked.prompts,
                        temperature=temperature,
                        mean_of=asked.mean_of,
                        rows=rows,
                        on_progress=show,
                        **settings,
                    )
                )
            except KeyboardInterrupt:
                if rows is not None:
                    session.note(f"Stopped. What is done is in {rows}; the same command goes on from there")
                raise
    return results


def _time(pair: Pair, prompts: list[Prompt], results: list[Evaluation]) -> list[dict[str, Any]]:
    from dspark_fast.evaluation.speed import time_one

    with Console(stderr=True).status("timing") as status:  # shown on a terminal only

        def show(what: str) -> None:
            status.update(f"timing: {what}")

        return [time_one(pair.model, pair.drafter, pair.tokenizer, prompts, one, show) for one in results]


def _report(
    model: str,
    pair: Pair,
    asked: Questions,
    first_turns: bool,
    results: list[Evaluation],
    timed: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    from dspark_fast.machine import describe

    dtype = str(pair.model.dtype).removeprefix("torch.")
    return {
        "model": model,
        "draft": pair.name,
        "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, dtype),
        "prompts": asked.told,
        "first_turns": first_turns,
        "results": [one.to_dict() for one in results],
        "speed": timed,
        "machine": describe(str(pair.model.device)),
    }


def _draw(results: list[Evaluation], folder: Path, title: str) -> None:
    from dspark_fast.evaluation import plot_positions, plot_tau

    plot_tau(results, folder / "eval_tau.png", title=title)
    plot_positions(results, folder / "eval_positions.png", title=title)


def _show(results: list[Evaluation], report: dict[str, Any]) -> None:
    from dspark_fast.evaluation.table import acceptance_table

    out = Console(highlight=False, soft_wrap=True)
    if not out.is_terminal:  # a file has no edge
        out.width = max(out.width, 160)
    timed = report["speed"] or [None] * len(results)
    for one, times in zip(results, timed):
        out.print(acceptance_table(one, times and times["predicted"]))
        if times:
            out.print(_timing(times), markup=False)
        out.print()
    machine, first = report["machine"], results[0]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    parts = [f"{report['model']}, {report['draft']}", f"up to {first.max_new_tokens} new tokens", f"seed {first.seed}"]
    if first.confidence_threshold:
        parts.append(f"cut below confidence {first.confidence_threshold:g}")
    parts += [] if first.use_markov else ["no Markov head"]
    parts += [report["dtype"], f"{machine['device']}, {threads}"]
    parts.append(f"torch {machine['torch']}, transformers {machine['transformers']}")
    out.print(" | ".join(parts), style="dim", markup=False)


def _timing(times: dict[str, Any]) -> str:
    """What the predicted speedups are made of, in a sentence."""
    if not times["seconds_per_plain_step"] or not times["seconds_per_round"]:
        return "predicted: nothing, the answer that was timed has one token only"
    parts = " + ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in times["seconds_per_round"].items())
    return (
        f"predicted: tau x {1000 * times['seconds_per_plain_step']:.2f} ms / ({parts} ms), from the prompt "
        f"{times['id']} at batch 1, whose own measured speedup is {times['speedup']:.2f}x at tau "
        f"{times['acceptance_length']:.2f}"
    )
