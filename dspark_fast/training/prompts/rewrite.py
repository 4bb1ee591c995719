"""Passages to summarise, rewrite, translate or correct."""

from __future__ import annotations

import random
import re

from dspark_fast.training.prompts.draft import Draft, draw_follow_ups
from dspark_fast.training.prompts.grammar import fill, load_parts

_PARTS = load_parts("shared", "rewrite")


def draw_rewrite(rng: random.Random) -> Draft:
    """A passage and what to do with it: before it, after it or on the same line."""
    passage = _passage(rng)
    sentences = re.split(r"(?<=[.?!]) ", passage)
    if len(sentences) > 3 and rng.random() < 0.25:  # short passages as well
        passage = " ".join(sentences[: rng.randint(2, 3)])
    elif rng.random() < 0.1:
        passage += "\n\n" + _passage(rng)
    if rng.random() < 0.25:
        form, passage = rng.choice(_PARTS["fix_form"]), _with_mistakes(rng, passage)
    else:
        form = fill(rng, _PARTS, "rewrite_form")
    layout = rng.random()
    if layout < 0.7:
        text = f"{form}\n\n{passage}"
    elif layout < 0.85:
        text = f"{passage}\n\n{form.rstrip(':')}{'.' if form.endswith(':') else ''}"
    else:
        text = f'{form} "{passage}"'
    return Draft(text, None, draw_follow_ups(rng, _PARTS["follow_up"], 0.06))


def _passage(rng: random.Random) -> str:
    """A news item, a message, a review or a note about drawn people, places and numbers."""
    name, name2, other = rng.sample(_PARTS["name"], 3)
    day, day2 = rng.sample(_PARTS["weekday"], 2)
    return rng.choice(_PARTS["passage"]).format(
        town=rng.choice(_PARTS["town"]),
        name=name,
        name2=name2,
        other=other,
        day=day,
        day2=day2,
        last=rng.choice(_PARTS["last_name"]),
        place=rng.choice(_PARTS["venue"]),
        event=rng.choice(_PARTS["event"]),
        habit=rng.choice(_PARTS["habit"]),
        thing=rng.choice(_PARTS["object"]),
        goods=rng.choice(_PARTS["goods"]),
        n=rng.randint(2, 9),
        m=rng.randint(2, 8),
        k=rng.choice((40, 75, 120, 250, 300, 480, 900)),
        t=rng.randint(11, 45),
        h=rng.randint(2, 11),
    )


def _with_mistakes(rng: random.Random, text: str) -> str:
    """The text with a handful of typical slips."""
    present = [slip for slip in _PARTS["slip"] if slip[0] in text]
    for right, wrong in rng.sample(present, min(len(present), rng.randint(3, 5))):
        text = text.replace(right, wrong, 1)
    return text.lower() if rng.random() < 0.2 else text
