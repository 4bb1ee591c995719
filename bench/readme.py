"""The README's measured numbers, from the JSON files under results/: none is written by hand.

    python bench/readme.py            # rewrites README.md and bench/README.md where a number has changed
    python bench/readme.py --check    # writes nothing; exit status 1 if it would

Figures of bench/README.md that are not its own come from here too, but for what ``static.py`` compiles.

A table stands between markers and is written whole. A number inside a sentence is found by the words around it
(:data:`claims.SENTENCES`), so that the text stays readable; if the words have changed, the script says which claim it
no longer finds. Defaults, floors and levels come from the code in the same way (:data:`quoted.QUOTED`). What is left
must not look measured: :func:`unexplained`. A speed that was measured while something else was using the machine is
no headline: its sentence is refused (:class:`trust.Untrusted`), and a table says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import ablation_report
import kernels_page
from claims import SENTENCES, TABLES, Results
from quoted import QUOTED

ROOT = Path(__file__).parent.parent
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?|[a-z]+(?:-[a-z]+)?)"
_HOLE = re.compile(r"\{(\w+)\}")
# Decimals, and numbers with a unit or a word that says they were counted or timed.
_UNITS = r"%|times|x\b|ms\b|us\b|s\b|seconds|minutes|hours|kB|MB|GB|MiB|GiB|TB/s"
_MEASURED = re.compile(rf"(?<![\w.#/=-])(?:\d[\d,]*\.\d+|\d[\d,]*(?= ?(?:{_UNITS})))")
# The same in words: "twice as fast", "three times the speed", "a quarter of the bytes".
_COUNT = r"(?:two|three|four|five|six|seven|eight|nine|ten|twenty|fifty|a\s+hundred)"
_OF = r"the\s+(?:speed|time|memory|bytes|tokens|cost)"
_WORDED = re.compile(
    rf"\b(?:twice|thrice|{_COUNT}\s+times)\s+(?:as\s+\w+|faster|slower|{_OF})\b"
    rf"|\b(?:half|(?:a|{_COUNT})\s+(?:third|quarter|fifth|tenth)s?\s+of)\s+{_OF}\b",
    re.IGNORECASE,
)


def written(text: str, results: Results, name: str) -> str:
    """The file ``name``'s text with every number as the results have it.

    Raises:
        LookupError: for a table or sentence that the text does not have exactly once.
        Untrusted: for a sentence that would quote a speed of a disturbed machine.
    """
    for table, make in TABLES.get(name, {}).items():
        begin, end = f"<!-- {table}:begin -->\n", f"<!-- {table}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise LookupError(f"{name} has not once what stands between {begin.strip()} and {end}")
        head, rest = text.split(begin)
        text = head + begin + make(results).rstrip("\n") + "\n" + end + rest.split(end)[1]
    for template, values in _sentences(name).items():
        found = list(re.finditer(_pattern(template), text))
        if len(found) != 1:
            raise LookupError(f"{name} says {len(found)} times, not once: {template}")
        match, new = found[0], values(results)
        for index in range(match.lastindex or 0, 0, -1):
            start, stop = match.span(index)
            text = text[:start] + new[_HOLE.findall(template)[index - 1]] + text[stop:]
    if name == "bench/README.md":
        text = ablation_report.with_section(text, ablation_report.section(results.ablation))
        text = kernels_page.written(text, results.folder)
    return text


def unexplained(text: str, name: str) -> list[str]:
    """Numbers that look measured, but that no table and no sentence accounts for."""
    for table in TABLES.get(name, {}):
        text = re.sub(rf"<!-- {table}:begin -->.*?<!-- {table}:end -->", "", text, flags=re.DOTALL)
    for template in _sentences(name):
        text = re.sub(_pattern(template), " ", text)
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    found = [one for pattern in (_MEASURED, _WORDED) for one in pattern.finditer(text)]
    return [text[max(0, one.start() - 50) : one.end() + 20].replace("\n", " ") for one in found]


def _sentences(name: str) -> dict[str, Callable[[Results], dict[str, str]]]:
    """Templates of the file's sentences, and what gives their values."""
    quoted = QUOTED if name == "README.md" else {}
    return {**SENTENCES.get(name, {}), **{words: lambda _, values=values: values() for words, values in quoted.items()}}


def _pattern(template: str) -> str:
    """A template's words as a regular expression: any white space between them, a group for each hole."""
    parts = [
        _NUMBER if _HOLE.fullmatch(part) else r"\s+".join(map(re.escape, re.split(r"\s+", part)))
        for part in re.split(r"(\{\w+\})", template)
    ]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    check = parser.parse_args().check
    results, different = Results(ROOT / "bench" / "results"), False
    for name in sorted({*TABLES, *SENTENCES}):
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = written(text, results, name)
        different |= new != text
        if new != text and not check:
            path.write_text(new, encoding="utf-8")
        for place in unexplained(new, name) if name == "README.md" else ():
            print(f"{name}: of no file under bench/results: ...{place}...", file=sys.stderr)
            different |= check
        print(f"{name}: {'differs' if check and new != text else 'written' if new != text else 'as the results say'}")
    sys.exit(1 if check and different else 0)


if __name__ == "__main__":
    main()
