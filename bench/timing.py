"""The one timer of the microbenchmarks.

On a GPU a call is captured in a CUDA graph where it can be and replayed. Before every replay a buffer of four times the
L2 is written, so the replay finds its inputs in memory and not in the cache; CUDA events stand around the replay alone.
(Like ``triton.testing.do_bench``, which flushes but times launches from Python, and ``do_bench_cudagraph``, which
captures but does not flush.) While the GPU writes the buffer the host queues the replay, so no launch from Python is in
the time. What starting a graph costs is in it: ``roofline.py`` measures that with this same timer, on a graph that
does next to nothing. A call that waits for the host cannot be captured: it is timed between the same events as
a plain call and its row says so.

On a CPU a call is timed with a wall clock; nothing is flushed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

GRAPH = "graph"
FLUSH_BYTES = 256 * 2**20  # at least; takes longer than the host needs to queue a replay
BACK_TO_BACK = 10


class Timing(NamedTuple):
    """Microseconds of one call."""

    median_us: float
    quartiles_us: tuple[float, float]
    fastest_us: float
    samples: int
    back_to_back_us: float | None  # mean of calls one after another inside one graph, L2 as they leave it


class Ready(NamedTuple):
    """A call that is warmed up, and captured if it can be."""

    call: Callable[[], Any]
    run: Callable[[], Any]  # the replay, or the call itself
    out: Any  # what ``run`` last gave; a replay writes it again in place
    how: str  # "graph", or what was timed instead and why


def ready(call: Callable[[], Any], device: torch.device) -> Ready:
    """Warm ``call`` up and capture it. ``out`` comes from a replay where there is one."""
    if device.type != "cuda":
        return Ready(call, call, call(), "call, wall clock")
    _warm_up(call)
    reason = _waits_for_host(call)
    if reason is None:
        try:
            graph, out = _capture(call, 1)
            graph.replay()
            torch.cuda.synchronize()
            return Ready(call, graph.replay, out, GRAPH)
        except RuntimeError as error:
            reason = f"capture failed: {_first_line(error)}"
            torch.cuda.synchronize()
    return Ready(call, call, call(), f"call, not captured: {reason}")


def measure(prepared: Ready, device: torch.device, seconds: float = 0.2) -> Timing:
    """Median and spread of ``prepared``, within about ``seconds``."""
    if device.type != "cuda":
        return _wall_clock(prepared.run, seconds)
    for _ in range(200):  # some 15 ms of work: a GPU that idled takes milliseconds to speed up
        _flush_buffer(device).zero_()
    times = _events(prepared.run, device, 3)
    estimate = statistics.median(times) + _flush_us(device)
    times = _events(prepared.run, device, min(max(int(seconds * 1e6 / estimate), 5), 300))
    back_to_back = None
    if prepared.how == GRAPH and statistics.median(times) < 2000:
        back_to_back = _back_to_back(prepared.call)
    return _summary(times, back_to_back)


def synced(prepared: Ready, device: torch.device) -> Callable[[], Any]:
    """``prepared.run`` that returns when the work is done, for a timer that knows nothing of GPUs."""
    if device.type != "cuda":
        return prepared.run

    def run() -> None:
        prepared.run()
        torch.cuda.synchronize()

    return run


def _warm_up(call: Callable[[], Any]) -> None:
    """On another stream, as capturing asks for: compiles kernels, makes handles and workspaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _waits_for_host(call: Callable[[], Any]) -> str | None:
    """Why ``call`` cannot be captured. Asked first because a capture that breaks leaves torch's generator unusable."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except Exception as error:
        return "it waits for the host" if "synchroniz" in str(error) else _first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return None


def _capture(call: Callable[[], Any], times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # a kernel that is collected unloads its module, which a capture forbids
    try:
        with torch.cuda.graph(graph):
            for _ in range(times):
                out = call()
    finally:
        if collecting:
            gc.enable()
    return graph, out


def _events(run: Callable[[], Any], device: torch.device, count: int) -> list[float]:
    flush = _flush_buffer(device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def _back_to_back(call: Callable[[], Any]) -> float | None:
    try:
        graph, _ = _capture(call, BACK_TO_BACK)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(10):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / BACK_TO_BACK)
    return statistics.median(times)


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> torch.Tensor:
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return torch.empty(max(4 * cache, FLUSH_BYTES) // 4, dtype=torch.int32, device=device)


@lru_cache(maxsize=1)
def _flush_us(device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    _flush_buffer(device).zero_()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _wall_clock(run: Callable[[], Any], seconds: float) -> Timing:
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 300):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return _summary(times, None)


def _summary(times: list[float], back_to_back: float | None) -> Timing:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(middle, (low, high), min(times), len(times), back_to_back)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
