"""Verification against a loop over rows and slots, and against the laws that make it lossless."""

from __future__ import annotations

import sys

import pytest
import torch
from scipy import stats

from dspark_fast.reference.markov import markov_walk
from dspark_fast.reference.sampling import (
    ACCEPT,
    DRAFT,
    TARGET,
    accept_uniform,
    cut_logits,
    exponentials,
    softmax_statistics,
)
from dspark_fast.reference.verify import MODES, verify

ALPHA = 1e-6  # chance that a distribution test fails on correct code
INF = float("inf")
NAN = float("nan")


def verify_loop(target, tokens, draft, length, temperature, seed, position, mode, cuts):
    """One row, slot by slot; the mode's definition in float64 except for the noise."""
    vocab_size = target.shape[-1]
    rows = cut_logits(target[None], temperature, **cuts)[0]
    anchor = 0 if mode == "coupled" else position
    stream = DRAFT if mode == "coupled" else TARGET

    def noise(slot):
        counter = (torch.tensor(seed), torch.tensor(position + 1 + slot), torch.tensor(anchor))
        return exponentials(*counter, stream, vocab_size).double()

    def draw(weights, slot):
        return int((weights / noise(slot)).argmax())

    for slot in range(length + 1):
        if not (rows[slot].max().isfinite()):
            return slot, -1
        p = rows[slot].double().softmax(-1)
        last = slot == length or tokens[slot] < 0
        if mode == "greedy" or temperature == 0:
            own = int(target[slot].argmax())
        elif mode == "coupled":
            own = draw(p, slot)
        elif last:
            return slot, draw(p, slot)
        else:
            q = (draft[slot].double() / temperature).softmax(-1)
            u = accept_uniform(torch.tensor(seed), torch.tensor(position + 1 + slot), torch.tensor(position)).double()
            if u * q[tokens[slot]] < p[tokens[slot]]:
                continue
            residual = (p - q).clamp(min=0)
            return slot, draw(residual if residual.sum() > 0 else p, slot)
        if last or own != tokens[slot]:
            return slot, own
    raise AssertionError("unreachable")


def problem(batch, block, vocab_size, seed=0):
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, block + 1, vocab_size, generator=g) * 2
    draft = target[:, :-1] + torch.randn(batch, block, vocab_size, generator=g)
    target[torch.rand(target.shape, generator=g) < 0.1] = -INF
    target[..., -1] = 0.0
    lengths = torch.randint(0, block + 1, (batch,), generator=g)
    return target, draft, lengths


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 311])
@pytest.mark.parametrize("block", [0, 1, 5, 7])
def test_equals_a_loop(mode, cuts, vocab_size, block):
    batch = 3
    for trial in range(3):
        target, draft, lengths = problem(batch, block, vocab_size, seed=trial)
        temperature = torch.tensor([0.8, 0.0, 1.0]).roll(trial)
        seed, position = torch.tensor([trial, -7, 2**50]), torch.tensor([0, 31, 2000])
        anchor = torch.zeros(batch, dtype=torch.int64)
        common = {"temperature": temperature, "seed": seed, "position": position}
        walk = markov_walk(draft, None, None, anchor, **common, coupled=mode == "coupled")
        tokens = walk.tokens.clone()
        if trial == 2 and block > 2:
            tokens[0, 1] = -1  # a drafter that failed
        before = [t.clone() for t in (target, tokens, draft, lengths)]
        result = verify(target, tokens, draft, lengths, **common, mode=mode, **cuts)
        assert all(torch.equal(a, b) for a, b in zip(before, (target, tokens, draft, lengths), strict=True))
        assert result[0].dtype == result[1].dtype == torch.int64
        given = verify(
            target, tokens, draft, lengths, **common, mode=mode, **cuts,
            draft_row_max=walk.row_max, draft_log_sum=walk.log_sum,
        )  # fmt: skip
        for row in range(batch):
            scalars = (float(temperature[row]), int(seed[row]), int(position[row]))
            tensors = (target[row], tokens[row].tolist(), draft[row], int(lengths[row]))
            expected = verify_loop(*tensors, *scalars, mode, cuts)
            assert (int(result[0][row]), int(result[1][row])) == expected
            assert (int(given[0][row]), int(given[1][row])) == expected
            alone = verify(
                target[row : row + 1], tokens[row : row + 1], draft[row : row + 1], lengths[row : row + 1],
                temperature=scalars[0], seed=scalars[1], position=scalars[2], mode=mode, **cuts,
            )  # fmt: skip
            assert (int(alone[0]), int(alone[1])) == expected


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode must be one of"):
        tensors = (torch.zeros(1, 1, 2), torch.zeros(1, 0).long(), None, torch.zeros(1).long())
        verify(*tensors, temperature=1.0, seed=0, position=0, mode="typical")


