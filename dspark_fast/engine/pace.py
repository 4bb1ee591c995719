"""How many of the drafts are verified, where each costs: as many as are measured to pay."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

# The first rounds verify all drafts, the next ones half of them, so that two lengths have been timed; later the other
# length is timed again every so many rounds.
_WHOLE = 2
_HALF = 2
_REFRESH = 32
# What took more than so many times the median of its length is a hiccup of the machine.
_HICCUP = 1.5
_REMEMBERED = 5
# Acceptance of early rounds counts ever less: by half after 23 rounds. And a slot that few drafts have reached is taken
# to keep what all slots keep: so many drafts' worth of that.
_FADING = 0.97
_PRIOR = 4.0
# All drafts are verified unless fewer are so much faster: what is chosen is not to flutter.
_WORTH = 1.02


class Pace:
    """Chooses how many drafts of each row to verify, from the time and the acceptance of past rounds.

    A round that drafts and verifies ``n`` tokens of each row takes ``a + b n`` seconds; both come from rounds of two
    lengths. The length that commits most tokens per second is the objective of the
    paper's scheduler (DSpark, Algorithm 1), with one length for all rows, since the blocks of a batch stand in one
    rectangle. It is fixed before a round drafts, so it cannot look at what it judges.

    In a batch on a CPU the last drafts of a block cost more than they give. One row's are all verified: its pass is the
    reading of the weights (on SmolLM2 eight tokens take an eighth longer than one), and what a shorter block saves is
    less than decisions by a noisy clock would lose.

    Args:
        block: drafts per round, at least 1.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._rounds = 0
        self._timed: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._reached = [0.0] * block
        self._kept = [0.0] * block

    def drafts(self, rows: int) -> int:
        """How many drafts per row the next round verifies, of ``rows`` rows: 1 to the block size."""
        half = max(1, self._block // 2)
        if rows == 1 or self._rounds < _WHOLE:
            return self._block
        if self._rounds < _WHOLE + _HALF:
            return half
        best = self._best(rows)
        if self._rounds % _REFRESH == 0:
            return half if best == self._block else self._block
        return best

    def note(self, drafts: int, rows: int, seconds: float, kept: Sequence[tuple[int, int]]) -> None:
        """Learn of a round that drafted.

        Args:
            drafts: how many per row the pass verified.
            rows: of the pass, finished ones included.
            seconds: what the round took.
            kept: of each row that was not finished, drafts judged and drafts accepted.
        """
        self._rounds += 1
        self._timed[drafts].append((rows * (drafts + 1), seconds))
        for counts in (self._reached, self._kept):
            counts[:] = [_FADING * count for count in counts]
        for judged, accepted in kept:
            for slot in range(min(judged, accepted + 1)):
                self._reached[slot] += 1
                self._kept[slot] += slot < accepted

    def _best(self, rows: int) -> int:
        fixed, each = self._cost()
        share = sum(self._kept) / max(sum(self._reached), 1.0)
        tokens, reached, speeds = 1.0, 1.0, []
        for slot, (kept, seen) in enumerate(zip(self._kept, self._reached)):
            reached *= (kept + _PRIOR * share) / (seen + _PRIOR)
            tokens += reached
            speeds.append(tokens / (fixed + each * rows * (slot + 2)))
        best = max(range(self._block), key=speeds.__getitem__)
        return best + 1 if speeds[best] > _WORTH * speeds[-1] else self._block

    def _cost(self) -> tuple[float, float]:
        """Seconds of a round, and of each token that it verifies: a least-squares line through what was timed."""
        points = []
        for timed in self._timed.values():
            most = _HICCUP * statistics.median_low(seconds for _, seconds in timed)
            points += [(tokens, seconds) for tokens, seconds in timed if seconds <= most]
        tokens, seconds = zip(*points)
        if len(set(tokens)) == 1:
            return seconds[0], 0.0
        each, fixed = statistics.linear_regression(tokens, seconds)
        return (max(fixed, 0.0), each) if each > 0 else (statistics.fmean(seconds), 0.0)
