"""Speculation that loses is switched off and tried again, by the clock alone; which tokens come does not hang on it."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace

import pytest
import torch

import dspark_fast
from dspark_fast import generation
from dspark_fast.engine import loop
from dspark_fast.engine.switch import Switch
from dspark_fast.engine.target import RaggedTarget

BLOCK = 5


def probability(tau):
    """Of accepting a draft, so that a round of BLOCK of them gives ``tau`` tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**slot for slot in range(BLOCK + 1)) < tau else (low, middle)
    return low


def call(cost, tau, tokens, *, seed=0, noise=0.0, hiccups=0.0, once=0.0, lag=0):
    """One row under a simulated clock.

    Args:
        cost: steps that a round takes.
        tau: mean tokens per round; two of them for the first and the second half.
        noise: relative deviation of every time that is measured.
        hiccups: how often 10 steps are added to one.
        once: steps that the first of each kind of round takes more, as a capture does.
        lag: rounds between making one and learning of it.
    """
    dice, switch, waiting, kinds = random.Random(seed), Switch(), [], set()
    made, spent, plain = 0, 0.0, 0
    by_half = [probability(one) for one in (tau if isinstance(tau, tuple) else (tau, tau))]
    halves = [0.0, 0.0]
    while made < tokens:
        drafting, gain, half = switch.drafts(), 1, int(2 * made >= tokens)
        while drafting and gain <= BLOCK and dice.random() < by_half[half]:
            gain += 1
        true = cost if drafting else 1.0
        seen = max(true * dice.gauss(1, noise), 0.1) + 10 * (dice.random() < hiccups)
        waiting.append((drafting, seen, gain))
        slow = once * (drafting not in kinds)  # the host does that, while it waits for an earlier report
        kinds.add(drafting)
        if len(waiting) > lag:
            drafted, seconds, heard = waiting.pop(0)
            switch.note(drafted, seconds + slow, heard)
        made, spent, plain = made + gain, spent + true, plain + (not drafting)
        halves[half] += true
    return SimpleNamespace(tokens=made, spent=spent, plain=plain, pauses=switch.pauses, halves=halves)


def mean(seeds, what, *args, **kwargs):
    return statistics.fmean(what(call(*args, seed=seed, **kwargs)) for seed in range(seeds))


def loss(done):
    """Against plain steps alone, relative."""
    return done.spent / done.tokens - 1


@pytest.mark.parametrize("once", [0, 20], ids=["", "slow-at-first"])
@pytest.mark.parametrize("cost", [1.2, 1.5, 2.0])
def test_a_drafter_that_never_wins_costs_little(cost, once):
    done = call(cost, 1.0, 256, once=once)
    assert done.pauses in (3, 4) and 0 < loss(done) <= 0.028
    # A round more is made before the host knows.
    assert loss(call(cost, 1.0, 256, once=once, lag=1)) <= 0.028 + 4 * (cost - 1) / 256
    longer = call(cost, 1.0, 4096)
    assert longer.pauses > 6 and loss(longer) <= 0.004


def test_a_round_that_costs_three_steps_is_not_made_often():
    assert loss(call(3.0, 1.0, 256)) <= 0.032 and loss(call(3.0, 1.0, 1024)) <= 0.015
    assert call(3.0, 1.0, 256, lag=1).pauses == 3  # and not once more for the round that was under way


