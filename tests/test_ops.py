"""The door to the ops: the same signatures as behind it, and a clear word for what does not fit."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from dspark_fast import ops, reference

OPS = ["markov_walk", "verify", "block_attention", "store_context_kv"]


@pytest.mark.parametrize("name", OPS)
def test_signature_is_that_of_the_reference(name):
    door, room = (inspect.signature(getattr(where, name)).parameters for where in (ops, reference))
    assert list(door) == list(room)
    assert [one.default for one in door.values()] == [one.default for one in room.values()]


def walk(**changes):
    arguments = {
        "base_logits": torch.zeros(2, 3, 11),
        "w1": torch.zeros(11, 4),
        "w2": torch.zeros(11, 4),
        "anchor": torch.zeros(2, dtype=torch.long),
        "temperature": 0.0,
        "seed": 0,
        "position": 5,
        **changes,
    }
    tensors = [arguments.pop(name) for name in ("base_logits", "w1", "w2", "anchor")]
    return ops.markov_walk(*tensors, **arguments)


WALKS = {
    "flat-logits": ({"base_logits": torch.zeros(2, 11)}, r"base_logits has shape \[2, 11\]: expected \[B, T, V\]"),
    "anchor": ({"anchor": torch.zeros(3, dtype=torch.long)}, r"anchor has shape \[3\]: expected \[2\]"),
    "w1": ({"w1": torch.zeros(10, 4)}, r"w1 has shape \[10, 4\]: expected \[11, 4\]"),
    "w2": ({"w2": torch.zeros(11, 5)}, r"w2 has shape \[11, 5\]: expected \[11, 4\]"),
    "w2-alone": ({"w1": None}, r"w1 and w2 come together"),
    "head": ({"head": "lstm"}, r"head is 'lstm': accepted are vanilla, gated, rnn"),
    "gated-without-hidden": ({"head": "gated"}, r"head is 'gated', which needs hidden"),
    "temperature": ({"temperature": torch.zeros(3)}, r"temperature has shape \[3\]: expected \[2\]"),
}


@pytest.mark.parametrize(("changes", "message"), WALKS.values(), ids=WALKS)
def test_walk_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        walk(**changes)


def test_walk_takes_numbers_and_tensors_alike():
    logits = torch.randn(2, 3, 11)
    numbers = walk(base_logits=logits, temperature=0.7, seed=9, position=5)
    tensors = walk(
        base_logits=logits,
        temperature=torch.full((2,), 0.7),
        seed=torch.tensor(9),
        position=torch.tensor([5, 5]),
    )
    assert torch.equal(numbers.tokens, tensors.tokens)


def judge(**changes):
    arguments = {
        "target_logits": torch.zeros(2, 4, 11),
        "draft_tokens": torch.zeros(2, 3, dtype=torch.long),
        "draft_logits": torch.zeros(2, 3, 11),
        "draft_lengths": torch.tensor([3, 1]),
        "temperature": 1.0,
        "seed": 0,
        "position": 5,
        **changes,
    }
    names = ("target_logits", "draft_tokens", "draft_logits", "draft_lengths")
    tensors = [arguments.pop(name) for name in names]
    return ops.verify(*tensors, **arguments)


JUDGEMENTS = {
    "mode": ({"mode": "typical"}, r"mode is 'typical': accepted are greedy, rejection, coupled"),
    "rows": (
        {"draft_tokens": torch.zeros(2, 4, dtype=torch.long)},
        r"draft_tokens has shape \[2, 4\]: expected \[2, 3\]",
    ),
    "lengths": ({"draft_lengths": torch.tensor([1])}, r"draft_lengths has shape \[1\]: expected \[2\]"),
    "no-q": ({"draft_logits": None}, r"draft_logits is None: rejection needs"),
    "q-of-another-vocabulary": ({"draft_logits": torch.zeros(2, 3, 10)}, r"draft_logits has shape \[2, 3, 10\]"),
    "top-k": ({"top_k": torch.ones(3)}, r"top_k has shape \[3\]: expected \[2\]"),
}


@pytest.mark.parametrize(("changes", "message"), JUDGEMENTS.values(), ids=JUDGEMENTS)
def test_verify_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        judge(**changes)


def test_heads_that_do_not_group_are_refused():
    with pytest.raises(ValueError, match="q has 3 heads and k_cache 2"):
        ops.block_attention(
            torch.zeros(1, 2, 3, 8),
            torch.zeros(1, 9, 2, 8),
            torch.zeros(1, 9, 2, 8),
            torch.tensor([9]),
            scale=1.0,
            causal=True,
        )


def test_nothing_here_needs_triton():
    """The package imports and drafts where there is no triton."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import dspark_fast, dspark_fast.ops, dspark_fast.generation, dspark_fast.training\n"
        "assert dspark_fast.generate and dspark_fast.load"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
