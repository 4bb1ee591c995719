"""The Markov walk: a block of tokens, each from the base logits and a low-rank bias of the token before it.

    pytest bench/bench_markov.py --benchmark-only
    python bench/bench_markov.py

Bound by reading W2 once a step at B = 1, and by the base logits (and the kept logits) at B = 64. Equality: tokens equal
to the reference's up to near-ties (two bf16 products summed in another order may round a bias to another value), row
sums to 1e-2, kept logits to an RMS error of 4e-3. Behind a near-tie the rest of that row's block follows another token
and is not compared.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from launched import launched
from models import BLOCK, MODELS
from near_ties import is_near_tie, rms_error, too_many
from report import lost, main, of, ratio, under_pytest
from table import COMPILED, EAGER, OURS, PLAIN, Bench, Case, Goal, Provider, Verdict, kernel_why_not

from dspark_fast.reference.markov import MarkovWalk, markov_norms, markov_walk
from dspark_fast.reference.sampling import DRAFT, exponentials

TEMPERATURE = 0.8
POSITION = 1000


def bytes_moved(
    batch: int, block: int, vocab: int, rank: int, *, weight: int = 2, base: int = 2, kept: int = 0, head: int = 0
) -> int:
    """What a walk must move: W2 once a step, every base logit, every kept logit, a row of W1 per token, head weights.

    weight, base, kept: bytes of an element of W1 and W2, of a base logit, of a kept logit (0 if none is kept); head:
    bytes of a gated or rnn head's matrix, read once a step. Launches: one a step and one that ends the last; for
    gated and rnn one more a step, since their feature is a product of its own, and one for the hidden states' part.
    """
    w2 = block * vocab * rank * weight
    logits = batch * block * vocab * (base + kept)
    return w2 + logits + batch * block * rank * weight + block * head


def cases(scale: str) -> list[Case]:
    if scale == "tiny":
        return [_case("tiny", batch, mode) for batch in (1, 3) for mode in ("greedy", "greedy kept", "sampled")] + [
            _case("tiny", 2, "greedy", head) for head in ("gated", "rnn")
        ]
    if scale == "cpu":
        return [_case("SmolLM2-135M", batch, mode) for batch in (1, 4) for mode in ("greedy", "sampled")]
    listed = [_case("Qwen3-4B", batch, "greedy", compiled=batch in (1, 64)) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", batch, "sampled", compiled=batch == 1) for batch in (1, 64, 4, 16)]
    listed += [_case("Qwen3-4B", batch, "greedy kept") for batch in (1, 64)]
    listed += [_case("Qwen3-4B", 1, "greedy", head) for head in ("gated", "rnn")]
    listed += [_case("Qwen3-8B", 1, "greedy", "gated")]
    return listed + [_case("SmolLM2-135M", batch, mode) for batch in (1, 64) for mode in ("greedy", "sampled")]


def name(model: str, batch: int, mode: str, head: str = "vanilla") -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={batch} {mode}" + ("" if head == "vanilla" else f" {head}")


def _case(model: str, batch: int, mode: str, head: str = "vanilla", compiled: bool = False) -> Case:
    shape = MODELS[model]
    kept = 0 if mode == "greedy" else 4
    rows = {"vanilla": 0, "gated": shape.rank, "rnn": 3 * shape.rank}[head]
    columns = shape.hidden + (1 if head == "gated" else 2) * shape.rank
    size = 4 if model == "tiny" else 2  # the interpreter gets bf16 wrong
    moved = bytes_moved(
        batch, BLOCK, shape.vocab, shape.rank, weight=size, base=size, kept=kept, head=rows * columns * size
    )
    return Case(
        name(model, batch, mode, head),
        {"model": model, "batch": batch, "block": BLOCK, "V": shape.vocab, "R": shape.rank, "mode": mode, "head": head},
        partial(build, model, batch, mode, head),
        moved,
        BLOCK + 1 if head == "vanilla" else 2 * BLOCK + 2,
        # The eager reference's noise: five int64 words per four logits, and the noise itself.
        moved + 40 * batch * BLOCK * shape.vocab,
        compiled,
    )


def build(model: str, batch: int, mode: str, head: str, device: torch.device) -> SimpleNamespace:
    """Random logits and weights, scaled so that base and bias both matter: standard deviations of 3 and 1."""
    shape = MODELS[model]
    dtype = torch.float32 if model == "tiny" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(batch)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype)

    hidden = weight = bias = None
    if head != "vanilla":
        hidden = normal(batch, BLOCK, shape.hidden)
        rows, columns = (1, 1) if head == "gated" else (3, 2)
        width = shape.hidden + columns * shape.rank
        weight = normal(rows * shape.rank, width, scale=width**-0.5)
        bias = normal(rows * shape.rank, scale=0.1)
    sampled = mode == "sampled"
    base = normal(batch, BLOCK, shape.vocab, scale=3.0)
    w1 = normal(shape.vocab, shape.rank)
    w2 = normal(shape.vocab, shape.rank, scale=shape.rank**-0.5)
    anchor = torch.randint(shape.vocab, (batch,), generator=generator, device=device)
    options = {
        "temperature": torch.full((batch,), TEMPERATURE if sampled else 0.0, device=device),
        "seed": torch.arange(batch, device=device) + 2**40,
        "position": torch.full((batch,), POSITION, dtype=torch.int64, device=device),
        "head": head,
        "head_weight": weight,
        "head_bias": bias,
        "hidden": hidden,
    }
    return SimpleNamespace(args=(base, w1, w2, anchor), options=options, keep=mode != "greedy", sampled=sampled)


def expect(inputs: SimpleNamespace) -> MarkovWalk:
    """The reference with its logits kept, which the near-ties are judged by."""
    return markov_walk(*inputs.args, **inputs.options, keep_logits=True)


def equal(inputs: SimpleNamespace, walk: MarkovWalk, expected: MarkovWalk) -> Verdict:
    base, _, w2, _ = inputs.args
    batch, block, vocab = base.shape
    temperature = TEMPERATURE if inputs.sampled else 1.0
    leading = (walk.tokens == expected.tokens).long().cumprod(-1).sum(-1).tolist()
    ties = 0
    for row, slot in enumerate(leading):
        if slot == block:
            continue
        scores = expected.logits[row, slot].float() / temperature
        bias = (expected.logits[row, slot].float() - base[row, slot].float()).abs().max()
        tolerance = max(torch.finfo(w2.dtype).eps, 2.0**-16) * float(bias) / temperature
        if inputs.sampled:
            seed, position = inputs.options["seed"][row], inputs.options["position"][row]
            scores = scores - exponentials(seed, position + 1 + slot, position, DRAFT, vocab).log()
        chosen, right = int(walk.tokens[row, slot]), int(expected.tokens[row, slot])
        if not is_near_tie(scores, chosen, right, tolerance):
            return Verdict(False, f"row {row}, slot {slot}: token {chosen} instead of {right}, no near-tie")
        ties += 1
    if too_many(ties, batch * block):
        return Verdict(False, f"{ties} near-ties in {batch * block} tokens")

    counted = torch.arange(block, device=base.device) < torch.tensor(leading, device=base.device)[:, None]
    if walk.row_max is not None and counted.any():
        scale = temperature if inputs.sampled else 1.0
        total = (walk.row_max / scale + walk.log_sum - expected.row_max / scale - expected.log_sum)[counted].abs().max()
        # The maximum alone may move by the rounding of one bias, which is all there is to see in a greedy walk.
        bound = 1e-2 if inputs.sampled else 4 * torch.finfo(w2.dtype).eps + 1e-4
        if not total <= bound:
            return Verdict(False, f"row sums differ by {float(total):.3g}")
    if inputs.keep and walk.logits is not None and counted.any():
        error = max(rms_error(walk.logits[row, :n], expected.logits[row, :n]) for row, n in enumerate(leading) if n)
        if not error <= 4e-3:
            return Verdict(False, f"kept logits: RMS error {error:.3g}")
    return Verdict(True, f"tokens equal, {ties} near-ties in {batch * block}" if ties else "tokens equal")


def straight(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """The greedy walk as one would write it for torch.compile: no options, no branches, nothing kept."""
    previous, tokens = anchor, []
    for slot in range(base.shape[1]):
        previous = (base[:, slot].float() + F.linear(F.embedding(previous, w1), w2).float()).argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1)


def straight_sampled(base: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, anchor: torch.Tensor) -> Any:
    """The sampled walk likewise: torch's own exponentials, logits kept for the verification."""
    previous, tokens, logits = anchor, [], []
    for slot in range(base.shape[1]):
        row = base[:, slot].float() + F.linear(F.embedding(previous, w1), w2).float()
        logits.append(row)
        previous = (row / TEMPERATURE - torch.empty_like(row).exponential_().log()).argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def _kernel() -> Any:
    from dspark_fast.kernels.markov import markov_walk as kernel

    return kernel