@pytest.mark.parametrize(("cost", "tau", "kept"), [(1.5, 1.8, 0.97), (1.5, 2.5, 0.98), (1.2, 1.5, 0.97)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_drafter_that_wins_keeps_its_gain(cost, tau, kept, lag):
    gain = mean(200, lambda done: 1 - done.spent / done.tokens, cost, tau, 1000, lag=lag)
    assert gain >= kept * (1 - cost / tau) - 0.002 * lag


def test_a_drafter_that_turns_bad_is_found_out():
    done = [call(1.5, (2.5, 1.0), 2000, seed=seed) for seed in range(50)]
    assert statistics.fmean(one.halves[0] for one in done) < 620  # of 600 at best
    assert max(one.halves[1] for one in done) < 1040 and min(one.pauses for one in done) >= 2


def test_a_drafter_that_turns_good_is_found_again():
    done = [call(1.5, (1.0, 2.5), 2000, seed=seed) for seed in range(50)]
    assert statistics.fmean(one.halves[1] for one in done) < 720  # of 600 at best; 1000 plainly
    # After 32, 64, 128, 256 and 512 steps: the good half begins in the pause of 512.
    assert min(one.pauses for one in done) == 5


@pytest.mark.parametrize(("noise", "hiccups"), [(0.2, 0.0), (0.0, 0.03), (0.2, 0.02)])
def test_noise_of_the_clock_changes_little(noise, hiccups):
    noisy = {"noise": noise, "hiccups": hiccups}
    assert mean(100, lambda done: done.pauses, 1.5, 2.5, 1000, **noisy) < 0.3
    assert mean(100, loss, 1.5, 2.5, 1000, **noisy) < 0.96 * (1.5 / 2.5 - 1)
    for cost in (1.2, 1.5, 2.0):
        assert mean(100, loss, cost, 1.0, 256, **noisy) < 0.03


def test_steps_are_timed_while_it_wins():
    """Two at first, then ever more seldom, so that they cost no more than a hundredth."""
    switch, kinds = Switch(), []
    for _ in range(1000):
        kinds.append(switch.drafts())
        switch.note(kinds[-1], 1.5 if kinds[-1] else 1.0, 4.0)
    plain = [at for at, drafting in enumerate(kinds) if not drafting]
    assert plain[:5] == [2, 3, 20, 53, 118] and 8 < len(plain) < 14
    assert switch.plain_step == 1.0 and switch.pauses == 0


def test_every_round_is_charged_once():
    """Those from before a step was timed too, and none again when the next one is."""
    switch, rounds = Switch(), 0
    while not switch.pauses:
        drafting = switch.drafts()
        rounds += drafting
        switch.note(drafting, 1.5 if drafting else 1.0, 1.375)
    assert rounds == 25  # 25 eighths, and the half that one more could cost, are more than 3.5


def test_a_step_that_grows_slower_is_noticed():
    """Rounds of 2 early steps lose with 1.5 tokens; once a step takes twice as long, they win."""
    switch = Switch()
    for _ in range(4000):
        drafting = switch.drafts()
        switch.note(drafting, 2.0 if drafting else 1.0, 1.5)
    lost = switch.pauses
    assert lost > 4
    for _ in range(3000):
        drafting = switch.drafts()
        switch.note(drafting, 2.0, 1.5)
    assert switch.pauses <= lost + 1 and switch.plain_step == 2.0


# --- in generate ---


@pytest.fixture
def clock(monkeypatch):
    """Time stands still but for the target's passes: 1 second for one token per row, 1.5 for more."""
    now = [0.0]
    verify = RaggedTarget.verify

    def timed(self, ids, end):
        now[0] += 1.0 if ids.shape[1] == 1 else 1.5
        return verify(self, ids, end)

    monkeypatch.setattr(RaggedTarget, "verify", timed)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_tokens_are_the_same_switched_off_or_not(mode, clock, make_target, prompts, scripted, unpadded):
    model, batch = make_target(), prompts((7, 2, 5))
    sampling = {"do_sample": False} if mode == "greedy" else {"do_sample": True, "verification": mode, "seed": 4}
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 150, **sampling}
    truth = dspark_fast.generate(model, None, batch.input_ids, **settings)
    rows = unpadded(truth, batch.attention_mask)
    wrong, right = (scripted(rows, right=right, ragged=False) for right in (0.0, 1.0))
    never = dspark_fast.generate(model, wrong, batch.input_ids, off_switch=False, **settings)
    lost = dspark_fast.generate(model, wrong, batch.input_ids, off_switch=True, **settings)
    won = dspark_fast.generate(model, right, batch.input_ids, off_switch=True, **settings)
    assert torch.equal(never, truth) and torch.equal(lost, truth) and torch.equal(won, truth)
    assert (never.stats.pauses, never.stats.plain_steps, never.stats.rounds) == (0, 0, 149)
    # It is found out, tried again 32 steps later, and found out again; and so after 64.
    assert lost.stats.pauses == 3 and lost.stats.rounds < 16
    assert lost.stats.plain_steps == 149 - lost.stats.rounds and lost.stats.seconds.plain > 0
    assert set(lost.stats.acceptance_lengths[0]) == {1} and len(lost.stats.acceptance_lengths[0]) == lost.stats.rounds
    assert won.stats.pauses == 0 and 2 <= won.stats.plain_steps <= 6
    assert sum(map(len, won.stats.acceptance_lengths)) == 3 * won.stats.rounds
    assert [one.stats.off_switch for one in (never, lost, won)] == [False, True, True]


def test_the_drafter_hears_of_plain_steps(clock, monkeypatch, make_target, make_draft, prompts):
    """Its context is whole when it is tried again: it drafts as one that was never switched off."""
    monkeypatch.setattr(loop.Pace, "drafts", lambda self, rows: BLOCK)  # shorter blocks have other drafts in them
    model, batch = make_target(), prompts((7, 2))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 90, "do_sample": False}
    drafted = []

    class Watched(generation.DSparkDrafter):
        def propose(self, anchor, position, noise):
            proposal = super().propose(anchor, position, noise)
            for row, at in enumerate(position.tolist()):
                drafted[-1][row, at] = proposal.tokens[row].tolist()
            return proposal

    for switch in (False, True):
        drafted.append({})
        out = dspark_fast.generate(model, Watched(make_draft(model)), batch.input_ids, off_switch=switch, **settings)
    assert out.stats.pauses >= 1
    both = drafted[0].keys() & drafted[1].keys()
    assert len(both) > 10 and max(at for _, at in both) > 40
    assert all(drafted[0][key] == drafted[1][key] for key in both)


