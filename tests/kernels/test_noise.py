"""The noise of the kernels against the reference's: words and acceptance uniforms bit for bit, exponentials to 2e-6."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dspark_fast.kernels import noise as kernel
from dspark_fast.kernels.noise import _to_exponential, accept_uniform, exponentials
from dspark_fast.reference import sampling as reference
from dspark_fast.reference.philox import philox

pytestmark = pytest.mark.usefixtures("guarded")

FULL = 0xFFFFFFFF
TOLERANCE = 2e-6  # relative: 1 - u is rounded where log1p is not, and that is 5e-7 of e at worst


@triton.jit
def _philox_kernel(counters, seed, out, N: tl.constexpr):
    o = tl.arange(0, N)
    c0, c1 = tl.load(counters + o).to(tl.int32), tl.load(counters + N + o).to(tl.int32)
    c2, c3 = tl.load(counters + 2 * N + o).to(tl.int32), tl.load(counters + 3 * N + o).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed + o), c0, c1, c2, c3)
    tl.store(out + o, w0.to(tl.int64))
    tl.store(out + N + o, w1.to(tl.int64))
    tl.store(out + 2 * N + o, w2.to(tl.int64))
    tl.store(out + 3 * N + o, w3.to(tl.int64))


@triton.jit
def _uniform_kernel(seed, position, anchor, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, accept_uniform(tl.load(seed + o), tl.load(position + o), tl.load(anchor + o)))


@triton.jit
def _exponentials_kernel(seed, position, anchor, out, width, STREAM: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr):
    o_row = tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) * N
    p = seed + o_row, position + o_row, anchor + o_row
    b_e = exponentials(tl.load(p[0]), tl.load(p[1]), tl.load(p[2]), STREAM, first, ROWS, N)
    o_v = first + tl.arange(0, N)[None, :]
    tl.store(out + o_row * width + o_v, b_e, mask=o_v < width)


@triton.jit
def _tail_kernel(words, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, _to_exponential(tl.load(words + o).to(tl.uint32)))


def test_streams_are_the_references():
    for name in ("DRAFT", "ACCEPT", "TARGET"):
        assert getattr(kernel, name).value == getattr(reference, name)


def test_philox_bit_for_bit(device):
    """1024 random counters and keys; before them Random123's known answers and words at the edges of int32."""
    counters = torch.randint(0, 2**32, (4, 1024))
    seed = torch.randint(-(2**63), 2**63 - 1, (1024,))
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    edges = [(0, 0, 0, 0), (FULL,) * 4, pi, (2**31,) * 4, (2**31 - 1,) * 4, (37983, 2**31, 1, 2)]
    counters[:, : len(edges)] = torch.tensor(edges).T
    seed[: len(edges)] = torch.tensor([0, -1, 0x299F31D0A4093822, -(2**63), 2**63 - 1, 2**32])
    out = torch.full((4, 1024), -7, device=device)
    _philox_kernel[(1,)](counters.to(device), seed.to(device), out, N=1024)
    assert torch.equal(out.cpu(), torch.stack(philox(*counters, seed)))
    assert [hex(w) for w in out[:, 2].tolist()] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


def places(rows):
    """Seeds, positions and anchors, with the ends of their ranges among them."""
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,))
    position = torch.randint(0, 2**20, (rows,))
    seed[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    position[:4] = torch.tensor([0, 2**31 - 1, 2**31, 1])
    return seed, position, (position - torch.randint(1, 17, (rows,))).clamp(min=0)


def test_accept_uniforms_bit_for_bit(device):
    where = places(1024)
    out = torch.full((1024,), -7.0, device=device)
    _uniform_kernel[(1,)](*(x.to(device) for x in where), out, N=1024)
    assert torch.equal(out.cpu(), reference.accept_uniform(*where))
    assert out.min() >= 0 and out.max() < 1 and out.unique().numel() > 1000


@pytest.mark.parametrize(
    "vocab, rows, tile, stream",
    [
        pytest.param(1, 4, 16, "DRAFT", id="V1"),
        pytest.param(63, 16, 16, "TARGET", id="V63-in-4-tiles"),
        pytest.param(311, 4, 64, "ACCEPT", id="V311-in-5-tiles"),
        pytest.param(49152, 4, 16384, "DRAFT", id="V49152-in-3-tiles"),
        pytest.param(151936, 1, 65536, "TARGET", id="V151936-in-3-tiles"),
    ],
)
def test_exponentials(vocab, rows, tile, stream, device):
    tile = tile if device.type == "cpu" else min(tile, 1024)  # a wide tile holds ptxas for minutes
    where = [x[-rows:] for x in places(16)]
    out = torch.full((rows, vocab), -7.0, device=device)
    number = getattr(reference, stream)
    moved = [x.to(device) for x in where]
    _exponentials_kernel[(triton.cdiv(vocab, tile),)](*moved, out, vocab, STREAM=number, ROWS=rows, N=tile)
    expected = reference.exponentials(*where, number, vocab)
    error = float((out.cpu().double() / expected.double() - 1).abs().max())
    print(f"largest relative error {error:.2g}")
    assert error < TOLERANCE


def test_exponential_tails(device):
    """Both ends, and the words about 1/16 of the range, where the series hands over to the logarithm."""
    ends = torch.cat([torch.arange(256), 2**28 + torch.arange(-256, 256), 2**32 - 256 + torch.arange(256)])
    words = torch.cat([ends, 2 ** torch.arange(32), torch.randint(0, 2**32, (2048 - 32 - len(ends),))])
    out = torch.full((2048,), -7.0, device=device)
    _tail_kernel[(1,)](words.to(device), out, N=2048)
    expected = reference._to_exponential(words.float())
    assert out.isfinite().all() and (out > 0).all()
    error = float((out.cpu().double() / expected.double() - 1).abs().max())
    print(f"largest relative error {error:.2g}")
    assert error < TOLERANCE
    assert out[:256].cpu().tolist() == pytest.approx(((ends[:256] + 0.5) * 2.0**-32).tolist(), rel=2e-7)


def test_the_rule_of_near_ties(near_ties):
    """64 ulp are excused and counted, 65 are not, nor is what is not a number; one in 10,000 is the most."""
    ties = type(near_ties)()
    ulp = 2.0**-23
    assert ties.same(3, 3, lambda: pytest.fail("keys are looked at only where results differ"))
    assert not ties.same(3, 4, lambda: [(5.0, 1.0, ulp), (1.0, 1.0 + 64 * ulp, ulp)])
    assert (ties.compared, len(ties.excused), ties.too_many()) == (2, 1, False)
    for keys in ([(1.0, 1.0 + 65 * ulp, ulp)], [(float("nan"), 1.0, ulp)], [(float("inf"), float("inf"), ulp)], []):
        with pytest.raises(AssertionError, match="the reference says 4"):
            ties.same(3, 4, lambda keys=keys: keys)
    ties.same(1, 2, lambda: [(1.0, 1.0, ulp)])
    assert ties.too_many()
    ties.compared = 20_000
    assert not ties.too_many()
    ties.compared = 19_999
    assert ties.too_many()


@pytest.mark.gpu
def test_100_repeats_have_the_same_bits(device):
    where = [x.to(device) for x in places(16)]
    outs = torch.full((100, 16, 49152), -7.0, device=device)
    for out in outs:
        _exponentials_kernel[(48,)](*where, out, 49152, STREAM=0, ROWS=16, N=1024)
    assert (outs == outs[0]).all()
