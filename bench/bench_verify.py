"""Verification: how many drafted tokens the target keeps, and the token that follows them.

    pytest bench/bench_verify.py --benchmark-only
    python bench/bench_verify.py

Bound by launches at B = 1 (a row of logits is 0.3 MB) and by reading the target's logits at B = 64. Equality: accepted
counts and next tokens equal to the reference's, except where, in double precision, the acceptance test is decided by
less than 1e-4 of p or the draw by less than 1e-3 of its score. Greedy rows must be equal outright.

What a user would call instead: transformers' own speculative sampling (one row), FlashInfer's chain sampling where it
is installed, and a batched rejection sampler in plain torch, compiled. These draw noise of their own: the same law,
other tokens, so they cannot be compared token by token.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from models import BLOCK, MODELS
from near_ties import is_near_tie, too_many
from report import lost, main, of, ratio, speedups, under_pytest
from table import COMPILED, EAGER, OURS, PLAIN, Bench, Case, Goal, Provider, Verdict, installed_why_not, kernel_why_not

from dspark_fast.reference.sampling import (
    DRAFT,
    TARGET,
    accept_uniform,
    cut_logits,
    exponentials,
    gumbel_argmax,
    softmax_statistics,
)
from dspark_fast.reference.verify import verify

TEMPERATURE = 0.8
POSITION = 1000
CUTS = {
    "": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}
LAUNCHES = {"greedy": 2, "coupled": 2, "rejection": 3}
CUT_LAUNCHES = {"greedy": 0, "coupled": 4, "rejection": 3}  # finding the threshold; coupled races again behind it
CUT_READS = {"greedy": 0, "coupled": 2, "rejection": 1}


def bytes_moved(
    lengths: list[int], vocab: int, mode: str, *, cut: bool = False, target: int = 2, draft: int = 4
) -> int:
    """What judging rows of these draft lengths must move; target, draft: bytes of an element of their logits.

    Every mode reads a row's length + 1 target rows once. Rejection draws from one of them again, less one draft row. A
    cut reads the target rows once more for its threshold; coupled mode, whose race the cut decides, once again.
    """
    rows = sum(length + 1 for length in lengths)
    moved = rows * vocab * target * (1 + (CUT_READS[mode] if cut else 0))
    if mode == "rejection":
        moved += len(lengths) * vocab * (target + draft)
    return moved


def cases(scale: str) -> list[Case]:
    if scale == "tiny":
        modes = [("greedy", ""), ("coupled", ""), ("rejection", ""), ("rejection", "top-k 50, top-p 0.9")]
        return [_case("tiny", batch, mode, cut) for mode, cut in modes for batch in (1, 5)]
    if scale == "cpu":
        modes = [
            ("greedy", ""),
            ("rejection", ""),
            ("coupled", ""),
            ("rejection", "top-k 50"),
            ("rejection", "top-p 0.9"),
        ]
        return [_case("SmolLM2-135M", batch, mode, cut) for mode, cut in modes for batch in (1, 4)]
    model = "Qwen3-4B"
    listed = [_case(model, batch, "rejection", compiled=batch in (1, 64)) for batch in (1, 64, 4, 16)]
    listed += [_case(model, batch, "greedy", compiled=batch in (1, 64)) for batch in (1, 64, 4, 16)]
    listed += [_case(model, batch, "rejection", "top-k 50") for batch in (1, 64, 4, 16)]
    listed += [_case(model, batch, "coupled", compiled=batch == 1) for batch in (1, 64, 4, 16)]
    listed += [_case(model, batch, "rejection", cut) for cut in list(CUTS)[2:] for batch in (1, 64)]
    listed += [_case(model, batch, "coupled", "top-k 50, top-p 0.9") for batch in (1, 64)]
    listed += [_case(model, 64, "rejection", ragged=True)]
    return listed + [_case("SmolLM2-135M", batch, "rejection") for batch in (1, 64)]


def name(model: str, batch: int, mode: str, cut: str = "", ragged: bool = False) -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={batch} {mode}" + (f" {cut}" if cut else " uncut") + (" ragged" if ragged else "")


def _case(model: str, batch: int, mode: str, cut: str = "", compiled: bool = False, ragged: bool = False) -> Case:
    vocab = MODELS[model].vocab
    lengths = [row % (BLOCK + 1) if ragged else BLOCK for row in range(batch)]
    size = 4 if model == "tiny" else 2
    return Case(
        name(model, batch, mode, cut, ragged),
        {"model": model, "batch": batch, "block": BLOCK, "V": vocab, "mode": mode, "cut": cut, "ragged": ragged},
        partial(build, model, lengths, mode, cut),
        bytes_moved(lengths, vocab, mode, cut=bool(cut), target=size),
        LAUNCHES[mode] + (CUT_LAUNCHES[mode] if cut else 0),
        batch * vocab * (BLOCK + 1) * 60,  # building the drafts' noise takes the most
        compiled,
    )


def build(model: str, lengths: list[int], mode: str, cut: str, device: torch.device) -> SimpleNamespace:
    """Random target logits; drafts from the same logits and an error on top, so that some are accepted and some not."""
    vocab, batch = MODELS[model].vocab, len(lengths)
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(batch)
    target = torch.randn(batch, BLOCK + 1, vocab, generator=generator, device=device).mul_(3).to(dtype)
    draft = target[:, :BLOCK].float() + torch.randn(batch, BLOCK, vocab, generator=generator, device=device).mul_(0.3)
    temperature = torch.full((batch,), 0.0 if mode == "greedy" else TEMPERATURE, device=device)
    seed = torch.arange(batch, device=device) + 2**40
    position = torch.full((batch,), POSITION, dtype=torch.int64, device=device)
    if mode == "greedy":
        tokens = target[:, :BLOCK].argmax(-1)
        wrong = torch.rand(batch, BLOCK, generator=generator, device=device) < 0.2
        tokens = torch.where(wrong, (tokens + 1) % vocab, tokens)
    else:
        anchor = torch.zeros_like(position) if mode == "coupled" else position
        tokens = torch.stack(
            [
                gumbel_argmax(
                    draft[:, slot] / TEMPERATURE, exponentials(seed, position + 1 + slot, anchor, DRAFT, vocab)
                )
                for slot in range(BLOCK)
            ],
            1,
        )
    kept = mode == "rejection"
    row_max, log_sum = softmax_statistics(draft, temperature[:, None]) if kept else (None, None)
    options: dict[str, Any] = {
        "temperature": temperature,
        "seed": seed,
        "position": position,
        "mode": mode,
        "draft_row_max": row_max,
        "draft_log_sum": log_sum,
    }
    for key, value in CUTS[cut].items():
        options[key] = torch.full((batch,), value, device=device)
    lengths = torch.tensor(lengths, device=device)
    return SimpleNamespace(args=(target, tokens, draft if kept else None, lengths), options=options, cut=cut)


def expect(inputs: SimpleNamespace) -> Any:
    return verify(*inputs.args, **inputs.options)


def equal(inputs: SimpleNamespace, result: Any, expected: Any) -> Verdict:
    batch = expected[0].shape[0]
    mode = inputs.options["mode"]
    differing = ((result[0] != expected[0]) | (result[1] != expected[1])).nonzero()[:, 0].tolist()
    for row in differing:
        ours = int(result[0][row]), int(result[1][row])
        right = int(expected[0][row]), int(expected[1][row])
        if mode == "greedy" or not _near_tie(inputs, row, ours, right):
            return Verdict(False, f"row {row}: (accepted, next) {ours} instead of {right}, no near-tie")
    if too_many(len(differing), batch * (BLOCK + 1)):
        return Verdict(False, f"{len(differing)} near-ties in {batch} rows")
    mean = float(expected[0].float().mean())
    ties = f", {len(differing)} near-ties" if differing else ""
    return Verdict(True, f"tokens equal{ties}; {mean:.1f} accepted a row")


def _near_tie(inputs: SimpleNamespace, row: int, ours: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether arithmetic may decide this row either way, judged in double precision at the first slot that differs."""
    target, tokens, draft, lengths = inputs.args
    options = inputs.options
    seed, position = options["seed"][row], options["position"][row]
    slot = min(ours[0], right[0])
    cuts = [options.get(key, neutral) for key, neutral in (("top_k", 0), ("top_p", 1.0))]
    cuts = [cut[row : row + 1] if isinstance(cut, torch.Tensor) else cut for cut in cuts]
    scaled = cut_logits(target[row : row + 1, slot], TEMPERATURE, *cuts)[0].double()
    if options["mode"] == "coupled":
        noise = exponentials(seed, position + 1 + slot, torch.zeros_like(position), DRAFT, scaled.shape[-1]).double()
        best = (scaled - noise.log()).topk(2).values
        return float(best[0] - best[1]) <= 1e-3
    p = scaled.softmax(-1)
    q = None
    if slot < int(lengths[row]):
        q = (draft[row, slot].double() / TEMPERATURE).softmax(-1)
    if ours[0] != right[0]:
        token = int(tokens[row, slot])
        threshold = accept_uniform(seed, position + 1 + slot, position).double() * q[token]
        return abs(float(threshold - p[token])) <= 1e-4 * float(p[token])
    weights = p if q is None else (p - q).clamp(min=0)
    scores = (weights / exponentials(seed, position + 1 + slot, position, TARGET, p.shape[-1]).double()).log()
    return is_near_tie(scores, ours[1], right[1], 1e-3)


