"""A target of toy size, a drafter and a tokenizer, made on the spot: the tutorial's fast form runs on these.

The target's weights are random, so its text means nothing; every cell does with it what it does with a real model.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dspark_fast import DSparkConfig, DSparkDraft

SPECIAL = ("<unk>", "<|start|>", "<|end|>", "<mask>")
CHARACTERS = (*SPECIAL, "\n", *map(chr, range(32, 127)))  # one token each
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def load(dtype: torch.dtype | None = None) -> tuple[LlamaForCausalLM, DSparkDraft, PreTrainedTokenizerFast]:
    """Target, drafter and tokenizer, as :func:`dspark_fast.load` gives them; the same ones at every call.

    Args:
        dtype: None is fp32, in which equality is exact.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # the usual 0.02 gives a model that repeats one token
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=SPECIAL.index("<mask>"),
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:  # the next token then hangs on the last one, mostly
            layer.self_attn.o_proj.weight.mul_(0.03)
    shape = {"num_hidden_layers": 2, "block_size": 5, "markov_rank": len(CHARACTERS), "initializer_range": 0.2}
    draft = DSparkDraft(DSparkConfig.from_target(config, mask_token_id=3, **shape)).tie_to(model).eval()
    _teach(draft, model)
    dtype = dtype or torch.float32
    return model.to(dtype), draft.to(dtype), _tokenizer()


def save(folder: str) -> dict[str, str]:
    """Write the pair, for another process to load: where target and drafter are, as :func:`dspark_fast.load` asks.

    Args:
        folder: an empty one.
    """
    target, drafter = str(Path(folder, "target")), str(Path(folder, "draft"))
    model, draft, tokenizer = load()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    draft.save_pretrained(drafter)
    return {"model": target, "draft": drafter}


@torch.no_grad()
def _teach(draft: DSparkDraft, model: LlamaForCausalLM) -> None:
    """Tell the Markov head which token follows which in the target's own text, so that some drafts are accepted."""
    starts = torch.arange(len(SPECIAL), len(CHARACTERS))[:, None]
    after = torch.zeros(len(CHARACTERS), len(CHARACTERS))
    text = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=48, do_sample=False)
    for row in text.tolist():
        for one, other in pairwise(row):
            after[other, one] += 1
    draft.norm.weight.mul_(0.05)  # the random body says little
    draft.markov_head.markov_w1.weight.copy_(torch.eye(len(after)))
    draft.markov_head.markov_w2.weight.copy_(after.clamp(max=8))


def _tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({token: index for index, token in enumerate(CHARACTERS)}, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[3], chat_template=TEMPLATE
    )
