"""The loss kernel against its reference, with poison around every row and in those without weight."""

from __future__ import annotations

import sys

import pytest
import torch

from dspark_fast.kernels import draft_loss, draft_loss_gradients
from dspark_fast.reference import draft_loss_gradients as reference

pytestmark = pytest.mark.usefixtures("guarded")

MODULE = sys.modules["dspark_fast.kernels.draft_loss"]
NAN = float("nan")
FIRST = ("hidden", "target_hidden", "labels", "ce_weights", "tv_weights", "head")
ALONG_LAST = ("hidden", "target_hidden", "feature", "target_tokens", "target_probs")
DEAD = slice(None, None, 4)  # rows 0, 4, ...: without weight


def problem(rows, vocab, width=8, rank=4, *, part=None, listed=None, softcap=None, dtype=torch.float32):
    """Every argument by name. part: V' of ``vocab``, which log_total is of; listed: K in place of target_hidden."""
    part = part or vocab
    head = (torch.randn(vocab, width) / 2).to(dtype)
    target_hidden = torch.randn(rows, width).to(dtype)
    logits = target_hidden.double() @ head.double().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    given = {
        "hidden": torch.randn(rows, width).to(dtype),
        "target_hidden": None if listed else target_hidden,
        "labels": torch.randint(-1, part, (rows,)),
        "ce_weights": torch.rand(rows) + 0.1,
        "tv_weights": torch.rand(rows) + 0.1,
        "head": head[:part].contiguous(),
        "feature": torch.randn(rows, rank).to(dtype) if rank else None,
        "w2": torch.randn(part, rank) if rank else None,
        "log_total": logits.logsumexp(-1).float() if part < vocab else None,
        "target_tokens": None,
        "target_probs": None,
        "softcap": softcap,
    }
    if rows > 1:
        given["ce_weights"][DEAD] = given["tv_weights"][DEAD] = 0
    if rows > 2:
        given["ce_weights"][1] = given["tv_weights"][2] = 0
    if listed:
        probs, tokens = logits.softmax(-1).topk(listed)
        given |= {"target_tokens": tokens.masked_fill(tokens >= part, -1), "target_probs": probs.float()}
    return given


def results(run, given):
    tensors, options = [given[name] for name in FIRST], {n: one for n, one in given.items() if n not in FIRST}
    loss, found = run(*tensors, **options)
    names = ("loss", "surprise", "distance", "hidden", "feature", "w2")
    return {name: one for name, one in zip(names, (*loss, *found)) if one is not None}


@pytest.fixture
def fused(embedded, device):
    """The kernel's results, with poison where it must not look; the values without gradients are checked as well."""

    def run(given):
        moved = {name: one.clone() if torch.is_tensor(one) else one for name, one in given.items()}
        if len(moved["hidden"]) > 1:
            for name in (*ALONG_LAST, "log_total", "labels"):
                if moved[name] is not None:
                    moved[name][DEAD] = NAN if moved[name].is_floating_point() else 10**9
        moved = {name: one.to(device) if torch.is_tensor(one) else one for name, one in moved.items()}
        moved |= {name: embedded(moved[name], -1) for name in ALONG_LAST}
        found = results(draft_loss_gradients, moved)
        tensors, options = [moved[name] for name in FIRST], {n: one for n, one in moved.items() if n not in FIRST}
        assert all(torch.equal(one, found[name]) for name, one in draft_loss(*tensors, **options)._asdict().items())
        return {name: one.cpu() for name, one in found.items()}

    return run


def check(actual, given, rms_error, most):
    expected = results(reference, given)
    assert list(actual) == list(expected)
    for name, one in actual.items():
        assert one.dtype == expected[name].dtype and one.shape == expected[name].shape
        assert rms_error(one, expected[name]) <= most, name
    if len(given["hidden"]) > 1:
        for name in actual.keys() & {"surprise", "distance", "hidden", "feature"}:
            assert (actual[name][DEAD] == 0).all()


