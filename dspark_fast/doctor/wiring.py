"""The drafter's packed pass with one connection changed: what it would say if it were wired another way."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F

from dspark_fast.doctor.texts import Reading
from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.taps import decoder_layers
from dspark_fast.reference.layers import rotate
from dspark_fast.reference.markov import markov_bias
from dspark_fast.training.blocks import split_blocks


@dataclass(frozen=True)
class Wiring:
    """Changes to how a drafter is wired; the defaults change nothing.

    Attributes:
        layer: taps so many layers later.
        norm: what the taps pass through: ``final``, the target's last norm, or ``next``, the one of the next layer.
        moved: features stand so many tokens later.
        seen: the context ends so many tokens later.
        slot: each slot's logits are for the token so many later.
        theta: base of the rotary frequencies, None for the configured one.
        offset: the block stands so many positions later.
        mask: id of the mask token, None for the configured one.
        markov: ``off``, ``swapped`` (W1 and W2), or ``columns`` or ``rows`` and the order that they are stored in.
        target_weights: the target's own embedding and LM head.
        shuffled: the features of another text.
    """

    layer: int = 0
    norm: str | None = None
    moved: int = 0
    seen: int = 0
    slot: int = 0
    theta: float | None = None
    offset: int = 0
    mask: int | None = None
    markov: tuple[str, ...] = ()
    target_weights: bool = False
    shuffled: bool = False


def layers_needed(taps: list[int], depth: int) -> set[int]:
    """The taps, and their neighbours as far as there are any."""
    return {tap + shift for tap in taps for shift in (-1, 0, 1) if -1 <= tap + shift < depth}


def final_norm(model: Any) -> Any:
    """The target's norm before its LM head; None if it goes by no name that is known."""
    decoder = model.get_decoder()
    return next(
        (getattr(decoder, name) for name in ("norm", "final_layernorm", "ln_f") if hasattr(decoder, name)), None
    )


@torch.no_grad()
def hidden_states(model: Any, draft: DSparkDraft, reading: Reading, wiring: Wiring) -> torch.Tensor:
    """Every block of a reading in one pass, as :func:`~dspark_fast.training.blocks.run_blocks` but for the changes.

    Returns:
        ``[B, A, T, H]``, final-normed.
    """
    config = draft.config
    valid = reading.counted[..., 0]
    mask = config.mask_token_id if wiring.mask is None else wiring.mask
    batch, length = reading.input_ids.shape
    count, block = reading.anchors.shape[1], config.block_size
    ids = reading.input_ids.new_full((batch, count, block), mask)
    ids[..., 0] = reading.input_ids.gather(1, reading.anchors)
    positions = reading.anchors[..., None] + wiring.offset + torch.arange(block, device=ids.device)
    positions = positions.flatten(1)
    context = draft.context(_features(model, draft, reading, wiring))
    steps = torch.arange(length, device=ids.device)[None].expand(batch, -1)
    context_angles = draft.rotary_emb(context, steps)
    block_angles = draft.rotary_emb(context, positions)
    attention = split_blocks(length, reading.anchors + wiring.seen, valid, block)

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        module = draft.layers[index].self_attn
        context_k, context_v = module.keys_values(context)
        context_k = rotate(module.k_norm(context_k), *context_angles)
        return attention(q, context_k, context_v, rotate(module.k_norm(k), *block_angles), v)

    return draft(ids.flatten(1), positions, attend).view(batch, count, block, -1)


def _features(model: Any, draft: DSparkDraft, reading: Reading, wiring: Wiring) -> torch.Tensor:
    """``[B, L, m*H]``."""
    parts = []
    for tap in draft.config.target_layer_ids:
        part = reading.layers[tap + wiring.layer]
        if wiring.norm is not None:
            norm = final_norm(model) if wiring.norm == "final" else decoder_layers(model)[tap + 1].input_layernorm
            part = norm(part)
        parts.append(part)
    features = torch.cat(parts, dim=-1)
    if wiring.shuffled:
        features = features.roll(1, dims=0) if len(features) > 1 else features.flip(1)
    return features.roll(wiring.moved, dims=1)


