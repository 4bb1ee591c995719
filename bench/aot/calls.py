"""The calls of the public ops whose launches are compiled, and what is expected of the kernels behind them.

Everything that a launch is specialised on shows here: shapes of the real models (their strides are multiples of 16 or
not), one row and 64, options that are None or not. A new kernel needs a call that reaches it, a streaming one a line in
STREAMED besides. The tensors hold nothing and are never touched, so that their size costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from launched import launched
from models import BLOCK, MODELS, Model

from dspark_fast import kernels
from dspark_fast.reference.markov import NORM_GROUP

# The pointers (or names in an address) that a kernel's bytes come through: 16 bytes a load, or the copy rate is lost.
STREAMED = {
    "block_attention._split_kernel": ("p_k", "p_v"),
    "draft_loss._row_kernel": ("p_z", "p_l"),
    "markov._step_kernel": ("p_w2",),
    "statistics._row_statistics_kernel": ("logits",),
}
# Kernels whose products are matrix instructions.
MATRIX = {"block_attention._split_kernel", "markov._step_kernel", "markov_head._feature_kernel"}
# Kernels with atomics; any other that has one is reported.
ATOMICS = {"sampling._gather_kernel"}  # relaxed: it hands out places in a list whose order means nothing


class Call(NamedTuple):
    """One call of an op. ``quick`` ones are compiled in every run of the tests, ``only`` names targets if not all."""

    name: str
    run: Callable[[torch.dtype], object]
    quick: bool = False
    only: tuple[str, ...] = ()


def calls() -> list[Call]:
    """All of them."""
    return [*_attention(), *_context(), *_markov(), *_verify(), *_cut(), *_draft_loss()]


def _attention() -> Iterator[Call]:
    def call(
        name: str, model: Model, batch: int, block: int, capacity: int, *, quick: bool = False, **options: Any
    ) -> Call:
        def run(dtype: torch.dtype) -> object:
            q = torch.empty(batch, block, model.heads, model.head_dim, dtype=dtype)
            cache = torch.empty(batch, capacity, model.kv_heads, model.head_dim, dtype=dtype)
            lengths = torch.empty(batch, dtype=torch.int64)
            return kernels.block_attention(q, cache, cache, lengths, **{"scale": 0.1, "causal": False, **options})

        return Call(f"block_attention {name}", run, quick)

    for name, model in _models():
        yield call(f"{name}: draft", model, 1, BLOCK, 32768, quick=name == "Qwen3-4B")
        yield call(f"{name}: verify", model, 1, BLOCK + 1, 32768, causal=True, quick=name == "SmolLM2-135M")
    qwen = MODELS["Qwen3-4B"]
    yield call("Qwen3-4B: plain step", qwen, 1, 1, 4096, causal=True)
    yield call("Qwen3-4B: verify, 64 rows, cache over 2 GiB", qwen, 64, BLOCK + 1, 17408, causal=True)
    yield call("Qwen3-4B: 16 queries", qwen, 1, 16, 4096, causal=True, quick=True)
    yield call("Qwen3-14B: verify", MODELS["Qwen3-14B"], 1, BLOCK + 1, 4096, causal=True)
    yield call("Qwen3-4B: sliding layer", qwen, 1, BLOCK + 1, 32768, causal=True, window=4096)
    gemma = qwen._replace(heads=8, kv_heads=4, head_dim=256)
    yield call("head_dim 256: sliding, softcap", gemma, 1, 8, 8192, causal=True, window=4096, softcap=50.0, quick=True)


def _context() -> Iterator[Call]:
    def call(name: str, model: Model, batch: int, new: int, *, quick: bool = False) -> Call:
        def run(dtype: torch.dtype) -> object:
            k = torch.empty(batch, new, model.kv_heads, model.head_dim, dtype=dtype)
            weight = torch.empty(model.head_dim, dtype=dtype)
            cos = torch.empty(batch, new, model.head_dim)
            cache = torch.empty(batch, 4096, model.kv_heads, model.head_dim, dtype=dtype)
            offsets = torch.empty(batch, dtype=torch.int64)
            return kernels.store_context_kv(k, k, weight, cos, cos, cache, cache, offsets, offsets, eps=1e-6)

        return Call(f"store_context_kv {name}", run, quick)

    for name, model in _models():
        yield call(f"{name}: round", model, 1, BLOCK + 1, quick=True)
        yield call(f"{name}: prompt, 64 rows", model, 64, 512)


def _markov() -> Iterator[Call]:
    def call(
        name: str,
        model: Model,
        batch: int,
        head: str = "vanilla",
        *,
        quick: bool = False,
        only: tuple[str, ...] = (),
        bias: bool = False,
        rank: int | None = None,
        w2_dtype: torch.dtype | None = None,
        ahead: bool = False,
        bounded: bool = False,
        drafted: int | None = None,
        **options: Any,
    ) -> Call:
        rank = model.rank if rank is None else rank
        columns = drafted or model.vocab

        def run(dtype: torch.dtype) -> object:
            base = torch.empty(batch, BLOCK, columns, dtype=dtype)
            w1 = torch.empty(model.vocab, rank, dtype=dtype) if rank else None
            w2 = torch.empty(columns, rank, dtype=w2_dtype or dtype) if rank else None
            more = dict(options)
            if drafted is not None:
                more["vocabulary"] = _ids(drafted)
            if head != "vanilla":
                rows, width = (3 * rank, 2 * rank) if head == "rnn" else (rank, rank)
                more["hidden"] = torch.empty(batch, BLOCK, model.hidden, dtype=dtype)
                more["head_weight"] = torch.empty(rows, width + model.hidden, dtype=dtype)
                more["head_bias"] = torch.empty(rows, dtype=dtype) if bias else None
            if bounded:
                more |= {"w2_norms": torch.empty(-(-model.vocab // NORM_GROUP)), "keep_logits": False}
            with launched("markov_step", PDL=int(ahead)):
                return kernels.markov_walk(base, w1, w2, _ids(batch), head=head, **_rows(batch), **more)

        return Call(f"markov_walk {name}", run, quick, only)

    for name, model in _models():
        qwen = name == "Qwen3-4B"
        yield call(f"{name}: vanilla", model, 1, quick=True)
        yield call(f"{name}: vanilla, 64 rows", model, 64, quick=qwen)
        yield call(f"{name}: gated", model, 1, "gated", quick=qwen)
        yield call(f"{name}: rnn with bias", model, 1, "rnn", bias=True, quick=qwen)
    qwen = MODELS["Qwen3-4B"]
    yield call("Qwen3-4B: gated with bias, 64 rows", qwen, 64, "gated", bias=True)
    yield call("Qwen3-4B: rnn, 64 rows", qwen, 64, "rnn")
    yield call("Qwen3-4B: coupled, no logits kept", qwen, 1, coupled=True, keep_logits=False)
    yield call("Qwen3-4B: 64 candidates", qwen, 1, candidates=64, quick=True)
    yield call("Qwen3-4B: 64 candidates, 64 rows", qwen, 64, candidates=64)
    yield call("Qwen3-4B: 32,768 tokens drafted", qwen, 1, drafted=32768, quick=True)
    yield call("Qwen3-4B: 32,768 tokens drafted, coupled, 64 rows", qwen, 64, drafted=32768, coupled=True)
    yield call("Qwen3-4B: gated, 32,768 tokens drafted", qwen, 1, "gated", drafted=32768)
    yield call("Qwen3-4B: bf16 logits, 16 rows", qwen, 16, logits_dtype=torch.bfloat16)
    yield call("Qwen3-4B: independent slots", qwen, 1, rank=0)
    yield call("Qwen3-4B: greedy, tiles ruled out", qwen, 1, bounded=True, quick=True)
    yield call("Qwen3-4B: coupled, tiles ruled out, 64 rows", qwen, 64, bounded=True, coupled=True)
    yield call("SmolLM2-135M: coupled, tiles ruled out", MODELS["SmolLM2-135M"], 1, bounded=True, coupled=True)
    yield call("Qwen3-4B: dependent launch", qwen, 1, ahead=True, only=("sm_90", "sm_100"), quick=True)
    yield call("Qwen3-4B: float8 W2", qwen, 1, w2_dtype=torch.float8_e4m3fn, only=("sm_90", "sm_100"))


def _verify() -> Iterator[Call]:
    def call(
        name: str,
        model: Model,
        batch: int,
        mode: str,
        *,
        block: int = BLOCK,
        cuts: tuple[str, ...] = (),
        statistics: bool = True,
        quick: bool = False,
    ) -> Call:
        def run(dtype: torch.dtype) -> object:
            target = torch.empty(batch, block + 1, model.vocab, dtype=dtype)
            draft = torch.empty(batch, block, model.vocab) if mode == "rejection" and block else None
            tokens = torch.empty(batch, block, dtype=torch.int64)
            of_draft = torch.empty(batch, block) if statistics and draft is not None else None
            return kernels.verify(
                target,
                tokens,
                draft,
                _ids(batch),
                mode=mode,
                draft_row_max=of_draft,
                draft_log_sum=of_draft,
                **_rows(batch),
                **{cut: _cuts(batch)[cut] for cut in cuts},
            )

        return Call(f"verify {name}", run, quick)

    every = ("top_k", "top_p", "min_p")
    for name, model in _models():
        qwen = name == "Qwen3-4B"
        yield call(f"{name}: greedy", model, 1, "greedy", quick=qwen)
        yield call(f"{name}: rejection", model, 1, "rejection", quick=True)
        yield call(f"{name}: rejection, 64 rows", model, 64, "rejection")
        yield call(f"{name}: rejection, all cuts", model, 1, "rejection", cuts=every, quick=qwen)
        yield call(f"{name}: coupled", model, 1, "coupled", quick=qwen)
        yield call(f"{name}: plain step", model, 1, "rejection", block=0)
    qwen = MODELS["Qwen3-4B"]
    yield call("Qwen3-4B: coupled, top-k, 64 rows", qwen, 64, "coupled", cuts=("top_k",), quick=True)
    yield call("Qwen3-4B: plain step, all cuts", qwen, 64, "rejection", block=0, cuts=every)
    for cut in every[1:]:
        yield call(f"Qwen3-4B: rejection, {cut}", qwen, 1, "rejection", cuts=(cut,))
    yield call("SmolLM2-135M: rejection, no statistics", MODELS["SmolLM2-135M"], 1, "rejection", statistics=False)


def _cut() -> Iterator[Call]:
    def call(name: str, model: Model, batch: int) -> Call:
        def run(dtype: torch.dtype) -> object:
            cuts = _cuts(batch)
            logits = torch.empty(batch, model.vocab, dtype=dtype)
            return kernels.cut_logits(logits, torch.empty(batch), cuts["top_k"], cuts["top_p"], cuts["min_p"])

        return Call(f"cut_logits {name}", run, quick=batch == 1)

    for name, model in _models():
        yield call(name, model, 1 if name == "Qwen3-4B" else 64)


def _draft_loss() -> Iterator[Call]:
    def call(
        name: str,
        vocab: int,
        *,
        rank: int = 8,
        reduced: bool = False,
        listed: int = 0,
        softcap: float | None = None,
        gradients: bool = True,
        quick: bool = False,
    ) -> Call:
        def run(dtype: torch.dtype) -> object:
            rows, width = 2, 8  # neither reaches a kernel, and the products around it are really made
            hidden, weights = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows)
            return kernels.draft_loss_gradients(
                hidden,
                None if listed else hidden,
                _ids(rows).zero_(),
                weights,
                weights,
                torch.zeros(vocab, width, dtype=dtype),
                feature=torch.zeros(rows, rank, dtype=dtype) if rank else None,
                w2=torch.zeros(vocab, rank) if rank else None,
                log_total=weights if reduced else None,
                target_tokens=torch.zeros(rows, listed, dtype=torch.int64) if listed else None,
                target_probs=torch.zeros(rows, listed) if listed else None,
                softcap=softcap,
                gradients=gradients,
            )

        return Call(f"draft_loss {name}", run, quick)

    for name, model in _models():
        yield call(f"{name}", model.vocab, quick=name == "Qwen3-4B")
        yield call(f"{name}: no gradients", model.vocab, gradients=False)
        yield call(f"{name}: 64 listed", model.vocab, listed=64, quick=name == "Qwen3-4B")
    qwen = MODELS["Qwen3-4B"].vocab
    yield call("Qwen3-4B: no Markov head", qwen, rank=0)
    yield call("Qwen3-4B: 32,768 tokens of it", 32768, reduced=True)
    yield call("softcap", 262144, softcap=30.0, quick=True)
    yield call("softcap, 64 listed", 262144, softcap=30.0, listed=64)
    yield call("softcap, no Markov head", 262144, softcap=30.0, rank=0)


def _models() -> list[tuple[str, Model]]:
    return [(name, MODELS[name]) for name in ("Qwen3-4B", "SmolLM2-135M")]


def _ids(batch: int) -> torch.Tensor:
    return torch.empty(batch, dtype=torch.int64)


def _rows(batch: int) -> dict[str, torch.Tensor]:
    return {"temperature": torch.ones(batch), "seed": _ids(batch), "position": _ids(batch)}


def _cuts(batch: int) -> dict[str, torch.Tensor]:
    return {"top_k": _ids(batch), "top_p": torch.empty(batch), "min_p": torch.empty(batch)}
