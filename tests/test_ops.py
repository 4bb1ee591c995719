"""The door to the ops: the same signatures as behind it, and a clear word for what does not fit."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from dspark_fast import kernels, ops, reference
from dspark_fast.backend import _missing, choose

OPS = ["markov_walk", "verify", "cut_logits", "block_attention", "store_context_kv"]


@pytest.mark.parametrize("name", OPS)
def test_signature_is_that_of_the_reference(name):
    door, room = (inspect.signature(getattr(where, name)).parameters for where in (ops, reference))
    assert list(door) == [*room, "backend"]
    assert [one.default for one in door.values()] == [*(one.default for one in room.values()), None]


@pytest.mark.parametrize("name", OPS)
def test_signature_of_the_kernel_is_that_of_the_reference(name):
    kernel, room = (inspect.signature(getattr(where, name)).parameters for where in (kernels, reference))
    assert list(kernel) == list(room)
    cuts = {"top_k", "top_p", "min_p"}  # tensors there, so the neutral value is None
    for one, other in zip(kernel.values(), room.values()):
        assert one.kind == other.kind
        assert one.default == (None if one.name in cuts else other.default)


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


def op_calls(backend):
    """Each registered op with arguments as the door hands them over."""
    rows = {"temperature": torch.tensor([0.0, 0.7]), "seed": torch.tensor([1, 2]), "position": torch.tensor([5, 9])}
    cuts = (torch.tensor([0, 3]), None, torch.tensor([0.0, 0.1]))
    walk_rest = {"head": "vanilla", "head_weight": None, "head_bias": None, "hidden": None, "candidates": 0}
    walk_rest |= {"logits_dtype": torch.float32, "coupled": False, "w2_norms": None}
    walk = (torch.randn(2, 3, 11), torch.randn(11, 4), torch.randn(11, 4), torch.tensor([1, 2]))
    judged = (torch.randn(2, 4, 11), torch.randint(11, (2, 3)), torch.randn(2, 3, 11), torch.tensor([3, 1]))
    verify_rest = {"top_k": cuts[0], "top_p": None, "min_p": None, "draft_row_max": None, "draft_log_sum": None}
    caches = (torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8))
    calls = {
        "markov_walk": (walk, {**rows, **walk_rest, "keep_logits": True}),
        "markov_walk-not-kept": (walk, {**rows, **walk_rest, "keep_logits": False}),
        "verify": (judged, {**rows, "mode": "rejection", **verify_rest}),
        "cut_logits": ((judged[0], rows["temperature"], *cuts), {}),
        "block_attention": (
            (torch.randn(2, 3, 4, 8), *caches, torch.tensor([5, 9])),
            {"scale": 0.3, "causal": True, "window": None, "softcap": None},
        ),
        "store_context_kv": (
            (
                *torch.randn(2, 2, 3, 2, 8),
                torch.ones(8),
                *torch.randn(2, 2, 3, 8),
                *caches,
                *torch.tensor([[1, 4], [3, 2]]),
            ),
            {"eps": 1e-6},
        ),
    }
    return {name: (name.partition("-")[0], args, {**rest, "backend": backend}) for name, (args, rest) in calls.items()}


@pytest.mark.parametrize("name", op_calls("reference"))
@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_schema_fake_and_mutation(name, backend):
    op, arguments, options = op_calls(backend)[name]
    tests = ("test_schema", "test_faketensor")  # the schema test runs the op and watches what it writes to
    torch.library.opcheck(getattr(torch.ops.dspark_fast, op), arguments, options, test_utils=tests)


@pytest.mark.parametrize("name", op_calls("reference"))
@pytest.mark.parametrize("backend", ["reference", "kernel"])
def test_torch_compile_sees_one_node(name, backend):
    torch._dynamo.reset()
    op, arguments, options = op_calls(backend)[name]
    graphs = []

    def run(*tensors):
        return getattr(torch.ops.dspark_fast, op)(*tensors, **options)

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected = run(*arguments)
    actual = torch.compile(run, backend=keep, fullgraph=True)(*arguments)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function" and "dspark_fast" in str(node.target)]
    assert len(calls) == 1


def test_the_door_can_be_compiled():
    def run(logits):
        walk = ops.markov_walk(logits, None, None, anchor, temperature=0.0, seed=0, position=5)
        return walk.tokens

    anchor = torch.tensor([1, 2])
    logits = torch.randn(2, 3, 11)
    assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(logits), logits.argmax(-1))


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_backends_agree_through_the_door(backend):
    logits = torch.randn(2, 3, 11)
    assert torch.equal(
        walk(base_logits=logits, temperature=0.7, backend=backend).tokens,
        walk(base_logits=logits, temperature=0.7).tokens,
    )


class TestChoice:
    """Which room runs an op."""

    def test_a_cpu_takes_the_reference(self, monkeypatch):
        monkeypatch.delenv("DSPARK_FAST_BACKEND", raising=False)
        assert choose(None, torch.zeros(1)) == "reference"

    @pytest.mark.parametrize("wish", ["kernel", "reference", "auto"])
    def test_the_variable(self, wish, monkeypatch):
        monkeypatch.setenv("DSPARK_FAST_BACKEND", wish)
        assert choose(None, torch.zeros(1)) == ("kernel" if wish == "kernel" else "reference")
        assert choose("reference", torch.zeros(1)) == "reference"  # the argument goes first

    def test_unknown_names(self, monkeypatch):
        with pytest.raises(ValueError, match="backend is 'cuda': accepted are kernel, reference"):
            choose("cuda", torch.zeros(1))
        monkeypatch.setenv("DSPARK_FAST_BACKEND", "triton")
        with pytest.raises(ValueError, match="DSPARK_FAST_BACKEND is 'triton': accepted are auto, kernel, reference"):
            choose(None, torch.zeros(1))

    def test_a_kernel_where_none_can_run(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        _missing.cache_clear()
        try:
            with pytest.raises(ValueError, match="backend is 'kernel', but the tensors are on cpu"):
                choose("kernel", torch.zeros(1))
        finally:
            _missing.cache_clear()

    @pytest.mark.parametrize(("capability", "allowed"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
    def test_an_old_gpu_takes_the_reference(self, capability, allowed, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        _missing.cache_clear()
        try:
            reason = _missing(torch.device("cuda"))
            assert reason is None if allowed else "compute capability 7.5: the kernels need 8.0" in reason
        finally:
            _missing.cache_clear()

    def test_beyond_the_kernel(self, monkeypatch):
        with pytest.raises(ValueError, match="but q has 17 queries: the kernel takes 16"):
            attend(17, backend="kernel")
        monkeypatch.setenv("DSPARK_FAST_BACKEND", "kernel")
        torch.testing.assert_close(attend(17), attend(17, backend="reference"))


def attend(block, **options):
    torch.manual_seed(0)
    caches = torch.randn(2, 1, 20, 2, 8)
    return ops.block_attention(
        torch.randn(1, block, 4, 8), *caches, torch.tensor([19]), scale=0.3, causal=True, **options
    )


def test_eight_bits_that_are_not_float8_are_refused():
    with pytest.raises(ValueError, match=r"w2 is torch.int8: of the 8-bit dtypes float8_e4m3fn alone is accepted"):
        walk(w2=torch.zeros(11, 4, dtype=torch.int8))


def test_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"base_logits is on cpu, w1 is on meta, .*: expected one device"):
        walk(w1=torch.zeros(11, 4, device="meta"))


def test_a_parameter_of_one_element():
    logits = torch.randn(2, 3, 11)
    one, number = (walk(base_logits=logits, temperature=value) for value in (torch.tensor([0.7]), 0.7))
    assert torch.equal(one.tokens, number.tokens)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_nothing_to_cut(backend):
    assert ops.cut_logits(torch.zeros(0, 11), 1.0, top_k=3, backend=backend).shape == (0, 11)


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_cuts_that_cut_nothing_are_not_made(backend, monkeypatch):
    """A neutral number must not become a tensor: on a GPU each would be a launch."""
    made = []
    monkeypatch.setattr(ops, "call", lambda name, room, *tensors, **options: made.append(options) or (None, None))
    judge(top_k=0, top_p=1.0, min_p=0.0, backend=backend)
    assert made[0]["top_k"] is made[0]["top_p"] is made[0]["min_p"] is None


OUT_OF_RANGE = {
    "seed": ({"seed": 2**63}, r"seed is 9223372036854775808: accepted are -9223372036854775808 to 9223372036854775807"),
    "temperature": ({"temperature": -0.5}, r"temperature is -0.5: accepted are 0 and above"),
    "temperature-nan": ({"temperature": float("nan")}, r"temperature is nan: accepted are 0 and above"),
    "top-p": ({"top_p": 1.5}, r"top_p is 1.5: accepted are 0 to 1"),
    "top-k": ({"top_k": -1}, r"top_k is -1: accepted are 0 and above"),
    "min-p": ({"min_p": -0.1}, r"min_p is -0.1: accepted are 0 to 1"),
    "half-of-the-statistics": ({"draft_row_max": torch.zeros(2, 3)}, r"draft_row_max and draft_log_sum come together"),
}


@pytest.mark.parametrize(("changes", "message"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        judge(**changes)
