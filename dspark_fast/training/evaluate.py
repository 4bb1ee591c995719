"""Acceptance length on prompts that were not trained on, measured by generating."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dspark_fast.draft import DSparkDraft
from dspark_fast.evaluation.answering import answer
from dspark_fast.evaluation.counts import Counts, pooled
from dspark_fast.reference import expand_seeds
from dspark_fast.training.prompts import SHARES, Prompt, is_held_out, read_prompts, training_prompts
from dspark_fast.training.responses import conversation_ids

#: The domains whose acceptance lengths the row ``mean`` is the mean of.
MEAN_OF = ("math", "code", "chat", "list", "short")
SEARCH = 60_000  # built-in prompts looked through for held-out ones: 10 s, and 87 of the rarest domain


@dataclass(frozen=True)
class HeldOut:
    """One conversation for the target to go on with.

    Attributes:
        domain: of the prompt.
        input_ids: up to where the answer begins.
    """

    domain: str
    input_ids: list[int]


@dataclass(frozen=True)
class Acceptance:
    """What a drafter reaches in one domain.

    Attributes:
        domain: of the prompts; ``all`` is pooled over them, ``mean`` the plain mean over :data:`MEAN_OF`.
        prompts: how many.
        tau: committed tokens per round, bonus included, pooled over rounds.
        by_position: share of the drafts at each block position that were accepted, given that those before were; empty
            for ``mean``.
        rounds: how many.
    """

    domain: str
    prompts: int
    tau: float
    by_position: list[float]
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: NaN, of which JSON knows nothing, becomes None."""
        known = [None if math.isnan(share) else share for share in self.by_position]
        return {**asdict(self), "tau": None if math.isnan(self.tau) else self.tau, "by_position": known}


def held_out_prompts(
    tokenizer: Any, per_domain: int, seed: int = 0, prompt_files: Sequence[Path] = ()
) -> list[HeldOut]:
    """Prompts to measure with, by the chat template, thinking switched off: first turns only.

    Built-in ones are those that :func:`~dspark_fast.training.prompts.is_held_out` keeps from training. It looks at the
    messages alone, so no run trains on such a conversation, whatever its seed. (With another seed a question may come
    again under another system message and be trained on: 2 times in 32,000 prompts of 4 seeds.) Where the template
    refuses a system message, as some do with every one, a built-in question is asked without it.

    Args:
        tokenizer: the target's.
        per_domain: prompts of each built-in domain, the first ones.
        seed: of the built-in prompts' order.
        prompt_files: JSONL of the user's own, in place of the built-in ones: all are taken, none is filtered.

    Raises:
        ValueError: without a chat template, or one that refuses a prompt; for fewer prompts than one per domain or more
            than there are; for a file that cannot be read as prompts.
    """
    from jinja2 import TemplateError

    mine = [prompt for path in prompt_files for prompt in read_prompts(path)]
    if prompt_files and not mine:
        raise ValueError(f"no prompt stands in {', '.join(map(str, prompt_files))}")
    if not mine:
        prompts = held_out_questions(tokenizer, per_domain, seed)
        return [HeldOut(prompt.domain, conversation_ids(tokenizer, list(prompt.messages))) for prompt in prompts]
    _check(tokenizer, per_domain)
    found = []
    for prompt in mine:
        try:
            found.append(HeldOut(prompt.domain, conversation_ids(tokenizer, list(prompt.messages))))
        except TemplateError as error:
            raise _refused(prompt, error) from error
    return found


def held_out_questions(tokenizer: Any, per_domain: int, seed: int = 0) -> list[Prompt]:
    """The built-in prompts of :func:`held_out_prompts` before they are laid out: first turns only.

    Args:
        tokenizer, per_domain, seed: see there.

    Raises:
        ValueError: as there.
    """
    from jinja2 import TemplateError

    _check(tokenizer, per_domain)
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


def _check(tokenizer: Any, per_domain: int) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template, which the prompts need: take an instruction-tuned target")
    if per_domain < 1:
        raise ValueError(f"per_domain is {per_domain}: accepted is 1 or more")


def _refused(prompt: Prompt, error: Exception) -> ValueError:
    text = prompt.messages[-1]["content"][:40]
    return ValueError(f"the target's chat template refuses the prompt {text!r}: {error}")


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


def measure_acceptance(
    model: Any,
    draft: DSparkDraft,
    prompts: Iterable[HeldOut],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch_size: int = 8,
    on_progress: Callable[[int], None] = lambda prompts: None,
) -> list[Acceptance]:
    """Answer prompts in batches and pool the figures by domain, in the order that domains first come; last is ``all``.

    Rows of like length of one domain are decoded together. In fp32 that changes no token, in 16-bit arithmetic a
    near-tie may fall otherwise.

    Args:
        model, draft: the pair.
        prompts: see :func:`held_out_prompts`.
        max_new_tokens: per answer.
        temperature: 0 is greedy; otherwise rejection sampling, a seed for each prompt by its number.
        batch_size: prompts decoded together.
        on_progress: told the number of prompts done.

    Raises:
        ValueError: for a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: accepted is 1 or more")
    domains: dict[str, list[tuple[int, HeldOut]]] = {}
    for numbered in enumerate(prompts):
        domains.setdefault(numbered[1].domain, []).append(numbered)
    # A seed belongs to a prompt and not to its row, so that the batch size changes nothing when sampling either.
    seeds = expand_seeds(0, sum(map(len, domains.values())), 1).tolist()
    block, done = draft.config.block_size, 0
    found: dict[str, Counts] = {}
    for domain, group in domains.items():
        count = Counts.none(block)
        by_length = sorted(group, key=lambda one: len(one[1].input_ids))
        for start in range(0, len(by_length), batch_size):
            rows = by_length[start : start + batch_size]
            _, stats = answer(
                model,
                draft,
                [one.input_ids for _, one in rows],
                [seeds[number] for number, _ in rows],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
            )
            lengths = [length for row in stats.acceptance_lengths for length in row]
            count += Counts(len(rows), len(lengths), sum(lengths), tuple(stats.proposed), tuple(stats.accepted))
            done += len(rows)
            on_progress(done)
        found[domain] = count
    found["all"] = pooled(list(found.values()), block)
    return [_acceptance(domain, count) for domain, count in found.items()]


def mean_tau(results: Iterable[Acceptance]) -> float:
    """Plain mean of the acceptance lengths of :data:`MEAN_OF`; NaN unless each of them was measured."""
    taus = {one.domain: one.tau for one in results}
    return sum(taus.get(domain, math.nan) for domain in MEAN_OF) / len(MEAN_OF)


def with_mean(results: Sequence[Acceptance]) -> list[Acceptance]:
    """The same with a row ``mean`` before the last, if :func:`mean_tau` has a value."""
    tau = mean_tau(results)
    if math.isnan(tau):
        return list(results)
    five = [one for one in results if one.domain in MEAN_OF]
    mean = Acceptance("mean", sum(one.prompts for one in five), tau, [], sum(one.rounds for one in five))
    return [*results[:-1], mean, results[-1]]


def _acceptance(domain: str, counts: Counts) -> Acceptance:
    # Three digits are what so many rounds tell.
    shares = [share if math.isnan(share) else round(share, 3) for share in counts.conditional]
    return Acceptance(domain, counts.prompts, counts.tau, shares, counts.rounds)
