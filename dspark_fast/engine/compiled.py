"""Passes over a block, the target's and the drafter's, compiled by us and kept where that is faster."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

#: Pairs of a plain and a compiled pass that are timed, alternately, to choose.
PAIRS = 5

#: Shapes that one process may have compiled (batches, capacities, models); torch's own bound of 8 would raise.
MOST = 64

Pass = Callable[[], object]

_faster: WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = WeakKeyDictionary()


def hindrance(model: nn.Module) -> str | None:
    """Why passes of ``model`` cannot be compiled here; None if they can."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "the target has forward hooks, which a compiled pass would not run"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the target is spread over several devices"
    if any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    ):
        return "parts of the target are compiled already"
    return None


def modes(model: nn.Module) -> tuple[Hashable, ...]:
    """What a compiled pass has baked in besides shapes."""
    kind = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    packed = any("forward" in vars(module) for module in model.modules())
    return torch.is_inference_mode_enabled(), autocast, model.training, packed


@contextmanager
def compiling() -> Iterator[None]:
    """Around rounds of compiled passes: elsewhere in a call everything runs eagerly.

    To be entered once a call: before every pass it is a share of the round.
    """
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(recompile_limit=MOST):
        yield


def chosen(model: nn.Module, shape: Hashable, plain: Pass, compiled: Pass, *, what: str, worth: float = 1.0) -> bool:
    """Whether ``compiled`` is the faster pass; compiles it at the first question about a shape.

    Both are run, so they must be such that running them again changes nothing. What cannot be compiled is not faster,
    with a warning that says why.

    Args:
        model: whose passes they are.
        shape: everything that a compiled pass depends on, but for :func:`modes`.
        what: the pass, for the warning.
        worth: how many times as fast it must be.
    """
    known, shape = _faster.setdefault(model, {}), (what, shape, *modes(model))
    if shape not in known:
        try:
            with compiling():
                compiled()
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"{what} cannot be compiled and runs plainly: {reason}", stacklevel=2)
            known[shape] = False
            return False
        device = next(model.parameters()).device
        with compiling():
            pairs = [(_seconds(plain, device), _seconds(compiled, device)) for _ in range(PAIRS)]
        known[shape] = statistics.median(one / other for one, other in pairs) > worth
    return known[shape]


def _seconds(work: Pass, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
