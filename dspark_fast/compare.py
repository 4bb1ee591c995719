"""Ours against transformers' own decoding of the same prompt: the same tokens, and how much sooner."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from dspark_fast import generation
from dspark_fast.divergence import FirstDifference, first_difference
from dspark_fast.draft import DSparkDraft
from dspark_fast.drafters import Drafter
from dspark_fast.first_token import timed
from dspark_fast.gumbel import GumbelMax
from dspark_fast.stats import Stats

_NAMES = {"ours": "dspark-fast", "undrafted": "dspark-fast without a drafter", "baseline": "transformers"}


@dataclass
class Comparison:
    """What :func:`compare` found. Speeds are of the tokens after the first, which the prefill gives.

    Attributes:
        mode: ``greedy`` or ``coupled``.
        baseline: what ours was compared with.
        tokens, baseline_tokens: new token ids of ours and of the baseline.
        identical: whether every pair of runs gave the same tokens.
        first_difference: of the first pair that did not.
        tokens_per_second, baseline_tokens_per_second: medians over the runs; None if there was one token only.
        speedup: median of the pairs' ratios; ``speedup_least`` and ``speedup_most`` are their spread.
        call_speedup: the same for whole calls, prefill included, in tokens per second.
        acceptance_length: tau of ours; None without a drafter, as ``predicted_speedup`` then is.
        predicted_speedup: ``tau * T_plain / T_round``, the round being the sum of its parts, from the means below.
        seconds_per_round: T_draft, T_verify and T_bookkeeping of ours, means over all rounds of all runs; with CUDA
            graphs one figure, T_graph.
        seconds_per_plain_step: T_plain, mean over the baseline's steps after its prefill.
        pairs: tokens per second of each pair of runs, ours and the baseline's, after the prefill and of whole calls;
            and of the run without a drafter that belongs to it.
        undrafted_tokens_per_second: of ours without a drafter, in the same alternation: median over the runs. This and
            what follows is None where that was not run.
        undrafted_speedup: median of its ratios to the baseline of the same repeat: what is gained by anything but
            drafts, which is mostly packed weights on a CPU and CUDA graphs on a GPU.
        undrafted_identical: whether each of its runs gave the baseline's tokens.
        undrafted_first_difference: of the first that did not.
    """

    mode: str
    baseline: str
    dtype: str
    device: str
    seed: int | list[int] | None
    prompt_tokens: int
    tokens: list[int]
    baseline_tokens: list[int]
    identical: bool
    first_difference: FirstDifference | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    speedup_least: float | None
    speedup_most: float | None
    call_speedup: float
    acceptance_length: float | None
    rounds: int
    predicted_speedup: float | None
    seconds_per_round: dict[str, float]
    seconds_per_plain_step: float | None
    pairs: list[dict[str, float | None]] = field(default_factory=list)
    undrafted_tokens_per_second: float | None = None
    undrafted_speedup: float | None = None
    undrafted_identical: bool | None = None
    undrafted_first_difference: FirstDifference | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: what is not finite becomes None."""
        return _plain(asdict(self))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())


@dataclass
class _Run:
    tokens: list[int]
    seconds: float  # of the whole call
    after_first: float  # from the first new token to the end of the call
    stats: Stats | None = None

    @property
    def speed(self) -> float | None:
        return (len(self.tokens) - 1) / self.after_first if len(self.tokens) > 1 else None


def compare(
    model: PreTrainedModel,
    draft: DSparkDraft | Drafter | None,
    input_ids: torch.Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Sequence[int] | None = None,
    repeats: int = 3,
    undrafted: bool = False,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    pack_weights: bool | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Decode one prompt several times with ours and with transformers' own ``generate``, in turn.

    Greedy: against ``model.generate(do_sample=False)``. At a temperature: coupled mode against the same with
    :class:`~dspark_fast.gumbel.GumbelMax`, so that the tokens can be compared; both sides make the same noise. Both
    run in one process on the same weights, after a warm-up each; they take turns in starting a repeat, so that a drift
    of the machine's speed favours neither.

    Args:
        draft, confidence_threshold, use_markov, pack_weights: see :func:`dspark_fast.decoding`.
        input_ids: int64 ``[1, S]``.
        tokenizer: shows differing tokens as text.
        temperature: 0 is greedy, and then the cuts and the seed do nothing.
        seed: for a temperature: an integer, or a list of the row's own; 0 if left out.
        repeats: pairs of runs.
        undrafted: run ours without a drafter too, in each repeat; nothing is added where ``draft`` is None.
        progress: called with a few words before each run.

    Raises:
        ValueError: for more than one prompt, no repeats, or what ``dspark_fast.generate`` refuses.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: accepted is one prompt, [1, S]")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: accepted is 1 or more")
    sampled = temperature > 0
    seed = (0 if seed is None else seed) if sampled else None
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    common: dict[str, Any] = {
        "attention_mask": torch.ones_like(input_ids),
        "max_new_tokens": max_new_tokens,
        "pad_token_id": _pad_token(model),
        "return_dict_in_generate": False,
    }
    processors = [GumbelMax(seed=seed, temperature=temperature, **cuts)] if seed is not None else []
    drafting = {"confidence_threshold": confidence_threshold, "use_markov": use_markov}

    def ours(drafter: DSparkDraft | Drafter | None, settings: dict[str, Any], streamer: BaseStreamer) -> torch.Tensor:
        sampling = {"do_sample": True, "temperature": temperature, **cuts} if sampled else {"do_sample": False}
        return generation.generate(
            model,
            drafter,
            input_ids,
            verification="coupled",
            seed=seed,
            pack_weights=pack_weights,
            off_switch=False,  # the drafter is what is measured, also where it loses
            streamer=streamer,
            **settings,
            **common,
            **sampling,
        )

    def baseline(streamer: BaseStreamer) -> torch.Tensor:
        return model.generate(input_ids, do_sample=False, logits_processor=processors, streamer=streamer, **common)

    ways: dict[str, Callable[[BaseStreamer], torch.Tensor]] = {"ours": partial(ours, draft, drafting)}
    if undrafted and draft is not None:
        ways["undrafted"] = partial(ours, None, {})
    ways["baseline"] = baseline
    found = _alternate(ways, input_ids, repeats, progress)

    differences = {}
    for name in ways:
        different = _first_different(found, name)
        if different is not None:
            progress("looking at the first difference")
            tokens = (different[name].tokens, different["baseline"].tokens)
            processor = processors[0] if processors else None
            differences[name] = first_difference(model, input_ids, *tokens, tokenizer, processor)
    return _summary(model, draft, found, input_ids, seed, differences)


