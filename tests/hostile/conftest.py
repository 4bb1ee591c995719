"""What each hostile case must come to: a clear error or a right result, soon, in little memory, the model as before.

A test counts a case by each call of ``attempt``; the sum is printed at the end.
"""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir

import dspark_fast

try:
    import resource
except ImportError:  # Windows
    resource = None

set_hypothesis_home_dir(tempfile.gettempdir())
settings.register_profile(
    "hostile",
    derandomize=True,
    deadline=None,  # attempt() measures, in CPU time: it does not hang on who else uses the machine
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# StrictDataclassError is what transformers' configurations raise; it names the field.
CLEAR = (ValueError, TypeError, OSError, FloatingPointError, IndexError, OverflowError, NotImplementedError)
CLEAR += (StrictDataclassError,)
SECONDS = 1.0
WALL = 30.0
ROOM = 512 * 2**20  # bytes beyond what the process has: of address space, so that memory never touched counts too
CASES = pytest.StashKey[int]()
OURS = tuple(inspect.signature(dspark_fast.decoding).parameters)[1:]


class TooLong(BaseException):
    """No handler of the package may take it for an error of its own."""


@contextmanager
def limits():
    """A second of this process, half a minute of the clock, and ROOM."""

    def stop(*_):
        raise TooLong

    before = [signal.signal(one, stop) for one in (signal.SIGPROF, signal.SIGALRM)]
    room = resource and resource.getrlimit(resource.RLIMIT_AS)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + ROOM
        if room[0] in (resource.RLIM_INFINITY, -1) or room[0] > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, room[1]))
    # again and again: one that hits a callback of the garbage collector is only printed
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 0.2)
    signal.setitimer(signal.ITIMER_REAL, WALL, 0.2)
    try:
        yield
    except TooLong:
        raise AssertionError(f"it takes longer than {SECONDS} s") from None
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for one, handler in zip((signal.SIGPROF, signal.SIGALRM), before):
            signal.signal(one, handler)
        if room:
            resource.setrlimit(resource.RLIMIT_AS, room)


def state_of(model):
    """What a call could leave behind."""
    modules = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for name, module in model.named_modules()
    ]
    return model.config._attn_implementation, model.config.to_dict(), model.generation_config.to_dict(), modules


@pytest.fixture(autouse=True)
def poisoned():
    """Not here: poison is written, so huge sizes would take real memory."""


@pytest.fixture(scope="session")
def attempt(request):
    """``attempt(call, *names, model=None)``: the result in ``.value``, or a clear error in ``.error``.

    An error is clear if it is of an expected kind and says one of ``names``. Without names none may come.
    """
    stash = request.config.stash

    def work(call, *names, model=None):
        stash[CASES] = stash.get(CASES, 0) + 1
        before = state_of(model) if model is not None else None
        value = error = None
        try:
            with limits():
                value = call()
        except CLEAR as caught:
            error = caught
            said = str(error)
            assert any(name in said for name in names), f"{type(error).__name__} that names none of {names}: {said}"
        assert model is None or state_of(model) == before
        return SimpleNamespace(value=value, error=error)

    return work


@pytest.fixture(scope="session")
def refused(attempt):
    """``refused(call, *names, model=None)``: an error must come, and say one of ``names``."""

    def work(call, *names, model=None):
        outcome = attempt(call, *names, model=model)
        assert outcome.error is not None, f"accepted: {outcome.value}"

    return work


@pytest.fixture(scope="session")
def pair(make_target, make_draft):
    """A target with 31 tokens and 64 positions, and its drafter; both have run before."""
    model = make_target(
        fresh=True,
        vocab_size=31,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    draft = make_draft(model, num_hidden_layers=1, block_size=3, markov_rank=4, target_layer_ids=[0, 1])
    ids = torch.tensor([[3, 4]])
    for verification in ("rejection", "coupled"):
        for sampled in (False, True):
            dspark_fast.generate(
                model, draft, ids, max_new_tokens=6, do_sample=sampled, verification=verification, seed=1
            )
    return model, draft


@pytest.fixture(scope="session")
def through():
    """``through(door, model, draft, ids, **settings)``: new ids through generate() or transformers' own."""

    def work(door, model, draft, ids, **settings):
        settings = {"max_new_tokens": 5, "do_sample": False, **settings}
        if door == "ours":
            return dspark_fast.generate(model, draft, ids, **settings).tolist()
        own = {name: settings.pop(name) for name in OURS if name in settings}
        return model.generate(ids, custom_generate=dspark_fast.decoding(draft, **own), **settings).tolist()

    return work


@pytest.fixture(scope="session")
def plain():
    """``plain(model, ids, **settings)``: what transformers' own generate says."""

    def work(model, ids, **settings):
        return model.generate(ids, **{"max_new_tokens": 5, "do_sample": False, **settings}).tolist()

    return work


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["hostile"] = session.config.stash.get(CASES, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    counted = getattr(node, "workeroutput", {}).get("hostile", 0)
    node.config.stash[CASES] = node.config.stash.get(CASES, 0) + counted


def pytest_terminal_summary(terminalreporter, config):
    if cases := config.stash.get(CASES, 0):
        terminalreporter.write_line(f"hostile input: {cases} cases")
