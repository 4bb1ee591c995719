"""The whole drafter as one stateless function: the definition that the cached engine is tested against."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .confidence import confidence_logits
from .layers import rms_norm, rotary_table, rotate
from .markov import markov_walk


class DraftedBlock(NamedTuple):
    """One drafted block.

    Attributes:
        hidden: ``[B, T, H]``, final-normed.
        base_logits: ``[B, T, V]`` (of a drafter with a vocabulary of D tokens ``[B, T, D]``), U: the LM head's output
            before the Markov bias.
        tokens: int64 ``[B, T]``.
        logits: as ``base_logits``, corrected by the Markov bias, before the temperature.
        confidence_logits: ``[B, T]`` before the sigmoid; None without a confidence head.
    """

    hidden: torch.Tensor
    base_logits: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    confidence_logits: torch.Tensor | None


def draft_block(
    draft: Any,
    context_features: torch.Tensor,
    anchor: torch.Tensor,
    temperature: float | torch.Tensor = 0.0,
    *,
    seed: int | torch.Tensor = 0,
    coupled: bool = False,
) -> DraftedBlock:
    """Draft one block from scratch: project the whole context, run every layer, walk the Markov head.

    Args:
        draft: anything with the weights and ``config`` of a DSpark checkpoint under the authors' names.
        context_features: ``[B, S, m*H]``, the tapped target layers side by side, position 0 first, S >= 1.
        anchor: int64 ``[B]``, the last committed token, which stands at position S.
        temperature: 0 is greedy.
        seed: 64-bit seed of each row's noise.
        coupled: draw the drafts from the coupled mode's stream.

    Returns:
        A :class:`DraftedBlock` of T = ``block_size`` tokens for positions S+1 .. S+T.

    Raises:
        ValueError: for a RoPE type or an activation that this definition does not implement.
    """
    config = draft.config
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"draft_block implements rope_type 'default', not {rope['rope_type']!r}")
    if config.hidden_act != "silu":
        raise ValueError(f"draft_block implements hidden_act 'silu', not {config.hidden_act!r}")
    batch, context_length, _ = context_features.shape
    block, head_dim, eps = config.block_size, config.head_dim, config.rms_norm_eps

    # fc and hidden_norm once, shared by every layer; the context skips input_layernorm.
    context = rms_norm(F.linear(context_features, draft.fc.weight), draft.hidden_norm.weight, eps)
    ids = anchor.new_full((batch, block), config.mask_token_id)
    ids[:, 0] = anchor
    hidden = F.embedding(ids, draft.embed_tokens.weight).to(context.dtype)
    positions = torch.arange(context_length + block, device=anchor.device).expand(batch, -1)
    cos, sin = rotary_table(positions, head_dim, rope["rope_theta"])

    for layer in draft.layers:
        attention = layer.self_attn
        normed = rms_norm(hidden, layer.input_layernorm.weight, eps)
        both = torch.cat([context, normed], dim=1)
        q = _heads(F.linear(normed, attention.q_proj.weight, attention.q_proj.bias), head_dim)
        k = _heads(F.linear(both, attention.k_proj.weight, attention.k_proj.bias), head_dim)
        v = _heads(F.linear(both, attention.v_proj.weight, attention.v_proj.bias), head_dim)
        q = rotate(rms_norm(q, attention.q_norm.weight, eps), cos[:, -block:], sin[:, -block:])
        k = rotate(rms_norm(k, attention.k_norm.weight, eps), cos, sin)

        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * head_dim**-0.5
        mixed = torch.einsum("bhts,bshd->bthd", scores.float().softmax(-1).to(v.dtype), v)
        hidden = hidden + F.linear(mixed.flatten(2), attention.o_proj.weight, attention.o_proj.bias)

        normed = rms_norm(hidden, layer.post_attention_layernorm.weight, eps)
        gate = F.silu(F.linear(normed, layer.mlp.gate_proj.weight)) * F.linear(normed, layer.mlp.up_proj.weight)
        hidden = hidden + F.linear(gate, layer.mlp.down_proj.weight)

    hidden = rms_norm(hidden, draft.norm.weight, eps)
    vocabulary = getattr(draft, "vocabulary", None)
    head = draft.lm_head.weight if vocabulary is None else draft.lm_head.weight[vocabulary]
    base_logits = F.linear(hidden, head.to(hidden.dtype))
    walk = markov_walk(
        base_logits,
        *draft.markov_weights(),
        anchor,
        temperature=temperature,
        seed=seed,
        position=context_length,
        coupled=coupled,
        hidden=hidden,
        vocabulary=vocabulary,
        **draft.markov_options(),
    )
    confidence = None
    if config.enable_confidence_head:
        prev = torch.cat([anchor[:, None], walk.tokens[:, :-1]], dim=1)
        embedding = None
        if config.confidence_head_with_markov:
            embedding = F.embedding(prev, draft.markov_head.markov_w1.weight)
        proj = draft.confidence_head.proj
        confidence = confidence_logits(hidden, proj.weight, proj.bias, embedding)
    return DraftedBlock(hidden, base_logits, walk.tokens, walk.logits, confidence)


def _heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``[B, N, heads * D]`` as ``[B, N, heads, D]``."""
    return x.view(*x.shape[:2], -1, head_dim)
