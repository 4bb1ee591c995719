"""A report from its settings: what is missing is measured and kept at once, then everything is drawn and laid out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_fast.evaluation import Prompt, read_prompt_file, shipped_prompts
from dspark_fast.machine import describe
from dspark_fast.pairs import best_dtype, chosen_device, draft_name, load
from dspark_fast.report.confidence import Confidence
from dspark_fast.report.domains import Domains
from dspark_fast.report.heads import Heads
from dspark_fast.report.measurement import Measurement, NotMeasurable, Progress
from dspark_fast.report.memory import Memory
from dspark_fast.report.page import page
from dspark_fast.report.positions import Positions
from dspark_fast.report.speed import Speed
from dspark_fast.report.store import Store
from dspark_fast.report.style import COLOURS, check_plots
from dspark_fast.report.subject import NotLossless, Subject, small_drafter
from dspark_fast.report.sweep import Sweep
from dspark_fast.targets import load_target

__all__ = ["ALL", "NotLossless", "ReportSettings", "load_subject", "run"]

#: in the order of the page
ALL: tuple[type[Measurement], ...] = (Speed, Domains, Positions, Confidence, Sweep, Heads, Memory)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE = "report.html"


@dataclass(frozen=True)
class ReportSettings:
    """What a report is of.

    Attributes:
        model, draft: the pair, see :func:`dspark_fast.load`.
        autoregressive: a smaller model of the same vocabulary to hold it against; None: the target's first layers.
        layers: how many of them; None: half.
        dtype: ``auto``, ``bf16``, ``fp16`` or ``fp32``.
        device: None: the GPU if there is one.
        prompts: a JSONL file of prompts; None: those that ship with the package.
        per_domain: the first so many of each domain.
        max_new_tokens: per answer.
        seed: of the heads' training.

    Raises:
        ValueError: for a value out of range.
    """

    model: str
    draft: str | None = None
    autoregressive: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    device: str | None = None
    prompts: str | None = None
    per_domain: int = 4
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("layers", 1), ("per_domain", 1), ("max_new_tokens", 2), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: accepted is {least} or more")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: accepted are auto, {', '.join(DTYPES)}")
        if self.autoregressive is not None and self.layers is not None:
            raise ValueError("autoregressive and layers are given: accepted is one of them")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ReportSettings:
        return cls(**data)

    def chosen_prompts(self) -> list[Prompt]:
        """The first ``per_domain`` prompts of each domain.

        Raises:
            ValueError: for a file that cannot be read as prompts; OSError for one that cannot be read at all.
        """
        domains: dict[str, list[Prompt]] = {}
        for prompt in shipped_prompts() if self.prompts is None else read_prompt_file(self.prompts):
            domains.setdefault(prompt.domain, []).append(prompt)
        return [prompt for mine in domains.values() for prompt in mine[: self.per_domain]]

    def identity(self) -> dict[str, Any]:
        """What the figures depend on, to tell one report from another: a file counts by what stands in it."""
        asked = repr([(one.domain, one.id, one.messages) for one in self.chosen_prompts()])
        name = "shipped" if self.prompts is None else Path(self.prompts).name
        return {
            **asdict(self),
            "prompts": f"{name} {hashlib.sha256(asked.encode()).hexdigest()[:12]}",
            "drafter": draft_name(self.model, self.draft),
        }


def run(
    settings: ReportSettings,
    out: Path,
    only: Sequence[str] = (),
    *,
    again: bool = False,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda text: None,
) -> list[Path]:
    """Measure what is missing, draw everything that was asked for, and write the page if that is all of it.

    Args:
        settings: of the report.
        out: folder of ``report.json``, a PNG for each measurement, and ``report.html``. What is there of the same
            settings is not measured again.
        only: names of :data:`ALL`; empty: all of them, and the page.
        again: measure anew what is there; all of it, of other settings too.
        note: told what is worth a line; progress: what is being done.

    Returns:
        The files written.

    Raises:
        ValueError: for a name or setting that is not accepted; a folder of other settings, unless all of it is
            measured ``again``, or of another machine where something is to be measured; models that do not fit each
            other; with ``only``, NotMeasurable.
        TargetError: a model cannot be had.
        NotLossless: tokens were not those of plain decoding. What was measured before stays.
        ImportError: without matplotlib.
    """
    kinds = {kind.name: kind for kind in ALL}
    unknown = [name for name in only if name not in kinds]
    if unknown:
        raise ValueError(f"only is {', '.join(map(repr, unknown))}: accepted are {', '.join(kinds)}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"out is {str(out)!r}, which is a file: accepted is a folder")
    check_plots()
    device = chosen_device(settings.device)
    store = Store(out, settings.identity(), anew=again and not only)
    wanted = [name for name in kinds if not only or name in only]
    missing = [name for name in wanted if again or name not in store.names]
    kept = [name for name in store.names if name not in missing]
    if missing:
        machine = describe(str(device))
        store.check_machine(machine, kept)
        for name in (one for one in wanted if one in kept):
            note(f"{name}: kept from an earlier run of the same settings")
        _measure(settings, store, out, machine, missing, bool(only), note, progress)
    elif wanted:
        note(f"{', '.join(wanted)}: measured before with the same settings; drawn again (--again measures anew)")
    found = {name: store.found(kinds[name]) for name in wanted if name in store.names}
    pictures = {name: _draw(one, out) for name, one in found.items()}
    files = [store.path, *pictures.values()]
    if not only:
        shown = {name: path.read_bytes() for name, path in pictures.items()}
        text = page(store.data, found, shown, settings.to_dict())
        (out / PAGE).write_text(text, encoding="utf-8")
        files.append(out / PAGE)
    return files


def _draw(one: Measurement, out: Path) -> Path:
    path = out / f"{one.name}.png"
    one.draw().savefig(path)
    return path


def _measure(
    settings: ReportSettings,
    store: Store,
    out: Path,
    machine: dict[str, Any],
    names: Sequence[str],
    asked: bool,
    note: Callable[[str], None],
    progress: Progress,
) -> None:
    """Measure these and keep each as soon as it is done."""
    about = {"pair": {"model": settings.model, "draft": draft_name(settings.model, settings.draft)}}
    kinds = {kind.name: kind for kind in ALL}
    # Memory comes first: a model that is loaded here would take the room of those in the processes that it starts.
    subject: Any = None
    for name in sorted(names, key=lambda name: name != Memory.name):
        start = time.perf_counter()
        if name != Memory.name and subject is None:
            subject = load_subject(settings)
            about["pair"] |= {"dtype": str(subject.model.dtype).removeprefix("torch."), "small": subject.small_name}
            about["prompts"] = {one: sum(p.domain == one for p in subject.prompts) for one in subject.domains}
        about["pair"] = {**store.data.get("pair", {}), **about["pair"]}
        try:
            one = kinds[name].measure(settings if name == Memory.name else subject, progress)  # type: ignore[arg-type]
        except NotMeasurable as error:
            if asked:
                raise
            store.omit(name, str(error), about)
            note(f"{name}: left out, {error}")
            continue
        store.put(one, machine, time.perf_counter() - start, about)
        _draw(one, out)
        note(f"{name}: measured in {time.perf_counter() - start:.0f} s")


def load_subject(settings: ReportSettings, ways: Collection[str] = tuple(COLOURS)) -> Subject:
    """Load what these ways of decoding need.

    Raises:
        ValueError, TargetError: see :func:`dspark_fast.load`, :func:`~dspark_fast.report.subject.small_drafter`.
    """
    prompts = settings.chosen_prompts()
    device, dtype, draft = chosen_device(settings.device), DTYPES.get(settings.dtype), None
    if "dspark" in ways:
        model, draft, tokenizer = load(settings.model, draft=settings.draft, dtype=dtype, device=device)
    else:
        model, tokenizer = load_target(settings.model, best_dtype(device) if dtype is None else dtype, device)
    small, small_name = None, ""
    if "autoregressive" in ways:
        other = settings.autoregressive and load_target(settings.autoregressive, model.dtype, device)[0]
        small, small_name = small_drafter(model, other or None, settings.autoregressive, settings.layers)
    return Subject(model, draft, tokenizer, small, small_name, prompts, settings.max_new_tokens, settings.seed)
