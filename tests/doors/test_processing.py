"""Logits processors through both doors, against what transformers does with them."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessor,
)

NEW = 20


class Nudge(LogitsProcessor):
    """Somebody's own: after an even token it likes odd ones, and the more so the longer the row."""

    stateless = True

    def __init__(self, strength=1.0):
        self.strength = strength

    def __call__(self, input_ids, scores):
        odd = torch.arange(scores.shape[1]) % 2 == 1
        likes = (input_ids[:, -1:] % 2 == 0) * input_ids.shape[1] / 8 * self.strength
        return scores + likes * odd


# By name: settings, as a function of what the target says without them.
PROCESSORS = {
    "repetition-penalty": lambda new: {"repetition_penalty": 1.8},
    "no-repeat-ngram": lambda new: {"no_repeat_ngram_size": 1},
    "least-length": lambda new: {"min_new_tokens": 9, "eos_token_id": new[0][2]},
    "bad-words": lambda new: {"bad_words_ids": [[new[0][1]], new[1][2:4]]},
    "suppressed": lambda new: {"suppress_tokens": [new[0][0], new[3][4]]},
    "suppressed-at-first": lambda new: {"begin_suppress_tokens": [new[0][0], new[1][0]]},
    "bias": lambda new: {"sequence_bias": {(new[0][3],): -9.0, tuple(new[1][4:6]): -9.0}},
    "decay": lambda new: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 7},
    "forced-end": lambda new: {"forced_eos_token_id": 7, "eos_token_id": 7},
    "like-the-prompt": lambda new: {"encoder_repetition_penalty": 2.0},
    "allowed": lambda new: {"prefix_allowed_tokens_fn": lambda row, ids: range(row, 97, 2 + int(ids[-1]) % 2)},
    "own": lambda new: {"logits_processor": [Nudge()]},
    "several": lambda new: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "logits_processor": [Nudge()],
        "min_new_tokens": 5,
        "eos_token_id": [new[0][2], new[1][2]],
    },
}


@pytest.mark.floor
@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_when_greedy(settings, said, scripted, unpadded, through):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False, **settings(said.new)}
    truth = said.model.generate(said.ids, **settings)
    assert not torch.equal(truth, said.truth), "the settings say nothing here"
    guess = scripted(unpadded(truth, said.mask), right=0.6)
    for door, draft in (("ours", guess), ("transformers", said.draft)):
        out, stats = through(door, said.model, draft, said.ids, **settings)
        assert torch.equal(out, truth)
    assert stats.rounds > 3


CUTS = {
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.03},
    "eta": {"eta_cutoff": 0.3},
    "normalised": {"renormalize_logits": True, "temperature": 1.4, "top_k": 5},
    "all": {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "temperature": 1.2, "top_k": 30},
    "penalty": {"repetition_penalty": 1.5, "temperature": 1.2, "top_p": 0.8},
    "own": {"logits_processor": [Nudge()], "min_p": 0.05},
}


@pytest.mark.floor
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_processors_when_coupled(cuts, said, scripted, unpadded, processors_of, through, plainly):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": True, "top_k": 0, **cuts}
    ours = {"verification": "coupled", "seed": 5}
    truth, _ = through("ours", said.model, None, said.ids, **ours, **settings)
    plain, _ = through("ours", said.model, None, said.ids, **ours, **{**settings, **dict.fromkeys(cuts), "top_k": 0})
    if cuts != CUTS["normalised"]:
        assert not torch.equal(truth, plain), "the cuts say nothing here"
    guess = scripted(unpadded(truth, said.mask), right=0.6)
    for door, draft in (("ours", guess), ("transformers", said.draft)):
        out, stats = through(door, said.model, draft, said.ids, **ours, **settings)
        assert torch.equal(out, truth) and stats.mode == "coupled"
    # No token that transformers' own processors forbid.
    processors = processors_of(said.model, said.ids, **settings)
    logits = plainly(said.model, truth)
    for at in range(9, 9 + NEW):
        scores = processors(truth[:, :at], logits[:, at - 1].clone())
        assert (scores.gather(1, truth[:, at, None]) > -torch.inf).all()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"repetition_penalty": 1.6}, id="repetition-penalty"),
        pytest.param({"logits_processor": [Nudge(3.0)], "epsilon_cutoff": 0.02}, id="own"),
    ],
)
def test_rejection_keeps_the_law_with_processors(settings, tiny, processors_of, law, g_test, through):
    model, draft = tiny
    rows, depth, ids = 2000, 3, torch.tensor([[1, 3, 2, 4]])
    settings = {"do_sample": True, "max_new_tokens": depth, "top_k": 0, "temperature": 2.0, **settings}
    out, stats = through("ours", model, draft, ids, num_return_sequences=rows, seed=20, **settings)
    counts = {}
    for row in out[:, 4:].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert 0.15 < stats.accepted[0] / stats.proposed[0] < 0.9
    truth = law(model, ids, processors_of(model, ids, **settings), depth)
    assert g_test(counts, truth, rows) > 1e-6
    without = {**settings, **dict.fromkeys(("repetition_penalty", "logits_processor"))}
    assert g_test(counts, law(model, ids, processors_of(model, ids, **without), depth), rows) < 1e-6
