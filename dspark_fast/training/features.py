"""The target's hidden states over its own responses, computed once and kept in safetensors shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from dspark_fast.taps import tapped
from dspark_fast.training.responses import Response

SHARD = 64  # responses per shard
HELD_OUT_SHARD = 16  # of the 2 % held out
TOGETHER = 8  # responses per forward pass, of like length
ROWS = 512  # positions per pass of the LM head: 512 x 49,152 fp32 logits are 100 MB


@dataclass(frozen=True)
class Sequences:
    """Some responses side by side, padded on the right.

    Attributes:
        input_ids: int64 ``[B, L]``.
        loss_mask: bool ``[B, L]``, true on the target's own tokens.
        features: bf16 ``[B, L, m*H]``, taps.
        last_hidden: bf16 ``[B, L, H]``, after the target's final norm.
        log_total: fp32 ``[B, L]``, log of the softmax denominator over the vocabulary; 0 where no label follows.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last_hidden: torch.Tensor
    log_total: torch.Tensor


def write_features(
    model: Any,
    responses: Iterable[Response],
    folder: Path,
    layer_ids: Sequence[int],
    *,
    max_length: int = 1024,
    on_progress: Callable[[int], None] = lambda responses: None,
) -> list[Path]:
    """Write shards of features, training and held-out responses apart; shards that exist are kept.

    Responses with fewer than 14 tokens of their own (two blocks of 7) are dropped, as the authors do, but for those of
    the domain ``short``, whose answers are short by nature.

    Args:
        model: the target.
        responses: in the order of their file, so that a shard's number says what it holds.
        folder: of the shards.
        layer_ids: the tapped layers.
        max_length: tokens kept of each.
        on_progress: told the number of responses done.

    Returns:
        The shards, whole: a response is written when its shard is full.

    Raises:
        ValueError: for a shard that exists and was made for other layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    written = []
    made_for = f"layers {list(layer_ids)}, {max_length} tokens"
    responses = list(responses)
    for name, chosen, size in (("train", False, SHARD), ("held-out", True, HELD_OUT_SHARD)):
        kept = (r for r in responses if r.held_out == chosen and _usable(r))
        for number, group in enumerate(_groups(kept, size)):
            path = folder / f"{name}-{number:05d}.safetensors"
            if path.is_file():
                _check_shard(path, made_for)
            else:
                shard = _shard(model, group, layer_ids, max_length)
                aside = path.with_suffix(f".{os.getpid()}")
                save_file(shard, aside, metadata={"made_for": made_for})
                os.replace(aside, path)
            written.append(path)
            done += len(group)
            on_progress(done)
    return written


def _check_shard(path: Path, made_for: str) -> None:
    with safe_open(path, framework="pt") as file:
        theirs = (file.metadata() or {}).get("made_for", made_for)
    if theirs != made_for:
        raise ValueError(f"{path} was made for {theirs}, asked for are {made_for}: use another folder or delete it")


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


def _usable(response: Response) -> bool:
    own = len(response.input_ids) - response.start
    return own >= (3 if response.domain == "short" else 14)


def _groups(responses: Iterable[Response], size: int) -> Iterator[list[Response]]:
    """Whole groups only; what is left over waits for more."""
    iterator = iter(responses)
    while len(group := list(islice(iterator, size))) == size:
        yield group


@torch.no_grad()
def _shard(model: Any, group: list[Response], layer_ids: Sequence[int], max_length: int) -> dict[str, torch.Tensor]:
    """One shard: the sequences flattened one behind the other, shortest first, with their offsets."""
    group = sorted(group, key=lambda response: len(response.input_ids))
    parts: dict[str, list[torch.Tensor]] = {
        key: [] for key in ("input_ids", "loss_mask", "features", "last_hidden", "log_total")
    }
    head = model.get_output_embeddings().weight
    with tapped(model, layer_ids) as taps:
        for first in range(0, len(group), TOGETHER):
            rows = group[first : first + TOGETHER]
            ids = [response.input_ids[:max_length] for response in rows]
            width = max(map(len, ids))
            padded = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=model.device)
            # Padding is on the right, behind everything that a causal model lets a token see: no mask is needed.
            last = model.get_decoder()(input_ids=padded, use_cache=False).last_hidden_state
            features = taps.take()
            for index, (row, response) in enumerate(zip(ids, rows, strict=True)):
                n = len(row)
                log_total = torch.zeros(n)
                own = slice(max(response.start - 1, 0), n)
                log_total[own] = torch.cat(
                    [F.linear(part, head).float().logsumexp(-1).cpu() for part in last[index, own].split(ROWS)]
                )
                parts["input_ids"].append(torch.tensor(row, dtype=torch.int32))
                parts["loss_mask"].append(torch.arange(n) >= response.start)
                parts["features"].append(features[index, :n].bfloat16().cpu())
                parts["last_hidden"].append(last[index, :n].bfloat16().cpu())
                parts["log_total"].append(log_total)
    offsets = torch.tensor([0] + [len(row) for row in parts["input_ids"]]).cumsum(0)
    return {"offsets": offsets, **{key: torch.cat(value) for key, value in parts.items()}}


class FeatureStore:
    """Batches of sequences of like length from feature shards, read from disk as they are asked for.

    Args:
        shards: paths from :func:`write_features`.
        together: sequences per batch.
    """

    def __init__(self, shards: Sequence[Path], together: int = 8) -> None:
        self.shards = list(shards)
        self.together = together
        self._batches: list[tuple[int, int]] = []
        for index, shard in enumerate(self.shards):
            with safe_open(shard, framework="pt") as file:
                count = file.get_slice("offsets").get_shape()[0] - 1
            self._batches += [(index, first) for first in range(0, count, together)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Sequences:
        """One batch, the sequences padded on the right with zeros."""
        shard, first = self._batches[index]
        with safe_open(self.shards[shard], framework="pt") as file:
            offsets = file.get_tensor("offsets").tolist()[first : first + self.together + 1]
            spans = list(pairwise(offsets))
            start, width = offsets[0], max(b - a for a, b in spans)
            values = {}
            for key in ("input_ids", "loss_mask", "features", "last_hidden", "log_total"):
                flat = file.get_slice(key)[start : offsets[-1]]
                out = flat.new_zeros(len(spans), width, *flat.shape[1:])
                for row, (a, b) in enumerate(spans):
                    out[row, : b - a] = flat[a - start : b - start]
                values[key] = out
        values["input_ids"] = values["input_ids"].long()
        return Sequences(**values)

    def token_counts(self, vocab_size: int) -> torch.Tensor:
        """How often each token stands in the target's own text, int64 ``[V]``."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for shard in self.shards:
            with safe_open(shard, framework="pt") as file:
                own = file.get_tensor("input_ids")[file.get_tensor("loss_mask")].long()
            counts += torch.bincount(own, minlength=vocab_size)
        return counts
