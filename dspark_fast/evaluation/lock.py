"""One process at a time at a file: a lock that vanishes with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


@contextlib.contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Be the only one at a file as long as the context lasts; refused at once if another process is there.

    What is locked is a file beside it, ``<name>.lock``, by the operating system and not by its being there: what a
    killed process leaves of it holds nobody up.

    Args:
        path: of the file to be alone at, in a folder that is there; the file itself is not touched.

    Raises:
        BlockingIOError: another one holds the lock.
        ValueError: nothing can be written there.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():  # which the lock would make
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
    beside = path.with_name(f"{path.name}.lock")
    lock = FileLock(beside, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(f"another run is writing {path}: wait for it to end, or write elsewhere") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no file that is open
            beside.unlink()
        lock.release()
