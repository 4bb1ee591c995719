"""Tiles of W2 that cannot hold the winner are not read, and the tokens do not change."""

from __future__ import annotations

import pytest
import torch

from dspark_fast import ops, reference
from dspark_fast.kernels import markov_walk
from dspark_fast.reference import markov_norms

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


@pytest.mark.parametrize("edge", [2.0**-9, 2.0**-12, 0.0, -(2.0**-9)])
def test_a_winner_at_the_bound(edge, dtype, device):
    """Cauchy and Schwarz met with equality: the token's row of W2 lies along f, its U makes up for all but ``edge``.

    The favourite before the bias (token 0) has a row of W2 of its own, across f, so what is known of it is its U.
    """
    rank, vocab, winner = 8, 2 * TILE, TILE + 2
    w1 = torch.zeros(vocab, rank)
    w1[:, 0], w1[:, 1] = 3.0, 4.0  # |f| = 5
    w2 = torch.zeros(vocab, rank)
    w2[0, 0], w2[0, 1] = 4.0, -3.0
    w2[winner, 0], w2[winner, 1] = 0.6, 0.8  # w f = 5 |w| |f| / 5 = 5
    base = torch.full((1, 2, vocab), -30.0)
    base[..., 0] = 8.0
    base[..., winner] = 8.0 - 5.0 + edge
    tensors = [one.to(device, dtype) for one in (base, w1, w2)]
    zero = torch.zeros(1, device=device)
    options = {"temperature": zero, "seed": zero.long(), "position": zero.long(), "keep_logits": False}
    expected = reference.markov_walk(*tensors, zero.long(), **options).tokens
    bounded = markov_walk(*tensors, zero.long(), **options, w2_norms=markov_norms(tensors[2]))
    assert torch.equal(bounded.tokens, expected)
    if abs(edge) > 2.0**-10 and dtype == torch.float32:
        assert (expected == (winner if edge > 0 else 0)).all()


def test_a_favourite_whose_dot_is_rounded(device):
    """What is known of the favourite is what its rounded dot makes of it: here 0.97 less than its exact score."""
    rank, vocab = 16, 2 * TILE
    w1, w2 = torch.zeros(vocab, rank), torch.zeros(vocab, rank)
    w1[:, :2] = 1.0
    w2[0, 0], w2[0, 1] = -2048.0, -1.03125  # -2049.03, which is -2050 in fp16
    base = torch.full((1, 1, vocab), -30000.0)
    base[..., 0], base[..., TILE] = 10.0, -2039.5  # -2040 against it, where the exact score is -2039.03
    zero = torch.zeros(1, device=device)
    tensors = (base.to(device), w1.to(device, torch.float16), w2.to(device, torch.float16))
    options = {"temperature": zero, "seed": zero.long(), "position": zero.long(), "keep_logits": False}
    expected = reference.markov_walk(*tensors, zero.long(), **options).tokens
    assert expected.item() == TILE
    bounded = markov_walk(*tensors, zero.long(), **options, w2_norms=markov_norms(tensors[2]))
    assert torch.equal(bounded.tokens, expected)


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
