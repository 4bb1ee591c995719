"""The block attention kernel against its reference, in memory that is NaN wherever it has no business."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.kernels import launch
from dspark_fast.kernels.block_attention import block_attention
from dspark_fast.reference.block_attention import block_attention as reference

pytestmark = pytest.mark.usefixtures("guarded")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def inputs(lengths, block, heads, kv_heads, dim, dim_v, dtype, device, capacity=None):
    """Random q, K, V and lengths; drawn on the CPU and a row at a time, so that a row does not depend on the batch."""
    capacity = capacity or max(max(lengths), 1)
    q = torch.randn(len(lengths), block, heads, dim)
    k = torch.randn(len(lengths), capacity, kv_heads, dim)
    v = torch.randn(len(lengths), capacity, kv_heads, dim_v)
    return *(x.to(device, dtype) for x in (q, k, v)), torch.tensor(lengths, device=device)


def poison(cache, lengths, block, window, *, value=float("nan"), transposed=False):
    """A copy of a cache with NaN around it and at every slot that must not be read, as a view of a larger tensor."""
    batch, capacity, kv_heads, dim = cache.shape
    shape = (batch + 2, kv_heads, capacity + 3, dim) if transposed else (batch + 2, capacity + 3, kv_heads, dim)
    room = torch.full(shape, value, dtype=cache.dtype, device=cache.device)
    view = (room.transpose(1, 2) if transposed else room)[1:-1, :capacity]
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - block - window + 1)
        view[row, first:length] = cache[row, first:length]
    return view


def doubles(q, k, v, lengths, **options):
    return reference(q.double(), k.double(), v.double(), lengths, **options)


# T, Hq, Hkv, D, Dv, lengths (the block included), options
ROWS = [
    pytest.param(5, 3, 3, 64, 64, [5], {}, id="drafter-T5-S0-G1-D64"),
    pytest.param(1, 4, 1, 64, 64, [2], {"causal": True}, id="plain-T1-S1-G4-D64"),
    pytest.param(1, 1, 1, 128, 128, [1], {"causal": True}, id="one-query-one-key"),
    pytest.param(7, 8, 2, 64, 64, [134], {}, id="drafter-T7-S127-G4-D64"),
    pytest.param(7, 4, 1, 128, 128, [135], {"causal": True}, id="verify-T7-S128-G4-D128"),
    pytest.param(5, 8, 1, 128, 128, [1005], {}, id="drafter-T5-S1000-G8-D128"),
    pytest.param(5, 5, 1, 96, 96, [300, 5, 132], {"causal": True}, id="verify-ragged-G5-D96"),
    pytest.param(16, 2, 2, 256, 256, [40, 16, 17], {"causal": True}, id="verify-ragged-T16-G1-D256"),
    pytest.param(16, 8, 1, 256, 256, [90], {}, id="128-rows-in-tiles-D256"),
    pytest.param(3, 2, 2, 40, 72, [270, 3], {"causal": True}, id="D40-Dv72"),
    pytest.param(3, 2, 1, 64, 64, range(3, 3 + 17 * 13, 13), {"causal": True}, id="B17-ragged"),
    pytest.param(5, 4, 2, 64, 64, [700, 9], {"causal": True, "window": 8}, id="window-8"),
    pytest.param(7, 4, 1, 64, 64, [640, 7], {"causal": True, "window": 300}, id="window-300-in-2-splits"),
    pytest.param(5, 2, 1, 64, 64, [640], {"window": 253}, id="window-253-one-key-in-the-2nd-split"),
    pytest.param(5, 4, 2, 64, 64, [90, 17], {"window": 20}, id="window-both-ways"),
    pytest.param(5, 2, 1, 64, 64, [90, 17], {"causal": True, "window": 1}, id="window-1"),
    pytest.param(5, 4, 2, 64, 64, [0, 90, 0], {"causal": True, "window": 20}, id="rows-that-read-nothing"),
    pytest.param(4, 4, 2, 64, 64, [270, 33], {"causal": True, "softcap": 5.0}, id="softcap-5"),
    pytest.param(4, 4, 2, 64, 64, [33, 0], {"softcap": 5.0}, id="softcap-5-a-row-that-reads-nothing"),
    pytest.param(5, 4, 2, 256, 256, [70], {"causal": True, "softcap": 50.0, "window": 40}, id="gemma-softcap-window"),
]
LONG = pytest.param(8, 32, 8, 128, 128, [32_776, 20_000], {"causal": True}, id="S32k", marks=pytest.mark.gpu)


@pytest.mark.filterwarnings("error:invalid value")
@pytest.mark.parametrize("block, heads, kv_heads, dim, dim_v, lengths, options", [*ROWS, LONG])
def test_as_the_reference(block, heads, kv_heads, dim, dim_v, lengths, options, dtype, device, rms_error):
    q, k, v, lengths = inputs(list(lengths), block, heads, kv_heads, dim, dim_v, dtype, device)
    options = {"scale": 1.3 * dim**-0.5, "causal": False, **options}
    window = options.get("window")
    # A NaN score could be masked after all; inf - inf in a product is something that the interpreter reports at once.
    k_cache = poison(k, lengths, block, window, value=float("inf"))
    v_cache = poison(v, lengths, block, window)
    q_in_nan = torch.nn.functional.pad(q, (0, 16), value=float("nan"))[..., :dim]
    out = block_attention(q_in_nan, k_cache, v_cache, lengths, **options)
    assert out.shape == (*q.shape[:3], dim_v) and out.dtype == dtype and not out[lengths == 0].any()
    assert rms_error(out, doubles(q, k, v, lengths, **options)) < TOLERANCE[dtype]


def test_a_row_has_the_same_bits_in_any_batch_and_capacity(dtype, device):
    sizes = [9, 300, 5, 64, 1, 270, 12, 33, 600, 2, 8, 261, 7, 40, 3, 5, 80]
    q, k, v, lengths = inputs([3 + size for size in sizes], 3, 2, 1, 64, 64, dtype, device, capacity=900)
    for options in ({"causal": True}, {"causal": False, "window": 200, "softcap": 20.0}):
        together = block_attention(q, k, v, lengths, scale=0.2, **options)
        for row in (1, 11, 16):
            end = int(lengths[row])
            only = slice(row, row + 1)
            alone = block_attention(q[only], k[only, :end], v[only, :end], lengths[only], scale=0.2, **options)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("splits", [1, 3, 40], ids="at-most-{}".format)
def test_a_split_grows_with_the_rows_own_length(splits, device, rms_error, monkeypatch):
    """40 splits also take the reduction through more than one of its own tiles."""
    chosen = launch.parameters("block_attention", device) | {"SPLIT": 16, "PROGRAMS": 2 * splits}
    combine = launch.parameters("block_attention_combine", device)
    monkeypatch.setattr(launch, "parameters", lambda kernel, _: combine if kernel.endswith("combine") else chosen)
    q, k, v, lengths = inputs([650, 4, 131], 4, 4, 2, 64, 64, torch.float32, device)
    out = block_attention(q, k, v, lengths, scale=0.1, causal=True)
    assert rms_error(out, doubles(q, k, v, lengths, scale=0.1, causal=True)) < TOLERANCE[torch.float32]
    alone = block_attention(q[2:], k[2:, :131], v[2:, :131], lengths[2:], scale=0.1, causal=True)
    assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize("transposed", [False, True], ids=["slots-first", "heads-first"])
def test_any_strides(transposed, dtype, device):
    """As the target hands them over: q and the cache transposed, slices of larger tensors, the length broadcast."""
    q, k, v, lengths = inputs([140] * 2, 3, 4, 2, 64, 64, dtype, device)
    expected = block_attention(q, k, v, lengths, scale=0.2, causal=True)
    k_cache, v_cache = (poison(x, lengths, 3, None, transposed=transposed) for x in (k, v))
    wide = torch.full((2, 6, 5, 64), float("nan"), dtype=dtype, device=device)
    wide[:, 1:5, 1:4] = q.transpose(1, 2)
    strided = wide[:, 1:5, 1:4].transpose(1, 2)
    for same in (lengths.int(), lengths[:1].expand(2), torch.stack([lengths, lengths + 9], 1)[:, 0]):
        assert torch.equal(block_attention(strided, k_cache, v_cache, same, scale=0.2, causal=True), expected)


def test_nothing_is_written_but_the_result(device):
    q, k, v, lengths = inputs([20, 9], 3, 4, 2, 64, 64, torch.float32, device)
    before = [x.clone() for x in (q, k, v, lengths)]
    block_attention(q, k, v, lengths, scale=0.2, causal=True)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, lengths), before))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
def test_large_scores_do_not_overflow(options, device, rms_error):
    """Scores up to about 2000: exp2 of one is infinite, and of one less the maximum mostly 0."""
    q, k, v, lengths = inputs([200, 30], 5, 4, 2, 64, 64, torch.float32, device)
    options = {"scale": 50.0, "causal": True, **options}
    assert rms_error(block_attention(q, k, v, lengths, **options), doubles(q, k, v, lengths, **options)) < 1e-4


@pytest.mark.parametrize("causal", [False, True], ids=["drafter", "verify"])
def test_a_query_without_a_key_gives_zeros_and_spoils_no_other(causal, dtype, device, rms_error):
    q, k, v, lengths = inputs([50, 0, 2, 31], 5, 4, 2, 64, 64, dtype, device)
    k_cache, v_cache = poison(k, lengths, 5, None), poison(v, lengths, 5, None)
    out = block_attention(q, k_cache, v_cache, lengths, scale=0.2, causal=causal)
    assert (out[1] == 0).all()
    if causal:
        assert (out[2, :3] == 0).all()
        last = doubles(q[2:3, 3:], k[2:3], v[2:3], lengths[2:3], scale=0.2, causal=True)
        assert rms_error(out[2:3, 3:], last) < TOLERANCE[dtype]
    sound = [0, 3]
    expected = doubles(q[sound], k[sound], v[sound], lengths[sound], scale=0.2, causal=causal)
    assert rms_error(out[sound], expected) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_nan_stays_in_its_own_row_and_head(device):
    q, k, v, lengths = inputs([50, 31], 5, 4, 2, 64, 64, torch.float32, device)
    q[0, 2, 1] = float("nan")
    bad = block_attention(q, k, v, lengths, scale=0.2, causal=True).isnan()
    assert bad[0, 2, 1].all() and bad.sum() == 64


@pytest.mark.parametrize("batch, block, capacity", [(0, 5, 8), (2, 0, 8), (2, 5, 0)], ids=["B0", "T0", "C0"])
def test_nothing_to_do(batch, block, capacity, device):
    q, k, v = (torch.zeros(batch, n, 4, 64, device=device) for n in (block, capacity, capacity))
    lengths = torch.zeros(batch, dtype=torch.long, device=device)
    out = block_attention(q, k, v, lengths, scale=1.0, causal=True)
    assert out.shape == q.shape and (out == 0).all()
