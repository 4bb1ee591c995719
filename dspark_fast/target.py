"""The target during generation: packed prefill and verify passes through the ragged cache, with taps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from dspark_fast.attention import attending, check_attention, ragged
from dspark_fast.cache import RaggedCache
from dspark_fast.taps import Taps, tapped


class Target:
    """A transformers model being driven; made by :func:`driven`."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, taps: Taps) -> None:
        self.model = model
        self.cache = cache
        self._taps = taps

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the prompts.

        Args:
            prompts: int64 ``[B, S]``, packed: each row's tokens from slot 0, anything after them.
            lengths: int64 ``[B]`` of each row, at least 1.

        Returns:
            Logits ``[B, 1, V]`` at each row's last token, features ``[B, S, m*H]`` (None without taps). A padded
            row's features past its length mean nothing.
        """
        positions = self.cache.begin(prompts.shape[1], 0)
        # The LM head runs only at the columns where some row ends: at most B of them.
        columns, which = (lengths - 1).unique(return_inverse=True)
        logits = self._forward(prompts, positions, columns)
        self.cache.lengths.copy_(lengths)
        rows = torch.arange(len(lengths), device=lengths.device)
        return logits[rows, which][:, None], self._features()

    def verify(self, ids: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read anchor and drafts; the cache's lengths stay, so until they are moved all of it is rolled back.

        Args:
            ids: int64 ``[B, T]``.
            longest: the largest cache length, known to the host.

        Returns:
            Logits ``[B, T, V]``, features ``[B, T, m*H]`` (None without taps).
        """
        logits = self._forward(ids, self.cache.begin(ids.shape[1], longest), 0)
        return logits, self._features()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
        with attending(self.cache):
            return self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
                return_dict=True,
            ).logits

    def _features(self) -> torch.Tensor | None:
        return self._taps.take() if self._taps.layer_ids else None


@contextmanager
def driven(model: PreTrainedModel, layer_ids: Sequence[int], batch: int, capacity: int) -> Iterator[Target]:
    """Drive ``model`` with a ragged cache and taps for the time of a ``with`` block; it is as before afterwards.

    Raises:
        ValueError: if the model cannot be driven so, naming why.
    """
    check_attention(model)
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    cache = RaggedCache(depth, batch, capacity, model.device)
    with ragged(model), tapped(model, layer_ids) as taps:
        yield Target(model, cache, taps)
