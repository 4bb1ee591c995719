"""The Markov walk against a token-by-token loop, its own teacher-forced bias and the law it says it samples from."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from dspark_fast.reference.markov import HEADS, markov_bias, markov_walk
from dspark_fast.reference.sampling import DRAFT, TARGET, exponentials

ALPHA = 1e-6  # chance that a distribution test fails on correct code
INF = float("inf")
RANK, HIDDEN = 8, 6


def grid(generator, *shape):
    """Multiples of 1/8: short sums of products are exact in fp32, so no order of summation can matter."""
    return torch.randint(-8, 9, shape, generator=generator) / 8


def problem(batch, block, vocab_size, head="vanilla", seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = {"gated": (RANK, HIDDEN + RANK), "rnn": (3 * RANK, 2 * RANK + HIDDEN)}
    options = {}
    if head != "vanilla":
        rows, columns = sizes[head]
        options = {"head": head, "head_weight": grid(g, rows, columns), "head_bias": grid(g, rows)}
        options["hidden"] = grid(g, batch, block, HIDDEN)
    anchor = torch.randint(vocab_size, (batch,), generator=g)
    return grid(g, batch, block, vocab_size), grid(g, vocab_size, RANK), grid(g, vocab_size, RANK), anchor, options


def bias_loop(prev, w1, w2, head="vanilla", head_weight=None, head_bias=None, hidden=None):
    """One row, [T] -> [T, V], from the formulas, without a batched product."""
    state, rows = torch.zeros(RANK), []
    for slot, token in enumerate(prev.tolist()):
        e = w1[token]
        if head == "vanilla":
            feature = e
        elif head == "gated":
            feature = torch.sigmoid(head_weight @ torch.cat([hidden[slot], e]) + head_bias) * e
        else:
            joint = head_weight @ torch.cat([state, e, hidden[slot]]) + head_bias
            a, c, o = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            feature = torch.tanh(o)
            state = torch.sigmoid(a) * state + (1 - torch.sigmoid(a)) * torch.tanh(c)
        rows.append(w2 @ feature)
    return torch.stack(rows) if rows else torch.zeros(0, w2.shape[0])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("batch", "block", "vocab_size"), [(1, 1, 1), (1, 5, 2), (3, 7, 63), (3, 0, 63), (2, 5, 311)])
def test_bias_equals_the_formulas(head, batch, block, vocab_size):
    _, w1, w2, _, options = problem(batch, block, vocab_size, head)
    prev = torch.randint(vocab_size, (batch, block), generator=torch.Generator().manual_seed(2))
    bias = markov_bias(prev, w1, w2, **options)
    assert bias.shape == (batch, block, vocab_size)
    subset = torch.arange(0, vocab_size, 2)
    torch.testing.assert_close(markov_bias(prev, w1, w2[subset], **options), bias[..., subset])
    for row in range(batch):
        one = {k: v[row] if k == "hidden" else v for k, v in options.items()}
        torch.testing.assert_close(bias[row], bias_loop(prev[row], w1, w2, **one))
        torch.testing.assert_close(markov_bias(prev[row], w1, w2, **one), bias[row])  # without a batch dimension


@pytest.mark.parametrize("head", HEADS)
def test_bias_is_differentiable(head):
    _, w1, w2, _, options = problem(2, 3, 5, head)
    leaves = {"w1": w1, "w2": w2, **{k: v for k, v in options.items() if k != "head"}}
    leaves = {k: v.double().requires_grad_() for k, v in leaves.items()}
    prev = torch.tensor([[0, 3, 4], [2, 2, 1]])

    def run(*values):
        return markov_bias(prev, **dict(zip(leaves, values, strict=True)), head=head)

    assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)


def test_unknown_head():
    with pytest.raises(ValueError, match="head must be one of"):
        markov_bias(torch.tensor([0]), torch.ones(1, 2), torch.ones(1, 2), head="dense")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(("batch", "block", "vocab_size"), [(1, 1, 1), (3, 5, 2), (3, 7, 63), (2, 0, 63), (1, 5, 311)])
def test_walk_equals_a_loop(head, coupled, batch, block, vocab_size):
    base, w1, w2, anchor, options = problem(batch, block, vocab_size, head)
    temperature = torch.tensor([0.7, 0.0, 1.0])[:batch]
    seed, position = torch.tensor([11, -5, 2**40])[:batch], torch.tensor([0, 17, 4000])[:batch]
    keep = (base.clone(), w1.clone(), w2.clone(), anchor.clone())
    walk = markov_walk(
        base, w1, w2, anchor, temperature=temperature, seed=seed, position=position, coupled=coupled, **options
    )
    assert all(torch.equal(a, b) for a, b in zip(keep, (base, w1, w2, anchor), strict=True)), "inputs were written to"
    assert walk.tokens.shape == walk.row_max.shape == walk.log_sum.shape == (batch, block)
    assert walk.tokens.dtype == torch.int64 and walk.row_max.dtype == walk.log_sum.dtype == torch.float32
    for row in range(batch):
        prev = [int(anchor[row])]
        one = {k: v[row] if k == "hidden" else v for k, v in options.items()}
        for slot in range(block):
            logits = base[row, slot] + bias_loop(torch.tensor(prev), w1, w2, **one)[-1]
            torch.testing.assert_close(walk.logits[row, slot], logits)
            t = float(temperature[row])
            if t == 0:
                token, q = int(walk.logits[row, slot].argmax()), 1.0
                got = float((walk.logits[row, slot, token] - walk.row_max[row, slot] - walk.log_sum[row, slot]).exp())
            else:
                counter = (seed[row], position[row] + 1 + slot, position[row] * (not coupled))
                noise = exponentials(*counter, DRAFT, vocab_size)
                token = int((walk.logits[row, slot] / t - noise.log()).argmax())
                q = (walk.logits[row, slot].double() / t).softmax(-1)
                got = ((walk.logits[row, slot] - walk.row_max[row, slot]) / t - walk.log_sum[row, slot]).exp().double()
            assert int(walk.tokens[row, slot]) == token
            got, q = torch.as_tensor(got).double(), torch.as_tensor(q).double()
            torch.testing.assert_close(got, q, rtol=1e-5, atol=1e-7)
            prev.append(token)


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize("candidates", [0, 7])
def test_a_row_alone_equals_the_row_in_a_batch(head, candidates):
    base, w1, w2, anchor, options = problem(3, 5, 63, head, seed=4)
    per = {
        "temperature": torch.tensor([0.9, 1.3, 0.0]),
        "seed": torch.tensor([3, 3, 8]),
        "position": torch.tensor([5, 6, 7]),
    }
    walk = markov_walk(base, w1, w2, anchor, **per, **options, candidates=candidates)
    for row in range(3):
        one = {k: v[row : row + 1] if k == "hidden" else v for k, v in options.items()}
        scalars = {k: v[row].item() for k, v in per.items()}
        alone = markov_walk(base[row : row + 1], w1, w2, anchor[row : row + 1], **scalars, **one, candidates=candidates)
        assert torch.equal(alone.tokens[0], walk.tokens[row])
        torch.testing.assert_close(alone.logits[0], walk.logits[row])
        torch.testing.assert_close(alone.log_sum[0], walk.log_sum[row])


def test_greedy_ties_go_to_the_lowest_id_and_statistics_are_finite():
    base = torch.zeros(2, 3, 5)
    base[:, 1, [2, 4]] = 1.0
    walk = markov_walk(base, None, None, torch.tensor([0, 0]), temperature=0.0, seed=0, position=0)
    assert walk.tokens.tolist() == [[0, 2, 0]] * 2
    assert walk.row_max.tolist() == [[0.0, 1.0, 0.0]] * 2 and walk.log_sum.eq(0).all()


def test_ties_among_candidates_go_to_the_lowest_id():
    """Base logits rise with the id and the bias falls, so all five tie; 2, 3, 4 are candidates."""
    base = torch.arange(5.0).expand(1, 1, 5)
    w1, w2 = torch.ones(5, 1), torch.arange(4.0, -1.0, -1.0)[:, None]
    common = {"temperature": 0.0, "seed": 0, "position": 0}
    assert markov_walk(base, w1, w2, torch.tensor([0]), **common, candidates=3).tokens.tolist() == [[2]]
    assert markov_walk(base, w1, w2, torch.tensor([0]), **common).tokens.tolist() == [[0]]


def test_rank_0_ignores_the_tokens():
    base = torch.randn(2, 5, 63, generator=torch.Generator().manual_seed(0))
    common = {"temperature": 1.0, "seed": 4, "position": 9}
    walks = [markov_walk(base, None, None, torch.tensor(a), **common) for a in ([0, 1], [5, 6])]
    assert torch.equal(walks[0].tokens, walks[1].tokens)
    assert torch.equal(walks[0].logits, base)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("candidates", [1, 2, 7, 62, 63, 200])
def test_candidates_truncate_q(candidates, ties):
    base, w1, w2, anchor, _ = problem(3, 5, 63)
    if not ties:
        base = base + torch.arange(63) * 1e-3
    common = {"temperature": torch.tensor([1.0, 0.0, 0.6]), "seed": 2, "position": 30}
    walk = markov_walk(base, w1, w2, anchor, **common, candidates=candidates)
    smallest = base.sort(-1, descending=True).values[..., min(candidates, 63) - 1, None]
    prev = torch.cat([anchor[:, None], walk.tokens[:, :-1]], 1)
    expected = (base + markov_bias(prev, w1, w2)).masked_fill(base < smallest, -INF)
    torch.testing.assert_close(walk.logits, expected)
    # The same draw from the truncated logits with the noise of the whole vocabulary.
    again = markov_walk(expected, None, None, anchor, **common)
    assert torch.equal(again.tokens, walk.tokens)
    torch.testing.assert_close(again.log_sum, walk.log_sum)


def test_logits_are_rounded_before_anything_else():
    base, w1, w2, anchor, _ = problem(3, 5, 311)
    base = base * 1.001
    common = {"temperature": 1.0, "seed": 2, "position": 30}
    walk = markov_walk(base, w1, w2, anchor, **common, logits_dtype=torch.bfloat16)
    assert walk.logits.dtype == torch.bfloat16
    prev = torch.cat([anchor[:, None], walk.tokens[:, :-1]], 1)
    assert torch.equal(walk.logits, (base + markov_bias(prev, w1, w2)).bfloat16())
    again = markov_walk(walk.logits.float(), None, None, anchor, **common)
    assert torch.equal(again.tokens, walk.tokens)
    assert torch.equal(again.row_max, walk.row_max) and torch.equal(again.log_sum, walk.log_sum)
    unrounded = markov_walk(base, w1, w2, anchor, **common)
    assert not torch.equal(unrounded.log_sum, walk.log_sum)


def test_half_precision_weights_and_dropped_logits():
    base, w1, w2, anchor, _ = problem(3, 5, 63)
    common = {"temperature": 0.8, "seed": 2, "position": 30}
    full = markov_walk(base, w1, w2, anchor, **common)
    half = markov_walk(base, w1.bfloat16(), w2.bfloat16(), anchor, **common, keep_logits=False)
    assert half.logits is None and half.log_sum.isfinite().all()
    same = markov_walk(base, w1, w2, anchor, **common, keep_logits=False)
    assert torch.equal(same.tokens, full.tokens) and torch.equal(same.log_sum, full.log_sum)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("candidates", [0, 4])
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_a_broken_slot_ends_its_row_alone(temperature, candidates, head):
    base, w1, w2, anchor, options = problem(4, 5, 63, head)
    common = {"temperature": temperature, "seed": 2, "position": 30, "candidates": candidates, **options}
    whole = markov_walk(base, w1, w2, anchor, **common)
    base[1, 2, 50] = float("nan")
    base[2, 0] = -INF
    walk = markov_walk(base, w1, w2, anchor, **common)
    assert walk.tokens[1, 2:].eq(-1).all() and walk.tokens[2].eq(-1).all()
    assert torch.equal(walk.tokens[1, :2], whole.tokens[1, :2])
    assert torch.equal(walk.tokens[[0, 3]], whole.tokens[[0, 3]])


def test_the_walk_samples_its_own_q():
    """Joint law of two slots over 40000 seeds: a chain whose second step depends on the first."""
    g = torch.Generator().manual_seed(1)
    draws, vocab_size = 40000, 3
    base, w1, w2 = torch.randn(1, 2, 3, generator=g), torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g)
    anchor = torch.zeros(draws, dtype=torch.int64)
    walk = markov_walk(
        base.expand(draws, -1, -1), w1, w2, anchor, temperature=0.8, seed=torch.arange(draws), position=12
    )
    first = ((base[0, 0] + w2 @ w1[0]).double() / 0.8).softmax(-1)
    second = ((base[0, 1] + w1 @ w2.T).double() / 0.8).softmax(-1)
    expected = (first[:, None] * second).flatten() * draws
    counts = torch.bincount(walk.tokens[:, 0] * vocab_size + walk.tokens[:, 1], minlength=9)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > ALPHA


def test_rejection_noise_depends_on_the_anchor_and_coupled_noise_does_not():
    """Position 12 drafted from anchor 10 (slot 1) and from anchor 11 (slot 0)."""
    base = torch.zeros(64, 2, 311)
    anchor, seed = torch.zeros(64, dtype=torch.int64), torch.arange(64)

    def tokens(position, coupled):
        common = {"temperature": 1.0, "seed": seed, "position": position, "coupled": coupled}
        return markov_walk(base, None, None, anchor, **common).tokens

    assert torch.equal(tokens(10, True)[:, 1], tokens(11, True)[:, 0])
    assert (tokens(10, False)[:, 1] == tokens(11, False)[:, 0]).float().mean() < 0.1
    noise = exponentials(seed, torch.tensor(12), torch.tensor(10), TARGET, 311)
    assert (tokens(10, False)[:, 1] == noise.argmin(-1)).float().mean() < 0.1


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("candidates", [0, 4], ids=["all", "candidates"])
@pytest.mark.parametrize("head", HEADS)
def test_a_vocabulary_is_a_walk_whose_other_tokens_cannot_be(head, candidates, coupled):
    """What it leaves out has -inf in the whole walk: the same tokens from the same noise, and the same q."""
    base, w1, w2, anchor, options = problem(6, 4, 41, head)
    vocabulary = torch.tensor([1, 2, 6, 7, 8, 13, 21, 22, 23, 37, 40])
    options |= {"temperature": torch.tensor([0.7, 1.0, 0.0]).repeat(2), "seed": torch.arange(6), "position": 17}
    options |= {"coupled": coupled, "candidates": candidates}
    hidden = torch.full_like(base, -INF)
    hidden[..., vocabulary] = base[..., vocabulary]
    whole = markov_walk(hidden, w1, w2, anchor, **options)
    part = markov_walk(base[..., vocabulary], w1, w2[vocabulary], anchor, vocabulary=vocabulary, **options)
    assert torch.equal(part.tokens, whole.tokens) and set(part.tokens.unique().tolist()) <= set(vocabulary.tolist())
    assert len(part.tokens.unique()) > 3
    torch.testing.assert_close(part.logits, whole.logits[..., vocabulary])
    torch.testing.assert_close(part.row_max, whole.row_max)
    torch.testing.assert_close(part.log_sum, whole.log_sum)
