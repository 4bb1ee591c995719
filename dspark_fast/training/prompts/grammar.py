"""The grammar of the prompts: templates with {slots}, filled from the lists of words in the JSON files beside this one.

A slot {name} takes a random entry of the list `name`; {name.cap} and {name.low} change the case of its first letter,
and {name.a} puts the article before it.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

_SLOT = re.compile(r"\{([a-z_]+)(?:\.([a-z]+))?\}")


def load_parts(*names: str) -> dict[str, Any]:
    """The lists of the JSON files of these names, together."""
    parts: dict[str, Any] = {}
    for name in names:
        parts |= json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return parts


def fill(rng: random.Random, parts: dict[str, Any], kind: str) -> str:
    """A random template of the list `kind`, its slots filled; a slot that occurs twice gets two different entries."""
    used: dict[str, list[str]] = {}

    def entry(match: re.Match[str]) -> str:
        name, form = match.groups()
        before = used.setdefault(name, [])
        for _ in range(20):
            phrase = rng.choice(parts[name])
            if phrase not in before:
                break
        before.append(phrase)
        if form == "cap":
            phrase = phrase[:1].upper() + phrase[1:]
        elif form == "low":
            phrase = phrase[:1].lower() + phrase[1:]
        elif form == "a":
            phrase = ("an " if phrase[0] in "aeiou" else "a ") + phrase
        return phrase

    template = rng.choice(parts[kind])
    text = _SLOT.sub(entry, template)
    text = text.replace("?.", "?").replace("!.", "!")
    text = re.sub(r"\b([Aa]) (?=[aeio])(?!one|eu)", r"\1n ", text)
    text = re.sub(r"(?<=! )[a-z]", lambda match: match.group().upper(), text)
    return text[:1].upper() + text[1:] if template.startswith("{n}") else text
