"""The doors of the ops: shapes, dtypes and numbers that do not fit, and tensors of NaN, infinities and huge values."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_fast import ops

HOSTILE = settings.get_profile("hostile")
NAN, INF = math.nan, math.inf
BATCH, BLOCK, VOCABULARY = 2, 3, 11


def arguments(name):
    """Sound arguments of an op, the same at each call."""
    torch.manual_seed(0)
    number = torch.tensor
    return {
        "markov_walk": lambda: {
            "base_logits": torch.randn(BATCH, BLOCK, VOCABULARY),
            "w1": torch.randn(VOCABULARY, 4),
            "w2": torch.randn(VOCABULARY, 4),
            "anchor": number([1, 2]),
            "temperature": 0.7,
            "seed": 3,
            "position": 5,
        },
        "verify": lambda: {
            "target_logits": torch.randn(BATCH, BLOCK + 1, VOCABULARY),
            "draft_tokens": torch.randint(VOCABULARY, (BATCH, BLOCK)),
            "draft_logits": torch.randn(BATCH, BLOCK, VOCABULARY),
            "draft_lengths": number([3, 1]),
            "temperature": 0.7,
            "seed": 3,
            "position": 5,
        },
        "cut_logits": lambda: {"logits": torch.randn(BATCH, BLOCK, VOCABULARY), "temperature": 0.7},
        "block_attention": lambda: {
            "q": torch.randn(BATCH, BLOCK, 4, 8),
            "k_cache": torch.randn(BATCH, 9, 2, 8),
            "v_cache": torch.randn(BATCH, 9, 2, 8),
            "lengths": number([9, 5]),
            "scale": 0.3,
            "causal": True,
        },
        "store_context_kv": lambda: {
            "k": torch.randn(BATCH, BLOCK, 2, 8),
            "v": torch.randn(BATCH, BLOCK, 2, 8),
            "k_norm_weight": torch.randn(8),
            "cos": torch.randn(BATCH, BLOCK, 8),
            "sin": torch.randn(BATCH, BLOCK, 8),
            "k_cache": torch.zeros(BATCH, 9, 2, 8),
            "v_cache": torch.zeros(BATCH, 9, 2, 8),
            "offsets": number([0, 4]),
            "counts": number([3, 2]),
            "eps": 1e-6,
        },
        "draft_loss": lambda: {
            "hidden": torch.randn(5, 8),
            "target_hidden": torch.randn(5, 8),
            "labels": number([0, 1, 2, -1, 3]),
            "ce_weights": torch.ones(5),
            "tv_weights": torch.ones(5),
            "head": torch.randn(VOCABULARY, 8),
        },
    }[name]()


NAMES = ("markov_walk", "verify", "cut_logits", "block_attention", "store_context_kv", "draft_loss")
TENSORS = [(op, name) for op in NAMES for name, value in arguments(op).items() if isinstance(value, torch.Tensor)]


def call(op, **changes):
    return getattr(ops, op)(**{**arguments(op), **changes})


@settings(HOSTILE, max_examples=250)
@given(st.sampled_from(TENSORS), st.lists(st.integers(0, 12), max_size=5))
def test_a_tensor_of_another_shape(attempt, refused, which, shape):
    op, name = which
    given = arguments(op)[name]
    if op == "cut_logits" and len(shape) in (2, 3) and shape[-1]:  # any two or three axes are right
        assert list(attempt(lambda: call(op, logits=torch.zeros(shape))).value.shape) == shape
    elif list(given.shape) != shape:
        refused(lambda: call(op, **{name: torch.zeros(shape, dtype=given.dtype)}), "has shape")


@settings(HOSTILE, max_examples=120)
@given(
    st.sampled_from(["markov_walk", "verify", "cut_logits"]),
    st.tuples(st.just("temperature"), st.floats(max_value=-1e-9) | st.just(NAN))
    | st.tuples(
        st.sampled_from(["top_p", "min_p"]), st.floats(max_value=-1e-9) | st.floats(min_value=1.1) | st.just(NAN)
    )
    | st.tuples(st.just("top_k"), st.integers(max_value=-1) | st.just(NAN))
    | st.tuples(st.just("seed"), st.integers(min_value=2**63) | st.integers(max_value=-(2**63) - 1) | st.just(NAN))
    | st.tuples(st.just("candidates"), st.integers(max_value=-1))
    | st.tuples(st.just("mode"), st.text(max_size=5) | st.none())
    | st.tuples(st.just("head"), st.text(max_size=5) | st.none())
    | st.tuples(st.just("logits_dtype"), st.sampled_from([torch.int8, torch.float64, "float32", None]))
    | st.tuples(st.just("backend"), st.text(max_size=5) | st.integers()),
)
def test_a_number_out_of_range(refused, op, setting):
    name, value = setting
    refused(lambda: call(op, **{name: value}), name)


# A logit that is no number, or as large as they come, at one place.
VALUES = st.sampled_from([NAN, INF, -INF, 3e38, -3e38, 1e-45, 65504.0])


@settings(HOSTILE, max_examples=120)
@given(
    st.lists(st.tuples(st.integers(0, BLOCK - 1), st.integers(0, VOCABULARY - 1), VALUES), max_size=6),
    st.sampled_from([0.0, 1e-30, 0.05, 0.7, 1e30, INF]),
    st.booleans(),
    st.integers(0, 12),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_broken_row_of_a_walk(attempt, places, temperature, coupled, candidates, dtype):
    """It drafts ids or -1, nothing behind a -1, and the row beside it is as it would be."""
    logits = arguments("markov_walk")["base_logits"].to(dtype)
    for slot, token, value in places:
        logits[0, slot, token] = value
    asked = {"temperature": temperature, "coupled": coupled, "candidates": candidates}
    tokens = attempt(lambda: call("markov_walk", base_logits=logits, **asked)).value.tokens
    assert bool(((tokens >= -1) & (tokens < VOCABULARY)).all())
    assert (tokens[0] >= 0).long().cumprod(0).equal((tokens[0] >= 0).long())
    beside = call("markov_walk", base_logits=logits[1:].repeat(2, 1, 1), anchor=torch.tensor([2, 2]), **asked).tokens
    assert torch.equal(tokens[1], beside[1])
    if not logits[0].isfinite().any():
        assert tokens[0].tolist() == [-1] * BLOCK


@settings(HOSTILE, max_examples=120)
@given(
    st.sampled_from(["target_logits", "draft_logits"]),
    st.lists(st.tuples(st.integers(0, BLOCK - 1), st.integers(0, VOCABULARY - 1), VALUES), max_size=6),
    st.sampled_from([0.0, 1e-30, 0.05, 0.7, 1e30, INF]),
    st.sampled_from(["greedy", "rejection", "coupled"]),
    st.integers(0, 2**63 - 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.integers(-2, BLOCK), min_size=2, max_size=2),
)
def test_a_broken_row_of_a_verification(attempt, where, places, temperature, mode, top_k, top_p, min_p, lengths):
    sound = arguments("verify")
    logits = sound[where].clone()
    for slot, token, value in places:
        logits[0, slot, token] = value
    asked = {"temperature": temperature, "mode": mode, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked["draft_lengths"] = torch.tensor(lengths)
    accepted, following = attempt(lambda: call("verify", **{where: logits}, **asked)).value
    assert all(0 <= count <= max(length, 0) for count, length in zip(accepted.tolist(), lengths))
    assert bool(((following >= -1) & (following < VOCABULARY)).all())
    for ours, theirs in zip((accepted, following), call("verify", **asked)):
        assert ours[1] == theirs[1]
    if lengths[0] >= 0 and not logits[0].isfinite().any() and where == "target_logits":
        assert following[0] == -1


@settings(HOSTILE, max_examples=60)
@given(st.sampled_from([one for one in TENSORS if one[0] not in ("markov_walk", "verify")]), VALUES)
def test_values_that_are_no_numbers_go_through(attempt, which, value):
    """NaN comes out as NaN, or is not looked at; nothing is raised and nothing written where it should not be."""
    op, name = which
    given = arguments(op)[name]
    if given.is_floating_point():
        broken = given.clone()
        broken.view(-1)[0] = value
        attempt(lambda: call(op, **{name: broken}))


OPTIONAL = {
    "markov_walk": ("hidden", "head_weight", "head_bias", "w2_norms", "vocabulary"),
    "verify": ("draft_row_max", "draft_log_sum"),
    "draft_loss": ("feature", "w2", "log_total", "target_tokens", "target_probs"),
}
NO_TENSORS = (3, 1.5, NAN, "a", [[1.0]], torch.Size([2, 3]), object())
# What becomes of a sound tensor, or of one where none need be: of another kind of number, or not dense.
KINDS = {
    "complex": lambda sound: sound.to(torch.complex64),
    "bool": lambda sound: sound.to(torch.bool),
    "sparse": lambda sound: sound.to_sparse(),
    "other": lambda sound: sound.long() if sound.is_floating_point() else sound.float(),
}


@settings(HOSTILE, max_examples=150)
@given(
    st.sampled_from(TENSORS + [(op, name) for op, names in OPTIONAL.items() for name in names]),
    st.sampled_from([None, *NO_TENSORS, *KINDS]),
)
def test_no_dense_tensor_of_the_right_kind(refused, which, given):
    op, name = which
    sound = arguments(op).get(name)
    if given is None and sound is None:
        return
    if isinstance(given, str) and given in KINDS:
        given = KINDS[given](torch.ones(2, 3) if sound is None else sound)
        if name in ("vocabulary", "target_tokens") and given.dtype == torch.int64:
            return
    more = {"keep_logits": False} if name == "w2_norms" else {}
    refused(lambda: call(op, **{name: given}, **more), name)


NUMBERS = [
    *((op, name) for op in ("markov_walk", "verify") for name in ("temperature", "seed", "position")),
    *((op, name) for op in ("verify", "cut_logits") for name in ("temperature", "top_k", "top_p", "min_p")),
    ("markov_walk", "candidates"),
    *(("block_attention", name) for name in ("scale", "window", "softcap")),
    ("store_context_kv", "eps"),
    ("draft_loss", "softcap"),
]
WHOLE = ("seed", "position", "top_k", "candidates", "window")
PER_ROW = ("temperature", "seed", "position", "top_k", "top_p", "min_p")
NO_NUMBERS = ("a", b"1", 1j, True, False, NAN, -INF, [1], (0.5,), {}, object(), 10**400, -(10**400))


@settings(HOSTILE, max_examples=120)
@given(st.sampled_from(NUMBERS), st.sampled_from(NO_NUMBERS) | st.floats(0.01, 0.99) | st.just(None))
def test_no_number(refused, which, value):
    op, name = which
    fraction = isinstance(value, float) and value == value and value > 0
    if (fraction and name not in WHOLE) or (value is None and name in ("window", "softcap")):
        return
    refused(lambda: call(op, **{name: value}), f"{name} is")


@settings(HOSTILE, max_examples=60)
@given(
    st.sampled_from([one for one in NUMBERS if one[1] in PER_ROW]),
    st.sampled_from([torch.complex64, torch.bool, torch.float8_e4m3fn, torch.float32]),
    st.sampled_from([(), (1,), (2,), (3,), (2, 2), (0,)]),
)
def test_a_number_as_a_tensor(attempt, which, dtype, shape):
    """One or B of them, integers where they must be; not complex, not true or false."""
    op, name = which
    value = torch.ones(shape).to(dtype)
    outcome = attempt(lambda: call(op, **{name: value}), f"{name} is torch.", f"{name} has shape")
    fits = dtype == torch.float32 and name not in WHOLE and shape in ((), (1,), (2,))
    assert (outcome.error is None) == fits


@pytest.mark.parametrize(("op", "name"), NUMBERS, ids=map("-".join, NUMBERS))
def test_numbers_of_other_classes(attempt, op, name):
    """numpy's, and fractions: what they are is what counts."""
    given = 1 if name in WHOLE else 0.5
    kinds = (np.int64, np.uint8) if name in WHOLE else (np.float64, np.float32, Fraction)
    results = [attempt(lambda kind=kind: flat(call(op, **{name: kind(given)}))).value for kind in kinds]
    expected = flat(call(op, **{name: given}))
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, expected, strict=True))


