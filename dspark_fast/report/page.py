"""The report as one HTML page: no script, nothing fetched, figures inside."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from functools import reduce
from html import escape
from importlib import resources
from operator import or_
from pathlib import Path
from typing import Any

from dspark_fast.report.domains import Domains
from dspark_fast.report.measurement import Measurement, Strip, Table, counted, number
from dspark_fast.report.memory import MB, Memory
from dspark_fast.report.speed import Speed
from dspark_fast.report.stylesheet import STYLESHEET
from dspark_fast.report.subject import Equality


def page(
    report: dict[str, Any], found: Mapping[str, Measurement], pictures: Mapping[str, bytes], again: Mapping[str, Any]
) -> str:
    """Lay everything out.

    Args:
        report: as :class:`~dspark_fast.report.store.Store` keeps it.
        found: measurements by name, in the order of the page.
        pictures: PNG of each.
        again: settings by name, as they were given: what makes the same page, see :func:`command`.
    """
    name = report["pair"]["model"]
    body = [
        f"<header><p class=kicker>dspark-fast report</p><h1>{escape(headline(report, found))}</h1>",
        f"<p class=facts>{escape(_facts(report))}</p>{_tiles(found)}</header>",
        "<nav>",
        *(f'<a href="#{key}">{escape(one.title)}</a>' for key, one in found.items()),
        "</nav><main>",
        *(_section(one, pictures[key]) for key, one in found.items()),
        *(_omitted(key, why) for key, why in report["omitted"].items()),
        f"</main>{_footer(report, found, again)}",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(name)} with DSpark</title><style>{STYLESHEET}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def headline(report: dict[str, Any], found: Mapping[str, Measurement]) -> str:
    """The measured figures in one sentence."""
    name = report["pair"]["model"].rstrip("/").rpartition("/")[2]
    speed, domains = found.get(Speed.name), found.get(Domains.name)
    said = f"{name} with its DSpark drafter"
    parts = []
    if isinstance(speed, Speed) and not speed.disturbed:
        ours = speed.speedup("dspark")
        word = (
            "times as fast as transformers' generate" if ours.median >= 1 else "of the speed of transformers' generate"
        )
        parts.append(f"decodes {ours.median:.2f} {word}")
    if isinstance(domains, Domains):
        parts.append(f"commits {number(domains.ways['dspark'].mean_tau)} tokens a round")
    if not parts:
        return f"{said}: what was measured"
    equality = _equality(found)
    exact = getattr(domains, "exact", Equality())
    same = ", with the same tokens" if equality.answers and equality.identical == equality.answers else ""
    if not same and exact.answers:  # had they differed there, nothing would have been reported
        same = ", with the same tokens in fp32"
    return f"{said} {' and '.join(parts)}{same}"


def _facts(report: dict[str, Any]) -> str:
    machine = next((one["machine"] for one in report["measurements"].values()), None)
    prompts, settings = report.get("prompts", {}), report["settings"]
    said = ", ".join(f"{count} of {domain}" for domain, count in prompts.items())
    parts = [
        f"greedy, batch 1, {report['pair'].get('dtype', settings['dtype'])}",
        f"prompts: {said}; up to {settings['max_new_tokens']} new tokens" if prompts else "",
    ]
    if machine is not None:
        versions = (f"{name.replace('_', '-')} {machine[name]}" for name in ("torch", "transformers", "dspark_fast"))
        parts += [f"{machine['device']}, {counted(machine['threads'], 'thread')}", ", ".join(versions)]
    return " · ".join(part for part in parts if part)


def _tiles(found: Mapping[str, Measurement]) -> str:
    tiles = []
    speed, domains, memory = (found.get(kind.name) for kind in (Speed, Domains, Memory))
    if isinstance(speed, Speed) and not speed.disturbed:
        ours = speed.speedup("dspark")
        tiles.append((f"{ours.median:.2f}x", f"decoding speed ({ours.least:.2f} to {ours.most:.2f})"))
    if isinstance(domains, Domains):
        evaluation = domains.ways["dspark"]
        tiles.append((number(evaluation.mean_tau), f"tokens a round, of {evaluation.block_size + 1} at most"))
    if isinstance(memory, Memory):
        tiles.append(_memory_tile(memory))
    equality, exact = _equality(found), getattr(domains, "exact", Equality())
    if equality.answers:
        ties = equality.answers - equality.identical
        said = f"{equality.identical:,} of {equality.answers:,}"
        if ties and exact.answers:
            said = f"in fp32; in 16 bits {said}, the rest part at near-ties"
            tiles.append((f"{exact.identical} / {exact.answers}", f"answers token for token the same {said}"))
        else:
            rest = "the rest part at near-ties" if ties else "none differs"
            tiles.append((said.replace(" of ", " / "), f"answers token for token the same; {rest}"))
    cells = "".join(f"<div><b>{escape(figure)}</b><span>{escape(what)}</span></div>" for figure, what in tiles)
    return f"<div class=tiles>{cells}</div>" if cells else ""


def _memory_tile(memory: Memory) -> tuple[str, str]:
    """What the peak grows by over plain decoding, and what is kept in memory for it."""
    by = {one.way: one for one in memory.peaks}
    ours = by["dspark"]
    kept = [f"{ours.packed / MB:,.0f} MB packed weights"] if ours.packed else []
    kept.append(f"{(ours.drafter + ours.drafter_cache) / MB:,.0f} MB drafter and cache")
    return f"{(ours.peak - by['plain'].peak) / MB:+,.0f} MB", f"at the peak of memory; kept: {', '.join(kept)}"


def _equality(found: Mapping[str, Measurement]) -> Equality:
    return reduce(or_, (one.equality for one in found.values() if hasattr(one, "equality")), Equality())


def _section(one: Measurement, picture: bytes) -> str:
    data, sentences = base64.b64encode(picture).decode(), one.sentences()
    said = escape(f"{one.title}. {sentences[0]}")
    return "\n".join(
        [
            f'<section id="{one.name}"><h2>{escape(one.title)}</h2>',
            *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
            f"<p class=facts>{escape(one.equality.sentence())}</p>" if hasattr(one, "equality") else "",
            f'<figure><img alt="{said}" src="data:image/png;base64,{data}"></figure>',
            _strips(one),
            *map(_table, one.tables()),
            "</section>",
        ]
    )


def _strips(one: Measurement) -> str:
    strips = one.strips()
    if not strips:
        return ""
    question = getattr(one, "question", "")
    asked = f"<p>One block, asked <q>{escape(question)}</q></p>" if question else ""
    key = (
        "<p class=key><span class='tok anchor'>anchor</span><span class='tok ok'>accepted</span>"
        "<span class='tok no'>not accepted</span><span class='tok own'>the target's own</span></p>"
    )
    return asked + "".join(map(_strip, strips)) + key


def _strip(one: Strip) -> str:
    def token(text: str, kind: str) -> str:
        visible = text.replace("\n", "\\n").replace("\t", "\\t")
        return f"<span class='tok {kind}'>{escape(visible)}</span>"

    shown = [token(one.anchor, "anchor")]
    shown += [token(text, "ok" if place < one.accepted else "no") for place, text in enumerate(one.drafts)]
    if one.following is not None:
        shown.append(token(one.following, "own"))
    label = f"{one.label}: {one.accepted} of {len(one.drafts)} accepted"
    return f"<div class=strip><span class=label>{escape(label)}</span><div class=tokens>{''.join(shown)}</div></div>"


def _table(one: Table) -> str:
    head = "".join(f"<th scope=col>{escape(column)}</th>" for column in one.columns)
    rows = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in one.rows
    )
    # Not a <caption>: on a phone it would scroll away with the table's right half.
    caption = f"<p class=caption>{escape(one.caption)}</p>" if one.caption else ""
    return f"{caption}<div class=table><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _omitted(name: str, why: str) -> str:
    return f'<section id="{name}"><h2>{escape(name.capitalize())}</h2><p>Left out: {escape(why)}.</p></section>'


def _footer(report: dict[str, Any], found: Mapping[str, Measurement], again: Mapping[str, Any]) -> str:
    machines = [one["machine"] for one in report["measurements"].values()]
    rows = [(name.replace("_", " "), str(value)) for name, value in report["pair"].items()]
    rows += [(name, str(value)) for name, value in (machines[0] if machines else {}).items() if value is not None]
    rows += [(f"seconds for {name}", f"{one['seconds']:.0f}") for name, one in report["measurements"].items()]
    ties = _equality(found).near_ties
    said = ""
    if ties:
        items = "".join(f"<li>{escape(tie)}</li>" for tie in ties)
        said = f"<details><summary>{counted(len(ties), 'near-tie')}</summary><ol>{items}</ol></details>"
    return (
        "<footer><h2>How it was measured</h2><p>Every answer whose acceptance or speed stands on this page was decoded "
        "greedily and held against transformers' own generate, token by token; a difference that rounding does not "
        "explain would have ended the report. tau and acceptance are counted by the authors' definitions: pooled over "
        "rounds, bonus included, "
        f"prefill apart.</p>{said}{_table(Table(('', ''), tuple(rows), 'pair, machine and versions'))}"
        f"<p>The same again, or with <code>--only</code> one figure ({', '.join(found)}):</p>"
        f"<pre>{escape(command(again))}</pre></footer>"
    )


def command(settings: Mapping[str, Any]) -> str:
    """The command line of a report with these settings.

    Args:
        settings: of :meth:`~dspark_fast.report.making.ReportSettings.to_dict`. Paths stand in it as they were given,
            but for those into this package, which say nothing of the machine: ``dspark_fast/prompts/maths.jsonl``.
    """
    words = ["dspark-fast", "report"]
    for name, value in settings.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", _of_the_package(str(value))]
    return shlex.join(words)


def _of_the_package(value: str) -> str:
    """A path to what ships with the package, as it is from a checkout; anything else as it is."""
    path = Path(value).expanduser()
    inside = Path(str(resources.files("dspark_fast"))).resolve()
    if path.is_absolute() and path.resolve().is_relative_to(inside):
        return str(path.resolve().relative_to(inside.parent))
    return value
