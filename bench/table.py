"""Cases and providers of one op, run side by side: first checked against the reference, only then timed.

Where our kernel does not compute what the reference does, nothing is reported: no file, and an exit status of 1.
Another provider that differs is not timed, and is listed among what was left out.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from timing import Ready, measure, ready

OURS = "dspark-fast"
EAGER = "reference, eager"
COMPILED = "reference, compiled"
PLAIN = "plain torch, compiled"
LAUNCH_US = 2.0  # assumed in every prediction; roofline.json has what was measured


class Case(NamedTuple):
    """One shape of one mode. ``bytes`` (that anyone must move) and ``launches`` are counted before anything runs."""

    name: str
    shape: dict[str, Any]
    build: Callable[[torch.device], Any]
    bytes: int
    launches: int
    memory: int  # bytes on the device while it runs, roughly: a case that does not fit is left out
    compiled: bool = False  # whether providers that need seconds to compile run on it
    own: int = 0  # bytes that our kernel moves besides: in its prediction, not in any percentage


class Verdict(NamedTuple):
    """Whether two results are equal, and in which sense."""

    equal: bool
    note: str


class Provider(NamedTuple):
    """One way to do the op. ``prepare(inputs)`` gives the call to be timed; ``why_not`` says why a case is left out."""

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    why_not: Callable[[Case, torch.device], str | None] = lambda case, device: None
    same: bool = True  # claims to compute what the reference does; otherwise ``differs`` says what it does
    differs: str = ""
    compiles: int = 0  # 1 or 2: needs seconds to compile, so it runs behind everything else, the 1s before the 2s
    bytes: Callable[[Case], int] | None = None  # of its own, where a prediction for it can be made
    launches: int = 0


class Goal(NamedTuple):
    """A goal set before the run. ``value(rows)`` is None where it was not measured."""

    text: str
    value: Callable[[list[dict[str, Any]]], float | None]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    def reached(self, value: float) -> bool:
        """Whether ``value`` meets it."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)


class Bench(NamedTuple):
    """One op: ``cases(scale)`` with scale "gpu", "cpu" or "tiny"; the first cases are the ones that goals are about."""

    op: str
    cases: Callable[[str], list[Case]]
    providers: list[Provider]
    expect: Callable[[Any], Any]  # what the reference gives, with all that ``equal`` wants to see
    equal: Callable[[Any, Any, Any], Verdict]  # inputs, result, expected
    goals: list[Goal]
    notes: list[str]


@dataclass
class Outcome:
    """What one run found."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # where our kernel is wrong or fails
    stopped: str = ""  # why the run ended early


class TimeUp(BaseException):
    """Told to stop. Not an Exception: a compiler that catches those must not catch this."""


class Slow(TimeUp):
    """One provider took too long; the run goes on without it."""


def run(
    bench: Bench,
    scale: str,
    device: torch.device,
    rate: float,
    *,
    budget: float,
    compile_limit: float = 40.0,
    compiled: bool = True,
    seconds: float = 0.2,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Run every case with every provider, those that compile last, until ``budget`` seconds are over.

    ``rate`` is the copy rate in bytes per microsecond, ``seconds`` what timing one row may take.
    """
    outcome = Outcome()
    end = time.monotonic() + budget
    try:
        for compiling in (0, 1, 2):
            providers = [provider for provider in bench.providers if provider.compiles == compiling]
            for case in bench.cases(scale):
                reason = None
                if compiling and not (case.compiled and compiled):
                    reason = "compiles: run on a few shapes only" if compiled else "compiles: not asked for here"
                reason = reason or _does_not_fit(case, device)
                if time.monotonic() > end:
                    reason = f"the time budget of {budget:.0f} s was over"
                if reason:
                    outcome.left_out += [_left_out(case, provider, reason) for provider in providers]
                    continue
                _run_case(bench, case, providers, device, rate, outcome, end, compile_limit, seconds, say)
    except (KeyboardInterrupt, TimeUp) as error:
        outcome.stopped = f"stopped early: {error or type(error).__name__}"
    return outcome


