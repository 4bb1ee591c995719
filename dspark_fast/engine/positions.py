"""Targets that know a vector for each position up to some last one."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

_NAMES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model has vectors for; None where they go on, as with RoPE."""
    if getattr(model.config.get_text_config(decoder=True), "rope_parameters", None):
        return None  # without a look at all modules, which a drafter that is driven anew each round would pay for
    decoder = model.get_decoder()
    for name, module in decoder.named_modules():
        if name.rsplit(".", 1)[-1] not in _NAMES or not isinstance(module, nn.Embedding):
            continue  # XGLM's computes what it lacks
        # OPT's and BioGPT's begin behind a few rows that they never read.
        if type(module) is nn.Embedding or hasattr(module, "offset"):
            return module.num_embeddings - getattr(module, "offset", 0)
    table = getattr(decoder, "pos_encoding", None)  # CTRL's sines
    return len(table) if isinstance(table, torch.Tensor) else None
