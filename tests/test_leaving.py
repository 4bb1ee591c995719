"""Finished rows leave the batch: the others go on as if nothing had happened, and cost no more than they are."""

from __future__ import annotations

import pytest
import torch

import dspark_fast
from dspark_fast.engine.reader import Reader
from dspark_fast.engine.state import DecodingState, Limits
from dspark_fast.engine.target import RaggedTarget
from dspark_fast.stats import Stats

LENGTHS = (3, 9, 1, 5, 12, 7, 2, 4)
STOPS = list(range(3, 97, 9))
SAMPLING = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.9, "verification": "coupled"},
    "rejection": {"do_sample": True, "temperature": 0.9, "verification": "rejection", "top_p": 0.9},
}


@pytest.fixture
def widths(monkeypatch):
    """How many rows each pass after the prefill had."""
    seen = []
    verify = RaggedTarget.verify

    def watched(self, ids, end):
        seen.append(len(ids))
        return verify(self, ids, end)

    monkeypatch.setattr(RaggedTarget, "verify", watched)
    return seen


def alone(model, draft, batch, row, **settings):
    ids = batch.input_ids[row : row + 1, batch.attention_mask[row].bool()]
    return dspark_fast.generate(model, draft, ids, **settings)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("windowed", [False, True], ids=["Qwen3", "Gemma2"])
def test_rows_are_what_they_are_alone(windowed, sampling, make_target, make_draft, prompts, widths):
    """Rows end at a stop token, at unlike times; what is left is 6, 4, 3, ... rows of the caches, moved."""
    model, batch = make_target("Gemma2" if windowed else "Qwen3"), prompts(LENGTHS)
    draft = make_draft(model)
    seeds = [100 + row for row in range(len(LENGTHS))]
    settings = {"max_new_tokens": 40, "eos_token_id": STOPS, "pad_token_id": 0, "off_switch": False, **sampling}
    out = dspark_fast.generate(
        model, draft, batch.input_ids, attention_mask=batch.attention_mask, seed=seeds, **settings
    )
    new = out.stats.new_tokens
    assert len(set(new)) > 3, "rows should end at unlike times"
    assert widths[0] == 8 and min(widths) < 4 and sorted(widths, reverse=True) == widths
    for row, count in enumerate(new):
        tokens = out[row, batch.input_ids.shape[1] :].tolist()
        assert tokens[:count] == alone(model, draft, batch, row, seed=[seeds[row]], **settings)
        assert not any(tokens[count:])


COMPANY = {
    "turned": [7, 6, 5, 4, 3, 2, 1, 0],
    "fewer": [4, 1, 6, 0],
    "twice": [3, 3, 7, 2, 7, 5, 1, 0, 4, 6, 0, 5],  # one request in two rows, with one seed
}


