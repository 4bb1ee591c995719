"""A target behind its own cache and its own attention, one row at a time: for what our cache cannot hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from dspark_fast.engine.positions import learned_positions
from dspark_fast.engine.taps import Taps

# Tokens that may wait to be read again together with the next block; more are read at once, on their own.
_MOST_WAITING = 16

# on_features(tokens [B, N], features [B, N, m*H] or None, offsets [B], counts [B]): see Drafter.commit
OnFeatures = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor, torch.Tensor], None]


@dataclass
class OwnState:
    """What a model behind its own cache knows of a row.

    Attributes:
        cache: of the model.
        length: tokens that are known, those that wait included.
        waiting: int64 ``[1, W]``, the last of them, which the cache has not read.
    """

    cache: Cache
    length: int
    waiting: torch.Tensor


class OwnCacheTarget:
    """A transformers model that keeps its state in its own way, rolled back after every block.

    Layers whose cache can be cropped are cropped. A recurrent state cannot be: it is copied before a block, put back
    when not all of the block was taken, and the tokens that were taken wait in front of the next block, so that reading
    them again costs no pass of its own.

    Args:
        model: one that :func:`~dspark_fast.engine.eligibility.choose_target` sends here.
        taps: on its layers.
        cache: to fill, empty; without one the model makes its own.

    Raises:
        ValueError: for a model that takes no cache, or a cache that cannot be rolled back, naming it.
    """

    compiled = False

    def __init__(self, model: PreTrainedModel, taps: Taps, cache: Cache | None = None) -> None:
        self.model = model
        self._taps = taps
        parameters = inspect.signature(model.forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in parameters]
        if not names:
            raise ValueError(f"{type(model).__name__} takes no cache of transformers, so it cannot be rolled back")
        self._argument = names[0]
        self._keeps = "logits_to_keep" in parameters
        self._positions = learned_positions(model)
        self._cache = cache
        self._crops = False
        self._length = 0  # committed tokens, those that wait included
        self._waiting = torch.zeros(1, 0, dtype=torch.long, device=model.device)
        self._block = self._waiting
        self._drafted = 0  # tokens of that block which are new
        self._before: list[dict[str, Any]] = []

    @property
    def memory(self) -> int:
        """Bytes of the model's state, as its cache holds it now."""
        layers = [] if self._cache is None else self._cache.layers
        return sum(tensor.nbytes for layer in layers for value in vars(layer).values() for tensor in _tensors(value))

    @property
    def state(self) -> OwnState:
        """What is known now; between rounds."""
        return OwnState(self._cache, self._length, self._waiting)

    def resume(self, state: OwnState) -> None:
        """Go on from a state of the same model, which is taken over."""
        self._cache, self._length, self._waiting = state.cache, state.length, state.waiting

    @property
    def room(self) -> int | None:
        """Drafts that its learned positions have room for behind the anchor."""
        return None if self._positions is None else self._positions - self._length - 1

    def grow(self, capacity: int) -> None:
        """Nothing to do: the model's cache grows by itself."""

    def prefill(self, tokens: torch.Tensor, counts: torch.Tensor, on_features: OnFeatures) -> torch.Tensor:
        """Read tokens that follow what is cached, in one pass.

        Args:
            tokens: int64 ``[1, N]``.
            counts: int64 ``[1]``, how many of them count, at least 1.
            on_features: told of them, with their features ``[1, N, m*H]`` (None without taps).

        Returns:
            Logits ``[1, 1, V]`` at the last token.

        Raises:
            ValueError: if the model has filled a cache that cannot be rolled back, naming both.
        """
        ids = tokens[:, : int(counts)]
        logits, features = self._read(ids, 1)
        # Not before the first pass: only then does a layer know whether it has a recurrent state, and recording from
        # the start would keep the convolutions' inputs for all of the prompt.
        self._crops = self._can_crop()
        if self._crops:
            self._cache.activate_past_recording()
            self._cache.crop(0)
        on_features(ids, features, torch.full_like(counts, self._length), counts)
        self._length += ids.shape[1]
        return logits

    def verify(self, ids: torch.Tensor, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read anchor and drafts; :meth:`advance` must follow, before anything else is read.

        Args:
            ids: int64 ``[1, T]``.
            end: the ragged target needs it; here it is not used.

        Returns:
            Logits ``[1, T, V]``, features ``[1, T, m*H]`` (None without taps).
        """
        if not self._crops:
            self._before = [_copied(vars(layer)) for layer in self._cache.layers]
        self._block = torch.cat([self._waiting, ids], dim=1)
        self._drafted = ids.shape[1]
        return self._read(ids, ids.shape[1])

    def advance(self, taken: torch.Tensor) -> None:
        """Keep the first ``taken`` (int64 ``[1]``, 0 to T) tokens of the block just read, and roll the rest back."""
        kept = int(taken)
        dropped = self._drafted - kept
        self._length += kept
        if self._crops:
            self._cache.crop(-dropped)  # of 0 as well: layers with a window let go of what has left it
        elif dropped:
            for layer, state in zip(self._cache.layers, self._before):
                vars(layer).update(state)
            self._waiting = self._block[:, : self._block.shape[1] - dropped]
            if self._waiting.shape[1] > _MOST_WAITING:
                self._read(self._waiting[:, :0], 1)
        self._before = []

    def _read(self, ids: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read what waits and ``ids``; returns the last ``keep`` logits, and the features of ``ids`` alone."""
        arguments: dict[str, Any] = {self._argument: self._cache, "use_cache": True, "return_dict": True}
        if self._keeps:
            arguments["logits_to_keep"] = keep
        # No positions and no mask: the model counts from its own cache, as it does when it generates alone.
        output = self.model(input_ids=torch.cat([self._waiting, ids], dim=1), **arguments)
        self._waiting = self._waiting[:, :0]
        self._cache = output.get(self._argument)
        features = self._taps.take() if self._taps.layer_ids else None
        if features is not None:
            features = features[:, features.shape[1] - ids.shape[1] :]
        return output.logits[:, -keep:], features

    def _can_crop(self) -> bool:
        cache, name = self._cache, type(self.model).__name__
        parts = (cache, *cache.layers) if isinstance(cache, Cache) else (cache,)
        # What transformers defines beside its models is written as _copied and crop expect.
        foreign = sorted({type(part).__name__ for part in parts if type(part).__module__ != Cache.__module__})
        if foreign:
            raise ValueError(f"{name} keeps its state in {', '.join(foreign)}, which cannot be rolled back")
        if any(hasattr(layer, "residual_length") for layer in cache.layers):
            raise ValueError(
                f"{name} has a {type(cache).__name__} that quantises anew every few tokens: what it holds then depends "
                "on how the tokens were grouped into passes"
            )
        # A quantised layer says that it can be cropped, but crops only what is not quantised.
        return cache.is_croppable and not any(hasattr(layer, "_quantized_keys") for layer in cache.layers)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """A layer's state as it is now: recurrent states, which come in dicts, are written in place; K and V never are."""
    return {
        name: {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
