"""``dspark-fast generate``: one prompt, streamed; with figures, as JSON, or against transformers' own decoding."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import Answer, Session, Settings, TextStream, note, plain_errors, write

if TYPE_CHECKING:
    import torch

    from dspark_fast.compare import Comparison


@app.command()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What to say to the model; - or nothing reads it from standard input."),
    ] = None,
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    verification: o.Verify = None,
    confidence_threshold: o.Confidence = 0.0,
    no_markov: o.NoMarkov = False,
    no_draft: o.NoDraft = False,
    threads: o.Threads = None,
    pack_weights: o.PackWeights = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Give the model the prompt as it is.")
    ] = False,
    system: o.System = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode again, with and without the drafter and by transformers.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="With --compare: how many times each.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer one prompt, several tokens per forward pass.

    Prints the text as it is decoded, then one line of figures. --compare adds
    how it compares with transformers' own decoding: whether the tokens are the
    same, how much sooner they came, and how much of that without any drafts.
    """
    o.check_no_draft(no_draft, draft, no_markov, confidence_threshold)
    if system is not None and no_chat_template:
        raise typer.BadParameter("a system message needs the chat template.", param_hint="'--system'")
    text = _prompt(prompt)
    settings = Settings(
        model=model,
        draft=draft,
        dtype=dtype.value,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        verification=verification.value if verification is not None else None,
        confidence_threshold=confidence_threshold,
        use_markov=not no_markov,
        system=system,
        use_draft=not no_draft,
        threads=threads,
        pack_weights=pack_weights,
    )
    if compare and temperature > 0:
        if verification is o.Verification.rejection:
            raise typer.BadParameter(
                "--compare looks for the same tokens, which only coupled verification promises",
                param_hint="'--verification'",
            )
        if verification is None:
            note("--compare at a temperature uses --verification coupled: only then can tokens be compared")
        settings = replace(settings, verification="coupled")
    with plain_errors():
        session = Session(settings)
        input_ids = _encode(session, text, no_chat_template)
        stream = None if as_json else TextStream(session.tokenizer, write)
        try:
            answer = session.answer(input_ids, stream)
        except KeyboardInterrupt:
            if stream is not None:
                write("\n")
            raise
        out = Console(highlight=False, soft_wrap=True)
        if not as_json:
            write("" if answer.text.endswith("\n") else "\n")
            figures = session.figures(answer.stats)
            if compare:
                figures += " | first run, cold" + ("; below, ours drafts throughout" if answer.stats.pauses else "")
            out.print(figures, style="dim", markup=False)
        comparison = _compare(session, input_ids, repeats) if compare else None
    if as_json:
        print(json.dumps(_report(session, answer, comparison)))
    elif comparison is not None:
        _show(out, comparison, drafted=not no_draft)


