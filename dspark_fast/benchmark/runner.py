"""The run: equality in fp32, then every way on every case in alternation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark_fast.benchmark.calls import Call
from dspark_fast.benchmark.predicted import Costs
from dspark_fast.benchmark.rows import ALL, row_of
from dspark_fast.benchmark.verdict import sentences
from dspark_fast.benchmark.way import Pair, Way
from dspark_fast.benchmark.ways import BASELINE, chosen
from dspark_fast.benchmark.workload import Case, cases_of, check_room, place, read_sets
from dspark_fast.divergence import first_difference
from dspark_fast.machine import describe

Progress = Callable[[str], None]
Calls = dict[str, list[list[Call]]]  # by way, then by repeat, then by case

#: Calls on one prompt from which a prediction takes what a round costs, before anything is timed for the table.
FOR_COSTS = 2


@dataclass(frozen=True)
class Settings:
    """What is decoded and how often.

    Attributes:
        model: its name, for the report.
        batches: rows of a call; 1 decodes ``per_set`` prompts of each set one at a time, more that many together.
        contexts: tokens of each prompt; None: the prompts as they are.
        providers, also, without: names of ways; see :func:`dspark_fast.benchmark.ways.chosen`.
    """

    model: str
    prompts: tuple[Path, ...] = ()
    per_set: int = 2
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    max_new_tokens: int = 48
    repeats: int = 3
    providers: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Unequal(Exception):
    """One of ours does not say in fp32 what transformers' ``generate`` says: nothing is reported."""


