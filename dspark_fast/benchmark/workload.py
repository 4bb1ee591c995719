"""What is decoded: prompts of some sets, one at a time or together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_fast.evaluation import Prompt, read_prompt_file, shipped_prompts
from dspark_fast.training.responses import conversation_ids

MIXED = "mixed"  #: the set of a case of several rows


@dataclass(frozen=True)
class Case:
    """Prompts that one call decodes.

    Attributes:
        set: the domain of the prompt; :data:`MIXED` where there are several.
        rows: token ids of each prompt.
    """

    set: str
    rows: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.rows))

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64 ``[B, S]``, padded on the left with 0."""
        pads = [self.width - len(row) for row in self.rows]
        ids = [[0] * pad + list(row) for pad, row in zip(pads, self.rows)]
        mask = [[0] * pad + [1] * len(row) for pad, row in zip(pads, self.rows)]
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }


def read_sets(files: Sequence[Path]) -> dict[str, list[Prompt]]:
    """Prompts by domain: of these files, or those that ship; of several turns the first is asked.

    Raises:
        ValueError, OSError: see :func:`dspark_fast.evaluation.read_prompt_file`.
    """
    prompts = [prompt for path in files for prompt in read_prompt_file(path)] if files else shipped_prompts()
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.domain, []).append(prompt)
    return sets


def cases_of(
    tokenizer: Any, sets: dict[str, list[Prompt]], *, batch: int, per_set: int, context: int | None
) -> list[Case]:
    """The calls of one batch size: ``per_set`` prompts of each set alone, or one call of ``batch`` prompts in turn.

    Args:
        context: begin each prompt with so much of the others' text that it has this many tokens; None: as it is.

    Raises:
        ValueError: for a batch of more rows than there are prompts; a prompt that the template refuses, that is longer
            than ``context``, or that is shorter where no other has any text.
    """
    if batch == 1:
        chosen = [(domain, [prompt]) for domain, prompts in sets.items() for prompt in prompts[:per_set]]
    else:
        longest = max(map(len, sets.values()))
        turns = [prompts[index] for index in range(longest) for prompts in sets.values() if index < len(prompts)]
        if batch > len(turns):
            raise ValueError(f"batch is {batch}, but there are {len(turns)} prompts: accepted is at most as many")
        chosen = [(MIXED, turns[:batch])]
    texts = [_text(prompt) for prompts in sets.values() for prompt in prompts]

    def row(prompt: Prompt) -> tuple[int, ...]:
        # Not its own text, which it would repeat: what drafts by copying would find it there.
        others = "\n\n".join(text for text in texts if text != _text(prompt))
        return tuple(_ids(tokenizer, prompt, others, context))

    return [Case(domain, tuple(map(row, prompts))) for domain, prompts in chosen]


def _text(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def _ids(tokenizer: Any, prompt: Prompt, filler: str, context: int | None) -> list[int]:
    from jinja2 import TemplateError

    def encode(*before: str) -> list[int]:
        *others, last = prompt.messages
        asked = {"role": last["role"], "content": "\n\n".join([*before, last["content"]])}
        if not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(asked["content"])["input_ids"])
        try:
            return list(conversation_ids(tokenizer, [*others, asked]))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the prompt {prompt.id!r}: {error}") from error

    ids = encode()
    if context is None:
        return ids
    if len(ids) > context:
        raise ValueError(f"context is {context}, but the prompt {prompt.id!r} alone has {len(ids)} tokens")
    if len(ids) < context:
        if not filler:
            raise ValueError(f"context is {context}, but no other prompt has text to begin {prompt.id!r} with: add one")
        text = filler
        while len(ids := encode(text)) < context:
            text += "\n\n" + filler
    return ids[-context:]


def place(batch: int, context: int | None) -> str:
    """A batch and a context in words."""
    return f"batch {batch}" + ("" if context is None else f", {context:,} tokens of context")


def check_room(cases: Sequence[Case], new_tokens: int, config: Any, name: str) -> None:
    """No answer is cut by the end of the context.

    Raises:
        ValueError: naming the longest prompt's length, and the context's.
    """
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(case.width for case in cases)
    if context is not None and longest + new_tokens > context:
        raise ValueError(
            f"the longest prompt has {longest} tokens, which with {new_tokens} new ones is more than the context of "
            f"{name}, {context}"
        )
