"""The built-in prompts that no training run sees, which drafters' cards tell the acceptance length of."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from dspark_fast.training.prompts import SHARES, Prompt, is_held_out, training_prompts
from dspark_fast.training.responses import conversation_ids

#: The domains whose acceptance lengths the row ``mean`` is the mean of.
MEAN_OF = ("math", "code", "chat", "list", "short")
SEARCH = 60_000  # built-in prompts looked through for held-out ones: 10 s, and 87 of the rarest domain


def held_out_prompts(tokenizer: Any, per_domain: int, seed: int = 0) -> list[Prompt]:
    """Built-in prompts that :func:`~dspark_fast.training.prompts.is_held_out` keeps from training: first turns only.

    It looks at the messages alone, so no run trains on such a conversation, whatever its seed. (With another seed a
    question may come again under another system message and be trained on: 2 times in 32,000 prompts of 4 seeds.) Where
    the template refuses a system message, as some do with every one, a question is asked without it.

    Args:
        tokenizer: the target's.
        per_domain: prompts of each domain, the first ones.
        seed: of the built-in prompts' order.

    Raises:
        ValueError: without a chat template, or one that refuses a prompt; for fewer prompts than one per domain or more
            than there are.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template, which the prompts need: take an instruction-tuned target")
    if per_domain < 1:
        raise ValueError(f"per_domain is {per_domain}: accepted is 1 or more")
    found = []
    for prompt in built_in_prompts(per_domain, seed):
        one = replace(prompt, follow_ups=())
        try:
            conversation_ids(tokenizer, list(one.messages))
        except TemplateError as error:
            if one.messages[0]["role"] != "system":
                raise _refused(one, error) from error
            one = replace(one, messages=one.messages[1:])
            try:
                conversation_ids(tokenizer, list(one.messages))
            except TemplateError as another:
                raise _refused(one, another) from another
        found.append(one)
    return found


def built_in_prompts(per_domain: int, seed: int) -> list[Prompt]:
    """The first held-out prompts of each domain, one domain after the other."""
    found: dict[str, list[Prompt]] = {domain: [] for domain in SHARES}
    for prompt in islice(training_prompts(seed), SEARCH):
        group = found[prompt.domain]
        if len(group) < per_domain and is_held_out(prompt):
            group.append(prompt)
            if all(len(group) == per_domain for group in found.values()):
                return [prompt for group in found.values() for prompt in group]
    fewest = min(found, key=lambda domain: len(found[domain]))
    raise ValueError(f"per_domain is {per_domain}: {fewest} has {len(found[fewest])} held-out prompts")


def _refused(prompt: Prompt, error: Exception) -> ValueError:
    text = prompt.messages[-1]["content"][:40]
    return ValueError(f"the target's chat template refuses the prompt {text!r}: {error}")
