"""Options that several commands share, with their help."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import Annotated, Any

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


def _seed(text: str) -> int | list[int]:
    """N as an int; [N], as ``.stats.seeds`` shows the seed that a row ended up with, as a list of a signed one."""
    row = re.fullmatch(r"\[(.*)\]", text.strip())
    try:
        value = int(row[1] if row else text)
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**64:
        raise typer.BadParameter(f"{text!r}: accepted are integers of 64 bits, as N or '[N]'.")
    return [(value + 2**63) % 2**64 - 2**63] if row else value


def check_no_draft(no_draft: bool, draft: str | None, no_markov: bool, confidence_threshold: float) -> None:
    """Refuse options that need a drafter beside ``--no-draft``.

    Raises:
        typer.BadParameter: naming them.
    """
    given = {"--draft": draft is not None, "--no-markov": no_markov, "--confidence-threshold": confidence_threshold > 0}
    if no_draft and any(given.values()):
        named = " and ".join(name for name, is_given in given.items() if is_given)
        raise typer.BadParameter(f"it cannot go with {named}: there is no drafter then.", param_hint="'--no-draft'")


_PAIR = "Models"
_SAMPLING = "Sampling"
_DRAFTING = "Drafting"
_CPU = "On a CPU"

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
    Any,  # int | list[int] | None, which typer does not take
    typer.Option(
        metavar="N",
        parser=_seed,
        help="The same seed gives the same tokens; '[N]' is one of output.stats.seeds. Left out: a new one.",
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
NoDraft = Annotated[
    bool,
    typer.Option("--no-draft", help="Decode without a drafter; none is loaded then.", rich_help_panel=_DRAFTING),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Of torch; beside other work, fewer can be much faster.", rich_help_panel=_CPU
    ),
]
PackWeights = Annotated[
    bool | None,
    typer.Option(
        "--pack-weights/--no-pack-weights",
        help="Lay bf16 weights out for the processor: as much memory again. Left out: if that is at most 2 GiB.",
        show_default=False,
        rich_help_panel=_CPU,
    ),
]
