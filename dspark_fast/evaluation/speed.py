"""Seconds per round and per plain step of one prompt, and the speedups that they and tau predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark_fast.compare import Comparison, compare
from dspark_fast.evaluation.result import Evaluation
from dspark_fast.training.prompts import Prompt
from dspark_fast.training.responses import conversation_ids

_PARTS = ("mode", "baseline", "prompt_tokens", "seconds_per_round", "seconds_per_plain_step", "acceptance_length")
_PARTS += ("speedup", "speedup_least", "speedup_most", "identical")


def time_one(
    model: Any,
    drafter: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    result: Evaluation,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Time one prompt at batch 1, with and without the drafter in turn, and predict what each domain gains.

    The prompt is the first of the domain with the longest answers, so that there are rounds to time. At a temperature
    both decodings are coupled, so that their tokens can be compared.

    Args:
        model, drafter, tokenizer, prompts: of :func:`~dspark_fast.evaluation.evaluate`.
        result: what it found.
        progress: told what is being done.

    Returns:
        The prompt, the times, whether the tokens were the same, the measured speedup; and ``predicted``, by domain
        ``tau * T_plain / (T_draft + T_verify + T_bookkeeping)``, None without rounds.
    """
    domains = result.domains
    longest = max(domains, key=lambda domain: domains[domain].committed / max(domains[domain].prompts, 1))
    prompt = next(one for one in prompts if one.domain == longest)
    found: Comparison = compare(
        model,
        drafter,
        torch.tensor([conversation_ids(tokenizer, list(prompt.messages))], device=model.device),
        tokenizer=tokenizer,
        max_new_tokens=result.max_new_tokens,
        temperature=result.temperature,
        seed=result.seed,
        confidence_threshold=result.confidence_threshold,
        use_markov=result.use_markov,
        progress=progress,
    )
    whole = found.to_dict()
    round_, step = sum(found.seconds_per_round.values()), found.seconds_per_plain_step
    taus = {**{domain: counts.tau for domain, counts in domains.items()}, "mean": result.mean_tau}
    taus["all"] = result.pooled.tau
    ratio = step / round_ if step and round_ else math.nan
    predicted = {domain: None if math.isnan(tau * ratio) else tau * ratio for domain, tau in taus.items()}
    timed = {part: whole[part] for part in _PARTS}
    return {"domain": longest, "id": prompt.id, "tokens": len(found.tokens), **timed, "predicted": predicted}
