"""Prompts, masks and settings that nobody should give, at both doors of decoding."""

from __future__ import annotations

import copy
import math
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_fast

NAN, INF = math.nan, math.inf
VOCABULARY = 31
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
DOORS = st.sampled_from(["ours", "transformers"])
HOSTILE = settings.get_profile("hostile")


@st.composite
def prompts(draw):
    """Left-padded ids without the pad token, and their mask in any dtype."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    width = max(lengths)
    ids = draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=width * len(lengths), max_size=width * len(lengths)))
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    dtype = draw(st.sampled_from([torch.long, torch.int32, torch.uint8, torch.bool, torch.float32]))
    return torch.tensor(ids).view(len(lengths), width) * mask, mask.to(dtype)


STOPS = st.one_of(
    st.sampled_from([None, -1, 2**40, [], [-1], list(range(-40, 0)), list(range(31, 5000)), list(range(5000))]),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
)


@settings(HOSTILE, max_examples=60)
@given(DOORS, prompts(), STOPS, st.integers(1, 7))
def test_sound_prompts_and_any_stop_tokens(pair, attempt, through, plain, door, batch, stops, new):
    (model, draft), (ids, mask) = pair, batch
    asked = {"attention_mask": mask, "eos_token_id": stops, "max_new_tokens": new}
    outcome = attempt(lambda: through(door, model, draft, ids, **asked), model=model)
    assert outcome.value == plain(model, ids, **asked)


@settings(HOSTILE, max_examples=40)
@given(DOORS, st.integers(0, 1), st.integers(0, 2), st.integers(VOCABULARY, 2**63 - 1) | st.integers(-(2**63), -1))
def test_ids_that_are_none(pair, refused, through, door, row, column, wrong):
    model, draft = pair
    ids = IDS.clone()
    ids[row, column] = wrong
    mask = torch.ones_like(ids)
    refused(lambda: through(door, model, draft, ids, attention_mask=mask), "input_ids holds", model=model)


@settings(HOSTILE, max_examples=40)
@given(DOORS, st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_masks_of_zeros_and_ones(pair, attempt, through, plain, door, values):
    model, draft = pair
    mask = torch.tensor(values).view(2, 3)
    outcome = attempt(
        lambda: through(door, model, draft, IDS, attention_mask=mask), "attention_mask", "is empty", model=model
    )
    padded = all(row == sorted(row) and any(row) for row in mask.tolist())
    assert (outcome.error is None) == padded
    if padded:
        assert outcome.value == plain(model, IDS, attention_mask=mask)


@settings(HOSTILE, max_examples=25)
@given(DOORS, st.integers(60, 300))
def test_prompts_longer_than_the_positions(pair, attempt, through, plain, door, width):
    """RoPE goes on beyond them, here as there."""
    model, draft = pair
    ids = torch.randint(1, VOCABULARY, (1, width), generator=torch.Generator().manual_seed(width))
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3}
    outcome = attempt(lambda: through(door, model, draft, ids, **asked), model=model)
    assert outcome.value == plain(model, ids, **asked)


ANY = {"allow_nan": False, "allow_infinity": True}
NEVER = st.one_of(
    st.tuples(st.just("max_new_tokens"), st.integers(-(2**70), 0)),
    st.tuples(st.just("temperature"), st.floats(max_value=0.0, **ANY) | st.sampled_from([NAN, -INF, "a"])),
    st.tuples(st.just("top_k"), st.integers(-(2**70), -1) | st.sampled_from([1.5, NAN])),
    st.tuples(st.just("top_p"), st.floats(max_value=-1e-9, **ANY)),
    st.tuples(st.just("min_p"), st.floats(max_value=-1e-9, **ANY) | st.floats(min_value=1.1) | st.just(NAN)),
    st.tuples(st.just("repetition_penalty"), st.floats(max_value=0.0, **ANY) | st.just(NAN)),
    st.tuples(st.just("confidence_threshold"), st.floats(max_value=-1e-9) | st.floats(min_value=1.1) | st.just(NAN)),
    st.tuples(st.just("verification"), st.text(max_size=4) | st.none() | st.integers()),
    st.tuples(st.just("seed"), st.integers(min_value=2**64) | st.integers(max_value=-(2**63) - 1) | st.just([1])),
    st.tuples(st.just("seed"), st.sampled_from([[1, NAN], [1, "a"], torch.zeros(3), torch.tensor([1.5, 2.0])])),
    st.tuples(st.just("stop_strings"), st.sampled_from(["", [], [""], [3], b"x", "without a tokenizer"])),
    st.tuples(st.just("num_beams"), st.integers(2, 9)),
    st.tuples(st.just("num_return_sequences"), st.integers(2, 2**60)),
    st.tuples(st.just("input_ids"), st.sampled_from([torch.zeros(0, 3).long(), torch.zeros(1, 2, 3).long()])),
    st.tuples(st.just("not_known_to_anyone"), st.integers()),
)


@settings(HOSTILE, max_examples=120)
@given(DOORS, NEVER)
def test_settings_out_of_range(pair, refused, through, door, setting):
    (model, draft), (name, value) = pair, setting
    # A greedy call is not allowed several sequences; the others concern sampling.
    asked = {"do_sample": name != "num_return_sequences"}
    if name == "input_ids":
        refused(lambda: through(door, model, draft, value), "input_ids", model=model)
        return
    said = {"repetition_penalty": "penalty"}.get(name, name)
    refused(lambda: through(door, model, draft, IDS, **asked, **{name: value}), said, model=model)


@settings(HOSTILE, max_examples=30)
@given(
    DOORS,
    st.floats(min_value=1e-30, max_value=3e38) | st.just(INF),
    st.integers(0, 2**63 - 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(-(2**63), 2**64 - 1),
)
def test_sampling_at_the_edges(pair, attempt, through, door, temperature, top_k, top_p, min_p, seed):
    """Coupled: what is right does not depend on the drafter."""
    model, draft = pair
    asked = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked |= {"seed": seed, "verification": "coupled", "attention_mask": torch.ones_like(IDS)}
    outcome = attempt(lambda: through(door, model, draft, IDS, **asked), model=model)
    assert outcome.value == through(door, model, None, IDS, **asked)
    outcome = attempt(lambda: through(door, model, draft, IDS, **{**asked, "verification": "rejection"}), model=model)
    assert all(0 <= token < VOCABULARY for row in outcome.value for token in row)


def one(name, value, reason, says=None, doors=("ours", "transformers"), **more):
    """A call that is to be refused."""
    return doors, {**more, name: value}, says or name, f"{name}-{reason}"


FIRST = {"doors": ("ours",)}  # transformers looks at it first, and says what it says
FAULTS = [
    one("input_ids", [[3, 4]], "list: AttributeError about 'shape'", **FIRST),
    one("input_ids", IDS.numpy(), "array: AttributeError about 'type'", **FIRST),
    one("input_ids", IDS[0], "one axis: IndexError: tuple index out of range", **FIRST),
    one("input_ids", torch.tensor(3), "no axis: IndexError: tuple index out of range", **FIRST),
    one("input_ids", torch.zeros(2, 0).long(), "no width and no mask: IndexError: index -1 is out of bounds", **FIRST),
    one("input_ids", IDS.float(), "floats: RuntimeError of embedding"),
    one("input_ids", IDS.short(), "int16: RuntimeError of embedding"),
    one("input_ids", IDS.bool(), "bool: RuntimeError of embedding"),
    one("input_ids", IDS.to_sparse(), "sparse: NotImplementedError", **FIRST),
    one("attention_mask", [[1, 1, 1]] * 2, "list: AttributeError about 'shape'", **FIRST),
    one("attention_mask", torch.ones(3), "one axis: IndexError: tuple index out of range", **FIRST),
    one("attention_mask", torch.ones(2, 4), "wider, all ones: position_ids are blamed", "attention_mask has"),
    one("attention_mask", torch.ones(3, 3), "higher, all ones: position_ids are blamed", "attention_mask has"),
    one("attention_mask", torch.full((2, 3), NAN), "NaN: taken for ones, not as transformers does"),
    one("attention_mask", torch.full((2, 3), -1), "negative: taken for ones, not as transformers does"),
    one("attention_mask", torch.full((2, 3), 0.5), "halves: taken for ones, not as transformers does"),
    one("max_new_tokens", 1.5, "TypeError of zeros()"),
    one("max_new_tokens", "4", "TypeError about '<='", **FIRST),
    one("max_length", "a", "TypeError about '>'", **FIRST),
    one("max_length", NAN, "accepted, and bounds nothing", **FIRST),
    one("top_k", 2**70, "OverflowError: int too big to convert", do_sample=True),
    one("temperature", 1e300, "RuntimeError: converted without overflow", do_sample=True),
    one("temperature", 1e-45, "the logits are blamed", do_sample=True),
    one("eos_token_id", [None], "TypeError about 'NoneType'", **FIRST),
    one("eos_token_id", 2**70, "ValueError: overflow when unpacking", **FIRST),
    one("seed", 1.5, "TypeError: 'float' is not iterable", do_sample=True),
    one("confidence_threshold", "a", "TypeError about '<='"),
    one("num_return_sequences", -1, "RuntimeError about bounds", do_sample=True),
    one("stop_strings", 3, "TypeError: 'int' is not iterable"),
    one("tokenizer", 3, "AttributeError about 'get_vocab'", stop_strings="a"),
    one("streamer", 3, "AttributeError about 'put'"),
    one("generator", 3, "AttributeError about 'device'", do_sample=True),
    one("generation_config", 3, "AttributeError about 'max_length'", **FIRST),
    one("past_key_values", 3, "AttributeError about '_is_user_defined'", **FIRST),
    one("logits_processor", 3, "TypeError: no len()", **FIRST),
    one("stopping_criteria", [3], "TypeError: 'int' is not callable"),
    one("use_markov", "x", "accepted"),
    one("off_switch", "x", "accepted"),
    one("use_graph", "x", "accepted"),
    one("compile_target", 1, "accepted"),
    one("pack_weights", 1, "accepted"),
    one("log_probs", "x", "accepted"),
    one("verification", "typical", "never accepted"),
]


CALLS = [
    pytest.param(door, changes, says, id=f"{door}-{name}") for doors, changes, says, name in FAULTS for door in doors
]


@pytest.mark.parametrize(("door", "changes", "says"), CALLS)
def test_values_of_the_wrong_kind(pair, refused, through, door, changes, says):
    (model, draft), changes = pair, dict(changes)
    ids = changes.pop("input_ids", IDS[:1] if "streamer" in changes else IDS)
    refused(lambda: through(door, model, draft, ids, **changes), says, model=model)


KINDS = {
    "none": None,
    "true": True,
    "zero": 0,
    "three": 3,
    "minus-one": -1,
    "65-bits": 2**64,
    "half": 0.5,
    "nan": NAN,
    "text": "x",
    "no-text": "",
    "bytes": b"x",
    "list": [1, 2],
    "texts": ["x"],
    "nothing": [],
    "dictionary": {},
    "complex": 1j,
    "object": object(),
    "tensor": torch.arange(2),
}
FLAG = {"true"}
ACCEPTED = {
    "draft": {"none"},
    "verification": set(),
    "seed": {"none", "zero", "three", "minus-one", "list", "texts", "nothing", "tensor"},  # lists: when it is called
    "generator": {"none"},
    "confidence_threshold": {"zero", "half"},
    "use_markov": FLAG,
    "off_switch": FLAG | {"none"},
    "use_graph": FLAG | {"none"},
    "compile_target": FLAG,
    "pack_weights": FLAG | {"none"},
    "log_probs": FLAG,
    "stop_strings": {"none"},  # there is no tokenizer
    "tokenizer": {"none"},
    "streamer": {"none"},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_options_of_a_callable(pair, attempt, name):
    """Of any kind: they are looked at when it is made."""
    for kind, value in KINDS.items():
        asked = {"draft": pair[1], name: value}
        outcome = attempt(lambda asked=asked: dspark_fast.decoding(**asked), name)
        assert (outcome.error is None) == (kind in ACCEPTED[name]), kind


@settings(HOSTILE, max_examples=40)
@given(
    st.sampled_from(["temperature", "top_k", "max_length", "num_return_sequences", "eos_token_id"]),
    st.sampled_from([1e300, 2**70, 10**40, "a", [None], {}]),
)
def test_settings_in_a_config(pair, attempt, name, value):
    """Where transformers lets a value through, it is named here."""
    model, draft = pair
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, max_length=9)
    setattr(config, name, value)

    def call():
        try:
            return model.generate(IDS, generation_config=config, custom_generate=dspark_fast.decoding(draft))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if not any("dspark_fast" in frame.filename for frame in frames):
                return "refused by transformers"
            raise

    value = attempt(call, name, model=model).value
    assert value is None or value == "refused by transformers" or (name, config.temperature) == ("temperature", 2**70)


def test_ids_of_32_bits(pair, attempt, through, plain):
    model, draft = pair
    assert attempt(lambda: through("ours", model, draft, IDS.int())).value == plain(model, IDS.int())


@pytest.mark.parametrize("new", [2**63, 2**64])
def test_more_new_tokens_than_can_be_counted(pair, refused, through, new):
    refused(lambda: through("ours", *pair, IDS, max_new_tokens=new), "max_new_tokens", model=pair[0])


@pytest.mark.parametrize("model", [3, torch.nn.Linear(2, 3)], ids=["number", "layer"])
def test_something_that_is_no_model(pair, refused, through, model):
    refused(lambda: through("ours", model, pair[1], IDS), "model is")
