"""The host's side of a call: it reads what rounds committed, some rounds late, and says when rows are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dspark_fast.engine.state import ACCEPTANCE, ACCEPTED, FINISHED, PROPOSED, RUN, TAKEN, DecodingState
from dspark_fast.engine.stopping import Stopping
from dspark_fast.stats import Stats

# on_commit(rows): the tokens that each row has just committed; an empty list for a row that is finished
OnCommit = Callable[[list[list[int]]], None]


@dataclass
class Heard:
    """What a report said of its round.

    Attributes:
        drafted: None for the prefill.
        rows: that the state had.
        kept: of each row that was not finished before, drafts judged and drafts accepted.
        tokens: committed per such row.
    """

    drafted: bool | None
    rows: int
    kept: list[tuple[int, int]] = field(default_factory=list)
    tokens: float = 0.0


class Reader:
    """Follows a :class:`~dspark_fast.engine.state.DecodingState` from the host.

    A report is copied when its round is queued and read ``lag`` rounds later, so that on a GPU the next round runs
    meanwhile. What stop strings and other criteria cut off is trimmed here: the device may have gone on.

    Args:
        state: of the call.
        stats: what is counted into.
        lag: rounds between making a report and reading it: 0 or 1.
        stopping: criteria that only the host can judge; None if there are none.
        on_commit: told of every commit.

    Attributes:
        lengths: committed tokens of each row as far as read, prompt included.
        rows: the new ones among them.
        finished: rows that are done, as far as read.
    """

    def __init__(
        self, state: DecodingState, stats: Stats, *, lag: int, stopping: Stopping | None, on_commit: OnCommit
    ) -> None:
        self._state = state
        self._stats = stats
        self._lag = lag
        self._stopping = stopping
        self._on_commit = on_commit
        self._waiting: deque[tuple[torch.Tensor, torch.cuda.Event | None, bool | None]] = deque()
        self.lengths: list[int] = state.lengths.tolist()
        self._written = list(self.lengths)  # with what was cut off, which stays where it is
        self._places = list(range(len(self.lengths)))  # which row each of the state's is
        self.rows: list[list[int]] = [[] for _ in self.lengths]
        self.finished = [False] * len(self.lengths)

    @property
    def unread(self) -> int:
        """Rounds that were queued and not read yet."""
        return len(self._waiting)

    @property
    def longest(self) -> int:
        """Tokens of the longest row on the device as far as read, what was cut off included."""
        return max(self._written[row] for row in self._places)

    @property
    def reach(self) -> int:
        """Tokens of the longest row that is not finished; 0 where all are."""
        return max((self._written[row] for row in self._places if not self.finished[row]), default=0)

    @property
    def done(self) -> bool:
        return all(self.finished)

    def leave(self) -> list[int] | None:
        """Which of the state's rows to go on with, if a quarter of them is finished: the state is to select these.

        Not at once for each: all caches are copied.
        """
        live = [place for place, row in enumerate(self._places) if not self.finished[row]]
        if not live or 4 * len(live) > 3 * len(self._places):
            return None
        self._places = [self._places[place] for place in live]
        return live

    def queue(self, drafted: bool | None) -> None:
        """Copy the report of the round just made (or just sent to the GPU); ``drafted`` is None for the prefill."""
        report = self._state.report
        if report.is_cuda:
            copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            copy.copy_(report, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            copy, event = report.clone(), None
        self._waiting.append((copy, event, drafted))

    def read(self, *, all_of_it: bool = False) -> list[Heard]:
        """Read the reports that are due.

        Raises:
            FloatingPointError: if logits that are needed are NaN, naming row and position.
        """
        heard = []
        while len(self._waiting) > (0 if all_of_it else self._lag):
            report, event, drafted = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            heard.append(self._take(report.tolist(), drafted))
        return heard

    def _take(self, report: list[list[int]], drafted: bool | None) -> Heard:
        rows: list[list[int]] = [[] for _ in self.rows]
        heard, stopped = Heard(drafted, len(report)), False
        for row, line in zip(self._places, report):
            run = line[RUN : RUN + line[TAKEN]]
            self._written[row] += len(run)
            if self.finished[row]:
                continue
            heard.kept.append((line[PROPOSED], line[ACCEPTED]))
            if -1 in run:
                # Only among what was taken: a NaN behind a stop token or the length limit is in nobody's way.
                position = self.lengths[row] + run.index(-1)
                raise FloatingPointError(f"the logits of row {row} for position {position} are NaN, +inf or all -inf")
            acceptance = line[ACCEPTANCE]
            self.finished[row] = bool(line[FINISHED])
            if self._stopping is not None:
                standing = self._stopping.first_stop(row, run)
                if standing is not None:
                    stopped = True
                    run, acceptance = run[:standing], standing
                    self.finished[row] = True
            self.lengths[row] += len(run)
            self.rows[row] += run
            self._stats.new_tokens[row] += len(run)
            if drafted:
                self._stats.count(row, acceptance, line[PROPOSED], line[ACCEPTED])
            rows[row] = run
        self._stats.rounds += bool(drafted and heard.kept)
        self._stats.plain_steps += bool(drafted is False and heard.kept)
        self._on_commit(rows)
        if stopped:
            # The device learns of it before the next round; it may have made one more meanwhile.
            on_device = self._state.finished
            known = torch.tensor([self.finished[row] for row in self._places], pin_memory=on_device.is_cuda)
            on_device |= known.to(on_device.device, non_blocking=True)
        heard.tokens = sum(map(len, rows)) / max(len(heard.kept), 1)
        return heard
