"""Prompts as conversations: laid out by the chat template, grouped for batches, checked against the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspark_fast.evaluation.prompts import check_names
from dspark_fast.training.prompts import Prompt
from dspark_fast.training.responses import conversation_ids


@dataclass(frozen=True)
class Talk:
    """One conversation.

    Attributes:
        prompt: what is said to the model.
        length: tokens up to where the first answer begins.
    """

    prompt: Prompt
    length: int

    @property
    def turns(self) -> int:
        """Answers that are asked for."""
        return 1 + len(self.prompt.follow_ups)

    def input_ids(self, tokenizer: Any, replies: Sequence[str]) -> list[int]:
        """Token ids up to where the answer after these begins; thinking switched off."""
        messages = list(self.prompt.messages)
        for reply, question in zip(replies, self.prompt.follow_ups):
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
        return conversation_ids(tokenizer, messages)

    def last_ids(self, tokenizer: Any) -> list[int]:
        """Token ids up to where the last answer begins, if each one before it is ``ok``."""
        return self.input_ids(tokenizer, ["ok"] * len(self.prompt.follow_ups))


def lay_out(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Talk]:
    """The prompts as conversations, in order.

    Raises:
        ValueError: without prompts; for two of one domain and id; without a chat template; for a prompt that the
            template refuses, naming it.
    """
    from jinja2 import TemplateError

    if not prompts:
        raise ValueError("there are no prompts: accepted is one or more")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template, which the prompts need: take an instruction-tuned target")
    check_names(prompts)
    talks = []
    for prompt in prompts:
        talk = Talk(prompt, 0)
        try:
            talks.append(Talk(prompt, len(talk.input_ids(tokenizer, []))))
            talk.last_ids(tokenizer)
        except TemplateError as error:
            text = prompt.messages[-1]["content"][:40]
            raise ValueError(f"the target's chat template refuses the prompt {text!r}: {error}") from error
    return talks


def check_room(model: Any, tokenizer: Any, talks: Sequence[Talk], max_new_tokens: int) -> None:
    """No answer is cut by the end of the context, however long those before it are.

    Raises:
        ValueError: naming the conversation that may become the longest, its length and the context's.
    """
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is None:
        return
    most, longest = max(
        ((_most_tokens(tokenizer, talk, max_new_tokens), talk) for talk in talks), key=lambda pair: pair[0]
    )
    if most > context:
        name = f"{longest.prompt.id!r} of the domain {longest.prompt.domain!r}"
        turns = "" if longest.turns == 1 else f" in each of {longest.turns} turns"
        raise ValueError(
            f"the prompt {name} may have {most} tokens with {max_new_tokens} new ones{turns}, which is more than the "
            f"context of the target, {context}: accepted is a smaller max_new_tokens, or shorter prompts"
        )


def _most_tokens(tokenizer: Any, talk: Talk, max_new_tokens: int) -> int:
    if talk.turns == 1:
        return talk.length + max_new_tokens
    return len(talk.last_ids(tokenizer)) + talk.turns * max_new_tokens


def in_batches(talks: Sequence[Talk], size: int) -> list[list[Talk]]:
    """Groups of up to ``size`` of one domain, of like length and number of turns, domain after domain."""
    domains: dict[str, list[Talk]] = {}
    for talk in talks:
        domains.setdefault(talk.prompt.domain, []).append(talk)
    groups = []
    for mine in domains.values():
        ordered = sorted(mine, key=lambda talk: (talk.turns, talk.length))
        groups += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return groups
