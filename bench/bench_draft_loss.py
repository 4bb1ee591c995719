"""The training loss and its gradients: time, and the most memory that is alive at once.

    pytest bench/bench_draft_loss.py --benchmark-only
    python bench/bench_draft_loss.py
    OMP_NUM_THREADS=1 python bench/bench_draft_loss.py --device cpu --budget 500 --seconds 5 --compile   # results/cpu

Bound by the products with the head: N V H multiplications for the drafter's logits, the target's and the gradient; the
prediction, which counts bytes alone, is a floor. Every provider gives loss, surprise, distance and three gradients.
Equality: each within an RMS error of 3 % of the reference's in bf16 (logits and dz are rounded to 8 bits), 1e-4 in
fp32.

Peak memory, at 512 anchors x 7 and V = 151,936, above the inputs, gradients included. On a GPU it is what the allocator
says. Without one it is counted: bytes of all tensors that are alive, as they are made and freed (``Alive``), on fake
tensors, since the unfused ones would not fit. They take the same path with the same shapes, so the count is the same:
the bench checks that on a smaller shape, and the count against what a process's resident set grows by.

What a user would call instead: autograd over the whole logits, as training did it before this op, eager and compiled;
Liger's cross-entropy and total variation from logits, or its fused linear JSD, where they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from machine import results_folder
from models import BLOCK, MODELS
from report import lost, main, of, ratio, speedups, under_pytest
from table import EAGER, OURS, Bench, Case, Goal, Provider, Verdict, installed_why_not, kernel_why_not
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_fast.reference.draft_loss import draft_loss_gradients

UNFUSED, UNFUSED_COMPILED = "unfused, eager", "unfused, compiled"
ANCHORS = 512
LAUNCHES_OF_A_CHUNK = 20
MOST_OF_PEAK = 0.1


def bytes_moved(rows: int, vocab: int, hidden: int, rank: int, size: int = 2) -> int:
    """Inputs once and gradients once; w2 and its gradient are fp32."""
    return vocab * hidden * size + 3 * rows * hidden * size + 2 * rows * rank * size + 2 * vocab * rank * 4


def own_bytes(rows: int, vocab: int, size: int = 2) -> int:
    """What the kernel moves besides: a chunk's logits, written once and read 3 times, its dz written and read twice."""
    return rows * vocab * ((4 + 4 + size) * 4 + 3 * size)


def cases(scale: str) -> list[Case]:
    if scale == "tiny":
        return [_case("tiny", rows, 203, compiled=False) for rows in (7, 35)]
    if scale == "cpu":
        return [_case("SmolLM2-135M", 1920, 6144), _case("SmolLM2-135M", 1920, 49152, compiled=False)]
    listed = [_case("Qwen3-4B", ANCHORS * BLOCK, vocab) for vocab in (151_936, 32_768)]
    return listed + [_case("SmolLM2-135M", 1920, vocab) for vocab in (49_152, 6144)]


def name(model: str, rows: int, vocab: int) -> str:
    """The name of a case, by which goals find it."""
    return f"{model} B={rows} V={vocab}"


