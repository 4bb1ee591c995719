"""Tokens of probability 1e-6 to 1e-8 appear at their rate, on both backends; and what naive noise would give."""

from __future__ import annotations

import checks
import pytest
import torch
from checks import DOORS, RARE, should_win, winning_words
from mutants import MUTANTS
from planted import words
from scipy.stats import binom

from dspark_fast import ops
from dspark_fast.reference.philox import philox
from dspark_fast.reference.sampling import ACCEPT, DRAFT, TARGET, exponentials

INF = float("inf")
SEEDS = 1 << 22
SMALL = 1 << 16  # words below which a rare token may win
POSITION = 9


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("p", RARE)
def test_the_words_that_let_a_rare_token_win(door, p):
    """Counted one by one: at 1e-8 they are 30 of 4,294,967,296."""
    found, exact = winning_words(*DOORS[door], p), should_win(p)
    print(f"{door}: {found} words, {exact:.2f} for exact numbers, rate {found / exact * p:.3g}")
    assert abs(found - exact) <= max(1.0, 0.002 * exact)


def test_what_naive_noise_would_give():
    """The rate of a token of probability p, as a multiple of p."""
    naive = [mutant for mutant in MUTANTS if mutant.by is checks.rare_tokens_at_their_rate]
    assert len(naive) == 3
    for mutant in naive:
        with mutant.fault():
            rates = [winning_words(*DOORS["walk"], p) / should_win(p) for p in RARE]
        print(f"{mutant.name}: " + ", ".join(f"{rate:.2f} at {p:g}" for rate, p in zip(rates, RARE)))
        assert rates[-1] == 0 and abs(rates[1] - 1) > 0.05
    rates = [winning_words(*DOORS["walk"], p) / should_win(p) for p in RARE]
    assert rates == pytest.approx([1, 1, 1], abs=0.03)


def test_rare_tokens_in_32_million_races():
    """31 tokens of 1e-6 each against a common one, under real noise: 32.5 wins expected."""
    races, p, wins = 1 << 20, 1e-6, 0
    for seeds in torch.arange(races).split(1 << 16):
        place = torch.full_like(seeds, POSITION)
        e = exponentials(seeds, place, place - 1, TARGET, 32)
        wins += int((e[:, 1:].amin(1) / p < e[:, 0] / (1 - 31 * p)).sum())
    expected = 31 * p
    print(f"{wins} wins, {races * expected:.1f} expected")
    assert min(binom.cdf(wins, races, expected), binom.sf(wins - 1, races, expected)) > 1e-4


@pytest.fixture(scope="module")
def lucky():
    """``lucky(stream)``: seeds and tokens 0 .. 3 whose word is below 2^16, at position 9 of a round anchored at 8."""
    made = {}

    def work(stream):
        if stream not in made:
            found = []
            for seeds in torch.arange(SEEDS).split(1 << 18):
                zero = torch.zeros_like(seeds)
                drawn = torch.stack(philox(zero, zero + POSITION, zero + POSITION - 1, zero + stream, seeds), 1)
                rows, tokens = (drawn < SMALL).nonzero(as_tuple=True)
                found.append(torch.stack([seeds[rows], tokens, drawn[rows, tokens]], 1))
            made[stream] = torch.cat(found)
        return made[stream]

    return work


def played(lucky, stream, p, rows, backend):
    """Those seeds in the op itself; wins, what float64 arithmetic on the same words decides, and the exact chance."""
    seeds, tokens, small = lucky(stream)[:rows].T
    logits = torch.full((len(seeds), 8), -INF)
    logits[torch.arange(len(seeds)), tokens] = torch.tensor(p).log()
    logits[:, 4] = torch.tensor(1.0 - p).log()
    none = torch.zeros(len(seeds)).long()
    at = {"temperature": 1.0, "seed": seeds, "position": POSITION - 1, "backend": backend}
    if stream == DRAFT:
        drawn = ops.markov_walk(logits[:, None], None, None, none, **at).tokens[:, 0]
    else:
        drawn = ops.verify(logits[:, None], none[:, None][:, :0], None, none, **at)[1]
    zero = torch.zeros_like(seeds)
    common = philox(zero + 1, zero + POSITION, zero + POSITION - 1, zero + stream, seeds)[0]

    def e(word):
        return -torch.log1p(-(word.double() + 0.5) * 2.0**-32)

    odds = p / (1 - p)
    every = e(torch.arange(SMALL))
    chance = float((-every / odds).exp().mean())
    return drawn == tokens, e(small) / p < e(common) / (1 - p), chance


@pytest.mark.parametrize("stream", [DRAFT, TARGET], ids=["walk", "verify"])
@pytest.mark.parametrize("p", [1e-5, 1e-6, 1e-7, 1e-8])
def test_seeds_whose_words_are_small(lucky, stream, p):
    """Only these can let a rare token win: the op decides each as exact arithmetic does, and they win as often."""
    won, exact, chance = played(lucky, stream, p, None, "reference")
    print(f"{int(won.sum())} of {len(won)} win, {len(won) * chance:.2f} expected")
    assert torch.equal(won, exact)
    wins = int(won.sum())
    assert min(binom.cdf(wins, len(won), chance), binom.sf(wins - 1, len(won), chance)) > 1e-4


@pytest.mark.parametrize("stream", [DRAFT, TARGET], ids=["walk", "verify"])
@pytest.mark.parametrize("p", [1e-6, 1e-7])
def test_seeds_whose_words_are_small_in_the_kernels(lucky, stream, p):
    """The same seeds interpreted; those with the smallest words, so that there are winners among so few."""
    found = lucky(stream)
    first = found[found[:, 2].argsort()][:24]
    won, exact, _ = played(lambda stream: first, stream, p, None, "kernel")
    assert torch.equal(won, exact) and int(won.sum()) >= 2


def kept_words(ratio: float) -> float:
    """Of all 2^32 words, how many keep a draft of q = 1 and p = ratio."""
    ends = torch.arange(1 << 14)
    target = torch.tensor([ratio, 1.0 - ratio]).log().expand(len(ends), 2, 2)
    draft = torch.tensor([0.0, -INF]).expand(len(ends), 1, 2)
    at = {"temperature": 1.0, "seed": 0, "position": 5}
    with words({(ACCEPT, 0): ends}):
        kept, _ = ops.verify(target, torch.zeros(len(ends), 1).long(), draft, torch.ones(len(ends)).long(), **at)
    return int(kept.sum())


@pytest.mark.parametrize("ratio", [1e-6, 1e-7, 1e-8])
def test_a_draft_far_too_likely_is_kept_at_its_rate(ratio):
    """p / q down to 1e-8."""
    found, exact = kept_words(ratio), ratio * 2.0**32
    print(f"{found} words, {exact:.1f} for exact numbers")
    assert abs(found - exact) <= max(1.0, 0.002 * exact)
