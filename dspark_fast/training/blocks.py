"""Many anchor blocks of one sequence in a single pass of the drafter (DSpark paper, section 4)."""

from __future__ import annotations

import torch

from dspark_fast.draft import DSparkDraft
from dspark_fast.reference.layers import rotate


def sample_anchors(
    loss_mask: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose anchors uniformly among the positions p where p and p + 1 both count for the loss.

    Args:
        loss_mask: ``[B, L]``, nonzero where a token is the target's own.
        count: A, at most so many distinct anchors per sequence.
        generator: of the choice.

    Returns:
        positions int64 ``[B, A]``, ascending, 0 where there are fewer; valid bool ``[B, A]``.
    """
    allowed = loss_mask.bool()
    allowed = torch.cat([allowed[:, :-1] & allowed[:, 1:], torch.zeros_like(allowed[:, :1])], dim=1)
    keys = torch.rand(allowed.shape, generator=generator).to(allowed.device).masked_fill(~allowed, -1.0)
    best = keys.topk(min(count, allowed.shape[1]), dim=1)
    valid = best.values >= 0
    # Invalid anchors sort behind the valid ones, then become the dummy position 0.
    order = best.indices.masked_fill(~valid, allowed.shape[1]).sort(dim=1).values
    valid = order < allowed.shape[1]
    return order.masked_fill(~valid, 0), valid


def block_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, valid: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each slot of each block is to predict.

    Slot j of the block at p predicts the token at p + 1 + j; a block stops at the first label that is outside the
    sequence or does not count.

    Returns:
        labels, previous tokens (both int64 ``[B, A, T]``) and counted, bool ``[B, A, T]``.
    """
    length = input_ids.shape[1]
    where = anchors[..., None] + 1 + torch.arange(block, device=input_ids.device)
    inside = where < length
    where = where.clamp(max=length - 1)
    rows = torch.arange(len(input_ids), device=input_ids.device)[:, None, None]
    counted = inside & loss_mask.bool()[rows, where] & valid[..., None]
    counted = counted.long().cumprod(dim=-1).bool()
    return input_ids[rows, where], input_ids[rows, (where - 1).clamp(min=0)], counted


def run_blocks(
    draft: DSparkDraft, input_ids: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Hidden states of every block, as generation would compute them one by one.

    A query sees the context strictly before its own block's anchor and the slots of its own block, both ways.

    Args:
        draft: joined to its target.
        input_ids: int64 ``[B, L]``.
        features: ``[B, L, m*H]``, the target's taps.
        anchors: int64 ``[B, A]``; valid: bool ``[B, A]`` (an invalid block is all masks and sees no context).

    Returns:
        ``[B, A, T, H]``, final-normed.
    """
    config = draft.config
    batch, length = input_ids.shape
    count, block, dim = anchors.shape[1], config.block_size, config.head_dim
    kv_heads, groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads

    ids = input_ids.new_full((batch, count, block), config.mask_token_id)
    ids[..., 0] = torch.where(valid, input_ids.gather(1, anchors), config.mask_token_id)
    positions = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
    context = draft.context(features)
    steps = torch.arange(length, device=anchors.device)
    context_angles = draft.rotary_emb(context, steps[None].expand(batch, -1))
    block_angles = draft.rotary_emb(context, positions)
    sees = (steps < anchors[..., None]) & valid[..., None]  # [B, A, L]
    hidden_context = torch.zeros(sees.shape, dtype=torch.float32, device=anchors.device).masked_fill(~sees, -torch.inf)
    hidden_context = hidden_context[:, None, None, :, None]  # [B, 1, 1, A, 1, L]

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attention = draft.layers[index].self_attn
        context_k, context_v = attention.keys_values(context)
        context_k = rotate(attention.k_norm(context_k), *context_angles).permute(0, 2, 3, 1)[:, :, None]  # [B,K,1,D,L]
        context_v = context_v.transpose(1, 2)[:, :, None]  # [B,K,1,L,D]
        k = rotate(attention.k_norm(k), *block_angles)
        q = q.view(batch, count * block, kv_heads, groups, dim).permute(0, 2, 3, 1, 4) * dim**-0.5  # [B,K,G,A*T,D]
        k = k.view(batch, count, block, kv_heads, dim).permute(0, 3, 1, 4, 2)[:, :, None]  # [B,K,1,A,D,T]
        v = v.view(batch, count, block, kv_heads, dim).permute(0, 3, 1, 2, 4)[:, :, None]  # [B,K,1,A,T,D]

        split = (batch, kv_heads, groups, count, block)
        to_context = (q @ context_k).float().view(*split, length) + hidden_context
        to_block = (q.reshape(*split, dim) @ k).float()
        weights = torch.cat([to_context, to_block], dim=-1).softmax(-1).to(v.dtype)
        out = (weights[..., :length].flatten(3, 4) @ context_v).view(*split, dim) + weights[..., length:] @ v
        return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, count * block, kv_heads * groups, dim)

    hidden = draft(ids.flatten(1), positions, attend)
    return hidden.view(batch, count, block, -1)
