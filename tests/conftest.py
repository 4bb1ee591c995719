"""What holds for every test: one thread, poisoned new memory, a fixed seed. What tests share is in ``shared/``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools  # noqa: F401  # before anything takes distutils from the standard library: torch's inductor then fails
import torch
from torch.utils._device import _device_constructors

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # counts only if it is set before triton is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which the interpreter multiplies with

# torch keeps the list of functions that `with torch.device(...)` concerns from its first use on. Made while torch.empty
# is poisoned below, it would lack the real one, and all later tests of this process would make "meta" weights for real.
_device_constructors()

# A folder of its own: beside tests/kernels, `kernels` would be found, which transformers looks for.
sys.path.insert(0, str(Path(__file__).parent / "shared"))
pytest.register_assert_rewrite("characters", "recorded_rounds", "report_subjects", "stand_ins")

from characters import characters  # noqa: F401
from exact_law import g_test, law, processors_of  # noqa: F401
from recorded_rounds import on_a_cpu, opaque  # noqa: F401
from report_subjects import make_subject  # noqa: F401
from stand_ins import scripted, streamer  # noqa: F401
from tiny_pairs import VOCABULARY, line, make_draft, make_target, tiny  # noqa: F401
from training_data import batch_of, cached, whole  # noqa: F401

LENGTHS = (9, 6, 1, 8, 4)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that the package asks for and does not write is NaN, or an integer that indexes nothing."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("dspark_fast"):
                with torch.no_grad():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
                        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
            return tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch):
    """Speculation is not switched off by the clock where a test does not ask for it: counts of rounds would vary."""
    monkeypatch.setattr("dspark_fast.generation.OFF_SWITCH", False)


@pytest.fixture(scope="session")
def prompts():
    """``prompts(lengths)``: random rows, left-padded with 0; and the attention mask."""

    def make(lengths=LENGTHS, vocabulary=VOCABULARY):
        generator = torch.Generator().manual_seed(2)
        width = max(lengths)
        ids = torch.randint(1, vocabulary, (len(lengths), width), generator=generator)
        mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
        return SimpleNamespace(input_ids=ids * mask, attention_mask=mask)

    return make


@pytest.fixture(scope="session")
def unpadded():
    """``unpadded(sequences, mask)``: each row's tokens as a list, without the padding on its left."""

    def rows(sequences, mask):
        return [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(sequences, mask)]

    return rows
