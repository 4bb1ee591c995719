"""``dspark-fast eval``: acceptance length by domain and block position on prompts that no drafter is trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import Session, Settings, plain_errors

if TYPE_CHECKING:
    from dspark_fast.compare import Comparison
    from dspark_fast.training.evaluate import Acceptance, HeldOut


@app.command("eval")
def evaluate(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    per_domain: Annotated[int, typer.Option(metavar="N", min=1, help="Built-in prompts of each domain.")] = 16,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Your own prompts in place of ours, all of them: JSONL with prompt, messages, turns or question, and "
            "a domain if you like; may be repeated.",
        ),
    ] = None,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts decoded together.")] = 8,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time one prompt with and without the drafter, and predict the speedups.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object to this file too.")] = None,
) -> None:
    """Measure the acceptance length tau of a drafter, by domain and block position.

    The prompts are the package's own that are kept from every training run (2 % of them, chosen by a hash of their
    text), first turns only. A slot's figure is the share of its drafts that were accepted, given that those before it
    were. The row mean is the plain mean of tau over math, code, chat, list and short; all is pooled over all rounds.
    """
    missing = [str(path) for path in prompts or [] if not path.is_file()]
    if missing:
        raise typer.BadParameter(f"no such file: {', '.join(missing)}", param_hint="'--prompts'")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):  # before minutes of work, not after
        raise typer.BadParameter(f"{out} cannot be written: it is a folder, or in none", param_hint="'--out'")
    settings = Settings(
        model=model,
        draft=draft,
        dtype=dtype.value,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        verification=None,
        confidence_threshold=0.0,
        use_markov=True,
    )
    with plain_errors():
        session = Session(settings)
        report, results = _measure(session, prompts or [], per_domain, batch_size, speed)
        line = json.dumps(report)
        if out is not None:
            out.write_text(line + "\n", encoding="utf-8")
    if as_json:
        print(line)
    else:
        _show(results, report)


def _measure(
    session: Session, files: list[Path], per_domain: int, batch_size: int, speed: bool
) -> tuple[dict[str, Any], list[Acceptance]]:
    from dspark_fast.machine import describe
    from dspark_fast.training.evaluate import held_out_prompts, mean_tau, measure_acceptance, with_mean

    settings = session.settings
    if not session.has_template:
        raise ValueError(f"{settings.model} has no chat template, which the prompts need")
    with Console(stderr=True).status("choosing prompts") as status:  # shown on a terminal only
        prompts = held_out_prompts(session.tokenizer, per_domain, prompt_files=files)
        _check_room(session, prompts)
        results = measure_acceptance(
            session.model,
            session.draft,
            prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            batch_size=batch_size,
            on_progress=lambda done: status.update(f"measuring: {done} of {len(prompts)} prompts"),
        )
        rows = with_mean(results)
        timed = _time(session, prompts, results, lambda what: status.update(f"timing: {what}")) if speed else None
    mean = mean_tau(results)
    report = {
        "model": settings.model,
        "draft": session.draft_name,
        "dtype": session.dtype,
        "prompts": [str(path) for path in files] or f"built-in, {per_domain} per domain",
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "batch_size": batch_size,
        "mean_tau": None if math.isnan(mean) else mean,
        "tau": results[-1].to_dict()["tau"],
        "rows": [{**one.to_dict(), "predicted_speedup": _predicted(one.tau, timed)} for one in rows],
        "speed": timed,
        "machine": describe(str(session.model.device)),
    }
    return report, rows


def _check_room(session: Session, prompts: list[HeldOut]) -> None:
    """No answer is cut by the end of the context.

    Raises:
        ValueError: naming the longest prompt's length, and the context's.
    """
    context = getattr(session.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest, wanted = max(len(prompt.input_ids) for prompt in prompts), session.settings.max_new_tokens
    if context is not None and longest + wanted > context:
        raise ValueError(
            f"the longest prompt has {longest} tokens, which with {wanted} new ones is more than the context of "
            f"{session.settings.model}, {context}"
        )


def _time(session: Session, prompts: list[HeldOut], results: list[Acceptance], progress: Any) -> dict[str, Any]:
    """Seconds per round and per plain step, of one prompt at batch 1, both decodings in turn.

    The prompt is the first of the domain with the longest answers, so that there are rounds to time. At a temperature
    both decodings are coupled, as ``generate --compare`` has them.
    """
    import torch

    from dspark_fast.compare import compare

    longest = max(results[:-1], key=lambda one: one.tau * one.rounds / one.prompts if one.rounds else 0.0)
    prompt = next(one for one in prompts if one.domain == longest.domain)
    found: Comparison = compare(
        session.model,
        session.draft,
        torch.tensor([prompt.input_ids], device=session.model.device),
        tokenizer=session.tokenizer,
        max_new_tokens=session.settings.max_new_tokens,
        temperature=session.settings.temperature,
        seed=session.settings.seed,
        progress=progress,
    )
    parts = ("mode", "baseline", "prompt_tokens", "seconds_per_round", "seconds_per_plain_step", "acceptance_length")
    parts += ("speedup", "speedup_least", "speedup_most", "identical")
    whole = found.to_dict()
    return {"domain": prompt.domain, "tokens": len(found.tokens), **{part: whole[part] for part in parts}}


def _predicted(tau: float, timed: dict[str, Any] | None) -> float | None:
    """``tau * T_plain / (T_draft + T_verify + T_bookkeeping)``; None without times, or rounds."""
    if timed is None or not timed["seconds_per_plain_step"] or not timed["seconds_per_round"] or math.isnan(tau):
        return None
    return tau * timed["seconds_per_plain_step"] / sum(timed["seconds_per_round"].values())


def _show(rows: list[Acceptance], report: dict[str, Any]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    slots = max(len(one.by_position) for one in rows)
    timed = report["speed"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("domain")
    names = ["prompts", "tau", *(f"slot {slot + 1}" for slot in range(slots)), *(["predicted"] if timed else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for index, (one, row) in enumerate(zip(rows, report["rows"], strict=True)):
        if index and one.domain in ("mean", "all") and rows[index - 1].domain not in ("mean", "all"):
            table.add_section()
        cells = [f"{share:.2f}" if not math.isnan(share) else "-" for share in one.by_position]
        cells += [""] * (slots - len(cells))
        if timed:
            cells.append("-" if row["predicted_speedup"] is None else f"{row['predicted_speedup']:.2f}x")
        tau = "-" if math.isnan(one.tau) else f"{one.tau:.2f}"
        summary = one.domain in ("mean", "all")
        table.add_row(one.domain, str(one.prompts), tau, *cells, style="bold" if summary else None)
    out.print(table)
    mode = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    machine = report["machine"]
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    out.print(
        f"{mode} | up to {report['max_new_tokens']} new tokens | {report['dtype']} | {machine['device']}, {threads} | "
        f"torch {machine['torch']}, transformers {machine['transformers']}",
        style="dim",
        markup=False,
    )
    if timed and timed["seconds_per_plain_step"] and timed["seconds_per_round"]:
        draft, verify, rest = (1000 * timed["seconds_per_round"][part] for part in ("draft", "verify", "bookkeeping"))
        out.print(
            f"predicted: tau x {1000 * timed['seconds_per_plain_step']:.2f} ms / (draft {draft:.2f} + verify "
            f"{verify:.2f} + rest {rest:.2f} ms), from one {timed['domain']} prompt at batch 1, whose own measured "
            f"speedup is {timed['speedup']:.2f}x at tau {timed['acceptance_length']:.2f}",
            markup=False,
        )
    elif timed:
        out.print("predicted: nothing, the answer that was timed has one token only")
