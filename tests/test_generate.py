"""What the tokens of generate() hang on: greedy on target and prompt, sampled on the row's own seed too."""

from __future__ import annotations

import math

import pytest
import torch

import dspark_fast
from dspark_fast.reference import expand_seeds

FAMILIES = ["Qwen3", "Llama", "Qwen2", "Gemma"]
DRAFTERS = {
    "dspark": None,
    "right": {"right": 1.0, "ragged": False},
    "wrong": {"right": 0.0, "ragged": False},
    "ragged": {"right": 0.6},
    "none": None,
}
BATCHES = {"alone": (7,), "padded": (9, 6, 1, 8, 4)}


def distinct(sequences, width):
    """Least number of different tokens that a row's continuation has: equality of constants would say nothing."""
    return min(len(set(row[width:].tolist())) for row in sequences)


@pytest.mark.floor
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_the_target_says(family, drafter, lengths, make_target, make_draft, prompts, scripted, unpadded):
    model, batch, new = make_target(family), prompts(lengths), 24
    ids, mask = batch.input_ids, batch.attention_mask
    settings = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    truth = model.generate(ids, **settings)
    assert distinct(truth, ids.shape[1]) >= 8
    draft = None
    if drafter == "dspark":
        draft = make_draft(model)
    elif drafter != "none":
        draft = scripted(unpadded(truth, mask), **DRAFTERS[drafter])
    ours = dspark_fast.generate(model, draft, ids, **settings)
    assert torch.equal(ours, truth)
    custom = dspark_fast.decoding(draft)
    assert torch.equal(model.generate(ids, custom_generate=custom, **settings), truth)
    assert custom.stats.acceptance_lengths == ours.stats.acceptance_lengths
    rounds = {"right": math.ceil((new - 1) / 6), "wrong": new - 1, "none": new - 1}
    assert ours.stats.rounds == rounds.get(drafter, ours.stats.rounds)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_sixteen_ragged_rows(family, make_target, make_draft, prompts):
    """Two tiles of rows, from 1 token to 90, with the drafter's own speed in each; they end where they end."""
    model, batch = make_target(family), prompts((1, 90, 5, 33, 2, 64, 7, 7, 12, 1, 48, 3, 21, 80, 9, 4))
    stops = list(range(3, 97, 9))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 40, "do_sample": False}
    settings |= {"eos_token_id": stops, "pad_token_id": 0}
    truth = model.generate(batch.input_ids, **settings)
    out = dspark_fast.generate(model, make_draft(model), batch.input_ids, **settings)
    assert torch.equal(out, truth) and len(set(out.stats.new_tokens)) > 4


WINDOWS = {
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
}


@pytest.mark.floor
@pytest.mark.parametrize("family", WINDOWS)
def test_greedy_with_window_and_softcap(family, make_target, prompts, scripted, unpadded):
    model, batch = make_target(family, **WINDOWS[family]), prompts()
    model.set_attn_implementation("eager")  # sdpa would drop Gemma-2's softcap without a word
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    assert distinct(truth, 9) >= 8
    draft = scripted(unpadded(truth, batch.attention_mask), right=0.6)
    assert torch.equal(dspark_fast.generate(model, draft, batch.input_ids, **settings), truth)


def test_without_a_mask_nothing_is_padding(make_target, make_draft):
    model = make_target()
    ids = torch.randint(1, 97, (3, 5))
    truth = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(dspark_fast.generate(model, make_draft(model), ids, max_new_tokens=8, do_sample=False), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bit_tokens_are_near_the_best(dtype, make_target, make_draft, prompts):
    """A pass over several tokens rounds differently: a token may lose to a near-tie, and to nothing else."""
    model, batch = make_target(fresh=True).to(dtype), prompts((6, 3))
    ids, mask = batch.input_ids, batch.attention_mask
    for draft in (make_draft(model), make_draft(model).to(dtype)):
        out = dspark_fast.generate(model, draft, ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        for row, length in zip(out, (6, 3)):
            row = row[6 - length :]
            logits = model(row[None]).logits[0, length - 1 : -1].float()
            lost = logits.amax(-1) - logits.gather(1, row[length:, None])[:, 0]
            assert lost.max() < 0.05 * logits.std()


def test_greedy_draws_no_random_number(line):
    model, ids, _ = line
    state = torch.get_rng_state()
    dspark_fast.generate(model, None, ids, do_sample=False, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)


# --- seeds ---


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_row_is_the_same_alone_and_in_any_batch(verification, make_target, make_draft, prompts, unpadded):
    model, batch = make_target(), prompts()
    draft = make_draft(model)
    ids, mask = batch.input_ids, batch.attention_mask
    settings = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 14, "verification": verification}
    seeds = [7, 8, 9, 7, -1]
    together = unpadded(dspark_fast.generate(model, draft, ids, attention_mask=mask, seed=seeds, **settings), mask)
    for row, prompt in enumerate(unpadded(ids, mask)):
        alone = dspark_fast.generate(model, draft, torch.tensor([prompt]), seed=[seeds[row]], **settings)
        assert alone[0].tolist() == together[row]
    back = [4, 3, 2, 1, 0]
    turned = dspark_fast.generate(
        model, draft, ids[back], attention_mask=mask[back], seed=torch.tensor(seeds)[back], **settings
    )
    assert unpadded(turned, mask[back]) == together[::-1]


@pytest.mark.floor
@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_return_sequences_differ_and_each_comes_again_from_its_seed(
    verification, make_target, make_draft, prompts, unpadded
):
    model, batch = make_target(), prompts((4, 2))
    draft = make_draft(model)
    settings = {"do_sample": True, "max_new_tokens": 10, "verification": verification}
    out = dspark_fast.generate(
        model, draft, batch.input_ids, attention_mask=batch.attention_mask, num_return_sequences=3, seed=6, **settings
    )
    assert out.shape == (6, 14) and out.stats.batch == 6
    assert out.stats.seeds == expand_seeds(6, 2, 3).tolist()
    rows = unpadded(out, batch.attention_mask.repeat_interleave(3, 0))
    assert len({tuple(row) for row in rows}) == 6
    for row, seed in zip(rows, out.stats.seeds):
        prompt = torch.tensor([row[:-10]])
        assert dspark_fast.generate(model, draft, prompt, seed=[seed], **settings)[0].tolist() == row


def test_where_the_seed_comes_from(line, make_draft):
    model, ids, _ = line
    draft = make_draft(model)

    def run(**kwargs):
        return dspark_fast.generate(model, draft, ids, do_sample=True, max_new_tokens=12, **kwargs)

    torch.manual_seed(3)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(run(), first)
    assert torch.equal(run(seed=first.stats.seeds), first)
    made = [run(generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*made)
    assert torch.equal(run(seed=9), run(seed=9))
    assert torch.equal(run(seed=2**64 - 1), run(seed=-1))  # 64 bits, signed or not
    state = torch.get_rng_state()
    run(seed=9)
    assert torch.equal(torch.get_rng_state(), state)
