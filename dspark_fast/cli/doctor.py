"""``dspark-fast doctor``: what was loaded, agreement by block position, and the likely fault when it is off."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import note, plain_errors, quiet

if TYPE_CHECKING:
    from dspark_fast.doctor import Examination, Loaded

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@app.command("doctor")
def doctor(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    per_domain: Annotated[int, typer.Option(metavar="N", min=1, help="Built-in prompts of each domain.")] = 6,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Your own prompts in place of ours: JSONL, as eval takes; may be repeated."),
    ] = None,
    max_new_tokens: o.MaxNewTokens = 64,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Lay out the prompts with thinking on, and compare with off.")
    ] = False,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Take the prompts as they are, and compare with the template.")
    ] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Also test that sampling keeps the target's law, on tiny models.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Examine a pair, and name what is wrong with it.

    The target answers a few prompts greedily; at many places in its answers the drafter drafts a block, which is
    compared with what the target wrote. Then the drafter is run again with one connection changed at a time (taps,
    anchor, positions, mask, head, embedding): a change that raises agreement beyond chance names the fault.

    Ends with status 0 for a good pair, 1 for one with a fault, 2 for bad arguments.
    """
    missing = [str(path) for path in prompts or [] if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"no such file: {', '.join(missing)}", param_hint="'--prompts'")
    if thinking and no_chat_template:
        raise typer.BadParameter("thinking is switched on by the chat template", param_hint="'--thinking'")
    with plain_errors():
        suite = _suite() if statistics else None
        report, found, loaded = _examine(
            (model, draft, dtype.value, device), (per_domain, prompts or [], max_new_tokens), thinking, no_chat_template
        )
        if suite is not None:
            report["statistics"] = _statistics(suite, report)
    if as_json:
        print(json.dumps(report))
    else:
        _show(report, found, loaded)
    if report["fault"] is not None:
        raise typer.Exit(1)


def _examine(
    options: tuple[str, str | None, str, str | None],
    text: tuple[int, list[Path], int],
    thinking: bool,
    no_chat_template: bool,
) -> tuple[dict[str, Any], Examination | None, Loaded | None]:
    """The report, and what it was made of: nothing, for a pair that cannot be loaded."""
    quiet()
    import torch

    from dspark_fast.doctor import PairRefused, examine, load_pair
    from dspark_fast.doctor.texts import Format, conversations, knows_thinking
    from dspark_fast.machine import describe

    name, draft, dtype, device = options
    per_domain, files, max_new_tokens = text
    format = Format(template=not no_chat_template, thinking=thinking)
    messages = conversations(per_domain, files)
    with Console(stderr=True).status("loading") as status:  # shown on a terminal only

        def measured(model: Any, drafter: Any, tokenizer: Any) -> Examination:
            if thinking and not knows_thinking(tokenizer):
                raise ValueError(f"the chat template of {name} does not know enable_thinking")
            return examine(
                model,
                drafter,
                tokenizer,
                messages,
                format=format,
                max_new_tokens=max_new_tokens,
                progress=status.update,
            )

        try:
            loaded = load_pair(
                name, draft=draft, dtype=None if dtype == "auto" else getattr(torch, DTYPES[dtype]), device=device
            )
        except PairRefused as refused:
            report = {"model": name, "draft": draft, "fault": refused.fault}
            verdict = [f"The pair cannot be loaded: {refused}."]
            if refused.repaired is not None:
                pair = refused.repaired
                found = measured(pair.model, pair.draft, pair.tokenizer)
                verdict.append(
                    f"With {refused.repair}, it can, and agreement is {found.outcome.by_slot[0]:.2f} in slot 1 and "
                    f"{found.outcome.agreement:.2f} over all slots (with the features of another text "
                    f"{found.shuffled:.2f})."
                )
            return {**report, "verdict": verdict}, None, None
        found = measured(loaded.model, loaded.draft, loaded.tokenizer)
    report = {
        "model": name,
        "draft": str(loaded.folder),
        "loaded": loaded.to_dict(),
        **found.to_dict(),
        "machine": describe(str(loaded.model.device)),
    }
    return report, found, loaded


