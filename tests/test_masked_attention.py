"""Attention in plain PyTorch, for long blocks and sinks, against the reference and against a formula."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.engine import masked_attention as module
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.masked_attention import masked_attention
from dspark_fast.reference import block_attention

SCALE = 0.3
LENGTHS = {"alone": [11], "ragged": [0, 11, 4]}


def inputs(lengths, block, *, groups=2, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    batch, keys = len(lengths), max(lengths) + block
    shapes = (kv_heads * groups, block, 16), (kv_heads, keys, 16), (kv_heads, keys, 12)
    tensors = [torch.randn(batch, *shape, generator=generator) for shape in shapes]
    cache = RaggedCache(1, batch, keys, torch.device("cpu"))
    cache.lengths.copy_(torch.tensor(lengths))
    return (*tensors, cache)


@pytest.mark.parametrize("most", [2**26, 1], ids=["at-once", "sliced"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("block", [1, 5, 20])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_is_the_reference(lengths, block, window, softcap, most, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SCORES", most)
    query, key, value, cache = inputs(lengths, block)
    options = {"scale": SCALE, "window": window, "softcap": softcap}
    out = masked_attention(query, key, value, cache, **options)
    expected = block_attention(
        *(one.transpose(1, 2) for one in (query, key, value)), cache.lengths + block, causal=True, **options
    )
    assert out.shape == (len(lengths), block, 4, 12) and out.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("most", [2**26, 1], ids=["at-once", "sliced"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("block", [1, 5, 20])
def test_a_sink_is_a_key_without_a_value(block, window, softcap, most, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SCORES", most)
    query, key, value, cache = inputs(LENGTHS["ragged"], block)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 20.0])
    out = masked_attention(query, key, value, cache, scale=SCALE, window=window, softcap=softcap, sinks=sinks)
    for row, length in enumerate(cache.lengths.tolist()):
        for slot in range(block):
            position = length + slot
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(4):
                scores = SCALE * (key[row, head // 2, first : position + 1] @ query[row, head, slot])
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
                expected = weights @ value[row, head // 2, first : position + 1]
                torch.testing.assert_close(out[row, slot, head], expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("block", [3, 20])
def test_rows_that_stand_behind_the_keys_at_hand_give_no_nan(block, window, softcap):
    """They are padding or finished; NaN behind a row's length would be read as 0 * NaN by a later call."""
    query, key, value, cache = inputs(LENGTHS["ragged"], block)
    keys = key.shape[2]
    options = {"scale": SCALE, "window": window, "softcap": softcap}
    expected = masked_attention(query, key, value, cache, **options)
    cache.lengths[0], cache.masks = 100, {}
    far = masked_attention(query, key, value, cache, **options)
    assert far.isfinite().all() and torch.equal(far[1:], expected[1:])
    cache.lengths[0], cache.masks = keys - 1, {}  # its first token is in the last slot: the others are padding
    assert torch.equal(masked_attention(query, key, value, cache, **options)[0, 1:, :, :], far[0, 1:])


def test_layers_of_a_pass_share_a_mask():
    query, key, value, cache = inputs(LENGTHS["ragged"], 20)
    for _ in range(3):
        for window in (None, 6):
            masked_attention(query, key, value, cache, scale=SCALE, window=window)
    assert [mask.shape for mask in cache.masks.values()] == [(3, 1, 20, 31)] * 2
    kept = next(iter(cache.masks.values()))
    masked_attention(query, key, value, cache, scale=SCALE)
    assert next(iter(cache.masks.values())) is kept
    cache.begin(20, 31)
    assert not cache.masks


def test_sixteen_bits_are_computed_in_thirty_two():
    query, key, value, cache = inputs(LENGTHS["ragged"], 20)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 1.0])
    low = [one.bfloat16() for one in (query, key, value)]
    out = masked_attention(*low, cache, scale=SCALE, sinks=sinks)
    expected = masked_attention(*(one.float() for one in low), cache, scale=SCALE, sinks=sinks)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
