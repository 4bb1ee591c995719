"""A key/value cache in which every row has its own length: rows advance by what they accept and never wait."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """K and V of one layer, stored ``[B, C, Hkv, D]`` and handed out as ``[B, Hkv, S, D]`` views."""

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self._cache = cache
        self._copied = False  # from a cache that need not be this target's; nothing of the target's own is in it yet

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate at the first write, when the shapes are known (MLA's K and V differ in width)."""
        self.keys, self.values = (
            # zeros, not empty: a masked slot has weight 0, and 0 * NaN is NaN
            states.new_zeros(states.shape[0], self._cache.capacity, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Move to buffers of ``capacity`` tokens per row."""
        if self.is_initialized:
            self.keys, self.values = (widened(states, 1, capacity) for states in (self.keys, self.values))

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows alone, int64 ``[n]``."""
        if self.is_initialized:
            self.keys, self.values = (states[rows.to(states.device)] for states in (self.keys, self.values))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, Hkv, T, D]`` at each row's own length; return views of everything up to the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self._copied:
            self._check(key_states, value_states)
            self._copied = False
        where, end = self._cache.where
        if isinstance(where[0], torch.Tensor) and where[0].device != key_states.device:
            where = tuple(index.to(key_states.device) for index in where)  # a target that is spread over several GPUs
        self.keys[where] = key_states.transpose(1, 2)
        self.values[where] = value_states.transpose(1, 2)
        return self.keys[:, :end].transpose(1, 2), self.values[:, :end].transpose(1, 2)

    def copy_(self, source: RaggedLayer, longest: int) -> None:
        """Take the first ``longest`` tokens of each row of another layer."""
        keys, values = source.keys.transpose(1, 2), source.values.transpose(1, 2)
        if self.is_initialized:
            self._check(keys, values)
        else:
            self.lazy_initialization(keys, values)
            self._copied = True
        self.keys[:, :longest] = source.keys[:, :longest]
        self.values[:, :longest] = source.values[:, :longest]

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse ``[B, Hkv, T, D]`` of other heads, width, dtype or device than what is here."""
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            pair = [
                f"{heads} heads of {width} in {one.dtype} on {one.device}"
                for one, heads, width in (
                    (kept, kept.shape[2], kept.shape[3]),
                    (states, states.shape[1], states.shape[3]),
                )
            ]
            if pair[0] != pair[1]:
                raise ValueError(f"past_key_values has {pair[0]}, the target {pair[1]}: accepted is what it has itself")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise RuntimeError("the ragged cache has no common length to build a mask from: lengths are per row")

    def get_seq_length(self) -> int:
        raise RuntimeError("the ragged cache has no common length: pass position_ids to the model")

    def get_max_length(self) -> int:
        return self._cache.capacity


class RaggedCache(Cache):
    """The target's cache during generation.

    Args:
        layers: number of decoder layers.
        batch: B.
        capacity: C, tokens per row; must exceed the longest row and one block.
        device: of the lengths.

    Attributes:
        lengths: int64 ``[B]``, valid keys of each row. The driver alone moves it; rolling back is a smaller length.
        reach: int64 ``[B]``, keys that the pass announced last may read in each row, its own block's included; None
            where some of its tokens are padding, which may stand behind all keys at hand.
        masks: what the attention of one pass shares among its layers; emptied by :meth:`begin`.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[RaggedLayer(self) for _ in range(layers)])
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.reach: torch.Tensor | None = None
        self.masks: dict[object, torch.Tensor] = {}

    @classmethod
    def for_model(cls, model: PreTrainedModel, batch: int, capacity: int) -> RaggedCache:
        """One for each decoder layer of ``model``."""
        return cls(model.config.get_text_config(decoder=True).num_hidden_layers, batch, capacity, model.device)

    @property
    def memory(self) -> int:
        """Bytes of K and V."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row; what is cached stays."""
        for layer in self.layers:
            layer.grow(capacity)
        self.capacity = capacity

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows alone, int64 ``[n]``: what a pass costs is of them."""
        for layer in self.layers:
            layer.select(rows)
        self.lengths = self.lengths[rows]
        self.masks.clear()

    def copy_(self, other: RaggedCache, lengths: torch.Tensor) -> None:
        """Take the first ``lengths`` ``[B]`` tokens of each row of another cache, which has no more than fit."""
        longest = int(lengths.max())
        for layer, source in zip(self.layers, other.layers):
            layer.copy_(source, longest)
        self.lengths.copy_(lengths)

    def begin(
        self, block: int, end: int | None, finished: torch.Tensor | None = None, *, padded: bool = False
    ) -> torch.Tensor:
        """Announce a forward pass of ``block`` tokens per row.

        A row whose tokens here are padding may stand so far that they do not fit: they all go to its last slot, which
        is past every row's length.

        Args:
            block: T.
            end: keys that the longest row has after the pass, known to the host, or at least as many; None where the
                host must not ask (inside a captured graph): then all of the capacity is handed out. Of rows that are
                finished it need not speak.
            finished: bool ``[B]``, rows whose output nobody wants: kernels read none of their keys and give zeros.
            padded: some of the tokens may be padding, of which ``end`` need not speak either.

        Returns:
            Their positions, int64 ``[B, T]``.

        Raises:
            IndexError: if a row would outgrow the capacity.
        """
        if end is not None and end > self.capacity:
            raise IndexError(f"{end} tokens do not fit the cache's capacity of {self.capacity}")
        device = self.lengths.device
        slots = (self.lengths[:, None] + torch.arange(block, device=device)).clamp(max=self.capacity - 1)
        rows = torch.arange(len(self.lengths), device=device)[:, None]
        where: tuple[torch.Tensor, torch.Tensor] | tuple[slice, slice] = rows, slots
        if end is not None and len(rows) == 1 and device.type == "cpu":
            first = int(self.lengths)  # a slice is written sooner than scattered slots
            if first + block <= self.capacity:
                where = slice(None), slice(first, first + block)
        self.where = where, self.capacity if end is None else end
        self.reach = None if padded else self.lengths + block
        if self.reach is not None and finished is not None:
            self.reach = self.reach.masked_fill(finished, 0)
        self.masks.clear()
        return slots


def widened(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """A copy of ``tensor`` whose ``axis`` has ``size``, zeros behind what it held."""
    shape = list(tensor.shape)
    held, shape[axis] = shape[axis], size
    wide = tensor.new_zeros(shape)
    wide.narrow(axis, 0, held).copy_(tensor)
    return wide