@torch.no_grad()
def run(
    settings: Settings,
    load: Callable[[bool], tuple[Pair, Any]],
    *,
    exact_only: bool = False,
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Check and time; the report as plain data.

    Args:
        load: gives the models and the tokenizer; with True in fp32, with False in the dtype to be timed.
        exact_only: the dtype to be timed is fp32, so the models are loaded once.
        progress: called with a few words before each call.

    Raises:
        ValueError: for settings that cannot be, before anything is decoded.
        Unequal: if fp32 tokens of one of ours differ.
    """
    if settings.max_new_tokens < 2:
        raise ValueError(f"max_new_tokens is {settings.max_new_tokens}: accepted is 2 or more, the first is no step")
    if settings.repeats < 1:
        raise ValueError(f"repeats is {settings.repeats}: accepted is 1 or more")
    ways, absent = chosen(settings.providers, settings.also, settings.without)
    sets = read_sets(settings.prompts)
    pair, tokenizer = load(True)
    shapes = {
        (batch, context): cases_of(tokenizer, sets, batch=batch, per_set=settings.per_set, context=context)
        for batch in settings.batches
        for context in settings.contexts
    }
    for cases in shapes.values():
        check_room(cases, settings.max_new_tokens, pair.model.config, settings.model)
    left_out = [{"provider": name, "batch": None, "context": None, "why": why} for name, why in absent.items()]

    def leave(shape: tuple[int, int | None], way: Way, why: str) -> None:
        left_out.append({"provider": way.name, "batch": shape[0], "context": shape[1], "why": why})

    able: dict[tuple[int, int | None], list[Way]] = {}
    for shape, cases in shapes.items():
        able[shape] = check(pair, cases, ways, settings, shape[0], partial(leave, shape), progress)
    if not exact_only:
        del pair
        gc.collect()
        pair, tokenizer = load(False)
    rows: list[dict[str, Any]] = []
    for shape, cases in shapes.items():
        compiling: dict[str, float] = {}
        ready = warm_up(pair, cases, able[shape], settings, compiling, partial(leave, shape), progress)
        costs = take_costs(pair, cases, ready, settings, progress)
        calls = alternate(pair, cases, ready, settings, settings.repeats, compiling, progress)
        for row in rows_of(ready, cases, calls, costs):
            if row["set"] == ALL:
                row["compile_seconds"] = compiling.get(row["provider"])
                row["same_tokens"] = judge(pair, tokenizer, cases, calls, row["provider"])
            rows.append({"batch": shape[0], "context": shape[1], **row})
    return {
        "op": "bench",
        "model": settings.model,
        "draft": pair.draft_name,
        "assistant": pair.assistant_name,
        "assistant_drafts": pair.assistant_drafts,
        "lookup_drafts": pair.lookup_drafts,
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()},
            "prompts": [str(path) for path in settings.prompts] or "shipped",
        },
        "prompt_tokens": {
            place(*shape): [len(row) for case in cases for row in case.rows] for shape, cases in shapes.items()
        },
        "machine": describe(str(pair.model.device)),
        "rows": rows,
        "left_out": left_out,
        "verdict": sentences(rows),
    }


def check(
    pair: Pair,
    cases: Sequence[Case],
    ways: Sequence[Way],
    settings: Settings,
    batch: int,
    leave: Callable[[Way, str], None],
    progress: Progress,
) -> list[Way]:
    """The ways whose fp32 tokens are those of transformers' ``generate`` in every case.

    Args:
        leave: told of each other way, and why.

    Raises:
        Unequal: if it is one of ours that differs.
    """
    truths: list[torch.Tensor] = []
    able: list[Way] = []
    # The longest case first: transformers makes its static cache as long as the longest so far.
    order = sorted(range(len(cases)), key=lambda index: -cases[index].width)
    for way in ways:
        why = way.why_not(pair, batch)
        for count, index in enumerate(order):
            if why is not None:
                break
            progress(f"checking {way.label}, {count + 1} of {len(order)} in fp32")
            try:
                tokens = way.call(pair, cases[index], settings.max_new_tokens).tokens
            except Exception as error:  # whatever it is, the others can be compared without it
                why = _failure(error)
                break
            if way.name == BASELINE:
                truths.append(tokens)
            elif not torch.equal(tokens, truths[count]):
                same = int((tokens == truths[count]).long().cumprod(1).sum(1).min())
                why = f"its fp32 tokens differ from those of generate after {same} of {settings.max_new_tokens}"
                if way.ours:
                    raise Unequal(f"{way.label}: {why}, prompt {index + 1} at batch {batch}: nothing is reported")
        if why is None:
            able.append(way)
        elif way.name == BASELINE:
            raise ValueError(f"transformers' own generate, which all are measured in, cannot run: {why}")
        else:
            leave(way, why)
    return able


def warm_up(
    pair: Pair,
    cases: Sequence[Case],
    ways: Sequence[Way],
    settings: Settings,
    compiling: dict[str, float],
    leave: Callable[[Way, str], None],
    progress: Progress,
) -> list[Way]:
    """Run each way on the longest case, which compiles what is compiled; on a GPU on all, for graphs are recorded too.

    Args:
        compiling: gets the seconds that the first call took beyond a second one, by way.

    Returns:
        The ways that went through it.
    """
    longest, *others = sorted(cases, key=lambda case: -case.width)
    ready = []
    for way in ways:
        progress(f"warming up {way.label}")
        try:
            first = way.call(pair, longest, settings.max_new_tokens)
            if way.compiles:
                again = way.call(pair, longest, settings.max_new_tokens)
                compiling[way.name] = max(first.seconds - again.seconds, 0.0)
            for case in others if pair.model.device.type == "cuda" else ():
                way.call(pair, case, settings.max_new_tokens)
        except Exception as error:
            leave(way, _failure(error))
            continue
        ready.append(way)
    return ready


def take_costs(
    pair: Pair, cases: Sequence[Case], ways: Sequence[Way], settings: Settings, progress: Progress
) -> dict[str, Costs]:
    """What rounds and plain steps take, by way: on the longest case, apart from the calls that are judged by it."""
    longest = max(cases, key=lambda case: case.width)
    calls = alternate(pair, [longest], ways, settings, FOR_COSTS, {}, progress, "calibrating")
    found = {name: [call for repeat in repeats for call in repeat] for name, repeats in calls.items()}
    return {name: Costs.of(mine, found[BASELINE]) for name, mine in found.items()}


def alternate(
    pair: Pair,
    cases: Sequence[Case],
    ways: Sequence[Way],
    settings: Settings,
    repeats: int,
    compiling: dict[str, float],
    progress: Progress,
    doing: str = "timing",
) -> Calls:
    """Every way on every case, so many times; in each case of each repeat another way begins, so drift favours none."""
    calls: Calls = {way.name: [] for way in ways}
    for repeat in range(repeats):
        for way in ways:
            calls[way.name].append([])
        for number, case in enumerate(cases):
            turn = (repeat * len(cases) + number) % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                progress(f"{doing}, repeat {repeat + 1} of {repeats}, prompt {number + 1} of {len(cases)}: {way.label}")
                call = way.call(pair, case, settings.max_new_tokens)
                if call.compiling:  # a shape that the warm-up has not met
                    compiling[way.name] = compiling.get(way.name, 0.0) + call.compiling
                    call = way.call(pair, case, settings.max_new_tokens)
                calls[way.name][-1].append(call)
    return calls


def rows_of(ways: Sequence[Way], cases: Sequence[Case], calls: Calls, costs: dict[str, Costs]) -> list[dict[str, Any]]:
    """A row per way over all cases, and where there are several sets one for each."""
    sets = list(dict.fromkeys(case.set for case in cases))
    groups = {ALL: list(range(len(cases)))}
    if len(sets) > 1:
        groups |= {name: [i for i, case in enumerate(cases) if case.set == name] for name in sets}
    return [
        row_of(
            way,
            name,
            [[repeat[i] for i in members] for repeat in calls[way.name]],
            [[repeat[i] for i in members] for repeat in calls[BASELINE]],
            costs[way.name],
        )
        for way in ways
        for name, members in groups.items()
    ]


def judge(pair: Pair, tokenizer: Any, cases: Sequence[Case], calls: Calls, name: str) -> dict[str, Any]:
    """How many rows of the first repeat have the tokens of ``generate``; of the others, whether rounding explains it.

    In fp32 they were equal before; in 16-bit arithmetic a pass over a block rounds otherwise than one over a token.
    """
    same = near = 0
    unexplained = []
    for case, mine, theirs in zip(cases, calls[name][0], calls[BASELINE][0]):
        for ids, one, other in zip(case.rows, mine.tokens.tolist(), theirs.tokens.tolist()):
            prompt = torch.tensor([ids], device=pair.model.device)
            found = first_difference(pair.model, prompt, one, other, tokenizer)
            if found is None:
                same += 1
            elif found.near_tie:
                near += 1
            else:
                unexplained.append(found.sentence())
    return {"same": same, "near_ties": near, "unexplained": unexplained}


def _failure(error: BaseException) -> str:
    """What an exception says, short."""
    first = (str(error).strip() or "no message").splitlines()[0][:160]
    return f"failed: {type(error).__name__}: {first}"