def _prompt(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("missing; give it as an argument or on standard input.", param_hint="'PROMPT'")
    text = sys.stdin.read() if argument in (None, "-") else argument
    if not text.strip():
        raise typer.BadParameter("it is empty.", param_hint="'PROMPT'")
    return text


def _encode(session: Session, text: str, no_chat_template: bool) -> torch.Tensor:
    if no_chat_template:
        return session.plain(text)
    system = session.settings.system
    if not session.has_template:
        if system is not None:
            raise ValueError(f"{session.settings.model} has no chat template, which a system message needs")
        note(f"{session.settings.model} has no chat template: it gets the prompt as it is")
        return session.plain(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return session.conversation([*messages, {"role": "user", "content": text.strip()}])


def _compare(session: Session, input_ids: torch.Tensor, repeats: int) -> Comparison:
    from dspark_fast.compare import compare

    settings = session.settings
    ways = "ours, ours without a drafter, and" if settings.use_draft else "ours without a drafter and"
    runs = "1 run" if repeats == 1 else f"{repeats} runs"
    note(f"Comparing: {runs} each of {ways} transformers' generate, after one to warm up")
    with Console(stderr=True).status("comparing") as status:  # shown on a terminal only
        return compare(
            session.model,
            session.draft,
            input_ids,
            tokenizer=session.tokenizer,
            max_new_tokens=session.room(input_ids),
            temperature=settings.temperature,
            seed=settings.seed,
            repeats=repeats,
            undrafted=True,
            pack_weights=settings.pack_weights,
            progress=lambda what: status.update(f"comparing: {what}"),
            **settings.cuts(),
            **settings.drafting(),
        )


def _show(out: Console, found: Comparison, drafted: bool) -> None:
    out.print()
    out.print(_table(found, drafted))
    out.print()
    _show_speedup(out, found)
    _show_tokens(out, found)


def _table(found: Comparison, drafted: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("tokens/s", justify="right")
    table.add_column("ms per token", justify="right")
    table.add_column("speedup", justify="right")
    transformers = "transformers" if found.mode == "greedy" else "transformers, Gumbel-max"
    plainly = "dspark-fast, no drafter"
    rows = [("dspark-fast" if drafted else plainly, found.tokens_per_second, found.speedup)]
    if found.undrafted_identical is not None:
        rows.append((plainly, found.undrafted_tokens_per_second, found.undrafted_speedup))
    for name, speed, speedup in (*rows, (transformers, found.baseline_tokens_per_second, None)):
        times = ("-", "-") if speed is None else (f"{speed:.1f}", f"{1000 / speed:.2f}")
        table.add_row(name, *times, "" if speedup is None else f"{speedup:.2f}x")
    return table


def _show_speedup(out: Console, found: Comparison) -> None:
    if found.speedup is None or found.speedup_least is None or found.speedup_most is None:
        out.print("speedup: none to measure, there is one token only")
    else:
        runs = "1 pair of runs" if len(found.pairs) == 1 else f"{len(found.pairs)} pairs of runs"
        out.print(
            f"[bold]speedup {found.speedup:.2f}x[/bold] (median of {runs}, {found.speedup_least:.2f}x to "
            f"{found.speedup_most:.2f}x); with the prefill {found.call_speedup:.2f}x"
        )
        if found.speedup_most > 1.5 * found.speedup_least:
            out.print("the runs differ a lot, so something else is using this machine: do not trust this speedup")
    if found.predicted_speedup is not None:
        names = {"bookkeeping": "rest", "graph": "one graph"}
        parts = (f"{names.get(part, part)} {1000 * time:.2f}" for part, time in found.seconds_per_round.items())
        out.print(
            f"predicted {found.predicted_speedup:.2f}x = {found.acceptance_length:.2f} tokens per round x "
            f"{1000 * (found.seconds_per_plain_step or 0):.2f} ms / ({' + '.join(parts)} ms)"
        )


def _show_tokens(out: Console, found: Comparison) -> None:
    count, alone = len(found.baseline_tokens), found.undrafted_first_difference
    same = f"the same {count} token{'' if count == 1 else 's'}"
    if found.first_difference is not None:
        out.print(f"not the same tokens: {found.first_difference.sentence()}", style="yellow", markup=False)
    elif alone is not None or found.undrafted_identical is None:
        out.print(f"[green]{same}[/green]")
    else:
        out.print(f"[green]{same}, with the drafter and without[/green]")
    if alone is not None:
        why = "a near-tie" if alone.near_tie else "a difference that rounding does not explain"
        start = f"the first {alone.index} are, then there is {why}"
        out.print(f"without the drafter not the same tokens: {start}", style="yellow", markup=False)
    elif found.first_difference is not None and found.undrafted_identical:
        out.print(f"[green]without the drafter {same}[/green]")


def _report(session: Session, answer: Answer, comparison: Comparison | None) -> dict[str, Any]:
    import torch
    import transformers

    from dspark_fast import __version__

    stats = answer.stats
    drafted = stats.rounds and session.settings.use_draft
    compared = comparison.to_dict() if comparison is not None else {}
    return {
        "text": answer.text,
        "tokens": answer.tokens,
        "acceptance_length": stats.acceptance_length if drafted else None,
        "tokens_per_second": compared.get("tokens_per_second", stats.tokens_per_second if stats.rounds else None),
        "baseline_tokens_per_second": compared.get("baseline_tokens_per_second"),
        "speedup": compared.get("speedup"),
        "identical": compared.get("identical"),
        "first_difference": compared.get("first_difference"),
        "predicted_speedup": compared.get("predicted_speedup"),
        "rounds": stats.rounds,
        "mode": stats.mode,
        "seed": session.settings.seed if session.settings.temperature > 0 else None,
        "model": session.settings.model,
        "draft": session.draft_name,
        "dtype": session.dtype,
        "device": session.device,
        "versions": {
            "dspark-fast": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "comparison": compared or None,
    }
