"""What the ops accept: each check says what it was given and what would do; none of it stays in a compiled graph."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_fast import checks, ops


def walk(**changes):
    sound = {"base_logits": some(2, 3, 11), "w1": some(11, 4), "w2": some(11, 4), "anchor": torch.tensor([1, 2])}
    return ops.markov_walk(**{**sound, "temperature": 0.0, "seed": 0, "position": 5, **changes})


def judge(**changes):
    sound = {"target_logits": some(2, 4, 11), "draft_tokens": torch.zeros(2, 3).long(), "draft_logits": some(2, 3, 11)}
    sound |= {"draft_lengths": torch.tensor([3, 1]), "temperature": 1.0, "seed": 0, "position": 5}
    return ops.verify(**{**sound, **changes})


def attend(**changes):
    sound = {"q": some(1, 3, 4, 8), "k_cache": some(1, 20, 2, 8), "v_cache": some(1, 20, 2, 8)}
    sound |= {"lengths": torch.tensor([19]), "scale": 0.3, "causal": True}
    return ops.block_attention(**{**sound, **changes})


def stored(eps):
    cache = torch.zeros(1, 9, 2, 8)
    cos, steps = torch.ones(1, 3, 8), torch.tensor([3])
    ops.store_context_kv(some(1, 3, 2, 8), some(1, 3, 2, 8), cos[0, 0], cos, cos, cache, cache, steps, steps, eps=eps)
    return cache


def some(*shape):
    return torch.linspace(-1, 1, math.prod(shape)).cos().view(shape)


TENSORS = {
    "none": (None, r"x is None: accepted is a dense tensor \[B, 3\]"),
    "list": ([1.0], r"x is \[1.0\]: accepted is a dense tensor"),
    "sparse": (torch.zeros(2, 3).to_sparse(), r"x is torch.sparse_coo: accepted is a dense tensor"),
    "an-axis-less": (torch.zeros(3), r"x has shape \[3\]: expected \[B, 3\]"),
    "no-axis": (torch.tensor(1.0), r"x has shape \[\]: expected \[B, 3\]"),
    "another-size": (torch.zeros(2, 4), r"x has shape \[2, 4\]: expected \[B, 3\]"),
    "integers": (torch.zeros(2, 3).int(), r"x is torch.int32: accepted are torch.float32, .* torch.float64$"),
}


@pytest.mark.parametrize(("given", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors(given, message):
    with pytest.raises(ValueError, match=message):
        checks.dense("x", given, checks.FLOATS, "B", 3)


def test_a_named_axis_is_as_long_as_it_likes():
    for rows in (0, 1, 7):
        assert checks.dense("x", torch.zeros(rows, 3), checks.FLOATS, "B", 3) == (rows, 3)


NUMBERS = {
    "seed": ({"seed": 2**63}, r"seed is 9223372036854775808: accepted are integers of 64 bits, -2\^63 to 2\^63 - 1"),
    "seed-fraction": ({"seed": 1.5}, r"seed is 1.5: accepted are integers of 64 bits"),
    "temperature": ({"temperature": -0.5}, r"temperature is -0.5: accepted are 0 and above"),
    "temperature-nan": ({"temperature": float("nan")}, r"temperature is nan: accepted are 0 and above"),
    "temperature-beyond-fp32": ({"temperature": 1e39}, r"temperature is 1e\+39: .* to 3.4e\+38 or inf"),
    "top-p": ({"top_p": 1.5}, r"top_p is 1.5: accepted are 0 to 1"),
    "top-k": ({"top_k": -1}, r"top_k is -1: accepted are integers of 0 and above"),
    "top-k-true": ({"top_k": True}, r"top_k is True: accepted are integers of 0 and above"),
    "min-p": ({"min_p": -0.1}, r"min_p is -0.1: accepted are 0 to 1"),
    "a-fraction-a-row": ({"seed": torch.zeros(2)}, r"seed is torch.float32: accepted are torch.int64"),
    "half-of-the-statistics": ({"draft_row_max": torch.zeros(2, 3)}, r"draft_row_max and draft_log_sum come together"),
}


@pytest.mark.parametrize(("changes", "message"), NUMBERS.values(), ids=NUMBERS)
def test_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        judge(**changes)


def test_the_ends_of_the_ranges():
    for name, (kind, least, most, _, infinite) in checks.NUMBERS.items():
        for end in (least, most, *[math.inf] * infinite):
            assert checks.number(name, end) == end and type(checks.number(name, end)) is kind
        assert checks.per_row(most, torch.zeros(3), name).tolist() == [most] * 3


def test_eight_bits_that_are_not_float8_are_refused():
    with pytest.raises(ValueError, match=r"w2 is torch.int8: accepted are torch.float32, .* torch.float8_e4m3fn$"):
        walk(w2=torch.zeros(11, 4, dtype=torch.int8))


def test_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"base_logits is on cpu, w1 is on meta, .*: expected one device"):
        walk(w1=torch.zeros(11, 4, device="meta"))


def test_two_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"q is torch.float16, k_cache is torch.float32, .*: expected one dtype"):
        attend(q=torch.zeros(1, 3, 4, 8).half())


COMPILED = {
    "markov_walk": lambda n: walk(temperature=n / 7, seed=n, position=n + 2, candidates=n).tokens,
    "verify": lambda n: judge(temperature=n / 7, seed=n, position=n, top_k=n, top_p=0.9),
    "cut_logits": lambda n: ops.cut_logits(some(2, 11), n / 7, n, 0.9, n / 99),
    "block_attention": lambda n: attend(scale=n / 9, window=n, softcap=n / 2),
    "store_context_kv": lambda n: stored(n / 1e6),
}


@pytest.mark.parametrize("name", COMPILED)
def test_none_of_it_breaks_a_graph(name):
    """Whichever numbers are symbols by the third call."""
    torch._dynamo.reset()
    op = torch.compile(COMPILED[name], backend="eager", fullgraph=True)
    for number in (3, 4, 5):
        torch.testing.assert_close(op(number), COMPILED[name](number))


def test_nothing_that_a_tensor_holds_is_looked_at():
    """On "meta" there is nothing to look at."""
    given = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    checks.dense("x", given, checks.IDS, 2, "T")
    for name in ("seed", "top_k", "temperature", "top_p"):
        assert checks.per_row(given[:, 0], given, name).device.type == "meta"
