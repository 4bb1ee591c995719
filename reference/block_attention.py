"""A block of queries against each row's own cached keys and values."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


def visible_keys(
    lengths: torch.Tensor, block: int, keys: int, *, causal: bool, window: int | None = None
) -> torch.Tensor:
    """Which cached key each query of the block may read.

    Query t of row b stands at position ``lengths[b] - block + t``; one that stands behind the keys at hand sees what it
    would in their last slot, so that what is padding sees something.

    Args:
        lengths: integer ``[B]``, valid keys of each row, the block's own included.
        block: T.
        keys: how many cache slots to judge, S.
        causal: a query reads its own position and those before it; otherwise everything up to ``lengths[b]``.
        window: if given, only the last ``window`` positions up to the query's own.

    Returns:
        bool ``[B, T, S]``, true where the key may be read.
    """
    slots = torch.arange(keys, device=lengths.device)
    lengths = lengths.long()[:, None, None]
    queries = (lengths - block + torch.arange(block, device=lengths.device)[None, :, None]).clamp(max=keys - 1)
    visible = slots <= queries if causal else (slots < lengths).expand(-1, block, -1)
    if window is not None:
        visible = visible & (slots > queries - window)
    return visible


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
    """``softmax(softcap(scale q k^T) masked to the row's own keys) v`` without concatenating or repeating K and V.

    The queries of one group of heads are packed as rows of one matrix, so each K/V head is read once for its group.

    Args:
        q: ``[B, T, Hq, D]``.
        k_cache, v_cache: ``[B, C, Hkv, D]`` and ``[B, C, Hkv, Dv]``; the block's own K/V stand at
            ``lengths - T .. lengths - 1`` already.
        lengths: integer ``[B]``, at least T each, or 0: a query that may read no key gives zeros.
        scale: multiplies the scores.
        causal: false for the drafter (bidirectional inside the block), true for the target's verify pass.
        window: sliding window in positions, the query's own included.
        softcap: ``c tanh(score / c)`` before the mask (Gemma-2).

    Returns:
        ``[B, T, Hq, Dv]`` in the dtype of ``q``. Slots past a row's length are never read into the result.
    """
    batch, block, heads, _ = q.shape
    kv_heads = k_cache.shape[2]
    groups = heads // kv_heads
    keys = int(lengths.max()) if batch else 0
    if q.numel() == 0 or keys == 0:
        return q.new_zeros(batch, block, heads, v_cache.shape[-1])

    k = k_cache[:, :keys].transpose(1, 2)
    v = v_cache[:, :keys].transpose(1, 2)
    rows = q.view(batch, block, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, groups * block, -1)

    mask = None
    if batch == 1 and window is None:
        # The one row is as long as the keys at hand, so only causality inside the block is left to mask.
        mask = _single_row_mask(block, groups, keys, q.device) if causal and block > 1 else None
    elif batch > 1 or window is not None:
        mask = visible_keys(lengths, block, keys, causal=causal, window=window)
        mask = mask[:, None].repeat(1, 1, groups, 1)  # [B, 1, G*T, S]
    if softcap is None:
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    else:
        scores = softcap * torch.tanh(scale / softcap * (rows.float() @ k.float().transpose(-1, -2)))
        if mask is None:
            weights = scores.softmax(-1)
        else:  # of scores that are all -inf softmax is NaN
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).masked_fill(~mask, 0.0)
        out = (weights @ v.float()).to(q.dtype)
    out = out.view(batch, kv_heads, groups, block, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, block, heads, -1)


@lru_cache(maxsize=8)
def _single_row_mask(block: int, groups: int, keys: int, device: torch.device) -> torch.Tensor:
    """``visible_keys`` of one row, packed by group. Kept because every layer of a pass asks for the same one."""
    with torch.inference_mode(False):  # a tensor made inside it could not be used outside later
        lengths = torch.tensor([keys], device=device)
        return visible_keys(lengths, block, keys, causal=True).repeat(1, groups, 1)[:, None]
