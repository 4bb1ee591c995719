"""A target behind its own cache: the same tokens as without drafts, whatever is drafted, and a state rolled back."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import cache_utils

import dspark_fast
from dspark_fast.engine.eligibility import choose_target
from dspark_fast.engine.own_cache import OwnCacheTarget
from dspark_fast.engine.taps import tapped

pytestmark = pytest.mark.floor

NEW = 40
BLOCK = 5
TAPS = [0, 2]
PROMPT = torch.tensor([[5, 17, 40, 3, 88, 61, 7, 29, 90, 12, 33]])
WINDOW = 8  # shorter than the prompt

LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 3,
}
MAMBA = {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
GPT = {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 256}
TARGETS = {
    # recurrent: a state is kept and put back
    "qwen3-next": ("Qwen3Next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3.5": ("Qwen3_5Text", LINEAR),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "kimi-linear": (  # one linear layer: without fast kernels it takes 0.1 s a pass
        "KimiLinear",
        {**LATENT, **EXPERTS, "layer_types": ["linear_attention", *["full_attention"] * 3], "num_hidden_layers": 4},
    ),
    "olmo-hybrid": ("OlmoHybrid", {**LINEAR, "linear_num_key_heads": 4}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "falcon-h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_heads": 8,
            "layer_types": ["mamba", "attention"] * 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    # convolutions and windows: cropped, once they keep what they would have let go of
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 3, "block_multiple_of": 32}),
    "lfm2-moe": ("Lfm2Moe", {"layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 2, **EXPERTS}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "full_attention"] * 3}),
    "llama4": (
        "Llama4Text",
        {
            "layer_types": ["chunked_attention", "full_attention"] * 3,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    # an attention of their own
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 8, "initializer_range": 0.4}),
    "codegen": ("CodeGen", {**GPT, "rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeo",
        {"num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]], "window_size": WINDOW},
    ),
    "falcon": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": ("Falcon", {"alibi": True, "parallel_attn": False}),
    "bloom": ("Bloom", {"n_layer": 6, "n_head": 4}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 6, "max_seq_len": 256}),
    # counts positions from its cache
    "biogpt": ("BioGpt", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
DRAFTS = {"right": 1.0, "wrong": 0.0, "mixed": 0.6}


@pytest.fixture
def target_of(make_target):
    def make(name):
        family, changes = TARGETS[name]
        if not hasattr(transformers, f"{family}Config"):
            pytest.skip(f"this transformers has no {family}")
        return make_target(family, **changes)

    return make


def plain(model, **settings):
    """The continuation that the model gives alone."""
    truth = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, **settings)[0].tolist()
    assert len(set(truth[PROMPT.shape[1] :])) >= 7  # equality of constants would say nothing
    return truth


@torch.no_grad()
def speculated(model, truth, right, *, taps=(), cache=None, after_round=lambda target: None):
    """The continuation under scripted drafts, the features of all that was read, and how many rounds it took."""
    generator = torch.Generator().manual_seed(5)
    told = []

    def on_features(tokens, features, offsets, counts):
        assert tokens.tolist() == PROMPT.tolist()
        assert (offsets.tolist(), counts.tolist()) == ([0], [PROMPT.shape[1]])
        told.append(features)

    with tapped(model, taps) as caught:
        target = OwnCacheTarget(model, caught, cache)
        assert target.memory == 0
        logits = target.prefill(PROMPT, torch.tensor([PROMPT.shape[1]]), on_features)
        assert logits.shape == (1, 1, model.config.vocab_size)
        said = [*PROMPT[0].tolist(), int(logits.argmax())]
        rounds = 0
        while len(said) < len(truth):
            drafts = []
            for token in (truth[len(said) :] + [0] * BLOCK)[:BLOCK]:
                drafts.append(token if torch.rand((), generator=generator) < right else (token + 1) % 97)
            logits, features = target.verify(torch.tensor([[said[-1], *drafts]]), len(said) - 1)
            heard = logits[0].argmax(-1).tolist()
            agreed = next((slot for slot in range(BLOCK) if heard[slot] != drafts[slot]), BLOCK)
            agreed = min(agreed, len(truth) - len(said) - 1)
            said += [*drafts[:agreed], heard[agreed]]
            target.advance(torch.tensor([agreed + 1]))
            told.append(None if features is None else features[:, : agreed + 1])
            rounds += 1
            after_round(target)
    return said, told, rounds


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_is_what_the_target_says(name, drafts, target_of):
    model = target_of(name)
    assert choose_target(model, 1, shortest=11, longest=11, total=60) == ("ragged" if name == "mistral" else "own")
    truth = plain(model)
    said, told, rounds = speculated(model, truth, DRAFTS[drafts], taps=TAPS)
    assert said == truth
    assert rounds == {"right": -(-(NEW - 1) // (BLOCK + 1)), "wrong": NEW - 1}.get(drafts, rounds)
    with torch.no_grad(), tapped(model, TAPS) as caught:
        model(torch.tensor([truth[:-1]]), use_cache=False)
        torch.testing.assert_close(torch.cat(told, 1), caught.take(), rtol=1e-3, atol=1e-3)
    assert plain(model) == truth


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1", "lfm2", "llama4", "mistral", "bloom"])
def test_without_rolling_back_it_would_be_wrong(name, target_of, monkeypatch):
    """The control: these targets do have a state that rejected drafts spoil."""
    model = target_of(name)
    truth = plain(model)
    advance = OwnCacheTarget.advance
    monkeypatch.setattr(OwnCacheTarget, "advance", lambda self, taken: advance(self, torch.tensor([BLOCK + 1])))
    assert speculated(model, truth, DRAFTS["mixed"])[0] != truth


@pytest.mark.parametrize("name", ["lfm2", "llama4", "mistral"])
def test_what_was_kept_for_rolling_back_is_let_go(name, target_of):
    """A window's keys, and the inputs of convolutions, do not pile up."""
    model = target_of(name)
    sizes = []

    def measure(target):
        for layer in target._cache.layers:
            if getattr(layer, "is_sliding", False):
                assert layer.keys.shape[-2] == WINDOW - 1
            for states in getattr(layer, "conv_states", {}).values():
                assert states.shape[-1] == model.config.conv_L_cache
        sizes.append(target.memory)

    speculated(model, plain(model), DRAFTS["mixed"], after_round=measure)
    assert sizes[0] > 0 and (name != "mistral" or len(set(sizes)) == 1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "lfm2", "mistral"])
