"""A row gives the same tokens wherever it stands, and comes again from its seed."""

from __future__ import annotations

import pytest
import torch

LENGTHS = (9, 6, 1, 8)


@pytest.mark.floor
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_four_return_sequences_each_come_again_from_their_seed(verification, said, unpadded, through):
    # No repetition penalty here: before 5.23 transformers penalises the padding too, which a row alone has none of.
    settings = {"do_sample": True, "max_new_tokens": 10, "verification": verification, "temperature": 1.2, "top_k": 20}
    ids, mask = said.ids[:2], said.mask[:2]
    out, stats = through("ours", said.model, said.draft, ids, attention_mask=mask, num_return_sequences=4, **settings)
    assert out.shape == (8, 19) and len(set(stats.seeds)) == 8
    rows = unpadded(out, mask.repeat_interleave(4, 0))
    assert len({tuple(row) for row in rows}) == 8
    for row, seed in zip(rows, stats.seeds):
        again, _ = through("transformers", said.model, said.draft, torch.tensor([row[:-10]]), seed=[seed], **settings)
        assert again[0].tolist() == row


MODES = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "verification": "coupled", "temperature": 1.3, "top_k": 30},
    "rejection": {"do_sample": True, "verification": "rejection", "temperature": 1.3, "top_k": 30},
}


@pytest.mark.floor
@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_wherever_it_stands(mode, said, unpadded, through):
    """Alone; in another row; while its neighbours end one after another; and in a batch that they have left."""
    sampled = MODES[mode]["do_sample"]
    settings = {"max_new_tokens": 24, "repetition_penalty": 1.2, **MODES[mode]}
    seeds = [5, 6, 7, 8]

    def run(order, **more):
        given = {"attention_mask": said.mask[order], **({"seed": [seeds[row] for row in order]} if sampled else {})}
        out, stats = through("ours", said.model, said.draft, said.ids[order], **given, **settings, **more)
        return dict(zip(order, unpadded(out, said.mask[order]))), stats

    whole, _ = run([0, 1, 2, 3])
    # Tokens that some rows say early and others never, so that those leave.
    new = {row: line[LENGTHS[row] :] for row, line in whole.items()}
    stops = [new[0][4], new[2][8]]
    ending, stats = run([0, 1, 2, 3], eos_token_id=stops)
    counts = stats.new_tokens
    assert len(set(counts)) > 2
    for order in ([3, 1, 0, 2], [1, 3], [3, 0]):
        turned, _ = run(order)
        assert all(turned[row] == whole[row] for row in order)
    for row in range(4):
        alone, _ = run([row])
        assert alone[row] == whole[row]
        alone, stats = run([row], eos_token_id=stops)
        end = LENGTHS[row] + counts[row]
        assert stats.new_tokens == [counts[row]]
        assert alone[row] == ending[row][:end] == whole[row][:end]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_16_bit(mode, dtype, make_target, make_draft, prompts, through):
    model = make_target(fresh=True).to(dtype)
    draft, batch = make_draft(model).to(dtype), prompts(LENGTHS)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 8, "repetition_penalty": 1.2, **MODES[mode]}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "log_probs": True}
    out, stats = through("ours", model, draft, batch.input_ids, **settings)
    assert out.sequences.shape == (4, 17) and stats.new_tokens == [8] * 4
    assert {one.dtype for one in (*out.scores, *out.logits, out.log_probs)} == {torch.float32}
    assert torch.stack(out.logits).isfinite().all() and out.log_probs.isfinite().all()
    for at, scores in enumerate(out.scores):
        said = scores.gather(1, out.sequences[:, 9 + at, None])[:, 0]
        assert (said > -torch.inf).all()
        if mode == "greedy":
            assert torch.equal(said, scores.amax(1))
