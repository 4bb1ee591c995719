"""When to stop speculating: what it has cost so far, against what plain steps would have."""

from __future__ import annotations

import statistics
from collections import deque

# Plain steps' time that speculation may lose before it is switched off; a gain is kept against later losses, up to
# _BANK. With a drafter that is never right and a round of 1.5 steps, 256 tokens cost 2 + 3 x 1 steps too many: 2 %.
_FIRST_ALLOWANCE = 2.0
_ALLOWANCE = 1.0
_BANK = 16.0
# A pause of so many plain steps, then twice as many, and so on; speculation is then tried again.
_FIRST_PAUSE = 48
_LONGEST_PAUSE = 1024
# Plain steps taken to learn what one costs, after the first rounds (which also pay for whatever is done once), and how
# many rounds later one more is taken: a step grows slower as the context grows.
_WARM_UP = 2
_SAMPLES = 2
_REFRESH = 128


class Switch:
    """Decides before each round whether to draft in it, from wall-clock time alone.

    The ledger is in plain steps: a round that took ``t`` seconds and gave ``n`` tokens per live row is charged
    ``t / step - n``, with the median of recent plain steps. While the sum stays under an allowance, speculation goes
    on; over it, decoding is plain for a pause, and tried again with a smaller allowance.

    Attributes:
        pauses: how often speculation was switched off.
        plain_step: seconds of a plain step, None before one was timed.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._steps: deque[float] = deque(maxlen=5)
        self._rounds = 0  # drafted, since the last plain step that was timed
        self._owed = 0.0
        self._allowance = _FIRST_ALLOWANCE
        self._pause = _FIRST_PAUSE
        self._left = 0  # plain steps still to take
        self._early: list[tuple[float, float]] = []  # rounds from before a step's time was known

    @property
    def plain_step(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        return self._left == 0

    def note(self, drafting: bool, seconds: float, tokens: float) -> None:
        """Learn of a round that has been made.

        Args:
            drafting: whether it drafted.
            seconds: what it took.
            tokens: committed per row that was not finished.
        """
        if not drafting:
            self._steps.append(seconds)
            self._left = max(self._left - 1, 0)
            if self._left == 0:
                self._rounds = 0
                self._settle()
            return
        self._rounds += 1
        if self.plain_step is None:
            if self._rounds > 1:  # the first pays for whatever is done once
                self._early.append((seconds, tokens))
        else:
            self._charge(seconds, tokens)
        if self._left == 0 and self._rounds >= (_REFRESH if self._steps else _WARM_UP):
            self._left = 1 if self._steps else _SAMPLES

    def _settle(self) -> None:
        for seconds, tokens in self._early:
            self._charge(seconds, tokens)
        self._early.clear()

    def _charge(self, seconds: float, tokens: float) -> None:
        self._owed = max(self._owed + seconds / self.plain_step - tokens, -_BANK)
        if self._owed > self._allowance:
            self.pauses += 1
            self._left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._owed, self._allowance = 0.0, _ALLOWANCE
