"""How long a call took to its first new token, and from there: the same instrument for every way to decode."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Notes when the first new tokens came (``at``, by ``time.perf_counter``), and how many (``count``)."""

    def __init__(self) -> None:
        self._calls = 0
        self.at = math.nan
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:  # the call before it hands over the prompt
            self.at = time.perf_counter()
            self.count = value.shape[-1] if value.dim() > 1 else 1

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Timed:
    """A call and its wall clock.

    Attributes:
        output: ``[B, S + n]``.
        seconds: of the whole call.
        first: until the first new tokens were handed over.
        after: from there to the end.
        at: when that was, by ``time.perf_counter``.
        count: how many came first.
    """

    output: torch.Tensor
    seconds: float
    first: float
    after: float
    at: float
    count: int


def timed(decode: Callable[[BaseStreamer], torch.Tensor], device: torch.device) -> Timed:
    """Time ``decode(streamer)``, which must hand its tokens to the streamer, between two waits for the device."""
    clock, wait = FirstToken(), waiting(device)
    wait()
    start = time.perf_counter()
    output = decode(clock)
    wait()
    end = time.perf_counter()
    return Timed(output, end - start, clock.at - start, end - clock.at, clock.at, clock.count)


def waiting(device: torch.device) -> Callable[[], None]:
    """Until all that was queued on ``device`` is done."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
