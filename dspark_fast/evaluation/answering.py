"""One batch of conversations answered with a drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from dspark_fast.generation import generate
from dspark_fast.stats import Stats
from dspark_fast.training.responses import stop_tokens

UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Of a model's generation configuration: what `answer` sets itself, and what says nothing of tokens.
_OURS = {*UNCUT, "temperature", "do_sample", "repetition_penalty", "max_new_tokens", "max_length", "eos_token_id"}
_NO_TOKENS = {"bos_token_id", "pad_token_id", "use_cache", "output_attentions", "output_hidden_states"}
_NO_TOKENS |= {"output_scores", "output_logits", "return_dict_in_generate", "transformers_version"}


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
    pad, stops = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    pad = 0 if pad is None else pad
    # The model's own configuration may cut (Qwen3's does) or penalise: the law measured here is the bare target's.
    neutral = GenerationConfig(
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=stops,
        repetition_penalty=1.0,
        **({"do_sample": True, "temperature": temperature, **UNCUT} if temperature else {"do_sample": False}),
    )
    output = generate(
        model,
        drafter,
        torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=model.device),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device),
        generation_config=neutral,
        off_switch=False,
        seed=list(seeds),
        **drafting,
    )
    counts = output.stats.new_tokens
    return [row[width : width + count] for row, count in zip(output.tolist(), counts, strict=True)], output.stats


def model_rules(model: Any) -> dict[str, Any]:
    """What of the model's own generation configuration :func:`answer` goes by, as plain data for JSON.

    Its stop tokens, and what transformers takes from there since :func:`answer` says nothing of it
    (``suppress_tokens``, ``no_repeat_ngram_size``, ...). Cuts, temperature and penalty are not among them.
    """
    theirs = model.generation_config.to_diff_dict()
    rest = {name: theirs[name] for name in sorted(theirs) if name not in _OURS | _NO_TOKENS and name[0] != "_"}
    return {"stop_tokens": sorted(stop_tokens(model)), "generation": json.loads(json.dumps(rest, default=str))}