def _ours(inputs: SimpleNamespace) -> Any:
    return partial(_kernel(), *inputs.args, **inputs.options, keep_logits=inputs.keep)


def _ahead(inputs: SimpleNamespace) -> Any:
    """Programmatic dependent launch: a step asks for its first tile of W2 while the step before it ends."""
    ours = _ours(inputs)

    def call() -> MarkovWalk:
        with launched("markov_step", PDL=1):
            return ours()

    return call


def _eight_bits(inputs: SimpleNamespace) -> Any:
    """W2 in float8 under one scale, which W1 carries."""
    base, w1, w2, anchor = inputs.args
    scale = w2.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    args = (base, (w1 * scale).to(w1.dtype), (w2.float() / scale).to(torch.float8_e4m3fn), anchor)
    return partial(_kernel(), *args, **inputs.options, keep_logits=inputs.keep)


def _ruled_out(inputs: SimpleNamespace) -> Any:
    """Tiles of W2 that cannot hold the winner are not read; how many depends on the drafter (markov_tries.py)."""
    call = partial(_kernel(), *inputs.args, **inputs.options, keep_logits=False, w2_norms=markov_norms(inputs.args[2]))
    return lambda: call()._replace(row_max=None, log_sum=None)


def _eager(inputs: SimpleNamespace) -> Any:
    return partial(markov_walk, *inputs.args, **inputs.options, keep_logits=inputs.keep)


