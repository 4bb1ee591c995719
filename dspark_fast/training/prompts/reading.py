"""The user's own prompts, read from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dspark_fast.training.prompts.prompt import Prompt, make_prompt


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read prompts from JSON lines: {"prompt": ...}, {"messages": [...]}, {"turns": [...]} or {"question": ...}.

    Blank lines are skipped. Other keys are ignored, apart from an optional "domain". A line that cannot be used raises
    ValueError with the file and the line number.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompt = _read_record(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from None
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not valid UTF-8") from None
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            yield prompt


def _read_record(record: object) -> Prompt:
    """One record of the user's file; raises ValueError that says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    domain = record.get("domain", "user")
    if not isinstance(domain, str) or not domain:
        raise ValueError('"domain" must be a non-empty string')
    if "messages" in record:
        return make_prompt(domain, _read_messages(record["messages"]))
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError('"turns" must be a non-empty list of strings')
        texts = [_checked_text(turn, f'"turns"[{position}]') for position, turn in enumerate(turns)]
        return make_prompt(domain, ({"role": "user", "content": texts[0]},), tuple(texts[1:]))
    for key in ("prompt", "question"):
        if key in record:
            return make_prompt(domain, ({"role": "user", "content": _checked_text(record[key], f'"{key}"')},))
    raise ValueError('expected one of the keys "prompt", "messages", "turns" or "question"')


def _read_messages(messages: object) -> tuple[dict[str, str], ...]:
    """The messages up to the last one of the user: the model answers that one anew."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a non-empty list')
    checked = []
    for position, message in enumerate(messages):
        what = f'"messages"[{position}]'
        if not isinstance(message, dict):
            raise ValueError(f'{what} must be an object with "role" and "content"')
        role = message.get("role")
        if role not in ("system", "user", "assistant"):
            raise ValueError(f'{what}: "role" must be "system", "user" or "assistant", found {role!r}')
        checked.append({"role": role, "content": _checked_text(message.get("content"), f'{what}: "content"')})
    while checked and checked[-1]["role"] == "assistant":
        checked.pop()
    if not checked or checked[-1]["role"] != "user":
        raise ValueError('"messages" must contain a user message after any system message')
    return tuple(checked)


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a non-empty string")
    return value
