"""The stream of training prompts: every domain's own stream, mixed in fixed shares.

A drafter only learns to predict what it has seen, so the prompts cover six domains. Nothing is taken from public test
sets, and `is_excluded` keeps a few demonstration prompts out.

Each prompt is drawn with its own random generator, seeded by (seed, domain, attempt), so that a part which is missing
on one Python version changes only the prompts that use it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from dspark_fast.training.prompts.chat import draw_chat
from dspark_fast.training.prompts.code import draw_code
from dspark_fast.training.prompts.draft import Draft
from dspark_fast.training.prompts.lists import draw_list
from dspark_fast.training.prompts.maths import draw_math, with_question
from dspark_fast.training.prompts.prompt import Prompt, is_excluded, make_prompt
from dspark_fast.training.prompts.reading import read_prompts
from dspark_fast.training.prompts.rewrite import draw_rewrite
from dspark_fast.training.prompts.short import draw_short

#: Prompts of each domain in every block of 50 consecutive prompts.
SHARES: dict[str, int] = {"math": 11, "code": 9, "chat": 15, "list": 6, "short": 5, "rewrite": 4}

_DRAW: dict[str, Callable[[random.Random], Draft | None]] = {
    "math": draw_math,
    "code": draw_code,
    "chat": draw_chat,
    "list": draw_list,
    "short": draw_short,
    "rewrite": draw_rewrite,
}
_MAX_MISSES = 2000


def training_prompts(seed: int = 0, gsm8k: Path | None = None) -> Iterator[Prompt]:
    """A long deterministic stream of distinct prompts (more than 40,000), its domains mixed in the shares of `SHARES`.

    The same seed (and the same GSM8K file) gives the same stream. With `gsm8k`, the path of the training questions as
    JSON lines, about 60 % of the math prompts are those questions, each used once. The stream ends when one domain has
    nothing new to say.
    """
    questions = [prompt.messages[-1]["content"] for prompt in read_prompts(gsm8k)] if gsm8k is not None else []
    random.Random(f"{seed}:questions").shuffle(questions)
    streams = {domain: _domain_stream(domain, seed, questions if domain == "math" else []) for domain in SHARES}
    block = [domain for domain, count in SHARES.items() for _ in range(count)]
    seen: set[str] = set()
    number = 0
    while True:
        order = list(block)
        random.Random(f"{seed}:order:{number}").shuffle(order)
        number += 1
        for domain in order:
            prompt = next((p for p in streams[domain] if p.messages[-1]["content"].casefold() not in seen), None)
            if prompt is None:
                return
            seen.add(prompt.messages[-1]["content"].casefold())
            yield prompt


def _domain_stream(domain: str, seed: int, questions: list[str]) -> Iterator[Prompt]:
    """Distinct prompts of one domain, which uses up `questions`; ends when new ones have become too rare."""
    seen: set[str] = set()
    attempt = misses = 0
    while misses < _MAX_MISSES:
        rng = random.Random(f"{seed}:{domain}:{attempt}")
        attempt += 1
        misses += 1
        draft = with_question(rng, questions.pop()) if questions and rng.random() < 0.6 else _DRAW[domain](rng)
        if draft is None or any(is_excluded(text) for text in (draft.text, *draft.follow_ups)):
            continue
        key = " ".join(draft.text.casefold().split())
        if key in seen:
            continue
        seen.add(key)
        misses = 0
        user = {"role": "user", "content": draft.text}
        messages = ({"role": "system", "content": draft.system}, user) if draft.system else (user,)
        yield make_prompt(domain, messages, draft.follow_ups)
