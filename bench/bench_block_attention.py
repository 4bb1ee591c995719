"""Block attention: the queries of one block against each row's own cached keys and values.

    pytest bench/bench_block_attention.py --benchmark-only
    python bench/bench_block_attention.py

Bound by reading K and V once. T = 7 bidirectional queries are the drafter's block, T = 8 causal ones the target's
verify pass. Equality: RMS error under 1 % of the reference's RMS; both sides round to bf16.

What a user would call instead: SDPA over the concatenation of context and block (what a plain notebook loop does), SDPA
with grouped heads over the cache, and flex_attention with grouped heads over the cache, compiled. All three get rows of
equal lengths, where they need no mask (or, causal, a mask of a block); ragged lengths cost SDPA its fast paths.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from models import BLOCK, MODELS
from near_ties import rms_error
from report import lost, main, of, speedups, under_pytest
from table import COMPILED, EAGER, OURS, Bench, Case, Goal, Provider, Verdict, kernel_why_not

from dspark_fast.reference.block_attention import block_attention, visible_keys

HEADROOM = 64  # cache slots behind the longest row, as a decoding loop has
BOUND = 1e-2
# How the kernel splits a row: at least so many keys, and at most so many programs over the K/V heads.
SPLIT_KEYS, PROGRAMS = 256, 256


def splits(length: int, kv_heads: int) -> int:
    """Partial results of one row and head."""
    return min(max(1, PROGRAMS // kv_heads), -(-length // SPLIT_KEYS))


def bytes_moved(lengths: list[int], block: int, heads: int, kv_heads: int, dim: int, *, itemsize: int = 2) -> int:
    """What anyone must move: K and V of every row's length once, q in, out out."""
    return 2 * sum(lengths) * kv_heads * dim * itemsize + 2 * len(lengths) * block * heads * dim * itemsize


def partial_bytes(lengths: list[int], block: int, heads: int, kv_heads: int, dim: int) -> int:
    """What our kernel moves besides: the fp32 partials of the splits, written and read back.

    A partial is D numbers, a maximum and a sum per query. Launches: the splits, and what puts them together.
    """
    return 2 * sum(splits(length, kv_heads) for length in lengths) * block * heads * (dim + 2) * 4


def concatenated_bytes(case: Case) -> int:
    """The same by concatenation: K and V are read, written as one tensor, and read again; no partials are counted."""
    shape = case.shape
    model = MODELS[shape["model"]]
    cached = 2 * shape["batch"] * shape["S"] * model.kv_heads * model.head_dim * 2
    return 3 * cached + 2 * shape["batch"] * shape["block"] * model.heads * model.head_dim * 2


def cases(scale: str) -> list[Case]:
    if scale == "tiny":
        return [_case("tiny", batch, 37, causal) for batch in (1, 3) for causal in (False, True)] + [
            _case("tiny", 4, 37, causal, ragged=True) for causal in (False, True)
        ]
    if scale == "cpu":
        listed = [_case("SmolLM2-135M", batch, 512, causal) for batch in (1, 4) for causal in (False, True)]
        return [*listed, _case("SmolLM2-135M", 1, 4096)]
    listed = [_case("Qwen3-4B", batch, 32768, compiled=batch == 1) for batch in (1, 64, 16, 4)]
    listed += [_case("Qwen3-4B", batch, 4096, compiled=batch in (1, 64)) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", batch, 512) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", batch, length, True) for batch, length in ((1, 4096), (64, 4096), (1, 32768))]
    listed += [_case("Qwen3-4B", 16, 4096, causal, ragged=True) for causal in (False, True)]
    listed += [_case("Qwen3-14B", batch, 4096) for batch in (1, 64)]
    return listed + [_case("SmolLM2-135M", batch, length) for batch, length in ((1, 512), (1, 4096), (64, 4096))]


def name(model: str, batch: int, length: int, causal: bool = False, ragged: bool = False) -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={batch} S={length} {'causal' if causal else 'drafter'}" + (" ragged" if ragged else "")


