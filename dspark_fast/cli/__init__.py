"""The command line, ``dspark-fast``. Needs the extra ``cli`` (typer and rich)."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run ``dspark-fast`` with ``arguments``, or those of the process; always ends by ``SystemExit``.

    Raises:
        SystemExit: 0 for success, 1 for what went wrong outside, 2 for a bad argument or a missing extra, 130 for
            Ctrl-C.
    """
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ModuleNotFoundError as error:
            print(f'The command line needs {error.name}: pip install "dspark-fast[cli]"', file=sys.stderr)
            raise SystemExit(2) from None
        # Each module registers its command with the app.
        from dspark_fast.cli import bench, chat, doctor, eval, generate, report, train  # noqa: F401
        from dspark_fast.cli.app import app

        app(args=arguments, prog_name="dspark-fast")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