@pytest.mark.parametrize("mode", MODES)
def test_nothing_past_the_length_or_the_first_rejection_counts(mode):
    target, draft, lengths = problem(3, 5, 63, seed=9)
    lengths = torch.tensor([0, 2, 4])
    common = {"seed": 3, "position": 4, "mode": mode, "temperature": 1.0}
    tokens = markov_walk(
        draft, None, None, torch.zeros(3).long(), temperature=1.0, seed=3, position=4, coupled=mode == "coupled"
    ).tokens
    accepted, after = verify(target, tokens, draft, lengths, **common)
    for row in range(3):
        edge = int(accepted[row])
        target[row, edge + 1 :] = NAN
        draft[row, min(edge + 1, int(lengths[row])) :] = NAN
        tokens[row, min(edge + 1, int(lengths[row])) :] = 10**9
    again = verify(target, tokens, draft, lengths, **common)
    assert torch.equal(again[0], accepted) and torch.equal(again[1], after)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", ["nan", "some nan", "-inf", "+inf"])
def test_a_broken_target_row_gives_minus_one(mode, broken):
    """Slots 0 and 1 agree for certain, so row 2 is needed; in the last batch row it lies past the length."""
    target = torch.full((3, 4, 5), -30.0)
    target[..., 3] = 30.0
    draft = target[:, :3].clone()
    tokens = torch.full((3, 3), 3)
    value = {"nan": NAN, "some nan": NAN, "-inf": -INF, "+inf": INF}[broken]
    target[1:, 2, slice(1, 2) if broken in ("some nan", "+inf") else slice(None)] = value
    lengths = torch.tensor([3, 3, 1])
    accepted, after = verify(target, tokens, draft, lengths, temperature=0.9, seed=1, position=8, mode=mode)
    assert accepted.tolist() == [3, 2, 1] and after.tolist() == [3, -1, 3]
    plain = verify(target[:, 2:3], tokens[:, :0], None, lengths * 0, temperature=0.9, seed=1, position=8, mode=mode)
    assert plain[0].tolist() == [0, 0, 0] and plain[1].tolist() == [3, -1, -1]


@pytest.mark.parametrize("mode", MODES)
def test_minus_one_never_equals_minus_one(mode):
    tensors = (torch.full((1, 2, 4), NAN), torch.tensor([[-1]]), torch.zeros(1, 1, 4), torch.tensor([1]))
    result = verify(*tensors, temperature=1.0, seed=0, position=0, mode=mode)
    assert (int(result[0]), int(result[1])) == (0, -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failed_draft_ends_its_block_there(mode, temperature):
    """Same verdict as a block cut before the -1, although the draft's row is NaN."""
    target, draft, _ = problem(40, 5, 63, seed=2)
    common = {"temperature": temperature, "seed": torch.arange(40), "position": 7}
    zeros = torch.zeros(40, dtype=torch.int64)
    draft[:, 2] = NAN
    walk = markov_walk(draft, None, None, zeros, **common, coupled=mode == "coupled")
    assert walk.tokens[:, 2:].eq(-1).all()
    result = verify(target, walk.tokens, walk.logits, zeros + 5, **common, mode=mode)
    cut = verify(target, walk.tokens, walk.logits, zeros + 2, **common, mode=mode)
    assert torch.equal(result[0], cut[0]) and torch.equal(result[1], cut[1])
    assert (result[0] == 2).any() and (result[1] >= 0).all()


def test_greedy_rows_in_rejection_mode_take_any_q():
    """Ties, a one-hot draft and a draft sure of another token: the verdict at temperature 0 is the argmax."""
    target = torch.tensor([0.0, 2.0, 2.0, -1.0]).expand(4, 2, 4)
    draft = torch.tensor([[-INF, 0, -INF, -INF], [0, 0, 0, 0], [0, -INF, 0, -INF], [0, -50.0, 30, -50]])[:, None]
    tokens = torch.tensor([[1], [0], [2], [2]])
    for lengths in (torch.ones(4).long(), torch.ones(4).int()):
        common = {"temperature": torch.tensor([0.0, 0, 0, 0.001]), "seed": torch.arange(4), "position": 3}
        accepted, after = verify(target, tokens, draft, lengths, **common)
        assert accepted[:3].tolist() == [1, 0, 0] and after[:3].tolist() == [1, 1, 1]


def test_strict_acceptance(monkeypatch):
    """At u = 0 probability 0 is refused and any other is taken; at the largest u p = q is taken."""
    target = torch.tensor([[[0.0, -INF, -40.0], [0.0, 0.0, 0.0]]]).expand(3, -1, -1)
    draft = torch.tensor([[[-INF, 0.0, -INF]], [[-INF, -INF, 0.0]], [[0.0, -INF, -40.0]]])
    tokens = torch.tensor([[1], [2], [0]])
    for u, expected in [(0.0, [0, 1, 1]), (1 - 2**-24, [0, 0, 1])]:
        monkeypatch.setattr(
            sys.modules[verify.__module__], "accept_uniform", lambda s, p, a, u=u: torch.full(p.shape, u)
        )
        accepted, after = verify(target, tokens, draft, torch.ones(3).long(), temperature=1.0, seed=0, position=0)
        assert accepted.tolist() == expected
        assert after[0] in (0, 2)


def test_an_empty_residual_falls_back_to_p(monkeypatch):
    """q a little above p everywhere, which only rounding can bring about: forced by u = 1 and a shifted log_sum."""
    monkeypatch.setattr(sys.modules[verify.__module__], "accept_uniform", lambda s, p, a: torch.ones(p.shape))
    logits = torch.tensor([[0.5, -INF, 1.0, 0.0]])
    rows = 20000
    target, draft = logits.expand(rows, 2, 4), logits.expand(rows, 1, 4)
    row_max, log_sum = softmax_statistics(draft, torch.tensor(1.0))
    common = {"temperature": 1.0, "seed": torch.arange(rows), "position": 3}
    common |= {"draft_row_max": row_max, "draft_log_sum": log_sum - 1e-5}
    accepted, after = verify(target, torch.full((rows, 1), 2), draft, torch.ones(rows).long(), **common)
    assert accepted.eq(0).all()
    counts = torch.bincount(after, minlength=4)
    assert counts[1] == 0
    expected = logits[0].double().softmax(-1) * rows
    assert stats.chisquare(counts[[0, 2, 3]].numpy(), expected[[0, 2, 3]].numpy()).pvalue > ALPHA


ROW_P = [
    [0.7, 0.3, 0.0, 0.0],
    [0.25, 0.25, 0.25, 0.25],
    [0.5, 0.5, 0.0, 0.0],
    [0.97, 0.01, 0.01, 0.01],
    [0.4, 0.3, 0.2, 0.1],
    [0.4, 0.3, 0.2, 0.1],
]
ROW_Q = [
    [0.3, 0.7, 0.0, 0.0],
    [0.97, 0.01, 0.01, 0.01],
    [0.0, 0.0, 0.5, 0.5],  # disjoint
    [0.25, 0.25, 0.25, 0.25],
    [0.4, 0.3, 0.2, 0.1],  # equal
    [0.0, 0.0, 0.0, 1.0],  # one-hot
]


def chi_square(counts, probabilities):
    """p-value; categories of probability 0 must be empty, and those of small expectation are merged."""
    total = counts.sum()
    assert counts[probabilities == 0].eq(0).all(), "a token of probability 0 came out"
    expected = probabilities * total
    small = expected < 10
    merged = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    merged, expected = merged[expected > 0], expected[expected > 0]
    if expected.numel() < 2:
        return 1.0
    return float(stats.chisquare(merged.numpy(), (expected * merged.sum() / expected.sum()).numpy()).pvalue)


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("pair", range(len(ROW_P)))
def test_the_committed_tokens_have_the_targets_law(mode, temperature, pair):
    """Two drafted tokens of a chain q against a chain p; first, second and bonus token, 30000 seeds, tiny vocabulary.

    The target's second and third row depend on the token before (P rolled by it), as a model's would.
    """
    rows, vocab_size = 30000, 4
    p, q = torch.tensor(ROW_P[pair]), torch.tensor(ROW_Q[pair])
    shift = torch.stack([p.roll(i) for i in range(vocab_size)])  # law of the next token after token i
    target_laws, draft_law = shift.log(), q.log()
    base = draft_law.expand(rows, 2, vocab_size)
    seed = torch.arange(rows) * 77 - 10**6
    common = {"temperature": temperature, "seed": seed, "position": 40}
    w1, w2 = torch.eye(vocab_size), torch.tensor([[0.0, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 1, 1, 0]])
    walk = markov_walk(base, w1, w2, torch.zeros(rows).long(), **common, coupled=mode == "coupled")
    before = torch.cat([torch.zeros(rows, 1).long(), walk.tokens], 1)
    target = target_laws[before]
    lengths = torch.arange(rows) % 3
    accepted, after = verify(
        target, walk.tokens, None if mode == "coupled" else walk.logits, lengths, **common, mode=mode,
        draft_row_max=walk.row_max, draft_log_sum=walk.log_sum,
    )  # fmt: skip
    laws = (target_laws.double() / temperature).softmax(-1)

    committed = torch.cat([walk.tokens, torch.full((rows, 1), -1)], 1).scatter(1, accepted[:, None], after[:, None])
    assert chi_square(torch.bincount(committed[:, 0], minlength=4), laws[0]) > ALPHA
    for slot in (1, 2):  # what follows depends on the token before it and not on how it was committed
        for token in range(vocab_size):
            reached = (accepted >= slot) & (committed[:, slot - 1] == token)
            if reached.sum() >= 200:
                assert chi_square(torch.bincount(committed[reached, slot], minlength=4), laws[token]) > ALPHA
    if mode == "rejection" and temperature == 1.0:  # the rate is 1 - TV, no less
        slot_q = (walk.logits[0, 0].double()).softmax(-1)
        rate = float(torch.minimum(slot_q, laws[0]).sum())
        judged = lengths >= 1
        assert stats.binomtest(int((accepted[judged] >= 1).sum()), int(judged.sum()), min(rate, 1.0)).pvalue > ALPHA
    if mode == "coupled":
        slot_q = (walk.logits[0, 0].double() / temperature).softmax(-1)
        distance = float((slot_q - laws[0]).abs().sum()) / 2
        judged = lengths >= 1
        count, total = int((accepted[judged] >= 1).sum()), int(judged.sum())
        bound = (1 - distance) / (1 + distance)
        assert stats.binomtest(count, total, bound, alternative="less").pvalue > ALPHA


def test_cuts_apply_to_the_target_alone():
    """Draft from everything, target top-2: the law is the cut target's."""
    rows = 30000
    logits = torch.tensor([1.0, 0.5, 0.8, -1.0])
    draft = torch.zeros(rows, 1, 4)
    common = {"temperature": 0.7, "seed": torch.arange(rows), "position": 2}
    walk = markov_walk(draft, None, None, torch.zeros(rows).long(), **common)
    accepted, after = verify(
        logits.expand(rows, 2, 4), walk.tokens, walk.logits, torch.ones(rows).long(), **common, top_k=2
    )
    first = torch.where(accepted > 0, walk.tokens[:, 0], after)
    law = cut_logits(logits[None], 0.7, 2)[0].double().softmax(-1)
    assert chi_square(torch.bincount(first, minlength=4), law) > ALPHA
    assert chi_square(torch.bincount(after[accepted == 1], minlength=4), law) > ALPHA


@pytest.mark.parametrize("block", [0, 1, 3])
def test_coupled_equals_plain_sampling_whatever_the_draft(block):
    """Rounds of any length, any drafter: the sequence is that of one-token steps with the same seed."""
    vocab_size, length, rows = 11, 24, 5
    g = torch.Generator().manual_seed(block)
    table = torch.randn(vocab_size, vocab_size, generator=g) * 2  # target's logits after each token
    seed = torch.arange(rows) + 100
    common = {"mode": "coupled", "temperature": torch.tensor([1.0, 0.7, 0.0, 1.5, 1.0]), "top_k": 6, "top_p": 0.9}

    plain = torch.zeros(rows, length + 1).long()
    for i in range(length):
        empty = plain[:, :0]
        _, plain[:, i + 1] = verify(
            table[plain[:, i]][:, None], empty, None, torch.zeros(rows).int(), seed=seed, position=i, **common
        )
    for row in range(rows):
        own = {k: v[row : row + 1] if isinstance(v, torch.Tensor) else v for k, v in common.items()}
        sequence = [0]
        while len(sequence) <= length:
            drafts = torch.randint(vocab_size, (1, block), generator=g)
            known = plain[row, len(sequence) : len(sequence) + block][None]
            if known.shape[1] == block and len(sequence) % 2:
                drafts = torch.where(torch.rand(1, block, generator=g) < 0.7, known, drafts)
            context = torch.cat([torch.tensor([sequence[-1:]]), drafts], 1)
            accepted, after = verify(
                table[context], drafts, None, torch.tensor([block]), seed=seed[row : row + 1],
                position=len(sequence) - 1, **own,
            )  # fmt: skip
            sequence += [*drafts[0, : int(accepted)].tolist(), int(after)]
        assert sequence[: length + 1] == plain[row].tolist()


def test_coupled_accepts_everything_when_the_draft_is_the_target():
    target = torch.randn(50, 6, 63, generator=torch.Generator().manual_seed(0))
    common = {"temperature": 0.8, "seed": torch.arange(50), "position": 6}
    walk = markov_walk(target[:, :5], None, None, torch.zeros(50).long(), **common, coupled=True)
    accepted, _ = verify(target, walk.tokens, None, torch.full((50,), 5), **common, mode="coupled")
    assert accepted.eq(5).all()
    walk = markov_walk(target[:, :5], None, None, torch.zeros(50).long(), **common)
    accepted, _ = verify(target, walk.tokens, walk.logits, torch.full((50,), 5), **common)
    assert accepted.eq(5).all()


def test_streams_are_apart():
    """Draft, judge and resample read different words: resampled tokens do not correlate with the drafted ones."""
    seed = torch.arange(2000)
    where = (seed, torch.tensor(5), torch.tensor(4))
    noises = [exponentials(*where, stream, 4)[:, 0] for stream in (DRAFT, ACCEPT, TARGET)]
    noises.append(accept_uniform(*where))
    for i in range(3):
        for j in range(i):
            assert stats.spearmanr(noises[i], noises[j]).pvalue > ALPHA


def test_rounded_draft_logits_are_exact_too():
    """bf16 drafts over a small spread: a q taken from the unrounded logits would be off by 0.4 % a token."""
    rows = 60000
    base = torch.tensor([5.013, 5.0, 4.987, 5.02])
    target = torch.tensor([5.0, 5.1, 4.9, 5.0])
    common = {"temperature": 0.05, "seed": torch.arange(rows), "position": 2}
    walk = markov_walk(
        base.expand(rows, 1, 4), None, None, torch.zeros(rows).long(), **common, logits_dtype=torch.bfloat16
    )
    accepted, after = verify(target.expand(rows, 2, 4), walk.tokens, walk.logits, torch.ones(rows).long(), **common)
    first = torch.where(accepted > 0, walk.tokens[:, 0], after)
    assert chi_square(torch.bincount(first, minlength=4), (target.double() / 0.05).softmax(-1)) > ALPHA
