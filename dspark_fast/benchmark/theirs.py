"""transformers' own ways to decode greedily."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CompileConfig

from dspark_fast.benchmark.calls import Call, Rounds, passes, timed
from dspark_fast.benchmark.way import Pair
from dspark_fast.benchmark.workload import Case


def settings(case: Case, device: torch.device, new_tokens: int) -> dict[str, Any]:
    """Keywords of every ``generate``: greedy, to a fixed length, so that all ways decode as many tokens."""
    return {
        **case.inputs(device),
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def plain(pair: Pair, case: Case, new_tokens: int, **more: Any) -> Call:
    """``model.generate``, a step per token."""
    common = settings(case, pair.model.device, new_tokens)
    call, _, _ = timed(lambda streamer: pair.model.generate(streamer=streamer, **common, **more), common["input_ids"])
    return call


def static(pair: Pair, case: Case, new_tokens: int) -> Call:
    """The same with a static cache, whose steps transformers compiles; of its own accord only on an accelerator."""
    config = CompileConfig(dynamic=False)
    config._compile_all_devices = True  # transformers' own switch, for which it has no public name
    return plain(pair, case, new_tokens, cache_implementation="static", compile_config=config)


def assisted(pair: Pair, case: Case, new_tokens: int) -> Call:
    """Assisted generation: a smaller model drafts."""
    if pair.assistant is None:
        raise ValueError(pair.why_no_assistant)
    config = pair.assistant.generation_config
    before = config.num_assistant_tokens, config.num_assistant_tokens_schedule
    # Else it drafts 20 tokens ahead, and as many as it likes from the second call on.
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = pair.assistant_drafts, "constant"
    try:
        return _speculating(pair, case, new_tokens, assistant_model=pair.assistant)
    finally:
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = before


def lookup(pair: Pair, case: Case, new_tokens: int) -> Call:
    """Prompt lookup: what followed the last tokens where they stood before is the draft."""
    return _speculating(pair, case, new_tokens, prompt_lookup_num_tokens=pair.lookup_drafts)


def one_row(pair: Pair, batch: int) -> str | None:
    """transformers' speculation takes a single row."""
    return None if batch == 1 else f"transformers speculates for one row alone, not for {batch}"


def _speculating(pair: Pair, case: Case, new_tokens: int, **more: Any) -> Call:
    common = settings(case, pair.model.device, new_tokens)
    models = [pair.model, *([pair.assistant] if "assistant_model" in more else [])]
    with passes(*models) as found:
        call, _, at = timed(
            lambda streamer: pair.model.generate(streamer=streamer, **common, **more), common["input_ids"]
        )
    # Passes are queued, not done, when they return on a GPU: there they can be counted, not timed.
    clocked = pair.model.device.type == "cpu"
    verifying, *drafting = (sum(took for start, took in each if start > at) for each in found)
    rounds = sum(start > at for start, _ in found[0])
    call.rounds = Rounds(
        rounds=rounds,
        row_rounds=rounds,
        committed=call.counted,
        drafting=sum(drafting) if clocked else None,
        verifying=verifying if clocked else None,
        together=sum(drafting) + verifying if clocked else 0.0,
    )
    return call
