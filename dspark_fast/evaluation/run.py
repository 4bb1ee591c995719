"""Prompts answered with a drafter, in batches that a second call need not repeat."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dspark_fast.autoregressive import AutoregressiveDrafter
from dspark_fast.draft import DSparkDraft
from dspark_fast.evaluation.answering import answer, model_rules
from dspark_fast.evaluation.conversation import Talk, check_room, in_batches, lay_out
from dspark_fast.evaluation.counts import Counts, pooled
from dspark_fast.evaluation.result import Evaluation, PromptResult
from dspark_fast.evaluation.rows import Batch, Rows, fingerprint
from dspark_fast.generation import decoding
from dspark_fast.machine import describe
from dspark_fast.stats import Stats
from dspark_fast.training.prompts import Prompt


def evaluate(
    model: PreTrainedModel,
    drafter: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    seed: int = 0,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    first_turns: bool = False,
    mean_of: Sequence[str] | None = None,
    rows: str | Path | None = None,
    on_progress: Callable[[int], None] = lambda prompts: None,
    on_answers: Callable[[list[Prompt], list[list[int]], Stats], None] = lambda prompts, tokens, stats: None,
) -> Evaluation:
    """Answer prompts and count what was drafted, judged and accepted, by domain and block position.

    Conversations of one domain and of like length are decoded together. In fp32 that changes no token, in 16-bit
    arithmetic a near-tie may fall otherwise. In a conversation of several turns the model's own answers are the history
    of the next question, and the rounds of all answers count. The authors' published figures are of first turns only:
    ``first_turns``.

    Args:
        model: the target, in eval mode.
        drafter: see :func:`dspark_fast.generate`.
        tokenizer: the target's, with a chat template; thinking is switched off where the template knows it.
        prompts: of any domains, ids unique within each.
        temperature: 0 is greedy; otherwise rejection sampling from the whole distribution.
        max_new_tokens: per answer.
        batch_size: conversations decoded together.
        seed: of sampling. Each answer's own is made of it, the prompt's domain and id, and the turn: neither the batch
            nor the other prompts matter to it.
        confidence_threshold, use_markov: of a DSpark drafter.
        first_turns: ask nothing after the first answer.
        mean_of: domains that ``mean_tau`` is the mean of; None: all of them.
        rows: a JSONL file to keep each batch in as soon as it is done. A call with the same settings goes on from it,
            and gives what one call would have; several temperatures may share it. Settings are also the models, the
            prompts' token ids and the model's stop tokens. One process at a time: see
            :func:`~dspark_fast.evaluation.lock.alone`.
        on_progress: told how many prompts are done, at the start too.
        on_answers: told of each call of ``generate``: whose answers it gave, their new tokens, and its figures. What
            it raises ends the evaluation. Not told of what ``rows`` has already.

    Raises:
        ValueError: before any work: for an argument out of range; no prompts, or two of one name; a tokenizer without
            a chat template, or one that refuses a prompt; a conversation that may outgrow the model's context; a
            drafter that cannot belong to the target; a file of other settings.
        FloatingPointError: if the target's logits are NaN.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: accepted is 1 or more")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: accepted is 0 or more")
    if drafter is None:
        raise ValueError("the drafter is None: accepted is what drafts, since that is what is measured")
    drafting = {"confidence_threshold": confidence_threshold, "use_markov": use_markov}
    if isinstance(drafter, PreTrainedModel) and not isinstance(drafter, DSparkDraft):
        drafter = AutoregressiveDrafter(drafter)
    decoding(drafter, **drafting)  # raises for settings that this drafter does not have
    prompts = [replace(one, follow_ups=()) for one in prompts] if first_turns else list(prompts)
    talks = lay_out(tokenizer, prompts)
    check_room(model, tokenizer, talks, max_new_tokens)
    block = drafter.config.block_size if isinstance(drafter, DSparkDraft) else drafter.block_size
    settings = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed, **drafting}
    kept = Rows(rows, settings if rows is None else {**settings, **_identity(model, drafter, block, tokenizer, talks)})
    groups = in_batches(talks, batch_size)
    keys = [(temperature, group[0].prompt.domain, tuple(talk.prompt.id for talk in group)) for group in groups]
    done = sum(len(key[2]) for key in keys if key in kept.batches)
    on_progress(done)
    how = {"max_new_tokens": max_new_tokens, "temperature": temperature, **drafting}
    for group, key in zip(groups, keys):
        if key not in kept.batches:
            kept.append(_answered(model, drafter, tokenizer, group, seed, block, how, on_answers))
            done += len(group)
            on_progress(done)
    batches = [kept.batches[key] for key in keys]
    found = {(one.domain, one.id): one for batch in batches for one in batch.prompts}
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    return Evaluation(
        temperature=float(temperature),
        block_size=block,
        **settings,
        domains={name: pooled([b.counts for b in batches if b.domain == name], block) for name in domains},
        prompts=tuple(found[prompt.domain, prompt.id] for prompt in prompts),
        mean_of=tuple(domains if mean_of is None else mean_of),
    )


