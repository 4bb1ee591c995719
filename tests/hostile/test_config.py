"""Configurations that no drafter has, as an object and as config.json: named, at once, without taking memory."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_fast import DSparkConfig, DSparkDraft

HOSTILE = settings.get_profile("hostile")
BELOW_ONE = st.integers(-(2**70), 0)

# Key, and values with which nothing can be a drafter.
NEVER = {
    "block_size": BELOW_ONE | st.integers(17, 2**70) | st.just(math.nan),
    "hidden_size": BELOW_ONE,
    "vocab_size": BELOW_ONE,
    "num_hidden_layers": BELOW_ONE,
    "markov_rank": st.integers(-(2**70), -1),
    "num_attention_heads": BELOW_ONE,
    "markov_head_type": st.text(max_size=5) | st.none() | st.integers(),
    "mask_token_id": st.integers(-(2**70), -1) | st.integers(31, 2**70) | st.none(),
    "draft_vocab_size": BELOW_ONE | st.integers(32, 2**70),
    "target_layer_ids": st.sampled_from([[], None, [1, 0], [0, 0], [-2, 1], [0, 2], [0, 2**70]]),
    "layer_types": st.sampled_from([["sliding_attention"], ["full_attention", "mamba"]]),
    "architectures": st.sampled_from([["Qwen3ForCausalLM"], ["os.system"]]),
}
# Of these transformers itself checks the type.
TYPED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "use_cache", "head_dim")
# With a checkpoint of 31 tokens and a width of 32 these name tensors that it does not have.
SIZES = ("vocab_size", "markov_rank", "intermediate_size", "head_dim")


@pytest.fixture(scope="session")
def folder(pair, tmp_path_factory):
    """A checkpoint on disk."""
    where = tmp_path_factory.mktemp("configured")
    pair[1].save_pretrained(where, include_target_weights=True)
    return where


@pytest.fixture(scope="session")
def load(folder):
    """``load(changes)``: the checkpoint with another configuration; ``raw`` is the file as bytes."""
    path = folder / "config.json"
    sound = json.loads(path.read_text())

    def work(changes=None, *, raw=None):
        path.write_bytes(raw if raw is not None else json.dumps({**sound, **(changes or {})}).encode())
        return DSparkDraft.from_pretrained(folder)

    return work


@st.composite
def impossible(draw):
    key = draw(st.sampled_from(sorted(NEVER)))
    return key, draw(NEVER[key])


@settings(HOSTILE, max_examples=120)
@given(impossible(), st.booleans())
def test_values_that_no_drafter_has(pair, load, refused, case, on_disk):
    key, value = case
    if on_disk:
        refused(lambda: load({key: value}), key)
    else:
        refused(lambda: DSparkConfig.from_target(pair[0].config, **{"target_layer_ids": [0, 1], key: value}), key)


@settings(HOSTILE, max_examples=60)
@given(st.sampled_from(TYPED), st.text(max_size=3) | st.floats() | st.lists(st.integers(), max_size=2), st.booleans())
def test_values_of_another_type(pair, load, refused, key, value, on_disk):
    if on_disk:
        refused(lambda: load({key: value}), key)
    else:
        refused(lambda: DSparkConfig.from_target(pair[0].config, **{key: value}), key)


@settings(HOSTILE, max_examples=60)
@given(st.sampled_from(SIZES), st.integers(2**20, 2**40))
def test_huge_sizes(load, refused, key, size):
    """The drafter is laid out without memory and compared with the file before anything is read."""
    refused(lambda: load({key: size}), "does not fit its configuration", key)


@settings(HOSTILE, max_examples=40)
@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_files_that_are_no_json(load, refused, raw):
    try:
        json.loads(raw)
    except ValueError:
        refused(lambda: load(raw=raw), "config.json")


@settings(HOSTILE, max_examples=30)
@given(
    st.dictionaries(
        st.sampled_from(["auto_map", "custom_pipelines", "library_name", "pickle", "weights"]),
        st.sampled_from(["payload.py", {"AutoModel": "payload.Model"}, "org/name--payload.Model", ["a.bin"]]),
    )
)
def test_code_that_a_config_names_is_not_run(folder, load, attempt, extra):
    (folder / "payload.py").write_text("raise SystemExit('run')")
    draft = attempt(lambda: load(extra)).value
    assert not hasattr(draft.config, "auto_map")


def test_kernels_of_the_hub_are_not_fetched(load, attempt):
    """transformers fetches and runs what this key names; the drafter has no use for it."""
    assert attempt(lambda: load({"_attn_implementation": "org/name"})).value.config._attn_implementation != "org/name"


WRONG = {
    "a-billion-layers": {"num_hidden_layers": 10**9},
    "a-million-million-layers": {"num_hidden_layers": 10**12, "layer_types": None},
    "block-size-text": {"block_size": "a"},
    "block-size-fraction": {"block_size": 1.5},
    "rank-text": {"markov_rank": "a"},
    "rank-fraction": {"markov_rank": 1.5},
    "mask-text": {"mask_token_id": "a"},
    "mask-fraction": {"mask_token_id": 1.5},
    "taps-number": {"target_layer_ids": 3},
    "taps-text": {"target_layer_ids": ["a"]},
    "taps-fractions": {"target_layer_ids": [0.0, 1.0]},
    "target-layers-text": {"num_target_layers": "a"},
    "target-layers-nan": {"num_target_layers": math.nan},
    "architectures-number": {"architectures": 3},
    "head-width-negative": {"head_dim": -1},
    "mlp-negative": {"intermediate_size": -1},
    "kv-heads-negative": {"num_key_value_heads": -1},
    "hidden-size-overflow": {"hidden_size": 10**12},
    "vocabulary-overflow": {"vocab_size": 2**63},
    "activation": {"hidden_act": "a"},
    "initialiser": {"initializer_range": math.nan},
    "norm-nan": {"rms_norm_eps": math.nan},
    "rope-type": {"rope_parameters": {"rope_type": "a", "rope_theta": 1.0}},
    "dtype": {"dtype": "a"},
    "dtype-list": {"dtype": []},
    "quantised": {"quantization_config": {"quant_method": "a"}},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_values_that_cannot_be(load, refused, changes):
    key = next(iter(changes))
    refused(lambda: load(changes), key, "does not fit its configuration")


@pytest.mark.parametrize(
    "raw", [b"[]", b"3", b"null", b'"a"', b"[" * 100_000], ids=["list", "3", "null", "text", "deep"]
)
def test_json_that_is_no_object(load, refused, raw):
    refused(lambda: load(raw=raw), "config.json")


@pytest.mark.parametrize(
    "argument",
    [{"dtype": torch.int8}, {"dtype": torch.complex64}, {"device": "a"}, {"target": 3}],
    ids=["dtype-int8", "dtype-complex", "device", "target"],
)
def test_arguments_beside_the_folder(folder, load, refused, argument):
    load()
    refused(lambda: DSparkDraft.from_pretrained(folder, **argument), next(iter(argument)))
