"""Our ways to decode greedily, and the loop that the notebook has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dspark_fast import generation
from dspark_fast.autoregressive import AutoregressiveDrafter
from dspark_fast.backend import VARIABLE
from dspark_fast.benchmark.calls import Call, Rounds, timed
from dspark_fast.benchmark.notebook import by_reference
from dspark_fast.benchmark.theirs import settings
from dspark_fast.benchmark.way import Pair
from dspark_fast.benchmark.workload import Case
from dspark_fast.engine.prepacked import supported
from dspark_fast.first_token import waiting
from dspark_fast.stats import Stats


def default(pair: Pair, case: Case, new_tokens: int) -> Call:
    """As users get it: with the off-switch, on a GPU with graphs."""
    return _decode(pair, case, new_tokens, pair.draft)


def always(pair: Pair, case: Case, new_tokens: int) -> Call:
    """Without the off-switch."""
    return _decode(pair, case, new_tokens, pair.draft, off_switch=False)


def compiled(pair: Pair, case: Case, new_tokens: int) -> Call:
    """As users get it with ``compile_target``."""
    return _decode(pair, case, new_tokens, pair.draft, compile_target=True)


def no_drafter(pair: Pair, case: Case, new_tokens: int) -> Call:
    """Token by token, with all that is ours but speculation."""
    return _decode(pair, case, new_tokens, None)


def unpacked(pair: Pair, case: Case, new_tokens: int) -> Call:
    """As users get it, but on the weights as they lie."""
    return _decode(pair, case, new_tokens, pair.draft, pack_weights=False)


def no_graph(pair: Pair, case: Case, new_tokens: int) -> Call:
    """Without graphs."""
    return _decode(pair, case, new_tokens, pair.draft, use_graph=False)


def on_reference(pair: Pair, case: Case, new_tokens: int) -> Call:
    """With the PyTorch twins of our kernels."""
    with _backend("reference"):
        return _decode(pair, case, new_tokens, pair.draft, use_graph=False)


def autoregressive(pair: Pair, case: Case, new_tokens: int) -> Call:
    """A smaller causal model drafts; without the off-switch, which would soon leave nothing of it to see."""
    if pair.assistant is None:
        raise ValueError(pair.why_no_assistant)
    drafter = AutoregressiveDrafter(pair.assistant, block_size=pair.assistant_drafts)
    return _decode(pair, case, new_tokens, drafter, off_switch=False)


def notebook(pair: Pair, case: Case, new_tokens: int) -> Call:
    """The target behind its own cache, cropped; the drafter over the whole context every round."""
    return _reference_loop(pair, case, new_tokens, cached=True)


def no_cache(pair: Pair, case: Case, new_tokens: int) -> Call:
    """The same, the target reading the whole text every round."""
    return _reference_loop(pair, case, new_tokens, cached=False)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def needs_graphs(pair: Pair, batch: int) -> str | None:
    """Without a GPU there are none to do without."""
    return None if pair.model.device.type == "cuda" else "on a CPU none of ours uses graphs"


def needs_kernels(pair: Pair, batch: int) -> str | None:
    """Without a GPU every way of ours runs on the reference ops."""
    return None if pair.model.device.type == "cuda" else "on a CPU all of ours run on the reference ops"


def needs_packing(pair: Pair, batch: int) -> str | None:
    """Where nothing is packed there is nothing to leave out."""
    there = pair.model.device.type == "cpu" and supported()
    return None if there else "weights are packed on a CPU that multiplies bf16 alone"


def needs_assistant(pair: Pair, batch: int) -> str | None:
    """Without a smaller model nothing drafts."""
    return pair.why_no_assistant if pair.assistant is None else None


def notebook_takes(pair: Pair, batch: int) -> str | None:
    """It is written for one row."""
    return None if batch == 1 else f"the notebook's loop decodes one row, not {batch}"


# --- how --------------------------------------------------------------------------------------------------------------


def _decode(pair: Pair, case: Case, new_tokens: int, drafter: Any, **options: Any) -> Call:
    common = settings(case, pair.model.device, new_tokens)
    alone = len(case.rows) == 1

    def decode(streamer: Any) -> torch.Tensor:
        # Rows of a batch advance at their own pace, so several take no streamer.
        given = {"streamer": streamer} if alone else {}
        return generation.generate(pair.model, drafter, **common, **given, **options)

    call, output, _ = timed(decode, common["input_ids"])
    stats: Stats = output.stats
    if not alone:
        # All that is no prefill, as the baseline's is: the loop's own time too.
        call.first, call.counted = stats.seconds.prefill, new_tokens - 1
        call.after = call.seconds - call.first - stats.seconds.compilation
    call.compiling = stats.seconds.compilation
    call.rounds = rounds_of(stats)
    return call


def rounds_of(stats: Stats) -> Rounds:
    """What a call's figures say of its rounds."""
    seconds, lengths = stats.seconds, stats.acceptance_lengths
    drafting, verifying, together = seconds.draft, seconds.verify, seconds.draft + seconds.verify
    if seconds.graph:  # a graph is one figure, of which plain steps cannot be told apart either
        drafting = verifying = None
        together = 0.0 if stats.plain_steps else seconds.graph
    return Rounds(
        rounds=stats.rounds,
        row_rounds=sum(map(len, lengths)),
        committed=sum(map(sum, lengths)),
        proposed=list(stats.proposed),
        accepted=list(stats.accepted),
        drafting=drafting,
        verifying=verifying,
        together=together,
        plain_steps=stats.plain_steps,
        plain=seconds.plain,
    )


def _reference_loop(pair: Pair, case: Case, new_tokens: int, *, cached: bool) -> Call:
    ids = case.inputs(pair.model.device)["input_ids"]
    waiting(ids.device)()
    found = by_reference(pair.model, pair.draft, ids, new_tokens, cached=cached)
    block, clocked = pair.draft.config.block_size, ids.device.type == "cpu"
    rounds = Rounds(
        rounds=found.rounds,
        row_rounds=found.rounds,
        committed=sum(found.accepted) + found.rounds,
        proposed=[found.rounds] * block,
        accepted=[sum(one > slot for one in found.accepted) for slot in range(block)],
        drafting=found.drafting if clocked else None,
        verifying=found.verifying if clocked else None,
        together=found.drafting + found.verifying if clocked else 0.0,
    )
    return Call(found.tokens.cpu(), found.first + found.seconds, found.first, found.seconds, new_tokens - 1, rounds)


@contextmanager
def _backend(name: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
