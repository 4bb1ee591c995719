"""Row statistics: what verification and the cuts need of a row of logits, tile by tile, in one pass over it.

``row_statistics``, one launch over rows x tiles of V, gives each tile's largest value, the token that has it and
sum exp((l - largest) / T): whoever needs a row's maximum or its softmax reduces a few dozen tiles, not V logits.
Bytes: the rows once, and 12 for every 4,096 logits of output; 512 more where the maxima of groups are asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import launch
from .noise import DRAFT, exponentials

GROUP = tl.constexpr(32)  # tokens whose maximum stands for them, where a cut is looked for or a tile is ruled out


@triton.jit(do_not_specialize=["slots"])
def _row_statistics_kernel(
    logits,
    lengths,
    temperature,
    seed,
    position,
    floor,
    tile_best,
    tile_token,
    tile_sum,
    group_best,
    vocab,
    slots,
    stride_b,
    stride_t,
    TILES: tl.constexpr,
    BV: tl.constexpr,
):
    i_row, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_t = i_row // slots, i_row % slots
    if lengths is not None:
        if i_t > tl.load(lengths + i_b):  # past the draft, or the row is finished
            return
    b_temperature = 1.0
    if temperature is not None:
        b_temperature = tl.load(temperature + i_b)
    o_v = i_tile * BV + tl.arange(0, BV)
    # [BV]
    b_l = tl.load(logits + i_b * stride_b + i_t * stride_t + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.max(((b_l != b_l) | (b_l == float("inf"))).to(tl.int32), 0) > 0
    p_out = i_row * TILES + i_tile
    if seed is not None:
        if b_temperature != 0:  # coupled: the race itself; its key takes the place of the logit
            no_anchor = tl.zeros([], tl.int64)
            b_position = tl.load(position + i_b) + 1 + i_t
            b_e = exponentials(tl.load(seed + i_b), b_position, no_anchor, DRAFT, i_tile * BV, 1, BV)
            b_l = tl.div_rn(b_l, b_temperature)
            if floor is not None:
                b_l = tl.where(b_l < tl.load(floor + i_row), float("-inf"), b_l)
            b_l -= tl.log(tl.reshape(b_e, [BV]))
    if group_best is not None:
        p_groups = group_best + (i_row * TILES + i_tile) * (BV // GROUP) + tl.arange(0, BV // GROUP)
        tl.store(p_groups, tl.max(tl.reshape(b_l, [BV // GROUP, GROUP]), 1))
    best = tl.max(b_l, 0)
    tl.store(tile_best + p_out, tl.where(broken, float("inf"), best))
    if tile_sum is None:
        tl.store(tile_token + p_out, tl.min(tl.where(b_l == best, o_v, 2147483647), 0))
    elif b_temperature == 0:
        tl.store(tile_token + p_out, tl.min(tl.where(b_l == best, o_v, 2147483647), 0))
    else:
        shift = tl.where(best == float("-inf"), 0.0, best)
        # A sum may multiply by 1 / T where the values that are sampled from may not: 2e-6 off where it is 1e-13.
        tl.store(tile_sum + p_out, tl.sum(tl.exp2((b_l - shift) * (1.4426950408889634 / b_temperature)), 0))


def row_statistics(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor | None,
    lengths: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
    group_best: torch.Tensor | None = None,
    sums: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Each tile's largest value, the lowest token that has it, and sum exp((l - largest) / T): [B, S, tiles] each.

    logits: [B, S, V], contiguous along V; temperature: fp32 [B], None for 1; lengths: integer [B], the last slot of
    each row that is looked at (negative for none), None for all; the rest of the results is left unwritten.
    A tile with a NaN or +inf has +inf as its largest value. A row has a token at temperature 0 and a sum above it;
    without ``sums`` every row has a token.
    With seed and position (int64 [B]; slot j draws for ``position + 1 + j``; without sums) a tile's value is that of
    the coupled race, l / T - log e, and its token the one that has it; ``floor`` [B, S] leaves out what is cut.
    group_best: fp32 [B, S, tiles, BV / 32] to fill with the largest value (or key) of each group of 32 tokens.
    """
    batch, slots, vocab = logits.shape
    device, table = logits.device, launch.parameters("row_statistics", logits.device)
    tiles = triton.cdiv(vocab, table["BV"])
    best = torch.empty(batch, slots, tiles, dtype=torch.float32, device=device)
    token = torch.empty(batch, slots, tiles, dtype=torch.int32, device=device)
    total = torch.empty(batch, slots, tiles, dtype=torch.float32, device=device) if sums else None
    _row_statistics_kernel[(batch * slots, tiles)](
        logits,
        lengths,
        temperature,
        seed,
        position,
        floor,
        best,
        token,
        total,
        group_best,
        vocab,
        slots,
        *logits.stride()[:2],
        TILES=tiles,
        **table,
    )
    return best, token, total


def new_groups(logits: torch.Tensor) -> torch.Tensor:
    """Memory for the group maxima that ``cut_rows`` reads."""
    batch, slots, vocab = logits.shape
    width = launch.parameters("row_statistics", logits.device)["BV"]
    shape = (batch, slots, triton.cdiv(vocab, width), width // GROUP.value)
    return torch.empty(shape, dtype=torch.float32, device=logits.device)
