"""The target during generation: packed prefill and verify passes through the ragged cache, with taps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Protocol

import torch
from transformers import Cache, PreTrainedModel

from dspark_fast.engine.attention import attending, check_attended, ragged
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.compiled import chosen
from dspark_fast.engine.own_cache import OnFeatures, OwnCacheTarget
from dspark_fast.engine.positions import learned_positions
from dspark_fast.engine.taps import Taps, tapped

#: Tokens per row and pass while a prompt is read: long prompts come in chunks, so that neither the scores of a pass nor
#: its hidden states grow with the square of the prompt, or with all of it.
PREFILL_CHUNK = 2048


class Target(Protocol):
    """A model being driven.

    Attributes:
        compiled: whether passes over whole blocks have a fixed shape.
        room: how many drafts a block may have; None if it can take any number.
    """

    compiled: bool
    room: int | None

    def prefill(self, tokens: torch.Tensor, counts: torch.Tensor, on_features: OnFeatures) -> torch.Tensor:
        """Read each row's first ``counts`` of ``tokens``; returns logits ``[B, 1, V]`` at each row's last one."""

    def verify(self, ids: torch.Tensor, end: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read anchor and drafts ``[B, T]``; returns logits ``[B, T, V]`` and features ``[B, T, m*H]``."""

    def advance(self, taken: torch.Tensor) -> None:
        """Keep the first ``taken`` ``[B]`` tokens of that pass, and roll the rest back."""

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row."""

    @property
    def memory(self) -> int:
        """Bytes that its cache takes."""


class RaggedTarget:
    """A transformers model behind our cache and our attention, any number of rows, each of its own length.

    Attributes:
        finished: bool ``[B]``, rows that :meth:`verify` need not attend for; None for none.
    """

    room = None
    finished: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, taps: Taps) -> None:
        self.model = model
        self.cache = cache
        self._taps = taps
        self._checked = False
        self._compiled: set[int] = set()
        self._positions = learned_positions(model)

    @property
    def memory(self) -> int:
        return self.cache.memory

    def grow(self, capacity: int) -> None:
        self.cache.grow(capacity)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 ``[n]``."""
        self.cache.select(rows)

    def prefill(self, tokens: torch.Tensor, counts: torch.Tensor, on_features: OnFeatures) -> torch.Tensor:
        """Read tokens that follow what is cached.

        Args:
            tokens: int64 ``[B, N]``, packed: each row's tokens from slot 0, anything after them.
            counts: int64 ``[B]`` of each row, at least 1.
            on_features: told of every chunk; a row's features past its count mean nothing.

        Returns:
            Logits ``[B, 1, V]`` at each row's last token.
        """
        cache, offsets, ends = self.cache, self.cache.lengths.tolist(), counts.tolist()
        last = (cache.lengths + counts - 1)[:, None]
        logits = None
        for start in range(0, max(ends), PREFILL_CHUNK):
            ids = tokens[:, start : min(start + PREFILL_CHUNK, max(ends))]
            width = ids.shape[1]
            reading = max(offset + min(start, count) + width for offset, count in zip(offsets, ends) if count > start)
            # Padding stands no further than its row: some RoPE changes with the largest position of a pass, in all.
            positions = torch.minimum(cache.begin(width, min(reading, cache.capacity), padded=True), last)
            if self._positions is not None:  # a drafter's may be fewer: behind them it guesses
                positions = positions.clamp(max=self._positions - 1)
            # The LM head runs only at the columns where some row ends: at most B of them.
            ending = [row for row, count in enumerate(ends) if start < count <= start + width]
            columns = sorted({ends[row] - 1 - start for row in ending}) or [0]
            out = self._forward(ids, positions, torch.tensor(columns, device=ids.device))
            logits = out.new_zeros(len(ends), 1, out.shape[-1]) if logits is None else logits
            for row in ending:
                logits[row, 0] = out[row, columns.index(ends[row] - 1 - start)]
            taken = (counts - start).clamp(0, width)
            on_features(ids, self._features(), cache.lengths.clone(), taken)
            cache.lengths += taken
        return logits

    def verify(self, ids: torch.Tensor, end: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read anchor and drafts; the cache's lengths stay, so until :meth:`advance` all of it is rolled back.

        Args:
            ids: int64 ``[B, T]``.
            end: as for :meth:`~dspark_fast.engine.cache.RaggedCache.begin`.

        Returns:
            Logits ``[B, T, V]``, features ``[B, T, m*H]`` (None without taps).
        """
        return self._compiled_pass(ids) if ids.shape[1] in self._compiled else self._pass(ids, end)

    @property
    def compiled(self) -> bool:
        return bool(self._compiled)

    def compile(self, batch: int, lengths: Collection[int], longest: int) -> bool:
        """Compile the passes over blocks of these lengths, where that is faster; after the prefill.

        They are to run inside :func:`~dspark_fast.engine.compiled.compiling`. Their shapes are fixed: from here on
        ``end`` counts for nothing there, and the cache must not grow. The longest decides: shorter ones alone are not
        worth that.

        Args:
            batch: rows.
            lengths: of the blocks.
            longest: tokens of the longest row, which a plain pass reads.

        Returns:
            Whether the longest is compiled.
        """
        cache, device = self.cache, self.cache.lengths.device
        for length in sorted(lengths, reverse=True):
            ids = torch.zeros(batch, length, dtype=torch.long, device=device)
            shape = (batch, length, cache.capacity, tuple(self._taps.layer_ids), str(self.model.dtype), str(device))
            # What these passes write lies behind every row's length: it is rolled back already.
            plainly = partial(self._pass, ids, min(longest + length, cache.capacity))
            # Behind fixed shapes finished rows stay and all drafts are verified, which in a batch on a CPU costs more.
            worth = 1.15 if batch > 1 and device.type == "cpu" else 1.0
            quickly = partial(self._compiled_pass, ids)
            if chosen(self.model, shape, plainly, quickly, what="the target's pass", worth=worth):
                self._compiled.add(length)
            elif not self._compiled:
                break
        return self.compiled

    def _pass(self, ids: torch.Tensor, end: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = self.cache.begin(ids.shape[1], end, self.finished)
        if self._positions is not None:  # drafts that can no longer be committed may stand behind the last one
            positions = positions.clamp(max=self._positions - 1)
        return self._forward(ids, positions, 0), self._features()

    def _compiled_pass(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.cache.masks.clear()  # a trace holds only for the masks that it found, and the prefill's have other widths
        return _traced()(self, ids, None)

    def advance(self, taken: torch.Tensor) -> None:
        self.cache.lengths += taken

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
        with attending(self.cache) as running:
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
                return_dict=True,
            )
        if not self._checked:
            check_attended(self.model, running)
            self._checked = True
        return output.logits

    def _features(self) -> torch.Tensor | None:
        return self._taps.take() if self._taps.layer_ids else None


@cache
def _traced() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Called with the hooks of the taps set, so they are in the trace. Made late: it imports half a compiler."""
    return torch.compile(RaggedTarget._pass, fullgraph=True, dynamic=False)


@contextmanager
def driven(model: PreTrainedModel, layer_ids: Sequence[int], cache: Cache | None) -> Iterator[Target]:
    """Drive ``model`` with ``cache`` and taps for the time of a ``with`` block; it is as before afterwards.

    Behind any other cache than ours, or none, the model keeps its own attention and, without one, its own cache
    (:func:`~dspark_fast.engine.eligibility.choose_target` says which).

    Raises:
        ValueError: if the model does not take its attention from transformers' interface, but should take ours.
    """
    with ExitStack() as stack:
        ours = isinstance(cache, RaggedCache)
        if ours:
            stack.enter_context(ragged(model))
        # A forward that was compiled before does not run hooks that are set now (measured: the taps stay empty).
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        taps = stack.enter_context(tapped(model, layer_ids))
        yield RaggedTarget(model, cache, taps) if ours else OwnCacheTarget(model, taps, cache)