def _case(
    model: str, batch: int, length: int, causal: bool = False, compiled: bool = False, ragged: bool = False
) -> Case:
    shape = MODELS[model]
    block = BLOCK + 1 if causal else BLOCK
    # Ragged rows go from an eighth of S to all of it.
    lengths = [max(block, length * (row % 8 + 1) // 8) if ragged else length for row in range(batch)]
    size = 4 if model == "tiny" else 2
    moved = bytes_moved(lengths, block, shape.heads, shape.kv_heads, shape.head_dim, itemsize=size)
    cache = 2 * batch * length * shape.kv_heads * shape.head_dim * size
    return Case(
        name(model, batch, length, causal, ragged),
        {
            "model": model,
            "batch": batch,
            "block": block,
            "S": length,
            "Hq": shape.heads,
            "Hkv": shape.kv_heads,
            "D": shape.head_dim,
            "causal": causal,
            "ragged": ragged,
        },
        partial(build, model, lengths, block, causal),
        moved,
        2,
        # The cache, its concatenated copy, and the scores where a provider writes them.
        3 * cache + 8 * batch * shape.heads * block * length,
        compiled,
        partial_bytes(lengths, block, shape.heads, shape.kv_heads, shape.head_dim),
    )


def build(model: str, lengths: list[int], block: int, causal: bool, device: torch.device) -> SimpleNamespace:
    """Random q, K and V; scores with a standard deviation of 2, so that some keys matter more than others."""
    shape = MODELS[model]
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(len(lengths))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    batch, capacity = len(lengths), max(lengths) + HEADROOM
    q = normal(batch, block, shape.heads, shape.head_dim) * 2
    k = normal(batch, capacity, shape.kv_heads, shape.head_dim)
    v = normal(batch, capacity, shape.kv_heads, shape.head_dim)
    return SimpleNamespace(
        args=(q, k, v, torch.tensor(lengths, dtype=torch.int32, device=device)),
        options={"scale": shape.head_dim**-0.5, "causal": causal},
        length=max(lengths),
        block=block,
        causal=causal,
    )


def expect(inputs: SimpleNamespace) -> torch.Tensor:
    return block_attention(*inputs.args, **inputs.options)


def equal(inputs: SimpleNamespace, out: torch.Tensor, expected: torch.Tensor) -> Verdict:
    if out.shape != expected.shape:
        return Verdict(False, f"shape {list(out.shape)} instead of {list(expected.shape)}")
    error = rms_error(out, expected)
    return Verdict(error <= BOUND, f"RMS error {error:.1e}")


def _mask(inputs: SimpleNamespace) -> torch.Tensor | None:
    """[B, 1, T, S], or None where every query reads every key."""
    lengths = inputs.args[3]
    if not inputs.causal and bool((lengths == inputs.length).all()):
        return None
    return visible_keys(lengths, inputs.block, inputs.length, causal=inputs.causal)[:, None]


def _sdpa(inputs: SimpleNamespace) -> Any:
    """Over the cache as it stands, heads grouped."""
    q, k, v, _ = inputs.args
    k, v = k[:, : inputs.length].transpose(1, 2), v[:, : inputs.length].transpose(1, 2)
    mask, scale = _mask(inputs), inputs.options["scale"]

    def call() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def _concatenated(inputs: SimpleNamespace) -> Any:
    """Context and block as two tensors [B, Hkv, S, D], put together at every call."""
    q, k, v, _ = inputs.args
    context = inputs.length - inputs.block
    parts = [
        (x[:, :context].transpose(1, 2).contiguous(), x[:, context : inputs.length].transpose(1, 2).contiguous())
        for x in (k, v)
    ]
    mask, scale = _mask(inputs), inputs.options["scale"]

    def call() -> torch.Tensor:
        keys, values = (torch.cat(part, dim=2) for part in parts)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    return call


def _flex(inputs: SimpleNamespace) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    q, k, v, _ = inputs.args
    length, block, scale = inputs.length, inputs.block, inputs.options["scale"]
    k, v = k[:, :length].transpose(1, 2), v[:, :length].transpose(1, 2)
    mask = None
    if inputs.causal:
        first = length - block

        def readable(b: Any, h: Any, query: Any, key: Any) -> Any:
            return key <= query + first

        mask = create_block_mask(readable, None, None, block, length, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        return compiled(q.transpose(1, 2), k, v, block_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)

    return call


def _ours(inputs: SimpleNamespace) -> Any:
    from dspark_fast.kernels.block_attention import block_attention as kernel

    return partial(kernel, *inputs.args, **inputs.options)


def _eager(inputs: SimpleNamespace) -> Any:
    return partial(block_attention, *inputs.args, **inputs.options)


def _compiled(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return partial(torch.compile(block_attention, dynamic=False), *inputs.args, **inputs.options)


def _equal_lengths(case: Case, device: torch.device) -> str | None:
    return "takes equal lengths" if case.shape["ragged"] else None


LONG = name("Qwen3-4B", 1, 32768)
LONG_MANY = name("Qwen3-4B", 64, 32768)


BENCH = Bench(
    "block_attention",
    cases,
    [
        Provider(OURS, _ours, kernel_why_not),
        Provider(EAGER, _eager),
        Provider("SDPA, grouped heads", _sdpa),
        Provider("SDPA, concatenated", _concatenated, _equal_lengths, bytes=concatenated_bytes, launches=3),
        Provider("flex_attention, compiled", _flex, _equal_lengths, compiles=1),
        Provider(COMPILED, _compiled, compiles=2),
    ],
    expect,
    equal,
    [
        Goal("S=32768 at B=1: 85 % of the copy rate", lambda rows: of(rows, LONG, OURS, "percent_of_copy_rate"),
             at_least=85, unit="%"),
        Goal("S=32768 at B=64: 85 % of the copy rate", lambda rows: of(rows, LONG_MANY, OURS, "percent_of_copy_rate"),
             at_least=85, unit="%"),
        Goal("5 times the eager reference at every shape", speedups(EAGER), at_least=5, unit="x"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    [
        "The reference asks for the longest length on the host, so no CUDA graph can hold it.",
        "Qwen3-8B has the heads of Qwen3-4B.",
    ],
)  # fmt: skip


def test_block_attention(benchmark: Any, case: Case, provider: Provider, device: torch.device) -> None:
    under_pytest(benchmark, BENCH, case, provider, device)


if __name__ == "__main__":
    main(BENCH)
