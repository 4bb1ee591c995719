"""What speculation should gain: the usual model, from acceptance and costs alone.

Alpha is the probability that a draft is accepted, all before it having been; K the drafts per round; c what one draft
costs and v what a pass over K + 1 tokens costs, both in plain steps of the target. A drafter that makes its whole block
in one pass of cost d has c = d / K.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

Alpha = float | Sequence[float]

#: Drafts per round up to which :func:`best_drafts` looks, where alpha is a number.
MOST_DRAFTS = 64


def expected_tokens(alpha: Alpha, drafts: int) -> float:
    """Tokens that a round commits on average, the resampled or bonus token included: the model's acceptance length.

    ``1 + a_1 + a_1 a_2 + ... + a_1 ... a_K``; with one alpha for all positions ``(1 - alpha^(K+1)) / (1 - alpha)``
    (Leviathan et al. 2023, equation 1). One also finds ``(1 - alpha^K) / (1 - alpha) + 1``, which is too much by
    ``1 - alpha^K``: a drafter that is never right would then give two tokens a round.

    Args:
        alpha: 0 to 1; or one for each position, the first K of which count.
        drafts: K, 0 or more.

    Raises:
        ValueError: for a value out of range, or fewer positions than drafts.
    """
    if drafts < 0:
        raise ValueError(f"drafts is {drafts}: accepted is 0 or more")
    positions = [alpha] * drafts if isinstance(alpha, (int, float)) else list(alpha)
    given = [alpha] if isinstance(alpha, (int, float)) else positions
    for one in given:
        if not 0.0 <= one <= 1.0:
            raise ValueError(f"alpha is {one}: accepted is 0 to 1")
    if len(positions) < drafts:
        raise ValueError(f"alpha has {len(positions)} positions for {drafts} drafts: accepted is one for each")
    expected = reached = 1.0
    for one in positions[:drafts]:
        reached *= one
        expected += reached
    return expected


def speedup(alpha: Alpha, drafts: int, cost: float, verify: float = 1.0) -> float:
    """How many times as fast as plain decoding: :func:`expected_tokens` over what the round costs, ``K c + v``.

    Leviathan et al. 2023, theorem 3.8, where v is 1. Without drafts a round is a plain step, whose speedup is 1.

    Args:
        alpha, drafts: as for :func:`expected_tokens`.
        cost: c, 0 or more.
        verify: v, above 0; 1 where a pass takes the time of reading the weights, more where it is arithmetic.

    Raises:
        ValueError: for a value out of range.
    """
    _check_cost(cost)
    if not 0.0 < verify < math.inf:
        raise ValueError(f"verify is {verify}: accepted is above 0")
    expected = expected_tokens(alpha, drafts)
    return expected / (drafts * cost + verify) if drafts else 1.0


def best_drafts(alpha: Alpha, cost: float, verify: float = 1.0, most: int | None = None) -> int:
    """The K of the largest :func:`speedup`, the smallest such K among equals; 0 where drafting only loses.

    Args:
        alpha, cost, verify: as for :func:`speedup`.
        most: look no further than this K; None: as far as alpha has positions, or :data:`MOST_DRAFTS`.

    Raises:
        ValueError: for a value out of range.
    """
    if most is None:
        most = MOST_DRAFTS if isinstance(alpha, (int, float)) else len(alpha)
    elif most < 0:
        raise ValueError(f"most is {most}: accepted is 0 or more")
    return max(range(most + 1), key=lambda drafts: speedup(alpha, drafts, cost, verify))


def improvement_factor(acceptance_length: float, drafts: int, cost: float) -> float:
    """``MAL / (k c + 1)``: the speedup that a measured acceptance length stands for, verifying costing a plain step.

    From the poster on self-distilled sparse drafters (SD^2). It writes c as the target's latency over the drafter's;
    the formula means the drafter's over the target's, as here.

    Args:
        acceptance_length: MAL or tau, committed tokens per round, bonus included: 1 to k + 1.
        drafts: k, drafts per round.
        cost: c, 0 or more.

    Raises:
        ValueError: for a value out of range.
    """
    if drafts < 0:
        raise ValueError(f"drafts is {drafts}: accepted is 0 or more")
    if not 1.0 <= acceptance_length <= drafts + 1:
        raise ValueError(
            f"acceptance_length is {acceptance_length}: accepted is 1 to {drafts + 1} with {drafts} drafts"
        )
    _check_cost(cost)
    return acceptance_length / (drafts * cost + 1.0)


def speedup_heatmap(
    path: str | os.PathLike[str],
    *,
    costs: Sequence[float] = (0.02, 0.1, 0.3),
    verify: float = 1.0,
    most: int = 12,
    steps: int = 100,
) -> None:
    """Draw :func:`speedup` over alpha and K, a panel for each cost, and the best K for each alpha.

    Args:
        path: PNG to write.
        costs: c of each panel.
        verify: v of all of them.
        most: largest K.
        steps: columns from alpha 0 to alpha 1.

    Raises:
        ValueError: for a value out of range, or no costs.
        ImportError: without matplotlib (extra ``plots``).
    """
    for name, value, least in (("most", most, 1), ("steps", steps, 1), ("the number of costs", len(costs), 1)):
        if value < least:
            raise ValueError(f"{name} is {value}: accepted is {least} or more")
    alphas = [step / steps for step in range(steps + 1)]
    tables = [[[speedup(alpha, k, cost, verify) for alpha in alphas] for k in range(most + 1)] for cost in costs]
    # Not pyplot, which would change the backend of a process that draws for itself.
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(costs) + 1.2, 4.6), layout="constrained")
    axes = figure.subplots(1, len(costs), squeeze=False, sharey=True)[0]
    # Symmetric about 1, so that the colour alone says whether it gains.
    limit = max(max(value, 1 / value) for table in tables for row in table for value in row)
    half = 0.5 / steps
    for axis, cost, table in zip(axes, costs, tables):
        image = axis.imshow(
            table,
            origin="lower",
            aspect="auto",
            extent=(-half, 1 + half, -0.5, most + 0.5),
            cmap="BrBG",
            norm=LogNorm(1 / limit, limit),
        )
        lines = axis.contour(
            alphas, range(1, most + 1), table[1:], levels=[0.5, 1, 2, 4], colors="0.25", linewidths=[0.8, 1.8, 0.8, 0.8]
        )
        for label in axis.clabel(lines, fmt="%gx", fontsize=8):
            label.set(bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}, zorder=5, rotation=0)
        best = [best_drafts(alpha, cost, verify, most) for alpha in alphas]
        axis.step(alphas, best, where="mid", color="tab:red", linewidth=2, label=f"the best K of 0 to {most}")
        axis.set(title=f"a draft costs {cost:g} plain steps", xlabel="acceptance alpha of each draft")
    axes[0].set(ylabel="K, drafts per round (0: plain decoding)")
    figure.legend(handles=axes[0].lines[:1], loc="outside lower center", frameon=False)
    ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8) if 1 / limit <= tick <= limit]
    bar = figure.colorbar(image, ax=list(axes), ticks=ticks, label="speedup over plain decoding")
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    figure.savefig(path, dpi=120)


def _check_cost(cost: float) -> None:
    if not 0.0 <= cost < math.inf:
        raise ValueError(f"cost is {cost}: accepted is 0 or more")
