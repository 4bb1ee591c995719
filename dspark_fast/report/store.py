"""What a report has measured so far: one JSON file, written anew after every measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark_fast.report.measurement import Measurement
from dspark_fast.writing import write_whole

FILE = "report.json"
VERSION = 1


class Store:
    """``report.json`` in a folder.

    Args:
        folder: made when something is written.
        settings: of the report, as plain data.
        anew: everything is to be measured anew: a report of other settings is written over, not refused.

    Raises:
        ValueError: for a file that is not a report's; without ``anew``, for one of other settings, naming those that
            differ.
        OSError: for a file that cannot be read.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, anew: bool = False) -> None:
        self.path = folder / FILE
        self.data: dict[str, Any] = {"version": VERSION, "settings": settings, "measurements": {}, "omitted": {}}
        if not self.path.is_file():
            return
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            if there["version"] != VERSION:
                raise ValueError(f"its version is {there['version']}")
            before = there["settings"]
            known = set(there["measurements"]) | set(there["omitted"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is no report of this version ({error}): take another folder") from None
        different = [
            f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
            for name in dict.fromkeys([*before, *settings])
            if before.get(name) != settings.get(name)
        ]
        if different and known and not anew:
            raise ValueError(
                f"{self.path} holds a report of other settings ({'; '.join(different)}): give the same ones, or "
                "another folder, or measure all of it with --again"
            )
        if not different:
            self.data = there

    @property
    def names(self) -> list[str]:
        """What is measured."""
        return list(self.data["measurements"])

    def found(self, kind: type[Measurement]) -> Measurement:
        """One measurement as it was.

        Raises:
            ValueError: if it cannot be read.
        """
        try:
            return kind.from_dict(self.data["measurements"][kind.name]["found"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {kind.name} cannot be read ({error!r}): measure it with --again") from None

    def check_machine(self, machine: dict[str, Any], names: list[str]) -> None:
        """Whether these measurements, which are kept, were made where the next ones will be.

        Raises:
            ValueError: naming what differs.
        """
        for name in names:
            before = self.data["measurements"][name]["machine"]
            different = [
                f"{key} {before.get(key)} there, {value} here"
                for key, value in machine.items()
                if before.get(key) != value and key != "cores"  # which a container may be given more of; threads count
            ]
            if different:
                raise ValueError(
                    f"{self.path}: {name} was measured elsewhere ({'; '.join(different)}), and figures of two machines "
                    "do not belong on one page: take another folder, or measure all of it with --again"
                )

    def put(self, one: Measurement, machine: dict[str, Any], seconds: float, about: dict[str, Any]) -> None:
        """Keep a measurement, on disk at once."""
        self.data |= about
        self.data["measurements"][one.name] = {"machine": machine, "seconds": round(seconds, 1), "found": one.to_dict()}
        self.data["omitted"].pop(one.name, None)
        self._write()

    def omit(self, name: str, why: str, about: dict[str, Any]) -> None:
        """Keep why there is no such measurement."""
        self.data |= about
        self.data["omitted"][name] = why
        self.data["measurements"].pop(name, None)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.data, allow_nan=False) + "\n")
