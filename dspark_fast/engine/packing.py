"""Left-padded prompts to rows packed from slot 0, so that no later part ever sees padding."""

from __future__ import annotations

import torch


def pack(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Shift each row to the left end.

    Args:
        input_ids: int64 ``[B, S]``.
        attention_mask: ``[B, S]``, 0 on the left where a row is padded; None if nothing is.

    Returns:
        ``[B, S]`` with each row's tokens from slot 0 (what lies behind them means nothing), and lengths int64 ``[B]``.

    Raises:
        ValueError: for a mask of another shape or with other values than 0 and 1, one that is not left-padded, or an
            empty row.
    """
    batch, width = input_ids.shape
    if attention_mask is None:
        return input_ids, torch.full((batch,), width, dtype=torch.long, device=input_ids.device)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}: "
            "accepted is a mask of the same shape"
        )
    mask = attention_mask == 1
    if not torch.equal(mask, attention_mask != 0):
        other = attention_mask[(attention_mask != 0) & ~mask].flatten()[0].item()
        raise ValueError(f"attention_mask holds {other}: accepted are 0 and 1")
    lengths = mask.sum(1)
    columns = torch.arange(width, device=input_ids.device)
    if not torch.equal(mask, columns >= (width - lengths)[:, None]):
        row = int((mask != (columns >= (width - lengths)[:, None])).any(1).nonzero()[0])
        raise ValueError(f"attention_mask of row {row} is not left-padded: accepted are zeros, then ones up to the end")
    if int(lengths.min()) == 0:
        raise ValueError(f"row {int(lengths.argmin())} of input_ids is empty: accepted are prompts of 1 token or more")
    source = columns + (width - lengths)[:, None]
    return input_ids.gather(1, source.clamp(max=width - 1)), lengths
