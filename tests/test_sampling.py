"""Noise, cuts and seeds of the reference against loops, transformers' processors and their laws."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from dspark_fast.reference.philox import philox
from dspark_fast.reference.sampling import (
    ACCEPT,
    DRAFT,
    TARGET,
    _to_exponential,
    accept_uniform,
    cut_logits,
    expand_seeds,
    exponentials,
    exponentials_at,
    greedy_argmax,
    gumbel_argmax,
    per_row,
    softmax_statistics,
)

ALPHA = 1e-6  # chance that a distribution test fails on correct code
INF = float("inf")


def word(seed, position, anchor, stream, token):
    counter = (torch.tensor(c) for c in (token // 4, position, anchor, stream))
    return int(philox(*counter, torch.tensor(seed))[token % 4])


def cut_loop(logits, temperature, top_k, top_p, min_p):
    """The definition, one row, by sorting the set of values; float64 for the masses."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return {best}
    scaled = [float(torch.tensor(x) / torch.tensor(temperature)) for x in logits]
    kept = set(range(len(scaled)))
    if 0 < top_k < len(scaled):
        smallest = sorted(scaled, reverse=True)[top_k - 1]
        kept = {i for i in kept if scaled[i] >= smallest}
    weight = [math.exp(x - max(scaled)) for x in scaled]
    if top_p < 1:
        total = sum(weight[i] for i in kept)
        above = {i: sum(weight[j] for j in kept if scaled[j] > scaled[i]) for i in kept}
        kept = {i for i in kept if above[i] < top_p * total or scaled[i] == max(scaled)}
    return {i for i in kept if weight[i] >= min_p}


