"""Other launch parameters than the table's, for trying them: side by side in one run, or compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def launched(kernel: str, **changes: int) -> Iterator[None]:
    """Launch ``kernel`` (a name in ``kernels/tables``) with these parameters changed while the block lasts."""
    from dspark_fast.kernels import launch

    true = launch.parameters
    launch.parameters = lambda name, device: true(name, device) | (changes if name == kernel else {})
    try:
        yield
    finally:
        launch.parameters = true