def test_prompt_may_come_in_parts(name, target_of):
    model = target_of(name)
    heard = []
    with tapped(model, []) as caught:
        target = OwnCacheTarget(model, caught)
        for part in (PROMPT[:, :9], PROMPT[:, 9:]):
            count = torch.tensor([part.shape[1]])
            logits = target.prefill(part, count, lambda tokens, features, offsets, counts: heard.append(int(offsets)))
    assert heard == [0, 9]
    torch.testing.assert_close(logits, model(PROMPT, use_cache=False).logits[:, -1:], rtol=1e-3, atol=1e-3)
    if name == "mistral":
        assert {layer.keys.shape[-2] for layer in target._cache.layers} == {WINDOW - 1}


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "lfm2", "bloom"])
def test_any_part_of_a_block_can_be_kept(name, target_of):
    """Also none of it; what follows is what follows the tokens that were kept."""
    model = target_of(name)
    generator = torch.Generator().manual_seed(6)
    with tapped(model, TAPS) as caught:
        target = OwnCacheTarget(model, caught)
        target.prefill(PROMPT, torch.tensor([PROMPT.shape[1]]), lambda *told: None)
        read = PROMPT
        for kept in (0, 6, 3, 0, 0, 5, 5, 5, 5, 1, 6, 0):
            ids = torch.randint(1, 97, (1, 6), generator=generator)
            logits, features = target.verify(ids)
            target.advance(torch.tensor([kept]))
            expected = model(torch.cat([read, ids], 1), use_cache=False).logits[:, -6:]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(features, caught.take()[:, -6:], rtol=1e-3, atol=1e-3)
            read = torch.cat([read, ids[:, :kept]], 1)


@torch.no_grad()
def test_rejected_drafts_cost_a_recurrent_target_few_passes_of_their_own(target_of):
    """What was taken is read again with the next block, not before it."""
    model = target_of("qwen3-next")
    passes = []
    handle = model.register_forward_hook(lambda *told: passes.append(1))
    try:
        truth = plain(model)
        passes.clear()
        rounds = speculated(model, truth, DRAFTS["wrong"])[2]
    finally:
        handle.remove()
    assert rounds == NEW - 1
    assert len(passes) - 1 - rounds == rounds // 17  # more than 16 tokens are not left waiting


FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")