def _answered(
    model: PreTrainedModel,
    drafter: Any,
    tokenizer: Any,
    talks: list[Talk],
    seed: int,
    block: int,
    how: dict[str, Any],
    on_answers: Callable[[list[Prompt], list[list[int]], Stats], None],
) -> Batch:
    """All turns of some conversations of one domain."""
    counts = Counts.none(block)
    tokens: list[list[int]] = [[] for _ in talks]
    lengths: list[list[tuple[int, ...]]] = [[] for _ in talks]
    replies: list[list[str]] = [[] for _ in talks]
    for turn in range(max(talk.turns for talk in talks)):
        live = [index for index, talk in enumerate(talks) if talk.turns > turn]
        rows = [talks[index].input_ids(tokenizer, replies[index]) for index in live]
        answers, stats = answer(model, drafter, rows, [_seed(seed, talks[index].prompt, turn) for index in live], **how)
        on_answers([talks[index].prompt for index in live], answers, stats)
        counts += Counts(0, 0, 0, tuple(stats.proposed), tuple(stats.accepted))
        for index, new, rounds in zip(live, answers, stats.acceptance_lengths):
            tokens[index].append(len(new))
            lengths[index].append(tuple(rounds))
            replies[index].append(tokenizer.decode(new, skip_special_tokens=True))
    domain = talks[0].prompt.domain
    parts = (
        PromptResult(talk.prompt.id, domain, tuple(new), tuple(rounds))
        for talk, new, rounds in zip(talks, tokens, lengths)
    )
    return Batch(how["temperature"], domain, tuple(parts), counts.proposed, counts.accepted)


def _seed(seed: int, prompt: Prompt, turn: int) -> int:
    """64 bits that depend on the prompt's name and not on where it stands."""
    text = json.dumps([seed, prompt.domain, prompt.id, turn])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _identity(
    model: PreTrainedModel, drafter: Any, block: int, tokenizer: Any, talks: Sequence[Talk]
) -> dict[str, Any]:
    """What else the rows depend on."""
    machine = describe(str(model.device))
    inner = getattr(drafter, "draft", drafter)
    prompts = [talk.prompt for talk in talks]
    # The same prompts are other tokens by another tokenizer or chat template, or by one that tells the date.
    ids = [[talk.input_ids(tokenizer, []), talk.last_ids(tokenizer)] for talk in talks]
    return {
        "target": f"{type(model).__name__} {fingerprint(model)}",
        "drafter": f"{type(drafter).__name__}, block size {block}, {fingerprint(inner)}",
        "prompts": f"{len(prompts)}, {_digest([[p.domain, p.id, p.messages, p.follow_ups] for p in prompts])}",
        "prompt_ids": f"{sum(len(first) for first, _ in ids)}, {_digest(ids)}",
        **model_rules(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: machine[name] for name in ("device", "torch", "transformers", "dspark_fast")},
    }


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]