def _compiled(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return partial(torch.compile(markov_walk, dynamic=False), *inputs.args, **inputs.options, keep_logits=inputs.keep)


def _plain(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    walk = torch.compile(straight, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda: MarkovWalk(walk(*inputs.args), None, None, None)


def _plain_sampled(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return partial(torch.compile(straight_sampled, dynamic=False), *inputs.args)


def _variant(*modes: str, capability: tuple[int, int] = (8, 0)) -> Any:
    def why_not(case: Case, device: torch.device) -> str | None:
        if case.shape["mode"] not in modes or case.shape["head"] != "vanilla":
            return f"tried on {', '.join(modes)} vanilla walks"
        if kernel_why_not(case, device):
            return kernel_why_not(case, device)
        if torch.version.hip or torch.cuda.get_device_capability(device) < capability:
            return f"needs compute capability {capability[0]}.{capability[1]}"
        return None

    return why_not


def _only(mode: str) -> Any:
    def why_not(case: Case, device: torch.device) -> str | None:
        here = case.shape["mode"] == mode and case.shape["head"] == "vanilla"
        return None if here else f"written for {mode} vanilla walks"

    return why_not


ONE, MANY = name("Qwen3-4B", 1, "greedy"), name("Qwen3-4B", 64, "greedy")
BENCH = Bench(
    "markov",
    cases,
    [
        Provider(OURS, _ours, kernel_why_not),
        Provider(f"{OURS}, dependent launch", _ahead, _variant("greedy", "sampled", capability=(9, 0))),
        Provider(f"{OURS}, float8 W2", _eight_bits, _variant("greedy", "sampled", capability=(8, 9)), same=False,
                 differs="W2 is rounded to 8 bits"),
        Provider(f"{OURS}, tiles ruled out", _ruled_out, _variant("greedy")),
        Provider(EAGER, _eager),
        Provider(PLAIN, _plain, _only("greedy"), compiles=1),
        Provider(f"{PLAIN}, own noise", _plain_sampled, _only("sampled"), same=False, differs="torch's own noise",
                 compiles=1),
        Provider(COMPILED, _compiled, compiles=1),
    ],
    expect,
    equal,
    [
        Goal("walk of 7 steps at B=1: 80 % of the copy rate", lambda rows: of(rows, ONE, OURS, "percent_of_copy_rate"),
             at_least=80, unit="%"),
        Goal("at B=64: 70 % of the copy rate", lambda rows: of(rows, MANY, OURS, "percent_of_copy_rate"), at_least=70,
             unit="%"),
        Goal("B=64 under 1.4 times B=1", ratio((MANY, OURS), (ONE, OURS)), at_most=1.4, unit="x"),
        Goal("twice as fast as the eager reference at B=1", ratio((ONE, EAGER), (ONE, OURS)), at_least=2, unit="x"),
        Goal("1.2 times as fast as the compiled reference at B=1", ratio((ONE, COMPILED), (ONE, OURS)), at_least=1.2,
             unit="x"),
        Goal("1.2 times as fast as a plain compiled walk at B=1", ratio((ONE, PLAIN), (ONE, OURS)), at_least=1.2,
             unit="x"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    [
        "The reference looks at the temperatures on the host, so torch.compile breaks its graph there and no CUDA "
        "graph can hold it; `plain torch, compiled` is the same greedy walk without options, compiled and captured.",
        "Qwen3-8B and 14B have the vanilla walk of Qwen3-4B.",
        "Our variants: dependent launch (on; the first row of each case is off), W2 in 8 bits, tiles of W2 that cannot "
        "win not read. On random weights the last says little: a real drafter's tiles are in markov_tries.json.",
    ],
)  # fmt: skip


def test_markov(benchmark: Any, case: Case, provider: Provider, device: torch.device) -> None:
    under_pytest(benchmark, BENCH, case, provider, device)


if __name__ == "__main__":
    main(BENCH)
