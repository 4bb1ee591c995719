"""What an evaluation has done so far, on disk: JSON lines, one per batch, that a second call goes on from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_fast.evaluation.counts import Counts
from dspark_fast.evaluation.result import PromptResult

_START = '{"settings": '
Key = tuple[float, str, tuple[str, ...]]


@dataclass(frozen=True)
class Batch:
    """Conversations of one domain that were answered together.

    Attributes:
        temperature: at which.
        domain: of all of them.
        prompts: each one's part.
        proposed, accepted: by block position, over all of their rounds; see :class:`~dspark_fast.evaluation.Counts`.
    """

    temperature: float
    domain: str
    prompts: tuple[PromptResult, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.temperature, self.domain, tuple(one.id for one in self.prompts)

    @property
    def counts(self) -> Counts:
        rounds, committed = (sum(getattr(one, name) for one in self.prompts) for name in ("rounds", "committed"))
        return Counts(len(self.prompts), rounds, committed, self.proposed, self.accepted)

    def line(self) -> str:
        """As it stands in the file."""
        prompts = [{"id": one.id, "new_tokens": one.new_tokens, "lengths": one.lengths} for one in self.prompts]
        row = {"temperature": self.temperature, "domain": self.domain, "prompts": prompts}
        return json.dumps({**row, "proposed": self.proposed, "accepted": self.accepted}) + "\n"

    @classmethod
    def read(cls, line: str) -> Batch:
        """Raises KeyError, TypeError or ValueError for another line."""
        row = json.loads(line)
        prompts = tuple(PromptResult.from_dict({**one, "domain": row["domain"]}) for one in row["prompts"])
        return cls(row["temperature"], row["domain"], prompts, tuple(row["proposed"]), tuple(row["accepted"]))


class Rows:
    """The batches in a file, and those that come to it.

    Nothing is written before :meth:`append`; a last line that an interruption cut is dropped then.

    Args:
        path: of the file, which need not exist; None keeps nothing.
        settings: what the batches depend on, as plain data: the file's must be the same.

    Raises:
        ValueError: for a path where no file can be; for a file of other settings, naming those that differ with both
            values; for one that is not such a file, or has a broken line in its middle, with its number.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._header = json.dumps({"settings": settings}) + "\n"
        self._whole = 0  # bytes of the file that are whole lines
        self.batches: dict[Key, Batch] = {}
        if self._path is not None and (self._path.is_dir() or not self._path.parent.is_dir()):
            raise ValueError(f"{self._path} cannot be written: it is a folder, or in none")
        if self._path is None or not self._path.is_file():
            return
        data = self._path.read_bytes()
        self._whole = data.rfind(b"\n") + 1
        begin = data[: len(_START)]
        if not _START.encode().startswith(begin):
            raise ValueError(f"{self._path} is not a file of this evaluation's rows: move it away, or write elsewhere")
        if not self._whole:
            return
        header, *lines = data[: self._whole].decode("utf-8", errors="replace").splitlines()
        self._compare(header, settings)
        for number, line in enumerate(lines, 2):
            try:
                batch = Batch.read(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self._path}:{number}: not a row of an evaluation ({error}): delete it") from None
            self.batches[batch.key] = batch

    def append(self, batch: Batch) -> None:
        """Keep a batch; it is on disk when this returns."""
        self.batches[batch.key] = batch
        if self._path is None:
            return
        line = (batch.line() if self._whole else self._header + batch.line()).encode()
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.truncate(self._whole)
            file.seek(self._whole)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(line)

    def _compare(self, header: str, settings: dict[str, Any]) -> None:
        try:
            theirs = json.loads(header)["settings"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._path}:1: not the settings of an evaluation: move the file away") from None
        ours = json.loads(json.dumps(settings))
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if names:
            # An earlier version did not note all of it; what is not known to be the same counts as another.
            before = {name: f"was {theirs[name]!r}" if name in theirs else "was not noted" for name in names}
            told = "; ".join(f"{name} {before[name]} and is {ours.get(name)!r}" for name in names)
            raise ValueError(
                f"{self._path} was begun with other settings ({told}): give the same ones again, write elsewhere, or "
                "delete it to begin anew"
            )


def fingerprint(model: Any) -> str:
    """A few hexadecimal digits that change when a model is trained further or is another one.

    Of up to 64 values of each tensor, spread over it. What has no tensors is told by its class.
    """
    found = hashlib.sha256(type(model).__name__.encode())
    tensors: Iterable[tuple[str, torch.Tensor]] = ()
    if isinstance(model, torch.nn.Module):
        tensors = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].double().tolist()
        found.update(f"{name}{tuple(tensor.shape)}{some}".encode())
    return found.hexdigest()[:12]