def _suite() -> Callable[..., Any]:
    """Runs the exact suite.

    Raises:
        ValueError: without scipy.
    """
    from dspark_fast.losslessness.run import run

    if importlib.util.find_spec("scipy") is None:
        raise ValueError("--statistics needs scipy: pip install 'dspark-fast[statistics]'")
    return run


def _statistics(run: Callable[..., Any], report: dict[str, Any]) -> list[dict[str, Any]]:
    """The fixed subset of the exact suite; a row that fails is a fault of this installation."""
    found = []

    def on_row(row: Any) -> None:
        found.append({name: getattr(row, name) for name in ("name", "p_value", "draws", "passed")})
        note(f"{row.name}: {'passed' if row.passed else 'FAILED'} (p = {row.p_value:.3g}, {row.draws:,} draws)")

    run(subset=True, on_row=on_row)
    failed = [row["name"] for row in found if not row["passed"]]
    if failed:
        report["fault"] = "statistics"
        report["verdict"].append(f"Sampling does not keep the target's law: {', '.join(failed)}.")
    return found


def _show(report: dict[str, Any], found: Examination | None, loaded: Loaded | None) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False)
    if loaded is not None and found is not None:
        for line in _loaded_lines(report["loaded"]):
            out.print(line, style="dim")
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("context")
        for name in ("blocks", *(f"slot {slot + 1}" for slot in range(len(report["agreement"])))):
            table.add_column(name, justify="right", no_wrap=True)
        parts = zip(("early", "middle", "late"), report["thirds"], strict=False)
        rows = [(f"{name}, {one['from']} to {one['to']}", one["blocks"], one["agreement"]) for name, one in parts]
        for name, blocks, shares in [*rows, ("all", report["blocks"], report["agreement"])]:
            table.add_row(name, str(blocks), *("-" if share is None else f"{share:.2f}" for share in shares))
        out.print(table)
        out.print(
            f"teacher-forced agreement with {report['texts']} greedy answers, prompts {report['format']}; with the "
            f"features of another text {report['agreement_shuffled']:.2f} over all slots",
            style="dim",
        )
    for sentence in report["verdict"]:
        out.print(sentence)
    if report["fault"] is not None:
        out.print(f"Likely fault: {report['fault']}.", style="bold")


def _loaded_lines(loaded: dict[str, Any]) -> list[str]:
    """What was loaded, and what it takes."""
    tensors, memory = loaded["tensors"], loaded["memory"]
    words = {
        "missing": tensors["missing"],
        "unexpected": tensors["unexpected"],
        "of another shape": tensors["misshaped"],
        "aliased from the target": tensors["aliased"],
        "stored and not the target's": tensors["differing"],
    }
    parts = [f"{what} {', '.join(names) if names else 'none'}" for what, names in words.items()]
    drafted = loaded["draft_vocabulary"]
    head = loaded["markov_head"] or "none"
    own, at_target, at_drafter = memory["drafter"] / 1e6, memory["target_token"] / 1e3, memory["drafter_token"] / 1e3
    return [
        f"tensors: {tensors['stored']} stored; {'; '.join(parts)}",
        f"drafter: {loaded['layers']} layers, block {loaded['block_size']}, taps {loaded['taps']}, mask token "
        f"{loaded['mask_token_id']}, Markov head {head}, {'' if loaded['confidence_head'] else 'no '}confidence head, "
        f"{'all tokens' if drafted is None else f'{drafted:,} tokens'}, {loaded['dtype']}",
        f"memory: target {memory['target'] / 1e6:,.1f} MB, drafter {own:,.1f} MB of its own; a token of context "
        f"{at_target + at_drafter:,.1f} kB ({at_target:,.1f} + {at_drafter:,.1f}); with {memory['capacity']:,} tokens "
        f"{memory['at_capacity'] / 1e6:,.1f} MB in all",
    ]
