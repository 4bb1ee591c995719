"""The independent baseline, and the comparison with it: what is the same is called so, what is not is never hidden."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from dspark_fast import compare as module
from dspark_fast import generation
from dspark_fast.compare import compare, first_difference
from dspark_fast.gumbel import GumbelMax
from dspark_fast.reference import cut_logits

SETTINGS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.2}, {"min_p": 0.1, "top_k": 30, "top_p": 0.97}]


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target(initializer_range=0.1)
    return model, make_draft(model)


@pytest.fixture
def prompt(prompts):
    return prompts((9,)).input_ids


# --- GumbelMax --------------------------------------------------------------------------------------------------------


@pytest.mark.floor
@pytest.mark.parametrize("cuts", SETTINGS)
def test_gumbel_max_is_coupled_decoding(pair, prompts, cuts):
    """Every row of a padded batch, two return sequences each; greedy decoding would give other tokens."""
    model, draft = pair
    batch = prompts()
    same = {"attention_mask": batch.attention_mask, "max_new_tokens": 20}
    ours = generation.generate(
        model,
        draft,
        batch.input_ids,
        do_sample=True,
        verification="coupled",
        seed=3,
        temperature=0.8,
        num_return_sequences=2,
        **{"top_k": 0, **cuts},
        **same,
    )
    same["attention_mask"] = batch.attention_mask.repeat_interleave(2, 0)
    twice = batch.input_ids.repeat_interleave(2, 0)
    processor = GumbelMax(seed=3, temperature=0.8, attention_mask=batch.attention_mask, num_return_sequences=2, **cuts)
    plain = model.generate(twice, do_sample=False, logits_processor=[processor], **same)
    assert torch.equal(ours, plain)
    assert not torch.equal(plain, model.generate(twice, do_sample=False, **same))
    assert len({tuple(row[-20:].tolist()) for row in plain}) == len(plain)


@pytest.mark.parametrize("cuts", SETTINGS)
def test_gumbel_max_draws_from_the_cut_distribution(cuts):
    """20,000 seeds over 40 tokens; at level 1e-4, 5 cases."""
    torch.manual_seed(0)
    draws, logits = 20_000, 2 * torch.randn(40)
    processor = GumbelMax(seed=torch.arange(draws), temperature=0.7, **cuts)
    tokens = processor(torch.zeros(draws, 5, dtype=torch.long), logits.expand(draws, -1)).argmax(1)
    expected = cut_logits(logits[None], 0.7, **cuts)[0].double().softmax(0)
    counts = tokens.bincount(minlength=40)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    common = kept & (expected * draws >= 5)
    observed = [*counts[common].tolist(), int(counts[kept & ~common].sum())]
    wanted = [*(expected[common] * draws).tolist(), float(expected[kept & ~common].sum() * draws)]
    if not wanted[-1]:
        observed, wanted = observed[:-1], wanted[:-1]
    assert chisquare(observed, wanted).pvalue > 1e-4


def test_gumbel_max_depends_on_the_position_behind_the_padding():
    scores = torch.randn(1, 50).expand(2, -1)
    ids = torch.zeros(2, 7, dtype=torch.long)
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    rows = GumbelMax(seed=[4, 4], attention_mask=mask)(ids, scores)
    assert torch.equal(rows[:1], GumbelMax(seed=[4])(ids[:1], scores[:1]))
    assert torch.equal(rows[1:], GumbelMax(seed=[4])(ids[1:, 2:], scores[1:]))
    assert not torch.equal(rows[0], rows[1])


def test_gumbel_max_refuses():
    ids, scores = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="temperature is -1"):
        GumbelMax(seed=0, temperature=-1)
    with pytest.raises(ValueError, match="seed has 3 values for 2 rows"):
        GumbelMax(seed=[1, 2, 3])(ids, scores)
    with pytest.raises(ValueError, match="attention_mask is of 1 rows, the batch has 2"):
        GumbelMax(seed=1, attention_mask=torch.ones(1, 3))(ids, scores)


# --- compare ----------------------------------------------------------------------------------------------------------


@pytest.mark.floor
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens(pair, prompt, temperature):
    model, draft = pair
    found = compare(model, draft, prompt, max_new_tokens=16, temperature=temperature, seed=1, repeats=2)
    assert found.identical and found.first_difference is None
    assert found.tokens == found.baseline_tokens and len(found.tokens) == 16
    assert found.mode == ("coupled" if temperature else "greedy")
    assert found.seed == (1 if temperature else None)
    assert found.speedup_least <= found.speedup <= found.speedup_most
    assert len(found.pairs) == 2 and found.rounds > 0 and found.acceptance_length >= 1
    ratios = [pair["ours"] / pair["baseline"] for pair in found.pairs]
    assert found.speedup == pytest.approx(sum(ratios) / 2)
    predicted = found.acceptance_length * found.seconds_per_plain_step / sum(found.seconds_per_round.values())
    assert found.predicted_speedup == pytest.approx(predicted)
    # The loop's own clock against the streamer's: of the same runs, so a busy machine moves both.
    assert 1 / 3 < found.predicted_speedup / found.speedup < 3
    assert json.loads(found.to_json()) == found.to_dict()


def test_the_seed_counts(pair, prompt):
    one, two = (
        compare(*pair, prompt, max_new_tokens=16, temperature=0.8, seed=seed, repeats=1).tokens for seed in (1, 2)
    )
    assert one != two


def test_order_of_the_runs(pair, prompt):
    said = []
    compare(*pair, prompt, max_new_tokens=2, repeats=2, progress=said.append)
    assert said == [
        "run 1 of 6: warming up dspark-fast",
        "run 2 of 6: warming up transformers",
        "run 3 of 6: dspark-fast",
        "run 4 of 6: transformers",
        "run 5 of 6: transformers",
        "run 6 of 6: dspark-fast",
    ]


def test_order_of_the_runs_with_one_more(pair, prompt):
    said = []
    compare(*pair, prompt, max_new_tokens=2, repeats=3, undrafted=True, progress=said.append)
    assert all(one.startswith(f"run {number} of 12: ") for number, one in enumerate(said, 1))
    ours, alone, plain = "dspark-fast", "dspark-fast without a drafter", "transformers"
    assert [one.split(": ")[1] for one in said] == [
        *(f"warming up {name}" for name in (ours, alone, plain)),
        *(ours, alone, plain),
        *(alone, plain, ours),
        *(plain, ours, alone),
    ]


@pytest.mark.floor
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ours_without_a_drafter_beside_the_two(pair, prompt, temperature):
    found = compare(*pair, prompt, max_new_tokens=16, temperature=temperature, seed=1, repeats=3, undrafted=True)
    assert found.identical and found.undrafted_identical and found.undrafted_first_difference is None
    ratios = sorted(each["undrafted"] / each["baseline"] for each in found.pairs)
    assert found.undrafted_speedup == ratios[1]
    assert found.undrafted_tokens_per_second == sorted(each["undrafted"] for each in found.pairs)[1]
    assert found.speedup == sorted(each["ours"] / each["baseline"] for each in found.pairs)[1]
    assert all(each["undrafted_call"] > 0 for each in found.pairs)
    assert json.loads(found.to_json()) == found.to_dict()
    assert found.to_dict()["undrafted_speedup"] == found.undrafted_speedup


def test_it_is_not_run_unasked(pair, prompt):
    found = compare(*pair, prompt, max_new_tokens=2, repeats=1)
    assert found.undrafted_identical is None and found.undrafted_speedup is None
    assert found.undrafted_tokens_per_second is None and "undrafted" not in found.pairs[0]


def test_without_a_drafter_there_are_two_ways_and_no_prediction(pair, prompt):
    said = []
    found = compare(pair[0], None, prompt, max_new_tokens=8, repeats=1, undrafted=True, progress=said.append)
    assert len(said) == 4 and found.identical and found.speedup > 0
    assert found.acceptance_length is None and found.predicted_speedup is None and found.undrafted_speedup is None


def test_a_difference_without_a_drafter_is_its_own(pair, prompt, monkeypatch):
    true = generation.generate

    def wrong(model, draft, input_ids, **kwargs):
        output = true(model, draft, input_ids, **kwargs)
        if draft is None:
            output[0, input_ids.shape[1] + 3] = (output[0, input_ids.shape[1] + 3] + 1) % 97
        return output

    monkeypatch.setattr(generation, "generate", wrong)
    found = compare(*pair, prompt, max_new_tokens=8, repeats=1, undrafted=True)
    assert found.identical and found.first_difference is None and found.tokens == found.baseline_tokens
    assert found.undrafted_identical is False
    assert found.undrafted_first_difference.index == 3 and not found.undrafted_first_difference.near_tie
    assert found.to_dict()["undrafted_first_difference"]["index"] == 3


def test_seeds_of_rows_and_packing_are_handed_on(pair, prompt, monkeypatch):
    true, packed = generation.generate, []

    def watching(*arguments, pack_weights, **kwargs):
        packed.append(pack_weights)
        return true(*arguments, pack_weights=pack_weights, **kwargs)

    monkeypatch.setattr(generation, "generate", watching)
    settings = {"max_new_tokens": 8, "temperature": 0.8, "repeats": 1, "undrafted": True, "pack_weights": False}
    row, bare = (compare(*pair, prompt, seed=seed, **settings) for seed in ([-5], -5))
    assert packed == [False] * 8
    assert row.identical and row.undrafted_identical and row.seed == [-5] and bare.seed == -5
    assert row.tokens != bare.tokens


def test_one_token_has_no_speed_after_the_prefill(pair, prompt):
    found = compare(*pair, prompt, max_new_tokens=1, repeats=1)
    assert found.identical and len(found.tokens) == 1
    assert found.speedup is None and found.predicted_speedup is None and found.tokens_per_second is None
    assert found.call_speedup > 0
    json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_prefill_is_not_counted():
    def run(clock):
        clock.put(torch.tensor([[5, 6]]))
        time.sleep(0.3)
        clock.put(torch.tensor([7]))
        time.sleep(0.02)
        clock.put(torch.tensor([8]))
        return torch.tensor([[5, 6, 7, 8]])

    timed = module._timed(run, torch.tensor([[5, 6]]))
    assert timed.tokens == [7, 8]
    assert timed.seconds >= 0.32
    assert 0.02 <= timed.after_first < 0.3
    assert timed.speed == pytest.approx(1 / timed.after_first)


@pytest.fixture
def planted(monkeypatch):
    """One token of every output of ours is another."""
    true = generation.generate

    def wrong(model, draft, input_ids, **kwargs):
        output = true(model, draft, input_ids, **kwargs)
        output[0, input_ids.shape[1] + 3] = (output[0, input_ids.shape[1] + 3] + 1) % 97
        return output

    monkeypatch.setattr(generation, "generate", wrong)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_planted_difference_is_reported(pair, prompt, planted, temperature):
    model, draft = pair
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    found = compare(
        model, draft, prompt, tokenizer=tokenizer, max_new_tokens=8, temperature=temperature, seed=1, repeats=1
    )
    assert not found.identical
    difference = found.first_difference
    assert difference.index == 3
    assert (difference.ours, difference.baseline) == (found.tokens[3], found.baseline_tokens[3])
    assert difference.ours == (difference.baseline + 1) % 97
    assert difference.ours_text == f"<{difference.ours}>"
    prefix = torch.cat([prompt, torch.tensor([found.tokens[:3]])], 1)
    with torch.no_grad():
        logits = model(prefix).logits[0, -1]
    gap = (logits[difference.ours] - logits[difference.baseline]).abs().item()
    assert difference.logit_gap == pytest.approx(gap, rel=1e-4)
    assert not difference.near_tie
    assert "a difference that rounding does not explain" in difference.sentence()
    assert json.loads(found.to_json())["first_difference"]["index"] == 3


def test_a_near_tie_is_called_so(make_target, prompt):
    model = make_target(fresh=True)
    with torch.no_grad():
        model.lm_head.weight[11] = model.lm_head.weight[12]
    difference = first_difference(model, prompt, [3, 11, 5], [3, 12, 5])
    assert difference.index == 1 and difference.logit_gap == 0
    assert 0 < difference.rounding < 1e-3
    assert difference.near_tie
    assert difference.sentence().endswith("a near-tie")
    with torch.no_grad():  # well above what rounding does in fp32
        model.lm_head.weight[11] += 0.01
    assert not first_difference(model, prompt, [3, 11, 5], [3, 12, 5]).near_tie


def test_a_token_that_the_cuts_drop_is_no_near_tie(pair, prompt):
    model, _ = pair
    with torch.no_grad():
        best, worst = (int(i) for i in model(prompt).logits[0, -1].argsort(descending=True)[[0, -1]])
    difference = first_difference(model, prompt, [worst], [best], processor=GumbelMax(seed=1, top_k=1))
    assert difference.index == 0 and difference.score_gap == math.inf and not difference.near_tie
    difference.sentence()


def test_an_output_that_ends_early_is_a_difference(pair, prompt):
    model, _ = pair
    difference = first_difference(model, prompt, [3, 4], [3, 4, 5])
    assert (difference.index, difference.ours, difference.baseline) == (2, None, 5)
    assert "ours has nothing more" in difference.sentence()
    assert not difference.near_tie
    assert first_difference(model, prompt, [3, 4], [3, 4]) is None


def test_compare_refuses(pair, prompts, prompt):
    with pytest.raises(ValueError, match=r"input_ids has shape \[5, 9\]"):
        compare(*pair, prompts().input_ids)
    with pytest.raises(ValueError, match="repeats is 0"):
        compare(*pair, prompt, repeats=0)
