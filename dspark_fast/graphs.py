"""Rounds as CUDA graphs: captured once per kind of call, replayed without the host, kept for the next call like it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from dspark_fast.backend import choose
from dspark_fast.cache import RaggedCache
from dspark_fast.drafters import Drafter
from dspark_fast.round import Round, Sampling
from dspark_fast.state import DecodingState, Limits

#: Workspaces that are kept, least recently used dropped first. Each holds the K/V of its batch and capacity.
MOST_KEPT = 4

Replay = Callable[[], None]


def capture(work: Callable[[], None]) -> Replay:
    """Record what ``work`` launches, without running it; the replay launches it again on the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@dataclass
class Workspace:
    """The tensors of a call, which its graphs hold by address, and the graphs.

    Attributes:
        most: tokens per row that it may ever need.
        recorder: turns a function into its replay.
        replays: by whether the round drafts.
    """

    state: DecodingState
    cache: RaggedCache
    drafter: Drafter
    sampling: Sampling
    most: int
    recorder: Callable[[Callable[[], None]], Replay] = capture
    replays: dict[bool, Replay] = field(default_factory=dict)

    def restart(self, prompts: torch.Tensor, lengths: torch.Tensor, limits: Limits, sampling: Sampling) -> None:
        """Make it the next call's, in place. Old keys and values stay where no row's length reaches."""
        self.state.restart(prompts, lengths, limits)
        self.cache.lengths.zero_()
        self.drafter.restart()
        self.sampling.copy_(sampling)

    def run(self, rounds: Round, *, drafting: bool) -> None:
        """One round. The first of its kind runs eagerly, which compiles kernels, and is recorded for those after it."""
        if drafting in self.replays:
            self.replays[drafting]()
            return
        rounds.run(None, drafting=drafting)
        self.replays[drafting] = self.recorder(lambda: rounds.run(None, drafting=drafting))


def obstacle(model: nn.Module, drafter: Drafter, device: torch.device) -> str | None:
    """Why a call on ``device`` cannot be captured; None if it can."""
    if device.type != "cuda":
        return f"the target is on {device}: only a GPU has CUDA graphs"
    if not hasattr(drafter, "capturable"):
        return f"the drafter is a {type(drafter).__name__}, whose rounds may ask the host"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the target is spread over several devices"
    if choose(None, torch.empty(0, device=device)) != "kernel":
        return "the kernels do not run there, and the reference asks the host"
    return None


def key_of(model: nn.Module, drafter: Drafter, sampling: Sampling, state: tuple[int, int, int]) -> tuple[Hashable, ...]:
    """What two calls must have in common to share a workspace; ``state`` is batch, capacity and number of stop tokens.

    The weights' addresses are part of it: a graph reads those places, whatever a module points to later.
    """
    places = hash(tuple(one.data_ptr() for one in (*model.parameters(), *model.buffers())))
    return (id(model), places, *state, drafter.capturable, sampling.kind)


_kept: OrderedDict[Hashable, Workspace] = OrderedDict()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()


def take(key: Hashable) -> Workspace | None:
    """The workspace kept under ``key``, which is the caller's until it is given back; None if there is none."""
    with _lock:
        return _kept.pop(key, None)


def give_back(key: tuple, workspace: Workspace, model: nn.Module) -> None:
    """Keep a workspace for the next call; the least recently used beyond :data:`MOST_KEPT` are dropped."""
    with _lock:
        _kept[key] = workspace
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
        if model not in _watched:
            _watched.add(model)
            weakref.finalize(model, _forget, id(model))


def clear_graphs() -> None:
    """Drop all captured graphs, and with them the GPU memory that is kept for the next call."""
    with _lock:
        _kept.clear()


def _forget(model: int) -> None:
    with _lock:
        for key in [key for key in _kept if key[0] == model]:
            del _kept[key]
