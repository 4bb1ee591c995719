"""A drafter that does as it is told, and a streamer that keeps what it is told."""

from __future__ import annotations

import pytest
import torch
from tiny_pairs import VOCABULARY


class ScriptedDrafter:
    """Knows how each row goes on and proposes that, or something else, as it is told; behind the Drafter protocol.

    It also watches the protocol: every commit must follow the one before it and hold the row's own tokens.

    Args:
        rows: each row's prompt and continuation, as lists.
        right: probability that a draft is the row's own next token.
        ragged: draw each row's number of drafts from 0 to ``block_size``; otherwise always ``block_size``.
        plan: by round and row ``(drafts, right ones)``, in place of both.
        watch: false where ``rows`` are guesses, not what will be committed.
    """

    def __init__(
        self, rows, *, vocabulary=VOCABULARY, block_size=5, right=1.0, ragged=True, plan=None, taps=(), watch=True
    ):
        self.rows = rows
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.target_layer_ids = list(taps)
        self.right = right
        self.ragged = ragged
        self.plan = plan
        self.watch = watch

    def begin(self, batch, capacity, device):
        assert batch == len(self.rows)
        self.known = [0] * batch
        self.round = 0
        self.features = [[] for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(3)

    memory = 0

    def grow(self, capacity):
        pass

    def commit(self, tokens, features, offsets, counts):
        assert (features is None) == (not self.target_layer_ids)
        for row, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist())):
            if count == 0:
                continue
            assert start == self.known[row]
            assert not self.watch or tokens[row, :count].tolist() == self.rows[row][start : start + count]
            self.known[row] += count
            if features is not None:
                self.features[row].append(features[row, :count].clone())

    def propose(self, anchor, position, noise):
        from dspark_fast.drafters import Proposal

        assert position.tolist() == self.known
        tokens = torch.full((len(self.rows), self.block_size), -1)
        lengths = torch.full((len(self.rows),), self.block_size)
        for row, (last, start) in enumerate(zip(anchor.tolist(), position.tolist())):
            assert not self.watch or last == self.rows[row][start]
            count, right = self._told(row)
            lengths[row] = count
            for slot in range(count):
                true = self.rows[row][start + 1 + slot] if start + 1 + slot < len(self.rows[row]) else 0
                tokens[row, slot] = (
                    true if right[slot] else (true + 1 + self._below(self.vocabulary - 1)) % self.vocabulary
                )
        self.round += 1
        if noise.mode != "rejection":
            return Proposal(tokens, lengths)
        # A token that was not drawn at all has probability 1.
        logits = torch.full((*tokens.shape, self.vocabulary), -torch.inf).scatter_(
            2, tokens.clamp(min=0)[..., None], 0.0
        )
        return Proposal(tokens, lengths, logits, torch.zeros(tokens.shape), torch.zeros(tokens.shape))

    def _told(self, row):
        if self.plan is not None:
            count, right = self.plan[self.round][row]
            return count, [slot < right for slot in range(count)]
        count = self._below(self.block_size + 1) if self.ragged else self.block_size
        return count, [bool(torch.rand((), generator=self.generator) < self.right) for _ in range(count)]

    def _below(self, end):
        return int(torch.randint(end, (), generator=self.generator))


@pytest.fixture(scope="session")
def scripted():
    return ScriptedDrafter


class RecordingStreamer:
    """Keeps all that it is told; with ``fail_at`` it raises at that token (0 is the first)."""

    def __init__(self, fail_at=None, error=RuntimeError):
        self.heard = []
        self.fail_at = fail_at
        self.error = error

    def put(self, value):
        self.heard.append(value.tolist())
        if self.fail_at is not None and len(self.heard) == self.fail_at + 2:
            raise self.error("the streamer fails, as told")

    def end(self):
        self.heard.append("end")


@pytest.fixture(scope="session")
def streamer():
    return RecordingStreamer
