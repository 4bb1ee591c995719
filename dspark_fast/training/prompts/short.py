"""Questions with short answers: facts, translations, conversions, one-word labels."""

from __future__ import annotations

import random

from dspark_fast.training.prompts.draft import Draft, casual, weighted
from dspark_fast.training.prompts.grammar import fill, load_parts

_PARTS = load_parts("shared", "short")
_KINDS = {
    "short_country": 14, "short_translate": 18, "short_word": 14, "short_yesno": 7, "short_fact": 10,
    "short_one": 24, "numbers": 15, "label": 5,
}  # fmt: skip


def draw_short(rng: random.Random) -> Draft:
    """A question that a few words answer."""
    kind = weighted(rng, _KINDS)
    if kind == "numbers":
        text = _numbers(rng)
    elif kind == "label":
        text = _label(rng)
    else:
        text = fill(rng, _PARTS, kind)
    system = "Answer in as few words as possible." if rng.random() < 0.03 else None
    return Draft(casual(rng, text), system)


def _numbers(rng: random.Random) -> str:
    """Conversions, spelling and tiny questions with numbers."""
    n = rng.randint(2, 99)
    unit_a, unit_b = rng.choice(_PARTS["units"])
    month = rng.choice(_PARTS["month"])
    day = rng.choice(_PARTS["weekday"])
    words = rng.sample(_PARTS["noun"], 4)
    return rng.choice(
        (
            f"How many {unit_b} are {n} {unit_a}?",
            f"Convert {n} {unit_a} to {unit_b}.",
            f"{n} {unit_a} in {unit_b}?",
            f"Write the number {n * 13} in words.",
            f"What is {n} in Roman numerals?",
            f"What is {n} in binary?",
            f"What is {n} plus {rng.randint(2, 99)}? Just the number.",
            f"Is {n * 3 + 1} divisible by 7? Yes or no.",
            f"Which is larger, {n}/{n + 3} or {n + 1}/{n + 5}?",
            f"If today is {day}, what day is it in {n} days?",
            f"Which date comes {n % 27 + 2} days after {month} {n % 25 + 1}?",
            f"Put these words in alphabetical order: {', '.join(words)}.",
            f"Which word does not belong: {', '.join(words[:3])}, {rng.choice(('run', 'green', 'seventeen', 'why'))}?",
            f"Round {n * 1.37:.2f} to the nearest whole number.",
        )
    )


def _label(rng: random.Random) -> str:
    """One-word classification of a sentence."""
    review = rng.choice(_PARTS["review"]).format(x=rng.choice(_PARTS["reviewed"]))
    return rng.choice(_PARTS["review_form"]).format(review=review)
