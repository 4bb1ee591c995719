"""RMSNorm and rotary position embedding: the two maps that several ops share."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (Zhang and Sennrich 2019, Eq. 4).

    Args:
        x: ``[..., D]``, any float dtype; the mean square is taken in fp32 because a bf16 sum over 576 channels
            already loses 3 of its 8 bits.
        weight: ``[D]``.
        eps: added to the mean square.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotary_table(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary angles (Su et al. 2021), in the half-split layout of Llama and Qwen.

    Args:
        positions: integer ``[...]``, absolute.
        head_dim: D, even.
        theta: the base of the frequencies.

    Returns:
        ``cos, sin``, each fp32 ``[..., D]`` (the D/2 angles twice).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head's vector by its position's angles.

    Args:
        x: ``[B, N, heads, D]``.
        cos, sin: ``[B, N, D]``, cast to the dtype of ``x`` first (as transformers does).

    Returns:
        ``[B, N, heads, D]``.
    """
    cos, sin = cos.to(x.dtype)[:, :, None], sin.to(x.dtype)[:, :, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
