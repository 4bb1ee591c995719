"""A target and what drafts for it, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark_fast.autoregressive import AutoregressiveDrafter, first_layers
from dspark_fast.pairs import best_dtype, chosen_device, draft_name, load
from dspark_fast.targets import load_target


@dataclass(frozen=True)
class Pair:
    """Both models, loaded.

    Attributes:
        model: the target.
        drafter: a :class:`~dspark_fast.draft.DSparkDraft`, or an
            :class:`~dspark_fast.autoregressive.AutoregressiveDrafter`.
        tokenizer: the target's.
        name: of the drafter, for people.
    """

    model: Any
    drafter: Any
    tokenizer: Any
    name: str


def load_pair(
    model: str,
    draft: str | None = None,
    *,
    autoregressive: str | None = None,
    layers: int | None = None,
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Pair:
    """Load a target with a DSpark drafter, or with an autoregressive one.

    Args:
        model: the target: a known model, a folder or a hub name.
        draft: the DSpark drafter's folder or hub name; None: the one that is known for the target.
        autoregressive: a smaller model of the same vocabulary, which drafts in its place.
        layers: draft with so many of the target's own first layers in its place.
        block_size: drafts per round of an autoregressive drafter; None: 5.
        dtype: of the target; None: see :func:`dspark_fast.pairs.best_dtype`.
        device: None: the GPU if there is one.

    Raises:
        ValueError: for more than one drafter, a block size for a DSpark one, models that do not fit each other.
        TargetError: a model cannot be had.
    """
    given = {"draft": draft, "autoregressive": autoregressive, "layers": layers}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are given: accepted is one drafter")
    if autoregressive is None and layers is None:
        if block_size is not None:
            raise ValueError(f"block_size is {block_size}: a DSpark drafter has its own, accepted is none")
        target, drafter, tokenizer = load(model, draft=draft, dtype=dtype, device=device)
        return Pair(target, drafter, tokenizer, draft_name(model, draft))
    block_size = 5 if block_size is None else block_size
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: accepted is 1 or more")
    chosen = chosen_device(device)
    kind = best_dtype(chosen) if dtype is None else dtype
    target, tokenizer = load_target(model, kind, chosen)
    if autoregressive is None:
        drafter = AutoregressiveDrafter(first_layers(target, layers), block_size=block_size)
        name = f"the target's first {layers} layers"
    else:
        drafter = AutoregressiveDrafter(load_target(autoregressive, kind, chosen)[0], block_size=block_size)
        name = autoregressive
    drafter.check(target)
    return Pair(target, drafter, tokenizer, name)
