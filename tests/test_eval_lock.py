"""Files that two runs do not write at once, and that a kill leaves whole."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

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
    with pytest.raises(
        BlockingIOError, match=rf"another run \(process {holder.pid}\) is writing {tmp_path}/rows: wait"
    ):
        with alone(tmp_path / "rows"):
            pass
    with alone(tmp_path / "others"):
        pass
    holder.kill()
    holder.wait()
    assert (tmp_path / "rows.lock").read_text() == str(holder.pid)  # what is left of it
    with alone(tmp_path / "rows"):
        assert (tmp_path / "rows.lock").read_text() == str(os.getpid())
    assert not list(tmp_path.iterdir())


def test_one_of_two_in_turn(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of ours"), alone(tmp_path / "rows"):
            with pytest.raises(BlockingIOError), alone(tmp_path / "rows"):
                pass
            raise RuntimeError("of ours")
    assert not list(tmp_path.iterdir())


def test_a_lock_on_a_file_that_was_just_removed_is_none(tmp_path, monkeypatch):
    """The one before removes it between our opening and our locking, and a third one makes it anew."""
    real, calls, beside = lock._lock, [], tmp_path / "rows.lock"

    def late(file):
        calls.append(file)
        if len(calls) < 3:
            beside.unlink()
            if len(calls) == 2:
                beside.touch()
        real(file)

    monkeypatch.setattr(lock, "_lock", late)
    with alone(tmp_path / "rows"):
        assert len(calls) == 3 and beside.read_text() == str(os.getpid())
        monkeypatch.setattr(lock, "_lock", real)
        with pytest.raises(BlockingIOError), alone(tmp_path / "rows"):
            pass


def test_where_there_is_no_fcntl(tmp_path, monkeypatch):
    """Windows' locks are stood in for; where there are none at all, and where a file system has none, nobody waits."""
    held = set()

    def locking(file, mode, count):
        place = os.fstat(file).st_ino, os.lseek(file, 0, os.SEEK_CUR), count
        if place in held:
            raise PermissionError(13, "Permission denied")
        held.add(place)

    def unsupported(file, mode):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(lock, "fcntl", None)
    with alone(tmp_path / "rows"):
        with pytest.raises(BlockingIOError, match=rf"process {os.getpid()}\)"), alone(tmp_path / "rows"):
            pass
    assert not list(tmp_path.iterdir())
    for system in (None, SimpleNamespace(flock=unsupported, LOCK_EX=2, LOCK_NB=4)):
        monkeypatch.setattr(lock, "msvcrt", None)
        monkeypatch.setattr(lock, "fcntl", system)
        with alone(tmp_path / "rows"), alone(tmp_path / "rows"):
            pass
        assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written(tmp_path):
    with pytest.raises(ValueError, match="/nowhere/rows cannot be written: No such file or directory"):
        with alone(tmp_path / "nowhere" / "rows"):
            pass
