"""What a way to decode is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from dspark_fast.benchmark.calls import Call
from dspark_fast.benchmark.workload import Case
from dspark_fast.draft import DSparkDraft


@dataclass(frozen=True)
class Pair:
    """Models of one dtype, and what drafts how far ahead.

    Attributes:
        model: the target.
        draft: its DSpark drafter, and ``draft_name`` in words.
        assistant: a smaller causal model, which drafts token by token; None where none was to be had.
        assistant_name: in words.
        assistant_drafts: tokens that it drafts per round, with us and with transformers.
        lookup_drafts: tokens that transformers' prompt lookup copies per round.
        why_no_assistant: why there is none.
    """

    model: PreTrainedModel
    draft: DSparkDraft
    draft_name: str
    assistant: PreTrainedModel | None
    assistant_name: str
    assistant_drafts: int
    lookup_drafts: int
    why_no_assistant: str = ""


@dataclass(frozen=True)
class Way:
    """One way to decode.

    Attributes:
        name: on the command line and in JSON.
        label: in the table.
        call: decodes a case greedily, so many new tokens of each row, stop tokens or not.
        why_not: why a case of so many rows cannot be decoded with it; None where it can.
        ours: whether it is one of this package's.
        compiles: whether its first call compiles.
        extra: whether it is run only on request.
    """

    name: str
    label: str
    call: Callable[[Pair, Case, int], Call]
    why_not: Callable[[Pair, int], str | None] = lambda pair, batch: None
    ours: bool = False
    compiles: bool = False
    extra: bool = False