def kept_sets(cut):
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in cut.flatten(0, -2)]


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 63, 311])
def test_exponentials_equal_a_loop_in_float64(vocab_size):
    seed, position, anchor = torch.tensor([[5, -(2**63), 2**62 + 3], [8, 1, 2**31], [7, 0, 9]])
    noise = exponentials(seed, position, anchor, TARGET, vocab_size)
    assert noise.dtype == torch.float32
    for row in range(3):
        for token in {0, 1, vocab_size // 2, vocab_size - 1} & set(range(vocab_size)):
            u = (word(int(seed[row]), int(position[row]), int(anchor[row]), TARGET, token) + 0.5) / 2**32
            assert float(noise[row, token]) == pytest.approx(min(-math.log1p(-u), 24 * math.log(2)), rel=1e-6)


def test_exponential_tails():
    words = torch.tensor([0, 1, 2, 2**23, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    e = _to_exponential(words.float())
    assert e.isfinite().all() and (e > 0).all() and (e.diff() >= 0).all()
    exact = [-math.log1p(-(int(w) + 0.5) / 2**32) for w in words[:5]]
    assert e[:5].tolist() == pytest.approx(exact, rel=2e-7)
    assert e[-1].item() == pytest.approx(24 * math.log(2))


def test_exponentials_follow_their_law():
    noise = exponentials(torch.arange(50), torch.tensor(3), torch.tensor(2), DRAFT, 2001)
    assert stats.kstest(noise.flatten().numpy(), "expon").pvalue > ALPHA
    assert stats.spearmanr(noise[:, :-1].flatten(), noise[:, 1:].flatten()).pvalue > ALPHA
    assert stats.spearmanr(noise[:-1].flatten(), noise[1:].flatten()).pvalue > ALPHA


def test_exponentials_at_chosen_tokens_are_the_same():
    seed, position = torch.tensor([[4], [-9]]), torch.tensor([[10, 11, 12], [3, 4, 5]])
    anchor = position[:, :1] - 1
    tokens = torch.randint(0, 311, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    full = exponentials(seed, position, anchor, DRAFT, 311)
    assert torch.equal(exponentials_at(seed, position, anchor, DRAFT, tokens), full.gather(-1, tokens))


def test_every_part_of_the_counter_changes_the_noise():
    def noise(seed=1, position=5, anchor=4, stream=DRAFT):
        return exponentials(torch.tensor(seed), torch.tensor(position), torch.tensor(anchor), stream, 8)

    others = [noise(seed=2), noise(seed=1 + 2**40), noise(position=6), noise(anchor=3), noise(stream=TARGET)]
    others.append(noise(stream=ACCEPT))
    assert all((noise() != other).all() for other in others)


def test_accept_uniform_is_the_word():
    seed, position, anchor = torch.tensor([[7], [-1]]), torch.tensor([[3, 4, 5], [9, 10, 11]]), torch.tensor([[2], [8]])
    u = accept_uniform(seed, position, anchor)
    assert u.shape == (2, 3) and u.dtype == torch.float32
    for row in range(2):
        for slot in range(3):
            expected = word(int(seed[row]), int(position[row, slot]), int(anchor[row]), ACCEPT, 0)
            assert float(u[row, slot]) * 2**32 == pytest.approx(expected, rel=2**-24)
    many = accept_uniform(torch.arange(20000), torch.tensor(1), torch.tensor(0))
    assert many.min() >= 0 and many.max() < 1
    assert stats.kstest(many.numpy(), "uniform").pvalue > ALPHA


def test_gumbel_argmax_follows_softmax():
    logits = torch.tensor([0.3, -1.0, 2.0, -INF, 0.0, 1.1, -4.0])
    draws = 40000
    noise = exponentials(torch.arange(draws), torch.tensor(1), torch.tensor(0), TARGET, 7)
    counts = torch.bincount(gumbel_argmax(logits, noise), minlength=7)
    assert counts[3] == 0
    keep = logits.isfinite()
    expected = logits.double().softmax(0)[keep] * draws
    assert stats.chisquare(counts[keep].numpy(), expected.numpy()).pvalue > ALPHA


def test_argmax_ties_and_broken_rows():
    rows = torch.tensor([[1.0, 3, 3, 0], [1, float("nan"), 3, 0], [-INF] * 4, [0, INF, 0, 0], [-INF, -2, -INF, -INF]])
    expected = [1, -1, -1, -1, 1]
    assert greedy_argmax(rows).tolist() == expected
    assert gumbel_argmax(rows, torch.ones(5, 4)).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 311])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_cuts_equal_the_definition(vocab_size, ties, batch):
    generator = torch.Generator().manual_seed(vocab_size + batch)
    for trial in range(20):
        logits = torch.randn(batch, 2, vocab_size, generator=generator) * 3
        if ties:
            logits = logits.round()
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = -INF
        logits[..., 0] = 0.0  # no row of -inf alone

        def pick(values, dtype, generator=generator):
            index = torch.randint(len(values), (batch,), generator=generator)
            return torch.tensor(values, dtype=dtype)[index]

        temperature = pick([0.0, 0.5, 1.0, 1.7], torch.float32)
        top_k = pick([0, 1, 2, 5, 50, 400], torch.int64)
        top_p = pick([0.0, 0.31, 0.77, 0.95, 1.0], torch.float32)
        min_p = pick([0.0, 0.07, 1.0], torch.float32)
        if trial % 2:
            top_k = torch.zeros_like(top_k)
        cut = cut_logits(logits, temperature, top_k, top_p, min_p)
        for row in range(batch):
            options = [float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])]
            for slot, kept in enumerate(kept_sets(cut[row])):
                alive = {i for i in range(vocab_size) if logits[row, slot, i] > -INF}
                assert kept == cut_loop(logits[row, slot].tolist(), *options) & alive, options
                index = sorted(kept)
                exact = logits[row, slot, index] / (temperature[row] if temperature[row] > 0 else 1.0)
                assert torch.equal(cut[row, slot, index], exact)
            alone = cut_logits(logits[row : row + 1], *options)
            assert torch.equal(alone, cut[row : row + 1])


def test_top_p_is_strict():
    """Weights 1, 1/2, 1/2: the mass above the pair is exactly 0.5, which is not < 0.5."""
    half = torch.tensor(0.5).log()
    logits = torch.stack([half, torch.tensor(0.0), half])[None]
    assert logits.exp().tolist() == [[0.5, 1.0, 0.5]]
    assert kept_sets(cut_logits(logits, 1.0, top_p=0.5)) == [{1}]
    assert kept_sets(cut_logits(logits, 1.0, top_p=0.5001)) == [{0, 1, 2}]


