"""Kernels that each break one rule, and lawful twins: `bench/static.py --calls bad_kernels` must tell them apart."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aot.calls import Call

BOTH = ("sm_90", "gfx942")
STREAMED = {
    f"bad_kernels.{name}": ("p_x",) for name in ("_wide_kernel", "_narrow_kernel", "_strided_kernel", "_absent_kernel")
}
MATRIX = {"bad_kernels._absent_kernel", "bad_kernels._shared_kernel"}
ATOMICS = {"bad_kernels._guarded_kernel", "bad_kernels._unguarded_kernel"}


@triton.jit
def _wide_kernel(x, y, N: tl.constexpr):
    p_x = x + tl.arange(0, N)
    tl.store(y + tl.arange(0, N), tl.load(p_x))


@triton.jit
def _narrow_kernel(x, y, N: tl.constexpr):
    p_x = x + tl.arange(0, N)
    tl.store(y + tl.arange(0, N), tl.load(p_x))


@triton.jit
def _strided_kernel(x, y, N: tl.constexpr):
    p_x = x + 2 * tl.arange(0, N)
    tl.store(y + tl.arange(0, N), tl.load(p_x))


@triton.jit
def _absent_kernel(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


@triton.jit
def _spilling_kernel(x, y, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(x + o_n)
    tl.store(y + o_n, b_x - tl.max(b_x, 0))  # every value of the row lives on until the maximum is known


@triton.jit
def _shared_kernel(x, y, n, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_y = tl.zeros([N, N], tl.float32)
    for i in tl.range(0, n, N):
        b_x = tl.load(x + i + o_n[:, None] * n + o_n[None, :])
        b_w = tl.load(x + (i + o_n[:, None]) * N + o_n[None, :])
        b_y = tl.dot(b_x, b_w, b_y)
    tl.store(y + o_n[:, None] * N + o_n[None, :], b_y)


@triton.jit
def _scalar_kernel(x, y, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(x + o_n[:, None] * N + o_n[None, :])
    tl.store(y + o_n[:, None] * N + o_n[None, :], tl.dot(b_x, b_x))


@triton.jit
def _guarded_kernel(x, y, counter, N: tl.constexpr):
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + tl.arange(0, N)), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == 7:
        tl.store(y, 0.0)


@triton.jit
def _unguarded_kernel(x, y, counter, N: tl.constexpr):
    tl.store(y + tl.program_id(0), tl.sum(tl.load(x + tl.arange(0, N)), 0))
    if tl.atomic_add(counter, 1, sem="acq_rel") == 7:
        tl.store(y, 0.0)


@triton.jit
def _unknown_kernel(counter):
    tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def _broken_kernel(y, n):
    total = 0
    for _ in range(n):
        total = total + 0.5  # int before the loop, float in it: the interpreter does not mind
    tl.store(y, total)


def calls() -> list[Call]:
    """One call each; a lawful one where a kernel alone does not show what is wrong with it."""
    x, y, ids = torch.empty(1 << 20), torch.empty(1 << 20), torch.empty(8, dtype=torch.int32)

    def call(kernel, *arguments, only=BOTH, **options):
        return Call(kernel.fn.__name__, lambda dtype: kernel[(1,)](*arguments, **options), quick=True, only=only)

    halves = x.to(torch.bfloat16)
    return [
        call(_wide_kernel, x, y, N=1024),
        call(_narrow_kernel, x[1:], y, N=1024, only=("sm_90",)),  # gfx942 loads 16 bytes from any address
        call(_strided_kernel, x, y, N=1024),
        call(_absent_kernel, x, y, N=1024),
        call(_spilling_kernel, x, y, N=16384, num_warps=1, only=("sm_90",)),
        call(_spilling_kernel, x, y, N=32768, num_warps=1, only=("gfx942",)),
        call(_shared_kernel, halves, y, 1024, N=64, num_stages=16, num_warps=8, only=("sm_90",)),
        call(_shared_kernel, halves, y, 1024, N=128, num_stages=3, num_warps=8, only=("gfx942",)),
        call(_scalar_kernel, halves, y, N=8, only=("gfx942",)),  # too small for its matrix instructions
        call(_scalar_kernel, halves, y, N=16, only=("sm_75",)),
        call(_guarded_kernel, x, y, ids, N=1024),
        call(_unguarded_kernel, x, y, ids, N=1024),
        call(_unknown_kernel, ids),
        call(_broken_kernel, y, 5),
        call(_unknown_kernel, ids, no_such_option=1),
    ]
