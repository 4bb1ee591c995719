"""How many kernels a call launches, which is its floor at batch 1; and that none of them waits for the host."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import triton
from triton.runtime import interpreter, jit

from dspark_fast import kernels
from dspark_fast.reference import markov_norms

BLOCK, VOCAB = 3, 70


@contextmanager
def counting(monkeypatch):
    """The names of the kernels that are launched inside the block; nothing runs."""
    launched = []
    kind = interpreter.InterpretedFunction if triton.knobs.runtime.interpret else jit.JITFunction

    def counted(self, *args, **kwargs):
        launched.append(self.fn.__name__)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "run", counted)
        yield launched


def rows(batch, device):
    return {
        "temperature": torch.full((batch,), 0.7, device=device),
        "seed": torch.arange(batch, device=device),
        "position": torch.full((batch,), 5, device=device),
    }


def walk(batch, device, head="vanilla", **options):
    rank, hidden = 8, 6
    if head != "vanilla":
        height, width = (rank, rank) if head == "gated" else (3 * rank, 2 * rank)
        options["hidden"] = torch.randn(batch, BLOCK, hidden, device=device)
        options["head_weight"] = torch.randn(height, hidden + width, device=device)
    weights = torch.randn(2, VOCAB, rank, device=device)
    base = torch.randn(batch, BLOCK, VOCAB, device=device)
    anchor = torch.zeros(batch, dtype=torch.int64, device=device)
    if options.pop("bounded", False):
        options |= {"w2_norms": markov_norms(weights[1]), "keep_logits": False, "coupled": True}
    return lambda: kernels.markov_walk(base, *weights, anchor, head=head, **rows(batch, device), **options)


def verify(batch, device, mode, *cuts):
    values = {"top_k": torch.full((batch,), 5), "top_p": torch.full((batch,), 0.5), "min_p": torch.full((batch,), 0.1)}
    target = torch.randn(batch, BLOCK + 1, VOCAB, device=device)
    tokens = torch.zeros(batch, BLOCK, dtype=torch.int64, device=device)
    lengths = torch.full((batch,), BLOCK, device=device)
    of_draft = torch.zeros(batch, BLOCK, device=device)
    options = {"draft_row_max": of_draft, "draft_log_sum": of_draft} | {cut: values[cut].to(device) for cut in cuts}
    return lambda: kernels.verify(
        target, tokens, target[:, :BLOCK], lengths, mode=mode, **rows(batch, device), **options
    )


def attention(batch, device):
    caches = torch.randn(2, batch, 9, 2, 16, device=device)
    lengths = torch.full((batch,), 9, device=device)
    q = torch.randn(batch, BLOCK, 4, 16, device=device)
    return lambda: kernels.block_attention(q, *caches, lengths, scale=0.3, causal=True)


def store(batch, device):
    new, caches = torch.randn(4, batch, BLOCK, 2, 16, device=device), torch.randn(2, batch, 9, 2, 16, device=device)
    counts = torch.full((batch,), BLOCK, device=device)
    tables = new[2:, :, :, 0]
    weight = torch.ones(16, device=device)
    return lambda: kernels.store_context_kv(*new[:2], weight, *tables, *caches, counts, counts, eps=1e-6)


def loss(batch, device, *, listed=False):
    hidden, weights = torch.randn(batch, 8, device=device), torch.rand(3, batch, device=device)
    markov = {"feature": torch.randn(batch, 4, device=device), "w2": torch.randn(VOCAB, 4, device=device)}
    labels = torch.arange(batch, device=device)
    if listed:
        markov |= {"target_tokens": labels[:, None], "target_probs": weights[2:].T}
    head = torch.randn(VOCAB, 8, device=device)

    def call():
        found = kernels.draft_loss_gradients(hidden, None if listed else hidden, labels, *weights[:2], head, **markov)
        return *found[0], *found[1]

    return call


CALLS = {
    "walk": (walk, (), {}, BLOCK + 1),
    "walk-gated": (walk, ("gated",), {}, 2 * BLOCK + 2),
    "walk-rnn": (walk, ("rnn",), {}, 2 * BLOCK + 2),
    "walk-candidates": (walk, (), {"candidates": 4}, BLOCK + 1 + 4),
    "walk-bounded": (walk, (), {"bounded": True}, BLOCK + 1 + 1),
    "greedy": (verify, ("greedy",), {}, 2),
    "rejection": (verify, ("rejection",), {}, 3),
    "coupled": (verify, ("coupled",), {}, 2),
    "rejection-cut": (verify, ("rejection", "top_k", "top_p", "min_p"), {}, 6),
    "coupled-cut": (verify, ("coupled", "top_p"), {}, 6),
    "attention": (attention, (), {}, 2),
    "store": (store, (), {}, 1),
    "loss": (loss, (), {}, 1),
    "loss-listed": (loss, (), {"listed": True}, 1),
}


@pytest.mark.parametrize("batch", [1, 17])
@pytest.mark.parametrize(("make", "arguments", "options", "expected"), CALLS.values(), ids=CALLS)
def test_launches(make, arguments, options, expected, batch, device, monkeypatch):
    call = make(batch, device, *arguments, **options)
    with counting(monkeypatch) as launched:
        call()
    assert len(launched) == expected, launched


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "arguments", "options", "expected"), CALLS.values(), ids=CALLS)
def test_nothing_waits_and_a_graph_replays(make, arguments, options, expected, device):
    """Captured once, replayed twice: the same bits as the call itself."""
    call = make(2, device, *arguments, **options)
    first = call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(_tensors(out), _tensors(first), strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def _tensors(result):
    results = result if isinstance(result, tuple) else (result,)
    return [one for one in results if one is not None]
