"""The READMEs' measured numbers are those of the files in bench/results, and the check can fail."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def readme(monkeypatch):
    """The module ``bench/readme.py``, and the repository's results."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    module = importlib.import_module("readme")
    return module, module.Results(ROOT / "bench" / "results")


@pytest.mark.parametrize("name", ["README.md", "bench/README.md"])
def test_every_number_is_that_of_its_file(name, readme):
    module, results = readme
    text = (ROOT / name).read_text()
    assert module.written(text, results, name) == text, "run: python bench/readme.py"


def test_no_number_is_written_by_hand(readme):
    """One that looks measured belongs to a table, to a sentence that is filled in, or to what is said not to be one."""
    module, _ = readme
    text = (ROOT / "README.md").read_text()
    assert module.unexplained(text, "README.md") == []
    for lie in ("It is 7.3 times as fast.", "It takes 80 ms.", "It keeps 12 % of them.", "A tau of 3.25 is reached."):
        assert len(module.unexplained(text + "\n" + lie, "README.md")) == 1


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("planted faults", "planted errors"),  # the sentence is no longer found
        ("<!-- mutants:end -->", ""),
    ],
)
def test_what_is_no_longer_found_is_said(was, instead, readme):
    module, results = readme
    text = (ROOT / "README.md").read_text()
    with pytest.raises(LookupError, match=r"README\.md"):
        module.written(text.replace(was, instead), results, "README.md")


def test_a_number_that_changed_is_written(readme):
    module, results = readme
    text = (ROOT / "README.md").read_text()
    results.acceptance = copy.deepcopy(results.acceptance)
    results.acceptance["results"][0]["mean_tau"] = 9.87
    rows = copy.deepcopy(results.five_prompts["rows"])
    rows[-1]["speedup"] = 6.54
    results.five_prompts = {**results.five_prompts, "rows": rows}
    new = module.written(text, results, "README.md")
    assert "it is 9.87 (" in new and "9.87" not in text
    assert "| 6.54 (" in new and new.count("\n") == text.count("\n")
    changed = [line for line, before in zip(new.splitlines(), text.splitlines()) if line != before]
    assert len(changed) == 3  # the row, the mean, the sentence
