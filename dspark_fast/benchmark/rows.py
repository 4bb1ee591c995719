"""Timed calls as rows of figures: medians over repeats, ratios within each repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dspark_fast.benchmark.calls import Call, Rounds
from dspark_fast.benchmark.predicted import Costs, plain_step, predict, why
from dspark_fast.benchmark.way import Way

ALL = "all"  #: the set of a row over all cases

Repeats = Sequence[Sequence[Call]]  # the calls of each repeat, in the order of the cases


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, least and most."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    middle = statistics.median(values)
    return {"median": middle, "quartiles": [low, high], "least": min(values), "most": max(values)}


def speed(calls: Sequence[Call]) -> float:
    """Tokens per second after the first, pooled over calls."""
    # Where all tokens came at once, as a drafter that is never wrong can make them, they count as one step.
    return sum(len(call.tokens) * max(call.counted, 1) for call in calls) / sum(call.after for call in calls)


def row_of(way: Way, name: str, repeats: Repeats, baseline: Repeats, costs: Costs) -> dict[str, Any]:
    """Figures of one way over some cases.

    Args:
        name: of the cases' set.
        repeats: its calls.
        baseline: transformers' ``generate`` on the same cases in the same repeats.
        costs: taken before; the prediction is made from them.
    """
    calls = [call for repeat in repeats for call in repeat]
    step = plain_step([call for repeat in baseline for call in repeat])
    ratios = [speed(mine) / speed(theirs) for mine, theirs in zip(repeats, baseline)]
    whole = [sum(c.seconds for c in theirs) / sum(c.seconds for c in mine) for mine, theirs in zip(repeats, baseline)]
    known = [call.rounds for call in calls if call.rounds is not None]
    pooled = sum(known, Rounds()) if known else None
    prediction, speedup = predict(pooled, costs), spread(ratios)
    return {
        "set": name,
        "provider": way.name,
        "label": way.label,
        "ours": way.ours,
        "prompts": sum(len(call.tokens) for call in repeats[0]),
        "repeats": len(repeats),
        "speedup": speedup,
        "call_speedup": spread(whole),
        "tokens_per_second": spread([speed(repeat) for repeat in repeats]),
        "first_token_ms": spread([1e3 * call.first for call in calls]),
        "call_seconds": spread([call.seconds for call in calls]),
        "step_ms": 1e3 * sum(call.after for call in calls) / max(sum(call.counted for call in calls), 1),
        "acceptance_length": pooled.acceptance_length if pooled is not None and pooled.rounds else None,
        "rounds": pooled.rounds if pooled is not None else None,
        "plain_steps": pooled.plain_steps if pooled is not None else None,
        "draft_cost": prediction.draft if prediction is not None else None,
        "verify_cost": prediction.verify if prediction is not None else None,
        "predicted_speedup": prediction.speedup if prediction is not None else None,
        "why": why(calls, prediction, step, speedup["median"]) if prediction is not None else None,
    }
