"""Kernels compiled ahead of time. In processes of their own: the tests' own one interprets kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = HERE.parents[1] / "bench" / "static.py"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """``compiled(*options)``: what ``bench/static.py`` writes, run once for each set of options."""
    results = {}

    def run(*options):
        if options not in results:
            out = tmp_path_factory.mktemp("static") / "static.json"
            environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
            done = subprocess.run(
                [sys.executable, str(COMMAND), "--out", str(out), *options],
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert out.is_file(), done.stderr[-3000:]
            results[options] = json.loads(out.read_text()) | {"status": done.returncode}
        return results[options]

    return run
