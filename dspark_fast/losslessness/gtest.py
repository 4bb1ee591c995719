"""The G-test: what it alarms at, and how many draws it needs.

For counts of n draws and the exact law, ``G = 2 sum seen log(seen / expected)`` over cells that expect at least 10
each; on correct code it is chi-square with one degree of freedom less than there are cells (Wilks 1938), once it is
divided by ``1 + (sum 1 / expected - 1 / n) / (6 (cells - 1))`` (Williams 1976).

Level: a row alarms below ``ALARM / rows``, so all rows together raise a false alarm once in a million runs
(Bonferroni).

Power: if the true law is at a total-variation distance d, its chi-square divergence is at least ``4 d^2`` (Cauchy and
Schwarz: ``sum delta^2 / p >= (sum |delta|)^2``), so G is noncentral chi-square with noncentrality at least ``4 d^2 n``.
n is the least for which this exceeds the level's quantile with probability ``POWER``. d is of the cells that are
compared: an error that only moves mass between two pooled cells is not seen.
"""

from __future__ import annotations

import math

import torch

ALARM = 1e-6  # family-wise chance of a false alarm
POWER = 0.99  # chance to see an error of the stated total variation
LEAST_EXPECTED = 10.0


def pooled(counts: torch.Tensor, law: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Seen and expected counts, float64, once the rarest cells are one cell that expects at least 10.

    counts: int64 [cells]; law: float64 [cells], without cells of probability 0.
    """
    expected, order = (law * counts.sum()).sort()
    seen = counts[order].double()
    rare = int((expected < LEAST_EXPECTED).sum())
    while 0 < rare < len(expected) and expected[:rare].sum() < LEAST_EXPECTED:
        rare += 1
    if rare < 2:
        return seen, expected
    return (torch.cat([one[:rare].sum()[None], one[rare:]]) for one in (seen, expected))  # type: ignore[return-value]


def g_statistic(counts: torch.Tensor, law: torch.Tensor) -> tuple[float, int]:
    """G and its degrees of freedom; infinite if something was seen that cannot be.

    counts: int64 [cells]; law: float64 [cells], of sum 1.
    """
    possible = law > 0
    if counts[~possible].any():
        return math.inf, 1
    seen, expected = pooled(counts[possible], law[possible])
    freedom = len(expected) - 1
    if not freedom:
        return 0.0, 0
    inflated = 1 + float((1 / expected).sum() - 1 / counts.sum()) / (6 * freedom)
    return 2 * float(torch.special.xlogy(seen, seen / expected).sum()) / inflated, freedom


def p_value(groups: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of the counts of independent groups, each against its own law; 1 where nothing was left to chance."""
    from scipy.stats import chi2

    found = [g_statistic(counts, law) for counts, law in groups]
    statistic, freedom = sum(g for g, _ in found), sum(df for _, df in found)
    if math.isinf(statistic):
        return 0.0
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def sample_size(freedom: int, distance: float, level: float, power: float = POWER) -> int:
    """Draws that see an error of total variation ``distance`` at this level with this power."""
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    if not freedom:
        return math.ceil(math.log(level) / math.log1p(-distance))  # one cell: an error shows as an impossible draw
    alarm = chi2.isf(level, freedom)
    needed = brentq(lambda noncentrality: ncx2.sf(alarm, freedom, noncentrality) - power, 1.0, 1e5)
    return math.ceil(needed / (4 * distance**2))
