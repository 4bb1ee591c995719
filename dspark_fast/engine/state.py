"""The committed tokens of every row, in tensors that never move while a call runs, unless they grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark_fast.engine.cache import widened

# Columns of DecodingState.report before the run itself.
TAKEN, ACCEPTANCE, PROPOSED, ACCEPTED, FINISHED, RUN = range(6)


@dataclass(frozen=True)
class Limits:
    """When a row ends.

    Attributes:
        new_tokens: at most so many, at least 1.
        stop_tokens: int64 ``[n]``; a row ends on the first of these that it commits.
    """

    new_tokens: int
    stop_tokens: torch.Tensor


class DecodingState:
    """What is committed, and a report of the last round for the host.

    Every method is arithmetic on tensors of fixed shapes and asks the host nothing, so a graph can hold it.

    Args:
        prompts: int64 ``[B, S]``, packed to slot 0.
        prompt_lengths: int64 ``[B]``.
        limits: when a row ends.
        block_size: most drafts of a round, T.
        capacity: C, tokens per row; at least S + T + 1.

    Attributes:
        tokens: int64 ``[B, C]``, prompt and output from slot 0.
        lengths: int64 ``[B]``, committed tokens, the anchor (the last of them) included.
        ends: int64 ``[B]``, the length at which a row has all the tokens that were asked for.
        finished: bool ``[B]``.
        no_drafts: int64 ``[B, 0]`` and zeros ``[B]``, their lengths, of a round without drafts. They are here because a
            graph holds what it reads by address alone.
        report: int64 ``[B, 6 + T]`` of the last commit, by column: tokens taken; acceptance length; drafts judged;
            drafts accepted; finished (0 or 1); and the run itself, whose first ``taken`` tokens were committed.
    """

    def __init__(
        self, prompts: torch.Tensor, prompt_lengths: torch.Tensor, limits: Limits, block_size: int, capacity: int
    ) -> None:
        batch, width = prompts.shape
        self.tokens = prompts.new_zeros(batch, capacity)
        self.tokens[:, :width] = prompts
        self.lengths = prompt_lengths.clone()
        self.ends = prompt_lengths + limits.new_tokens
        self.stop_tokens = limits.stop_tokens
        self.finished = torch.zeros(batch, dtype=torch.bool, device=prompts.device)
        self.no_drafts = prompts.new_zeros(batch, 0), prompts.new_zeros(batch)
        self.report = prompts.new_zeros(batch, RUN + block_size + 1)

    def restart(self, prompts: torch.Tensor, prompt_lengths: torch.Tensor, limits: Limits) -> None:
        """Make it another call's, of the same batch and number of stop tokens, without moving a tensor."""
        self.tokens.zero_()
        self.tokens[:, : prompts.shape[1]] = prompts
        self.lengths.copy_(prompt_lengths)
        self.ends.copy_(prompt_lengths + limits.new_tokens)
        self.stop_tokens.copy_(limits.stop_tokens)
        self.finished.zero_()

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 ``[n]``, in new tensors."""
        for name in ("tokens", "lengths", "ends", "finished", "report"):
            setattr(self, name, getattr(self, name)[rows])
        self.no_drafts = self.no_drafts[0][rows], self.no_drafts[1][rows]

    @property
    def capacity(self) -> int:
        """C."""
        return self.tokens.shape[1]

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row."""
        self.tokens = widened(self.tokens, 1, capacity)

    @property
    def anchor(self) -> torch.Tensor:
        """``[B]``, the last committed token of each row; 0 where its logits were broken, which the host will raise."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0].clamp(min=0)

    def commit(self, run: torch.Tensor, counts: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
        """Append each row's run up to its first stop token and the length limit; finished rows take nothing.

        Args:
            run: int64 ``[B, N]``, N at most T + 1.
            counts: int64 ``[B]``, how many tokens of the run are valid.
            proposed: int64 ``[B]``, how many drafts were judged, for the report.

        Returns:
            Tokens taken, int64 ``[B]``. The report's acceptance length is the run's valid length up to its first stop
            token, not trimmed by the length limit.
        """
        columns = torch.arange(run.shape[1], device=run.device)
        valid = columns < counts[:, None]
        stops = (run[..., None] == self.stop_tokens).any(-1) & valid
        before = (stops.long().cumsum(1) - stops.long()) == 0  # up to and including the first stop
        acceptance = (before & valid).sum(1)
        taken = torch.minimum(acceptance, self.ends - self.lengths).masked_fill(self.finished, 0)

        kept = columns < taken[:, None]
        slots = self.lengths[:, None] + columns
        self.tokens.scatter_(1, slots, torch.where(kept, run, self.tokens.gather(1, slots)))
        self.lengths += taken
        self.finished |= (stops & kept).any(1) | (self.lengths >= self.ends)

        for column, values in (
            (TAKEN, taken),
            (ACCEPTANCE, acceptance),
            (PROPOSED, proposed),
            (ACCEPTED, counts - 1),
            (FINISHED, self.finished),
        ):
            self.report[:, column] = values
        self.report[:, RUN : RUN + run.shape[1]] = run
        return taken