def flat(result):
    """The tensors of a result, NaN as a number."""
    result = () if result is None else (result,) if isinstance(result, torch.Tensor) else result
    return [one.nan_to_num() for one in result if one is not None]


def test_a_window_that_hides_nothing(attempt):
    widest = attempt(lambda: call("block_attention", window=2**63 - 1)).value
    assert torch.equal(widest, call("block_attention", window=None))


WRONG = {
    "temperature-beyond-fp32": ("verify", {"temperature": 1e300}),
    "temperature-text": ("verify", {"temperature": "a"}),
    "top-k-beyond-64-bits": ("verify", {"top_k": 2**63}),
    "top-k-fraction": ("verify", {"top_k": 1.5}),
    "seed-fraction": ("verify", {"seed": 1.5}),
    "position-beyond-64-bits": ("verify", {"position": 2**63}),
    "position-infinite": ("markov_walk", {"position": INF}),
    "position-fraction": ("markov_walk", {"position": 1.5}),
    "candidates-fraction": ("markov_walk", {"candidates": 1.5}),
    "candidates-beyond-64-bits": ("markov_walk", {"candidates": 2**63}),
    "head-list": ("markov_walk", {"head": ["vanilla"]}),
    "coupled-number": ("markov_walk", {"coupled": 1}),
    "keep-logits-text": ("markov_walk", {"keep_logits": "no"}),
    "target-none": ("verify", {"target_logits": None}),
    "walk-none": ("markov_walk", {"base_logits": None}),
    "hidden-number": ("markov_walk", {"hidden": 3}),
    "hidden-of-another-block": ("markov_walk", {"hidden": torch.zeros(2, 4, 8)}),
    "w1-without-axes": ("markov_walk", {"w1": torch.tensor(1.0)}),
    "w1-float8": ("markov_walk", {"w1": torch.zeros(11, 4).to(torch.float8_e4m3fn)}),
    "anchor-floats": ("markov_walk", {"anchor": torch.zeros(2)}),
    "draft-tokens-floats": ("verify", {"draft_tokens": torch.zeros(2, 3)}),
    "draft-tokens-of-32-bits": ("verify", {"draft_tokens": torch.zeros(2, 3).int()}),
    "draft-lengths-floats": ("verify", {"draft_lengths": torch.tensor([1.5, NAN])}),
    "unread-draft-logits-number": ("verify", {"draft_logits": 3, "mode": "coupled"}),
    "complex-logits": ("verify", {"target_logits": torch.zeros(2, 4, 11, dtype=torch.complex64)}),
    "sparse-logits": ("markov_walk", {"base_logits": torch.zeros(2, 3, 11).to_sparse()}),
    "no-slots": ("verify", {"target_logits": torch.zeros(2, 0, 11)}),
    "no-vocabulary": ("verify", {"target_logits": torch.zeros(2, 4, 0), "mode": "coupled"}),
    "no-vocabulary-to-walk": ("markov_walk", {"base_logits": torch.zeros(2, 3, 0)}),
    "no-vocabulary-to-cut": ("cut_logits", {"logits": torch.zeros(2, 0), "top_p": 0.5}),
    "queries-half": ("block_attention", {"q": torch.zeros(2, 3, 4, 8).half()}),
    "queries-half-capped": ("block_attention", {"q": torch.zeros(2, 3, 4, 8).half(), "softcap": 1.0}),
    "causal-number": ("block_attention", {"causal": 1}),
    "scale-text": ("block_attention", {"scale": "a", "window": None, "softcap": 1.0}),
    "scale-infinite": ("block_attention", {"scale": INF}),
    "window-text": ("block_attention", {"window": "a"}),
    "window-huge": ("block_attention", {"window": 10**30}),
    "window-nan": ("block_attention", {"window": NAN}),
    "window-0": ("block_attention", {"window": 0}),
    "softcap-infinite": ("block_attention", {"softcap": INF}),
    "softcap-that-fp32-flushes": ("block_attention", {"softcap": 1e-300}),
    "loss-softcap-infinite": ("draft_loss", {"softcap": INF}),
    "eps-text": ("store_context_kv", {"eps": "a"}),
    "eps-negative": ("store_context_kv", {"eps": -1.0}),
    "cache-of-integers": ("store_context_kv", {"k_cache": torch.zeros(2, 9, 2, 8).long()}),
    "weights-complex": ("draft_loss", {"ce_weights": torch.ones(5, dtype=torch.complex64)}),
}


