"""A prompt, its id, and the two questions asked of it: is it held out, and is it excluded?"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

#: Share of prompts kept for evaluation by `is_held_out`.
HELD_OUT_SHARE = 0.02

#: Requests that stay unseen in training, and close relatives of them.
EXCLUSIONS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"\btrains?\b.*\b60\s*(km|kilomet)",
        r"\b60\s*(km|kilomet).*\b(trains?\b|45\s*min)",
        r"palindrom",
        r"\bsky\b.{0,30}\bblue\b",
        r"\bblue\b.{0,15}\bsky\b",
        r"\bfruits?\b",
        r"\bcapital\b.{0,20}\bfrance\b",
        r"\bfrance'?s?\b.{0,20}\bcapital\b",
        r"\bfrench capital\b",
    )
)


@dataclass(frozen=True)
class Prompt:
    """One request: the messages so far (the last is the user's) and user turns to ask after the answers."""

    id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()


def make_prompt(domain: str, messages: tuple[dict[str, str], ...], follow_ups: tuple[str, ...] = ()) -> Prompt:
    """Build a `Prompt` whose id is the domain and a short hash of the messages."""
    return Prompt(f"{domain}-{_digest(messages)[:16]}", domain, messages, follow_ups)


def is_held_out(prompt: Prompt) -> bool:
    """Whether the prompt belongs to the 2 % that are kept for evaluation; depends on its messages only."""
    number = int(hashlib.sha256(("held-out:" + _digest(prompt.messages)).encode()).hexdigest()[:12], 16)
    return number < HELD_OUT_SHARE * 16**12


def repeats_held_out(prompt: Prompt) -> bool:
    """Whether the prompt is not held out, but is the same question under a system message as one that is."""
    bare = tuple(message for message in prompt.messages if message["role"] != "system")
    return not is_held_out(prompt) and is_held_out(make_prompt(prompt.domain, bare))


def is_excluded(text: str) -> bool:
    """Whether the text is one of the demonstration prompts that stay unseen, or close to one."""
    return any(pattern.search(text) for pattern in EXCLUSIONS)


def _digest(messages: tuple[dict[str, str], ...]) -> str:
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
