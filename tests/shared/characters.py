"""Text for tiny targets: a tokenizer with one token per character."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def characters():
    """One token per character: ``tokenizer``, and ``target(make_target)``, a target of its own for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<|start|>", "<|end|>", "<pad>")
    known = (*special, "\n", *map(chr, range(32, 127)))
    made = Tokenizer(models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(special))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}>{% endif %}{% endif %}"
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|end|>", pad_token="<pad>", chat_template=template
    )
    assert made.decode(made.encode("Hi, you!\n", add_special_tokens=False)) == "Hi, you!\n"

    def target(make_target):
        """Stops at ``<|end|>`` or ``e``, which its random text has often enough; some ids are no token."""
        changes = {"num_hidden_layers": 4, "max_position_embeddings": 4096, "initializer_range": 0.2}
        model = make_target(fresh=True, vocab_size=len(known) + 4, **changes)
        model.generation_config.eos_token_id = [2, known.index("e")]
        return model

    return SimpleNamespace(tokenizer=made, target=target)
