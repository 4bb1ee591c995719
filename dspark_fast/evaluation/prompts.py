"""Prompts to evaluate with: the sets that ship with the package, and files in the authors' format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from dspark_fast.training.prompts import Prompt, read_prompts

#: The sets that ship with the package, a domain each.
SHIPPED = ("maths", "code", "chat")


def shipped_prompts() -> list[Prompt]:
    """The package's own prompts, 20 of each of maths, code and chat, a few of them of two turns.

    They were written for this package, are in no public set, and no training prompt of it contains one.
    """
    folder = Path(str(resources.files("dspark_fast.prompts")))
    return [prompt for domain in SHIPPED for prompt in read_prompt_file(folder / f"{domain}.jsonl")]


def read_prompt_file(path: str | Path) -> list[Prompt]:
    """Prompts from JSON lines in the authors' format, ``{"turns": ["...", "..."]}``: what the user says, turn by turn.

    Also taken: ``{"prompt": ...}``, ``{"question": ...}``, and ``{"messages": [...]}``, whose last message of the user
    is answered. ``domain`` and ``id`` may be given; without them they are the file's name and the line's number.

    Raises:
        ValueError: for a line that is none of these, with file and line number; for two lines of one id in one domain;
            for a file without any.
        OSError: for a file that cannot be read.
    """
    path = Path(path)
    prompts = list(read_prompts(path))  # raises for whatever is wrong with a line's text
    if not prompts:
        raise ValueError(f"{path}: no prompt stands in it")
    lines = [line for line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1) if line[1].strip()]
    known: dict[tuple[str, str], int] = {}
    found = []
    for prompt, (number, line) in zip(prompts, lines, strict=True):
        record = json.loads(line)
        name = record.get("id", f"{path.stem}-{number}")
        if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
            raise ValueError(f'{path}:{number}: "id" must be a non-empty string or an integer, found {name!r}')
        one = replace(prompt, id=str(name), domain=record.get("domain", path.stem))
        first = known.setdefault((one.domain, one.id), number)
        if first != number:
            raise ValueError(f'{path}:{number}: "id" {one.id!r} is that of line {first} too: each must have its own')
        found.append(one)
    return found


def check_names(prompts: Iterable[Prompt]) -> None:
    """An id stands once in a domain, of several files too: it is what a prompt's seed and its row in a file go by.

    Raises:
        ValueError: naming the domain and the id that stand twice.
    """
    known: set[tuple[str, str]] = set()
    for one in prompts:
        if (one.domain, one.id) in known:
            raise ValueError(f"two prompts of the domain {one.domain!r} have the id {one.id!r}: give each its own")
        known.add((one.domain, one.id))
