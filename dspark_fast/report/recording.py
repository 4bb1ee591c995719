"""What a DSpark drafter drafted, block by block, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from dspark_fast.drafters import DSparkDrafter, Noise, Proposal
from dspark_fast.stats import Stats


@dataclass(frozen=True)
class Block:
    """One round of one answer.

    Attributes:
        anchor: the token before the block.
        drafts: all drafted tokens, also those that were not proposed.
        confidence: c_k of each, the head's probability that it is accepted if those before it are; empty without one.
        proposed: how many were judged: up to the cut by a threshold, or to an accepted stop token.
        accepted: how many of them were accepted.
        following: the target's own token behind those; None where the answer had ended.
    """

    anchor: int
    drafts: tuple[int, ...]
    confidence: tuple[float, ...]
    proposed: int
    accepted: int
    following: int | None


class RecordingDrafter(DSparkDrafter):
    """Drafts as its parent does, and keeps what it drafted; for one row. Its confidences are those of the parent's cut.

    It asks the host in every round, so it says that it cannot be part of a CUDA graph.
    """

    @property
    def capturable(self) -> NoReturn:
        raise AttributeError("a recording drafter asks the host")

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        if batch != 1:
            raise ValueError(f"a recording drafter is given {batch} rows: accepted is 1")
        super().begin(batch, capacity, device)
        self._rounds: list[tuple[int, list[int], list[float], int]] = []

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        states: list[torch.Tensor] = []
        handle = self.draft.register_forward_hook(lambda module, arguments, output: states.append(output))
        try:
            proposal = super().propose(anchor, position, noise)
        finally:
            handle.remove()
        confidence: list[float] = []
        if self.draft.config.enable_confidence_head:
            previous = torch.cat([anchor[:, None], proposal.tokens[:, :-1]], dim=1).clamp(min=0)
            confidence = self.draft.confidence(states[0], previous).float().sigmoid()[0].tolist()
        self._rounds.append((int(anchor), proposal.tokens[0].tolist(), confidence, int(proposal.lengths)))
        return proposal

    def blocks(self, answer: list[int], stats: Stats) -> list[Block]:
        """The rounds of the call that has just ended.

        Args:
            answer: its new tokens.
            stats: its figures.
        """
        lengths = stats.acceptance_lengths[0]
        accepted = [length - 1 for length in lengths]
        if accepted:  # the last round has no token of the target's own if it ended on an accepted stop token
            accepted[-1] = sum(stats.accepted) - sum(accepted[:-1])
        found, start = [], 0
        for (anchor, drafts, confidence, proposed), length, hits in zip(self._rounds, lengths, accepted, strict=True):
            proposed = min(proposed, length) if length <= hits else proposed
            place = start + hits + 1
            following = answer[place] if length > hits and place < len(answer) else None
            found.append(Block(anchor, tuple(drafts), tuple(confidence), proposed, hits, following))
            start += length
        return found