def straight_greedy(target: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Greedy verification as one would write it for torch.compile."""
    best = target.argmax(-1)
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    accepted = ((tokens == best[:, :-1]) & inside).long().cumprod(-1).sum(-1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def straight_rejection(target: torch.Tensor, tokens: torch.Tensor, draft: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Batched rejection sampling likewise, with torch's own noise: probabilities, ratio test, residual, one draw."""
    block, rows = tokens.shape[1], torch.arange(tokens.shape[0], device=tokens.device)
    p, q = (target.float() / TEMPERATURE).softmax(-1), (draft / TEMPERATURE).softmax(-1)
    p_token = p[:, :block].gather(-1, tokens[..., None])[..., 0]
    q_token = q.gather(-1, tokens[..., None])[..., 0]
    inside = torch.arange(block, device=tokens.device) < lengths[:, None]
    accepted = ((torch.rand_like(q_token) * q_token < p_token) & inside).long().cumprod(-1).sum(-1)
    rejected = (accepted < lengths)[:, None]
    last = p[rows, accepted]
    weights = torch.where(rejected, (last - q[rows, accepted.clamp(max=block - 1)]).clamp(min=0), last)
    return accepted, (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def _ours(inputs: SimpleNamespace) -> Any:
    from dspark_fast.kernels.verify import verify as kernel

    return partial(kernel, *inputs.args, **inputs.options)


def _eager(inputs: SimpleNamespace) -> Any:
    return partial(verify, *inputs.args, **inputs.options)


def _compiled(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return partial(torch.compile(verify, dynamic=False), *inputs.args, **inputs.options)


def _plain_greedy(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    target, tokens, _, lengths = inputs.args
    return partial(torch.compile(straight_greedy, dynamic=False), target, tokens, lengths)


def _plain_rejection(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return partial(torch.compile(straight_rejection, dynamic=False), *inputs.args)


def _transformers(inputs: SimpleNamespace) -> Any:
    from transformers.generation.utils import _speculative_sampling

    target, tokens, draft, _ = inputs.args
    # 5.17 and 5.23 differ in what they take besides the four.
    extra = (
        {"is_done_candidate": False}
        if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters
        else {}
    )

    def call() -> Any:
        return _speculative_sampling(
            tokens, draft / TEMPERATURE, tokens.shape[1], target.float() / TEMPERATURE, **extra
        )

    return call


def _flashinfer(inputs: SimpleNamespace) -> Any:
    from flashinfer.sampling import chain_speculative_sampling

    target, tokens, draft, _ = inputs.args
    tokens = tokens.int()

    def call() -> Any:
        q, p = (draft / TEMPERATURE).softmax(-1), (target.float() / TEMPERATURE).softmax(-1)
        return chain_speculative_sampling(q, tokens, p)

    return call


def _only(mode: str, *, batch: int | None = None, needs: Any = None) -> Any:
    def why_not(case: Case, device: torch.device) -> str | None:
        shape = case.shape
        if shape["mode"] != mode or shape["cut"]:
            return f"does {mode} verification without cuts"
        if batch is not None and shape["batch"] != batch:
            return "takes one row"
        if shape["ragged"] and mode != "greedy" and needs is not None:
            return "takes equal lengths"
        return needs(case, device) if needs is not None else None

    return why_not


ONE, MANY = name("Qwen3-4B", 1, "rejection"), name("Qwen3-4B", 64, "rejection")
NOISE = "torch's own noise: the same law, other tokens"


BENCH = Bench(
    "verify",
    cases,
    [
        Provider(OURS, _ours, kernel_why_not),
        Provider(EAGER, _eager),
        Provider("transformers", _transformers, _only("rejection", batch=1), same=False, differs=NOISE),
        Provider("flashinfer", _flashinfer, _only("rejection", needs=installed_why_not("flashinfer")), same=False,
                 differs=NOISE),
        Provider(PLAIN, _plain_greedy, _only("greedy"), compiles=1),
        Provider(f"{PLAIN}, own noise", _plain_rejection, _only("rejection"), same=False, differs=NOISE, compiles=1),
        Provider(COMPILED, _compiled, compiles=2),
    ],
    expect,
    equal,
    [
        Goal("rejection without cuts at B=1 under 15 us in a graph", lambda rows: of(rows, ONE), at_most=15, unit="us"),
        Goal("rejection without cuts at B=64: 70 % of the copy rate",
             lambda rows: of(rows, MANY, OURS, "percent_of_copy_rate"), at_least=70, unit="%"),
        Goal("5 times the eager reference in every mode at every batch size", speedups(EAGER), at_least=5, unit="x"),
        Goal("1.2 times as fast as a plain compiled sampler at B=1",
             ratio((ONE, f"{PLAIN}, own noise"), (ONE, OURS)), at_least=1.2, unit="x"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    [
        "The reference looks at values on the host, so no CUDA graph can hold it, compiled or not; `plain torch, "
        "compiled` is a batched sampler without those looks, compiled and captured.",
        "Qwen3-8B and 14B have the vocabulary of Qwen3-4B: one row stands for the three.",
    ],
)  # fmt: skip


def test_verify(benchmark: Any, case: Case, provider: Provider, device: torch.device) -> None:
    under_pytest(benchmark, BENCH, case, provider, device)


if __name__ == "__main__":
    main(BENCH)
