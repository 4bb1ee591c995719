"""A kill or a full disk leaves the old file, or none, and never half of the new one."""

from __future__ import annotations

import os

import pytest

from dspark_fast.writing import write_whole


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path, link = tmp_path / "out.json", tmp_path / "link"
    write_whole(path, "old\n")
    link.symlink_to(path)
    seen = []

    def killed(aside, place):
        seen.append((aside.read_text(encoding="utf-8"), path.read_text()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "new, é\n")
    assert seen == [("new, é\n", "old\n")] and path.read_text() == "old\n"
    write_whole(link, "new, é\n")
    assert link.is_symlink() and path.read_text(encoding="utf-8") == "new, é\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "out.json"]


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "out.json", "text")
    assert not list(tmp_path.iterdir())
