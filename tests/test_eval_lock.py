"""Files that two runs do not write at once, and that a kill leaves whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark_fast.evaluation import lock
from dspark_fast.evaluation.lock import alone

# The module alone, by its file: a child that imports torch takes seconds.
CHILD = """
import runpy, sys, time
with runpy.run_path(sys.argv[1])["alone"](sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that is alone at ``rows``."""
    words = [sys.executable, "-c", CHILD, lock.__file__, str(tmp_path / "rows")]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_another_process_is_told_of_and_its_kill_leaves_no_lock(holder, tmp_path):
    with pytest.raises(BlockingIOError, match=rf"another run is writing {tmp_path}/rows: wait"):
        with alone(tmp_path / "rows"):
            pass
    with alone(tmp_path / "others"):
        pass
    holder.kill()
    holder.wait()
    assert (tmp_path / "rows.lock").exists()  # what is left of it
    with alone(tmp_path / "rows"):
        pass
    assert not list(tmp_path.iterdir())


def test_one_of_two_in_turn(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of ours"), alone(tmp_path / "rows"):
            with pytest.raises(BlockingIOError), alone(tmp_path / "rows"):
                pass
            raise RuntimeError("of ours")
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"/nowhere/rows cannot be written: there is no folder .*/nowhere"):
        with alone(tmp_path / "nowhere" / "rows"):
            pass
