"""Which targets can be driven, and how: through our ragged cache, behind their own cache, or not at all, and why."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PreTrainedModel

from dspark_fast.engine.attention import takes_our_attention

Path = Literal["ragged", "own"]

_RAGGED = {"full_attention", "sliding_attention"}
_RECURRENT = {"conv", "hybrid", "linear_attention"}
# A cache holds nothing for "mlp" and "moe"; a chunk of attention is a window to it.
_OWN = _RAGGED | _RECURRENT | {"chunked_attention", "mlp", "moe"}

# Recurrent targets that were seen to read a block of tokens onto a state they have, on each end of our range of
# transformers that has them. Do not add one untried: in some a block of several tokens starts from an empty state.
_READS_BLOCKS = {
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba2",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}
_READS_TOKENS = {
    "falcon_mamba",
    "jamba",
    "mamba",
    "zamba",
}
# Take our attention, but count positions from the cache, where ours has no single length.
_OWN_BY_NAME = {"biogpt", "ctrl", "opt"}


def choose_target(
    model: PreTrainedModel,
    batch: int,
    *,
    shortest: int,
    longest: int,
    total: int,
    chunk: int | None = None,
    own: bool = False,
) -> Path:
    """Decide how ``model`` is driven for one request, before any work.

    Args:
        model: the target; its attention setting is tried and put back.
        batch: rows.
        shortest: tokens of the shortest prompt.
        longest: tokens of the longest prompt.
        total: positions that the request can reach: the longest prompt, new tokens and a block.
        chunk: tokens per row that a prompt is read in at a time; None for all at once.
        own: the caller has brought a cache that is not ours.

    Returns:
        ``"ragged"``: our cache and our attention, any number of rows. ``"own"``: the model's own, one row
        (:class:`~dspark_fast.engine.own_cache.OwnCacheTarget`).

    Raises:
        ValueError: if it cannot be driven, naming the model and the reason.
    """
    name = type(model).__name__
    path = check_layers(model)
    if path == "ragged" and not takes_our_attention(model):
        path = "own"
    if own:
        path = "own"
        if batch > 1:
            raise ValueError(f"a quantised cache is driven one row at a time: the batch has {batch}")
    if path == "own" and batch > 1:
        raise ValueError(
            f"{name} can be driven only behind a cache of its own, one row at a time: the batch has {batch}"
        )
    # Behind its own cache a prompt is always read at once.
    first = longest if path == "own" else min(shortest, longest if chunk is None else chunk)
    _check_rope(model, first, longest, total)
    return path


def check_layers(model: PreTrainedModel) -> Path:
    """How the kinds of layer that ``model`` has would let it be driven, if it takes its attention from transformers.

    Raises:
        ValueError: if they cannot be, naming the model and the layer types, or what else stands in the way.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder: only decoder-only targets are supported")
    if not _causal(model, config):
        raise ValueError(f"{name} does not attend causally: what it says of a token depends on those after it")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        raise ValueError(f"{name} shares keys and values between layers, which is not supported")
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "attention_chunk_size", None):
        kinds = {"chunked_attention"}
    unknown = sorted(kinds - _OWN)
    if unknown:
        raise ValueError(f"{name} has {', '.join(unknown)} layers, which cannot be rolled back")
    if kinds & _RECURRENT or getattr(model, "_is_stateful", False):
        _check_recurrent(model, config, sorted(kinds & _RECURRENT))
    multimodal = any("mrope_section" in part for part in _rope(config))
    if multimodal and config.model_type not in _READS_BLOCKS:
        raise ValueError(f"{name} has multimodal RoPE (mrope_section), whose positions are three numbers per token")
    return "ragged" if kinds <= _RAGGED and config.model_type not in _OWN_BY_NAME else "own"


def _causal(model: PreTrainedModel, config: Any) -> bool:
    # A decoder alone: a vision tower beside it may attend as it likes.
    decoder = model.get_decoder()
    everywhere = all(getattr(module, "is_causal", True) is not False for module in decoder.modules())
    bidirectional = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return everywhere and not bidirectional and getattr(config, "is_causal", True) is not False


def _check_recurrent(model: PreTrainedModel, config: Any, kinds: list[str]) -> None:
    """Rolling back costs a state; speculation gains nothing if a block must be read token by token."""
    if config.model_type in _READS_BLOCKS:
        return
    has = f"{type(model).__name__} has {', '.join(kinds) or 'recurrent'} layers"
    if config.model_type in _READS_TOKENS:
        raise ValueError(
            f"{has} that read one token at a time once they have a state: a block of drafts would start from an empty "
            "one, and drafts verified one by one gain nothing"
        )
    raise ValueError(
        f"{has}, which cannot be rolled back, and a {config.model_type} was never seen to read a block of "
        f"tokens right; recurrent targets that are: {', '.join(sorted(_READS_BLOCKS))}"
    )


def _rope(config: Any) -> list[dict[str, Any]]:
    """The RoPE settings of all layers, or of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def _check_rope(model: PreTrainedModel, first: int, longest: int, total: int) -> None:
    """Some RoPE changes with the largest position of a pass, in all rows: a request must stay on one side of that.

    Args:
        model: the target.
        first: positions that the first pass reaches in the row where it reaches fewest.
        longest: tokens of the longest prompt.
        total: positions that the request can reach.
    """
    config = model.config.get_text_config(decoder=True)
    for part in _rope(config):
        kind = part.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            original = part.get("original_max_position_embeddings")
            limit = original or getattr(config, "original_max_position_embeddings", None) or limit
        # Past the limit "longrope" stays as it is; "dynamic" changes with every token.
        if total <= limit or (kind == "longrope" and first > limit):
            continue
        side = "below that" if kind == "dynamic" else "on one side of that, in every row and pass"
        raise ValueError(
            f"{type(model).__name__} has RoPE of type {kind!r}, which changes at {limit} positions: a request must "
            f"stay {side}, but its first pass reaches {first} of a prompt of {longest} and its last can reach {total} "
            "(prompt, new tokens and a block)"
        )
