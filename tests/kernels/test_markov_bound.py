"""Tiles of W2 that cannot hold the winner are not read, and the tokens do not change."""

from __future__ import annotations

import pytest
import torch

from dspark_fast import ops, reference
from dspark_fast.kernels import markov_walk
from dspark_fast.reference import markov_norms

pytestmark = pytest.mark.usefixtures("guarded")

TILE = 64


def arguments(batch, block, vocab, rank, *, dtype, device, coupled, spread=0.1):
    """A walk whose tiles can be ruled out: W2 is small beside U."""
    options = {
        "temperature": torch.rand(batch) + 0.4 if coupled else torch.zeros(batch),
        "seed": torch.randint(-(2**62), 2**62, (batch,)),
        "position": torch.randint(0, 5000, (batch,)),
    }
    tensors = (
        (torch.randn(batch, block, vocab) * 3).to(dtype),
        torch.randn(vocab, rank).to(dtype),
        (torch.randn(vocab, rank) * spread).to(dtype),
        torch.randint(0, vocab, (batch,)),
    )
    options = {name: value.to(device) for name, value in options.items()}
    return [one.to(device) for one in tensors], {**options, "coupled": coupled, "keep_logits": False}


ROWS = [
    pytest.param(1, 5, 311, 24, False, id="B1-T5-V311-greedy"),
    pytest.param(1, 3, 311, 24, True, id="B1-T3-V311-coupled"),
    pytest.param(17, 2, 130, 64, True, id="B17-T2-V130-coupled"),
    pytest.param(3, 3, 1, 8, False, id="B3-T3-V1-greedy"),
    pytest.param(2, 1, 1000, 100, True, id="B2-T1-V1000-coupled"),
]


@pytest.mark.parametrize(("batch", "block", "vocab", "rank", "coupled"), ROWS)
@pytest.mark.parametrize("spread", [0.02, 0.3], ids=["small-bias", "large-bias"])
def test_same_tokens(batch, block, vocab, rank, coupled, spread, dtype, device):
    tensors, options = arguments(batch, block, vocab, rank, dtype=dtype, device=device, coupled=coupled, spread=spread)
    whole = markov_walk(*tensors, **options)
    bounded = markov_walk(*tensors, **options, w2_norms=markov_norms(tensors[2]))
    assert torch.equal(bounded.tokens, whole.tokens)
    assert bounded.logits is None and bounded.row_max.isnan().all() and bounded.log_sum.isnan().all()


@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
def test_a_tile_that_is_ruled_out_is_not_read(coupled, device):
    (base, w1, w2, anchor), options = arguments(
        1, 3, 4 * TILE, 8, dtype=torch.float32, device=device, coupled=coupled, spread=0.01
    )
    base[:, :, TILE : 2 * TILE] -= 100
    base[:, :, 3 * TILE] += 100
    norms = markov_norms(w2)
    expected = markov_walk(base, w1, w2, anchor, **options).tokens
    w2[TILE : 2 * TILE] = torch.nan
    assert torch.equal(markov_walk(base, w1, w2, anchor, **options, w2_norms=norms).tokens, expected)
    norms[2 * TILE // 32] = torch.nan  # what cannot be compared is read
    w2[2 * TILE] = torch.nan
    assert (markov_walk(base, w1, w2, anchor, **options, w2_norms=norms).tokens == -1).all()


def planted(device, favourite, challenger, **options):
    """Both walks over two tiles, with the bound and without; each token is (id, U, row of W2). f is (3, 4), |f| = 5."""
    rank, vocab = 16, 2 * TILE
    base = torch.full((1, 2, vocab), -30000.0)
    w1, w2 = torch.zeros(vocab, rank), torch.zeros(vocab, rank)
    w1[:, 0], w1[:, 1] = 3.0, 4.0
    for token, logit, row in (favourite, challenger):
        base[..., token] = logit
        w2[token, :2] = torch.tensor(row)
    dtype = options.pop("dtype", torch.float32)
    zero = torch.zeros(1, device=device)
    tensors = (base.to(device), w1.to(device, dtype), w2.to(device, dtype))
    options = {"temperature": zero, "seed": zero.long(), "position": zero.long(), "keep_logits": False} | options
    expected = reference.markov_walk(*tensors, zero.long(), **options).tokens
    bounded = markov_walk(*tensors, zero.long(), **options, w2_norms=markov_norms(tensors[2])).tokens
    assert torch.equal(bounded, expected)
    return set(expected.flatten().tolist())


@pytest.mark.parametrize("edge", [2.0**-9, 0.0, -(2.0**-9)])
def test_a_winner_at_the_bound(edge, device):
    """Cauchy and Schwarz met with equality: the challenger's row lies along f, its U makes up for all but ``edge``."""
    winners = planted(device, (0, 8.0, (0.0, 0.0)), (TILE + 2, 3.0 + edge, (0.6, 0.8)))
    assert edge == 0 or winners == {TILE + 2 if edge > 0 else 0}


def test_a_winner_whose_dot_is_rounded_up(device):
    """A dot of 2075 is 2076 in fp16, so a token wins with 10.5 whose exact score, and whose bare bound, is 9.5."""
    row = (3.0 * 83, 4.0 * 83)
    assert planted(device, (0, 10.0, (0.0, 0.0)), (TILE, 10 - 2075.5, row), dtype=torch.float16) == {TILE}


def test_a_winner_whose_logit_is_rounded(device):
    """2050.9 and 2050.8 are both 2050 in fp16, and of a tie the lowest token wins: the one whose bound is lower."""
    favourite, challenger = (TILE, 2050.9, (0.0, 0.0)), (5, 2048.9, (0.076 * 3, 0.076 * 4))
    assert planted(device, favourite, challenger, logits_dtype=torch.float16) == {5}


def test_a_favourite_whose_dot_is_rounded(device):
    """-2049.03 is -2050 in fp16: the favourite is worth -2040, not -2039.03, and -2040.5 + 1 beats it."""
    favourite, challenger = (0, 10.0, (-683.0, -(2.0**-7))), (TILE, -2040.5, (0.12, 0.16))
    assert planted(device, favourite, challenger, dtype=torch.float16) == {TILE}


def test_a_sampled_row_without_coupling_reads_everything(device):
    """What is known before the bias is without the noise, so it rules out nothing."""
    (base, w1, w2, anchor), options = arguments(
        9, 4, 4 * TILE, 8, dtype=torch.float32, device=device, coupled=True, spread=0.2
    )
    options["coupled"], options["temperature"] = False, options["temperature"] * 8
    bounded = markov_walk(base, w1, w2, anchor, **options, w2_norms=markov_norms(w2))
    assert torch.equal(bounded.tokens, markov_walk(base, w1, w2, anchor, **options).tokens)


def test_norms():
    w2 = torch.randn(70, 5)
    norms = markov_norms(w2)
    assert norms.shape == (3,)
    for group in range(3):
        assert norms[group] == pytest.approx(w2[32 * group : 32 * group + 32].double().norm(dim=-1).max().item())


REFUSED = {
    "kept": ({"keep_logits": True}, "keep_logits=False"),
    "candidates": ({"candidates": 3}, "candidates=0"),
    "shape": ({"w2_norms": torch.zeros(4)}, r"w2_norms has shape \[4\]: expected \[3\]"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes, message):
    (base, w1, w2, anchor), options = arguments(1, 1, 70, 4, dtype=torch.float32, device="cpu", coupled=False)
    with pytest.raises(ValueError, match=message):
        ops.markov_walk(base, w1, w2, anchor, **{**options, "w2_norms": markov_norms(w2), **changes})
