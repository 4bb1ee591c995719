"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file to write aside; at the end of the ``with`` block it is put in its place.

    A kill or an exception leaves the old file, or none, and never half of the new one.

    Args:
        path: of the file; a symbolic link stays one.

    Raises:
        OSError: if it cannot be put there; the old file is as it was.
    """
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.tmp")  # one name, so that killed runs leave one such file at most
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8 by :func:`replacing`; raises what that raises."""
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def unwritable(path: Path) -> str | None:
    """Why no file can be put there, to be asked before minutes of work; None where one can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        return "it is no file"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK) else f"the folder {folder} is read-only"
