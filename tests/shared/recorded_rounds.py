"""CUDA graphs without a GPU: a round is recorded as ops and replayed on the CPU."""

from __future__ import annotations

import pytest
import torch


def _recorded(work, space):
    """A stand-in for a CUDA graph: what ``work`` does to the same memory, as ops without any Python between them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    state = space.state
    places = [state.tokens, state.lengths, state.finished, state.report, space.cache.lengths]
    before = [place.clone() for place in places]
    trace = make_fx(work)()
    for place, old in zip(places, before):  # a capture does not run what it records, this did
        place.copy_(old)
    assert {node.op for node in trace.graph.nodes} <= {"call_function", "get_attr", "output"}
    return trace


@pytest.fixture
def opaque(monkeypatch):
    """Our ops as single nodes, as a compiler or a recorder sees them: what is inside is the kernels' own affair."""
    from dspark_fast import ops

    monkeypatch.setattr(
        ops, "call", lambda name, backend, *t, **o: getattr(torch.ops.dspark_fast, name)(*t, **o, backend=backend)
    )


@pytest.fixture
def on_a_cpu(monkeypatch, opaque):
    """Graphs are recorded and replayed on the CPU; the fixture is a list of the recordings."""
    from dspark_fast.engine import graphs

    recordings = []

    def record(work, space):
        recordings.append(work)
        return _recorded(work, space)

    made = graphs.Workspace.__init__

    def init(self, *args, **kwargs):
        made(self, *args, recorder=lambda work: record(work, self), **kwargs)

    monkeypatch.setattr(graphs.Workspace, "__init__", init)
    graphs.clear_graphs()
    yield recordings
    graphs.clear_graphs()
