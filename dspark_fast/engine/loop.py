"""The decoding loop: rounds until every row is done, each row at its own pace."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel, QuantizedCache

from dspark_fast.drafters import Drafter
from dspark_fast.engine import graphs
from dspark_fast.engine.attention import alone
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.capacity import bucket, room
from dspark_fast.engine.compiled import compiling
from dspark_fast.engine.graphs import Workspace
from dspark_fast.engine.outputs import Outputs
from dspark_fast.engine.own_past import OwnPast
from dspark_fast.engine.pace import Pace
from dspark_fast.engine.past import Past
from dspark_fast.engine.prepacked import prepacked, weights_of
from dspark_fast.engine.reader import OnCommit, Reader
from dspark_fast.engine.round import Round, Sampling
from dspark_fast.engine.state import DecodingState, Limits
from dspark_fast.engine.stopping import Stopping
from dspark_fast.engine.switch import Switch
from dspark_fast.engine.target import Target, driven
from dspark_fast.stats import Clock, Stats


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
        path: ``ragged`` or ``own``, as :func:`~dspark_fast.engine.eligibility.choose_target` says.
        graph: replay rounds as CUDA graphs; see :func:`dspark_fast.engine.graphs.obstacle` for when that works.
        compiled: compile the target's pass over a block, where that is faster; rounds then have fixed shapes.
        strict: raise if they cannot be captured after all; otherwise they run without.
        past: what is known of the prompts' beginnings; None if nothing is.
        quantised: an empty cache to drive the target behind, on the path ``own``; None for the model's own.
        prepacked: layers that run on packed weights.
        keep: hand back a :class:`~dspark_fast.engine.past.Past`.
    """

    sampling: Sampling
    limits: Limits
    stopping: Stopping | None = None
    outputs: Outputs | None = None
    switch: Switch | None = None
    on_commit: OnCommit = field(default=lambda rows: None)
    path: str = "ragged"
    graph: bool = False
    compiled: bool = False
    strict: bool = False
    past: Past | None = None
    quantised: QuantizedCache | None = None
    prepacked: list[nn.Linear] = field(default_factory=list)
    keep: bool = False


@dataclass
class Decoded:
    """What came of it.

    Attributes:
        rows: the new tokens of each row.
        stats: the figures.
        past: if it was to be kept.
    """

    rows: list[list[int]]
    stats: Stats
    past: Past | None


def decode(
    model: PreTrainedModel, drafter: Drafter, prompts: torch.Tensor, prompt_lengths: torch.Tensor, plan: Plan
) -> Decoded:
    """Decode a batch to its end.

    Lossless: greedy and coupled output is what the target alone would give; rejection output has its distribution.

    Args:
        model: the target, in eval mode.
        drafter: proposes; see :class:`~dspark_fast.drafters.Drafter`.
        prompts: int64 ``[B, S]``, packed to slot 0.
        prompt_lengths: int64 ``[B]``, at least 1 each.
        plan: everything else.

    Raises:
        FloatingPointError: if logits that are needed are NaN, naming row and position.
    """
    noise = plan.sampling.noise
    stats = Stats(len(prompts), noise.mode, noise.seed.tolist(), drafter.block_size, graph=plan.graph)
    stats.off_switch = plan.switch is not None
    clock = Clock(stats.seconds, prompts.device)
    # Events, streams and captures are of the current device, which need not be the target's.
    if plan.prepacked:
        stats.memory["packed"] = weights_of(plan.prepacked)
    with (
        alone(),
        prepacked(plan.prepacked),
        torch.cuda.device_of(prompts),
        _workspace(model, drafter, prompts, prompt_lengths, plan) as work,
    ):
        reader = Reader(work.state, stats, lag=int(plan.graph), stopping=plan.stopping, on_commit=plan.on_commit)
        cache = work.cache if plan.path == "ragged" else plan.quantised
        with driven(model, work.drafter.target_layer_ids, cache) as target, ExitStack() as stack:
            rounds = Round(target, work.drafter, work.state, work.sampling, plan.outputs, None if plan.graph else clock)
            with clock.part("prefill"):
                _prefill(rounds, work, prompts, prompt_lengths, plan.past, stats)
            reader.queue(None)
            with clock.part("bookkeeping"):
                reader.read(all_of_it=True)
            if plan.compiled and not reader.done:
                with clock.part("compilation"):
                    blocks = {work.drafter.block_size + 1, *([1] if plan.switch is not None else [])}
                    stats.compiled = target.compile(len(prompts), blocks, reader.longest)
                    if stats.compiled:
                        stack.enter_context(compiling())
                    # On a GPU the round is a graph, in which the drafter's kernels wait for nobody.
                    if stats.compiled and prompts.device.type == "cpu" and hasattr(work.drafter, "compile_block"):
                        work.drafter.compile_block(work.state.lengths - 1)
            leaving = _may_leave(plan, work.drafter, stats)
            # Where shapes are fixed there is one length.
            paced = plan.switch is not None and not (plan.graph or stats.compiled)
            pace, read = Pace(work.drafter.block_size) if paced else None, 0
            started = time.perf_counter()
            while not reader.done:
                drafting = plan.switch is None or plan.switch.drafts()
                if plan.graph:
                    work.run(rounds, drafting=drafting)
                else:
                    _make_room(work, target, reader.longest + work.drafter.block_size + 1)
                    most = None if pace is None else pace.drafts(len(work.state.lengths))
                    read = rounds.run(reader.reach, drafting=drafting, most=most)
                reader.queue(drafting)
                with rounds.part("bookkeeping" if drafting else "plain"):
                    heard = reader.read()
                now = time.perf_counter()
                if plan.graph:
                    stats.seconds.graph += now - started
                for one in heard:
                    if plan.switch is not None:
                        plan.switch.note(one.drafted, now - started, one.tokens)
                    if drafting and pace is not None:
                        pace.note(read, one.rows, now - started, one.kept)
                if leaving and not reader.done and (live := reader.leave()) is not None:
                    _weigh(stats, target, work.drafter)
                    rounds.select(torch.tensor(live, device=prompts.device))
                    if plan.switch is not None:
                        plan.switch.forget()
                    now = time.perf_counter()
                started = now
        if plan.keep:
            rounds.settle()
        stats.graph = plan.graph and work.refused is None
        stats.capacity = work.state.capacity
        _weigh(stats, target, work.drafter)
        stats.pauses = plan.switch.pauses if plan.switch is not None else 0
        kept = None
        if plan.keep and plan.path == "own":
            kept = OwnPast(target.state, work.state.tokens, getattr(work.drafter, "context", None), model)
        elif plan.keep:
            kept = _past(work, reader.lengths, model, copied=plan.graph)
        return Decoded(reader.rows, stats, kept)


