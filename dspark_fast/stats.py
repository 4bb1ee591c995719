"""What one call of ``generate`` did: rounds, acceptance and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Seconds:
    """Wall-clock seconds by part.

    Attributes:
        prefill: the target's and the drafter's pass over the prompt, and the first token.
        draft: proposing blocks and projecting newly committed context.
        verify: the target's passes over the drafts, and acceptance.
        bookkeeping: committing tokens, stop conditions, streaming.
        plain: all of the steps made while speculation was switched off.
        compilation: compiling the target's passes and timing them.
        graph: rounds and steps that were replayed as CUDA graphs, which cannot be told apart.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    bookkeeping: float = 0.0
    plain: float = 0.0
    compilation: float = 0.0
    graph: float = 0.0

    @property
    def rounds(self) -> float:
        """The draft-verify-commit rounds."""
        return self.draft + self.verify + self.bookkeeping

    @property
    def after_prefill(self) -> float:
        """Everything after the prefill but compilation, which is once for many calls."""
        return self.rounds + self.plain + self.graph


@dataclass
class Stats:
    """Figures of one call, kept as ``.stats`` of what it returned.

    Attributes:
        batch: rows decoded, return sequences counted.
        mode: ``greedy``, ``rejection`` or ``coupled``.
        seeds: the 64-bit seed of each row; a row run alone with its seed gives the same tokens. In rejection mode with
            ``off_switch`` that holds for runs without alone: which tokens were drafted depended on the clock.
        new_tokens: committed tokens of each row, the first (which the prefill gives) included.
        rounds: draft-verify-commit rounds.
        plain_steps: steps of one token, made while speculation was switched off because it lost, or to time one.
        off_switch: whether it could be switched off at all.
        pauses: how often it was switched off.
        graph: whether rounds were replayed as CUDA graphs.
        compiled: whether the target's passes were compiled, because that was asked for and is faster.
        acceptance_lengths: by row, the committed tokens of each of its rounds, bonus included. A round that ends on an
            accepted stop token counts what it accepted; one cut by the length limit is not trimmed.
        proposed: by block position, how often a draft there was verified: more seldom where a confidence threshold cut
            the block, or where the off-switch found that its last drafts cost more than they give.
        accepted: by block position, how often it was accepted, with all before it.
        seconds: wall clock by part.
        capacity: tokens per row that the caches had room for at the end.
        reused: tokens of each row's prompt that ``past_key_values`` made it unnecessary to read; empty without one.
        absent: tokens at the start of each row that the drafter's context lacks, because they were read elsewhere.
        divergence: with ``report_divergence``, for each row where it differs first from plain decoding, None where it
            does not (:class:`~dspark_fast.divergence.FirstDifference`); None if it was not asked for.
        memory: bytes of cached keys and values, of ``target`` and ``drafter``; of weights laid out anew, ``packed``.
    """

    batch: int
    mode: str
    seeds: list[int]
    block_size: int
    new_tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    plain_steps: int = 0
    off_switch: bool = False
    pauses: int = 0
    graph: bool = False
    compiled: bool = False
    acceptance_lengths: list[list[int]] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    capacity: int = 0
    reused: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    divergence: list[Any] | None = None
    memory: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new_tokens = [0] * self.batch
        self.acceptance_lengths = [[] for _ in range(self.batch)]
        self.proposed = [0] * self.block_size
        self.accepted = [0] * self.block_size

    def count(self, row: int, acceptance: int, proposed: int, accepted: int) -> None:
        """Add one row's part of a round: its acceptance length, and how many drafts were judged and accepted."""
        self.acceptance_lengths[row].append(acceptance)
        # Behind an accepted stop token nothing was really proposed.
        for slot in range(min(proposed, acceptance) if acceptance <= accepted else proposed):
            self.proposed[slot] += 1
            self.accepted[slot] += slot < accepted

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per round, pooled over rounds and rows; NaN if there was no round."""
        pooled = [length for row in self.acceptance_lengths for length in row]
        return sum(pooled) / len(pooled) if pooled else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second after the prefill (which gives each row's first token)."""
        seconds = self.seconds.after_prefill
        return (sum(self.new_tokens) - self.batch) / seconds if seconds else float("nan")

    @property
    def latency(self) -> float:
        """L = (T_draft + T_verify) / tau in seconds per token, from this call's own means; bookkeeping counted in.

        NaN for a call of CUDA graphs that also made plain steps: the two cannot be told apart.
        """
        if self.seconds.graph and self.plain_steps:
            return float("nan")
        return (
            (self.seconds.rounds + self.seconds.graph) / self.rounds / self.acceptance_length
            if self.rounds
            else float("nan")
        )


class Clock:
    """Adds the time of ``with`` blocks to a :class:`Seconds`; waits for a GPU so that the time is the work's."""

    def __init__(self, seconds: Seconds, device: torch.device) -> None:
        self._seconds = seconds
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            setattr(self._seconds, name, getattr(self._seconds, name) + time.perf_counter() - start)