def _run_case(
    bench: Bench,
    case: Case,
    providers: list[Provider],
    device: torch.device,
    rate: float,
    outcome: Outcome,
    end: float,
    compile_limit: float,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    inputs = expected = None
    for provider in providers:
        reason = provider.why_not(case, device)
        if reason is None and time.monotonic() > end:
            reason = "the time budget was over"
        if reason:
            outcome.left_out.append(_left_out(case, provider, reason))
            continue
        if inputs is None:
            inputs = case.build(device)
            expected = bench.expect(inputs)
        try:
            limit = compile_limit if provider.compiles else 60.0
            with time_limit(min(limit, max(end - time.monotonic(), 0) + 5)):
                prepared, verdict = prepare(bench, provider, inputs, expected, device)
            if verdict.equal:
                timing = measure(prepared, device, seconds)
        except Slow as error:
            if provider.compiles:
                torch._dynamo.reset()
            outcome.left_out.append(_left_out(case, provider, str(error)))
            continue
        except Exception as error:
            note = f"failed: {type(error).__name__}: {(str(error) or '-').strip().splitlines()[0][:200]}"
            if provider.name == OURS:
                outcome.refused.append(f"{case.name}: {note}")
            outcome.left_out.append(_left_out(case, provider, note))
            say(f"  {case.name} | {provider.name} | {note}")
            if not _alive(device):
                raise TimeUp("the device does not answer after this failure") from error
            continue
        if not verdict.equal:
            if provider.name == OURS:
                outcome.refused.append(f"{case.name}: {verdict.note}")
            outcome.left_out.append(_left_out(case, provider, f"not equal, so not timed: {verdict.note}"))
            say(f"  {case.name} | {provider.name} | NOT EQUAL: {verdict.note}")
            continue
        row = make_row(bench, case, provider, prepared, verdict, timing, rate)
        outcome.rows.append(row)
        say(f"  {case.name} | {provider.name} | {row['median_us']:.1f} us | {row['timed']} | {row['equality']}")
        del prepared
    del inputs, expected
    if device.type == "cuda":
        torch.cuda.empty_cache()


def prepare(
    bench: Bench, provider: Provider, inputs: Any, expected: Any, device: torch.device
) -> tuple[Ready, Verdict]:
    """The provider's call, warmed up and captured, and whether what it gives (from a replay, if captured) is equal."""
    prepared = ready(provider.prepare(inputs), device)
    if not provider.same:
        return prepared, Verdict(True, f"not compared: {provider.differs}")
    return prepared, bench.equal(inputs, prepared.out, expected)


def make_row(
    bench: Bench, case: Case, provider: Provider, prepared: Ready, verdict: Verdict, timing: Any, rate: float
) -> dict[str, Any]:
    """A row of the table. Predictions come from the bytes model and the copy rate alone, never from the timing."""
    predicted = None
    if provider.name == OURS:
        predicted = (case.bytes + case.own) / rate + LAUNCH_US * case.launches
    elif provider.bytes is not None:
        predicted = provider.bytes(case) / rate + LAUNCH_US * provider.launches
    return {
        "op": bench.op,
        "case": case.name,
        **case.shape,
        "provider": provider.name,
        "predicted_us": None if predicted is None else round(predicted, 2),
        "median_us": round(timing.median_us, 2),
        "quartiles_us": [round(value, 2) for value in timing.quartiles_us],
        "fastest_us": round(timing.fastest_us, 2),
        "back_to_back_us": None if timing.back_to_back_us is None else round(timing.back_to_back_us, 2),
        "samples": timing.samples,
        "bytes": case.bytes,
        "percent_of_copy_rate": round(100 * case.bytes / timing.median_us / rate, 1),
        "timed": prepared.how,
        "equality": verdict.note,
    }


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Slow inside the block after ``seconds``; only in the main thread, where signals arrive."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise Slow(f"took over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def kernel_why_not(case: Case, device: torch.device) -> str | None:
    """Why our kernel is left out: there is no GPU. Any other reason is a failure, not a reason."""
    return None if device.type == "cuda" else "Triton kernels are timed on a GPU only"


def installed_why_not(package: str) -> Callable[[Case, torch.device], str | None]:
    """``why_not`` of a provider that needs ``package`` and a GPU."""
    import importlib.util

    missing = importlib.util.find_spec(package) is None

    def why_not(case: Case, device: torch.device) -> str | None:
        if missing:
            return f"{package} is not installed"
        return None if device.type == "cuda" else f"{package} needs a GPU"

    return why_not


def _does_not_fit(case: Case, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    if case.memory < 0.8 * free:
        return None
    return f"needs about {case.memory / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free"


def _alive(device: torch.device) -> bool:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _left_out(case: Case, provider: Provider, why: str) -> dict[str, str]:
    return {"case": case.name, "provider": provider.name, "why": why}