def _case(model: str, rows: int, vocab: int, compiled: bool = True) -> Case:
    shape = MODELS[model]
    size = 4 if model == "tiny" else 2
    return Case(
        name(model, rows, vocab),
        {"model": model, "batch": rows, "V": vocab, "H": shape.hidden, "R": shape.rank},
        partial(build, rows, vocab, shape.hidden, shape.rank, torch.float32 if model == "tiny" else torch.bfloat16),
        bytes_moved(rows, vocab, shape.hidden, shape.rank, size),
        LAUNCHES_OF_A_CHUNK * -(-rows // 128),
        rows * vocab * 40,  # the unfused one's
        compiled,
        own_bytes(rows, vocab, size),
    )


def build(rows: int, vocab: int, hidden: int, rank: int, dtype: torch.dtype, device: torch.device) -> SimpleNamespace:
    """A drafter that is near its target; the head is a part of a vocabulary that has a fifth of the mass outside."""
    generator = torch.Generator(device).manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    head = normal(vocab, hidden).mul_(2 / hidden**0.5).to(dtype)
    target = normal(rows, hidden)
    own = (target + normal(rows, hidden) / 2).to(dtype)
    target = target.to(dtype)
    labels = torch.randint(vocab, (rows,), generator=generator, device=device)
    weights = torch.rand(2, rows, generator=generator, device=device).div_(rows)
    feature, w2 = normal(rows, rank).to(dtype), normal(vocab, rank).mul_(0.5 / rank**0.5)
    log_total = torch.cat([F.linear(some, head).float().logsumexp(-1) for some in target.split(64)]) + 0.223
    options = {"feature": feature, "w2": w2, "log_total": log_total}
    return SimpleNamespace(args=(own, target, labels, *weights, head), options=options)


def unfused(
    hidden: torch.Tensor,
    target_hidden: torch.Tensor,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    tv_weights: torch.Tensor,
    head: torch.Tensor,
    feature: torch.Tensor,
    w2: torch.Tensor,
    log_total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, surprise and distance over whole logits, for autograd: how training did it before this op."""
    logits = F.linear(hidden, head).float()
    logits = logits + F.linear(feature, w2.to(head.dtype))
    with torch.no_grad():
        p = F.linear(target_hidden, head).float().sub_(log_total[:, None]).exp_()
        outside = (1.0 - p.sum(-1)).clamp(min=0.0)
    log_q = logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1) + outside
    surprise = -log_q.gather(-1, labels[:, None])[:, 0]
    return (ce_weights * surprise + tv_weights * distance).sum(), surprise, distance


def with_gradients(function: Callable[..., Any], inputs: SimpleNamespace) -> Callable[[], Any]:
    """A call that gives what our kernel gives, its gradients by autograd."""
    hidden, *rest = inputs.args
    options = inputs.options

    def call() -> Any:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in (hidden, options["feature"], options["w2"])]
            values = function(leaves[0], *rest, leaves[1], leaves[2], options["log_total"])
            found = torch.autograd.grad(values[0], leaves)
        return [one.detach() for one in values], found

    return call


def expect(inputs: SimpleNamespace) -> Any:
    return draft_loss_gradients(*inputs.args, **inputs.options)


def equal(inputs: SimpleNamespace, result: Any, expected: Any) -> Verdict:
    most = 1e-4 if inputs.args[0].dtype == torch.float32 else 0.03
    names = ("loss", "surprise", "distance", "hidden", "feature", "w2")
    errors = {
        name: float((one.float() - other.float()).norm() / other.float().norm())
        for name, one, other in zip(names, (*result[0], *result[1]), (*expected[0], *expected[1]))
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else torch.inf)
    return Verdict(errors[worst] <= most, f"largest RMS error {errors[worst]:.1e} ({worst})")


def _ours(inputs: SimpleNamespace) -> Any:
    from dspark_fast.kernels import draft_loss_gradients as kernel

    return partial(kernel, *inputs.args, **inputs.options)


def _reference(inputs: SimpleNamespace) -> Any:
    return partial(draft_loss_gradients, *inputs.args, **inputs.options)


def _unfused(inputs: SimpleNamespace) -> Any:
    return with_gradients(unfused, inputs)


def _unfused_compiled(inputs: SimpleNamespace) -> Any:
    torch._dynamo.reset()
    return with_gradients(torch.compile(unfused, dynamic=False), inputs)


def _liger_from_logits(inputs: SimpleNamespace) -> Any:
    from liger_kernel.transformers.fused_ce_tvd import LigerFusedCETVDLoss

    both = LigerFusedCETVDLoss()

    def terms(
        hidden: Any, target_hidden: Any, labels: Any, ce: Any, tv: Any, head: Any, feature: Any, w2: Any, _: Any
    ) -> Any:
        logits = F.linear(hidden, head) + F.linear(feature, w2.to(head.dtype))
        surprise, distance = both(logits, F.linear(target_hidden, head), labels)
        return (ce * surprise + tv * distance).sum(), surprise, distance

    return with_gradients(terms, inputs)


def _liger_jsd(inputs: SimpleNamespace) -> Any:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    hidden, target_hidden, labels, _, _, head = inputs.args
    divergence = LigerFusedLinearJSD()

    def call() -> Any:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            loss = divergence(leaf, head, target_hidden, head, labels)
            return loss.detach(), torch.autograd.grad(loss, leaf)

    return call


class Alive(TorchDispatchMode):
    """Bytes of all storages that operators made inside and that are alive, and the most of them at once.

    What an operator allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in given and storage not in self.known:
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, size: int) -> None:
        self.now -= size


def counted(prepare: Callable[[SimpleNamespace], Callable[[], Any]], inputs: SimpleNamespace) -> int:
    """The most bytes alive at once in a call, above its inputs."""
    call = prepare(inputs)
    with Alive() as alive:
        kept = call()
    del kept
    return alive.peak


def empty_inputs(rows: int, vocab: int, hidden: int, rank: int, make: Any = torch.empty) -> SimpleNamespace:
    """Inputs as ``build`` gives them, but for their values."""
    shapes = ((rows, hidden), (rows, hidden), (vocab, hidden), (rows, rank))
    own, target, head, feature = (make(*shape, dtype=torch.bfloat16) for shape in shapes)
    labels, weights = torch.zeros(rows, dtype=torch.int64), (torch.ones(rows), torch.ones(rows))
    options = {"feature": feature, "w2": make(vocab, rank), "log_total": make(rows)}
    return SimpleNamespace(args=(own, target, labels, *weights, head), options=options)


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    """What our kernel's launcher allocates on a GPU, without a launch: fake tensors have no memory to launch on."""
    from dspark_fast.kernels import draft_loss as _  # noqa: F401

    module = sys.modules["dspark_fast.kernels.draft_loss"]
    true = module._row_kernel, module._product
    module._row_kernel = defaultdict(lambda: lambda *args, **options: None)
    module._product = lambda one, other: torch.empty(one.shape[0], other.shape[1])  # fp32, as the library writes it
    try:
        yield
    finally:
        module._row_kernel, module._product = true


@contextlib.contextmanager
def _every_row() -> Iterator[None]:
    """Fake tensors have no values: let the reference, which asks which rows have a weight, hear that all have."""
    torch.Tensor.nonzero = lambda tensor: torch.arange(len(tensor))[:, None]
    try:
        yield
    finally:
        del torch.Tensor.nonzero


def peaks(device: torch.device, rows: int, vocab: int, hidden: int, rank: int) -> list[dict[str, Any]]:
    """Peak bytes of a loss and its gradients by provider: measured on a GPU, elsewhere counted."""
    shape = {"rows": rows, "V": vocab, "H": hidden, "R": rank}
    found = []

    def add(provider: str, size: int, how: str) -> None:
        found.append({"provider": provider, **shape, "peak_bytes": size, "how": how})

    if device.type == "cuda":
        inputs = build(rows, vocab, hidden, rank, torch.bfloat16, device)
        for provider, prepare in ((OURS, _ours), (EAGER, _reference), (UNFUSED, _unfused)):
            call = prepare(inputs)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            kept = call()
            torch.cuda.synchronize(device)
            add(provider, torch.cuda.max_memory_allocated(device) - before, "allocator")
            del kept
        return found
    with FakeTensorMode():
        inputs = empty_inputs(rows, vocab, hidden, rank)
        with _no_launches():
            add(OURS, counted(_ours, inputs), "counted, fake tensors, what is allocated on a GPU")
        with _every_row():
            add(EAGER, counted(_reference, inputs), "counted, fake tensors")
        add(UNFUSED, counted(_unfused, inputs), "counted, fake tensors")
    return found


def check_count() -> dict[str, Any]:
    """The count on fake and on real tensors, and by how much the resident set of a process of its own grew.

    Raises:
        SystemExit: if they differ, the last (of the unfused loss, as the other's is small) by more than 10 %.
    """
    shape = (512, 32_768, 64, 64)
    with FakeTensorMode(), _every_row():
        inputs = empty_inputs(*shape)
        fake = {EAGER: counted(_reference, inputs), UNFUSED: counted(_unfused, inputs)}
    inputs = empty_inputs(*shape, torch.ones)
    real = {EAGER: counted(_reference, inputs), UNFUSED: counted(_unfused, inputs)}
    code = f"import bench_draft_loss; print(bench_draft_loss.resident_growth({shape}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    resident = int(done.stdout.splitlines()[-1])
    if fake != real or abs(resident / real[UNFUSED] - 1) > 0.1:
        raise SystemExit(f"the count of memory is not to be trusted: fake {fake}, real {real}, resident {resident}")
    names = ("rows", "V", "H", "R")
    return {**dict(zip(names, shape)), "fake_bytes": fake, "real_bytes": real, "unfused_resident_bytes": resident}


def resident_growth(shape: tuple[int, int, int, int]) -> int:
    """By how many bytes the unfused loss raises this process's largest resident set; after a small one to warm up."""
    _unfused(empty_inputs(8, 1024, 64, 64, torch.ones))()
    inputs = empty_inputs(*shape, torch.ones)
    before = _largest_resident()
    _unfused(inputs)()
    return _largest_resident() - before


def _largest_resident() -> int:
    # Not getrusage: a new process's ru_maxrss begins at that of the process that started it.
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def memory(device: torch.device, scale: str) -> dict[str, Any]:
    """The memory part of the result file."""
    model = MODELS["tiny" if scale == "tiny" else "Qwen3-4B"]
    rows = 8 * BLOCK if scale == "tiny" else ANCHORS * BLOCK
    found: dict[str, Any] = {"rows": peaks(device, rows, model.vocab, model.hidden, model.rank)}
    if device.type != "cuda" and scale != "tiny":
        found["check"] = check_count()
    peak = {row["provider"]: row["peak_bytes"] for row in found["rows"]}
    found["of_unfused"] = {one: round(size / peak[UNFUSED], 5) for one, size in peak.items() if one != UNFUSED}
    reached = found["of_unfused"][OURS] <= MOST_OF_PEAK
    verdict = "not judged at this size" if scale == "tiny" else "reached" if reached else "not reached"
    found["goal"] = f"at most {MOST_OF_PEAK} of the unfused peak: {verdict}"
    return found


LARGEST = name("Qwen3-4B", ANCHORS * BLOCK, 151_936)

BENCH = Bench(
    "draft_loss",
    cases,
    [
        Provider(OURS, _ours, kernel_why_not),
        Provider(EAGER, _reference),
        Provider(UNFUSED, _unfused),
        Provider("liger, CE and TV from logits", _liger_from_logits, installed_why_not("liger_kernel"), same=False,
                 differs="normalises the target over the given head alone"),
        Provider("liger, fused linear JSD", _liger_jsd, installed_why_not("liger_kernel"), same=False,
                 differs="another divergence, without Markov bias"),
        Provider(UNFUSED_COMPILED, _unfused_compiled, compiles=1),
    ],
    expect,
    equal,
    [
        Goal("no slower than the unfused loss, eager, at 3,584 rows of 151,936",
             ratio((LARGEST, UNFUSED), (LARGEST, OURS)), at_least=1, unit="x"),
        Goal("no slower than the unfused loss, compiled",
             ratio((LARGEST, UNFUSED_COMPILED), (LARGEST, OURS)), at_least=1, unit="x"),
        Goal("as fast as the eager reference or faster, everywhere", speedups(EAGER), at_least=1, unit="x"),
        Goal("3,584 rows of 151,936: the time of its multiplications at 400 TFLOP/s, 21 ms, and a quarter",
             lambda rows: of(rows, LARGEST), at_most=26_000, unit="us"),
        Goal("rows in which another provider is faster", lost, at_most=0, unit="rows"),
    ],
    [
        "The prediction counts bytes alone; at H = 2,560 the products take most of the time.",
        "The reference looks at the weights on the host and walks its chunks from Python: no CUDA graph can hold it.",
        "w2 is fp32, as in autocast training; the products run in bf16 everywhere.",
    ],
)  # fmt: skip


def test_draft_loss(benchmark, case, provider, device):
    under_pytest(benchmark, BENCH, case, provider, device)


def run() -> None:
    """The command: memory first, then the timed table, whose file gets the memory part added."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale")
    parser.add_argument("--predict")
    parser.add_argument("--out", type=Path)
    options, _ = parser.parse_known_args()
    if options.predict or {"-h", "--help"} & set(sys.argv):
        main(BENCH)
        return
    device = torch.device(options.device)
    found = memory(device, options.scale or ("gpu" if device.type == "cuda" else "cpu"))
    for row in found["rows"]:
        print(f"peak memory | {row['provider']} | {row['peak_bytes'] / 2**20:,.0f} MiB | {row['how']}")
    print(f"peak memory: {found['of_unfused']} of the unfused: {found['goal']}")
    try:
        main(BENCH)
    finally:
        path = (options.out or results_folder(options.device)) / "draft_loss.json"
        if path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"memory": found}, indent=1) + "\n")


if __name__ == "__main__":
    run()