@pytest.mark.parametrize(("op", "changes"), WRONG.values(), ids=WRONG)
def test_what_no_op_accepts(refused, op, changes):
    name = next(iter(changes))
    before = arguments(op)
    given = {**before, **changes}
    refused(lambda: getattr(ops, op)(**given), f"{name} is", f"{name} has")
    for one, other in zip(before.values(), arguments(op).values()):  # nothing has been written
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# On purpose no op reads what tensors hold: that is the caller's. On a CPU torch tells of most, in its own words; None
# is for a result that means nothing.
HELD = {
    "anchor-beyond": ("markov_walk", {"anchor": torch.tensor([11, 0])}, "index out of range"),
    "draft-beyond": ("verify", {"draft_tokens": torch.full((2, 3), 11)}, None),
    "temperatures-negative": ("verify", {"temperature": torch.tensor([-1.0, 1.0])}, None),
    "lengths-beyond": ("block_attention", {"lengths": torch.tensor([99, 5])}, "must match the size"),
    "offsets-beyond": ("store_context_kv", {"offsets": torch.tensor([8, 8])}, "out of bounds"),
    "offsets-negative": ("store_context_kv", {"offsets": torch.tensor([-2, 0])}, None),
    "labels-beyond": ("draft_loss", {"labels": torch.full((5,), 11)}, "out of bounds"),
}


def told(op, changes):
    """The call, with torch's own errors as those of an index."""
    try:
        return call(op, **changes)
    except RuntimeError as error:
        raise IndexError(str(error)) from None


@pytest.mark.parametrize(("op", "changes", "says"), HELD.values(), ids=HELD)
def test_what_tensors_hold_is_not_looked_at(attempt, op, changes, says):
    outcome = attempt(lambda: told(op, changes), *[says] * (says is not None))
    assert (outcome.error is None) == (says is None)


@settings(HOSTILE, max_examples=60)
@given(st.sampled_from([one for one in TENSORS if not arguments(one[0])[one[1]].is_floating_point()]), st.data())
def test_whatever_they_hold_the_process_lives_and_the_next_call_is_right(attempt, which, data):
    op, name = which
    shape = arguments(op)[name].shape
    held = data.draw(st.lists(st.integers(-40, 40), min_size=shape.numel(), max_size=shape.numel()))
    before = flat(call(op))
    attempt(lambda: told(op, {name: torch.tensor(held).view(shape)}), "")
    assert all(torch.equal(one, other) for one, other in zip(flat(call(op)), before, strict=True))
