"""Kernels against their twins: interpreted on the CPU where there is no GPU, compiled where there is one."""

from __future__ import annotations

import sys

import pytest
import torch

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),  # the interpreter multiplies and rounds it wrongly
]

GUARD = 64  # elements, so that what lies between stays aligned


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=DTYPES)
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session")
def rms_error():
    """``rms_error(actual, expected)``: RMS of the difference over RMS of what was expected; NaN stays NaN."""

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        actual, expected = actual.double(), expected.double()
        return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    return error


# Narrow: several tiles to a program and several programs, even for a vocabulary of a hundred tokens. Wide: the
# interpreter's time is the number of Triton operations, so a large vocabulary needs few tiles.
NARROW = {
    "markov_step": {"BV": 32, "PARTS": 3},
    "markov_feature": {"BN": 16, "BK": 16},
    "row_statistics": {"BV": 64},
    "cut_rows": {"N": 128},
    "resample": {"BV": 64},
}
WIDE = {
    "markov_step": {"BV": 16384, "PARTS": 3, "TILE_BYTES": 2**30},
    "row_statistics": {"BV": 16384},
    "cut_rows": {"N": 16384},
    "resample": {"BV": 16384},
}


@pytest.fixture
def tiles(monkeypatch):
    """``tiles("narrow")``, ``tiles("wide")``, or by kernel ``tiles(resample={"BV": 32})``: other launch parameters.

    Only while kernels are interpreted: on a GPU the table is what is tested.
    """
    from dspark_fast.kernels import launch

    def change(name: str = "default", **kernels: dict[str, int]) -> None:
        if torch.cuda.is_available():
            return
        plain = launch._table(launch._name(torch.device("cpu")))
        changes = {"default": {}, "narrow": NARROW, "wide": WIDE}[name] | kernels
        table = {kernel: {**row, **changes.get(kernel, {})} for kernel, row in plain.items()}
        monkeypatch.setattr(launch, "_table", lambda name: table)

    return change


@pytest.fixture
def guarded(monkeypatch):
    """New memory of the package is poison, lies between two guards, and the guards must be whole in the end."""
    plain, made = torch.empty, []

    def empty(*args, **kwargs):
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("dspark_fast"):
            return plain(*args, **kwargs)
        shape = plain(*args, **{**kwargs, "device": "meta"}).shape
        dtype = kwargs.get("dtype") or torch.float32
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max // 2
        flat = torch.full((shape.numel() + 2 * GUARD,), poison, dtype=dtype, device=kwargs.get("device"))
        made.append(flat)
        return flat[GUARD : GUARD + shape.numel()].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    for flat in made:
        edges = torch.cat([flat[:GUARD], flat[-GUARD:]])
        whole = edges.isnan() if edges.is_floating_point() else edges == torch.iinfo(edges.dtype).max // 2
        assert whole.all(), "a kernel wrote outside of its output"


@pytest.fixture(scope="session")
def embedded(device):
    """``embedded(tensor, axis)``: the same values on the device, as a slice of a larger tensor that is poison."""

    def embed(tensor: torch.Tensor | None, axis: int = 1) -> torch.Tensor | None:
        if tensor is None:
            return None
        before = 8 if axis in (-1, tensor.dim() - 1) else 1  # 16 bytes, so that rows stay as aligned as they were
        shape = list(tensor.shape)
        shape[axis] += before + 1
        room = torch.full(shape, float("nan") if tensor.is_floating_point() else 10**9, dtype=tensor.dtype)
        view = room.to(device).narrow(axis, before, tensor.shape[axis])
        return view.copy_(tensor)

    return embed


class NearTies:
    """Tokens must be equal, except where the reference's two best keys are closer than the arithmetic resolves.

    That is 64 ulp: sums in another order, a product rounded the other way. Such rows are counted, and at most one in
    10,000 (one at least) is allowed.
    """

    ULPS = 64
    MOST = 1e-4

    def __init__(self) -> None:
        self.compared, self.excused = 0, []

    def same(self, actual, expected, decisions) -> bool:
        """Count a compared result. ``decisions()`` gives (key, other key, ulp) of all that the reference decided by."""
        self.compared += 1
        if actual == expected:
            return True
        gaps = [abs(float(key) - float(other)) / float(ulp) for key, other, ulp in decisions()]
        close = [gap for gap in gaps if gap <= self.ULPS]  # NaN is not close
        assert close, f"{actual}, and the reference says {expected}; its keys are {gaps} ulp apart"
        self.excused.append((actual, expected, min(close)))
        return False

    def too_many(self) -> bool:
        return len(self.excused) > max(1, self.MOST * self.compared)


@pytest.fixture(scope="session")
def near_ties(request):
    ties = NearTies()
    yield ties
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nnear ties: {len(ties.excused)} of {ties.compared} compared results {ties.excused or ''}")
    assert not ties.too_many()
