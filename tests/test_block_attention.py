"""Block attention and the context store against loops that look at one row, one head and one query at a time."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.reference.block_attention import block_attention
from dspark_fast.reference.context_kv import store_context_kv
from dspark_fast.reference.layers import rms_norm, rotary_table, rotate


def by_hand(q, k_cache, v_cache, lengths, scale, causal, window, softcap):
    """fp64, one query at a time."""
    out = torch.zeros(*q.shape[:3], v_cache.shape[-1], dtype=torch.float64)
    groups = q.shape[2] // k_cache.shape[2]
    for row in range(q.shape[0]):
        length = int(lengths[row])
        for slot in range(q.shape[1]):
            position = length - q.shape[1] + slot
            last = position if causal else length - 1
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[2]):
                keys = k_cache[row, first : last + 1, head // groups].double()
                scores = scale * (keys @ q[row, slot, head].double())
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, slot, head] = scores.softmax(0) @ v_cache[row, first : last + 1, head // groups].double()
    return out


ROWS = [
    # batch, block, heads, kv heads, dim, lengths, causal, window, softcap
    pytest.param(1, 5, 9, 3, 64, [37], False, None, None, id="drafter-B1-T5-G3"),
    pytest.param(1, 1, 4, 4, 16, [1], True, None, None, id="one-query-one-key"),
    pytest.param(1, 6, 9, 3, 64, [130], True, None, None, id="verify-B1-T6"),
    pytest.param(3, 7, 8, 1, 32, [7, 128, 31], False, None, None, id="drafter-ragged-G8"),
    pytest.param(3, 8, 4, 2, 16, [8, 9, 100], True, None, None, id="verify-ragged"),
    pytest.param(2, 5, 4, 2, 16, [40, 17], True, 6, None, id="window"),
    pytest.param(1, 5, 4, 2, 16, [40], True, 6, None, id="window-B1"),
    pytest.param(2, 5, 4, 2, 16, [40, 17], False, 6, None, id="window-both-ways"),
    pytest.param(2, 4, 4, 2, 16, [12, 33], True, None, 5.0, id="softcap"),
    pytest.param(17, 3, 2, 1, 8, list(range(3, 20)), True, None, None, id="B17"),
]


@pytest.mark.parametrize("batch, block, heads, kv_heads, dim, lengths, causal, window, softcap", ROWS)
def test_block_attention(batch, block, heads, kv_heads, dim, lengths, causal, window, softcap):
    torch.manual_seed(0)
    capacity = max(lengths) + 3
    q = torch.randn(batch, block, heads, dim)
    k_cache, v_cache = torch.randn(2, batch, capacity, kv_heads, dim).unbind()
    lengths = torch.tensor(lengths)
    for row, length in enumerate(lengths):
        # Large and finite, as stale rolled-back slots are: any weight on them would show.
        k_cache[row, length:] = 1e4
        v_cache[row, length:] = 1e4
    ours = block_attention(
        q, k_cache, v_cache, lengths, scale=0.3, causal=causal, window=window, softcap=softcap
    ).double()
    truth = by_hand(q, k_cache, v_cache, lengths, 0.3, causal, window, softcap)
    assert (ours - truth).square().mean().sqrt() < 1e-6 * truth.square().mean().sqrt()


def test_no_rows():
    empty = block_attention(
        torch.zeros(0, 5, 4, 8),
        torch.zeros(0, 16, 2, 8),
        torch.zeros(0, 16, 2, 8),
        torch.zeros(0, dtype=torch.long),
        scale=1.0,
        causal=True,
    )
    assert empty.shape == (0, 5, 4, 8)


@pytest.mark.parametrize("counts", [[3], [0], [3, 3], [2, 0, 3], [0, 0]], ids=str)
def test_store_writes_the_new_rows_and_nothing_else(counts):
    torch.manual_seed(0)
    batch, n, heads, dim, capacity = len(counts), 3, 2, 8, 12
    k, v = torch.randn(2, batch, n, heads, dim).unbind()
    weight = torch.rand(dim) + 0.5
    offsets = torch.tensor([4, 7, 0][:batch])
    cos, sin = rotary_table(offsets[:, None] + torch.arange(n), dim, 10_000.0)
    k_cache = torch.full((batch, capacity, heads, dim), -7.0)
    v_cache = torch.full((batch, capacity, heads, dim), -7.0)
    store_context_kv(k, v, weight, cos, sin, k_cache, v_cache, offsets, torch.tensor(counts), eps=1e-6)
    for row, count in enumerate(counts):
        for slot in range(capacity):
            token = slot - int(offsets[row])
            if not 0 <= token < count:
                assert (k_cache[row, slot] == -7).all() and (v_cache[row, slot] == -7).all()
                continue
            normed = k[row, token] / (k[row, token].square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            first, second = normed.chunk(2, -1)
            angle = slot * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
            turned = torch.cat(
                [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
            )
            assert torch.allclose(k_cache[row, slot], turned, atol=2e-6)
            assert torch.equal(v_cache[row, slot], v[row, token])


def test_rms_norm_sums_in_fp32():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0), torch.ones_like(x))


def test_rotating_by_a_position_keeps_products_of_differences():
    q, k = torch.randn(2, 1, 1, 1, 16).unbind()
    products = []
    for shift in (0, 5, 301):
        cos, sin = rotary_table(torch.tensor([[3 + shift], [11 + shift]]), 16, 10_000.0)
        products.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum())
    assert torch.allclose(torch.stack(products), products[0].expand(3), rtol=1e-4)
