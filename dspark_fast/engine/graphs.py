"""Rounds as CUDA graphs: captured once per kind of call, replayed without the host, kept for the next call like it."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from dspark_fast.backend import choose
from dspark_fast.drafters import Drafter
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.capacity import check_memory
from dspark_fast.engine.round import Round, Sampling
from dspark_fast.engine.state import DecodingState, Limits

#: Workspaces that are kept, least recently used dropped first. Each holds the K/V of its batch and capacity.
MOST_KEPT = 4

Replay = Callable[[], None]


def capture(work: Callable[[], None]) -> Replay:
    """Record what ``work`` launches, without running it; the replay launches it again on the same memory."""
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    # A kernel or a graph that is collected during a capture breaks it. cuBLAS would share a workspace among all graphs
    # of a stream, which dropping one of them frees (pytorch#193402).
    gc.collect()
    gc.disable()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            work()
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collecting:
            gc.enable()
    return graph.replay


def waits(work: Callable[[], None]) -> str | None:
    """Run ``work``; where it waited for the GPU, or None if it did not. A capture that meets a wait is lost."""
    if not torch.cuda.is_available():
        return work()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [one for one in heard if "synchroniz" in str(one.message)]
    return f"{found[0].filename}:{found[0].lineno} waits for the GPU" if found else None


@dataclass
class Workspace:
    """The tensors of a call, which its graphs hold by address, and the graphs.

    Attributes:
        most: tokens per row that it may ever need.
        strict: raise if a round cannot be captured.
        recorder: turns a function into its replay.
        replays: by whether the round drafts.
        refused: why rounds could not be captured; None if they could.
        passing: whether another call may fare better.
    """

    state: DecodingState
    cache: RaggedCache
    drafter: Drafter
    sampling: Sampling
    most: int
    strict: bool = False
    recorder: Callable[[Callable[[], None]], Replay] = capture
    replays: dict[bool, Replay] = field(default_factory=dict)
    refused: str | None = None
    passing: bool = False
    done: torch.cuda.Event | None = None
    _warm: set[bool] = field(default_factory=set)

    def restart(self, prompts: torch.Tensor, lengths: torch.Tensor, limits: Limits, sampling: Sampling) -> None:
        """Make it the next call's, in place. Old keys and values stay where no row's length reaches."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.state.restart(prompts, lengths, limits)
        self.cache.lengths.zero_()
        self.drafter.restart()
        self.sampling.copy_(sampling)

    def run(self, rounds: Round, *, drafting: bool) -> None:
        """One round. The first of its kind compiles kernels, the second is watched, and recorded for those after it.

        Raises:
            RuntimeError: if it cannot be recorded and ``strict`` is set.
        """
        if drafting in self.replays:
            self.replays[drafting]()
            return

        def once() -> None:
            rounds.run(None, drafting=drafting)

        if drafting not in self._warm or self.refused is not None:
            self._warm.add(drafting)
            once()
            return
        self.refused = waits(once)
        if self.refused is None:
            try:
                self.replays[drafting] = self.recorder(once)
            except RuntimeError as error:
                self.passing = isinstance(error, torch.cuda.OutOfMemoryError)
                self.refused = str(error).strip().splitlines()[0]
        if self.refused is not None and self.strict:
            raise RuntimeError(f"use_graph is True, but a round cannot be captured: {self.refused}")


_kept: OrderedDict[Hashable, Workspace] = OrderedDict()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_refused: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a garbage collection under it may call _forget


def obstacle(model: nn.Module, drafter: Drafter, device: torch.device) -> str | None:
    """Why a call on ``device`` cannot be captured; None if it can."""
    if device.type != "cuda":
        return f"the target is on {device}: only a GPU has CUDA graphs"
    if not hasattr(drafter, "capturable"):
        return f"the drafter is a {type(drafter).__name__}, whose rounds may ask the host"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the target is spread over several devices"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "the target has forward hooks, which a graph would not run"
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        return "the target has adapters, which may be switched where a graph would not notice"
    if choose(None, torch.empty(0, device=device)) != "kernel":
        return "the kernels do not run there, and the reference asks the host"
    return _refused.get(model)


def key_of(
    model: nn.Module, drafter: Drafter, sampling: Sampling, state: tuple[int, int, int], *, compiled: bool = False
) -> tuple[Hashable, ...]:
    """What two calls must have in common to share a workspace; ``state`` is batch, capacity and number of stop tokens.

    The weights' addresses are part of it: a graph reads those places, whatever a module points to later.
    """
    places = hash(tuple(one.data_ptr() for one in (*model.parameters(), *model.buffers())))
    modes = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    return (id(model), places, *state, drafter.capturable, sampling.kind, model.training, modes, compiled)


def take(key: Hashable) -> Workspace | None:
    """The workspace kept under ``key``, which is the caller's until it is given back; None if there is none."""
    with _lock:
        return _kept.pop(key, None)


def give_back(key: tuple[Hashable, ...], workspace: Workspace, model: nn.Module) -> None:
    """Keep a workspace for the next call; the least recently used beyond :data:`MOST_KEPT` are dropped."""
    if workspace.state.tokens.is_cuda:  # the next call may be on another stream
        workspace.done = torch.cuda.Event()
        workspace.done.record()
    with _lock:
        _kept[key] = workspace
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
        if model not in _watched:
            _watched.add(model)
            weakref.finalize(model, _forget, id(model))


def refuse(model: nn.Module, reason: str) -> None:
    """Remember that rounds of ``model`` cannot be captured."""
    _refused[model] = reason


def make_room(model: nn.Module, batch: int, capacity: int) -> None:
    """Check that caches of this size fit the GPU, without what is kept of other calls if need be.

    Raises:
        ValueError: see :func:`~dspark_fast.engine.capacity.check_memory`.
    """
    try:
        check_memory(model, batch, capacity)
    except ValueError:
        clear_graphs()
        check_memory(model, batch, capacity)


def clear_graphs() -> None:
    """Drop all captured graphs, and with them the GPU memory that is kept for the next call."""
    with _lock:
        _kept.clear()
        _refused.clear()


def _forget(model: int) -> None:
    with _lock:
        for key in [key for key in _kept if key[0] == model]:
            del _kept[key]
