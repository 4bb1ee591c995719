"""Context K/V: norm and turn new keys, store keys and values at each row's own offset.

    pytest bench/bench_context_kv.py --benchmark-only
    python bench/bench_context_kv.py

N = 8 new tokens a row are a round, N = 512 a prompt (or a piece of one). Bound by launches in a round. Equality: keys
within an RMS error of 1 % of the reference's, values equal, every other slot of the caches untouched.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from models import BLOCK, MODELS
from near_ties import rms_error
from report import lost, main, of, under_pytest
from table import EAGER, OURS, PLAIN, Bench, Case, Goal, Provider, Verdict, kernel_why_not

from dspark_fast.reference.context_kv import store_context_kv
from dspark_fast.reference.layers import rotary_table

EPS = 1e-6
THETA = 1e6
FIRST = 100  # slots that every row has filled already
UNTOUCHED = 7.0


def bytes_moved(counts: list[int], kv_heads: int, dim: int, *, itemsize: int = 2, table: int = 4) -> int:
    """Every valid new row of K and V read and written once, and its cosines and sines read; one launch.

    table: bytes of an element of ``cos`` and ``sin``.
    """
    rows = sum(counts)
    return rows * (2 * 2 * kv_heads * dim * itemsize + 2 * dim * table)


def cases(scale: str) -> list[Case]:
    if scale == "tiny":
        return [_case("tiny", 1, 5), _case("tiny", 3, 5), _case("tiny", 4, 5, ragged=True)]
    if scale == "cpu":
        return [_case("SmolLM2-135M", batch, BLOCK + 1) for batch in (1, 4)] + [_case("SmolLM2-135M", 1, 512)]
    listed = [_case("Qwen3-4B", batch, BLOCK + 1, compiled=batch in (1, 64)) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", batch, 512) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", 64, BLOCK + 1, ragged=True)]
    return listed + [_case("SmolLM2-135M", batch, BLOCK + 1) for batch in (1, 64)]


def name(model: str, batch: int, new: int, ragged: bool = False) -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={batch} N={new}" + (" ragged" if ragged else "")


def _case(model: str, batch: int, new: int, compiled: bool = False, ragged: bool = False) -> Case:
    shape = MODELS[model]
    counts = [row % (new + 1) if ragged else new for row in range(batch)]
    size = 4 if model == "tiny" else 2
    capacity = FIRST + new + batch + 8
    return Case(
        name(model, batch, new, ragged),
        {
            "model": model,
            "batch": batch,
            "new": new,
            "Hkv": shape.kv_heads,
            "D": shape.head_dim,
            "ragged": ragged,
        },
        partial(build, model, counts, new),
        bytes_moved(counts, shape.kv_heads, shape.head_dim, itemsize=size),
        1,
        10 * batch * capacity * shape.kv_heads * shape.head_dim * size,
        compiled,
    )


def build(model: str, counts: list[int], new: int, device: torch.device) -> SimpleNamespace:
    """Random K, V and norm weight; row b's first slot is ``FIRST + b``, so no two rows store at the same place."""
    shape = MODELS[model]
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(len(counts))
    batch = len(counts)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    k, v = (normal(batch, new, shape.kv_heads, shape.head_dim) for _ in range(2))
    offsets = FIRST + torch.arange(batch, device=device)
    positions = offsets[:, None] + torch.arange(new, device=device)
    cos, sin = rotary_table(positions, shape.head_dim, THETA)
    cache = (batch, FIRST + new + batch + 8, shape.kv_heads, shape.head_dim)
    return SimpleNamespace(
        new=(k, v, 1 + 0.1 * normal(shape.head_dim), cos, sin),
        where=(offsets, torch.tensor(counts, device=device)),
        fresh=lambda: tuple(torch.full(cache, UNTOUCHED, dtype=dtype, device=device) for _ in range(2)),
    )


def _storing(function: Any, inputs: SimpleNamespace) -> Any:
    """A call that stores into caches of its own and hands them back. Storing twice is storing once."""
    caches = inputs.fresh()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        function(*inputs.new, *caches, *inputs.where, eps=EPS)
        return caches

    return call


def expect(inputs: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    return _storing(store_context_kv, inputs)()


def equal(inputs: SimpleNamespace, caches: Any, expected: Any) -> Verdict:
    offsets, counts = inputs.where
    behind = torch.arange(expected[0].shape[1], device=offsets.device) - offsets[:, None]
    new = (behind >= 0) & (behind < counts[:, None])  # [B, C]
    if not all(bool((cache[~new] == UNTOUCHED).all()) for cache in caches):
        return Verdict(False, "a slot that is none of the new ones was written")
    if not torch.equal(caches[1][new], expected[1][new]):
        return Verdict(False, "the values differ")
    error = rms_error(caches[0][new], expected[0][new])
    return Verdict(error <= 1e-2, f"values equal, keys RMS error {error:.1e}")


def straight(
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    *,
    eps: float,
) -> None:
    """The same for equal counts, as one would write it for torch.compile."""
    normed = F.rms_norm(k, (k.shape[-1],), weight, eps)
    half = k.shape[-1] // 2
    turned = torch.cat([-normed[..., half:], normed[..., :half]], -1)
    k = (normed * cos[:, :, None] + turned * sin[:, :, None]).to(k.dtype)
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    slots = offsets[:, None] + torch.arange(k.shape[1], device=k.device)
    k_cache[rows, slots] = k
    v_cache[rows, slots] = v


def _ours(inputs: SimpleNamespace) -> Any:
    from dspark_fast.kernels.context_kv import store_context_kv as kernel

    return _storing(kernel, inputs)


def _plain(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return _storing(torch.compile(straight, dynamic=False), inputs)


def _equal_counts(case: Case, device: torch.device) -> str | None:
    return "written for equal counts" if case.shape["ragged"] else None


BIG = name("Qwen3-4B", 64, 512)
BENCH = Bench(
    "context_kv",
    cases,
    [
        Provider(OURS, _ours, kernel_why_not),
        Provider(EAGER, partial(_storing, store_context_kv)),
        Provider(PLAIN, _plain, _equal_counts, compiles=1),
    ],
    expect,
    equal,
    [
        Goal("N=512 at B=64: 70 % of the copy rate", lambda rows: of(rows, BIG, OURS, "percent_of_copy_rate"),
             at_least=70, unit="%"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    ["The reference looks at the counts on the host, so no CUDA graph can hold it."],
)  # fmt: skip


def test_context_kv(benchmark: Any, case: Case, provider: Provider, device: torch.device) -> None:
    under_pytest(benchmark, BENCH, case, provider, device)


if __name__ == "__main__":
    main(BENCH)