def _alternate(
    ways: dict[str, Callable[[BaseStreamer], torch.Tensor]],
    input_ids: torch.Tensor,
    repeats: int,
    progress: Callable[[str], None],
) -> list[dict[str, _Run]]:
    """All ways in each repeat, after a warm-up of each; every repeat starts with the next of them."""
    names, count, total = list(ways), itertools.count(1), len(ways) * (repeats + 1)

    def run(name: str, what: str = "") -> _Run:
        progress(f"run {next(count)} of {total}: {what}{_NAMES[name]}")
        return _timed(ways[name], input_ids)

    for name in names:
        run(name, "warming up ")
    found = []
    for index in range(repeats):
        first = index % len(names)
        found.append({name: run(name) for name in names[first:] + names[:first]})
    return found


def _first_different(found: list[dict[str, _Run]], name: str) -> dict[str, _Run] | None:
    """The first repeat in which this way gave other tokens than the baseline."""
    return next((runs for runs in found if runs[name].tokens != runs["baseline"].tokens), None)


def _timed(run: Callable[[BaseStreamer], torch.Tensor], input_ids: torch.Tensor) -> _Run:
    found = timed(run, input_ids.device)
    tokens = found.output[0, input_ids.shape[1] :].tolist()
    return _Run(tokens, found.seconds, found.after, getattr(found.output, "stats", None))


def _summary(
    model: PreTrainedModel,
    draft: DSparkDraft | Drafter | None,
    found: list[dict[str, _Run]],
    input_ids: torch.Tensor,
    seed: int | Sequence[int] | None,
    differences: dict[str, FirstDifference | None],
) -> Comparison:
    shown = _first_different(found, "ours") or found[0]
    first, plain = shown["ours"], shown["baseline"]
    rows: list[dict[str, float | None]] = [
        {
            **{name: run.speed for name, run in runs.items()},
            **{f"{name}_call": len(run.tokens) / run.seconds for name, run in runs.items()},
        }
        for runs in found
    ]
    ratios = _ratios(rows, "ours")
    stats = [runs["ours"].stats for runs in found if runs["ours"].stats is not None]
    rounds = sum(each.rounds for each in stats)
    parts = ("graph",) if any(each.seconds.graph for each in stats) else ("draft", "verify", "bookkeeping")
    per_round = {part: sum(getattr(each.seconds, part) for each in stats) / rounds for part in parts} if rounds else {}
    steps = sum(len(runs["baseline"].tokens) - 1 for runs in found)
    per_step = sum(runs["baseline"].after_first for runs in found) / steps if steps else None
    drafted = draft is not None and first.stats is not None and first.stats.rounds
    tau = first.stats.acceptance_length if drafted else None
    predicted = tau * per_step / sum(per_round.values()) if tau and per_step and per_round else None
    kind = "generate(do_sample=False)"
    return Comparison(
        mode="greedy" if seed is None else "coupled",
        baseline=kind if seed is None else "generate(do_sample=False, logits_processor=[GumbelMax(...)])",
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        seed=seed if seed is None or isinstance(seed, int) else list(seed),
        prompt_tokens=input_ids.shape[1],
        tokens=first.tokens,
        baseline_tokens=plain.tokens,
        identical="ours" not in differences,
        first_difference=differences.get("ours"),
        tokens_per_second=_median([row["ours"] for row in rows]),
        baseline_tokens_per_second=_median([row["baseline"] for row in rows]),
        speedup=_median(ratios),
        speedup_least=min(ratios, default=None),
        speedup_most=max(ratios, default=None),
        call_speedup=statistics.median(row["ours_call"] / row["baseline_call"] for row in rows),
        acceptance_length=tau,
        rounds=first.stats.rounds if first.stats is not None else 0,
        predicted_speedup=predicted,
        seconds_per_round=per_round,
        seconds_per_plain_step=per_step,
        pairs=rows,
        undrafted_tokens_per_second=_median([row.get("undrafted") for row in rows]),
        undrafted_speedup=_median(_ratios(rows, "undrafted")),
        undrafted_identical="undrafted" not in differences if "undrafted" in found[0] else None,
        undrafted_first_difference=differences.get("undrafted"),
    )


def _ratios(rows: list[dict[str, float | None]], name: str) -> list[float]:
    """How much faster this way was than the baseline of the same repeat."""
    return [row[name] / row["baseline"] for row in rows if row.get(name) and row["baseline"]]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _pad_token(model: PreTrainedModel) -> int:
    """Never used for one row, but transformers remarks on its absence."""
    config = model.generation_config
    for known in (config.pad_token_id, config.eos_token_id):
        if known is not None:
            return known if isinstance(known, int) else int(known[0])
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