SHAPES = [
    pytest.param({"rows": 1, "vocab": 2}, id="N1-V2"),
    pytest.param({"rows": 7, "vocab": 311}, id="V311"),
    pytest.param({"rows": 7, "vocab": 64, "width": 1, "rank": 1}, id="V64-H1-R1"),
    pytest.param({"rows": 7, "vocab": 311, "rank": 0}, id="no-markov-head"),
    pytest.param({"rows": 7, "vocab": 150, "softcap": 2.0}, id="softcap"),
    pytest.param({"rows": 7, "vocab": 150, "softcap": 2.0, "rank": 0}, id="softcap-no-markov-head"),
    pytest.param({"rows": 7, "vocab": 250, "part": 150}, id="reduced"),
    pytest.param({"rows": 7, "vocab": 250, "part": 150, "softcap": 2.0}, id="reduced-softcap"),
    pytest.param({"rows": 7, "vocab": 150, "listed": 5}, id="top-5"),
    pytest.param({"rows": 7, "vocab": 150, "listed": 1, "rank": 0}, id="top-1"),
    pytest.param({"rows": 7, "vocab": 250, "part": 150, "listed": 12, "softcap": 2.0}, id="top-12-reduced-softcap"),
    pytest.param({"rows": 7, "vocab": 5, "listed": 5}, id="all-listed"),
]


@pytest.mark.parametrize("wide", [64, 4096], ids=["tiles", "one-tile"])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_reference(shape, wide, tiles, fused, dtype, rms_error):
    """fp16 results are a rounding of dz (2^-11) apart; fp32 ones the order of sums."""
    tiles(draft_loss={"BV": wide})
    given = problem(**shape, dtype=dtype)
    most = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    check(fused(given), given, rms_error, most)


@pytest.mark.parametrize("kind", [{}, {"listed": 5}], ids=["whole", "top-5"])
def test_in_chunks(kind, tiles, fused, rms_error, monkeypatch):
    """Of 16 rows, which 37 is no multiple of; what a chunk leaves behind must not reach the next."""
    monkeypatch.setattr(MODULE, "CHUNK_BYTES", 1)
    tiles(draft_loss={"BV": 128})
    given = problem(37, 100, **kind)
    check(fused(given), given, rms_error, 1e-5)


def test_a_vocabulary_of_one_token(fused):
    """q = p = 1."""
    actual = fused(problem(7, 1, 3))
    assert all((one == 0).all() for one in actual.values())


def test_extreme_logits(fused, rms_error, tiles):
    """+-1e4 in different tiles: the label certain, impossible, and one of two that tie."""
    tiles(draft_loss={"BV": 16})
    given = problem(5, 40, 40, rank=0)
    given |= {"head": torch.eye(40), "hidden": torch.randn(5, 40), "labels": torch.tensor([0, 3, 9, 37, 3])}
    given["hidden"][1:, 37] = given["hidden"][1, 3] = 1e4
    given["hidden"][:, 9] = -1e4
    actual = fused(given)
    check(actual, given, rms_error, 1e-5)
    torch.testing.assert_close(actual["surprise"][1:4], torch.tensor([0.6931472, 2e4, 0.0]))


@pytest.mark.parametrize("kind", [{}, {"listed": 3}], ids=["whole", "top-3"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_nothing_counts(rows, kind, fused):
    given = problem(rows, 30, **kind)
    given["ce_weights"].zero_()
    given["tv_weights"].zero_()
    actual = fused(given)
    assert all((one == 0).all() for one in actual.values())
    assert actual["surprise"].shape == (rows,) and actual["w2"].shape == (30, 4)


def test_equal_distributions_have_no_slope(fused):
    given = problem(6, 50, rank=0)
    given |= {"target_hidden": given["hidden"], "ce_weights": torch.zeros(6)}
    actual = fused(given)
    assert all((one == 0).all() for name, one in actual.items() if name != "surprise")


def test_a_row_has_the_same_bits_in_any_batch(fused, tiles):
    """Given the same logits, that is: H = R = 1, where a product has one term."""
    tiles(draft_loss={"BV": 64})
    given = problem(9, 150, 1, 1)
    batch = fused(given)
    some = {name: one[[0, 2, 7]] if torch.is_tensor(one) and len(one) == 9 else one for name, one in given.items()}
    alone = fused(some)
    for name in ("surprise", "distance"):
        assert torch.equal(alone[name], batch[name][[0, 2, 7]])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"part": 6144}, {"listed": 64}], ids=["whole", "reduced", "top-64"])
def test_100_repeats_have_the_same_result(kind, fused, dtype):
    given = problem(130, 49152, 64, 16, dtype=dtype, **kind)
    first = fused(given)
    for _ in range(99):
        assert all(torch.equal(one, first[name]) for name, one in fused(given).items())
