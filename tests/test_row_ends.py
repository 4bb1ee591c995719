"""Where a row of generate() ends: at a stop token wherever in a run it stands, or at the limit, as in transformers."""

from __future__ import annotations

import pytest
import torch

import dspark_fast

# One round of 4 drafts, all right, commits the tokens 1 to 5; the prefill gives token 0.
STOPS = {
    "first-token": (0, []),
    "first-draft": (1, [1]),
    "inside-the-run": (3, [3]),
    "last-draft": (4, [4]),
    "bonus": (5, [5]),
    "next-round": (6, [5, 1]),
}


@pytest.mark.floor
@pytest.mark.parametrize(("at", "acceptance"), STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("more", [[], [96, 95]], ids=["one-id", "list"])
def test_stop_token(at, acceptance, more, line, scripted):
    model, ids, truth = line
    stop = int(truth[0, 6 + at])
    eos = [*more, stop] if more else stop
    assert not set(more) & set(truth[0, 6 : 6 + at + 1].tolist())
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=eos)
    assert expected.shape[1] == 6 + at + 1
    draft = scripted([truth[0].tolist()], block_size=4, ragged=False)
    ours = dspark_fast.generate(model, draft, ids, max_new_tokens=20, do_sample=False, eos_token_id=eos)
    assert torch.equal(ours, expected)
    assert ours.stats.acceptance_lengths == [acceptance]
    assert ours.stats.new_tokens == [at + 1]
    # What was drafted behind an accepted stop token was never really proposed.
    slots = [sum(min(length, 4) > slot for length in acceptance) for slot in range(4)]
    assert ours.stats.proposed == slots
    assert ours.stats.accepted == slots


def test_a_stop_token_that_was_only_drafted_stops_nothing(line, scripted):
    model, ids, truth = line
    stop = next(token for token in range(97) if token not in truth[0].tolist())
    guesses = [truth[0, :8].tolist() + [stop] * 30]
    draft = scripted(guesses, ragged=False, watch=False)
    ours = dspark_fast.generate(model, draft, ids, max_new_tokens=24, do_sample=False, eos_token_id=stop)
    assert torch.equal(ours, truth)


@pytest.mark.floor
@pytest.mark.parametrize("pad", [0, None], ids=["pad-0", "no-pad"])
def test_rows_that_end_early_are_padded_as_transformers_does(pad, make_target, prompts, scripted, unpadded):
    model, batch = make_target(pad_token_id=pad), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 20, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    # A token that some rows say and others do not.
    said = [set(row[9:26].tolist()) for row in truth]
    stop = next(token for token in range(97) if 1 <= sum(token in row for row in said) <= 3)
    expected = model.generate(batch.input_ids, eos_token_id=stop, **settings)
    ends = {tuple(row[9:].tolist()).index(stop) if stop in row[9:] else 20 for row in expected}
    assert 20 in ends and len(ends) > 1
    for right in (0.0, 0.7, 1.0):
        draft = scripted(unpadded(truth, batch.attention_mask), right=right)
        ours = dspark_fast.generate(model, draft, batch.input_ids, eos_token_id=stop, **settings)
        assert torch.equal(ours, expected)


def test_all_rows_may_end_before_the_limit(line, scripted):
    model, ids, truth = line
    stop = int(truth[0, 6 + 4])
    ids, rows = ids.repeat(3, 1), [truth[0].tolist()] * 3
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=stop)
    ours = dspark_fast.generate(
        model, scripted(rows, right=0.5), ids, max_new_tokens=20, do_sample=False, eos_token_id=stop
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("new", [1, 2, 3, 6, 7, 8], ids=lambda new: f"{new}-tokens")
def test_length_limit_cuts_a_run(new, line, scripted, make_draft):
    model, ids, truth = line
    for draft in (scripted([truth[0].tolist()], ragged=False), make_draft(model), None):
        ours = dspark_fast.generate(model, draft, ids, max_new_tokens=new, do_sample=False)
        assert torch.equal(ours, truth[:, : 6 + new])
        assert ours.stats.new_tokens == [new]
    assert dspark_fast.generate(model, None, ids, max_length=6 + new, do_sample=False).shape[1] == 6 + new


def test_coupled_stops_at_a_stop_token(line, scripted):
    model, ids, _ = line
    settings = {"verification": "coupled", "seed": 3, "do_sample": True, "max_new_tokens": 16}
    truth = dspark_fast.generate(model, None, ids, **settings)
    stop = int(truth[0, 6 + 3])
    first = truth[0, 6:].tolist().index(stop)
    out = dspark_fast.generate(model, scripted([truth[0].tolist()]), ids, eos_token_id=stop, **settings)
    assert torch.equal(out, truth[:, : 6 + first + 1])
