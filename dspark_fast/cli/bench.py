"""``dspark-fast bench``: ours and transformers' own ways to decode, side by side in one run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import Session, Settings, note, plain_errors, quiet
from dspark_fast.writing import unwritable, write_whole

if TYPE_CHECKING:
    from dspark_fast.benchmark import Pair

_WHAT = "What is decoded"
_WHO = "Providers"
#: Half of the layers would be the usual choice; with a quarter a model that is not trained for it loses least.
_SHARE_OF_LAYERS = 4


@app.command("bench")
def bench(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help='JSON lines with "turns" in place of the shipped sets.', rich_help_panel=_WHAT
        ),
    ] = None,
    per_set: Annotated[
        int, typer.Option(metavar="N", min=1, help="At batch 1, prompts of each set.", rich_help_panel=_WHAT)
    ] = 2,
    batch: Annotated[
        str, typer.Option(metavar="N,N", help="Rows of a call: 1, or 1,4,8.", rich_help_panel=_WHAT)
    ] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Lengthen every prompt to so many tokens, by the others' text before it. Left out: as they are.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    max_new_tokens: o.MaxNewTokens = 48,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timed calls of each provider and prompt.")] = 3,
    providers: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Run these alone.", rich_help_panel=_WHO)
    ] = None,
    also: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run one more: no-cache.", rich_help_panel=_WHO)
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Leave these out; static and compiled take minutes to compile where a model is large.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A smaller model of the same tokenizer, which drafts for transformers' assisted generation and for "
            "our autoregressive drafting. Left out: the target's own first layers.",
            rich_help_panel=_WHO,
        ),
    ] = None,
    assistant_layers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many first layers.", show_default="a quarter", rich_help_panel=_WHO),
    ] = None,
    assistant_drafts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that it drafts per round.", rich_help_panel=_WHO)
    ] = 3,
    lookup_drafts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that prompt lookup copies.", rich_help_panel=_WHO)
    ] = 5,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of torch, on a CPU.")] = None,
    temperature: o.Temperature = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON to this file too.")] = None,
) -> None:
    """Time ours beside transformers' own ways to decode, in alternation.

    Decoding is greedy, to a fixed length. Before anything is timed, the fp32
    tokens of every provider are compared with those of transformers' generate;
    if one of ours differs, nothing is reported. Speedups are of the tokens after
    the first, over generate in the same repeat.

    \b
    Providers:
      generate        transformers, a step per token
      static          transformers with a static cache, compiled
      assisted        transformers' assisted generation
      lookup          transformers' prompt lookup
      notebook        the loop that DSpark is explained with
      no-cache        the same without the target's cache (only with --also)
      ours            dspark_fast.generate without options
      always          without the off-switch
      compiled        with compile_target
      no-drafter      ours without a drafter
      unpacked        bf16 weights as they lie (on a CPU)
      no-graph        without CUDA graphs (on a GPU)
      reference       on the PyTorch ops (on a GPU)
      autoregressive  a smaller model drafts for ours, token by token
    """
    if temperature > 0:
        raise typer.BadParameter(
            f"{temperature:g}: providers draw other tokens there, of which only the law is the same, so their times "
            "would not be of the same text; accepted is 0 (generate --compare takes a temperature)",
            param_hint="'--temperature'",
        )
    missing = [str(path) for path in prompts or [] if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"no such file: {', '.join(missing)}", param_hint="'--prompts'")
    if out is not None and (why := unwritable(out)):  # before minutes of work, not after
        raise typer.BadParameter(f"{out} cannot be written: {why}", param_hint="'--out'")
    batches, contexts = _numbers(batch, "--batch"), _numbers(context, "--context")
    begun = time.perf_counter()
    quiet()  # before transformers is imported
    with plain_errors():
        import torch

        from dspark_fast import benchmark
        from dspark_fast.pairs import best_dtype, chosen_device

        if threads is not None:
            torch.set_num_threads(threads)
        exact = dtype.value == "fp32" or (dtype.value == "auto" and best_dtype(chosen_device(device)) == torch.float32)
        shown = Settings(
            model=model,
            draft=draft,
            dtype="fp32",
            device=device,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=None,
            verification=None,
            confidence_threshold=0.0,
            use_markov=True,
        )
        settings = benchmark.Settings(
            model=model,
            prompts=tuple(prompts or ()),
            per_set=per_set,
            batches=tuple(batches or (1,)),
            contexts=tuple(contexts or (None,)),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            providers=_names(providers),
            also=_names(also),
            without=_names(without),
        )

        def load(in_fp32: bool) -> tuple[Pair, Any]:
            session = Session(replace(shown, dtype="fp32" if in_fp32 else dtype.value))
            return _pair(session, assistant, assistant_layers, assistant_drafts, lookup_drafts), session.tokenizer

        phases: list[str] = []
        with Console(stderr=True).status("loading") as status:  # shown on a terminal only

            def progress(what: str) -> None:
                status.update(what)
                if (phase := what.split()[0].rstrip(",")) not in phases[-1:]:
                    phases.append(phase)
                    note(f"{phase.capitalize()}, {time.perf_counter() - begun:.0f} s after the start")

            try:
                report = benchmark.run(settings, load, exact_only=exact, progress=progress)
            except benchmark.Unequal as error:
                note(f"Error: {error}")
                raise typer.Exit(1) from None
        line = json.dumps(report, indent=1)
        if out is not None:
            write_whole(out, line + "\n")
    if as_json:
        print(json.dumps(report))
    else:
        benchmark.print_report(Console(highlight=False, width=benchmark.WIDTH), report)


def _pair(session: Session, assistant: str | None, layers: int | None, drafts: int, lookup: int) -> Pair:
    """The session's models and a smaller one beside them, which by default shares the target's weights.

    Raises:
        ValueError: for an assistant that was asked for and does not fit.
    """
    from dspark_fast.autoregressive import AutoregressiveDrafter, first_layers
    from dspark_fast.benchmark import Pair
    from dspark_fast.targets import load_target

    model, small, why = session.model, None, ""
    if assistant is not None:
        if layers is not None:
            raise ValueError("assistant and assistant_layers are both given: accepted is one of them")
        small, name = load_target(assistant, model.dtype, model.device)[0], assistant
        AutoregressiveDrafter(small, block_size=drafts).check(model)
    else:
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        count = layers if layers is not None else max(depth // _SHARE_OF_LAYERS, 1)
        name = f"the target's first {count} of {depth} layers"
        try:
            small = first_layers(model, count)
            AutoregressiveDrafter(small, block_size=drafts).check(model)
        except ValueError as error:
            if layers is not None:
                raise
            small, why = None, f"no smaller model is at hand: {error}"
    return Pair(model, session.draft, session.draft_name, small, name, drafts, lookup, why)


def _numbers(text: str | None, option: str) -> list[int]:
    """1,4,8 as numbers; none for no text."""
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: accepted are numbers of 1 or more, as 1,4,8", param_hint=f"'{option}'")
    return list(dict.fromkeys(int(part) for part in parts))


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(part.strip() for part in text.split(","))