def rewired(model: Any, draft: DSparkDraft, wiring: Wiring) -> DSparkDraft:
    """A drafter that shares all modules but those that the wiring replaces."""
    if wiring.theta is None and not wiring.target_weights:
        return draft
    other = copy.copy(draft)
    for name in ("_modules", "_buffers"):
        object.__setattr__(other, name, dict(getattr(draft, name)))
    if wiring.theta is not None:
        dim = draft.config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=draft.device) / dim
        other.rotary_emb = copy.deepcopy(draft.rotary_emb)
        for module in other.rotary_emb.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq = 1.0 / wiring.theta**exponents
    if wiring.target_weights:
        other.share(model.get_input_embeddings(), model.get_output_embeddings())
        other.take_head_rows()
    return other


def logits(
    draft: DSparkDraft, hidden: torch.Tensor, previous: torch.Tensor, wiring: Wiring, columns: torch.Tensor | None
) -> torch.Tensor:
    """What each slot says given the right tokens before it: ``[..., T, V]``, or only these columns, in fp32.

    Args:
        hidden: ``[..., T, H]``; previous: int64 ``[..., T]``; columns: int64, None for all.
    """
    head = draft.head_rows if draft.head_rows is not None else getattr(draft.tied("lm_head"), "weight", None)
    if columns is None or head is None or not head.is_floating_point():
        base = draft.logits(hidden).float()
        base = base if columns is None else base[..., columns]
    else:
        base = F.linear(hidden.to(head.dtype), head[columns]).float()
    w1, w2 = draft.markov_weights()
    if w1 is None or wiring.markov == ("off",):
        return base
    if wiring.markov == ("swapped",):
        w1, w2 = w2, w1
    options = _reordered(draft, wiring.markov)
    return base + markov_bias(previous, w1, w2 if columns is None else w2[columns], hidden=hidden, **options).float()


def stored_orders(draft: DSparkDraft) -> list[tuple[str, ...]]:
    """The other orders in which the Markov head's inputs and outputs could be stored: ``Wiring.markov``."""
    found = [(kind, *order) for kind, parts in _parts(draft).items() for order in list(permutations(parts))[1:]]
    w1, w2 = draft.markov_weights()
    if w1 is not None and w1.shape == w2.shape:
        found.append(("swapped",))
    return found if w1 is None else [*found, ("off",)]


def _parts(draft: DSparkDraft) -> dict[str, dict[str, int]]:
    """What the Markov head's extra weight is made of, as it should be: name and width, by axis."""
    rank, hidden = draft.config.markov_rank, draft.config.hidden_size
    if not rank or draft.config.markov_head_type == "vanilla":
        return {}
    if draft.config.markov_head_type == "gated":
        return {"columns": {"hidden": hidden, "embedding": rank}}
    columns = {"state": rank, "embedding": rank, "hidden": hidden}
    return {"columns": columns, "rows": {"gate": rank, "candidate": rank, "output": rank}}


def _reordered(draft: DSparkDraft, order: tuple[str, ...]) -> dict[str, Any]:
    """The head's options, its extra weight taken to be stored in another order."""
    options = draft.markov_options()
    if len(order) < 2:
        return options
    kind, *stored = order
    parts = _parts(draft)[kind]
    axis = 1 if kind == "columns" else 0

    def put_right(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        pieces = dict(zip(stored, tensor.split([parts[name] for name in stored], dim=dim), strict=True))
        return torch.cat([pieces[name] for name in parts], dim=dim)

    options["head_weight"] = put_right(options["head_weight"], axis)
    if kind == "rows":
        options["head_bias"] = put_right(options["head_bias"], 0)
    return options
