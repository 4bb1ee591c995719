"""Whether an autoregressive drafter of two layers would pay, in words and as a table; measured by
``two_layer_drafter.py``."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING, Any

from trust import refuse, refuse_other_drafter

if TYPE_CHECKING:
    from claims import Results

NAME = "two_layer_drafter.json"
WHOLE, SMALL, DSPARK = "the target's head", "a small head", "DSpark"


def page(results: Results) -> str:
    """As Markdown, for ``claims.py``.

    Raises:
        Untrusted: if the machine was disturbed, or another drafter ships now.
    """
    result = results.two_layer_drafter
    refuse_other_drafter(result, result["model"], NAME)
    refuse(timed(result), "least", "most", NAME)
    gains = [row["over_no_drafter"]["speedup"] for row in results.engine["prompts"]["rows"]]
    return "\n".join(
        [*_lines(sentence(result)), "", *table(result), "", *_lines(remarks(result, statistics.mean(gains)))]
    )


def sentence(result: dict[str, Any]) -> str:
    """Whether it pays, with the figures that say so."""
    found, acceptance = result["answers"], result["acceptance"]["by_position"]
    whole, small, dspark = *(found["two_layers"][name] for name in (WHOLE, SMALL)), found["dspark"]["speedup"]
    gains = [one["at_its_acceptance"]["speedup"] for one in (whole, small)]
    ahead = max(gains) > max(1.0, dspark)
    verdict = (
        "even if accepted no more often, it would be ahead, so one is worth training"
        if ahead
        else "so beside it one would pay only if it were right more often than a drafter that sees them"
        if dspark > 1
        else "neither pays here"
    )
    own = f"{min(acceptance):.2f} to {max(acceptance):.2f}"
    even, matching = (f"{_alpha(whole[what])} ({_alpha(small[what])})" for what in ("breaks_even", "matches"))
    speeds = f"{gains[0]:.2f} ({gains[1]:.2f}) times as fast as no drafter, it {dspark:.2f} times"
    repeats = f"{found['behind_in']} of {result['repeats']} repeats"
    return (
        f"Two layers that draft token by token gain over no drafter from an acceptance of {even} on (in brackets with "
        f"a head over {result['head_tokens']:,} tokens alone). To be as fast as the DSpark drafter they need "
        f"{matching}, from tokens alone, where its own, with the target's hidden states, is {own} by position. "
        f"Accepted as often as it, they would decode {speeds} (ahead of both in {repeats}): {verdict}. "
        "None was trained."
    )


def _alpha(alpha: float | None) -> str:
    return "more than 1" if alpha is None else f"{alpha:.2f}"


def _lines(text: str) -> list[str]:
    """As wide as the READMEs' text."""
    return textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)


def timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """All spreads of what was timed."""
    return [*result["costs"]["block"].values(), *result["costs"]["passes"].values()]


def passes_of(costs: dict[str, Any]) -> dict[int, float]:
    """By number of drafts, what verifying them costs in plain steps."""
    return {int(drafts): cost["median"] for drafts, cost in costs["passes"].items()}


def table(result: dict[str, Any]) -> list[str]:
    """A row for each drafter."""
    costs, found = result["costs"], result["answers"]
    heads = (
        "drafter",
        "a draft, plain steps",
        "weights read",
        "breaks even at",
        "as fast as DSpark at",
        "speedup at DSpark's acceptance (range)",
        "drafts",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for head, tokens in {WHOLE: result["vocabulary"], SMALL: result["head_tokens"]}.items():
        one = found["two_layers"][head]
        cells = (
            f"two layers, head over {tokens:,} tokens",
            f"{one['draft']:.3f}",
            f"{100 * result['share_of_weights'][head]:.0f} %",
            _alpha(one["breaks_even"]),
            _alpha(one["matches"]),
            _range(one["at_its_acceptance"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    draft = costs["block"][DSPARK]["median"] / costs["block_size"]
    lines.append(f"| DSpark, a block in one pass | {draft:.3f} | | | | {_range(found['dspark'])} |")
    return lines


def _range(one: dict[str, Any]) -> str:
    return f"{one['speedup']:.2f} ({one['least']:.2f} to {one['most']:.2f}) | {one['drafts']}"


def remarks(result: dict[str, Any], measured: float) -> str:
    """Under the table: what was measured, and how to read it.

    Args:
        measured: the speedup of whole calls with the DSpark drafter over those without a drafter.
    """
    passes, acceptance = passes_of(result["costs"]), result["acceptance"]
    longer = ", ".join(f"{passes[drafts]:.2f} over {drafts + 1}" for drafts in (1, 3, 5, 7))
    by_position = ", ".join(f"{one:.2f}" for one in acceptance["by_position"])
    return (
        f"{result['model'].rsplit('/', 1)[-1]} in {result['dtype']} on one thread, {result['context']} tokens of "
        f"context, weights packed; timed in turn, {result['repeats']} x {result['turns']} times. A plain step takes "
        f"{result['costs']['plain_step_ms']['median']:.1f} ms, and of that a pass of the target {longer} tokens. What "
        "a drafter costs does not depend on its weights: the target's own first layers stand for trained ones, in cost "
        "alone. Weights read: for one draft, of what a plain step reads. Breaks even, as fast: from which acceptance "
        "on, the same at every position, all drafts before it accepted. DSpark's own by position: "
        f"{by_position} ([shipped prompts, greedy](results/cpu/{acceptance['file']})); that two layers reach it from "
        "tokens alone is assumed, not measured. The speedups are computed from these costs, over decoding "
        f"without a drafter, the bookkeeping of both left out; measured in whole calls over ten prompts DSpark's is "
        f"{measured:.2f} ([data](results/cpu/engine.json)). `python bench/two_layer_drafter.py` does all of it "
        f"([data](results/cpu/{NAME}))."
    )
