"""``dspark-fast train``: a drafter for any target, from the target's own answers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import plain_errors

if TYPE_CHECKING:
    from rich.progress import Progress

    from dspark_fast.config import DSparkConfig
    from dspark_fast.training.recipe import Recipe

# A drafter that is given has these already.
OF_A_FRESH_ONE = ("layers", "block_size", "rank", "head", "taps", "initialise")


LIVE = (
    "Run the target for every batch instead of keeping its hidden states on disk. The way for several GPUs: without it "
    "the first process extracts the states alone, and the others wait."
)


@app.command()
def train(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The target: a folder or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder of everything the run makes; an interrupted run goes on from it.")],
    tokens: Annotated[int, typer.Option(help="Answer tokens to have the target generate.", min=1)] = 500_000,
    max_new_tokens: Annotated[int, typer.Option(help="Per answer.", min=2)] = 192,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Your own prompts, JSONL with prompt, messages, turns or question; may be repeated."),
    ] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K training questions as JSONL, mixed into ours.")] = None,
    layers: Annotated[int, typer.Option(help="Draft layers.", min=1)] = 2,
    block_size: Annotated[int, typer.Option(help="Tokens drafted per round.", min=1, max=16)] = 7,
    rank: Annotated[int, typer.Option(help="Rank of the Markov head, 0 for none.", min=0)] = 64,
    head: Annotated[str, typer.Option(help="Markov head: vanilla, gated or rnn.")] = "vanilla",
    taps: Annotated[
        str | None, typer.Option(help="Tapped target layers, as 1,9,17; the default spreads five of them.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = 4000,
    learning_rate: Annotated[float, typer.Option(help="Peak.", min=0.0)] = 2e-3,
    markov_rate: Annotated[
        float, typer.Option(help="The Markov head's W1 and W2 learn so many times as fast.", min=0.0)
    ] = 8.0,
    sequences: Annotated[int, typer.Option(help="Sequences per batch.", min=1)] = 8,
    accumulate: Annotated[int, typer.Option(help="Batches per step and process.", min=1)] = 1,
    anchors: Annotated[int, typer.Option(help="Anchor blocks per sequence.", min=1)] = 48,
    vocabulary: Annotated[
        int, typer.Option(help="Take the loss over this many most frequent tokens, 0 for all.", min=0)
    ] = 8192,
    whole_vocabulary: Annotated[
        bool,
        typer.Option("--whole-vocabulary", help="Write a drafter of every token, not of those of --vocabulary alone."),
    ] = False,
    top_tokens: Annotated[
        int,
        typer.Option(help="Take the target's so many largest probabilities, the rest as one mass; 0 for all.", min=0),
    ] = 0,
    initialise: Annotated[str, typer.Option(help="target (its last layers) or random.")] = "target",
    heads_only: Annotated[
        bool, typer.Option("--heads-only", help="Train only the Markov and confidence heads of --draft.")
    ] = False,
    draft: Annotated[str | None, typer.Option(help="Start from this drafter instead of a fresh one.")] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help=LIVE),
    ] = False,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the drafter's pass; by default on a GPU.")
    ] = None,
    patience: Annotated[
        int, typer.Option(help="Stop after so many looks at held-out text without a better tau, 0 never.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling, weights and anchors.")] = 0,
    device: o.Device = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 200,
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out text.", min=1)] = 200,
    per_domain: Annotated[int, typer.Option(help="Held-out prompts per domain for the final measurement.", min=1)] = 16,
) -> None:
    """Train a drafter: the target answers prompts, its hidden states are kept, the drafter learns to run ahead.

    Four stages (responses, features, training, measurement), each kept in --out and continued after an interruption.
    The drafter ends up in OUT/draft, with its model card and training curves; metrics.jsonl lies beside it. Several
    processes share the work under ``torchrun --nproc-per-node 4 --no-python dspark-fast train ...``.
    """
    from dspark_fast.training.recipe import Recipe
    from dspark_fast.training.trainer import TrainSettings

    if heads_only and draft is None:
        raise typer.BadParameter("--heads-only needs --draft: fresh layers under trained heads would stay noise")
    given = {name for name in OF_A_FRESH_ONE if _is_given(context, name)}
    if draft is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in OF_A_FRESH_ONE if name in given)
        raise typer.BadParameter(f"{names} cannot go with --draft: that drafter has its own")
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "block_size": block_size,
        "markov_rank": rank,
        "markov_head_type": head,
    }
    if taps is not None:
        try:
            shape["target_layer_ids"] = sorted(int(part) for part in taps.split(","))
        except ValueError:
            raise typer.BadParameter(f"--taps is {taps!r}: accepted are layer numbers, as 1,9,17") from None
    recipe = Recipe(
        tokens=tokens,
        max_new_tokens=max_new_tokens,
        shape=shape,
        initialise=initialise,
        live=live,
        whole_vocabulary=whole_vocabulary,
        seed=seed,
        train=TrainSettings(
            steps=steps,
            learning_rate=learning_rate,
            markov_rate=markov_rate,
            sequences=sequences,
            accumulate=accumulate,
            anchors=anchors,
            vocabulary=vocabulary,
            top_tokens=top_tokens,
            heads_only=heads_only,
            seed=seed + 42,
            save_every=save_every,
            evaluate_every=evaluate_every,
            patience=patience,
            compile=compiled,
        ),
    )
    files = prompts or []
    with plain_errors():
        _run(model, out, recipe, draft=draft, prompt_files=files, gsm8k=gsm8k, device=device, per_domain=per_domain)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _run(
    name: str,
    out: Path,
    recipe: Recipe,
    *,
    draft: str | None,
    prompt_files: list[Path],
    gsm8k: Path | None,
    device: str | None,
    per_domain: int,
) -> None:
    """The four stages with a progress bar each."""
    import torch
    from rich.console import Console

    from dspark_fast.config import DSparkConfig
    from dspark_fast.draft import DSparkDraft
    from dspark_fast.machine import describe
    from dspark_fast.pairs import chosen_device
    from dspark_fast.targets import load_target
    from dspark_fast.training import recipe as stages
    from dspark_fast.training.card import write_card
    from dspark_fast.training.plot import plot_training
    from dspark_fast.training.preflight import preflight
    from dspark_fast.training.workers import Workers
    from dspark_fast.vocabulary import whole

    device = str(chosen_device(device))
    workers = Workers.from_environment(device)
    console = Console(stderr=True, quiet=not workers.first)
    missing = [str(path) for path in [*prompt_files, *([gsm8k] if gsm8k else [])] if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"no such file: {', '.join(missing)}")
    model, tokenizer = load_target(name, torch.bfloat16, workers.device(device))
    trainee = None if draft is None else whole(DSparkDraft.from_pretrained(draft, target=model, dtype=torch.float32))
    config = DSparkConfig.from_target(model.config, **recipe.shape) if trainee is None else trainee.config
    if workers.first:  # an error here ends it, and torchrun then ends the others
        preflight(model, tokenizer, out, recipe, config, per_domain=per_domain, workers=workers.count)
    workers.wait()
    begins = f"the drafter {draft}" if draft is not None else _beginning(model, config, recipe)
    console.print(f"The drafter begins as {begins}", highlight=False, markup=False)

    with _progress(console) as progress:
        bars: dict[str, Any] = {}

        def show(stage: str, done: int, of: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=of or None, figures="")
            progress.update(bars[stage], completed=min(done, of) if of else done, total=of or None)

        train, held_out = stages.collect(
            model,
            tokenizer,
            out,
            recipe,
            config.target_layer_ids,
            prompt_files=prompt_files,
            gsm8k=gsm8k,
            workers=workers,
            on_progress=show,
        )
        if not len(train):
            raise typer.BadParameter("--tokens is too small: no answer is long enough to train on")
        if trainee is None:
            trainee = stages.fresh_draft(model, recipe, train[0].input_ids[:2])
        bar = progress.add_task("training", total=recipe.train.steps, figures="")

        def step(metrics: dict[str, Any]) -> None:
            figures = f"loss {_figure(metrics['loss'], 3)}  tau {_figure(metrics['tau'], 2)}"
            progress.update(bar, completed=metrics["step"], figures=figures)

        trained = stages.train_draft(model, trainee, train, held_out, out, recipe, on_step=step, workers=workers)
        progress.update(bar, completed=recipe.train.steps)  # also where an earlier run had already got there
        if workers.first:
            acceptance = stages.measure(model, tokenizer, trained, out, per_domain=per_domain, on_progress=show)
    workers.leave()
    if not workers.first:
        return
    folder = out / "draft"
    try:
        plot_training(out / "metrics.jsonl", folder / "training.png")
    except ImportError:
        console.print("training.png is left out: it needs matplotlib (pip install 'dspark-fast[plots]')")
    measure = ["dspark-fast", "eval", "--model", name, "--draft", str(folder), "--dtype", "bf16", "--device", device]
    write_card(
        folder,
        target=name,
        config=trained.config,
        recipe=recipe,
        command=_command(workers.count),
        begins=begins,
        workers=workers.count,
        metrics=out / "metrics.jsonl",
        acceptance=acceptance,
        answer_tokens=int(train.token_counts(trained.config.vocab_size).sum()),
        measure_command=shlex.join([*measure, "--held-out", "--per-domain", str(per_domain), "--temperature", "0"]),
        trained_on=_trained_on(describe(str(model.device)), workers.count),
    )
    for one in acceptance:
        console.print(f"{one.domain:>8}: acceptance length {one.tau:.2f} on {one.prompts} held-out prompts")
    console.print(f"The drafter is in {folder}; use it with --draft {folder}")


def _figure(value: float | None, digits: int) -> str:
    """A number, or a dash where a step has none: without a full block there is no acceptance length."""
    return "-" if value is None else f"{value:.{digits}f}"


def _beginning(model: Any, config: DSparkConfig, recipe: Recipe) -> str:
    """What a fresh drafter begins as, in words: ``--initialise target`` cannot be done with every target."""
    import torch

    from dspark_fast.draft import DSparkDraft
    from dspark_fast.training.initialise import fits_target

    if recipe.initialise == "random":
        return "random weights"
    with torch.device("meta"):  # shapes alone
        shell = DSparkDraft(config)
    if fits_target(shell, model):
        return "the target's last layers"
    return "random weights, since the target's last layers have other parts or shapes than the drafter's"


def _command(processes: int) -> str:
    """The command line that started this, with torchrun's own part."""
    words = ["dspark-fast", *sys.argv[1:]]
    if processes > 1:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        nodes = ["--nnodes", str(processes // each)] if processes > each else []
        words = ["torchrun", *nodes, "--nproc-per-node", str(each), "--no-python", *words]
    return shlex.join(words)


def _trained_on(machine: dict[str, Any], processes: int) -> str:
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    each = f"{processes} processes of {threads}" if processes > 1 else threads
    return (
        f"Trained on: {machine['device']}, {each}; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, dspark-fast {machine['dspark_fast']}.\nThe target in bf16; the drafter's weights "
        "in fp32, its products in bf16."
    )


def _progress(console: Any) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )
