"""``dspark-fast report``: the notebook's measurements, each one command and one figure, and one page of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import note, plain_errors, quiet

NAMES = ("speed", "domains", "positions", "confidence", "sweep", "training", "memory")


@app.command()
def report(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    autoregressive: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A smaller model of the same tokenizer to hold DSpark against. Left out: the target's first layers.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many of the target's first layers. Left out: half.")
    ] = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where report.json, PNGs and report.html go.")] = Path(
        "report"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"One measurement ({', '.join(NAMES)}), without the page; may be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own prompts in place of ours: JSONL with turns, prompt or question."),
    ] = None,
    per_domain: Annotated[int, typer.Option(metavar="N", min=1, help="The first N prompts of each domain.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Per answer.")] = 64,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the heads' training.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is there already.")] = False,
) -> None:
    """Measure a pair as the field does, and write one page that needs no network.

    Speed against plain and autoregressive-draft decoding, acceptance by domain and block position with the Markov head
    on and off, the confidence head along a block and as a threshold, training of fresh heads, peak memory. Each that
    finishes is kept at once: the same command goes on with what is missing. All answers are held against transformers'
    own, token by token.
    """
    unknown = [name for name in only or [] if name not in NAMES]
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(map(repr, unknown))}: accepted are {', '.join(NAMES)}", param_hint="'--only'"
        )
    if prompts is not None and not prompts.is_file():
        raise typer.BadParameter(f"no such file: {prompts}", param_hint="'--prompts'")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file: accepted is a folder", param_hint="'--out'")
    if autoregressive is not None and layers is not None:
        raise typer.BadParameter("it cannot go with --autoregressive: one drafter is enough", param_hint="'--layers'")
    with plain_errors():
        quiet()
        from dspark_fast.report import NotLossless, ReportSettings, run

        settings = ReportSettings(
            model=model,
            draft=draft,
            autoregressive=autoregressive,
            layers=layers,
            dtype=dtype.value,
            device=device,
            prompts=None if prompts is None else str(prompts),
            per_domain=per_domain,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        try:
            with Console(stderr=True).status("measuring") as status:  # shown on a terminal only
                files = run(settings, out, only or (), again=again, note=note, progress=status.update)
        except NotLossless as error:
            note(f"Error: {error}")
            raise typer.Exit(1) from None
        except ImportError as error:
            note(f"Error: {error}")
            raise typer.Exit(2) from None
    for path in files:
        print(path)
