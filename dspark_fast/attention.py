"""The target's attention during generation: our block attention, registered through transformers' own interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from dspark_fast import ops
from dspark_fast.cache import RaggedCache

NAME = "dspark_block"
_active: ContextVar[RaggedCache | None] = ContextVar("dspark_fast_cache", default=None)
_switch = threading.RLock()

# What a model may pass besides q, k and v without changing the scores; anything else is refused by name.
_HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "position_ids",
    "past_key_values",
    "use_cache",
}


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' convention: q ``[B, Hq, T, D]``, k and v ``[B, Hkv, S, D]`` views of the cache.

    No mask function is registered with it, so transformers builds no mask and each layer passes None.

    Raises:
        RuntimeError: outside :func:`attending`.
        NotImplementedError: for a keyword that would change the scores and that block attention does not have.
    """
    cache = _active.get()
    if cache is None:
        raise RuntimeError(
            f"the attention {NAME!r} works only inside dspark_fast.generate: is something else using the model?"
        )
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None:
        unknown = unknown or ["attention_mask"]
        raise NotImplementedError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    block, keys = query.shape[2], key.shape[2]
    if block == keys and sliding_window is None and softcap is None:
        # Prefill: rows are packed from slot 0, so plain causality is all the mask there is.
        groups = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    out = ops.block_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache.lengths + block,
        scale=scale,
        causal=True,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None


AttentionInterface.register(NAME, ragged_attention)


def check_attention(model: PreTrainedModel) -> None:
    """Refuse a target whose layers this attention cannot serve.

    Raises:
        ValueError: naming the model and the layer types at fault.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if kinds:
        raise ValueError(f"{type(model).__name__} has {', '.join(kinds)} layers, which cannot be rolled back per row")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder: only decoder-only targets are supported")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for kind in (part.get("rope_type") for part in parts):
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"{type(model).__name__} has RoPE of type {kind!r}, which changes with the longest row")


@contextmanager
def attending(cache: RaggedCache) -> Iterator[None]:
    """The cache that our attention works on, for one forward pass; a streamer or another thread has none."""
    token = _active.set(cache)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def ragged(model: PreTrainedModel) -> Iterator[None]:
    """Give ``model`` our attention inside a ``with`` block; its own setting comes back whatever happens.

    The setting lives in the model's configuration, which threads share: a lock admits one thread at a time.

    Raises:
        ValueError: if the model does not take its attention from transformers' interface (its tokens would be wrong).
    """
    with _switch:
        before = _settings(model)
        try:
            model.set_attn_implementation(NAME)
            if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
                raise ValueError(
                    f"{type(model).__name__} does not take its attention from transformers' attention interface"
                )
            yield
        finally:
            model.config._attn_implementation = before


def _settings(model: PreTrainedModel) -> Any:
    """The attention setting of the configuration and of each part of it, as its setter takes it back."""
    parts = {key: getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", {})}
    settings = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **settings} if settings else model.config._attn_implementation
