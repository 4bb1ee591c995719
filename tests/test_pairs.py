"""Loading known pairs, and the choice of dtype and device."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dspark_fast
from dspark_fast import pairs
from dspark_fast.pairs import PAIRS, Pair, best_dtype, draft_name, load
from dspark_fast.targets import TargetError

SHIPPED = [name for name, pair in PAIRS.items() if pair.shipped]


@pytest.fixture(scope="module")
def folders(make_target, make_draft, tmp_path_factory):
    """A tiny target with its tokenizer and its drafter, saved."""
    folder = tmp_path_factory.mktemp("pair")
    model = make_target()
    model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder / "target")
    make_draft(model).save_pretrained(folder / "draft")
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.floor
def test_a_pair_from_folders_decodes(folders):
    model, draft, tokenizer = dspark_fast.load(
        str(folders / "target"), draft=folders / "draft", dtype=torch.float32, device="cpu"
    )
    assert model.dtype == draft.dtype == torch.float32
    assert draft.embed_tokens is model.get_input_embeddings()
    assert not model.training and not draft.training
    ids = tokenizer("w5 w6 w7", return_tensors="pt").input_ids
    assert ids.tolist() == [[5, 6, 7]]
    output = dspark_fast.generate(model, draft, ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, model.generate(ids, max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16])
def test_dtype(folders, dtype):
    expected = {None: best_dtype("cpu"), "auto": torch.float32}.get(dtype, dtype)
    model, draft, _ = load(str(folders / "target"), draft=folders / "draft", dtype=dtype, device="cpu", progress=False)
    assert model.dtype == draft.dtype == expected


def test_best_dtype(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for flags, expected in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"architecture": "aarch64", "bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_f": True}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags, raising=False)
        assert best_dtype("cpu") == expected
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert best_dtype(torch.device("cpu")) == torch.float32
    assert best_dtype("cuda:0") == "auto"


def test_an_unknown_target_names_the_known_ones(folders):
    for name in ("someone/else", str(folders / "target")):
        with pytest.raises(ValueError, match="no drafter is known") as caught:
            load(name)
        assert all(known in str(caught.value) for known in PAIRS)


def test_what_is_not_there(folders):
    with pytest.raises(ValueError, match="the drafter is '/no/such', and there is no such folder"):
        load(str(folders / "target"), draft="/no/such")
    with pytest.raises(ValueError, match=r"the target is './no'"):
        load("./no", draft=folders / "draft")
    with pytest.raises(ValueError, match="device is 'tpuu'"):
        load(str(folders / "target"), draft=folders / "draft", device="tpuu")
    with pytest.raises(ValueError, match="device is 'cuda:99', but torch finds"):
        load(str(folders / "target"), draft=folders / "draft", device="cuda:99")
    with pytest.raises(ValueError, match="architectures is"):
        load(str(folders / "target"), draft=folders / "target", device="cpu", progress=False)


def test_a_shipped_drafter(folders, monkeypatch):
    monkeypatch.setitem(PAIRS, str(folders / "target"), Pair("draft", shipped=True))
    monkeypatch.setattr(pairs.resources, "files", lambda package: {"dspark_fast.drafts": folders}[package])
    _, draft, _ = load(str(folders / "target"), device="cpu", progress=False)
    assert draft.config.block_size == 5
    monkeypatch.setitem(PAIRS, str(folders / "target"), Pair("lost", shipped=True))
    with pytest.raises(TargetError, match="lacks the drafter that ships with it"):
        load(str(folders / "target"))


def test_a_drafter_that_the_hub_cannot_give(folders, no_hub):
    with pytest.raises(TargetError, match="the drafter cannot be had: someone/draft"):
        load(str(folders / "target"), draft="someone/draft", progress=False)


def test_a_drafter_in_the_hubs_cache(folders, no_hub, monkeypatch):
    """It is found there although it has no tokenizer, which a target must have; half a drafter is not."""
    import huggingface_hub

    def cached(name, file, **kwargs):
        path = folders / "draft" / file
        return str(path) if name == "someone/draft" and path.exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    _, draft, _ = load(str(folders / "target"), draft="someone/draft", device="cpu", progress=False)
    assert draft.config.block_size == 5
    weights = folders / "draft" / "model.safetensors"
    weights.rename(weights.with_suffix(".away"))
    try:
        with pytest.raises(TargetError, match="the drafter cannot be had"):
            load(str(folders / "target"), draft="someone/draft", device="cpu", progress=False)
    finally:
        weights.with_suffix(".away").rename(weights)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_is_whole(name):
    folder = pairs.Path(str(pairs.resources.files("dspark_fast.drafts") / PAIRS[name].draft))
    if not folder.is_dir():
        pytest.skip("this checkout has no trained drafter yet")
    dspark_fast.DSparkDraft.config_class.from_pretrained(folder).check()
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}


def test_a_drafter_is_named_with_its_weights(tmp_path):
    """Results say which one they are of, also if another was trained into the same folder since."""
    known = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shipped = draft_name(known)
    assert re.fullmatch(r"dspark_fast/drafts/SmolLM2-135M-Instruct \([0-9a-f]{8}\)", shipped)
    assert (
        draft_name("Qwen/Qwen3-4B") == PAIRS["Qwen/Qwen3-4B"].draft
        and draft_name(known, "some/hub-name") == "some/hub-name"
    )
    names = set()
    for value in (1.0, 2.0, 1.0):
        save_file({"weight": torch.full((3,), value)}, tmp_path / "model.safetensors")
        names.add(draft_name(known, tmp_path))
    assert len(names) == 2 and all(name.startswith(f"{tmp_path} (") for name in names)