def test_top_p_counts_a_tie_that_top_k_kept():
    """All five survive top-2, so the mass above the four is 1 / (1 + 4/e) = 0.40; of the first two alone 0.73."""
    logits = torch.tensor([[1.0, 2, 1, 1, 1]])
    assert kept_sets(cut_logits(logits, 1.0, 2, 0.5)) == [{0, 1, 2, 3, 4}]
    assert kept_sets(cut_logits(logits, 1.0, 2, 0.4)) == [{1}]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_top_p_beyond_the_first_guess(top_p):
    """A flat row's nucleus does not fit in the first 1024 tokens; a peaked one's does. Both in one batch."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5000, generator=generator) * torch.tensor([[0.1], [8.0]])
    cut = cut_logits(logits, 1.0, top_p=top_p)
    for row in range(2):
        p = logits[row].double().softmax(-1)
        ordered, index = p.sort(descending=True)
        above = ordered.cumsum(-1) - ordered
        expected = set(index[above < top_p].tolist())
        assert len(expected ^ kept_sets(cut)[row]) <= 1  # the token at the edge may fall either way in fp32


def test_cuts_equal_transformers():
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(40, 311, generator=torch.Generator().manual_seed(5)) * 2
    settings = [(0.7, 50, 0.9, 0.0), (1.3, 0, 0.8, 0.05), (1.0, 20, 1.0, 0.1), (0.6, 1, 0.5, 0.2)]
    for temperature, top_k, top_p, min_p in settings:
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = MinPLogitsWarper(min_p)(None, expected)
        assert torch.equal(cut_logits(logits, temperature, top_k, top_p, min_p), expected)


def test_neutral_cuts_do_nothing_and_nothing_is_written():
    logits = torch.randn(2, 3, 63)
    before = logits.clone()
    assert cut_logits(logits, 1.0) is logits
    assert torch.equal(cut_logits(logits, 0.3), logits / torch.tensor(0.3))
    cut_logits(logits, torch.tensor([0.0, 2.0]), 3, 0.5, 0.1)
    assert torch.equal(logits, before)
    assert cut_logits(logits.bfloat16(), 1.0).dtype == torch.float32


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {}])
def test_a_broken_row_stays_broken_and_alone(options):
    logits = torch.randn(3, 63)
    whole = cut_logits(logits, 0.8, **options)
    logits[1, 40] = float("nan")
    cut = cut_logits(logits, 0.8, **options)
    assert cut[1].isnan().any()
    assert torch.equal(cut[[0, 2]], whole[[0, 2]])
    logits[1] = -INF
    assert greedy_argmax(cut_logits(logits, 0.8, **options))[1] == -1


def test_softmax_statistics():
    logits = torch.randn(3, 4, 63).bfloat16()
    temperature = torch.tensor([0.5, 1.0, 0.0])
    row_max, log_sum = softmax_statistics(logits, temperature[:, None])
    assert row_max.dtype == log_sum.dtype == torch.float32
    q = ((logits.float() - row_max[..., None])[:2] / temperature[:2, None, None] - log_sum[:2, :, None]).exp()
    torch.testing.assert_close(q, (logits[:2].float() / temperature[:2, None, None]).softmax(-1))
    assert log_sum[2].eq(0).all() and torch.equal(row_max, logits.float().amax(-1))


def test_expand_seeds():
    seeds = expand_seeds(1234, 3, 4)
    assert seeds.shape == (12,) and seeds.dtype == torch.int64 and seeds.unique().numel() == 12
    for prompt in range(3):
        for ret in range(4):
            words = philox(*(torch.tensor(c) for c in (prompt, ret, 0, 3)), torch.tensor(1234))
            assert int(seeds[prompt * 4 + ret]) % 2**64 == int(words[0]) + (int(words[1]) << 32)
    assert torch.equal(expand_seeds(1234, 2, 2), seeds.view(3, 4)[:2, :2].flatten())
    assert torch.equal(expand_seeds(-1, 1), expand_seeds(2**64 - 1, 1))
    assert (expand_seeds(1235, 3, 4) != seeds).all()
    assert expand_seeds(7, 0).shape == (0,)


def test_per_row():
    device = torch.device("cpu")
    assert per_row(2, 3, torch.float32, device).tolist() == [2.0, 2.0, 2.0]
    assert per_row(torch.tensor([1, 2, 3]), 3, torch.float32, device).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError):
        per_row(torch.tensor([1, 2]), 3, torch.float32, device)
