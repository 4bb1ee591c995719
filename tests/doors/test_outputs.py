"""What comes back besides the tokens: scores, logits, log-probabilities, times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import dspark_fast
from dspark_fast import stats
from dspark_fast.engine import loop
from dspark_fast.engine.outputs import Outputs
from dspark_fast.engine.state import RUN, TAKEN
from dspark_fast.engine.target import RaggedTarget

NEW = 20
DOORS = ["ours", "transformers"]


@pytest.mark.floor
@pytest.mark.parametrize("door", DOORS)
def test_scores_and_logits_are_those_of_transformers(door, said, scripted, unpadded, through):
    stop = said.new[1][5]
    settings = {
        "attention_mask": said.mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "suppress_tokens": [3, 4],
        "eos_token_id": stop,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    theirs = said.model.generate(said.ids, **settings)
    guess = scripted(unpadded(theirs.sequences, said.mask), right=0.6)
    for draft in (guess, said.draft, None):
        ours, stats = through(door, said.model, draft, said.ids, **settings)
        assert torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            our, their = getattr(ours, name), getattr(theirs, name)
            assert len(our) == len(their) and {one.dtype for one in our} == {torch.float32}
            for row, count in enumerate(stats.new_tokens):
                for at in range(len(our)):
                    if at < count:
                        torch.testing.assert_close(our[at][row], their[at][row], rtol=1e-4, atol=1e-4)
                    else:
                        assert not our[at][row].any()
        assert (ours.scores[0] == -torch.inf).sum() == 8 and torch.stack(ours.logits).isfinite().all()
        for normalised in (False, True):
            mine, other = (
                said.model.compute_transition_scores(one.sequences, one.scores, normalize_logits=normalised)
                for one in (ours, theirs)
            )
            for row, count in enumerate(stats.new_tokens):
                torch.testing.assert_close(mine[row, :count], other[row, :count], rtol=1e-4, atol=1e-4)
    assert len(set(stats.new_tokens)) > 1


@pytest.mark.floor
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "cuts",
    [
        {"top_k": 7, "temperature": 1.3},
        {"top_p": 0.7, "repetition_penalty": 1.4},
        {"typical_p": 0.8, "temperature": 0.7},
    ],
    ids=["top-k", "top-p", "typical"],
)
def test_scores_when_sampling(cuts, verification, said, processors_of, through, plainly):
    """transformers draws otherwise: its processors and its model are asked about our rows."""
    settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, **cuts}
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked |= {"attention_mask": said.mask, "verification": verification, "seed": 2}
    out, _ = through("ours", said.model, said.draft, said.ids, **asked, **settings)
    processors = processors_of(said.model, said.ids, attention_mask=said.mask, **settings)
    logits = plainly(said.model, out.sequences)
    for at in range(8):
        own = logits[:, 8 + at]
        torch.testing.assert_close(out.logits[at], own, rtol=1e-4, atol=1e-4)
        expected = processors(out.sequences[:, : 9 + at], own.clone())
        assert torch.equal(out.scores[at] == -torch.inf, expected == -torch.inf)
        torch.testing.assert_close(out.scores[at], expected, rtol=1e-4, atol=1e-4)
    scores = said.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert scores.isfinite().all() and (scores <= 0).all()


@pytest.mark.parametrize("door", DOORS)
def test_log_probs_are_the_targets_own(door, said, through, plainly):
    stop = said.new[1][5]
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": True, "top_k": 5, "temperature": 0.5}
    settings |= {"repetition_penalty": 1.2, "return_dict_in_generate": True, "eos_token_id": stop, "seed": 4}
    out, stats = through(door, said.model, said.draft, said.ids, log_probs=True, **settings)
    assert out.log_probs.dtype == torch.float32 and out.log_probs.shape == (4, max(stats.new_tokens))
    assert out.scores is None and out.logits is None
    expected = plainly(said.model, out.sequences)[:, 8:-1].log_softmax(-1).gather(2, out.sequences[:, 9:, None])[..., 0]
    for count, given, true in zip(stats.new_tokens, out.log_probs, expected):
        torch.testing.assert_close(given[:count], true[:count], rtol=1e-4, atol=1e-4)
        assert not given[count:].any()
    plain, _ = through(door, said.model, said.draft, said.ids, **settings)
    assert plain.log_probs is None and torch.equal(plain.sequences, out.sequences)


def test_what_is_kept_is_what_was_taken():
    """Not a view of the whole round, which would stay in memory with it."""
    outputs = Outputs(2, ["scores", "logits"])
    logits = torch.randn(2, 6, 40)
    report = torch.zeros(2, RUN + 6, dtype=torch.long)
    report[:, TAKEN] = torch.tensor([1, 2])
    outputs.keep(logits, logits, report, None)
    before = logits.clone()
    logits.fill_(9.0)
    found = outputs.stacked([1, 2])
    for name in ("scores", "logits"):
        assert torch.equal(found[name][0], before[:, 0]) and torch.equal(found[name][1][1], before[1, 1])
        kept = [one.untyped_storage().nbytes() for row in outputs._kept[name] for one in row]
        assert max(kept) <= 2 * 40 * 4


@pytest.mark.parametrize("door", DOORS)
def test_log_probs_need_a_dictionary(door, said, through):
    runs = []
    handle = said.model.register_forward_pre_hook(lambda module, args: runs.append(1))
    with pytest.raises(ValueError, match=r"log_probs is True.*return_dict_in_generate=True"):
        through(door, said.model, said.draft, said.ids, log_probs=True, max_new_tokens=4, do_sample=False)
    handle.remove()
    assert not runs


@pytest.mark.parametrize("part", ["prefill", "verify"])
def test_no_second_is_counted_twice(part, said, monkeypatch):
    """A pass of a tenth of a second, under a clock that stands still otherwise."""
    now = [0.0]
    work = getattr(RaggedTarget, part)

    def slow(*args):
        now[0] += 0.1
        return work(*args)

    monkeypatch.setattr(RaggedTarget, part, slow)
    for module in (loop, stats):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    out = dspark_fast.generate(said.model, said.draft, said.ids, max_new_tokens=6, do_sample=False)
    seconds = out.stats.seconds
    names = ("prefill", "verify", "draft", "bookkeeping", "plain", "compilation", "graph")
    parts = dict.fromkeys(names, 0.0)
    parts[part] = 0.1 if part == "prefill" else 0.1 * out.stats.rounds
    assert vars(seconds) == pytest.approx(parts)
