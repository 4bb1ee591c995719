"""What plain steps commit waits until the drafter drafts again: it then knows the same, in fewer calls."""

from __future__ import annotations

import itertools

import pytest
import torch

import dspark_fast
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.engine import round as module
from dspark_fast.engine.pace import Pace
from dspark_fast.engine.switch import Switch

PATTERN = [True, True, *[False] * 5, True, False, True, *[False] * 9]


@pytest.fixture
def call(make_target, make_draft, prompts, monkeypatch):
    """``call(lengths, most, ...)``: rounds draft by PATTERN; the output, what was drafted, and commits of how many."""
    model = make_target()
    draft = make_draft(model)

    def make(lengths, most, *, new=40, drafter=draft, **options):
        pattern, commits = itertools.cycle(PATTERN), []
        drafts, commit, propose = [], DSparkDrafter.commit, DSparkDrafter.propose

        def watched(self, tokens, features, offsets, counts):
            commits.append((tokens.shape[1], counts.tolist()))
            commit(self, tokens, features, offsets, counts)

        def kept(self, *given):
            proposal = propose(self, *given)
            drafts.append(proposal.tokens.tolist())
            return proposal

        with monkeypatch.context() as patch:
            patch.setattr(module, "_MOST_WAITING", most)
            patch.setattr(Switch, "drafts", lambda self: next(pattern))
            patch.setattr(Switch, "note", lambda self, *told: None)
            patch.setattr(Pace, "drafts", lambda self, rows: draft.config.block_size)  # not by the clock
            patch.setattr(DSparkDrafter, "commit", watched)
            patch.setattr(DSparkDrafter, "propose", kept)
            batch = prompts(lengths)
            out = dspark_fast.generate(
                model,
                drafter,
                batch.input_ids,
                attention_mask=batch.attention_mask,
                max_new_tokens=new,
                do_sample=False,
                off_switch=True,
                **options,
            )
        return out, drafts, commits

    return make


@pytest.mark.parametrize("stop", [None, [3, 11, 50]], ids=["together", "rows-leave"])
@pytest.mark.parametrize("lengths", [(6,), (9, 1, 4)], ids=["alone", "batch"])
def test_the_drafter_knows_the_same(lengths, stop, call):
    at_once, drafts, often = call(lengths, 1, eos_token_id=stop)
    later, same, seldom = call(lengths, 64, eos_token_id=stop)
    assert torch.equal(later, at_once) and later.stats.plain_steps == at_once.stats.plain_steps > 8
    assert same == drafts and len({str(one) for one in drafts}) > 4
    assert len(seldom) < len(often) and max(width for width, _ in seldom[1:]) == 9
    assert stop is None or len(lengths) == 1 or len(seldom[-1][1]) < 3  # somebody has left


def test_no_more_wait_than_a_few(call):
    *_, commits = call((6,), 4)
    assert max(width for width, _ in commits[1:]) <= 6 and [4, 4] in [
        [one[0], other[0]] for one, other in itertools.pairwise(commits)
    ]


def test_a_past_that_is_handed_back_lacks_nothing(call):
    """The last steps of the call are plain."""
    (at_once, *_), (later, _, commits) = (call((6,), most, new=8, return_dict_in_generate=True) for most in (1, 64))
    assert commits[-1][0] == 5
    read = later.sequences.shape[1] - 1
    contexts = (out.past_key_values.context for out in (at_once, later))
    for one, other in zip(*((context.keys[:, :, :read], context.values[:, :, :read]) for context in contexts)):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
        assert (one[:, :, -1] != 0).any()
