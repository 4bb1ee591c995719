"""What a row should gain by the speedup model, and which part of its time explains where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_fast import analysis
from dspark_fast.benchmark.calls import Call, Rounds

#: A measured speedup that is further from the predicted one than this part of it is explained.
TOLERANCE = 0.15
_WORTH_NAMING = 0.01


@dataclass(frozen=True)
class Prediction:
    """By the speedup model, from a row's own acceptance and from costs that were taken before it was timed.

    Attributes:
        acceptance_length: tau.
        draft, verify: what drafting a block and verifying it cost, in plain steps; None where only their sum is known.
        speedup: ``tau / (draft + verify)``.
    """

    acceptance_length: float
    draft: float | None
    verify: float | None
    speedup: float


@dataclass(frozen=True)
class Costs:
    """What a round and a plain step of transformers' ``generate`` took in calls before the timed ones.

    Attributes:
        rounds: of a way's calls.
        plain_step: seconds, of calls of ``generate`` on the same prompt in turn.
    """

    rounds: Rounds | None
    plain_step: float

    @classmethod
    def of(cls, mine: Sequence[Call], plain: Sequence[Call]) -> Costs:
        """From calls of a way, and of ``generate``."""
        known = [call.rounds for call in mine if call.rounds is not None]
        return cls(sum(known, Rounds()) if known else None, plain_step(plain))


def plain_step(calls: Sequence[Call]) -> float:
    """Seconds of a token after the first, pooled over calls of ``generate``."""
    return sum(call.after for call in calls) / sum(call.counted for call in calls)


def predict(rounds: Rounds | None, costs: Costs) -> Prediction | None:
    """The prediction for what accepted as ``rounds`` did; None where nothing speculated, or where nobody could time it.

    Where acceptance is known by position it goes through :func:`dspark_fast.analysis.speedup`; elsewhere (transformers'
    own speculation, whose drafts vary in number) tau stands for it.
    """
    timed = costs.rounds
    if rounds is None or not rounds.rounds or timed is None or not timed.rounds or not timed.together:
        return None
    cost = timed.together / timed.rounds / costs.plain_step
    draft = verify = None
    if timed.drafting is not None and timed.verifying is not None:
        draft, verify = (part / timed.rounds / costs.plain_step for part in (timed.drafting, timed.verifying))
    tau = rounds.acceptance_length
    positions = _by_position(rounds)
    if not positions or draft is None or not verify:
        return Prediction(tau, draft, verify, tau / cost)
    count = len(positions)
    return Prediction(tau, draft, verify, analysis.speedup(positions, count, draft / count, verify))


def _by_position(rounds: Rounds) -> list[float]:
    """Of each slot's drafts, the share that was accepted, all before them having been.

    A draft that was cut off before it was verified counts as one that was not: so the shares add up to tau.
    """
    shares, before = [], rounds.row_rounds
    for accepted in rounds.accepted:
        shares.append(accepted / before if before else 0.0)
        before = accepted
    return shares


def parts(calls: Sequence[Call], prediction: Prediction, step: float) -> dict[str, float]:
    """Where the time after the first token went beyond the predicted one, as shares of the predicted; they add up.

    Args:
        calls: of one row; all of them with rounds.
        prediction: with the acceptance of these calls.
        step: seconds of a plain step when these were timed.
    """
    pooled = sum((call.rounds for call in calls if call.rounds is not None), Rounds())
    wanted, spent = sum(call.counted for call in calls), sum(call.after for call in calls)
    predicted = wanted * step / prediction.speedup
    one, tau = pooled.together / pooled.rounds, prediction.acceptance_length
    expected = tau * step / prediction.speedup  # of a round
    needed = (wanted - pooled.plain_steps) / tau
    # Of one row, tokens behind the length limit; of several, those that accepted less go on when the others are done.
    alone = all(len(call.tokens) == 1 for call in calls)
    overrun = "tokens past the end" if alone else "rounds that only the slowest rows need"
    beyond = {
        "rounds that took longer or shorter than before": needed * (one - expected),
        "steps without drafts": pooled.plain - pooled.plain_steps / tau * expected,
        overrun: (pooled.rounds - needed) * one,
        "outside drafter and target": spent - pooled.together - pooled.plain,
    }
    return {name: seconds / predicted for name, seconds in beyond.items()}


def why(calls: Sequence[Call], prediction: Prediction, step: float, measured: float) -> str | None:
    """A sentence from :func:`parts` where ``measured`` is further from the prediction than :data:`TOLERANCE`."""
    if abs(measured / prediction.speedup - 1) <= TOLERANCE:
        return None
    found = parts(calls, prediction, step)
    named = sorted(found.items(), key=lambda part: -abs(part[1]))
    said = [f"{name} {share:+.0%}" for name, share in named if abs(share) >= _WORTH_NAMING]
    # The speedup is a median of repeats, the parts are sums over all of them.
    pooled = prediction.speedup / (1 + sum(found.values()))
    if abs(measured / pooled - 1) >= _WORTH_NAMING:
        said.append(f"and the median of the repeats is {measured / pooled - 1:+.0%} off their mean")
    return f"{measured / prediction.speedup:.2f} of the predicted; time beyond it: {', '.join(said)}"
