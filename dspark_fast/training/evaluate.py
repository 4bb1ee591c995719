"""Acceptance length on prompts that were not trained on, measured by generating."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dspark_fast.draft import DSparkDraft
from dspark_fast.generation import generate
from dspark_fast.training.responses import Response


@dataclass(frozen=True)
class Acceptance:
    """What a drafter reaches in one domain.

    Attributes:
        domain: of the prompts, or ``all``.
        prompts: how many.
        tau: committed tokens per round, bonus included, pooled over rounds.
        by_position: share of the drafts at each block position that were accepted, given that those before were.
    """

    domain: str
    prompts: int
    tau: float
    by_position: list[float]


def measure_acceptance(
    model: Any,
    draft: DSparkDraft,
    held_out: Iterable[Response],
    *,
    per_domain: int = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    on_progress: Callable[[int], None] = lambda prompts: None,
) -> list[Acceptance]:
    """Generate answers to held-out prompts and pool the figures by domain; the last entry is over all.

    Args:
        model, draft: the pair.
        held_out: responses whose prompts were kept from training; their own answers are not used.
        per_domain: prompts of each domain, the first ones.
        max_new_tokens: per answer.
        temperature: 0 is greedy; otherwise rejection sampling with seed 0.
        on_progress: told the number of prompts done.
    """
    domains: dict[str, list[Response]] = {}
    for response in held_out:
        group = domains.setdefault(response.domain, [])
        if len(group) < per_domain:
            group.append(response)
    block = draft.config.block_size
    rounds: dict[str, list[int]] = {}
    slots = {domain: ([0] * block, [0] * block) for domain in domains}
    done = 0
    for domain, group in domains.items():
        for response in group:
            ids = torch.tensor([response.input_ids[: response.start]], device=model.device)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            out = generate(
                model,
                draft,
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                seed=0,
                **sampling,
            )
            rounds.setdefault(domain, []).extend(out.stats.acceptance_lengths[0])
            for total, part in zip(slots[domain], (out.stats.proposed, out.stats.accepted), strict=True):
                for slot, count in enumerate(part):
                    total[slot] += count
            done += 1
            on_progress(done)
    results = [
        _acceptance(name, len(group), rounds.get(name, []), *slots[name]) for name, group in sorted(domains.items())
    ]
    proposed, accepted = (
        [sum(column) for column in zip(*(slots[name][which] for name in domains), strict=True)] for which in (0, 1)
    )
    pooled = [length for lengths in rounds.values() for length in lengths]
    return [*results, _acceptance("all", done, pooled, proposed, accepted)]


def _acceptance(domain: str, prompts: int, lengths: list[int], proposed: list[int], accepted: list[int]) -> Acceptance:
    # Survival first (all drafts up to the slot accepted, of those proposed there), then its ratio from slot to slot.
    survival = [1.0, *(hit / n if n else float("nan") for hit, n in zip(accepted, proposed, strict=True))]
    conditional = [round(now / last, 3) if last else float("nan") for last, now in pairwise(survival)]
    return Acceptance(domain, prompts, sum(lengths) / len(lengths) if lengths else float("nan"), conditional)
