"""The door to the ops: arguments are checked once, scalars become tensors, and an implementation is called.

The reference is the only implementation so far; a fused one is chosen here and nowhere else when there is one.
"""

from __future__ import annotations

import torch

from dspark_fast import reference
from dspark_fast.reference import MarkovWalk
from dspark_fast.reference.markov import HEADS
from dspark_fast.reference.verify import MODES

Scalar = float | int | torch.Tensor


def markov_walk(
    base_logits: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    anchor: torch.Tensor,
    *,
    temperature: Scalar,
    seed: Scalar,
    position: Scalar,
    head: str = "vanilla",
    head_weight: torch.Tensor | None = None,
    head_bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    candidates: int = 0,
    keep_logits: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    coupled: bool = False,
) -> MarkovWalk:
    """Walk the Markov head over a block; see :func:`dspark_fast.reference.markov_walk`.

    Raises:
        ValueError: for an unknown head, or shapes that do not fit each other, naming both.
    """
    batch, block, vocab = _shape("base_logits", base_logits, "B, T, V")
    _expect("anchor", anchor, (batch,))
    if (w1 is None) != (w2 is None):
        raise ValueError("w1 and w2 come together: one is None")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}: accepted are {', '.join(HEADS)}")
    if w1 is not None and w2 is not None:
        rank = w1.shape[-1]
        _expect("w1", w1, (vocab, rank))
        _expect("w2", w2, (vocab, rank))
        if head != "vanilla":
            if hidden is None or head_weight is None:
                raise ValueError(f"head is {head!r}, which needs hidden and head_weight")
            width = hidden.shape[-1]
            _expect("hidden", hidden, (batch, block, width))
            gated = head == "gated"
            _expect("head_weight", head_weight, (rank, width + rank) if gated else (3 * rank, 2 * rank + width))
    return reference.markov_walk(
        base_logits,
        w1,
        w2,
        anchor,
        temperature=per_row(temperature, base_logits, torch.float32, "temperature"),
        seed=per_row(seed, base_logits, torch.int64, "seed"),
        position=per_row(position, base_logits, torch.int64, "position"),
        head=head,
        head_weight=head_weight,
        head_bias=head_bias,
        hidden=hidden,
        candidates=candidates,
        keep_logits=keep_logits,
        logits_dtype=logits_dtype,
        coupled=coupled,
    )


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_lengths: torch.Tensor,
    *,
    temperature: Scalar,
    seed: Scalar,
    position: Scalar,
    mode: str = "rejection",
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
    draft_row_max: torch.Tensor | None = None,
    draft_log_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept, resample or add the bonus token; see :func:`dspark_fast.reference.verify`.

    Raises:
        ValueError: for an unknown mode, or shapes that do not fit each other, naming both.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: accepted are {', '.join(MODES)}")
    batch, slots, vocab = _shape("target_logits", target_logits, "B, T+1, V")
    _expect("draft_tokens", draft_tokens, (batch, slots - 1))
    _expect("draft_lengths", draft_lengths, (batch,))
    if mode == "rejection" and slots > 1:
        if draft_logits is None:
            raise ValueError("draft_logits is None: rejection needs the logits that the drafts were drawn from")
        _expect("draft_logits", draft_logits, (batch, slots - 1, vocab))
    return reference.verify(
        target_logits,
        draft_tokens,
        draft_logits,
        draft_lengths,
        temperature=per_row(temperature, target_logits, torch.float32, "temperature"),
        seed=per_row(seed, target_logits, torch.int64, "seed"),
        position=per_row(position, target_logits, torch.int64, "position"),
        mode=mode,
        top_k=per_row(top_k, target_logits, torch.int64, "top_k"),
        top_p=per_row(top_p, target_logits, torch.float32, "top_p"),
        min_p=per_row(min_p, target_logits, torch.float32, "min_p"),
        draft_row_max=draft_row_max,
        draft_log_sum=draft_log_sum,
    )


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Block queries against each row's own cache; see :func:`dspark_fast.reference.block_attention`.

    Raises:
        ValueError: if the query heads are no multiple of the key heads.
    """
    if q.shape[2] % k_cache.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k_cache {k_cache.shape[2]}: the first must be a multiple")
    return reference.block_attention(
        q, k_cache, v_cache, lengths, scale=scale, causal=causal, window=window, softcap=softcap
    )


def store_context_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Norm, turn and store new context rows; see :func:`dspark_fast.reference.store_context_kv`."""
    reference.store_context_kv(k, v, k_norm_weight, cos, sin, k_cache, v_cache, offsets, counts, eps=eps)


def per_row(value: Scalar, like: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """``value`` as a ``[B]`` tensor on the device of ``like``, whose first axis is B.

    Raises:
        ValueError: if it is a tensor of another shape.
    """
    if not isinstance(value, torch.Tensor):
        return torch.full((like.shape[0],), value, dtype=dtype, device=like.device)
    if value.dim() == 0:
        value = value.expand(like.shape[0])
    _expect(name, value, (like.shape[0],))
    return value.to(like.device, dtype)


def _shape(name: str, tensor: torch.Tensor, axes: str) -> torch.Size:
    if tensor.dim() != len(axes.split(",")):
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected [{axes}]")
    return tensor.shape


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
