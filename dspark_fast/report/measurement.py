"""What all measurements have in common: plain data in and out, a figure, sentences and tables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dspark_fast.report.subject import Subject

Progress = Callable[[str], None]


class NotMeasurable(ValueError):
    """This pair lacks what the measurement is about; the text says what."""


@dataclass(frozen=True)
class Table:
    """Numbers as text, to be laid out.

    Attributes:
        columns: headings; the first column names the rows.
        rows: as many cells each.
        caption: what the numbers are, in a few words.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True)
class Strip:
    """One drafted block as text.

    Attributes:
        label: how it was drafted.
        anchor: text of the token that it follows.
        drafts: texts of the drafted tokens.
        accepted: how many of them the target accepted.
        following: text of the target's own token behind those; None where the answer had ended.
    """

    label: str
    anchor: str
    drafts: tuple[str, ...]
    accepted: int
    following: str | None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Strip:
        return cls(**{**data, "drafts": tuple(data["drafts"])})

    def sentence(self) -> str:
        """The block in words."""
        drafted = ", ".join(map(shown, self.drafts))
        end = "" if self.following is None else f", then put {shown(self.following)} itself"
        return (
            f"{self.label}: after {shown(self.anchor)} it drafted {drafted}; the target accepted {self.accepted} of "
            f"{len(self.drafts)}{end}"
        )


class Measurement(ABC):
    """One measurement's outcome; a frozen dataclass of plain fields, or of parts with ``from_dict``.

    Attributes:
        name: on the command line, and of its files.
        title: over its figure.
    """

    name: ClassVar[str]
    title: ClassVar[str]

    @classmethod
    @abstractmethod
    def measure(cls, subject: Subject, progress: Progress) -> Measurement:
        """Do it.

        Raises:
            NotMeasurable: the pair lacks what this is about.
            NotLossless: a token was not that of plain decoding, and rounding does not explain it.
        """

    @classmethod
    @abstractmethod
    def from_dict(cls, data: dict[str, Any]) -> Measurement:
        """From :meth:`to_dict`, also by way of JSON."""

    @abstractmethod
    def draw(self) -> Figure:
        """The figure.

        Raises:
            ImportError: without matplotlib (extra ``plots``).
        """

    @abstractmethod
    def sentences(self) -> list[str]:
        """What the figure shows, made from the numbers."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """The numbers."""

    def strips(self) -> list[Strip]:
        """Blocks to show as text."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: what is not finite becomes None."""
        return plain(asdict(self))  # type: ignore[call-overload]


def plain(value: Any) -> Any:
    """Tuples as lists, NaN and infinity, which JSON has no words for, as None."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 2) -> str:
    """A figure for people; a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.0f} %"


def shown(text: str) -> str:
    """A token for people, in quotes: its spaces count, its line breaks are written out."""
    return '"' + text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t") + '"'


def counted(count: int, noun: str) -> str:
    """``1 round``, ``1,200 rounds``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
