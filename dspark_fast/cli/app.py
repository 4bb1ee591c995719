"""The typer application that every command registers itself with."""

from __future__ import annotations

from typing import Annotated

import typer

from dspark_fast import __version__

app = typer.Typer(
    help="Lossless speculative decoding: several tokens per forward pass, and the model says what it would have said.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"dspark-fast {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """What all commands share; typer takes the text above from the app."""
