"""What the README quotes of the code: floors, defaults, levels. ``readme.py`` puts them in, as it does measurements."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
Values = dict[str, str]


def _pythons() -> Values:
    """The oldest that is allowed, and the newest that is named."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=(3\.\d+)"', project, re.MULTILINE)
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    return {"oldest": oldest, "newest": f"3.{max(map(int, named))}"}


def _capability() -> Values:
    from dspark_fast.backend import OLDEST_CAPABILITY

    return {"oldest": ".".join(map(str, OLDEST_CAPABILITY))}


def _chunk() -> Values:
    from dspark_fast.engine.target import PREFILL_CHUNK

    return {"tokens": f"{PREFILL_CHUNK:,}"}


def _unasked() -> Values:
    from dspark_fast.engine.prepacked import UNASKED

    return {"gib": f"{UNASKED / 2**30:g}"}


def _power() -> Values:
    """Of the whole suite, ``-m losslessness``."""
    from dspark_fast.losslessness.rows import DISTANCE

    seen = {100 * DISTANCE[kind][1] for kind in ("op", "loop")}
    assert len(seen) == 1, f"ops and loops are seen at {seen} %: the README says one figure"
    return {"percent": f"{seen.pop():g}"}


def _level() -> Values:
    from dspark_fast.doctor.examine import LEVEL

    return {"percent": f"{100 * LEVEL:g}"}


def _asked() -> Values:
    """Of ``dspark-fast doctor`` without options."""
    from dspark_fast.cli.doctor import doctor
    from dspark_fast.doctor.texts import conversations

    return {"prompts": str(len(conversations(inspect.signature(doctor).parameters["per_domain"].default)))}


def _tolerance() -> Values:
    from dspark_fast.benchmark.predicted import TOLERANCE

    return {"percent": f"{100 * TOLERANCE:g}"}


def _shipped() -> Values:
    """Of the drafter in this package."""
    from dspark_fast.config import DSparkConfig

    config = DSparkConfig.from_pretrained(ROOT / "dspark_fast" / "drafts" / "SmolLM2-135M-Instruct")
    return {"drafted": f"{config.draft_vocab_size:,}", "all": f"{config.vocab_size:,}"}


#: sentences of README.md
QUOTED: dict[str, Callable[[], Values]] = {
    "with Python {oldest} to {newest}, without a GPU": _pythons,
    "kernels on a GPU (compute capability {oldest} and later": _capability,
    "read in chunks of {tokens} tokens": _chunk,
    "if these take at most {gib} GiB": _unasked,
    "sees a total-variation error of {percent} %": _power,
    "The target answers {prompts} prompts greedily": _asked,
    "beyond chance (paired by block, {percent} % over all changes together)": _level,
    "Where that is more than {percent} % off, the file and the terminal say": _tolerance,
    "one in this package drafts {drafted} of {all} tokens": _shipped,
}
