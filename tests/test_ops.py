"""The door to the ops: the same signatures as behind it, and a clear word for what does not fit."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from dspark_fast import kernels, ops, reference
from dspark_fast.backend import _missing, choose

OPS = ["markov_walk", "verify", "cut_logits", "block_attention", "store_context_kv", "draft_loss"]


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
    "w1": ({"w1": torch.zeros(10, 4)}, r"w1 has shape \[10, 4\]: expected \[11, R\]"),
    "w2": ({"w2": torch.zeros(11, 5)}, r"w2 has shape \[11, 5\]: expected \[11, 4\]"),
    "w2-alone": ({"w1": None}, r"w1 and w2 come together"),
    "head": ({"head": "lstm"}, r"head is 'lstm': accepted are vanilla, gated, rnn"),
    "gated-without-hidden": ({"head": "gated"}, r"head is 'gated', which needs hidden"),
    "vocabulary": ({"vocabulary": torch.arange(10)}, r"vocabulary has shape \[10\]: expected \[11\]"),
    "vocabulary-dtype": ({"vocabulary": torch.arange(11).int()}, r"vocabulary is torch.int32: accepted is torch.int64"),
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
    "top-k": ({"top_k": torch.ones(3).long()}, r"top_k has shape \[3\]: expected \[2\]"),
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
    walk_rest |= {"logits_dtype": torch.float32, "coupled": False, "w2_norms": None, "vocabulary": None}
    walk = (torch.randn(2, 3, 11), torch.randn(11, 4), torch.randn(11, 4), torch.tensor([1, 2]))
    judged = (torch.randn(2, 4, 11), torch.randint(11, (2, 3)), torch.randn(2, 3, 11), torch.tensor([3, 1]))
    verify_rest = {"top_k": cuts[0], "top_p": None, "min_p": None, "draft_row_max": None, "draft_log_sum": None}
    caches = (torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8))
    loss = (torch.randn(5, 8), torch.randn(5, 8), torch.randint(11, (5,)), *torch.rand(2, 5), torch.randn(11, 8))
    listed = (torch.stack([torch.randperm(11)[:3] for _ in range(5)]), torch.rand(5, 3) / 3)
    markov = (torch.randn(5, 4), torch.randn(11, 4))
    calls = {
        "draft_loss": ((*loss, *markov, torch.full((5,), 9.0), None, None), {"softcap": 2.0, "gradients": True}),
        "draft_loss-listed": (
            (loss[0], None, *loss[2:], None, None, None, *listed),
            {"softcap": None, "gradients": True},
        ),
        "draft_loss-no-gradients": ((*loss, *[None] * 5), {"softcap": None, "gradients": False}),
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


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_backends_agree_through_the_door(backend):
    logits = torch.randn(2, 3, 11)
    assert torch.equal(
        walk(base_logits=logits, temperature=0.7, backend=backend).tokens,
        walk(base_logits=logits, temperature=0.7).tokens,
    )


LOSSES = {
    "hidden": ({"hidden": torch.zeros(5, 8, 1)}, r"hidden has shape \[5, 8, 1\]: expected \[N, H\]"),
    "head": ({"head": torch.zeros(11, 7)}, r"head has shape \[11, 7\]: expected \[V, 8\]"),
    "no-tokens": ({"head": torch.zeros(0, 8)}, r"head has shape \[0, H\]"),
    "labels": ({"labels": torch.zeros(5, 1)}, r"labels has shape \[5, 1\]: expected \[5\]"),
    "labels-int32": ({"labels": torch.zeros(5).int()}, r"labels is torch.int32: accepted is torch.int64"),
    "weights": ({"tv_weights": torch.zeros(4)}, r"tv_weights has shape \[4\]: expected \[5\]"),
    "no-target": ({"target_hidden": None}, r"exactly one of target_hidden and target_tokens .*: neither given"),
    "both": ({"target_tokens": torch.zeros(5, 2).long(), "target_probs": torch.zeros(5, 2)}, r": both given"),
    "no-probs": ({"target_hidden": None, "target_tokens": torch.zeros(5, 2).long()}, r"come together"),
    "probs": (
        {"target_hidden": None, "target_tokens": torch.zeros(5, 2).long(), "target_probs": torch.zeros(5, 3)},
        r"target_probs has shape \[5, 3\]: expected \[5, 2\]",
    ),
    "log-total": ({"log_total": torch.zeros(5, 1)}, r"log_total has shape \[5, 1\]: expected \[5\]"),
    "feature-alone": ({"w2": None}, r"feature and w2 come together: one is None"),
    "w2": ({"w2": torch.zeros(11, 5)}, r"w2 has shape \[11, 5\]: expected \[11, 4\]"),
    "softcap": ({"softcap": 0.0}, r"softcap is 0.0: accepted are None and numbers above 0"),
    "dtype": ({"hidden": torch.zeros(5, 8).double()}, r"hidden is torch.float64: accepted are torch.float32"),
    "head-learns": ({"head": torch.zeros(11, 8).requires_grad_()}, r"head requires grad: it is frozen here"),
    "target-learns": ({"target_hidden": torch.zeros(5, 8).requires_grad_()}, r"target_hidden requires grad"),
    "device": ({"head": torch.zeros(11, 8, device="meta")}, r"head is on meta.*: expected one device"),
}


class TestDraftLoss:
    """The one op that is differentiated."""

    def arguments(self, **changes):
        torch.manual_seed(0)
        given = {
            "hidden": torch.randn(5, 8, requires_grad=True),
            "target_hidden": torch.randn(5, 8),
            "labels": torch.randint(11, (5,)),
            "ce_weights": torch.rand(5),
            "tv_weights": torch.rand(5),
            "head": torch.randn(11, 8),
            "feature": torch.randn(5, 4, requires_grad=True),
            "w2": torch.randn(11, 4, requires_grad=True),
            **changes,
        }
        return given, [one for one in (given["hidden"], given["feature"], given["w2"]) if one is not None]

    def whole(self, given):
        """Autograd's own account of the same loss."""
        log_q = (given["hidden"] @ given["head"].T + given["feature"] @ given["w2"].T).log_softmax(-1)
        p = (given["target_hidden"] @ given["head"].T).softmax(-1)
        surprise = -log_q.gather(-1, given["labels"][:, None])[:, 0]
        return given["ce_weights"] @ surprise + given["tv_weights"] @ (log_q.exp() - p).abs().sum(-1)

    @pytest.mark.parametrize("backend", ["reference", "kernel"])
    def test_backward(self, backend):
        given, leaves = self.arguments()
        out = ops.draft_loss(**given, backend=backend)
        assert not out.surprise.requires_grad and not out.distance.requires_grad
        found = torch.autograd.grad(-3 * out.loss, leaves, retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(-3 * self.whole(given), leaves))
        torch.testing.assert_close(torch.autograd.grad(-3 * out.loss, leaves), found)  # nothing was used up

    @pytest.mark.parametrize("backend", ["reference", "kernel"])
    def test_backward_compiled(self, backend):
        """One graph, forward and backward; what surrounds the op is differentiated through it."""
        torch._dynamo.reset()
        given, leaves = self.arguments()
        frozen = {name: one for name, one in given.items() if name not in ("hidden", "feature", "w2")}

        def run(hidden, feature, w2):
            return 2 * ops.draft_loss(hidden.tanh(), feature=feature, w2=2 * w2, **frozen, backend=backend).loss

        expected = self.whole({**given, "hidden": leaves[0].tanh(), "w2": 2 * leaves[2]})
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*leaves), 2 * expected)
        found = torch.autograd.grad(compiled(*leaves), leaves)
        torch.testing.assert_close(found, torch.autograd.grad(2 * expected, leaves))

    @pytest.mark.parametrize("name", ["draft_loss", "draft_loss-listed"])
    @pytest.mark.parametrize("backend", ["reference", "kernel"])
    def test_registration(self, name, backend):
        _, tensors, options = op_calls(backend)[name]
        tensors = [
            one if one is None or place not in (0, 6, 7) else one.requires_grad_() for place, one in enumerate(tensors)
        ]
        torch.library.opcheck(torch.ops.dspark_fast.draft_loss, tuple(tensors), options)

    @pytest.mark.parametrize("backend", ["reference", "kernel"])
    def test_gradients_are_of_the_inputs_dtypes(self, backend):
        given, leaves = self.arguments()
        given |= {"head": given["head"].half(), "hidden": given["hidden"].detach().half().requires_grad_()}
        leaves[0] = given["hidden"]
        ops.draft_loss(**given, backend=backend).loss.backward()
        assert [one.grad.dtype for one in leaves] == [torch.float16, torch.float32, torch.float32]

    @pytest.mark.parametrize(
        ("dtype", "scale"), [(torch.float16, 2.0**17), (torch.bfloat16, 1 / 3)], ids=["fp16", "bf16"]
    )
    def test_a_scaled_loss(self, dtype, scale):
        """By more than fp16 holds, and by what bf16 rounds."""
        given, _ = self.arguments()
        given |= {name: given[name].to(dtype) for name in ("target_hidden", "head")}
        given["hidden"] = given["hidden"].detach().to(dtype).requires_grad_()
        given |= {name: 2**-10 * given[name] for name in ("ce_weights", "tv_weights")}
        loss = ops.draft_loss(**given).loss
        [plain] = torch.autograd.grad(loss, given["hidden"], retain_graph=True)
        [scaled] = torch.autograd.grad(scale * loss, given["hidden"])
        assert torch.equal(scaled, (plain.float() * scale).to(dtype)) and scaled.isfinite().all()

    def test_no_gradient_that_nobody_asks_for(self, monkeypatch):
        asked = []

        def noted(name, room, *tensors, **options):
            asked.append(options["gradients"])
            return torch.zeros(3)

        monkeypatch.setattr(ops, "call", noted)
        given, leaves = self.arguments()
        ops.draft_loss(**given)
        with torch.no_grad():
            ops.draft_loss(**given)
        ops.draft_loss(**{name: one.detach() for name, one in given.items()})
        ops.draft_loss(**{name: one if name == "w2" else one.detach() for name, one in given.items()})
        assert asked == [True, False, False, True]

    def test_backward_without_gradients_is_an_error(self):
        given, leaves = self.arguments()
        tensors = [given[name] for name in list(given)[:8]]
        loss, *_ = torch.ops.dspark_fast.draft_loss(
            *tensors, None, None, None, softcap=None, gradients=False, backend="reference"
        )
        with pytest.raises(RuntimeError, match="draft_loss ran with gradients=False"):
            loss.backward()

    @pytest.mark.parametrize(("changes", "message"), LOSSES.values(), ids=LOSSES)
    def test_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            ops.draft_loss(**self.arguments(**changes)[0])

    def test_a_head_that_learns_is_no_matter_without_gradients(self):
        given, _ = self.arguments(head=torch.randn(11, 8, requires_grad=True))
        with torch.no_grad():
            assert not ops.draft_loss(**given).loss.requires_grad


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
