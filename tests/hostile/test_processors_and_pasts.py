"""Logits processors of the user's own that give anything, and caches that are not of the prompt or of the target."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, StaticCache

import dspark_fast

NAN, INF = math.nan, math.inf
VOCABULARY = 31
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
LONGER = torch.cat([IDS, torch.tensor([[1, 2], [9, 4]])], dim=1)
DOORS = st.sampled_from(["ours", "transformers"])
HOSTILE = settings.get_profile("hostile")


class Own(LogitsProcessor):
    """Says that it is stateless, and does what it is given."""

    stateless = True

    def __init__(self, work):
        self.work = work

    def __call__(self, input_ids, scores):
        return self.work(input_ids, scores)


def with_value(value, token=3):
    def work(input_ids, scores):
        scores = scores.clone()
        scores[:, token] = value
        return scores

    return Own(work)


# What is no scores at all, and the word for it.
NO_SCORES = {
    "none": (lambda ids, s: None, "gave a NoneType"),
    "list": (lambda ids, s: s.tolist(), "gave a list"),
    "tuple": (lambda ids, s: (s,), "gave a tuple"),
    "number": (lambda ids, s: 3.0, "gave a float"),
    "array": (lambda ids, s: s.numpy(), "gave a ndarray"),
    "sparse": (lambda ids, s: s.to_sparse(), "accepted is a dense tensor"),
    "narrow": (lambda ids, s: s[:, :-1], "gave a tensor"),
    "wide": (lambda ids, s: torch.cat([s, s[:, :1]], 1), "gave a tensor"),
    "a-row": (lambda ids, s: s[0], "gave a tensor"),
    "rows-less": (lambda ids, s: s[:1], "gave a tensor"),
    "rows-more": (lambda ids, s: torch.cat([s, s]), "gave a tensor"),
    "a-column": (lambda ids, s: s[:, :1], "gave a tensor"),
    "an-axis-more": (lambda ids, s: s[None], "gave a tensor"),
    "no-axis": (lambda ids, s: s.sum(), "gave a tensor"),
    "no-rows": (lambda ids, s: s[:0], "gave a tensor"),
    "elsewhere": (lambda ids, s: s.to("meta"), "on meta"),
    "bool": (lambda ids, s: s > 0, "gave torch.bool"),
    "complex": (lambda ids, s: s.to(torch.complex64), "gave torch.complex64"),
}
# Scores like others, whatever they are made of.
SCORES = {
    "half": lambda ids, s: s.half(),
    "double": lambda ids, s: s.double(),
    "integers": lambda ids, s: (100 * s).long(),
    "learning": lambda ids, s: s.clone().requires_grad_(),
    "in-place": lambda ids, s: s.add_(torch.arange(VOCABULARY) % 7),
    "turned": lambda ids, s: s.T.contiguous().T.flip(1),
    "huge": lambda ids, s: s * 1e30,
    "one-token": lambda ids, s: torch.full_like(s, -INF).index_fill_(1, (ids[:, -1:] + 3)[0] % VOCABULARY, 0.0),
    "flat": lambda ids, s: torch.zeros_like(s),
    "of-the-prefix": lambda ids, s: s + torch.sin(ids.sum(1, keepdim=True) * torch.arange(VOCABULARY)),
}


@pytest.mark.parametrize(("work", "says"), NO_SCORES.values(), ids=NO_SCORES)
@pytest.mark.parametrize("door", ["ours", "transformers"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_what_is_no_scores(pair, refused, through, door, work, says, sampled):
    model, draft = pair
    asked = {"logits_processor": [Own(work)], "do_sample": sampled}
    refused(lambda: through(door, model, draft, IDS, **asked), says, model=model)


@settings(HOSTILE, max_examples=20)
@given(DOORS, st.sampled_from(sorted(SCORES)), st.integers(1, 2), st.integers(1, 8), st.booleans())
def test_scores_of_any_kind(pair, attempt, through, plain, door, kind, rows, new, twice):
    (model, draft), own = pair, [Own(SCORES[kind])] * (1 + twice)
    ids = IDS[:rows].clone()
    asked = {"logits_processor": own, "max_new_tokens": new}
    outcome = attempt(lambda: through(door, model, draft, ids, **asked), model=model)
    assert outcome.value == plain(model, ids, **asked) and torch.equal(ids, IDS[:rows])


@settings(HOSTILE, max_examples=12)
@given(st.sampled_from(sorted(SCORES)), st.integers(0, 2**63 - 1), st.sampled_from([0.3, 1.0, 5.0]))
def test_scores_of_any_kind_that_are_drawn_from(pair, attempt, through, kind, seed, temperature):
    """Coupled: what is right does not depend on the drafter."""
    model, draft = pair
    asked = {"logits_processor": [Own(SCORES[kind])], "do_sample": True, "temperature": temperature}
    asked |= {"seed": seed, "verification": "coupled"}
    outcome = attempt(lambda: through("ours", model, draft, IDS, **asked), model=model)
    assert outcome.value == through("ours", model, None, IDS, **asked)
    outcome = attempt(lambda: through("ours", model, draft, IDS, **{**asked, "verification": "rejection"}), model=model)
    assert all(0 <= token < VOCABULARY for row in outcome.value for token in row)


@settings(HOSTILE, max_examples=30)
@given(
    DOORS,
    st.sampled_from([NAN, INF, "all NaN", "all inf", "all -inf"]),
    st.integers(0, VOCABULARY - 1),
    st.sampled_from([False, "rejection", "coupled"]),
)
def test_scores_that_are_no_numbers(pair, refused, through, door, value, token, sampled):
    """The position is named, and whose they are."""
    model, draft = pair
    value, token = (float(value[4:]), slice(None)) if isinstance(value, str) else (value, token)
    asked = {"logits_processor": [with_value(value, token)], "do_sample": bool(sampled)}
    asked |= {"verification": sampled, "seed": 1} if sampled else {}
    says = "row 0 for position 3 are NaN, +inf or all -inf, as the logits processor Own left them"
    refused(lambda: through(door, model, draft, IDS, **asked), says, model=model)


def test_what_breaks_behind_a_stop_is_in_nobodys_way(pair, attempt, through, plain):
    """A draft behind the stop token is shown, but its scores are of no matter."""
    model, draft = pair
    first = plain(model, IDS[:1], max_new_tokens=1)[0][-1]
    broken = Own(lambda ids, s: s * NAN if ids.shape[1] > IDS.shape[1] else s)
    asked = {"logits_processor": [broken], "eos_token_id": first, "max_new_tokens": 6}
    assert attempt(lambda: through("ours", model, draft, IDS[:1], **asked), model=model).value == plain(
        model, IDS[:1], **asked
    )


@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, OSError, FloatingPointError], ids=repr)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
def test_one_that_raises(pair, refused, through, plain, error, late):
    """Its error comes through, and nothing of the call is left."""
    model, draft = pair

    def work(input_ids, scores):
        if input_ids.shape[1] >= IDS.shape[1] + 3 * late:
            raise error("of my own")
        return scores

    refused(
        lambda: through("ours", model, draft, IDS, logits_processor=[Own(work)], max_new_tokens=9),
        "of my own",
        model=model,
    )
    assert through("ours", model, draft, IDS) == plain(model, IDS)


def test_one_that_writes_into_the_prompt(pair, attempt, through, plain):
    model, draft = pair
    ids = IDS.clone()
    outcome = attempt(
        lambda: through("ours", model, draft, ids, logits_processor=[Own(lambda i, s: s + 0 * i.zero_().sum())]),
        model=model,
    )
    assert outcome.value == plain(model, IDS) and torch.equal(ids, IDS)


NO_PROCESSORS = {
    "number": 3,
    "none": None,
    "text": "a",
    "function": lambda ids, scores: scores,
    "class": Own,
    "object": object(),
}


@pytest.mark.parametrize("item", NO_PROCESSORS.values(), ids=NO_PROCESSORS)
def test_something_that_is_no_processor(pair, refused, through, item):
    refused(lambda: through("ours", *pair, IDS, logits_processor=[item]), "the logits processor", model=pair[0])


def dynamic(model, ids=IDS):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def changed(work, layers=slice(None)):
    """A cache of transformers, some of whose keys and values became something else."""

    def make(model, draft):
        cache = dynamic(model)
        for layer in cache.layers[layers]:
            layer.keys, layer.values = work(layer.keys, layer.values)
        return cache

    return make


def both(work):
    return lambda keys, values: (work(keys), work(values))


def handed_back(model, draft, ids=IDS, **more):
    return dspark_fast.generate(
        model, draft, ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **more
    ).past_key_values


def less_a_layer(model, draft):
    cache = dynamic(model)
    cache.layers.pop()
    return cache


WRONG_PASTS = {
    "list": lambda model, draft: [(layer.keys, layer.values) for layer in dynamic(model).layers],
    "tuple": lambda model, draft: tuple((layer.keys, layer.values) for layer in dynamic(model).layers),
    "text": lambda model, draft: "a",
    "static": lambda model, draft: StaticCache(config=model.config, max_cache_len=32),
    "of-an-encoder": lambda model, draft: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "bfloat16": changed(both(lambda states: states.bfloat16())),
    "double": changed(both(lambda states: states.double())),
    "integers": changed(both(lambda states: states.long())),
    "complex": changed(both(lambda states: states.to(torch.complex64))),
    "one-layer-half": changed(both(lambda states: states.half()), slice(1, 2)),
    "values-half": changed(lambda keys, values: (keys, values.half())),
    "sparse": changed(both(lambda states: states.to_sparse())),
    "elsewhere": changed(both(lambda states: states.to("meta"))),
    "none": changed(lambda keys, values: (None, values), slice(1, 2)),
    "more-heads": changed(both(lambda states: torch.cat([states, states], 1))),
    "more-value-heads": changed(lambda keys, values: (keys, torch.cat([values, values], 1))),
    "wider": changed(both(lambda states: torch.cat([states, states], 3))),
    "wider-values": changed(lambda keys, values: (keys, torch.cat([values, values], 3))),
    "values-shorter": changed(lambda keys, values: (keys, values[:, :, :-1])),
    "a-row": changed(both(lambda states: states[:1])),
    "rows-more": changed(both(lambda states: torch.cat([states, states]))),
    "an-axis-less": changed(both(lambda states: states[0])),
    "an-axis-more": changed(both(lambda states: states[None])),
    "a-layer-less": less_a_layer,
    "longer": lambda model, draft: dynamic(model, torch.cat([LONGER, IDS], 1)),
    "as-long": lambda model, draft: dynamic(model, LONGER),
    "handed-back-of-a-row": lambda model, draft: handed_back(model, draft, IDS[:1]),
    "handed-back-of-another": lambda model, draft: handed_back(copy.deepcopy(model), None),
}


@pytest.mark.parametrize("make", WRONG_PASTS.values(), ids=WRONG_PASTS)
def test_a_past_that_cannot_be(pair, refused, through, plain, make):
    model, draft = pair
    past = make(model, draft)
    refused(lambda: through("ours", model, draft, LONGER, past_key_values=past), "past_key_values", model=model)
    if hasattr(past, "layers"):  # transformers itself takes no other
        door = "transformers"
        refused(lambda: through(door, model, draft, LONGER, past_key_values=past), "past_key_values", model=model)
    assert through("ours", model, draft, LONGER) == plain(model, LONGER)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_past_that_holds_no_numbers(pair, refused, through, value):
    model, draft = pair
    past = changed(both(lambda states: states * value))(model, draft)
    says = "row 0 for position 5 are NaN"
    refused(lambda: through("ours", model, draft, LONGER, past_key_values=past), says, model=model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_past_of_before_the_model_changed_its_dtype(pair, make_target, refused, through, dtype):
    model = copy.deepcopy(pair[0])
    past = handed_back(model, None)
    model.to(dtype)
    refused(lambda: through("ours", model, None, LONGER, past_key_values=past), "past_key_values has", model=model)


@settings(HOSTILE, max_examples=20)
@given(
    DOORS,
    st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=16).map(lambda ids: ids[: len(ids) // 2 * 2]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=16).map(lambda ids: ids[: len(ids) // 2 * 2]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_past_of_any_other_tokens(pair, attempt, through, plain, door, before, now, common, copied):
    """Shorter, longer, other: what both have in common is kept, and the past stays as it was."""
    model, draft = pair
    before, now = (torch.cat([IDS[:, :common], torch.tensor(ids).view(2, -1)], 1) for ids in (before, now))
    past = handed_back(model, draft, before, attention_mask=torch.ones_like(before))
    past = copy.deepcopy(past) if copied else past
    known = past.tokens.clone(), past.cache.lengths.clone()
    asked = {"attention_mask": torch.ones_like(now)}
    outcome = attempt(lambda: through(door, model, draft, now, past_key_values=past, **asked), model=model)
    assert outcome.value == plain(model, now, **asked)
    assert all(torch.equal(one, other) for one, other in zip(known, (past.tokens, past.cache.lengths)))


@settings(HOSTILE, max_examples=10)
@given(DOORS, st.integers(1, 4), st.integers(0, 4))
def test_a_cache_of_transformers_cut_short(pair, attempt, through, plain, door, length, cut):
    model, draft = pair
    cache = dynamic(model, LONGER[:, :length])
    if cut := min(cut, length - 1):
        cache.crop(-cut)
    outcome = attempt(lambda: through(door, model, draft, LONGER, past_key_values=cache), model=model)
    assert outcome.value == plain(model, LONGER)


def test_a_cache_of_other_tokens_is_taken_at_its_word(pair, attempt, through, plain):
    """It does not say of what: transformers and we go on from it alike."""
    model, draft = pair
    outcome = attempt(
        lambda: through("ours", model, draft, LONGER, past_key_values=dynamic(model, IDS.flip(1))), model=model
    )
    assert outcome.value == plain(model, LONGER, past_key_values=dynamic(model, IDS.flip(1)))


@pytest.mark.parametrize("cache", [DynamicCache(), None], ids=["empty", "none"])
def test_no_past(pair, attempt, through, plain, cache):
    model, draft = pair
    outcome = attempt(lambda: through("ours", model, draft, LONGER, past_key_values=cache), model=model)
    assert outcome.value == plain(model, LONGER)


CHANGES = {
    "crop": (-1,),
    "reset": (),
    "reorder_cache": (torch.tensor([1, 0]),),
    "batch_select_indices": (torch.tensor([0]),),
    "batch_repeat_interleave": (2,),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_handed_back_is_not_changed(pair, refused, attempt, through, plain, name):
    model, draft = pair
    past = handed_back(model, draft)
    refused(lambda: getattr(past, name)(*CHANGES[name]), "past_key_values")
    outcome = attempt(lambda: through("ours", model, draft, LONGER, past_key_values=past), model=model)
    assert outcome.value == plain(model, LONGER)
