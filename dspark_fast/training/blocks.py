"""Many anchor blocks of one sequence in a single pass of the drafter (DSpark paper, section 4)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dspark_fast.draft import DSparkDraft
from dspark_fast.reference.layers import rotate

# run_blocks(draft, input_ids, features, anchors, valid) -> hidden; see run_blocks
RunBlocks = Callable[[DSparkDraft, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# attend(q [B, A*T, Hq, D], context_k, context_v [B, L, Hkv, D], k, v [B, A*T, Hkv, D]) -> [B, A*T, Hq, D]
BlockAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
    draft: DSparkDraft,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    *,
    flex: bool = False,
) -> torch.Tensor:
    """Hidden states of every block, as generation would compute them one by one.

    A query sees the context strictly before its own block's anchor and the slots of its own block, both ways.

    Args:
        draft: joined to its target.
        input_ids: int64 ``[B, L]``.
        features: ``[B, L, m*H]``, the target's taps.
        anchors: int64 ``[B, A]``; valid: bool ``[B, A]`` (an invalid block is all masks and sees no context).
        flex: whether attention is ``flex_attention``, which compiled never holds the scores; see :func:`flex_blocks`.

    Returns:
        ``[B, A, T, H]``, final-normed.
    """
    config = draft.config
    batch, length = input_ids.shape
    count, block = anchors.shape[1], config.block_size
    ids = input_ids.new_full((batch, count, block), config.mask_token_id)
    ids[..., 0] = torch.where(valid, input_ids.gather(1, anchors), config.mask_token_id)
    positions = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
    context = draft.context(features)
    steps = torch.arange(length, device=anchors.device)
    context_angles = draft.rotary_emb(context, steps[None].expand(batch, -1))
    block_angles = draft.rotary_emb(context, positions)
    attention = (flex_blocks if flex else split_blocks)(length, anchors, valid, block)

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        module = draft.layers[index].self_attn
        context_k, context_v = module.keys_values(context)
        context_k = rotate(module.k_norm(context_k), *context_angles)
        return attention(q, context_k, context_v, rotate(module.k_norm(k), *block_angles), v)

    hidden = draft(ids.flatten(1), positions, attend)
    return hidden.view(batch, count, block, -1)


def split_blocks(length: int, anchors: torch.Tensor, valid: torch.Tensor, block: int) -> BlockAttention:
    """Attention in two products, context and own block, under one softmax: no score between two blocks is computed.

    Holds the scores, fp32 ``[B, Hq, A*T, L + T]``: right where sequences are short, as on a CPU.
    """
    batch, count = anchors.shape
    sees = (torch.arange(length, device=anchors.device) < anchors[..., None]) & valid[..., None]  # [B, A, L]
    unseen = torch.zeros(sees.shape, dtype=torch.float32, device=anchors.device).masked_fill(~sees, -torch.inf)
    unseen = unseen[:, None, None, :, None]  # [B, 1, 1, A, 1, L]

    def attend(
        q: torch.Tensor, context_k: torch.Tensor, context_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        kv_heads, dim = v.shape[2:]
        groups = q.shape[2] // kv_heads
        context_k = context_k.permute(0, 2, 3, 1)[:, :, None]  # [B,K,1,D,L]
        context_v = context_v.transpose(1, 2)[:, :, None]  # [B,K,1,L,D]
        q = q.view(batch, count * block, kv_heads, groups, dim).permute(0, 2, 3, 1, 4) * dim**-0.5  # [B,K,G,A*T,D]
        k = k.view(batch, count, block, kv_heads, dim).permute(0, 3, 1, 4, 2)[:, :, None]  # [B,K,1,A,D,T]
        v = v.view(batch, count, block, kv_heads, dim).permute(0, 3, 1, 2, 4)[:, :, None]  # [B,K,1,A,T,D]
        split = (batch, kv_heads, groups, count, block)
        to_context = (q @ context_k).float().view(*split, length) + unseen
        to_block = (q.reshape(*split, dim) @ k).float()
        weights = torch.cat([to_context, to_block], dim=-1).softmax(-1).to(v.dtype)
        out = (weights[..., :length].flatten(3, 4) @ context_v).view(*split, dim) + weights[..., length:] @ v
        return out.permute(0, 3, 4, 1, 2, 5).reshape(batch, count * block, kv_heads * groups, dim)

    return attend


def flex_blocks(length: int, anchors: torch.Tensor, valid: torch.Tensor, block: int) -> BlockAttention:
    """The same by ``flex_attention`` over context and blocks in one row of keys: tiles that no query sees are skipped.

    To be compiled (the trainer does): uncompiled it holds the scores of every block with every other.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, count = anchors.shape

    def sees(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        of = query // block
        # an anchor stands inside the sequence, so "before it" is never one of the blocks' keys
        return ((key < anchors[b, of]) & valid[b, of]) | ((key >= length) & ((key - length) // block == of))

    tokens = count * block
    mask = create_block_mask(sees, batch, None, tokens, length + tokens, device=anchors.device)

    def attend(
        q: torch.Tensor, context_k: torch.Tensor, context_v: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        # rotation leaves q and k in fp32; one dtype for all, that of the values, as the cache has it when generating
        keys = torch.cat([context_k, k], dim=1).to(v.dtype).transpose(1, 2)
        values = torch.cat([context_v, v], dim=1).transpose(1, 2)
        q = q.to(v.dtype).transpose(1, 2)
        return flex_attention(q, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend
