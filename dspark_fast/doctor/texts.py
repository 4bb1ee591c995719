"""Text that the target wrote itself, and what its layers said of it: what a drafter's blocks are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspark_fast.engine.taps import tapped
from dspark_fast.evaluation.held_out import built_in_prompts
from dspark_fast.generation import generate
from dspark_fast.training.blocks import block_labels
from dspark_fast.training.prompts import read_prompts
from dspark_fast.training.responses import stop_tokens

Message = dict[str, str]
TOGETHER = 64  # answers decoded side by side
READ = 8  # texts per pass of the target and of the drafter, of like length


@dataclass(frozen=True)
class Format:
    """How a conversation becomes the target's input.

    Attributes:
        template: by the chat template; else the messages' text as it is.
        thinking: what a template that knows ``enable_thinking`` is given.
    """

    template: bool = True
    thinking: bool = False

    def __str__(self) -> str:
        if not self.template:
            return "without the chat template"
        return "with thinking on" if self.thinking else "by the chat template, without thinking"

    def ids(self, tokenizer: Any, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        from jinja2 import TemplateError

        if not self.template:
            return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
        options = {"add_generation_prompt": True, "enable_thinking": self.thinking, "tokenize": True}
        try:
            ids = tokenizer.apply_chat_template(list(messages), **options)
        except TemplateError as error:
            if messages[0]["role"] != "system":
                raise ValueError(f"the target's chat template refuses a prompt: {error}") from error
            return self.ids(tokenizer, messages[1:])  # some take no system message
        return list(ids if isinstance(ids, list) else ids["input_ids"])


def knows_thinking(tokenizer: Any) -> bool:
    """Whether ``enable_thinking`` changes what the chat template writes."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    messages = [{"role": "user", "content": "Hello"}]
    return Format(thinking=True).ids(tokenizer, messages) != Format().ids(tokenizer, messages)


def conversations(per_domain: int, files: Sequence[Path] = ()) -> list[list[Message]]:
    """First turns: the package's own prompts that no training run sees, or all of the user's.

    Raises:
        ValueError: for more than there are, or files without a prompt.
    """
    prompts = [prompt for path in files for prompt in read_prompts(path)]
    if files and not prompts:
        raise ValueError(f"no prompt stands in {', '.join(map(str, files))}")
    return [list(prompt.messages) for prompt in prompts or built_in_prompts(per_domain, 0)]


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer.

    Attributes:
        input_ids: both.
        start: where the answer begins.
        prompt: number of the prompt.
    """

    input_ids: list[int]
    start: int
    prompt: int


def write_texts(model: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Text]:
    """The target's greedy answers, decoded once, up to and with their stop token; those of one token are left out."""
    stops, pad = stop_tokens(model), model.generation_config.pad_token_id or 0
    numbers = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    found = []
    for first in range(0, len(numbers), TOGETHER):
        group = numbers[first : first + TOGETHER]
        width = max(len(prompts[number]) for number in group)
        ids = torch.tensor([[pad] * (width - len(prompts[n])) + prompts[n] for n in group], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in group])
        out = generate(
            model,
            None,
            ids,
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
        )
        for number, row in zip(group, out[:, width:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
            if end > 1:
                found.append(Text(prompts[number] + row[:end], len(prompts[number]), number))
    return found


@dataclass(frozen=True)
class Reading:
    """Some texts side by side, padded on the right, what the target's layers said of them, and blocks to draft.

    Attributes:
        input_ids: int64 ``[B, L]``.
        layers: ``[B, L, H]`` by layer, -1 being what enters the first.
        anchors: int64 ``[B, A]``, every gamma-th position, so that no token is drafted twice; 0 where there is none.
        labels, previous: int64 ``[B, A, T]``: what the target wrote there, and before it.
        counted: bool ``[B, A, T]``.
        prompts: int64 ``[B]``, numbers of the prompts.
    """

    input_ids: torch.Tensor
    layers: dict[int, torch.Tensor]
    anchors: torch.Tensor
    labels: torch.Tensor
    previous: torch.Tensor
    counted: torch.Tensor
    prompts: torch.Tensor

    def sample(self, every: int) -> Reading:
        """The same with every so many-th anchor."""
        parts = ("anchors", "labels", "previous", "counted")
        return replace(self, **{name: getattr(self, name)[:, ::every] for name in parts})


@torch.no_grad()
def read_texts(model: Any, texts: Sequence[Text], layers: Iterable[int], block: int) -> list[Reading]:
    """One pass of the target over each text, and the blocks that a drafter of ``block`` tokens is to draft in it."""
    wanted = sorted(layers)
    texts = sorted(texts, key=lambda text: len(text.input_ids))
    found = []
    for first in range(0, len(texts), READ):
        group = texts[first : first + READ]
        width = max(len(text.input_ids) for text in group)
        ids = torch.tensor([text.input_ids + [0] * (width - len(text.input_ids)) for text in group])
        ids = ids.to(model.device)
        with tapped(model, wanted) as taps:
            # Padding is on the right, behind everything that a causal model lets a token see: no mask is needed.
            model.get_decoder()(input_ids=ids, use_cache=False)
            outputs = dict(zip(wanted, taps.take().chunk(len(wanted), dim=-1), strict=True))
        places = [list(range(text.start, len(text.input_ids) - 1, block)) for text in group]
        most = max(map(len, places))
        anchors = torch.tensor([row + [0] * (most - len(row)) for row in places], device=model.device)
        valid = torch.tensor([[True] * len(row) + [False] * (most - len(row)) for row in places], device=model.device)
        steps = torch.arange(width, device=model.device)
        starts, ends = (
            torch.tensor(values, device=model.device)[:, None]
            for values in ([text.start for text in group], [len(text.input_ids) for text in group])
        )
        own = (steps >= starts) & (steps < ends)
        labels, previous, counted = block_labels(ids, own, anchors, valid, block)
        prompts = torch.tensor([text.prompt for text in group])
        found.append(Reading(ids, outputs, anchors, labels, previous, counted, prompts))
    return found
