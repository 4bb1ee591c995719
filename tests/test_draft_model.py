"""The drafter's configuration and checkpoints: the authors' layout, and errors that name what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dspark_fast import DSparkConfig, DSparkDraft
from dspark_fast.config import default_taps
from dspark_fast.reference import draft_block

GOLDEN = Path(__file__).parent / "data" / "golden"
CHECKPOINTS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FROM_TARGET = {"embed_tokens.weight", "lm_head.weight"}


@pytest.fixture
def folder(tmp_path):
    """A copy of one of the authors' checkpoints, to spoil."""
    return Path(shutil.copytree(GOLDEN / "qwen3_vanilla", tmp_path / "drafter"))


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target()
    return model, make_draft(model)


def edit(folder, **changes):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is DELETED:
            del data[key]
        else:
            data[key] = value
    path.write_text(json.dumps(data))


def edit_weights(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


DELETED = object()


# --- configuration ---


@pytest.mark.floor
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_config_keeps_the_authors_keys(name, tmp_path):
    theirs = json.loads((GOLDEN / name / "config.json").read_text())
    DSparkDraft.from_pretrained(GOLDEN / name).save_pretrained(tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    ignored = {"transformers_version"}
    assert {key: ours.get(key, "absent") for key in theirs if key not in ignored} == {
        key: value for key, value in theirs.items() if key not in ignored
    }
    # Keys that newer or older transformers add are theirs; ours are these.
    own = {"markov_head_type", "confidence_head_with_markov", "target_model_type", "draft_vocab_size", "auto_map"}
    assert not (set(ours) - set(theirs)) & own


@pytest.mark.floor
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma", "Qwen3"])
def test_config_from_target(family, make_target):
    target = make_target(family, num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = DSparkConfig.from_target(target.config)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 97)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.num_hidden_layers == 5 and config.layer_types == ["full_attention"] * 5
    assert config.num_target_layers == 8 and config.target_layer_ids == [1, 2, 3, 4, 5]
    assert config.mask_token_id == 96
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.target_model_type == family.lower()
    assert config.architectures == ["Qwen3DSparkModel"] and config.model_type == "qwen3"
    draft = DSparkDraft(config)
    assert draft.fc.weight.shape == (64, 5 * 64)
    assert draft.layers[0].self_attn.k_proj.weight.shape == (2 * 16, 64)


def test_config_from_target_with_wide_heads(make_target):
    target = make_target("Gemma", head_dim=32, num_key_value_heads=1)
    config = DSparkConfig.from_target(target.config)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 32)


@pytest.mark.parametrize(
    ("depth", "taps"),
    [(36, [1, 9, 17, 25, 33]), (6, [1, 2, 3]), (4, [1]), (3, [0]), (2, [0]), (30, [1, 8, 14, 20, 27])],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_default_taps(depth, taps):
    assert default_taps(depth) == taps
    assert taps[-1] < depth - 1


BAD_CONFIGS = {
    "block-of-0": ({"block_size": 0}, r"block_size is 0: accepted are 1 to 16"),
    "block-of-17": ({"block_size": 17}, r"block_size is 17: accepted are 1 to 16"),
    "mask-id": ({"mask_token_id": 97}, r"mask_token_id is 97: accepted is an id below 97"),
    "no-taps": ({"target_layer_ids": []}, r"target_layer_ids is \[\]"),
    "taps-not-ascending": ({"target_layer_ids": [3, 1]}, r"target_layer_ids is \[3, 1\].*ascending"),
    "taps-twice": ({"target_layer_ids": [1, 1]}, r"target_layer_ids is \[1, 1\]"),
    "tap-below": ({"target_layer_ids": [-2, 1]}, r"target_layer_ids is \[-2, 1\]"),
    "tap-last": ({"target_layer_ids": [1, 5]}, r"target_layer_ids is \[1, 5\] for 6 target layers"),
    "rank": ({"markov_rank": -1}, r"markov_rank is -1"),
    "head": ({"markov_head_type": "lstm"}, r"markov_head_type is 'lstm'.*vanilla, gated, rnn"),
    "draft-vocabulary": ({"draft_vocab_size": 98}, r"draft_vocab_size is 98: accepted are 1 to vocab_size, .* 97"),
    "no-draft-vocabulary": ({"draft_vocab_size": 0}, r"draft_vocab_size is 0: accepted are 1 to vocab_size"),
    "heads": ({"num_key_value_heads": 3}, r"num_attention_heads is 4 with num_key_value_heads 3"),
    "layer-type": ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, r"layer_types is"),
    "architecture": ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures is \['Qwen3ForCausalLM'\]"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config_is_refused(changes, message, make_target):
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_target(make_target().config, **changes)


# --- joining a target ---


@pytest.mark.floor
def test_the_targets_weights_are_held_and_not_owned(pair):
    model, draft = pair
    assert draft.embed_tokens is model.get_input_embeddings()
    assert draft.lm_head is model.get_output_embeddings()
    ours = {id(weight) for weight in draft.parameters()}
    assert not ours & {id(weight) for weight in model.parameters()}
    names = {name for name, _ in draft.named_parameters()} | set(draft.state_dict())
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
    before = {name: (weight.dtype, weight.data_ptr()) for name, weight in model.named_parameters()}
    draft.to(torch.float64)
    assert {weight.dtype for weight in draft.parameters()} == {torch.float64}
    draft.requires_grad_(False)
    assert {name: (weight.dtype, weight.data_ptr()) for name, weight in model.named_parameters()} == before
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_drafter_may_change_its_target(pair, make_target):
    _, draft = pair
    other = make_target(fresh=True)
    assert draft.tie_to(other) is draft
    assert draft.embed_tokens is other.get_input_embeddings()


# --- checkpoints ---


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.floor
@pytest.mark.parametrize("included", [False, True], ids=["without-target-weights", "with-target-weights"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_save_and_load(head, included, make_target, make_draft, tmp_path):
    model = make_target("Llama")
    draft = make_draft(model, markov_head_type=head)
    draft.save_pretrained(tmp_path, include_target_weights=included)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]
    stored = load_file(tmp_path / WEIGHTS)
    assert (set(stored) >= FROM_TARGET) == included
    loaded = DSparkDraft.from_pretrained(tmp_path, target=model)
    assert same_weights(loaded, draft)
    assert loaded.embed_tokens is model.get_input_embeddings() and loaded.lm_head is model.get_output_embeddings()
    assert not loaded.training and not any(weight.requires_grad for weight in loaded.parameters())
    features, anchor = torch.randn(2, 4, loaded.fc.in_features), torch.tensor([3, 4])
    for ours, theirs in zip(draft_block(loaded, features, anchor), draft_block(draft, features, anchor)):
        torch.testing.assert_close(ours, theirs)  # not to the bit: the memory of a file is aligned otherwise
    if included:
        alone = DSparkDraft.from_pretrained(tmp_path)
        assert torch.equal(alone.embed_tokens.weight, model.get_input_embeddings().weight)
        assert torch.equal(draft_block(alone, features, anchor).tokens, draft_block(draft, features, anchor).tokens)
    else:
        with pytest.raises(ValueError, match=r"missing embed_tokens.weight, lm_head.weight.*target=model"):
            DSparkDraft.from_pretrained(tmp_path)


def test_a_target_that_ties_its_own_embedding_and_head(make_target, make_draft, tmp_path):
    model = make_target("Qwen2", tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    draft = make_draft(model)
    draft.save_pretrained(tmp_path, include_target_weights=True)
    assert same_weights(DSparkDraft.from_pretrained(tmp_path, target=model), draft)


def test_dtype_is_the_targets_or_the_checkpoints_or_asked_for(make_target, make_draft, tmp_path):
    model = make_target()
    make_draft(model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert DSparkDraft.from_pretrained(tmp_path, target=model).dtype == torch.float32
    assert DSparkDraft.from_pretrained(tmp_path, target=model, dtype=torch.float64).dtype == torch.float64
    make_draft(model).to(torch.bfloat16).save_pretrained(tmp_path / "whole", include_target_weights=True)
    alone = DSparkDraft.from_pretrained(tmp_path / "whole")
    assert {weight.dtype for weight in alone.parameters()} == {torch.bfloat16}
    # RoPE's frequencies are not stored: they are fp32 whatever the weights are.
    assert alone.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_save_of_a_loaded_checkpoint_is_the_same_checkpoint(name, tmp_path):
    draft = DSparkDraft.from_pretrained(GOLDEN / name)
    draft.save_pretrained(tmp_path, include_target_weights=True)
    theirs, ours = load_file(GOLDEN / name / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_dflash_layout_has_neither_head():
    draft = DSparkDraft.from_pretrained(GOLDEN / "qwen3_dflash")
    assert draft.markov_weights() == (None, None) and draft.markov_options() == {"head": "vanilla"}
    assert not hasattr(draft, "markov_head") and not hasattr(draft, "confidence_head")


def shard(folder):
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / WEIGHTS).unlink()
    return files


def test_sharded_checkpoint(folder):
    whole = DSparkDraft.from_pretrained(folder)
    shard(folder)
    assert same_weights(DSparkDraft.from_pretrained(folder), whole)


BAD_INDICES = {
    "not-json": ("{", r"index.json is not a safetensors index"),
    "no-map": ("{}", r"index.json is not a safetensors index"),
    "outside": ('{"weight_map": {"fc.weight": "../elsewhere.safetensors"}}', r"'../elsewhere.safetensors'.*own folder"),
    "no-such-file": ('{"weight_map": {"fc.weight": "gone.safetensors"}}', r"gone.safetensors cannot be read"),
}


@pytest.mark.parametrize(("text", "message"), BAD_INDICES.values(), ids=BAD_INDICES)
def test_bad_index_is_refused(text, message, folder):
    shard(folder)
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(folder)


@pytest.mark.parametrize("change", ["wrong-file", "left-out"])
def test_index_and_files_that_disagree(change, folder):
    """What the files hold counts: a tensor is never left without its values."""
    whole = DSparkDraft.from_pretrained(folder)
    files = shard(folder)
    first, second = sorted(set(files.values()))
    if change == "left-out":
        del files["fc.weight"]
    else:
        files["fc.weight"] = second if files["fc.weight"] == first else first
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    assert same_weights(DSparkDraft.from_pretrained(folder), whole)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_other_weights_than_the_targets_are_refused(name, pair, tmp_path):
    model, draft = pair
    draft.save_pretrained(tmp_path, include_target_weights=True)
    edit_weights(tmp_path, lambda tensors: tensors[name][3, 4].add_(0.5))
    with pytest.raises(ValueError, match=rf"stored {name} is not the target's \(largest difference 0\.5\)"):
        DSparkDraft.from_pretrained(tmp_path, target=model)


BAD_TENSORS = {
    "missing": (lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"), r"missing layers\.1\.mlp\.up_proj\.weight"),
    "unexpected": (lambda tensors: tensors.update(extra=torch.ones(2)), r"unexpected extra"),
    "misshaped": (
        lambda tensors: tensors.update({"fc.weight": torch.ones(64, 64)}),
        r"fc\.weight has shape \[64, 64\], the configuration asks for \[64, 192\]",
    ),
    "misshaped-embedding": (
        lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(5, 64)}),
        r"embed_tokens\.weight has shape \[5, 64\], the configuration asks for \[311, 64\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensor_that_does_not_fit_is_named(change, message, folder):
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(folder)


BAD_FILES = {
    "gemma-4": ({"architectures": ["Gemma4DSparkModel"]}, r"Gemma4DSparkModel.*Gemma-4 drafters are not supported yet"),
    "other-model": ({"architectures": ["Qwen3ForCausalLM"]}, r"Qwen3ForCausalLM.*accepted is \['Qwen3DSparkModel'\]"),
    "no-architecture": ({"architectures": DELETED}, r"architectures is None"),
    "architecture-as-text": ({"architectures": "Qwen3DSparkModel"}, r"architectures is"),
    "no-block-size": ({"block_size": DELETED}, r"lacks block_size"),
    "no-taps": ({"target_layer_ids": DELETED}, r"lacks target_layer_ids"),
    "mask-id": ({"mask_token_id": 400}, r"mask_token_id is 400"),
    "last-tap": ({"num_target_layers": 6}, r"target_layer_ids is \[1, 3, 5\] for 6 target layers"),
    "rank-without-weights": ({"markov_rank": 8}, r"markov_head\.markov_w1\.weight has shape \[311, 16\]"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_config_file_that_does_not_fit_is_refused(changes, message, folder):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(folder)


def test_remote_code_of_the_authors_is_not_asked_for(folder):
    edit(folder, auto_map={"AutoModel": "modeling_dspark.Qwen3DSparkModel"})
    assert not hasattr(DSparkDraft.from_pretrained(folder).config, "auto_map")


@pytest.mark.parametrize("left", [0, 4, 100, 5000])
def test_truncated_weights_are_refused(left, folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=rf"{WEIGHTS} cannot be read as safetensors"):
        DSparkDraft.from_pretrained(folder)


def test_what_is_no_checkpoint_is_refused(folder, tmp_path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        DSparkDraft.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"has no config\.json"):
        DSparkDraft.from_pretrained(folder)
    with pytest.raises(OSError, match="neither a folder nor a name on the hub"):
        DSparkDraft.from_pretrained(tmp_path / "no" / "such" / "folder")


def test_weights_in_pickle_are_not_read(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors only"):
        DSparkDraft.from_pretrained(folder)


def test_checkpoint_of_another_target_is_refused(folder, make_target):
    with pytest.raises(ValueError, match=r"vocab_size is 311.*vocab_size 97"):
        DSparkDraft.from_pretrained(folder, target=make_target(num_hidden_layers=8))


def test_a_failed_save_leaves_the_old_checkpoint(pair, tmp_path, monkeypatch):
    _, draft = pair
    draft.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        draft.fc.weight.add_(1)

    def fail(tensors, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("dspark_fast.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        draft.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- what a caller may do to it ---


def test_casting_leaves_the_positions_alone(make_target, make_draft):
    draft = make_draft(make_target())
    before = draft.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert draft.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(draft.rotary_emb.inv_freq, before)


def test_without_a_markov_head_the_confidence_head_has_no_markov_input(make_target):
    target = make_target()
    config = DSparkConfig.from_target(target.config, markov_rank=0)
    assert not config.confidence_head_with_markov
    with pytest.raises(ValueError, match="confidence_head_with_markov is True with markov_rank 0"):
        DSparkConfig.from_target(target.config, markov_rank=0, confidence_head_with_markov=True)


@pytest.mark.parametrize(("kind", "width"), [("GPT2", 256), ("OPT", 96)])
def test_geometry_of_a_target_with_other_names(kind, width):
    sizes = {"GPT2": {"n_embd": 64, "n_layer": 6, "n_head": 4}, "OPT": {"hidden_size": 64, "ffn_dim": 96}}
    assert DSparkConfig.from_target(getattr(transformers, f"{kind}Config")(**sizes[kind])).intermediate_size == width
