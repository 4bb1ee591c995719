"""Checkpoint files that are cut, torn, or lie about themselves."""

from __future__ import annotations

import json
import math
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from dspark_fast import DSparkDraft

HOSTILE = settings.get_profile("hostile")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def stored(pair, tmp_path_factory):
    """A folder with a checkpoint that nobody changes."""
    folder = tmp_path_factory.mktemp("stored")
    pair[1].save_pretrained(folder, include_target_weights=True)
    return folder


@pytest.fixture(scope="session")
def written(stored, tmp_path_factory):
    """``written(weights, **files)``: the checkpoint with other files, loaded; keys are names of files."""
    folder = tmp_path_factory.mktemp("hostile")

    def work(files, *, target=None):
        shutil.rmtree(folder)
        shutil.copytree(stored, folder)
        if WEIGHTS not in files and INDEX in files:
            (folder / WEIGHTS).rename(folder / "part.safetensors")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return DSparkDraft.from_pretrained(folder, target=target)

    return work


def parts(folder):
    """The header of the weights as an object, and what follows it."""
    raw = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(header, body, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


@settings(HOSTILE, max_examples=60)
@given(st.floats(0, 1, exclude_max=True), st.binary(max_size=9))
def test_truncated(stored, written, refused, share, tail):
    """And perhaps with something else at its end: a half file over which another was written."""
    raw = (stored / WEIGHTS).read_bytes()
    cut = raw[: int(share * len(raw))] + tail
    if len(cut) != len(raw):  # of the same length it is a file with other numbers
        refused(lambda: written({WEIGHTS: cut}), f"{WEIGHTS} cannot be read")


@settings(HOSTILE, max_examples=60)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_bit_of_the_header_flipped(stored, written, attempt, share, bit):
    """Another name or shape is refused; white space and the metadata may change."""
    raw = bytearray((stored / WEIGHTS).read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    raw[int(share * (8 + size))] ^= 1 << bit
    outcome = attempt(lambda: written({WEIGHTS: bytes(raw)}), WEIGHTS, "does not fit its configuration")
    if outcome.error is None:
        sound = load_file(stored / WEIGHTS)
        assert all(torch.equal(value, sound[name]) for name, value in outcome.value.state_dict().items())


NUMBER = st.integers(-(2**64), 2**64) | st.sampled_from([2**63, 2**63 - 1, 2**32, 2**31, 0, -1])
LIES = st.one_of(
    st.tuples(st.just("data_offsets"), st.lists(NUMBER, max_size=3)),
    st.tuples(st.just("shape"), st.lists(NUMBER, max_size=4)),
    st.tuples(st.just("dtype"), st.text(max_size=4) | st.sampled_from(["I64", "F64", "BF16", "F16", "BOOL", "C64"])),
    st.tuples(st.sampled_from(["data_offsets", "shape", "dtype"]), st.none() | st.integers() | st.floats()),
)


@settings(HOSTILE, max_examples=150)
@given(st.integers(0, 10**6), LIES)
def test_a_header_that_lies(stored, written, refused, place, lie):
    header, body = parts(stored)
    names = sorted(name for name in header if name != "__metadata__")
    header[names[place % len(names)]][lie[0]] = lie[1]
    refused(lambda: written({WEIGHTS: joined(header, body)}), WEIGHTS, "does not fit its configuration")


@settings(HOSTILE, max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_tensors_that_share_their_bytes(stored, written, attempt, one, other):
    header, body = parts(stored)
    names = sorted(name for name in header if name != "__metadata__")
    one, other = names[one % len(names)], names[other % len(names)]
    header[one] = {**header[one], "data_offsets": header[other]["data_offsets"]}
    outcome = attempt(lambda: written({WEIGHTS: joined(header, body)}), f"{WEIGHTS} cannot be read")
    assert (outcome.error is None) == (one == other)


@settings(HOSTILE, max_examples=40)
@given(st.integers(0, 2**64 - 1) | st.integers(0, 4000), st.binary(max_size=60))
def test_a_header_of_another_length(stored, written, refused, size, start):
    header, body = parts(stored)
    if size != len(json.dumps(header)):
        refused(lambda: written({WEIGHTS: joined(header, body, size)}), f"{WEIGHTS} cannot be read")
    refused(lambda: written({WEIGHTS: joined(start, body)}), f"{WEIGHTS} cannot be read")


@settings(HOSTILE, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.none() | st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.text("abc.", min_size=1, max_size=8), max_size=2),
)
def test_tensors_missing_misshaped_and_extra(stored, written, refused, place, shape, extra):
    tensors = load_file(stored / WEIGHTS)
    name = sorted(tensors)[place % len(tensors)]
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    tensors.update({one: torch.zeros(1) for one in extra})
    refused(lambda: written({WEIGHTS: save(tensors)}), name, "confidence_head.proj.bias")


@settings(HOSTILE, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_tensors_of_no_numbers(pair, stored, written, attempt, through, plain, place, value, one):
    """The target's own are compared with the target's; the drafter's cost speed and change no token."""
    model, _ = pair
    tensors = load_file(stored / WEIGHTS)
    name = sorted(tensors)[place % len(tensors)]
    tensors[name].view(-1)[: 1 if one else None] = value
    outcome = attempt(lambda: written({WEIGHTS: save(tensors)}, target=model), f"the stored {name} is not the target's")
    assert (outcome.error is not None) == (name in ("embed_tokens.weight", "lm_head.weight"))
    if outcome.value is not None:
        ids = torch.tensor([[3, 4, 5]])
        said = attempt(lambda: through("ours", model, outcome.value, ids), model=model).value
        assert said == plain(model, ids)


@settings(HOSTILE, max_examples=40)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9), min_size=3, max_size=3))
def test_offsets_of_a_draft_vocabulary(stored, written, attempt, offsets):
    tensors = load_file(stored / WEIGHTS)
    tensors["d2t"] = torch.tensor(offsets)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:3].clone()
    config = {**json.loads((stored / "config.json").read_text()), "draft_vocab_size": 3}
    files = {WEIGHTS: save(tensors), "config.json": json.dumps(config).encode()}
    outcome = attempt(lambda: written(files).vocabulary.tolist(), "d2t")
    tokens = [offset + place for place, offset in enumerate(offsets)]
    sound = tokens == sorted(set(tokens)) and tokens[0] >= 0 and tokens[-1] < 31
    assert (outcome.value == tokens) if sound else outcome.error


