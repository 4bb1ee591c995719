"""Execute the tutorial: in full, which writes the outputs into the notebook, or in its fast form, which writes nothing.

python examples/run_tutorial.py
python examples/run_tutorial.py --fast
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("dspark_from_scratch.ipynb")
CELL_SECONDS = 1800  # of one cell: the longest takes a minute or two on a core of one's own


def execute(notebook: nbformat.NotebookNode, *, fast: bool) -> nbformat.NotebookNode:
    """Run all cells in a fresh kernel of this Python, in this folder; the notebook gets their outputs.

    Args:
        notebook: as read; changed in place.
        fast: a toy pair made on the spot and few tokens, no network.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the text has the cell and its traceback.
    """
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    environment = {**os.environ, "DSPARK_TUTORIAL_FAST": "1" if fast else "0"}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources=folder,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute(env=environment)
    for cell in notebook.cells:
        # Progress bars, where the weights came from, matplotlib's fonts: of no interest to who reads the outputs.
        if "first-use" in cell.metadata.get("tags", []):
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        cell.metadata.pop("execution", None)  # the time of day
    notebook.metadata["sources"] = digest(notebook)
    return notebook


def digest(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of all code, in hex: outputs that are older than the code do not have it."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="a toy pair and few tokens; the notebook stays as it is")
    fast = parser.parse_args().fast
    start = time.perf_counter()
    notebook = execute(nbformat.read(NOTEBOOK, as_version=4), fast=fast)
    if not fast:
        nbformat.write(notebook, NOTEBOOK)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"{cells} cells ran without an error in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
