"""The decoding loop: rounds until every row is done, each row at its own pace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from dspark_fast.capacity import room
from dspark_fast.drafters import Drafter
from dspark_fast.outputs import Outputs
from dspark_fast.reader import OnCommit, Reader
from dspark_fast.round import Round, Sampling
from dspark_fast.state import DecodingState, Limits
from dspark_fast.stats import Clock, Stats
from dspark_fast.switch import Switch
from dspark_fast.target import driven

if TYPE_CHECKING:
    from dspark_fast.stopping import Stopping


@dataclass
class Plan:
    """What a call is to do, besides whose prompts.

    Attributes:
        sampling: how tokens are chosen.
        limits: when a row ends.
        stopping: criteria that only the host can judge; None if there are none.
        outputs: collects scores and the like; None if none are wanted.
        switch: turns speculation off while it loses; None never does.
        on_commit: called after every commit. An exception in it, or an interrupt, leaves the model as it was.
    """

    sampling: Sampling
    limits: Limits
    stopping: Stopping | None = None
    outputs: Outputs | None = None
    switch: Switch | None = None
    on_commit: OnCommit = field(default=lambda rows: None)


def decode(
    model: PreTrainedModel, drafter: Drafter, prompts: torch.Tensor, prompt_lengths: torch.Tensor, plan: Plan
) -> tuple[DecodingState, Stats]:
    """Decode a batch to its end.

    Lossless: greedy and coupled output is what the target alone would give; rejection output has its distribution.

    Args:
        model: the target, in eval mode.
        drafter: proposes; see :class:`~dspark_fast.drafters.Drafter`.
        prompts: int64 ``[B, S]``, packed to slot 0.
        prompt_lengths: int64 ``[B]``, at least 1 each.
        plan: everything else.

    Returns:
        The final state and the figures.

    Raises:
        FloatingPointError: if logits that are needed are NaN, naming row and position.
    """
    batch, width = prompts.shape
    block, noise = drafter.block_size, plan.sampling.noise
    # The last round begins one token short of the end and writes a block behind that.
    most = width + plan.limits.new_tokens + block + 1
    capacity = room(width + block + 2, most)
    state = DecodingState(prompts, prompt_lengths, plan.limits, block, capacity)
    stats = Stats(batch, noise.mode, noise.seed.tolist(), block)
    reader = Reader(state, stats, lag=0, stopping=plan.stopping, on_commit=plan.on_commit)
    clock = Clock(stats.seconds, prompts.device)

    with driven(model, drafter.target_layer_ids, batch, capacity) as target:
        drafter.begin(batch, capacity, prompts.device)
        rounds = Round(target, drafter, state, plan.sampling, plan.outputs, clock)
        rounds.prefill(prompts, prompt_lengths)
        reader.queue(None)
        with clock.part("bookkeeping"):
            reader.read()
        started = time.perf_counter()
        while not reader.done:
            drafting = plan.switch is None or plan.switch.drafts()
            # Keys of the longest row after this round: rounds that were not read may have taken all they drafted.
            end = max(reader.lengths) + (reader.unread + 1) * (block + 1) - 1
            if end + 1 > state.capacity and state.capacity < most:
                for grown in (state, target, drafter):
                    grown.grow(room(end + block + 1, most))
            rounds.run(min(end, state.capacity), drafting=drafting)
            reader.queue(drafting)
            with clock.part("bookkeeping" if drafting else "plain"):
                heard = reader.read()
            now = time.perf_counter()
            if plan.switch is not None:
                for drafted, tokens in heard:
                    plan.switch.note(drafted, now - started, tokens)
            started = now
        reader.read(all_of_it=True)
    stats.capacity = state.capacity
    stats.memory = {"target": target.memory, "drafter": drafter.memory}
    stats.pauses = plan.switch.pauses if plan.switch is not None else 0
    # What stop strings cut off is no part of the output.
    state.lengths = torch.tensor(reader.lengths, device=state.lengths.device)
    return state, stats