PICKLE = b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."
NAMES = st.sampled_from(["pytorch_model.bin", "a.pt", "../x.safetensors", "/etc/passwd", "gone.safetensors", "."])


@settings(HOSTILE, max_examples=30)
@given(NAMES, st.binary(max_size=20).map(lambda more: PICKLE + more))
def test_an_index_that_names_pickles_and_other_folders(monkeypatch, written, refused, name, pickled):
    def never(*_, **__):
        raise AssertionError("unpickled")

    for loader in ("torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(loader, never)
    index = json.dumps({"weight_map": {"fc.weight": name}}).encode()
    files = {INDEX: index, "pytorch_model.bin": pickled, "a.pt": pickled}
    refused(lambda: written(files), name)


@settings(HOSTILE, max_examples=30)
@given(st.binary(max_size=30) | st.sampled_from([b"{}", b"[]", b"3", b'{"weight_map": []}', b'{"weight_map": {}}']))
def test_an_index_that_is_none(written, refused, raw):
    refused(lambda: written({INDEX: raw}), INDEX, "missing")


INDICES = {
    "index-number": '{"weight_map": {"a": 3}}',
    "index-null": '{"weight_map": {"a": null}}',
    "index-nothing": '{"weight_map": {"a": ""}}',
    "index-parent": '{"weight_map": {"a": ".."}}',
    "index-deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", INDICES.values(), ids=INDICES)
def test_an_index_of_other_values(written, refused, text):
    refused(lambda: written({INDEX: text.encode()}), INDEX)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_weights_stored_as_integers(stored, written, refused, dtype):
    header, body = parts(stored)
    header["fc.weight"]["dtype"] = dtype
    refused(lambda: written({WEIGHTS: joined(header, body)}), "fc.weight")


@pytest.mark.parametrize("offsets", [torch.tensor([1.5, 4, 7]), torch.zeros(3, dtype=torch.bool)], ids=["1.5", "bool"])
def test_offsets_that_are_no_integers(stored, written, refused, offsets):
    tensors = load_file(stored / WEIGHTS)
    tensors["d2t"] = offsets
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:3].clone()
    config = {**json.loads((stored / "config.json").read_text()), "draft_vocab_size": 3}
    refused(lambda: written({WEIGHTS: save(tensors), "config.json": json.dumps(config).encode()}), "d2t")
