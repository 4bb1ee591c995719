"""A key/value cache in which every row has its own length: rows advance by what they accept and never wait."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class RaggedLayer(CacheLayerMixin):
    """K and V of one layer, stored ``[B, C, Hkv, D]`` and handed out as ``[B, Hkv, S, D]`` views."""

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate at the first write, when the shapes are known (MLA's K and V differ in width)."""
        self.keys, self.values = (
            # zeros, not empty: a masked slot has weight 0, and 0 * NaN is NaN
            states.new_zeros(states.shape[0], self._cache.capacity, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, Hkv, T, D]`` at each row's own length; return views of everything up to the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots, end = self._cache.where
        self.keys[rows, slots] = key_states.transpose(1, 2)
        self.values[rows, slots] = value_states.transpose(1, 2)
        return self.keys[:, :end].transpose(1, 2), self.values[:, :end].transpose(1, 2)

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
        capacity: C, tokens per row; must cover the longest row plus one block.
        device: of the lengths.

    Attributes:
        lengths: int64 ``[B]``, valid keys of each row. The driver alone moves it; rolling back is a smaller length.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[RaggedLayer(self) for _ in range(layers)])
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.block = 0

    def begin(self, block: int, longest: int) -> torch.Tensor:
        """Announce a forward pass of ``block`` tokens per row.

        Args:
            block: T.
            longest: the largest of ``lengths``, known to the host.

        Returns:
            Their positions, int64 ``[B, T]``.

        Raises:
            IndexError: if a row would outgrow the capacity.
        """
        if longest + block > self.capacity:
            raise IndexError(f"{longest} + {block} tokens do not fit the cache's capacity of {self.capacity}")
        self.block = block
        slots = self.lengths[:, None] + torch.arange(block, device=self.lengths.device)
        rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        self.where = rows, slots, longest + block
        return slots
