"""A GGUF file as an ordinary model folder: dequantised weights in safetensors, and the tokenizer that it describes."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dspark_fast.wheel import WheelModel


def convert(gguf: Path, folder: Path, model: WheelModel, *, progress: bool) -> None:
    """Dequantise ``gguf`` and write it to ``folder`` as a transformers model with its tokenizer.

    The weights are dequantised in float32, rounded once to bfloat16 and stored so. The rounding (2**-9 of a value) is
    far below the error of 4 bits; the file is half the size; and float32 and bfloat16 runs then compute with the very
    same weights, as with the original model, which is published in bfloat16 too.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with _quiet_transformers(progress):
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        state = {key: value.to(torch.bfloat16) for key, value in loaded.state_dict().items()}
        kind, config = type(loaded), loaded.config
        del loaded
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        config._name_or_path = ""
        config.__dict__.pop("_model_name_or_path", None)  # the GGUF's own title
        config.bos_token_id, config.eos_token_id, config.pad_token_id = model.bos_id, model.eos_id, model.pad_id
        fresh = kind(config).to(torch.bfloat16)  # a model that knows nothing of GGUF, so that it saves plain weights
        fresh.load_state_dict(state)
        fresh.tie_weights()
        fresh.generation_config = GenerationConfig(
            bos_token_id=model.bos_id, eos_token_id=model.eos_id, pad_token_id=model.pad_id
        )
        fresh.save_pretrained(folder)

        _tokenizer(gguf, model).save_pretrained(folder)


def _tokenizer(gguf: Path, model: WheelModel) -> PreTrainedTokenizerBase:
    """The tokenizer in ``gguf``, built from its vocabulary and merges.

    transformers' own reading of a GGUF differs between versions (5.17 takes a wrong end token and decodes some text
    wrongly), and none of them splits off every digit, as this model's training did.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(key: str) -> Any:
        found = fields.get(f"tokenizer.{key}")
        return None if found is None else found.contents()

    fields = GGUFReader(gguf).fields
    if (field("ggml.model"), field("ggml.pre")) != ("gpt2", "smollm"):
        raise ValueError(f"{gguf} has another kind of tokenizer than was expected")
    tokens: list[str] = field("ggml.tokens")
    if tokens[model.eos_id] != model.eos_token:
        raise ValueError(f"{gguf} has {tokens[model.eos_id]!r} as token {model.eos_id}, not {model.eos_token!r}")
    merges = [tuple(pair.split(" ")) for pair in field("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("ggml.token_type"), strict=True)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == TokenType.CONTROL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[model.bos_id],
        eos_token=tokens[model.eos_id],
        unk_token=tokens[model.unk_id],
        pad_token=tokens[model.pad_id],
        chat_template=field("chat_template"),
        model_max_length=model.context,
        clean_up_tokenization_spaces=False,
    )


@contextlib.contextmanager
def transformers_bars(progress: bool) -> Iterator[bool]:
    """Hide transformers' progress bars unless they are wanted and a terminal shows them; yields whether they show."""
    from transformers.utils import logging

    shown, before = progress and sys.stderr.isatty(), logging.is_progress_bar_enabled()
    if not shown:
        logging.disable_progress_bar()
    try:
        yield shown
    finally:
        if before:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _quiet_transformers(progress: bool) -> Iterator[None]:
    """Silence the remarks of a GGUF load, and its progress bars like :func:`transformers_bars`."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with transformers_bars(progress) as shown:
            # the bar of the dequantisation is not among those that transformers can switch off
            with contextlib.nullcontext() if shown else contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.set_verbosity(level)
