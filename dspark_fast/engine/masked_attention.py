"""Block attention where the kernels do not go: long blocks against a long cache, attention sinks, batches on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dspark_fast import ops
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.reference.block_attention import visible_keys

# Scores that are held at once where they are computed one by one: 256 MiB in fp32.
_MOST_SCORES = 2**26


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: RaggedCache,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A block's queries against each row's own keys, causal, with one mask for all heads and layers of a pass.

    Args:
        query: ``[B, Hq, T, D]``, standing behind the cache's lengths.
        key, value: ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, the block's own included.
        cache: whose lengths they have; the mask is kept in its ``masks``.
        scale: multiplies the scores.
        window: positions that a query sees, its own included.
        softcap: ``c tanh(score / c)`` before the mask.
        sinks: ``[Hq]``, each head's logit of a key that has no value (gpt-oss).

    Returns:
        ``[B, T, Hq, Dv]``, contiguous, in the dtype of ``query``.
    """
    batch, heads, block, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = query.unflatten(1, (kv_heads, heads // kv_heads))  # [B, Hkv, G, T, D]
    if softcap is None and sinks is None and block <= ops.LONGEST_BLOCK and query.device.type == "cpu":
        # The heads of a group as rows of one product. Of a bool mask SDPA would make this one again for every layer.
        rows = groups.flatten(2, 3)
        bias = _mask(cache, block, keys, window, query.device, like=query.dtype, groups=groups.shape[2])
        part = F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale)
        return part.unflatten(2, groups.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()
    mask = _mask(cache, block, keys, window, query.device)
    out = query.new_empty(batch, block, kv_heads, heads // kv_heads, value.shape[-1])
    if softcap is None and sinks is None:
        # One query head of each group at a time: K and V need no copy per query head and the mask none per group, and
        # what SDPA does for grouped heads with a mask on a GPU is to write down all the scores.
        for group in range(groups.shape[2]):
            part = F.scaled_dot_product_attention(groups[:, :, group], key, value, attn_mask=mask, scale=scale)
            out[:, :, :, group] = part.transpose(1, 2)
        return out.flatten(2, 3)
    step = max(1, _MOST_SCORES // max(1, batch * heads * keys))
    keys_32, values_32 = key.float().transpose(-1, -2)[:, :, None], value.float()[:, :, None]
    for start in range(0, block, step):
        scores = groups[:, :, :, start : start + step].float() @ keys_32
        scores = scores * scale if softcap is None else softcap * torch.tanh(scale / softcap * scores)
        scores = scores.masked_fill(~mask[:, :, None, start : start + step], float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., :keys]
        out[:, start : start + step] = (weights @ values_32).permute(0, 3, 1, 2, 4)
    return out.flatten(2, 3)


def _mask(
    cache: RaggedCache,
    block: int,
    keys: int,
    window: int | None,
    device: torch.device,
    *,
    like: torch.dtype | None = None,
    groups: int = 1,
) -> torch.Tensor:
    """What each query may read, ``[B, 1, G*T, S]``. Every layer of a pass with this window asks for the same one.

    Args:
        like: give 0 and -inf of this dtype instead of true and false.
        groups: G; the mask comes so many times.
    """
    asked = block, keys, window, device, like, groups
    if asked not in cache.masks:
        lengths = (cache.lengths + block).to(device)
        mask = visible_keys(lengths, block, keys, causal=True, window=window)[:, None].repeat(1, 1, groups, 1)
        if like is not None:
            mask = torch.zeros(mask.shape, dtype=like, device=device).masked_fill_(~mask, float("-inf"))
        cache.masks[asked] = mask
    return cache.masks[asked]
