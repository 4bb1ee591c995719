"""LOSSLESS.md names tests and rows that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark_fast.losslessness import ROWS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "LOSSLESS.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=["::".join(one) for one in NAMED])
def test_a_named_test_is_there(file, test):
    assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M)


def test_every_statement_names_a_test():
    """Each item of a list, and the paragraph on coupled mode; and there are as many names as colons between them."""
    items = [item for item in re.split(r"\n(?=- )|\n\n", PAGE) if item.startswith("- ")]
    assert len(items) >= 14 and all("::test_" in item for item in items)
    assert len(NAMED) > 20 and PAGE.count("::test_") == len(re.findall(r"`[\w/]+\.py::\w+`", PAGE))


def test_named_rows_are_there():
    named = [name for some in re.findall(r"rows? (`[^\]]+`)\]", PAGE) for name in re.findall(r"`([^`]+)`", some)]
    assert len(named) >= 5
    for name in named:
        assert any(row.name == name or row.name.split(" ", 1)[1] == name for row in ROWS), name
