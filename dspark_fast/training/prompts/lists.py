"""Requests whose answer is a list, a table or a plan."""

from __future__ import annotations

import random

from dspark_fast.training.prompts.draft import Draft, casual, draw_follow_ups
from dspark_fast.training.prompts.grammar import fill, load_parts

_PARTS = load_parts("shared", "lists")


def draw_list(rng: random.Random) -> Draft:
    """A request for a list."""
    text = fill(rng, _PARTS, rng.choices(("list_items", "list_other"))[0])
    return Draft(casual(rng, text), None, draw_follow_ups(rng, _PARTS["follow_up"], 0.06))
