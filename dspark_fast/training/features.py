"""The target's states over its own responses: run once and cached on disk, or run again for every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from dspark_fast.engine.taps import tapped
from dspark_fast.training.hidden_cache import CacheWriter, HiddenCache, Sample
from dspark_fast.training.responses import Response

GROUP = 64  # responses written, and batches of like length drawn from, together
TOGETHER = 8  # responses per forward pass, of like length
ROWS = 512  # positions per pass of the LM head: 512 x 49,152 fp32 logits are 100 MB


@dataclass(frozen=True)
class Sequences:
    """Some responses side by side, padded on the right.

    Attributes:
        input_ids: int64 ``[B, L]``.
        loss_mask: bool ``[B, L]``, true on the target's own tokens.
        features: ``[B, L, m*H]``, taps.
        last_hidden: ``[B, L, H]``, after the target's final norm.
        log_total: fp32 ``[B, L]``, log of the softmax denominator over the vocabulary; 0 where no label follows.
            None where nobody computed it.
        top_tokens: int64 ``[B, L, K]``, ``top_probs`` fp32 ``[B, L, K]``: the target's largest probabilities, or None.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last_hidden: torch.Tensor
    log_total: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    top_probs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device, *, top_tokens: int | None = 0) -> Sequences:
        """On a device, with the ``top_tokens`` largest probabilities or without any; None keeps those that there are.

        Raises:
            ValueError: for more than there are.
        """
        parts = dict(vars(self))
        there = 0 if self.top_tokens is None else self.top_tokens.shape[-1]
        top_tokens = there if top_tokens is None else top_tokens
        if top_tokens > there:
            raise ValueError(f"top_tokens is {top_tokens}, the features hold {there}: make them again with more")
        for key in ("top_tokens", "top_probs"):
            parts[key] = parts[key][..., :top_tokens] if top_tokens else None
        # The host need not wait for a copy out of page-locked memory; for one into its own memory it must.
        moved = {key: v if v is None else v.to(device, non_blocking=v.is_pinned()) for key, v in parts.items()}
        return Sequences(**moved)

    def pinned(self) -> Sequences:
        """In page-locked memory, from which a GPU copies while the host goes on; what lies on a GPU stays there."""
        parts = vars(self).items()
        return Sequences(**{key: v if v is None or v.is_cuda else v.pin_memory() for key, v in parts})


class Source(Protocol):
    """Responses with the target's states, by number."""

    #: of each response, in tokens
    lengths: list[int]

    def batch(self, indices: Sequence[int]) -> Sequences:
        """These responses side by side."""

    def own_tokens(self, index: int) -> torch.Tensor:
        """The target's own tokens of one response, int64."""

    def identity(self) -> str:
        """Says which responses these are, in which order."""


