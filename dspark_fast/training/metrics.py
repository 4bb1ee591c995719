"""What a run says of itself: losses, acceptance by block position, calibration of the confidence head."""

from __future__ import annotations

import math
from typing import Any

import torch

from dspark_fast.training.loss import Loss
from dspark_fast.training.workers import Workers

BINS = 10  # of the reliability curve, over predicted confidence 0 to 1


class Tally:
    """Sums over batches from which the means are made.

    Args:
        block: T of the drafter.
    """

    def __init__(self, block: int) -> None:
        self.losses = torch.zeros(4, dtype=torch.float64)  # sums over the batches of one step are its means
        self.batches = 0
        self.accept = torch.zeros(2, block, dtype=torch.float64)  # sum of c*, number of slots
        self.survival = torch.zeros(2, dtype=torch.float64)  # sum of tau over full blocks, their number
        self.bins = torch.zeros(block, BINS, 3, dtype=torch.float64)  # number, sum of predicted, sum of c*

    @property
    def blocks(self) -> int:
        return int(self.accept[1, 0])

    def add(self, loss: Loss) -> None:
        """Count one batch."""
        parts = (loss.total, loss.cross_entropy, loss.total_variation, loss.confidence)
        self.losses += torch.stack([part.detach().double().cpu() for part in parts])
        self.batches += 1
        counted, overlap = loss.counted.cpu(), loss.overlap.double().cpu()
        self.accept += torch.stack([(overlap * counted).sum((0, 1)), counted.double().sum((0, 1))])
        full = counted.all(-1)
        tau = 1.0 + overlap[full].cumprod(-1).sum(-1)
        self.survival += torch.tensor([tau.sum(), full.sum()], dtype=torch.float64)
        if loss.predicted is not None:
            predicted = loss.predicted.double().cpu()
            for slot in range(counted.shape[-1]):
                kept = counted[..., slot]
                p, c = predicted[..., slot][kept], overlap[..., slot][kept]
                # NaN has no bin of its own: any one keeps it in the sum of predictions, where means() finds it
                where = (p.nan_to_num() * BINS).long().clamp(max=BINS - 1)
                self.bins[slot].index_add_(0, where, torch.stack([torch.ones_like(p), p, c], dim=-1))

    def over(self, workers: Workers) -> Tally:
        """This tally summed over the processes of the run."""
        if workers.count > 1:
            device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
            for name in ("losses", "accept", "survival", "bins"):
                setattr(self, name, workers.sum(getattr(self, name).to(device)).cpu())
        return self

    def means(self, *, evaluated: bool = False) -> dict[str, Any]:
        """As plain numbers. ``accept`` is c* by block position, ``tau`` the acceptance length that they make.

        Args:
            evaluated: the batches were each their own step, so that their losses' mean is wanted, and calibration too:
                ``calibration[slot][bin]`` is [number, mean predicted, mean c*], ``ece[slot]`` the mean distance of the
                latter two, weighted by number.

        Raises:
            FloatingPointError: for an evaluation in which the confidence head predicted no number.
        """
        losses = self.losses / (self.batches if evaluated else 1)
        tau = (self.survival[0] / self.survival[1]).item() if self.survival[1] else float("nan")
        accept = self.accept[0] / self.accept[1].clamp(min=1)
        found: dict[str, Any] = {
            **dict(zip(("loss", "cross_entropy", "total_variation", "confidence"), losses.tolist(), strict=True)),
            "tau": tau,
            "accept": [round(value, 4) for value in accept.tolist()],
        }
        if evaluated and not self.bins[..., 1].isfinite().all():
            raise FloatingPointError("the confidence head's prediction is not finite on the evaluated text")
        if evaluated and self.bins.any():
            number = self.bins[..., :1]
            means = self.bins[..., 1:] / number.clamp(min=1)
            error = (number[..., 0] * (means[..., 0] - means[..., 1]).abs()).sum(-1) / number.sum((-1, -2)).clamp(min=1)
            table = torch.cat([number, means], dim=-1)
            found["calibration"] = [[[round(x, 4) for x in one] for one in slot] for slot in table.tolist()]
            found["ece"] = [round(value, 4) for value in error.tolist()]
        return found


def best_so_far(history: list[dict[str, Any]]) -> tuple[int, int]:
    """The step of the best held-out acceptance length, and how many evaluations have come since (0: it is the last).

    Step 0 where there was no evaluation.
    """
    evaluations = [(row["step"], row["held_out"]["tau"]) for row in history if "held_out" in row]
    if not evaluations:
        return 0, 0
    taus = [tau if tau is not None and not math.isnan(tau) else -math.inf for _, tau in evaluations]
    best = taus.index(max(taus))
    return evaluations[best][0], len(taus) - 1 - best


def finite(value: Any) -> Any:
    """NaN and infinity, which JSON has no words for, as None."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
