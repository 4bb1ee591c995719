"""What comes back from generate(): transformers' own outputs, true figures, and an error that names broken logits."""

from __future__ import annotations

import time

import pytest
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

import dspark_fast


@pytest.mark.floor
def test_return_dict(line):
    model, ids, truth = line
    out = dspark_fast.generate(model, None, ids, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, truth)
    assert out.stats.new_tokens == [24]


@pytest.mark.floor
@pytest.mark.parametrize("stop", [False, True], ids=["to-the-limit", "to-a-stop-token"])
def test_streamer_hears_what_transformers_would_tell_it(stop, line, scripted, streamer):
    model, ids, truth = line
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": int(truth[0, 11]) if stop else None}
    theirs, ours, inside = streamer(), streamer(), streamer()
    model.generate(ids, streamer=theirs, **settings)
    assert theirs.heard[-1] == "end" and len(theirs.heard) == (8 if stop else 14)
    draft = scripted([truth[0].tolist()], right=0.7)
    dspark_fast.generate(model, draft, ids, streamer=ours, **settings)
    assert ours.heard == theirs.heard
    model.generate(ids, custom_generate=dspark_fast.decoding(draft, streamer=inside), **settings)
    assert inside.heard == theirs.heard


def test_stats_are_a_true_count(make_target, prompts, scripted, unpadded):
    model, batch = make_target(), prompts((6, 3))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 12, "do_sample": False}
    longer = model.generate(batch.input_ids, **{**settings, "max_new_tokens": 20})
    rows = unpadded(longer, batch.attention_mask)
    plan = [  # by round and row: drafts, right ones
        [(4, 2), (0, 0)],
        [(3, 3), (4, 4)],
        [(4, 4), (2, 0)],  # row 0: 8 + 5 tokens, cut to 12; it is finished then
        [(4, 4), (1, 1)],
        [(4, 4), (4, 3)],
    ]
    start = time.perf_counter()
    out = dspark_fast.generate(model, scripted(rows, block_size=4, plan=plan), batch.input_ids, **settings)
    wall = time.perf_counter() - start
    stats = out.stats
    assert (stats.batch, stats.mode, stats.block_size, stats.rounds) == (2, "greedy", 4, 5)
    assert stats.new_tokens == [12, 12]
    assert stats.acceptance_lengths == [[3, 4, 5], [1, 5, 1, 2, 4]]
    assert stats.proposed == [7, 6, 5, 4]
    assert stats.accepted == [6, 5, 4, 2]
    assert stats.acceptance_length == pytest.approx(25 / 8)
    seconds = stats.seconds
    parts = (seconds.prefill, seconds.draft, seconds.verify, seconds.bookkeeping)
    assert all(part > 0 for part in parts) and sum(parts) <= wall
    assert seconds.rounds == pytest.approx(sum(parts[1:]))
    assert stats.tokens_per_second == pytest.approx(22 / seconds.rounds)
    assert stats.latency == pytest.approx(seconds.rounds / 5 / (25 / 8))


def test_broken_logits_name_row_and_position(make_target, prompts, scripted, unpadded):
    model, batch = make_target(fresh=True), prompts((5, 3))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 12, "do_sample": False}
    rows = unpadded(model.generate(batch.input_ids, **settings), batch.attention_mask)
    # A token that row 1 alone says, not before its third: once it is read, the logits of the next position are broken.
    at = next(at for at in range(5, 14) if rows[1][at] not in rows[0] + rows[1][:at])
    broken = rows[1][at]
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = float("nan")
    with pytest.raises(FloatingPointError, match=f"row 1 for position {at + 1} "):
        dspark_fast.generate(model, None, batch.input_ids, **settings)
    # A drafted token that breaks the target breaks its whole block, slots before it included.
    with pytest.raises(FloatingPointError, match="row 1 for position"):
        dspark_fast.generate(model, scripted(rows, ragged=False), batch.input_ids, **settings)
