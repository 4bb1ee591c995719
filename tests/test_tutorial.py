"""The tutorial: its fast form runs without an error, a broken step makes it fail, what is committed is a full run."""

from __future__ import annotations

import base64
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from dspark_fast.report import memory, memory_worker

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "dspark_from_scratch.ipynb"
EQUALITIES = ("greedy-by-hand", "attention", "answer-by-hand", "one-line", "coupled", "memory-by-hand")
FIGURES = 12
MEMORY = ("cell-35", "memory", "memory-by-hand")  # of chapter 6, what its memory needs
# by cell: what stands there, what is put in its place, and the cell that must then fail
FAULTS = {
    "a rejected guess is kept": ("greedy-by-hand", "guesses[:, :kept]", "guesses[:, : kept + 1]", "greedy-by-hand"),
    "another q than was drawn from": ("toy-law", "    walk.logits,", "    p.log().expand(DRAWS, 1, 5),", "toy-law"),
    "keys turned by wrong angles": ("attention", "cos[:, first : first + count]", "cos[:, :count]", "attention"),
    "a rejected draft is committed": ("round", "tokens[0, :count]", "tokens[0, : count + 1]", "answer-by-hand"),
    "what was refused stays cached": ("round", "cache.crop(count - BLOCK)", "pass", "answer-by-hand"),
    "sampled in place of greedy": ("one-line", "do_sample=False", "do_sample=True, temperature=9.0", "one-line"),
    "noise of another seed": ("coupled", "GumbelMax(seed=seed", "GumbelMax(seed=seed + 1", "coupled"),
    "weighed in another dtype": ("memory", "[model.dtype]", "[torch.bfloat16]", "memory-by-hand"),
    "another drafter's bytes": ("memory-by-hand", '"plain", "dspark"', '"plain", "autoregressive"', "memory-by-hand"),
}


@pytest.fixture(scope="module", autouse=True)
def kernels_home(tmp_path_factory):
    """Kernels write their connection and history files here, and have one thread each."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_tutorial", EXAMPLES / "run_tutorial.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(one.text for one in cell.outputs if one.output_type == "stream")


def figures(notebook):
    outputs = (one for cell in code_cells(notebook) for one in cell.outputs)
    return [base64.b64decode(one.data["image/png"]) for one in outputs if "image/png" in one.get("data", {})]


def check_outputs(notebook):
    """What every executed form must have."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert all(one.output_type != "error" and one.get("name") != "stderr" for one in cell.outputs), cell.id
        assert not re.search(r"Traceback|Warning|warn", printed(cell)), printed(cell)
    for name in EQUALITIES:
        (cell,) = (cell for cell in cells if cell.id == name)
        assert "assert " in cell.source and "True" in printed(cell) and "False" not in printed(cell), name
    pictures = figures(notebook)
    assert len(pictures) == FIGURES
    assert all(one.startswith(b"\x89PNG") and len(one) > 4000 for one in pictures)
    check_memory({cell.id: cell for cell in cells})


def check_memory(cells):
    """A figure, and words of the bytes that the table beneath has."""
    assert len([one for one in cells["memory"].outputs if "image/png" in one.get("data", {})]) == 1
    said, weighed = printed(cells["memory"]), weighed_bytes(cells)
    target, own = (f"{weighed[name] / 1e6:,.0f} MB" for name in ("target's weights", "drafter's own weights"))
    cached = "{:.1f} MB of cached context".format(weighed["DSpark: drafter's cache"] / 1e6)
    assert f"to the target's {target}: {own} of weights of its own" in said and cached in said
    peaks = re.search(r"peak of the process is ([\d,]+) MB with it and ([\d,]+) MB without", said).groups()
    assert all(1e6 * int(one.replace(",", "")) > weighed["target's weights"] for one in peaks)


def weighed_bytes(cells):
    """By row of the table."""
    rows = re.findall(r"^(.+?) +[\d,]+ +([\d,]+)$", printed(cells["memory-by-hand"]), re.MULTILINE)
    return {name: int(value.replace(",", "")) for name, value in rows}


def cpu_seconds(notebook):
    """What the last cell says that it took: no other process counts."""
    return int(re.search(r"(\d+) s of CPU time", printed(code_cells(notebook)[-1]))[1])


