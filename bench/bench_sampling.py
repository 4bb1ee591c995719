"""The noise of a row and the cut of its logits (temperature, top-k, top-p, min-p), each on its own.

    pytest bench/bench_sampling.py --benchmark-only
    python bench/bench_sampling.py

The walk and the verification have both fused into them; ``bench_markov.py`` and ``bench_verify.py`` show what they cost
there. Here the cut is compared with what transformers' logits processors do, and the reference's counter-based noise
with torch's own exponentials. (End to end: ``bench_sampling_cost.py``.)

Equality of cuts: kept values equal to 1e-5, and the same tokens kept, except those at whose value the mass above is
within 1e-5 of top-p. transformers keeps an arbitrary part of a tie at the edge of top-p, so it is not compared.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from models import MODELS
from report import lost, main, of, speedups, under_pytest
from table import EAGER, OURS, Bench, Case, Goal, Provider, Verdict, installed_why_not, kernel_why_not

from dspark_fast.reference.sampling import TARGET, cut_logits, exponentials

TEMPERATURE = 0.8
CUTS = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
NOISE = "noise"


def bytes_moved(batch: int, vocab: int, *, itemsize: int = 2, cut: bool = True) -> int:
    """Logits read for the row's statistics, for the tokens above a bound and for the result, written as fp32.

    With a temperature alone the middle one finds nothing to do. Launches: statistics, three for the threshold, result.
    """
    return batch * vocab * ((3 if cut else 2) * itemsize + 4)


def noise_bytes(batch: int, vocab: int) -> int:
    """Nothing read, an fp32 number per token written."""
    return batch * vocab * 4


def cases(scale: str) -> list[Case]:
    model, batches, cuts = "Qwen3-4B", (1, 64, 4, 16), list(CUTS)
    if scale == "tiny":
        model, batches = "tiny", (1, 3)
    if scale == "cpu":
        model, batches = "SmolLM2-135M", (1, 4)
    return [_case(model, batch, mode) for mode in [*cuts, NOISE] for batch in batches]


def name(model: str, batch: int, mode: str) -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={batch} {mode}"


def _case(model: str, batch: int, mode: str) -> Case:
    vocab = MODELS[model].vocab
    size = 4 if model == "tiny" else 2
    noise, cut = mode == NOISE, bool(CUTS.get(mode))
    return Case(
        name(model, batch, mode),
        {"model": model, "batch": batch, "V": vocab, "mode": mode},
        partial(build, model, batch, mode),
        noise_bytes(batch, vocab) if noise else bytes_moved(batch, vocab, itemsize=size, cut=cut),
        1 if noise else 5,
        60 * batch * vocab,
    )


def build(model: str, batch: int, mode: str, device: torch.device) -> SimpleNamespace:
    """Random logits; in the noise cases only their shape is used."""
    vocab = MODELS[model].vocab
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(batch)
    logits = torch.randn(batch, vocab, generator=generator, device=device).mul_(3).to(dtype)
    cuts = {key: torch.full((batch,), value, device=device) for key, value in CUTS.get(mode, {}).items()}
    return SimpleNamespace(
        logits=logits,
        temperature=torch.full((batch,), TEMPERATURE, device=device),
        cuts=cuts,
        mode=mode,
        seed=torch.arange(batch, device=device) + 2**40,
        position=torch.full((batch,), 1000, dtype=torch.int64, device=device),
    )


def expect(inputs: SimpleNamespace) -> torch.Tensor:
    return _eager(inputs)()


def equal(inputs: SimpleNamespace, out: torch.Tensor, expected: torch.Tensor) -> Verdict:
    if inputs.mode == NOISE:
        return Verdict(bool(torch.equal(out, expected)), "equal bit for bit")
    kept, right = out > -torch.inf, expected > -torch.inf
    both = kept & right
    if not torch.allclose(out[both], expected[both], rtol=1e-5, atol=1e-5):
        return Verdict(False, "kept values differ")
    disputed = 0
    top_p = float(inputs.cuts["top_p"][0]) if "top_p" in inputs.cuts else None
    for row in (kept != right).any(-1).nonzero()[:, 0].tolist():
        if top_p is None:
            return Verdict(False, f"row {row} keeps {int(kept[row].sum())} tokens instead of {int(right[row].sum())}")
        without = {key: value[row : row + 1] for key, value in inputs.cuts.items() if key == "top_k"}
        scaled = cut_logits(inputs.logits[row : row + 1], TEMPERATURE, **without)[0].double()
        mass = scaled.softmax(-1)
        for value in scaled[kept[row] != right[row]].unique():
            above = float(mass[scaled > value].sum())
            if abs(above - top_p) > 1e-5:
                return Verdict(False, f"row {row}: a value with {above:.6f} of the mass above it is judged differently")
            disputed += 1
    return Verdict(True, "the same tokens kept" + (f" but {disputed} values at the edge of top-p" if disputed else ""))


def _eager(inputs: SimpleNamespace) -> Any:
    if inputs.mode == NOISE:
        return partial(exponentials, inputs.seed, inputs.position, inputs.position, TARGET, inputs.logits.shape[-1])
    return partial(cut_logits, inputs.logits, inputs.temperature, **inputs.cuts)


def _ours(inputs: SimpleNamespace) -> Any:
    from dspark_fast.kernels.sampling import cut_logits as kernel

    return partial(kernel, inputs.logits, inputs.temperature, **inputs.cuts)


def _torch_noise(inputs: SimpleNamespace) -> Any:
    noise = torch.empty(inputs.logits.shape, device=inputs.logits.device)
    return noise.exponential_


def _transformers(inputs: SimpleNamespace) -> Any:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    made = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warpers = [TemperatureLogitsWarper(TEMPERATURE)]
    warpers += [made[key](CUTS[inputs.mode][key]) for key in CUTS[inputs.mode]]

    def call() -> torch.Tensor:
        scores = inputs.logits.float()
        for warper in warpers:
            scores = warper(None, scores)
        return scores

    return call


def _flashinfer(inputs: SimpleNamespace) -> Any:
    from flashinfer.sampling import top_k_mask_logits

    def call() -> torch.Tensor:
        return top_k_mask_logits(inputs.logits.float() / TEMPERATURE, CUTS[inputs.mode]["top_k"])

    return call


def _needs(noise: bool, other: Any = None, only: str | None = None) -> Any:
    def why_not(case: Case, device: torch.device) -> str | None:
        if (case.shape["mode"] == NOISE) != noise:
            return "makes noise" if noise else "the noise is inside the walk and the verification"
        if only is not None and case.shape["mode"] != only:
            return f"does {only}"
        return other(case, device) if other is not None else None

    return why_not


MANY = name("Qwen3-4B", 64, "top-k 50")
BENCH = Bench(
    "sampling",
    cases,
    [
        Provider(OURS, _ours, _needs(False, kernel_why_not)),
        Provider(EAGER, _eager),
        Provider("transformers", _transformers, _needs(False), same=False,
                 differs="keeps an arbitrary part of a tie at the edge of top-p"),
        Provider("flashinfer", _flashinfer, _needs(False, installed_why_not("flashinfer"), "top-k 50"), same=False,
                 differs="may break ties"),
        Provider("torch exponential_", _torch_noise, _needs(True), same=False, differs="depends on the batch"),
    ],
    expect,
    equal,
    [
        Goal("top-k 50 at B=64: 70 % of the copy rate", lambda rows: of(rows, MANY, OURS, "percent_of_copy_rate"),
             at_least=70, unit="%"),
        Goal("5 times the eager reference in every cut at every batch size", speedups(EAGER), at_least=5, unit="x"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    ["The reference looks at the cuts on the host, so no CUDA graph can hold it."],
)  # fmt: skip


def test_sampling(benchmark: Any, case: Case, provider: Provider, device: torch.device) -> None:
    under_pytest(benchmark, BENCH, case, provider, device)


if __name__ == "__main__":
    main(BENCH)