ON = {
    "greedy": ({"do_sample": False}, True),
    "coupled": ({"do_sample": True, "verification": "coupled", "seed": 1}, True),
    "rejection": ({"do_sample": True}, True),
    "rejection-with-a-seed": ({"do_sample": True, "seed": 1}, False),
    "rejection-with-seeds": ({"do_sample": True, "seed": [1]}, False),
    "rejection-with-a-generator": ({"do_sample": True, "generator": torch.Generator()}, False),
}


@pytest.mark.parametrize(("settings", "by_itself"), ON.values(), ids=ON)
def test_when_it_is_on(settings, by_itself, make_target, make_draft, monkeypatch):
    """In rejection mode the tokens of a seed would hang on the clock."""
    monkeypatch.setattr(generation, "OFF_SWITCH", True)
    model = make_target()
    ids = torch.tensor([[5, 6, 7]])
    for off_switch, expected in ((None, by_itself), (True, True), (False, False)):
        for draft in (make_draft(model), None):
            out = dspark_fast.generate(model, draft, ids, off_switch=off_switch, max_new_tokens=4, **settings)
            assert out.stats.off_switch == (expected and draft is not None)


def test_rejection_keeps_to_the_target_when_switched_off(clock, make_target, make_draft):
    """A top-1 cut leaves one token, whoever draws it."""
    model = make_target()
    ids = torch.tensor([[5, 6, 7]])
    truth = model.generate(ids, max_new_tokens=100, do_sample=False)
    out = dspark_fast.generate(
        model, make_draft(model), ids, max_new_tokens=100, do_sample=True, top_k=1, seed=3, off_switch=True
    )
    assert out.stats.pauses and torch.equal(out, truth)
