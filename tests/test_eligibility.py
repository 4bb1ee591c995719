"""Who decides how a target is driven: each kind of model goes its way, or is refused by a sentence that says why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import dspark_fast
from dspark_fast import generation
from dspark_fast.engine import attention
from dspark_fast.engine.attention import NAME, attending, check_attended, ragged, takes_our_attention
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.eligibility import choose_target

pytestmark = pytest.mark.floor

REQUEST = {"shortest": 4, "longest": 9, "total": 40}


def changed(make_target, family="Qwen3", **changes):
    """A target whose configuration says something else than it is."""
    model = make_target(family, fresh=True)
    for key, value in changes.items():
        setattr(model.config, key, value)
    return model


# --- which way ---

WAYS = {
    "qwen3": ("Qwen3", {}, "ragged"),
    "mistral": ("Mistral", {"sliding_window": 8}, "ragged"),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, "ragged"),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4}, "ragged"),
    "gpt-neox": ("GPTNeoX", {}, "ragged"),
    "llama4": ("Llama4Text", {"attention_chunk_size": 8, "num_local_experts": 2, "head_dim": 16}, "own"),
    "bloom": ("Bloom", {"n_layer": 6, "n_head": 4}, "own"),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 6}, "own"),
    "gptj": ("GPTJ", {"n_embd": 64, "n_layer": 6, "n_head": 4, "rotary_dim": 8}, "own"),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "own"),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 3}, "own"),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16}, "own"),
}


@pytest.mark.parametrize(("family", "changes", "way"), WAYS.values(), ids=WAYS)
def test_each_goes_its_way(family, changes, way, make_target):
    model = make_target(family, **changes)
    before = model.config._attn_implementation
    assert choose_target(model, 1, **REQUEST) == way
    assert model.config._attn_implementation == before
    if way == "ragged":
        assert choose_target(model, 5, **REQUEST) == way
    else:
        with pytest.raises(ValueError, match=f"{type(model).__name__}.*one row at a time: the batch has 5"):
            choose_target(model, 5, **REQUEST)


REFUSED = {
    "mamba": ("Mamba", {}, r"linear_attention layers that read one token at a time"),
    "falcon-mamba": ("FalconMamba", {}, r"linear_attention layers that read one token at a time"),
    "jamba": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        r"linear_attention layers that read one token at a time",
    ),
    "recurrent-gemma": (
        "RecurrentGemma",
        {"lru_width": 64, "head_dim": 16},
        r".* layers, .*a recurrent_gemma was never seen",
    ),
    "minimax": (
        "MiniMax",
        {"layer_types": ["linear_attention", "full_attention"] * 3, "num_local_experts": 4, "head_dim": 16},
        r"linear_attention layers, which cannot be rolled back.*a minimax was never seen",
    ),
    "rwkv": ("Rwkv", {}, r"recurrent layers, which cannot be rolled back.*a rwkv was never seen"),
    "deepseek-v4": ("DeepseekV4", {}, r"compressed_sparse_attention.* layers, which cannot be rolled back"),
}


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_rolled_back_is_refused(family, changes, message, make_target):
    with pytest.raises(ValueError, match=f"{family}ForCausalLM has {message}"):
        choose_target(make_target(family, **changes), 1, **REQUEST)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SAYS = {
    "encoder": ({"is_encoder_decoder": True}, r"is an encoder-decoder"),
    "not-causal": ({"is_causal": False}, r"does not attend causally"),
    "bidirectional": ({"use_bidirectional_attention": True}, r"does not attend causally"),
    "shared-kv": ({"num_kv_shared_layers": 2}, r"shares keys and values between layers"),
    "mrope": ({"rope_parameters": MROPE}, r"multimodal RoPE \(mrope_section\)"),
    "chunks": ({"layer_types": None, "attention_chunk_size": 8}, r"one row at a time"),
    "unheard-of": ({"layer_types": ["full_attention"] * 5 + ["telepathy"]}, r"has telepathy layers"),
    "recurrent": ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, r"has linear_attention layers"),
}


@pytest.mark.parametrize(("changes", "message"), SAYS.values(), ids=SAYS)
def test_what_a_configuration_says_is_refused(changes, message, make_target):
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM.*{message}"):
        choose_target(changed(make_target, **changes), 2, **REQUEST)


def test_layers_that_are_not_causal_are_refused(make_target):
    model = make_target(fresh=True)
    model.model.layers[3].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM does not attend causally"):
        choose_target(model, 1, **REQUEST)


# --- RoPE that changes with the longest row ---

LIMIT = 32
LONG = {
    "sliding_window": None,
    "original_max_position_embeddings": LIMIT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [3.0 + 0.5 * i for i in range(8)],
    },
}
DYNAMIC = {
    "max_position_embeddings": LIMIT,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
ROPES = {"longrope": ("Phi3", LONG), "dynamic": ("Llama", DYNAMIC)}
SIDES = {
    "below": ((9, 6, 1, 8), 15, {"longrope", "dynamic"}),
    "past": ((45, 38, 33, 40), 15, {"longrope"}),
    "crossing": ((28, 22, 25, 20), 15, set()),
    "both": ((45, 38, 8, 40), 15, set()),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("rope", ROPES)
def test_rope_is_allowed_on_one_side(rope, side, make_target, prompts, scripted, unpadded, monkeypatch):
    """And the rule is right: allowed requests say what the target says, and crossing ones would not."""
    lengths, new, allowed = SIDES[side]
    family, changes = ROPES[rope]
    model = make_target(family, fresh=True, **changes)
    request = {"shortest": min(lengths), "longest": max(lengths), "total": max(lengths) + new + 5 + 1}
    if rope in allowed:
        assert choose_target(model, 4, **request) == "ragged"
    else:
        with pytest.raises(ValueError, match=f"'{rope}', which changes at {LIMIT}.*can reach {request['total']}"):
            choose_target(model, 4, **request)
    if side == "both":
        return
    batch = prompts(lengths)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": new, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    monkeypatch.setattr(generation, "choose_target", lambda *args, **kwargs: "ragged")
    draft = scripted(unpadded(truth, batch.attention_mask), right=0.6, watch=rope in allowed)
    ours = dspark_fast.generate(model, draft, batch.input_ids, **settings)
    assert torch.equal(ours, truth) == (rope in allowed)


def test_prompt_in_chunks_begins_below_the_limit(make_target):
    model = make_target("Phi3", **LONG)
    request = {"shortest": 40, "longest": 45, "total": 66}
    assert choose_target(model, 4, chunk=33, **request) == "ragged"
    with pytest.raises(ValueError, match=r"first pass reaches 32 of a prompt of 45"):
        choose_target(model, 4, chunk=32, **request)


# --- what a layer asks for ---


def attend(layer_types, layer_idx, sliding_window):
    module = SimpleNamespace(config=SimpleNamespace(layer_types=layer_types), layer_idx=layer_idx)
    states = torch.randn(1, 2, 3, 16)
    with attending(RaggedCache(1, 1, 8, states.device)) as running:
        attention.ragged_attention(module, states, states, states, None, sliding_window=sliding_window)
    return running


def test_layer_without_its_window_is_an_error():
    kinds = ["full_attention", "sliding_attention"]
    assert len(attend(kinds, 0, None).attended) == 1
    attend(kinds, 1, 2)
    attend(None, 1, None)
    with pytest.raises(RuntimeError, match=r"layer 1, a SimpleNamespace, is of type 'sliding_attention' but passes no"):
        attend(kinds, 1, None)


@torch.no_grad()
def test_every_layer_must_have_asked(make_target, monkeypatch):
    model = make_target(fresh=True)
    ids = torch.tensor([[5, 17, 40]])

    def one_pass():
        cache = RaggedCache(6, 1, 8, model.device)
        with ragged(model), attending(cache) as running:
            model(ids, position_ids=cache.begin(3, 3), past_key_values=cache, use_cache=True)
        check_attended(model, running)

    one_pass()
    own = model.model.layers[2].self_attn
    monkeypatch.setattr(own, "forward", lambda hidden_states, **kwargs: (hidden_states, None))
    with pytest.raises(RuntimeError, match=r"5 of the 6 layers of Qwen3ForCausalLM took their attention"):
        one_pass()


def test_setting_is_tried_and_put_back(make_target):
    bloom, mpt = make_target("Bloom", n_layer=6, n_head=4), make_target("Mpt", d_model=64, n_heads=4, n_layers=6)
    for model, takes in ((make_target("Qwen3"), True), (bloom, False), (mpt, False)):
        before = model.config._attn_implementation
        assert takes_our_attention(model) is takes
        assert model.config._attn_implementation == before != NAME


def test_limit_itself_is_on_the_near_side(make_target):
    model = make_target("Phi3", **LONG)
    choose_target(model, 4, shortest=4, longest=9, total=LIMIT)
    choose_target(model, 4, shortest=LIMIT + 1, longest=45, total=66)
    for request in ({"shortest": 4, "longest": 9, "total": LIMIT + 1}, {"shortest": LIMIT, "longest": 45, "total": 66}):
        with pytest.raises(ValueError, match=f"changes at {LIMIT} positions"):
            choose_target(model, 4, **request)


def test_long_blocks_do_not_repeat_the_mask_per_group(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the reference packs groups, and repeats the mask for each")

    monkeypatch.setattr(attention.ops, "block_attention", refuse)
    cache = RaggedCache(1, 1, 40, torch.device("cpu"))
    cache.lengths.fill_(20)
    query, keys = torch.randn(1, 4, 17, 16), torch.randn(1, 2, 37, 16)
    module = SimpleNamespace(layer_idx=0)
    with attending(cache):
        assert attention.ragged_attention(module, query, keys, keys)[0].shape == (1, 17, 4, 16)
    assert [mask.shape for mask in cache.masks.values()] == [(1, 1, 17, 37)]


@pytest.mark.parametrize(
    "asked, named",
    [
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"is_causal": False}, "is_causal=False"),
        ({"attention_mask": torch.ones(1, 1, 3, 23)}, "attention_mask"),
        ({"position_bias": torch.ones(4), "alibi": torch.ones(4)}, "alibi, position_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_our_attention_does_not_do_is_refused_by_name(asked, named):
    cache = RaggedCache(1, 1, 40, torch.device("cpu"))
    cache.lengths.fill_(20)
    cache.begin(3, 23)
    query, keys, module = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 23, 16), SimpleNamespace(layer_idx=0)
    harmless = {"position_ids": torch.ones(1, 3), "use_cache": True, "output_attentions": False, "unheard_of": None}
    with attending(cache):
        assert attention.ragged_attention(module, query, keys, keys, **harmless)[0].shape == (1, 3, 4, 16)
        with pytest.raises(NotImplementedError, match=f"SimpleNamespace asks its attention for {named}$"):
            attention.ragged_attention(module, query, keys, keys, **harmless, **asked)
