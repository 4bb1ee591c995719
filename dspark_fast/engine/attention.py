"""The target's attention during generation: our block attention, registered through transformers' own interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from dspark_fast import ops
from dspark_fast.backend import choose
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.masked_attention import masked_attention

NAME = "dspark_block"


@dataclass
class Pass:
    """One forward pass through our attention.

    Attributes:
        cache: that it works on.
        attended: ids of the modules that asked for our attention in it.
        windowed: whether one of them has a window.
    """

    cache: RaggedCache
    attended: set[int] = field(default_factory=set)
    windowed: bool = False


class _Here(threading.local):
    """The pass that this thread is in. No ContextVar: a compiler cannot trace one."""

    running: Pass | None = None


_here = _Here()
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
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' convention: q ``[B, Hq, T, D]``, k and v ``[B, Hkv, S, D]`` views of the cache.

    No mask function is registered with it, so transformers builds no mask and each layer passes None.

    Raises:
        RuntimeError: outside :func:`attending`; or for a layer that should have a window and passes none.
        NotImplementedError: for a keyword that would change the scores and that block attention does not have.
    """
    running = _here.running
    if running is None:
        raise RuntimeError(
            f"the attention {NAME!r} works only inside dspark_fast.generate: is something else using the model?"
        )
    cache = running.cache
    running.attended.add(id(module))
    if sliding_window is None:
        _check_window(module)
    else:
        running.windowed = True
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if kwargs.get("is_causal") is False:
        unknown.append("is_causal=False")
    if unknown or attention_mask is not None:
        unknown = unknown or ["attention_mask"]
        raise NotImplementedError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    block, keys = query.shape[2], key.shape[2]
    if block == keys and sliding_window is None and softcap is None and s_aux is None:
        # Prefill: rows are packed from slot 0, so plain causality is all the mask there is.
        groups = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    # Kernels need no mask, but room for every token, which a prefill's padding may lack. The reference op would make a
    # mask of its own, and check its arguments, for every layer.
    shared = softcap is None and choose(None, query) == "reference"
    if cache.reach is None or s_aux is not None or block > ops.LONGEST_BLOCK or shared:
        options = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
        return masked_attention(query, key, value, cache, **options), None
    out = ops.block_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache.reach.to(query.device),
        scale=scale,
        causal=True,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None


AttentionInterface.register(NAME, ragged_attention)


def _check_window(module: torch.nn.Module) -> None:
    """A window that lives only in the mask would be lost here without a word."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if kinds and isinstance(layer, int) and layer < len(kinds) and kinds[layer] == "sliding_attention":
        raise RuntimeError(
            f"layer {layer}, a {type(module).__name__}, is of type 'sliding_attention' but passes no sliding_window"
        )


def check_attended(model: PreTrainedModel, running: Pass) -> None:
    """After the first pass: every layer must have asked for our attention, or the model's tokens are wrong.

    Raises:
        RuntimeError: naming the model, and how many layers did not ask; or for a window that no layer passes.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(running.attended) < layers:
        raise RuntimeError(
            f"{len(running.attended)} of the {layers} layers of {type(model).__name__} took their attention from "
            "transformers' attention interface: the others attend in a way of their own"
        )
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and not getattr(config, "layer_types", None) and not running.windowed:
        raise RuntimeError(
            f"{type(model).__name__} has a sliding_window of {window}, but no layer passes one to its attention: it "
            "stands in the mask alone, which is not built here"
        )


@contextmanager
def attending(cache: RaggedCache) -> Iterator[Pass]:
    """One forward pass that our attention works in, on ``cache``; a streamer or another thread is in none."""
    running = Pass(cache)
    before, _here.running = _here.running, running
    try:
        yield running
    finally:
        _here.running = before


def alone() -> AbstractContextManager[object]:
    """One thread decodes at a time: hooks, the attention setting and a drafter's caches are shared by all of them."""
    return _switch


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
            if not _switched(model):
                raise ValueError(
                    f"{type(model).__name__} does not take its attention from transformers' attention interface"
                )
            yield
        finally:
            model.config._attn_implementation = before


def takes_our_attention(model: PreTrainedModel) -> bool:
    """Whether ``model`` would take our attention; tried, and undone again."""
    with _switch:
        before = _settings(model)
        try:
            return _switched(model)
        finally:
            model.config._attn_implementation = before


def _switched(model: PreTrainedModel) -> bool:
    """Ask ``model`` to take our attention; whether the setting took."""
    # A class that says so itself is not asked: transformers would only log a warning, and mpt fails half-way.
    can = getattr(model, "_can_set_attn_implementation", None)
    if can is not None and not can():
        return False
    model.set_attn_implementation(NAME)
    return model.config.get_text_config(decoder=True)._attn_implementation == NAME


def _settings(model: PreTrainedModel) -> Any:
    """The attention setting of the configuration and of each part of it, as its setter takes it back."""
    parts = {key: getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", {})}
    settings = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **settings} if settings else model.config._attn_implementation
