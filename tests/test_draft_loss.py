"""The fused training loss against its formulas, written out whole and differentiated by autograd in float64."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_fast.reference import draft_loss, draft_loss_gradients

MODULE = sys.modules["dspark_fast.reference.draft_loss"]
NAN = float("nan")
WANTED = ("hidden", "feature", "w2")
FIRST = ("hidden", "target_hidden", "labels", "ce_weights", "tv_weights", "head")


def problem(rows, vocab, width, rank=4, *, whole=None, listed=None, softcap=None, dtype=torch.float32, scale=1.0):
    """Every argument by name. whole: V of which ``vocab`` is a part; listed: K probabilities in place of a target."""
    head = torch.randn(whole or vocab, width) * scale
    target_hidden = torch.randn(rows, width)
    given = {
        "hidden": torch.randn(rows, width).to(dtype),
        "target_hidden": target_hidden.to(dtype),
        "labels": torch.randint(vocab, (rows,)),
        "ce_weights": torch.rand(rows) + 0.1,
        "tv_weights": torch.rand(rows) + 0.1,
        "head": head[:vocab].to(dtype),
        "feature": torch.randn(rows, rank).to(dtype) if rank else None,
        "w2": torch.randn(vocab, rank) if rank else None,
        "log_total": None,
        "target_tokens": None,
        "target_probs": None,
        "softcap": softcap,
    }
    logits = capped(given["target_hidden"].double() @ head.to(dtype).double().T, softcap)
    if whole:
        given["log_total"] = logits.logsumexp(-1).float()
        given["labels"][::3] = -1
    if listed:
        given["target_hidden"] = None
        probs, tokens = logits.softmax(-1).topk(listed)
        tokens[tokens >= vocab] = -1
        given |= {"target_tokens": tokens, "target_probs": probs.float()}
    return given


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def direct(given):
    """The definition in float64: (loss, surprise, distance), and the gradients by autograd."""
    given = {name: one.double() if torch.is_tensor(one) and one.is_floating_point() else one
             for name, one in given.items()}  # fmt: skip
    counting = (given["ce_weights"] != 0) | (given["tv_weights"] != 0)
    leaves = [given[name].clone().requires_grad_() for name in WANTED if given[name] is not None]
    hidden, head, softcap = leaves[0][counting], given["head"], given["softcap"]
    z = capped(hidden @ head.T, softcap)
    if len(leaves) > 1:
        z = z + leaves[1][counting] @ leaves[2].T
    log_q = z.log_softmax(-1)
    labels = given["labels"][counting]
    surprise = torch.where(labels >= 0, -log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    if given["target_hidden"] is not None:
        logits = capped(given["target_hidden"][counting] @ head.T, softcap)
        log_total = logits.logsumexp(-1) if given["log_total"] is None else given["log_total"][counting]
        p = (logits - log_total[:, None]).exp()
        distance = (log_q.exp() - p).abs().sum(-1)
        if given["log_total"] is not None:
            distance = distance + (1 - p.sum(-1)).clamp(min=0)
    else:
        distances = []
        tokens, probs = given["target_tokens"][counting], given["target_probs"][counting]
        for q, ids, p in zip(log_q.exp(), tokens, probs):
            known = ids >= 0
            rest = torch.ones(len(q), dtype=torch.bool)
            rest[ids[known]] = False
            both = (q[ids[known]] - p[known]).abs().sum() + (q[rest].sum() - (1 - p.sum())).abs()
            distances.append(both + p[~known].sum())
        distance = torch.stack(distances) if distances else probs.new_zeros(0)
    loss = (given["ce_weights"][counting] * surprise + given["tv_weights"][counting] * distance).sum()
    rows = [torch.zeros(len(counting), dtype=torch.double).masked_scatter(counting, x.detach())
            for x in (surprise, distance)]  # fmt: skip
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True) if loss.requires_grad else ()
    return [loss.detach(), *rows], list(found)


def fused(given):
    tensors, options = [given[name] for name in FIRST], {n: one for n, one in given.items() if n not in FIRST}
    loss, found = draft_loss_gradients(*tensors, **options)
    alone = draft_loss(*tensors, **options)
    assert all(torch.equal(one, other) for one, other in zip(loss, alone))
    return list(loss), [one for one in found if one is not None]


def rms_error(actual, expected):
    expected = expected.double()
    assert actual.shape == expected.shape
    error, size = (actual.double() - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)


def check(given, most=1e-5):
    values, found = fused(given)
    expected, slopes = direct(given)
    assert all(one.dtype == torch.float32 for one in values)
    for name, one, other in zip(("loss", "surprise", "distance"), values, expected):
        assert rms_error(one, other) <= most, name
    given_there = [name for name in WANTED if given[name] is not None]
    assert len(found) == len(slopes) == len(given_there)
    for name, one, other in zip(given_there, found, slopes):
        assert one.dtype == given[name].dtype
        assert rms_error(one, other) <= most, name
    return values, found


PROBLEMS = [
    pytest.param({"rows": 1, "vocab": 311, "width": 1}, id="N1-H1"),
    pytest.param({"rows": 7, "vocab": 311, "width": 5}, id="N7-V311"),
    pytest.param({"rows": 7, "vocab": 2, "width": 3, "rank": 1}, id="V2-R1"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "rank": 0}, id="no-markov-head"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "softcap": 5.0}, id="softcap"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "softcap": 5.0, "rank": 0}, id="softcap-no-markov-head"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "whole": 250}, id="reduced"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "whole": 250, "softcap": 3.0}, id="reduced-softcap"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "listed": 8}, id="top-8"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "listed": 8, "softcap": 3.0}, id="top-8-softcap"),
    pytest.param({"rows": 19, "vocab": 100, "width": 16, "listed": 1, "rank": 0}, id="top-1"),
    pytest.param({"rows": 19, "vocab": 100, "width": 4, "listed": 12, "whole": 250, "scale": 0.5}, id="top-12-reduced"),
]


@pytest.mark.parametrize("chunk", [None, 1600], ids=["one-chunk", "chunks"])
@pytest.mark.parametrize("shape", PROBLEMS)
def test_as_written_out(shape, chunk, monkeypatch):
    """In one chunk and in chunks of 4 rows of 100 tokens, which 19 is no multiple of."""
    if chunk:
        monkeypatch.setattr(MODULE, "CHUNK_BYTES", chunk)
    given = problem(**shape)
    if given["target_tokens"] is not None and shape.get("whole"):
        assert (given["target_tokens"] < 0).any() and (given["target_tokens"] >= 0).any()
    values, found = check(given)
    assert values[1].max() > 0.1 and values[2].max() > 0.1 and all(one.abs().max() > 0 for one in found)


def test_a_vocabulary_of_one_token():
    """q = p = 1: nothing to learn."""
    values, found = fused(problem(7, 1, 3))
    assert all((one == 0).all() for one in (*values, *found))


@pytest.mark.parametrize("weights", ["ce_weights", "tv_weights"])
def test_one_of_the_weights_is_zero(weights):
    given = problem(11, 60, 8)
    given[weights].zero_()
    check(given)


@pytest.mark.parametrize("kind", [{}, {"whole": 90}, {"whole": 90, "listed": 5}], ids=["whole", "reduced", "top-5"])
def test_poison_in_rows_without_weight_reaches_nothing(kind):
    given = problem(12, 60, 8, softcap=4.0, **kind)
    dead = torch.tensor([0, 5, 6, 11])
    for name in ("ce_weights", "tv_weights"):
        given[name][dead] = 0
    clean, slopes = check(given)
    for row, poison in zip(dead, (NAN, torch.inf, -torch.inf, NAN)):
        for name in ("hidden", "target_hidden", "feature", "log_total", "target_probs"):
            if given[name] is not None:
                given[name][row] = poison
    given["labels"][dead] = 10**9
    if given["target_tokens"] is not None:
        given["target_tokens"][dead] = 10**9
    values, found = fused(given)
    assert all(torch.equal(one, other) for one, other in zip((*values, *found), (*clean, *slopes)))
    for one in (values[1], values[2], found[0], found[1]):
        assert (one[dead] == 0).all()


@pytest.mark.parametrize("kind", [{}, {"listed": 3}], ids=["whole", "top-3"])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_counts(rows, kind):
    given = problem(rows, 30, 4, **kind)
    for name in ("ce_weights", "tv_weights"):
        given[name].zero_()
    values, found = fused(given)
    assert values[0].shape == () and values[1].shape == values[2].shape == (rows,)
    assert [one.shape for one in found] == [given[name].shape for name in WANTED]
    assert all((one == 0).all() for one in (*values, *found))


@pytest.mark.parametrize("kind", [{}, {"listed": 3}], ids=["whole", "top-3"])
def test_extreme_logits(kind):
    """+-1e4: the label certain, impossible, and one of two that tie."""
    given = problem(3, 40, 40, rank=0, **kind)
    given["head"] = torch.eye(40)
    given["hidden"] = torch.randn(3, 40)
    given["hidden"][0, 3] = given["hidden"][1, 3] = given["hidden"][2, 3] = given["hidden"][2, 7] = 1e4
    given["hidden"][:, 9] = -1e4
    given["labels"] = torch.tensor([3, 9, 7])
    values, _ = check(given)
    torch.testing.assert_close(values[1], torch.tensor([0.0, 2e4, 0.6931472]))


def test_equal_distributions_have_no_distance_and_no_slope():
    given = problem(6, 50, 8, rank=0)
    given |= {"target_hidden": given["hidden"], "ce_weights": torch.zeros(6)}
    values, found = fused(given)
    assert (values[0] == 0) and (values[2] == 0).all() and (found[0] == 0).all()


@pytest.mark.parametrize("kind", [{}, {"whole": 600, "softcap": 5.0}, {"listed": 8}], ids=["whole", "reduced", "top-8"])
def test_bfloat16(kind):
    """Logits rounded to 8 bits: values within 5e-3, gradients within 3e-2 of what the rounded inputs give exactly.

    w2 is fp32, as the master weights of autocast training are. What is allowed is ten times less than what leaving out
    a term changes (0.3 at least).
    """
    given = problem(64, 300, 32, dtype=torch.bfloat16, scale=0.3, **kind)
    values, found = fused(given)
    expected, slopes = direct(given)
    assert max(rms_error(one, other) for one, other in zip(values, expected)) <= 5e-3
    assert [one.dtype for one in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert max(rms_error(one, other) for one, other in zip(found, slopes)) <= 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autocast_changes_nothing(dtype):
    given = problem(9, 50, 8, dtype=dtype)
    plain = fused(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = fused(given)
    assert all(torch.equal(one, other) for one, other in zip((*plain[0], *plain[1]), (*cast[0], *cast[1])))


class Largest(TorchDispatchMode):
    """The most bytes of any one tensor that is made or looked at inside."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor):
                self.bytes = max(self.bytes, one.numel() * one.element_size())
        return made


@pytest.mark.parametrize("kind", [{}, {"whole": 1500, "softcap": 5.0}, {"listed": 8}], ids=["whole", "part", "top-8"])
def test_no_tensor_is_larger_than_a_chunk(kind, monkeypatch):
    """Of 512 rows of 1,000 tokens: 2 MB in fp32 whole, and 64 KB is the largest that is ever made."""
    monkeypatch.setattr(MODULE, "CHUNK_BYTES", 65536)
    given = problem(512, 1000, 8, **kind)
    with Largest() as largest:
        fused(given)
    assert 32768 < largest.bytes <= 65536
