"""One process at a time at a file: a lock that vanishes with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # anywhere else
    msvcrt = None  # type: ignore[assignment]

_FAR = 2**30  # Windows' locks keep others from reading what is locked: not the bytes that say who holds it


@contextlib.contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Be the only one at a file as long as the context lasts; refused at once if another process is there.

    What is locked is a file beside it, ``<name>.lock``, by the operating system and not by its being there: what a
    killed process leaves of it holds nobody up. Where a file system knows no locks, as some of networks, nobody is kept
    out.

    Args:
        path: of the file to be alone at, in a folder that is there; the file itself is not touched.

    Raises:
        BlockingIOError: another one holds the lock, with the number of its process.
        ValueError: nothing can be written there.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f"{path.name}.lock")
    file = _held(path, beside)
    try:
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            if fcntl is None:  # Windows removes no file that is open
                os.close(file)
                beside.unlink()
            else:  # removed while it is held, so that it is nobody else's
                beside.unlink()
        if fcntl is not None:
            os.close(file)


def _held(path: Path, beside: Path) -> int:
    """The lock's file, open and locked."""
    while True:
        try:
            file = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            _lock(file)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(beside)):
                    return file
            # The one before has removed it between our opening and our locking: what we hold is nowhere.
        except BlockingIOError:
            os.lseek(file, 0, os.SEEK_SET)
            holder = os.read(file, 20).decode(errors="replace") or "unknown"
            os.close(file)
            raise BlockingIOError(
                f"another run (process {holder}) is writing {path}: wait for it to end, or write elsewhere"
            ) from None
        os.close(file)


def _lock(file: int) -> None:
    """Raises BlockingIOError if another one has it; does nothing where the system or the file system has no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return
    elif msvcrt is not None:
        os.lseek(file, _FAR, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(str(error)) from None
        os.lseek(file, 0, os.SEEK_SET)