class Batches:
    """The responses of a source in batches of like length.

    Args:
        source: of the responses.
        together: sequences per batch.
    """

    def __init__(self, source: Source, together: int = 8) -> None:
        self.source = source
        self.together = together
        self._batches: list[list[int]] = []
        for first in range(0, len(source.lengths), GROUP):
            group = sorted(range(first, min(first + GROUP, len(source.lengths))), key=source.lengths.__getitem__)
            self._batches += [group[i : i + together] for i in range(0, len(group), together)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Sequences:
        return self.source.batch(self._batches[index])

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token stands in the target's own text, int64 ``[V]``."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for index in range(len(self.source.lengths)):
            counts += torch.bincount(self.source.own_tokens(index), minlength=vocab_size)
        return counts


class CachedFeatures:
    """A source that reads a cache on disk.

    Args:
        folder: of the cache.
        layer_ids: the taps to read, a part of those that are there; None reads all.
        limit: take the first so many responses; None takes all.
    """

    def __init__(self, folder: Path, layer_ids: Sequence[int] | None = None, limit: int | None = None) -> None:
        self.cache = HiddenCache(folder, layer_ids)
        self.lengths = self.cache.lengths[:limit]

    def batch(self, indices: Sequence[int]) -> Sequences:
        return _pad([self.cache[index] for index in indices])

    def own_tokens(self, index: int) -> torch.Tensor:
        return self.cache.own_tokens(index)

    def identity(self) -> str:
        names = [name["id"] for name in self.cache.names[: len(self.lengths)]]
        return _digest([*names, *map(str, self.lengths), *map(str, self.cache.layer_ids)])


class LiveFeatures:
    """A source that runs the target for every batch: no disk is needed, every epoch costs a pass of the target.

    Args:
        model: the target.
        responses: all of them; see :func:`usable`.
        layer_ids: the tapped layers.
        max_length: tokens kept of each.
        top_tokens: K of the target's largest probabilities, 0 for none.
        log_total: whether to compute the whole vocabulary's normaliser, which a reduced vocabulary's loss reads.
    """

    def __init__(
        self,
        model: Any,
        responses: Iterable[Response],
        layer_ids: Sequence[int],
        *,
        max_length: int = 1024,
        top_tokens: int = 0,
        log_total: bool = True,
    ) -> None:
        self.model = model
        self.responses = [response for response in responses if usable(response)]
        self.layer_ids, self.max_length = list(layer_ids), max_length
        self.options = {"top_tokens": top_tokens, "log_total": log_total}
        self.lengths = [min(len(response.input_ids), max_length) for response in self.responses]

    def batch(self, indices: Sequence[int]) -> Sequences:
        rows = [self.responses[index] for index in indices]
        return _pad(target_states(self.model, rows, self.layer_ids, self.max_length, **self.options))

    def own_tokens(self, index: int) -> torch.Tensor:
        response = self.responses[index]
        return torch.tensor(response.input_ids[response.start : self.max_length], dtype=torch.long)

    def identity(self) -> str:
        return _digest([*(r.id for r in self.responses), *map(str, self.lengths), *map(str, self.layer_ids)])


def write_features(
    model: Any,
    responses: Iterable[Response],
    folder: Path,
    layer_ids: Sequence[int],
    *,
    max_length: int = 1024,
    top_tokens: int = 0,
    made_for: dict[str, Any] | None = None,
    on_progress: Callable[[int], None] = lambda responses: None,
) -> Path:
    """Write the states of the usable responses to a cache; those that are there already are kept.

    Args:
        model: the target.
        responses: in the order of their file; more may be appended to it between two calls.
        folder: of the cache.
        layer_ids: the tapped layers.
        max_length: tokens kept of each.
        top_tokens: K of the target's largest probabilities to keep, 0 for none.
        made_for: said of the target in the manifest.
        on_progress: told the number of responses done.

    Returns:
        The folder.

    Raises:
        ValueError: for a cache of other layers, another target or other responses.
    """
    hidden = model.get_decoder().config.hidden_size
    made_for = {"max_length": max_length, "min_loss_tokens": 14, **(made_for or {})}
    writer = CacheWriter(folder, made_for, layer_ids, hidden, top_tokens)
    kept = (response for response in responses if usable(response))
    for there, response in zip(writer.ids, islice(kept, len(writer)), strict=False):
        if there != response.id:
            raise ValueError(f"{folder} holds {there} where the responses have {response.id}: delete the folder")
    on_progress(len(writer))
    while group := list(islice(kept, GROUP)):
        by_length = sorted(range(len(group)), key=lambda i: len(group[i].input_ids))
        samples: dict[int, Sample] = {}
        for first in range(0, len(group), TOGETHER):
            chosen = by_length[first : first + TOGETHER]
            rows = [group[i] for i in chosen]
            states = target_states(model, rows, layer_ids, max_length, top_tokens=top_tokens)
            samples |= zip(chosen, states, strict=True)
        writer.append([samples[i] for i in range(len(group))])
        on_progress(len(writer))
    return folder


def usable(response: Response) -> bool:
    """Whether a response is trained on: 14 tokens of its own (two blocks of 7), as the authors have it, but 3 for
    those of the domain ``short``, whose answers are short by nature."""
    own = len(response.input_ids) - response.start
    return own >= (3 if response.domain == "short" else 14)


@torch.no_grad()
def target_states(
    model: Any,
    rows: Sequence[Response],
    layer_ids: Sequence[int],
    max_length: int,
    *,
    top_tokens: int = 0,
    log_total: bool = True,
) -> list[Sample]:
    """One pass of the target over some responses; states are on the CPU if the model is, else where the model is."""
    ids = [response.input_ids[:max_length] for response in rows]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=model.device)
    head = model.get_output_embeddings().weight
    with tapped(model, layer_ids) as taps:
        # Padding is on the right, behind everything that a causal model lets a token see: no mask is needed.
        last = model.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
        features = taps.take()
    samples = []
    for index, (row, response) in enumerate(zip(ids, rows, strict=True)):
        n = len(row)
        own = slice(max(response.start - 1, 0), n)
        extra: dict[str, torch.Tensor] = {}
        if log_total or top_tokens:
            total = torch.zeros(n, device=model.device)
            tops = torch.zeros(n, top_tokens, dtype=torch.int32, device=model.device)
            probs = torch.zeros(n, top_tokens, dtype=torch.float16, device=model.device)
            for start in range(own.start, n, ROWS):
                part = slice(start, min(start + ROWS, n))
                logits = F.linear(last[index, part], head).float()
                total[part] = logits.logsumexp(-1)
                if top_tokens:
                    best = logits.topk(top_tokens)
                    tops[part] = best.indices.int()
                    probs[part] = (best.values - total[part, None]).exp().half()
            extra = {"log_total": total, **({"top_tokens": tops, "top_probs": probs} if top_tokens else {})}
        samples.append(
            Sample(
                id=response.id,
                domain=response.domain,
                input_ids=padded[index, :n].int(),
                loss_mask=(torch.arange(n, device=model.device) >= response.start).to(torch.uint8),
                features=features[index, :n],
                last_hidden=last[index, :n],
                **extra,
            )
        )
    return samples


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a target whose logits are not its LM head on its last hidden state: the loss would learn another law.

    Raises:
        ValueError: for soft caps (Gemma-2) and scales (Granite, Cohere) behind the head.
    """
    ids = torch.arange(1, 17, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    last = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    ours = model.get_output_embeddings()(last).float().softmax(-1)
    theirs = model(input_ids=ids, use_cache=False).logits.float().softmax(-1)
    # L1 distance, 0 to 2: rounding gives a few thousandths in bf16, a soft cap or a scale 0.7 and more.
    if (ours - theirs).abs().sum(-1).max() > 0.1:
        raise ValueError(
            f"{type(model).__name__} changes its logits behind the LM head (soft cap or scale): "
            "no drafter can be trained for it yet"
        )


def _pad(samples: Sequence[Sample]) -> Sequences:
    width = max(len(sample.input_ids) for sample in samples)

    def together(key: str) -> torch.Tensor | None:
        values = [getattr(sample, key) for sample in samples]
        if values[0] is None:
            return None
        out = values[0].new_zeros(len(values), width, *values[0].shape[1:])
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = value
        return out

    top_tokens, top_probs = together("top_tokens"), together("top_probs")
    return Sequences(
        input_ids=together("input_ids").long(),
        loss_mask=together("loss_mask").bool(),
        features=together("features"),
        last_hidden=together("last_hidden"),
        log_total=together("log_total"),
        top_tokens=None if top_tokens is None else top_tokens.long(),
        top_probs=None if top_probs is None else top_probs.float(),
    )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
