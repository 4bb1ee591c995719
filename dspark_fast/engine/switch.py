"""When to stop speculating: what it has cost so far, against what plain steps would have."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

# Plain steps' time that speculation may lose before it is switched off, at first and whenever it is tried again; a gain
# is kept against later losses, up to _BANK. With a drafter that is never right, 256 tokens see the first four of these:
# 6.5 steps too many, 2.5 %.
_FIRST_ALLOWANCE = 3.5
_ALLOWANCE = 1.0
_BANK = 12.0
# A pause of so many plain steps, then twice as many, and so on; speculation is then tried again. An answer may begin
# badly and go on well: a list's first lines are not yet like one another.
_FIRST_PAUSE = 32
_LONGER = 2
_LONGEST_PAUSE = 512
# After the first rounds, plain steps are taken to learn what one costs: two, since the first may pay for whatever is
# done once. One more is taken after 16 rounds, 32, 64 and so on, then every 128: the first may have been timed badly,
# and a step grows slower as the context grows. While drafting wins, each of them costs half a step.
_WARM_UP = 2
_SAMPLES = 2
_REFRESH = 16
_LONGEST_REFRESH = 128
# What took more than so many times the median is a hiccup of the machine, not what it costs.
_HICCUP = 1.5
_REMEMBERED = 9


class Switch:
    """Decides before each round whether to draft in it, from wall-clock time alone.

    The ledger is in plain steps: a round that took ``t`` seconds and gave ``n`` tokens per live row is charged
    ``t / step - n``, with ``step`` from recent plain steps. Speculation goes on while a round without an accepted draft
    can still be paid out of an allowance; then decoding is plain for a pause, and speculation is tried again with a
    smaller allowance. Whenever a step has been timed anew, rounds since the one before are charged again by it.

    Attributes:
        pauses: how often speculation was switched off.
    """

    def __init__(self) -> None:
        self.pauses = 0
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)  # the same of rounds
        self._since: list[tuple[float, float]] = []  # seconds and tokens of rounds since a step was timed
        self._settled = 0.0  # what was owed before these
        self._owed = 0.0
        self._allowance = _FIRST_ALLOWANCE
        self._pause = _FIRST_PAUSE
        self._rounds = 0  # since the last plain step
        self._due = _WARM_UP  # after so many, one is taken
        self._left = 0  # plain steps still to take

    @property
    def plain_step(self) -> float | None:
        """Seconds of a plain step, None before one was timed."""
        return _usual(self._steps) if self._steps else None

    def forget(self) -> None:
        """Rows have left the batch: what steps and rounds took says nothing any more. A step is timed at once."""
        for timed in (self._steps, self._recent, self._since):
            timed.clear()
        self._settled, self._left = self._owed, max(self._left, 1)

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        return self._left == 0

    def note(self, drafting: bool, seconds: float, tokens: float) -> None:
        """Learn of a round that has been made; it may be some rounds ago.

        Args:
            drafting: whether it drafted.
            seconds: what it took.
            tokens: committed per row that was not finished.
        """
        if not drafting:
            self._steps.append(seconds)
            self._left = max(self._left - 1, 0)
            if self._left == 0:
                self._settle()
            return
        self._rounds += 1
        self._recent.append(seconds)
        self._since.append((seconds, tokens))
        if self._left:  # it was under way when speculation was switched off
            return
        if self._steps:
            self._charge(seconds, tokens)
        if self._left == 0 and self._rounds >= self._due:
            self._left, self._due = (1, min(2 * self._due, _LONGEST_REFRESH)) if self._steps else (_SAMPLES, _REFRESH)

    def _settle(self) -> None:
        self._rounds = 0
        self._owed = self._settled
        rounds, self._since = self._since, []
        for seconds, tokens in rounds:
            self._charge(seconds, tokens)
            if self._left:
                return
        self._settled = self._owed

    def _charge(self, seconds: float, tokens: float) -> None:
        cost = min(seconds, _HICCUP * statistics.median_low(self._recent)) / self.plain_step
        self._owed = max(self._owed + cost - tokens, -_BANK)
        if self._owed + max(cost - 1, 0) > self._allowance:
            self.pauses += 1
            self._left = self._pause
            # A single try may cost more than its allowance: it is then made more seldom.
            longer = _LONGER * max(1.0, (cost - 1) / _ALLOWANCE)
            self._pause = min(round(longer * self._pause), _LONGEST_PAUSE)
            self._allowance = _ALLOWANCE
            self._owed = self._settled = 0.0
            self._since.clear()


def _usual(seconds: Collection[float]) -> float:
    """The mean of those that are no hiccups."""
    most = _HICCUP * statistics.median_low(seconds)
    return statistics.fmean(second for second in seconds if second <= most)
