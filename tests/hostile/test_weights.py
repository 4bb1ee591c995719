"""Targets and drafters whose weights are no numbers, or too large; and positions that a model does not have."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_fast
from dspark_fast import DSparkConfig, DSparkDraft

HOSTILE = settings.get_profile("hostile")
NAN, INF = math.nan, math.inf
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
MODES = st.sampled_from(["greedy", "rejection", "coupled"])
PLACE = st.integers(0, 10**6)


@contextmanager
def patched(part, place, value, whole):
    """One weight of ``part``, or one element of it, is ``value`` for the time of the block."""
    weights = [weight for _, weight in sorted(part.named_parameters())]
    weight = weights[place % len(weights)]
    before = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[slice(None) if whole else slice(place % weight.numel(), place % weight.numel() + 1)] = value
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def asked(mode):
    if mode == "greedy":
        return {"do_sample": False}
    return {"do_sample": True, "verification": mode, "seed": 1}


@settings(HOSTILE, max_examples=45)
@given(PLACE, st.sampled_from([NAN, INF, -INF, 1e30]), MODES)
def test_broken_target(pair, attempt, through, plain, place, value, mode):
    """Either the logits are refused, by row and position, or they were numbers and the tokens are right.

    A draft may be read whose embedding is broken and which plain decoding never reads, so it can be refused there too.
    """
    model, draft = pair
    with patched(model, place, value, whole=False):
        outcome = attempt(lambda: through("ours", model, draft, IDS, **asked(mode)), "the logits of row", model=model)
        if outcome.error is not None:
            assert isinstance(outcome.error, FloatingPointError)
        elif mode == "greedy":
            assert outcome.value == plain(model, IDS)
        else:
            assert all(0 <= token < 31 for row in outcome.value for token in row)
    assert through("ours", model, draft, IDS) == plain(model, IDS)


@settings(HOSTILE, max_examples=45)
@given(PLACE, st.sampled_from([NAN, INF, -INF, 1e30, -1e30, 1e-45]), st.booleans(), MODES)
def test_broken_drafter(pair, attempt, through, plain, place, value, whole, mode):
    """It costs speed, and no token changes."""
    model, draft = pair
    with patched(draft, place, value, whole):
        said = attempt(lambda: through("ours", model, draft, IDS, **asked(mode)), model=model).value
    if mode == "greedy":
        assert said == plain(model, IDS)
    elif mode == "coupled":
        assert said == through("ours", model, None, IDS, **asked(mode))
    assert all(0 <= token < 31 for row in said for token in row)


@settings(HOSTILE, max_examples=20)
@given(st.floats(1e2, 6e4), st.sampled_from([torch.float16, torch.bfloat16]), st.booleans())
def test_hidden_states_near_the_end_of_fp16(pair, halves, attempt, largest, dtype, sampled):
    """Up to 6e4 in the embedding: the right tokens, near-ties apart, or logits that are refused by row and position."""
    model, draft = halves[dtype]
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(before.float() * (largest / before.float().abs().max()))
        asked = {"max_new_tokens": 6, "do_sample": sampled, "report_divergence": True}
        asked |= {"verification": "coupled", "seed": 1} if sampled else {}
        outcome = attempt(lambda: dspark_fast.generate(model, draft, IDS, **asked), "the logits of row", model=model)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    if outcome.error is None:
        assert all(one is None or one.near_tie for one in outcome.value.stats.divergence)


@pytest.fixture(scope="module")
def halves(pair, make_draft):
    """The pair in 16 bits."""
    made = {}
    for dtype in (torch.float16, torch.bfloat16):
        model = copy.deepcopy(pair[0]).to(dtype)
        draft = make_draft(model, num_hidden_layers=1, block_size=3, markov_rank=4, target_layer_ids=[0, 1]).to(dtype)
        dspark_fast.generate(model, draft, IDS, max_new_tokens=4, do_sample=False, report_divergence=True)
        made[dtype] = model, draft
    return made


def test_broken_drafter_with_a_confidence_cut(pair, attempt, through, plain):
    model, draft = pair
    names = [name for name, _ in sorted(draft.named_parameters())]
    with patched(draft, names.index("fc.weight"), NAN, whole=True):
        said = attempt(lambda: through("ours", model, draft, IDS, confidence_threshold=0.5), model=model).value
    assert said == plain(model, IDS)


@pytest.fixture(scope="module")
def learned():
    """A target with a table of 16 positions, and its drafter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = GPT2Config(vocab_size=31, n_embd=32, n_layer=3, n_head=2, n_positions=16, initializer_range=0.3, **ends)
    model = GPT2LMHeadModel(config).eval()
    sizes = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4, "target_layer_ids": [0, 1]}
    return model, DSparkDraft(DSparkConfig.from_target(config, **sizes)).tie_to(model).eval()


def prompt(width):
    ids = torch.randint(1, 31, (1, width), generator=torch.Generator().manual_seed(width))
    return ids, {"attention_mask": torch.ones_like(ids)}


@settings(HOSTILE, max_examples=20)
@given(st.integers(1, 16), st.integers(1, 12))
def test_learned_positions(learned, attempt, through, plain, width, new):
    """Room for a block behind the last token, or no drafter: the same tokens."""
    model, draft = learned
    ids, mask = prompt(width)
    if width + new <= 17:
        far = width + new + draft.config.block_size > 16
        ours = attempt(lambda: through("ours", model, None if far else draft, ids, max_new_tokens=new, **mask))
        assert ours.value == plain(model, ids, max_new_tokens=new, **mask)


@pytest.mark.parametrize(("width", "new"), [(8, 8), (8, 9), (14, 2)])
def test_learned_positions_up_to_the_last(learned, attempt, through, plain, width, new):
    model, draft = learned
    ids, mask = prompt(width)
    ours = attempt(lambda: through("ours", model, draft, ids, max_new_tokens=new, **mask), model=model)
    assert ours.value == plain(model, ids, max_new_tokens=new, **mask)


@pytest.mark.parametrize(("width", "new"), [(20, 4), (8, 12), (8, 10)])
def test_more_tokens_than_learned_positions(learned, refused, through, width, new):
    model, _ = learned
    ids, mask = prompt(width)
    refused(lambda: through("ours", model, None, ids, max_new_tokens=new, **mask), "position", "max_new_tokens")
