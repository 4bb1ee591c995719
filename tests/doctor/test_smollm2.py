"""Every fault on SmolLM2's pair, as ``bench/bench_doctor.py`` has them: a quarter of an hour, and the network once."""

from __future__ import annotations

import pytest

from dspark_fast.doctor import PairRefused, load_pair
from dspark_fast.doctor.examine import examine_texts
from dspark_fast.doctor.faults import FAULTS
from dspark_fast.doctor.texts import Format, conversations, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture(scope="module")
def loaded():
    return load_pair("HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def texts(loaded):
    return write_texts(loaded.model, [Format().ids(loaded.tokenizer, one) for one in conversations(6)], 64)


def test_the_shipped_pair_is_good(loaded, texts):
    found = examine_texts(loaded.model, loaded.draft, loaded.tokenizer, texts)
    assert found.fault is None, found.verdict
    assert found.outcome.by_slot[0] > 0.45 and found.outcome.agreement - found.shuffled > 0.2


@pytest.mark.parametrize("name", [name for name in FAULTS if "inputs in another order" not in name])
def test_a_planted_fault_is_named(loaded, texts, tmp_path, name):
    try:
        pair = FAULTS[name].plant(loaded.model, loaded.tokenizer, loaded.folder, tmp_path / "broken")
    except PairRefused as refused:
        assert name == "taps one layer too high" and refused.fault == FAULTS[name].name
        return
    found = examine_texts(pair.model, pair.draft, loaded.tokenizer, texts)
    assert found.fault == FAULTS[name].name, found.verdict
