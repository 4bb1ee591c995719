"""Import path and settings of the losslessness suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # mutants, checks, faults, planted


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield
