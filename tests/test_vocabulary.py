"""A drafter of a part of the vocabulary: same outputs, same drafts as the whole one that may not draft the rest."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import dspark_fast
from dspark_fast import DSparkDraft
from dspark_fast.reference import draft_block
from dspark_fast.vocabulary import restricted, whole

TOKENS = torch.tensor([2, 3, 5, 8, 13, 21, 34, 40, 55, 60, 61, 62, 89, 95])
W2 = "markov_head.markov_w2.weight"


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target()
    return model, make_draft(model)


def drafted(draft, **options):
    g = torch.Generator().manual_seed(4)
    config = draft.config
    features = torch.randn(6, 3, len(config.target_layer_ids) * config.hidden_size, generator=g)
    return draft_block(draft, features, torch.tensor([1, 3, 4, 60, 95, 0]), **options)


@pytest.mark.floor
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_it_drafts_as_the_whole_one_that_may_not_draft_the_rest(options, pair):
    draft = pair[1]
    part, all_tokens = drafted(restricted(draft, TOKENS), **options), drafted(draft, **options)
    assert set(part.tokens.unique().tolist()) <= set(TOKENS.tolist()) and len(part.tokens.unique()) > 3
    torch.testing.assert_close(part.base_logits, all_tokens.base_logits[..., TOKENS])
    assert part.logits.shape == (6, 5, len(TOKENS))
    again = drafted(restricted(draft, torch.arange(97)), **options)  # everything is a vocabulary too
    assert torch.equal(again.tokens, all_tokens.tokens)


def test_it_reads_only_its_rows(pair):
    """What the other rows hold, here NaN, is never looked at."""
    model = copy.deepcopy(pair[0])
    part = restricted(pair[1], TOKENS).tie_to(model)
    others = torch.ones(97, dtype=torch.bool)
    others[TOKENS] = False
    rows = part.head_rows
    assert rows.shape == (14, 64) and torch.equal(rows, model.lm_head.weight[TOKENS])
    assert part.markov_weights()[1].shape == (14, 8)
    hidden = torch.randn(2, 3, 64)
    expected = part.logits(hidden)
    with torch.no_grad():
        model.lm_head.weight[others] = torch.nan
    assert torch.equal(part.logits(hidden), expected)


def test_a_head_that_is_no_matrix_runs_whole(pair):
    """As a quantised one does, whose weight is packed."""
    model, draft = pair
    part, hidden = restricted(draft, TOKENS), torch.randn(2, 3, 64)
    expected = part.logits(hidden)

    class Packed(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.inner, self.weight = [head], torch.zeros(3, 5)

        def forward(self, x):
            return self.inner[0](x)

    part.share(part.embed_tokens, Packed(model.lm_head))
    part.take_head_rows()
    assert part.head_rows is None
    torch.testing.assert_close(part.logits(hidden), expected)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "coupled"])
def test_the_output_is_the_same(sampling, pair, prompts):
    model, draft = pair
    batch = prompts((4, 1, 6))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "verification": "coupled", "seed": 5}
    settings |= {"do_sample": False, "off_switch": False, **sampling}
    truth = dspark_fast.generate(model, None, batch.input_ids, **settings)
    out = dspark_fast.generate(model, restricted(draft, TOKENS), batch.input_ids, **settings)
    assert torch.equal(out, truth)
    assert sum(out.stats.proposed) > 20


def test_rejection_keeps_the_targets_law(tiny, processors_of, law, g_test):
    """Tokens 1 and 3 are never drafted, so they come from the residual alone: at their rate."""
    model, draft = tiny
    ids, rows = torch.tensor([[1, 3, 2, 4]]), 4000
    settings = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "temperature": 2.0}
    part = restricted(draft, torch.tensor([0, 2, 4]))
    out = dspark_fast.generate(model, part, ids, num_return_sequences=rows, seed=20, **settings)
    counts: dict[tuple[int, ...], int] = {}
    for row in out[:, 4:].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert 0.1 < out.stats.accepted[0] / out.stats.proposed[0] < 0.9
    assert g_test(counts, law(model, ids, processors_of(model, ids, **settings), 3), rows) > 1e-6


@pytest.mark.floor
def test_round_trip(pair, tmp_path):
    model, draft = pair
    part = restricted(draft, TOKENS)
    part.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].tolist() == [token - column for column, token in enumerate(TOKENS.tolist())]
    assert stored[W2].shape == (14, 8)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 14 and config["dtype"] == "float32"
    loaded = DSparkDraft.from_pretrained(tmp_path, target=model, dtype=torch.float32)
    assert torch.equal(loaded.vocabulary, TOKENS)
    assert torch.equal(drafted(loaded).tokens, drafted(part).tokens)
    part.save_pretrained(tmp_path, include_target_weights=True)
    alone = DSparkDraft.from_pretrained(tmp_path)
    assert torch.equal(drafted(alone).tokens, drafted(part).tokens)
    assert torch.equal(restricted(whole(alone), TOKENS).logits(torch.ones(1, 64)), alone.logits(torch.ones(1, 64)))


def test_bf16_leaves_the_ids_alone(pair):
    assert torch.equal(restricted(pair[1], TOKENS).to(torch.bfloat16).vocabulary, TOKENS)


def test_whole_is_the_inverse(pair):
    draft = pair[1]
    again = whole(restricted(draft, TOKENS))
    assert again.vocabulary is None and again.config.draft_vocab_size is None and whole(draft) is draft
    w2, before = again.state_dict()[W2], draft.state_dict()[W2]
    assert torch.equal(w2[TOKENS], before[TOKENS]) and w2.count_nonzero() == before[TOKENS].count_nonzero()
    for name, value in draft.state_dict().items():
        assert name == W2 or torch.equal(again.state_dict()[name], value)
    assert again.lm_head is draft.lm_head and not any(name.startswith("lm_head") for name in again.state_dict())


def test_the_original_is_not_touched(pair):
    draft = pair[1]
    part = restricted(draft, TOKENS)
    with torch.no_grad():
        part.fc.weight.zero_()
    assert draft.fc.weight.any() and draft.vocabulary is None


BAD_TOKENS = {
    "empty": (torch.zeros(0, dtype=torch.long), r"torch.int64 \[0\]: accepted is int64 \[D\]"),
    "dtype": (torch.tensor([1, 2], dtype=torch.int32), r"torch.int32"),
    "twice": (torch.tensor([1, 4, 4]), r"token 4 of the draft vocabulary comes after 4: accepted are ascending"),
    "falling": (torch.tensor([4, 1]), r"token 1 of the draft vocabulary comes after 4"),
    "negative": (torch.tensor([-1, 1]), r"token -1 of the draft vocabulary"),
    "beyond": (torch.tensor([1, 97]), r"token 97 .* ids below 97"),
}


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_bad_vocabularies_are_refused(tokens, message, pair):
    with pytest.raises(ValueError, match=message):
        restricted(pair[1], tokens)


def test_restricted_twice(pair):
    with pytest.raises(ValueError, match="restricted to 14 tokens already"):
        restricted(restricted(pair[1], TOKENS), TOKENS[:2])


BAD_FILES = {
    "without-ids": (lambda stored: stored.pop("d2t"), r"missing d2t"),
    "too-few-ids": (lambda stored: stored.update(d2t=stored["d2t"][:9]), r"d2t has shape \[9\].*asks for \[14\]"),
    "whole-w2": (lambda stored: stored.update({W2: torch.zeros(97, 8)}), r"markov_w2.weight has shape \[97, 8\]"),
    # ids, as one may take the tensor to hold, instead of offsets
    "ids": (lambda stored: stored.update(d2t=TOKENS.clone()), r"d2t is not what it should be: token 101 "),
}


@pytest.mark.parametrize(("change", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_checkpoints_are_refused(change, message, pair, tmp_path):
    restricted(pair[1], TOKENS).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(tmp_path, target=pair[0])
