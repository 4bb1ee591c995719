"""One batch of conversations answered with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspark_fast.generation import generate
from dspark_fast.stats import Stats


def answer(
    model: Any,
    drafter: Any,
    rows: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    **drafting: Any,
) -> tuple[list[list[int]], Stats]:
    """Decode what follows each row, all rows together, with the whole distribution of the target: no cuts.

    Speculation is never switched off, so that the figures are of the drafter and not of the machine.

    Args:
        model, drafter: the pair.
        rows: token ids of each conversation, up to where the answer begins.
        seeds: one per row.
        max_new_tokens: per answer.
        temperature: 0 is greedy; otherwise rejection sampling.
        drafting: ``confidence_threshold`` and ``use_markov``, of a DSpark drafter.

    Returns:
        The new tokens of each row, its stop token included; and the figures of the call.
    """
    width = max(map(len, rows))
    pad = model.generation_config.pad_token_id
    pad = 0 if pad is None else pad
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = generate(
        model,
        drafter,
        torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        off_switch=False,
        seed=list(seeds),
        **sampling,
        **drafting,
    )
    counts = output.stats.new_tokens
    return [row[width : width + count] for row, count in zip(output.tolist(), counts, strict=True)], output.stats
