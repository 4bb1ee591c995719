"""One timed call: its tokens, when the first came, and what its rounds did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

from dspark_fast import first_token


@dataclass
class Rounds:
    """Draft-verify-commit rounds of one call, or of several added up; seconds are wall clock after the first token.

    Attributes:
        rounds: how many.
        row_rounds: the same, each row's own counted.
        committed: tokens that they committed, bonus included, before any was dropped at the length limit.
        proposed, accepted: by block position, drafts that were verified, and that were accepted with all before them;
            empty where a way does not say.
        drafting, verifying: seconds of the drafter and of the target; None where they cannot be told apart.
        together: seconds of both.
        plain_steps: steps of one token, without drafts, and ``plain`` their seconds.
    """

    rounds: int = 0
    row_rounds: int = 0
    committed: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafting: float | None = 0.0
    verifying: float | None = 0.0
    together: float = 0.0
    plain_steps: int = 0
    plain: float = 0.0

    def __add__(self, other: Rounds) -> Rounds:
        split = self.drafting is not None and other.drafting is not None
        return Rounds(
            self.rounds + other.rounds,
            self.row_rounds + other.row_rounds,
            self.committed + other.committed,
            _sums(self.proposed, other.proposed),
            _sums(self.accepted, other.accepted),
            self.drafting + other.drafting if split else None,
            self.verifying + other.verifying if split else None,
            self.together + other.together,
            self.plain_steps + other.plain_steps,
            self.plain + other.plain,
        )

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per round, pooled over rounds and rows; NaN without rounds."""
        return self.committed / self.row_rounds if self.row_rounds else math.nan


@dataclass
class Call:
    """What one call gave.

    Attributes:
        tokens: new tokens, int64 ``[B, n]`` on the CPU.
        seconds: of the whole call.
        first: seconds until the first new token was handed over.
        after: seconds from there to the end.
        counted: new tokens of each row that came in ``after``; n - 1, or fewer where several came first.
        rounds: what speculation did; None where a way does not speculate or does not say.
        compiling: seconds of compilation, which are in ``seconds``.
    """

    tokens: torch.Tensor
    seconds: float
    first: float
    after: float
    counted: int
    rounds: Rounds | None = None
    compiling: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second after the first, of all rows."""
        return len(self.tokens) * self.counted / self.after


def timed(decode: Callable[[BaseStreamer], torch.Tensor], input_ids: torch.Tensor) -> tuple[Call, torch.Tensor, float]:
    """Time ``decode(streamer)``, which returns ``[B, S + n]``; also that output, and when the first token came.

    Args:
        decode: must hand its tokens to the streamer.
        input_ids: int64 ``[B, S]``.
    """
    found = first_token.timed(decode, input_ids.device)
    tokens = found.output[:, input_ids.shape[1] :].cpu()
    call = Call(tokens, found.seconds, found.first, found.after, tokens.shape[1] - found.count)
    return call, found.output, found.at


@contextmanager
def passes(*models: nn.Module) -> Iterator[list[list[tuple[float, float]]]]:
    """Start and duration of every forward pass of each model inside the block, by hooks that are removed again."""
    found: list[list[tuple[float, float]]] = [[] for _ in models]
    started: dict[int, float] = {}
    handles = []
    for index, model in enumerate(models):

        def before(*_: object, index: int = index) -> None:
            started[index] = time.perf_counter()

        def after(*_: object, index: int = index) -> None:
            found[index].append((started[index], time.perf_counter() - started[index]))

        handles += [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _sums(one: list[int], other: list[int]) -> list[int]:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return [value + (shorter[i] if i < len(shorter) else 0) for i, value in enumerate(longer)]
