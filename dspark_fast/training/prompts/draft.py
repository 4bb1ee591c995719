"""A request before it becomes a prompt, and the random touches that several domains share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Draft:
    """The user's request, a system message if there is one, and turns to ask after the answers."""

    text: str
    system: str | None = None
    follow_ups: tuple[str, ...] = ()


def weighted(rng: random.Random, weights: dict[T, int]) -> T:
    """A random key; the values are the weights."""
    return rng.choices(list(weights), list(weights.values()))[0]


def draw_follow_ups(rng: random.Random, pool: Sequence[str], share: float) -> tuple[str, ...]:
    """One or two turns from the pool for that share of the requests, none for the others."""
    if rng.random() >= share:
        return ()
    return tuple(rng.sample(pool, 2 if rng.random() < 0.25 else 1))


def casual(rng: random.Random, text: str) -> str:
    """Now and then, type the request the way people type in a hurry."""
    roll = rng.random()
    if roll < 0.04:
        return text[:1].lower() + text[1:].rstrip(".?")
    if roll < 0.06:
        return text.lower()
    if roll < 0.08:
        return text.rstrip(".") + (" Thanks!" if text.endswith(("?", "!")) else ". Thanks!")
    return text
