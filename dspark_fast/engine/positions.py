"""Targets that have learned a vector for each position, and so have a last one."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

_NAMES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has learned; None where they go on, as with RoPE."""
    if getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        return None  # without a look at all modules, which a drafter that is driven anew each round would pay for
    for name, module in model.get_decoder().named_modules():
        if type(module) is nn.Embedding and name.rsplit(".", 1)[-1] in _NAMES:
            return module.num_embeddings
    return None