def _weigh(stats: Stats, target: Target, drafter: Drafter) -> None:
    """Caches are largest before rows leave or after they have grown."""
    for name, one in (("target", target), ("drafter", drafter)):
        stats.memory[name] = max(one.memory, stats.memory.get(name, 0))


def _may_leave(plan: Plan, drafter: Drafter, stats: Stats) -> bool:
    """Whether finished rows can leave the batch: where shapes are fixed, or somebody keeps count of rows, they stay."""
    counted = plan.sampling.processors is not None or plan.outputs is not None or plan.keep
    return plan.path == "ragged" and not (plan.graph or stats.compiled or counted) and hasattr(drafter, "select")


def _prefill(
    rounds: Round,
    work: Workspace,
    prompts: torch.Tensor,
    prompt_lengths: torch.Tensor,
    past: Past | None,
    stats: Stats,
) -> None:
    """Read the prompts, or what of them is not known yet."""
    if past is None:
        rounds.prefill(prompts, prompt_lengths)
        return
    known = past.common(prompts, prompt_lengths)
    if not isinstance(past, OwnPast):
        work.cache.copy_(past.cache, known)
    elif known.any():
        rounds.target.resume(past.state())
    if hasattr(work.drafter, "resume"):
        work.drafter.resume(past.context, known)
    stats.reused = known.tolist()
    stats.absent = work.drafter.context.absent.tolist() if hasattr(work.drafter, "context") else stats.reused
    counts = prompt_lengths - known
    slots = known[:, None] + torch.arange(int(counts.max()), device=prompts.device)
    rounds.prefill(prompts.gather(1, slots.clamp(max=prompts.shape[1] - 1)), counts)


def _make_room(work: Workspace, target: Target, tokens: int) -> None:
    """Grow everything of the call, by so much that it is seldom."""
    if tokens > work.state.capacity:
        for grown in (work.state, target, work.drafter):
            grown.grow(room(tokens + work.drafter.block_size, work.most))


def _past(work: Workspace, lengths: list[int], model: PreTrainedModel, *, copied: bool) -> Past:
    """What is known of each row's first ``lengths`` tokens but the last, which the target has not read."""
    # What stop strings cut off is not part of it.
    known = torch.tensor(lengths, device=work.cache.lengths.device) - 1
    cache, tokens, context = work.cache, work.state.tokens, getattr(work.drafter, "context", None)
    if copied:  # the next call of the same kind will overwrite them
        cache = RaggedCache(len(cache.layers), len(known), bucket(max(lengths)), known.device)
        cache.copy_(work.cache, known)
        tokens, context = tokens.clone(), None if context is None else context.clone()
    else:
        cache.lengths.copy_(known)
    return Past(cache, tokens, context, model)


@contextmanager
def _workspace(
    model: PreTrainedModel, drafter: Drafter, prompts: torch.Tensor, prompt_lengths: torch.Tensor, plan: Plan
) -> Iterator[Workspace]:
    """The call's tensors: new ones that can grow; or all that it may need, for graphs kept from a call like it."""
    (batch, width), block, limits = prompts.shape, drafter.block_size, plan.limits
    # The last round begins one token short of the end and writes a block behind that.
    most = width + limits.new_tokens + block + 1
    capacity, sampling, key = room(width + block + 2, most), plan.sampling, None
    if plan.graph or plan.compiled:
        capacity = bucket(most)
    if plan.graph:
        sampling = sampling.per_row()
        key = graphs.key_of(
            model, drafter, sampling, (batch, capacity, len(limits.stop_tokens)), compiled=plan.compiled
        )
    work = graphs.take(key) if plan.graph else None
    if plan.graph and work is None and prompts.is_cuda:
        try:
            graphs.make_room(model, batch, capacity)
        except ValueError:
            if plan.strict:
                raise
            plan.graph, plan.compiled = False, False  # both need all of the room at once
            capacity, sampling = room(width + block + 2, most), plan.sampling
    if work is not None:
        work.restart(prompts, prompt_lengths, limits, sampling)
        work.strict = plan.strict
    else:
        if plan.graph:
            drafter = copy.copy(drafter)  # its tensors stay with the workspace, whatever else it is used for
        drafter.begin(batch, capacity, prompts.device)
        state = DecodingState(prompts, prompt_lengths, limits, block, capacity)
        cache = RaggedCache.for_model(model, batch, capacity)
        work = Workspace(state, cache, drafter, sampling, most, strict=plan.strict)
    yield work
    if plan.graph and work.refused is None:  # nor after an exception: what is cached then may be NaN
        graphs.give_back(key, work, model)
    elif plan.graph and not work.passing:
        graphs.refuse(model, work.refused)
