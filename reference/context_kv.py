"""Injected context to cached keys and values of one draft layer."""

from __future__ import annotations

import torch

from .layers import rms_norm, rotate


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
    """Norm and turn new keys, then store keys and values at each row's own offset; in place, nothing else is touched.

    A context token's K and V depend on the target's features alone, never on the block, so each is computed once
    when its token is committed (DSpark paper, section 3: KV injection). The block's own K and V take the same path.

    Args:
        k, v: ``[B, N, Hkv, D]``, as they leave the projections.
        k_norm_weight: ``[D]``.
        cos, sin: ``[B, N, D]``, at the absolute positions of the N rows.
        k_cache, v_cache: ``[B, C, Hkv, D]``, written in place.
        offsets: integer ``[B]``, the slot of each row's first new token.
        counts: integer ``[B]`` in 0..N: only the first ``counts[b]`` rows of row b are valid.
        eps: of the key norm.
    """
    k = rotate(rms_norm(k, k_norm_weight, eps), cos, sin)
    steps = torch.arange(k.shape[1], device=k.device)
    if k.shape[0] == 1 or bool((counts == counts[0]).all()):
        # Every row stores as many: no boolean gather, which costs 5 times the store at B = 1.
        n = int(counts[0]) if counts.numel() else 0
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        slots = offsets.long()[:, None] + steps[:n]
        k_cache[rows, slots] = k[:, :n].to(k_cache.dtype)
        v_cache[rows, slots] = v[:, :n].to(v_cache.dtype)
        return
    rows, columns = (steps < counts[:, None]).nonzero(as_tuple=True)
    slots = offsets.long()[rows] + columns
    k_cache[rows, slots] = k[rows, columns].to(k_cache.dtype)
    v_cache[rows, slots] = v[rows, columns].to(v_cache.dtype)
