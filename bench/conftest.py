"""`pytest bench --benchmark-only`: every case of every op with every provider, as rows of pytest-benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--scale", choices=("gpu", "cpu", "tiny"), help="sizes of the microbenchmarks; the device's own")


def pytest_generate_tests(metafunc: Any) -> None:
    if {"case", "provider"} <= set(metafunc.fixturenames):
        bench = metafunc.module.BENCH
        scale = metafunc.config.getoption("--scale") or ("gpu" if torch.cuda.is_available() else "cpu")
        pairs = [(case, provider) for case in bench.cases(scale) for provider in bench.providers]
        names = [f"{case.name}-{provider.name}".replace(" ", "_") for case, provider in pairs]
        metafunc.parametrize(("case", "provider"), pairs, ids=names)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