@pytest.mark.skipif(not FP8, reason="this transformers has no quantised cache without a package of its own")
@pytest.mark.parametrize("drafts", DRAFTS)
def test_quantised_cache_that_grows_token_by_token(drafts, make_target):
    model = make_target("Qwen3", fresh=True)
    truth = plain(model, cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert truth != plain(model)
    cache = cache_utils.QuantizedCache("fp8", model.config)
    assert speculated(model, truth, DRAFTS[drafts], cache=cache)[0] == truth


def test_quantised_cache_that_is_quantised_anew_is_refused(make_target):
    class Anew(cache_utils.DynamicLayer):
        residual_length = 4

    Anew.__module__ = cache_utils.__name__
    model = make_target("Qwen3")
    cache = cache_utils.Cache(layers=[Anew() for _ in range(6)])
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has a Cache that quantises anew"):
        speculated(model, [0], 1.0, cache=cache)


FOREIGN = {
    "recurrent-gemma": ("RecurrentGemma", {"lru_width": 64, "head_dim": 16}, r"keeps its state in NoneType"),
    "deepseek-v4": ("DeepseekV4", {}, r"keeps its state in DeepseekV4CSACache, DeepseekV4HCACache"),
    "rwkv": ("Rwkv", {}, r"takes no cache of transformers"),
}


@pytest.mark.parametrize(("family", "changes", "message"), FOREIGN.values(), ids=FOREIGN)
def test_state_of_an_unknown_kind_is_refused(family, changes, message, make_target):
    model = make_target(family, **changes)
    with pytest.raises(ValueError, match=f"{family}ForCausalLM {message}"):
        speculated(model, [0], 1.0)


LAST = {
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 32}),
    "biogpt": ("BioGpt", {"max_position_embeddings": 32}),
    "ctrl": ("CTRL", {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 32, "dff": 96}),
}


@pytest.mark.parametrize(("name", "changes"), LAST.values(), ids=LAST)
@pytest.mark.parametrize("right", [1.0, 0.0])
def test_blocks_end_where_the_positions_do(name, changes, right, make_target, scripted):
    """The last round has room for no draft; a token more is refused before any work."""
    head = "CTRLLMHeadModel" if name == "CTRL" else f"{name}ForCausalLM"
    if name == "CTRL":
        torch.manual_seed(0)
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "vocab_size": 97}
        model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(**changes, **ends, initializer_range=0.25)).eval()
    else:
        model = make_target(name, **changes)
    assert type(model).__name__ == head
    new = 32 - PROMPT.shape[1] + 1
    truth = model.generate(PROMPT, max_new_tokens=new, do_sample=False)
    drafter = scripted([truth[0].tolist()], right=right, ragged=False)
    ours = dspark_fast.generate(model, drafter, PROMPT, max_new_tokens=new, do_sample=False, off_switch=False)
    assert torch.equal(ours, truth)
    assert ours.stats.proposed[-1] < ours.stats.proposed[0] == ours.stats.rounds - (right == 0.0)
    with pytest.raises(ValueError, match=f"max_new_tokens is {new + 1} .* accepted is up to {new}"):
        dspark_fast.generate(model, drafter, PROMPT, max_new_tokens=new + 1, do_sample=False)


def test_a_quantised_cache_at_the_door(make_target, make_draft):
    """The tokens are those of plain decoding behind the same kind of cache, which differ from those behind another."""
    if not FP8:
        pytest.skip("this transformers has no quantised cache without a package of its own")
    model = make_target("Qwen3", fresh=True)
    quantised = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    settings = {"max_new_tokens": NEW, "do_sample": False}
    truth = model.generate(PROMPT, **settings, **quantised)
    assert not torch.equal(truth, model.generate(PROMPT, **settings))
    draft = make_draft(model)
    assert torch.equal(dspark_fast.generate(model, draft, PROMPT, **settings, **quantised), truth)
    own = cache_utils.QuantizedCache("fp8", model.config)
    assert torch.equal(dspark_fast.generate(model, draft, PROMPT, past_key_values=own, **settings), truth)
    with pytest.raises(ValueError, match=r"QuantizedCache of \d+ tokens: accepted is an empty"):
        dspark_fast.generate(model, draft, truth, past_key_values=own, **settings)
    with pytest.raises(ValueError, match=r"a quantised cache is driven one row at a time: the batch has 2"):
        dspark_fast.generate(model, draft, PROMPT.repeat(2, 1), **settings, **quantised)


def test_a_quantised_cache_that_is_quantised_anew_is_refused_at_the_door(make_target, make_draft):
    class Anew(cache_utils.DynamicLayer):
        residual_length = 4

    model = make_target("Qwen3")
    cache = cache_utils.QuantizedCache.__new__(cache_utils.QuantizedCache)
    cache_utils.Cache.__init__(cache, layers=[Anew() for _ in range(6)])
    with pytest.raises(ValueError, match=r"layers are Anew, which quantises anew .* accepted is the backend 'fp8'"):
        dspark_fast.generate(model, make_draft(model), PROMPT, past_key_values=cache, max_new_tokens=4)


def test_positions_that_are_computed_have_no_end(make_target):
    """XGLM's are sines, made as far as they are asked for."""
    model = make_target("XGLM", d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=32)
    truth = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    assert torch.equal(dspark_fast.generate(model, None, PROMPT, max_new_tokens=40, do_sample=False), truth)
