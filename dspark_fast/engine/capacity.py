"""How much room the caches get: few sizes, so that a growing row seldom copies and a captured graph is met again."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_SMALLEST = 256
_LARGEST_STEP = 4096


def bucket(tokens: int) -> int:
    """The capacity, in tokens per row, that holds ``tokens``.

    A power of two from 256 up to 4,096, and multiples of 4,096 beyond: doubling there would leave as much memory idle
    as a 4-billion-parameter target takes at 32k tokens (5 GB).
    """
    capacity = _SMALLEST
    while capacity < tokens and capacity < _LARGEST_STEP:
        capacity *= 2
    return capacity if capacity >= tokens else -(-tokens // _LARGEST_STEP) * _LARGEST_STEP


def room(tokens: int, most: int) -> int:
    """The bucket for ``tokens``, but no more than ``most``, which the call will never exceed."""
    return min(bucket(tokens), most)


def check_memory(model: PreTrainedModel, batch: int, capacity: int) -> None:
    """Refuse caches that the GPU has no room for, before any work.

    Raises:
        ValueError: naming both sizes.
    """
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    needed = 2 * config.num_hidden_layers * batch * capacity * heads * width * model.dtype.itemsize
    free, reserved = torch.cuda.mem_get_info(model.device)[0], torch.cuda.memory_reserved(model.device)
    free += reserved - torch.cuda.memory_allocated(model.device)
    if needed > free:
        raise ValueError(
            f"the target's cache for {batch} rows of {capacity} tokens takes {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free: give a smaller max_new_tokens or batch; or use_graph=False, with which "
            "it grows with the text"
        )
