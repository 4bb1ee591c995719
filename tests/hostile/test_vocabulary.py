"""A draft vocabulary that cannot be one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_fast.vocabulary import restricted

HOSTILE = settings.get_profile("hostile")


@settings(HOSTILE, max_examples=60)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 33), max_size=4))
def test_only_ascending_ids_are_taken(pair, attempt, values):
    _, draft = pair
    tokens = torch.tensor(values, dtype=torch.long)
    outcome = attempt(lambda: restricted(draft, tokens).vocabulary.tolist(), "token")
    sound = values == sorted(set(values)) and values and values[0] >= 0 and values[-1] < 31
    assert (outcome.value == values) if sound else outcome.error


@settings(HOSTILE, max_examples=15)
@given(st.sampled_from([torch.int32, torch.float32, torch.bool]), st.lists(st.integers(0, 3), max_size=3))
def test_other_dtypes_and_shapes(pair, refused, dtype, shape):
    refused(lambda: restricted(pair[1], torch.zeros(shape).to(dtype)), "tokens is torch.")


@pytest.mark.parametrize("tokens", [[1, 2], 3, None, "a"], ids=repr)
def test_no_tensor(pair, refused, tokens):
    refused(lambda: restricted(pair[1], tokens), "tokens")


def test_no_drafter(pair, refused):
    refused(lambda: restricted(pair[0], torch.arange(5)), "draft is")
