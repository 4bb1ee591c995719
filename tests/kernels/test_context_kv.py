"""The context store kernel against its reference: rounding by rounding, and not a slot more than it was told."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.kernels.context_kv import store_context_kv
from dspark_fast.reference.context_kv import store_context_kv as reference

# Far below the rounding of each dtype (2e-4 in fp16): all but a few values must have the reference's very bits.
TOLERANCE = {torch.float32: 3e-7, torch.float16: 3e-5, torch.bfloat16: 3e-4}
SENTINEL = -7.0


def inputs(counts, new, kv_heads, dim, dim_v, dtype, device, weight_dtype=None):
    """Random K and V as the projections give them (slices of one wide result)."""
    batch = len(counts)
    wide = torch.randn(batch, new, kv_heads * (dim + dim_v) + 16).to(device, dtype)
    k = wide[..., : kv_heads * dim].unflatten(-1, (kv_heads, dim))
    v = wide[..., kv_heads * dim : -16].unflatten(-1, (kv_heads, dim_v))
    weight = (torch.rand(dim) + 0.5).to(device, weight_dtype or dtype)
    offsets = torch.arange(batch, device=device) * 3
    angles = 100 * torch.rand(batch, new, dim, device=device)  # every channel its own, so that no two can be confused
    return k, v, weight, angles.cos(), angles.sin(), offsets, torch.tensor(counts, device=device)


def room(batch, capacity, kv_heads, dim, dtype, device, *, transposed=False):
    """A larger tensor full of a sentinel, and the view of it that is the cache."""
    shape = (batch + 2, kv_heads, capacity + 2, dim) if transposed else (batch + 2, capacity + 2, kv_heads, dim)
    whole = torch.full(shape, SENTINEL, dtype=dtype, device=device)
    return whole, (whole.transpose(1, 2) if transposed else whole)[1:-1, 1:-1]


# counts, N, Hkv, D, Dv
ROWS = [
    pytest.param([1], 1, 1, 64, 64, id="one-token"),
    pytest.param([5], 5, 3, 64, 64, id="B1-N5-H3-D64"),
    pytest.param([8, 8], 8, 8, 128, 128, id="N8-H8-D128"),
    pytest.param([7, 0, 3], 7, 2, 128, 128, id="ragged-D128"),
    pytest.param([0, 0], 4, 2, 64, 64, id="all-counts-0"),
    pytest.param([40, 17], 40, 5, 96, 96, id="prompt-H5-D96"),
    pytest.param([2, 6], 6, 4, 256, 256, id="ragged-D256"),
    pytest.param([3, 1], 3, 2, 40, 72, id="D40-Dv72"),
    pytest.param([i % 4 for i in range(17)], 3, 2, 64, 64, id="B17"),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["slots-first", "heads-first"])
@pytest.mark.parametrize("counts, new, kv_heads, dim, dim_v", ROWS)
def test_as_the_reference(counts, new, kv_heads, dim, dim_v, transposed, dtype, device, rms_error):
    counts = [min(count, new) for count in counts]
    k, v, weight, cos, sin, offsets, counts = inputs(counts, new, kv_heads, dim, dim_v, dtype, device)
    capacity = int((offsets + counts).max())  # the longest row ends with the cache
    caches = [room(len(counts), capacity, kv_heads, d, dtype, device, transposed=transposed) for d in (dim, dim_v)]
    wanted = [cache.clone() for _, cache in caches]
    reference(k, v, weight, cos, sin, *wanted, offsets, counts, eps=1e-6)
    steps = torch.arange(new, device=device)
    for x in (k, v, cos, sin):
        x[steps >= counts[:, None]] = float("nan")
    store_context_kv(k, v, weight, cos, sin, *(cache for _, cache in caches), offsets, counts, eps=1e-6)

    (whole_k, k_cache), (whole_v, v_cache) = caches
    assert torch.equal(v_cache, wanted[1])
    assert torch.equal(k_cache == SENTINEL, wanted[0] == SENTINEL)
    assert rms_error(k_cache, wanted[0]) < TOLERANCE[dtype]
    for whole, cache in caches:
        cache.fill_(SENTINEL)
        assert (whole == SENTINEL).all()


def test_a_wider_weight_widens_what_follows(device, rms_error):
    """An fp32 norm weight on fp16 keys: the reference rotates in fp32 and rounds once more, at the store."""
    k, v, weight, cos, sin, offsets, counts = inputs([4, 2], 4, 2, 64, 64, torch.float16, device, torch.float32)
    for cache_dtype, tolerance in ((torch.float32, 3e-6), (torch.float16, 3e-5)):
        caches = [torch.zeros(2, 9, 2, 64, dtype=cache_dtype, device=device) for _ in range(4)]
        reference(k, v, weight, cos, sin, *caches[:2], offsets, counts, eps=1e-6)
        store_context_kv(k, v, weight, cos, sin, *caches[2:], offsets, counts, eps=1e-6)
        assert rms_error(caches[2], caches[0]) < tolerance
        assert torch.equal(caches[3], caches[1])


def test_narrow_and_strided_integers_and_narrow_angles(device):
    k, v, weight, cos, sin, offsets, counts = inputs([3, 3], 3, 2, 64, 64, torch.float16, device)
    outcomes = []
    for offset, count, angle in (
        (offsets, counts, torch.float32),
        (offsets.int(), counts.new_tensor([3, 0])[:1].expand(2), torch.float16),
        (torch.stack([offsets, offsets], 1)[:, 0], counts.int(), torch.float16),
    ):
        caches = torch.zeros(2, 2, 9, 2, 64, dtype=torch.float16, device=device)
        store_context_kv(k, v, weight, cos.to(angle), sin.to(angle), *caches, offset, count, eps=1e-6)
        outcomes.append(caches)
    assert torch.equal(outcomes[0], outcomes[1]) and torch.equal(outcomes[0], outcomes[2])


def test_a_row_has_the_same_bits_in_any_batch(dtype, device):
    k, v, weight, cos, sin, offsets, counts = inputs([i % 5 for i in range(17)], 4, 3, 64, 64, dtype, device)
    together = torch.zeros(2, 17, 60, 3, 64, dtype=dtype, device=device)
    store_context_kv(k, v, weight, cos, sin, *together, offsets, counts, eps=1e-6)
    for row in (3, 11):
        only = slice(row, row + 1)
        alone = torch.zeros(2, 1, 60, 3, 64, dtype=dtype, device=device)
        store_context_kv(k[only], v[only], weight, cos[only], sin[only], *alone, offsets[only], counts[only], eps=1e-6)
        assert torch.equal(alone[:, 0], together[:, row])


@pytest.mark.parametrize("eps", [1e-6, 0.5], ids="eps-{}".format)
def test_a_key_of_zeros_and_a_large_eps(eps, device, rms_error):
    k, v, weight, cos, sin, offsets, counts = inputs([4], 4, 2, 64, 64, torch.float32, device)
    k[0, 1] = 0.0
    caches = torch.zeros(4, 1, 4, 2, 64, device=device)
    reference(k, v, weight, cos, sin, *caches[:2], offsets, counts, eps=eps)
    store_context_kv(k, v, weight, cos, sin, *caches[2:], offsets, counts, eps=eps)
    assert (caches[2, 0, 1] == 0).all()
    assert rms_error(caches[2], caches[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("batch, new", [(0, 3), (2, 0)], ids=["B0", "N0"])
def test_nothing_to_store(batch, new, device):
    k, v, weight, cos, sin, offsets, counts = inputs([0] * batch, new, 2, 64, 64, torch.float32, device)
    caches = torch.full((2, batch, 5, 2, 64), SENTINEL, device=device)
    store_context_kv(k, v, weight, cos, sin, *caches, offsets, counts, eps=1e-6)
    assert (caches == SENTINEL).all()
