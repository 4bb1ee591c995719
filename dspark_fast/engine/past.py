"""``past_key_values`` of a call: what target and drafter know of a text, to go on from without reading it again."""

from __future__ import annotations

import weakref

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from dspark_fast.drafters import Context
from dspark_fast.engine.cache import RaggedCache


class Past(Cache):
    """Handed back as ``past_key_values``, and taken again with a prompt that goes on from it.

    A prompt may also part from it somewhere: what they have in common is kept, the rest is read anew. It belongs to one
    model, and no call changes it: several may go on from the same one.

    Args:
        cache: of the target; its lengths say how much is valid.
        tokens: int64 ``[B, C]``, packed: the tokens that the cache is of.
        context: of the drafter, over the same tokens; None if it has none.
        model: the target, which is not kept alive by it.
    """

    def __init__(self, cache: Cache, tokens: torch.Tensor, context: Context | None, model: PreTrainedModel) -> None:
        super().__init__(layers=cache.layers)
        self._model = weakref.ref(model)
        self.cache = cache
        self.tokens = tokens
        self.context = context

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row."""
        return int(self.cache.lengths.max())

    def _as_it_is(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "past_key_values of speculative decoding is not changed: give it with any prompt, "
            "what the two have in common is kept"
        )

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _as_it_is

    def check(self, model: PreTrainedModel, prompts: torch.Tensor) -> None:
        """Refuse what it cannot be of.

        Raises:
            ValueError: for another model, number of rows or device.
        """
        if self._model() is not model:
            raise ValueError("past_key_values is of another model: accepted is what this one handed back")
        if len(self.tokens) != len(prompts):
            raise ValueError(f"past_key_values has {len(self.tokens)} rows, input_ids {len(prompts)}")
        if prompts.device != self.tokens.device:
            raise ValueError(f"past_key_values is on {self.tokens.device}, input_ids on {prompts.device}")

    def common(self, prompts: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
        """How many tokens of each row need not be read again, int64 ``[B]``: a prompt's last one always is."""
        width = min(prompts.shape[1], self.tokens.shape[1])
        same = (prompts[:, :width] == self.tokens[:, :width]).long().cumprod(1).sum(1)
        return torch.minimum(torch.minimum(same, self.cache.lengths), prompt_lengths - 1)


def taken(cache: Cache | None, model: PreTrainedModel, prompts: torch.Tensor, padding: torch.Tensor) -> Past | None:
    """What the caller gave as ``past_key_values``, to go on from; None if there is nothing in it.

    Args:
        cache: of an earlier call, or of transformers; None for none.
        model, prompts, padding: as for :func:`foreign`.

    Raises:
        ValueError: for one that is not of this model or these rows, or does not hold what is needed.
    """
    if cache is None or not cache.get_seq_length():
        return None
    past = cache if isinstance(cache, Past) else foreign(cache, model, prompts, padding)
    past.check(model, prompts)
    return past


def foreign(cache: Cache, model: PreTrainedModel, prompts: torch.Tensor, padding: torch.Tensor) -> Past:
    """A cache that another way of decoding filled, taken as it is: its tokens are absent from the drafter's context.

    Args:
        cache: of transformers, of the first tokens of ``prompts`` with their padding. It is copied and stays as it is.
        model: the target.
        prompts: int64 ``[B, S]``, packed.
        padding: int64 ``[B]``, slots on the left of each row that were no tokens when it was filled.

    Raises:
        ValueError: for a cache that does not hold every token's keys and values, naming its class.
    """
    length, batch = cache.get_seq_length(), len(prompts)
    layers = getattr(cache, "layers", [])
    name = type(cache).__name__
    if not 0 < length < prompts.shape[1]:
        raise ValueError(f"past_key_values has {length} tokens: accepted are 1 to one less than the prompt has")
    ours = RaggedCache.for_model(model, batch, length + 1)
    if len(layers) != len(ours.layers):
        raise ValueError(f"past_key_values is a {name} of {len(layers)} layers, the target has {len(ours.layers)}")
    ours.lengths.copy_(length - padding)
    if int(ours.lengths.min()) < 1:
        raise ValueError("past_key_values holds nothing but padding of some row: accepted is a token of each or more")
    for theirs, layer in zip(layers, ours.layers):
        keys, values = getattr(theirs, "keys", None), getattr(theirs, "values", None)
        if not all(_held(states, batch, length) for states in (keys, values)):
            raise ValueError(
                f"past_key_values is a {name} whose {type(theirs).__name__} does not hold the keys and values of all "
                f"{length} tokens of {batch} rows: accepted are caches that keep them all"
            )
        layer.lazy_initialization(keys, values)
        for row, pad in enumerate(padding.tolist()):
            layer.keys[row, : length - pad] = keys[row, :, pad:length].transpose(0, 1)
            layer.values[row, : length - pad] = values[row, :, pad:length].transpose(0, 1)
    return Past(ours, prompts[:, :length].clone(), None, model)


def _held(states: torch.Tensor | None, batch: int, length: int) -> bool:
    if not isinstance(states, torch.Tensor) or states.layout != torch.strided or states.dim() != 4:
        return False
    return states.shape[0] == batch and states.shape[2] >= length