@pytest.mark.parametrize("company", COMPANY.values(), ids=COMPANY)
@pytest.mark.parametrize("cut", [0.0, 0.5], ids=["whole-blocks", "cut-by-confidence"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_rows_are_the_same_in_another_row_and_beside_others(
    sampling, cut, company, make_target, make_draft, prompts, widths
):
    """Others leave before them, or after; where a block is cut hangs on the row alone."""
    model, batch, pad = make_target(num_hidden_layers=3), prompts(LENGTHS), max(LENGTHS)
    draft = make_draft(model, num_hidden_layers=1, target_layer_ids=[0, 1])
    settings = {"max_new_tokens": 30, "eos_token_id": STOPS, "pad_token_id": 0, "off_switch": False, **sampling}
    settings["confidence_threshold"] = cut

    def rows(order):
        ids, mask, seeds = batch.input_ids[order], batch.attention_mask[order], [100 + row for row in order]
        out = dspark_fast.generate(model, draft, ids, attention_mask=mask, seed=seeds, **settings)
        assert widths[0] == len(order) and min(widths) <= len(order) // 2, "rows should leave"
        widths.clear()
        said = [row[:count] for row, count in zip(out[:, pad:].tolist(), out.stats.new_tokens)]
        return said, out.stats

    here, stats = rows(list(range(len(LENGTHS))))
    there, others = rows(company)
    assert len({len(row) for row in here}) > 3
    assert there == [here[row] for row in company]
    assert others.acceptance_lengths == [stats.acceptance_lengths[row] for row in company]
    assert not cut or others.proposed[-1] < others.proposed[0]


def test_a_restricted_drafter_leaves_too(make_target, make_draft, prompts, widths):
    """Its row of logits of all tokens is as wide as the batch."""
    model, batch = make_target(), prompts(LENGTHS)
    draft = make_draft(model, draft_vocab_size=60)
    settings = {"max_new_tokens": 30, "eos_token_id": STOPS, "pad_token_id": 0, "do_sample": True}
    seeds = list(range(8))
    out = dspark_fast.generate(
        model, draft, batch.input_ids, attention_mask=batch.attention_mask, seed=seeds, **settings
    )
    assert min(widths) < 4
    for row, count in enumerate(out.stats.new_tokens):
        tokens = out[row, batch.input_ids.shape[1] :].tolist()[:count]
        assert tokens == alone(model, draft, batch, row, seed=[row], **settings)


def test_stop_strings_end_rows_that_leave(make_target, characters, widths):
    """What only the host can judge, told to the device by place, which is not the row any more."""
    model, tokenizer = characters.target(make_target), characters.tokenizer
    model.generation_config.eos_token_id = None
    ids = torch.randint(5, 90, (8, 6), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "pad_token_id": 3, "verification": "coupled"}
    settings |= {"stop_strings": ["q", "Z", "7"], "tokenizer": tokenizer}
    seeds = list(range(8))
    out = dspark_fast.generate(model, None, ids, seed=seeds, **settings)
    assert len(set(out.stats.new_tokens)) > 3 and min(widths) < 4
    for row, count in enumerate(out.stats.new_tokens):
        one = dspark_fast.generate(model, None, ids[row : row + 1], seed=[row], **settings)
        assert out[row, 6 : 6 + count].tolist() == one[0, 6:].tolist()


def test_a_row_without_stop_token_reaches_the_limit(make_target, make_draft, prompts):
    """Rows end by the limit alone, at unlike rounds, and the caches have grown before."""
    model, batch = make_target(), prompts(LENGTHS)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 300, "do_sample": False, "off_switch": False}
    out = dspark_fast.generate(model, make_draft(model), batch.input_ids, eos_token_id=96, pad_token_id=0, **settings)
    truth = dspark_fast.generate(model, None, batch.input_ids, eos_token_id=96, pad_token_id=0, **settings)
    assert torch.equal(out, truth)


def test_the_switch_measures_anew(make_target, make_draft, prompts, monkeypatch, widths):
    model, batch = make_target(), prompts(LENGTHS)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 60, "eos_token_id": STOPS}
    settings |= {"do_sample": False, "pad_token_id": 0}
    truth = dspark_fast.generate(model, None, batch.input_ids, off_switch=False, **settings)
    out = dspark_fast.generate(model, make_draft(model), batch.input_ids, off_switch=True, **settings)
    assert torch.equal(out, truth) and min(widths) < 4


STAY = {
    "processors": {"repetition_penalty": 1.3},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "past": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("settings", STAY.values(), ids=STAY)
def test_rows_stay_where_somebody_counts_them(settings, make_target, make_draft, prompts, widths):
    model, batch = make_target(), prompts(LENGTHS)
    dspark_fast.generate(
        model,
        make_draft(model),
        batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=30,
        eos_token_id=STOPS,
        pad_token_id=0,
        do_sample=False,
        **settings,
    )
    assert set(widths) == {8}


def test_memory_is_the_most_there_was(make_target, make_draft, prompts, monkeypatch, widths):
    model, batch = make_target(), prompts(LENGTHS)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 30, "eos_token_id": STOPS}
    draft = make_draft(model)
    leaving = dspark_fast.generate(model, draft, batch.input_ids, do_sample=False, **settings).stats
    assert min(widths) < 4
    monkeypatch.setattr(Reader, "leave", lambda self: None)
    assert (
        leaving.memory == dspark_fast.generate(model, draft, batch.input_ids, do_sample=False, **settings).stats.memory
    )


def test_nothing_is_copied_for_one_row_of_eight(prompts):
    """A quarter must be gone before caches are moved."""
    limits = Limits(9, torch.tensor([], dtype=torch.long))
    state = DecodingState(torch.ones(8, 2, dtype=torch.long), torch.full((8,), 2), limits, 3, 16)
    reader = Reader(state, Stats(8, "greedy", [0] * 8, 3), lag=0, stopping=None, on_commit=lambda rows: None)
    reader.finished[3] = True
    assert reader.leave() is None
    reader.finished[6] = True
    assert reader.leave() == [0, 1, 2, 4, 5, 7]
    reader.finished[7] = True
    assert reader.leave() is None
    reader.finished[0] = True
    assert reader.leave() == [1, 2, 3, 4]  # places among the six: rows 1, 2, 4, 5