def test_the_fast_form_runs_and_says_what_it_should(runner, monkeypatch):
    before = NOTEBOOK.read_bytes()
    notebook = runner.execute(read(), fast=True)
    check_outputs(notebook)
    cells = {cell.id: printed(cell) for cell in code_cells(notebook)}
    assert "fast form" in code_cells(notebook)[-1].outputs[0].text
    assert cpu_seconds(notebook) < 60
    lengths = [int(one) for one in re.search(r"each round: ([\d ]+)", cells["greedy-by-hand"])[1].split()]
    assert sum(lengths) >= 20 and all(1 <= one <= 4 for one in lengths)
    assert float(re.search(r"tau ([\d.]+)", cells["answer-by-hand"])[1]) > 1.1  # some drafts are accepted
    assert float(re.search(r"after \d+ steps ([\d.]+)", cells["training"])[1]) >= 1
    monkeypatch.syspath_prepend(str(EXAMPLES))
    model, draft, _ = importlib.import_module("tiny_pair").load()
    weighed = weighed_bytes({cell.id: cell for cell in code_cells(notebook)})
    for name, part in (("target's weights", model), ("drafter's own weights", draft)):
        assert weighed[name] == sum(one.nbytes for one in (*part.parameters(), *part.buffers()))
    assert NOTEBOOK.read_bytes() == before


def test_a_broken_step_fails_the_run(runner):
    notebook = read()
    name, right, wrong, _ = FAULTS["a rejected guess is kept"]
    place = [cell.id for cell in notebook.cells].index(name)
    del notebook.cells[place + 1 :]
    notebook.cells[place].source = notebook.cells[place].source.replace(right, wrong)
    with pytest.raises(CellExecutionError, match="AssertionError"):
        runner.execute(notebook, fast=True)


@pytest.fixture(scope="module")
def cells_and_names():
    """Code cells by name: their text, and the names that each finds, run in this process.

    Those up to chapter 5, and of chapter 6 the memory's, which is of this process as well.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("DSPARK_TUTORIAL_FAST", "1")
        patch.setattr(memory, "_measured", memory_worker.main)
        cells, names = {}, {"__name__": "tutorial"}
        order = {cell.id: cell.source for cell in code_cells(read())}
        for name in (*list(order)[: list(order).index("coupled") + 1], *MEMORY):
            cells[name] = order[name], dict(names)
            exec(compile(order[name], name, "exec"), names)
        yield cells


@pytest.mark.parametrize("fault", FAULTS)
def test_each_equality_fails_when_its_step_is_broken(fault, cells_and_names):
    broken, right, wrong, failing = FAULTS[fault]
    order = list(cells_and_names)
    first, *rest = [cells_and_names[name][0] for name in order[order.index(broken) : order.index(failing) + 1]]
    assert right in first
    names = dict(cells_and_names[broken][1])
    with pytest.raises(AssertionError):
        for source in [first.replace(right, wrong), *rest]:
            exec(source, names)


def test_the_memory_figure_and_its_words_are_of_what_was_weighed(cells_and_names, monkeypatch, capsys):
    sizes = {"target": 200e6, "drafter": 0, "target_cache": 3e6, "drafter_cache": 0, "libraries": 50e6, "tokens": 9}
    weighed = {
        "plain": {**sizes, "peak": 300e6},
        "autoregressive": {**sizes, "drafter_cache": 2e6, "peak": 310e6},
        "dspark": {**sizes, "drafter": 41e6, "drafter_cache": 1e6, "packed": 70e6, "peak": 450e6},
    }
    given = {"device": "cpu", "small": "a small one"}
    monkeypatch.setattr(memory, "_measured", lambda way, settings: {**weighed[way], **given})
    source, before = cells_and_names["memory"]
    drawn = []
    exec(source, before | {"show": drawn.append})
    (figure,) = drawn
    (axis,) = figure.axes
    assert [one.get_text() for one in axis.texts] == ["300 MB", "310 MB", "450 MB"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
    assert heights["drafter's own weights"] == [0, 0, 41] and heights["weights packed for the CPU"] == [0, 0, 70]
    said = capsys.readouterr().out
    assert "adds 42 MB to the target's 200 MB: 41 MB of weights of its own" in said
    assert "is 450 MB with it and 300 MB without (+50 %)" in said


def test_what_is_committed_is_a_full_run_of_this_code(runner):
    notebook = read()
    check_outputs(notebook)
    assert "full run" in printed(code_cells(notebook)[-1])
    assert cpu_seconds(notebook) < 600  # ten minutes on one core
    assert notebook.metadata["sources"] == runner.digest(notebook), "run `python examples/run_tutorial.py` again"
    assert NOTEBOOK.stat().st_size < 1_500_000
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/])/(home|root|tmp|usr|opt|work|mnt|var|Users|workspace)/|site-packages|C:\\", text)
    assert "the hub cannot be used" not in text


def test_the_files_that_the_tutorial_points_to_are_there():
    text = "\n".join(cell.source for cell in read().cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((\.\./[^)]+)\)", text)
    assert len(links) >= 5
    for link in links:
        assert (EXAMPLES / link).exists(), link
