"""Decisions under noise chosen by hand; the correct code passes the checks that kill mutants."""

from __future__ import annotations

import checks
import pytest
import torch
from faults import edited
from mutants import MUTANTS
from planted import words

from dspark_fast import ops, reference
from dspark_fast.reference.sampling import ACCEPT, DRAFT, TARGET


@pytest.mark.parametrize(
    "check",
    [checks.keeps_words_of_zero_finite, checks.accepts_the_impossible, checks.accepts_what_16_bits_cannot_tell],
    ids=lambda check: check.__name__,
)
def test_decision(check):
    check()


# stream whose words are moved -> what may change
@pytest.mark.parametrize(
    ("mode", "stream", "changes"),
    [
        pytest.param("rejection", DRAFT, {"drafts"}, id="rejection-draft"),
        pytest.param("rejection", ACCEPT, {"accepted"}, id="rejection-accept"),
        pytest.param("rejection", TARGET, {"following"}, id="rejection-target"),
        pytest.param("coupled", DRAFT, {"drafts", "following"}, id="coupled-draft"),
        pytest.param("coupled", ACCEPT, set(), id="coupled-accept"),
        pytest.param("coupled", TARGET, set(), id="coupled-target"),
    ],
)
def test_each_decision_reads_its_own_stream(mode, stream, changes):
    """One draft with q = (1/2, 1/2), p = (1/4, 3/4): drawn, judged and replaced. Words of one stream are moved."""
    base, target = torch.zeros(1, 1, 2), torch.tensor([1.0, 3.0]).log().expand(1, 2, 2)
    at = {"temperature": 1.0, "seed": 3, "position": 5}

    def outcome(drafted: int | None, chosen):
        with words(chosen):
            walk = ops.markov_walk(base, None, None, torch.zeros(1).long(), **at, coupled=mode == "coupled")
            tokens = walk.tokens if drafted is None else torch.full((1, 1), drafted)
            kept, following = ops.verify(target, tokens, walk.logits, torch.ones(1).long(), **at, mode=mode)
        return int(walk.tokens), int(kept), int(following)

    changed = set()
    for drafted in (0, 1):
        plain = outcome(drafted, {})
        for word in (0, 2**32 - 1):
            for token in (0, 1):
                found = outcome(drafted, {(stream, token): word})
                if found[0] != plain[0]:
                    changed.add("drafts")
                if mode == "rejection" and found[1] != plain[1]:
                    changed.add("accepted")
                elif found[2] != plain[2]:
                    changed.add("following")
    assert changed == changes


def test_a_fault_is_gone_after_its_context():
    logits = torch.tensor([[[0.0, 1.0, 2.0]]])
    none = torch.zeros(1).long()
    function, at = reference.markov_walk, {"temperature": 0.0, "seed": 0, "position": 0}
    with edited(function, "best, choice = row.max(-1)", "best, choice = row.min(-1)"):
        assert ops.markov_walk(logits, None, None, none, **at).tokens.item() == 0
    assert ops.markov_walk(logits, None, None, none, **at).tokens.item() == 2
    with pytest.raises(AssertionError, match="0 times 'no such text'"), edited(function, "no such text", ""):
        pass


def test_there_are_enough_mutants_of_every_kind():
    assert len(MUTANTS) >= 20 and len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.means for mutant in MUTANTS} == {"law", "planted noise", "tail", "equality"}
