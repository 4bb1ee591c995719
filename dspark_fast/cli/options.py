"""Options that several commands share, with their help."""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated

import typer

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class DtypeName(str, Enum):
    """``--dtype``."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Verification(str, Enum):
    """``--verification``."""

    rejection = "rejection"
    coupled = "coupled"


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


_PAIR = "Models"
_SAMPLING = "Sampling"
_DRAFTING = "Drafting"

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The target: a known model, or with --draft any folder or hub name.", rich_help_panel=_PAIR
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The drafter: a folder or hub name. A known model has its own.", rich_help_panel=_PAIR
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option(
        help="auto: on a CPU bf16 where it has the instructions, else fp32; on a GPU the checkpoint's.",
        rich_help_panel=_PAIR,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="cpu, cuda, cuda:1, ... Left out: the GPU if there is one.", rich_help_panel=_PAIR
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Stop after so many tokens.")]
System = Annotated[str | None, typer.Option(help="A system message before the conversation.", metavar="TEXT")]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="X", min=0.0, callback=_number, help="0 takes the likeliest token each time.", rich_help_panel=_SAMPLING
    ),
]
TopK = Annotated[
    int, typer.Option(metavar="K", min=0, help="Keep the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0.0,
        max=1.0,
        callback=_number,
        help="Keep the likeliest of this total mass.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0.0,
        max=1.0,
        callback=_number,
        help="Drop what is below this part of the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=2**64 - 1,
        help="The same seed gives the same tokens. Left out: a new one.",
        rich_help_panel=_SAMPLING,
    ),
]
Verify = Annotated[
    Verification | None,
    typer.Option(
        help="How drafts are judged at a temperature. rejection: the same distribution, more drafts accepted. coupled: "
        "exactly the tokens of plain Gumbel-max sampling with the same seed.",
        show_default="rejection",
        rich_help_panel=_SAMPLING,
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        metavar="P",
        min=0.0,
        max=1.0,
        callback=_number,
        help="Cut a block before its first draft that the drafter trusts less than this; 0: never.",
        rich_help_panel=_DRAFTING,
    ),
]
NoMarkov = Annotated[
    bool,
    typer.Option("--no-markov", help="Leave the drafter's Markov head out.", rich_help_panel=_DRAFTING),
]
