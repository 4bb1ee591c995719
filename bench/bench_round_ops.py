"""The ops of the CPU path inside rounds of the shipped pair: bytes, time, share of the round, against torch's own.

    python bench/bench_round_ops.py    # writes results/cpu/round_ops.json; a minute or two on one core

These are the reference ops (``dspark_fast.reference``), which ``generate`` calls where there is no GPU: nothing here
says anything of the kernels. Batch 1, behind 512 tokens of context, greedy and sampled (rejection, no cuts).

First the pair in fp32 has to give the tokens of ``model.generate``. Then every op is timed where it is called, in whole
rounds. What it was called with in one of them is kept, and on that it is timed once more by itself, in turn with the
same in torch's own functions, eager, which has to give the same before it is timed. Before each of those calls a buffer
is copied that pushes what it reads out of the caches, as the target's weights do in a round; these copies are the copy
rate, too. Everything is CPU time of one thread, so that waiting for what else runs on the core does not count; how
much of it the run had, by the wall clock, stands in the file, for the caches are shared as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import bench_block_attention
import bench_context_kv
import bench_markov
import bench_verify
import torch
import torch.nn.functional as F
from machine import describe, results_folder
from near_ties import rms_error

import dspark_fast
from dspark_fast import ops
from dspark_fast.engine import attention
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.evaluation import shipped_prompts
from dspark_fast.pairs import best_dtype, draft_name

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTEXT, NEW_TOKENS, REPEATS, SAMPLES = 512, 64, 8, 40
KEPT = 5  # the round whose calls are kept
COPIED = 128 * 2**20  # bytes; several times the last cache of the machines seen so far
clock = time.process_time
TEMPERATURE = bench_markov.TEMPERATURE  # the plain sampled walk and the plain rejection sampler have it inside
MODES = {
    "greedy": {"do_sample": False},
    "rejection": {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "seed": 1},
}
#: where each is called from
OPS = {name: ops for name in ("markov_walk", "block_attention", "store_context_kv", "verify")}
OPS["masked_attention"] = attention  # the target's, which shares a mask among its layers
OWN_NOISE = "not compared: torch's own noise, the same law and other tokens"


@dataclass
class Rounds:
    """What the rounds of one run have shown: ops by name and words, when each round began."""

    ops: dict[tuple[str, str], Seen] = field(default_factory=lambda: defaultdict(Seen))
    began: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of each round but the last, whose end nobody sees."""
        return [after - before for before, after in pairwise(self.began)]


@dataclass
class Seen:
    """The calls of one op in the rounds of a run: seconds of each, and copies of one call's arguments."""

    seconds: list[float] = field(default_factory=list)
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class Plain(NamedTuple):
    """An op in torch's own functions: the call, and in words that both give the same; ValueError if they do not."""

    call: Callable[[], Any]
    equal: Callable[[Any, Any], str]


# --- inside rounds ----------------------------------------------------------------------------------------------------


def words(name: str, mode: str, args: tuple[Any, ...], options: dict[str, Any], block: int) -> str:
    """What the page calls it."""
    if name in ("block_attention", "masked_attention"):
        return "target's attention" if name == "masked_attention" else "drafter's attention"
    if name == "store_context_kv":
        return "store the block's own" if args[0].shape[1] == block else "store context"
    if name == "markov_walk":
        return "walk, greedy" if mode == "greedy" else "walk, sampled"
    return f"verify, {mode}"


@contextmanager
def watched(mode: str, block: int, kept: int | None = None) -> Iterator[Rounds]:
    """Time the ops of rounds, or copy what round ``kept`` calls them with.

    The prefill is no round, which begins where the drafter stores its block's first keys.
    """
    seen = Rounds()
    before = {name: getattr(owner, name) for name, owner in OPS.items()}
    judged = 0

    def timed(name: str, *args: Any, **options: Any) -> Any:
        nonlocal judged
        what = words(name, mode, args, options, block)
        if what == "store the block's own" and judged == len(seen.began):
            seen.began.append(clock())
        one = seen.ops[name, what]
        if judged == kept and one.call is None:
            one.call = _copied(args), {key: _copied(value) for key, value in options.items()}
        start = clock()
        try:
            return before[name](*args, **options)
        finally:
            if seen.began:
                one.seconds.append(clock() - start)
                judged += name == "verify"

    try:
        for name, owner in OPS.items():
            setattr(owner, name, partial(timed, name))
        yield seen
    finally:
        for name, function in before.items():
            setattr(OPS[name], name, function)


def _copied(value: Any) -> Any:
    """Tensors as they are now: caches are written again a round later."""
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if isinstance(value, RaggedCache):  # of which attention reads how long its rows are, and the mask of the pass
        return SimpleNamespace(lengths=value.lengths.clone(), masks=dict(value.masks))
    return value.clone() if isinstance(value, torch.Tensor) else value


# --- what must move, and torch's own ----------------------------------------------------------------------------------


def bytes_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """By the bytes model of the op's own bench, at the shapes and dtypes of the call."""
    if name == "markov_walk":
        base, _, w2, _ = args
        kept = 4 if options["keep_logits"] else 0
        return bench_markov.bytes_moved(*base.shape, w2.shape[1], weight=w2.itemsize, base=base.itemsize, kept=kept)
    if name == "verify":
        target, _, draft, lengths = args
        size = 0 if draft is None else draft.itemsize
        return bench_verify.bytes_moved(
            lengths.tolist(), target.shape[-1], options["mode"], target=target.itemsize, draft=size
        )
    if name == "store_context_kv":
        k, cos, counts = args[0], args[3], args[8]
        return bench_context_kv.bytes_moved(counts.tolist(), *k.shape[2:], itemsize=k.itemsize, table=cos.itemsize)
    q, k, _ = _heads_first(name, args)
    (_, heads, block, dim), (_, kv_heads, length, _) = q.shape, k.shape
    return bench_block_attention.bytes_moved([length], block, heads, kv_heads, dim, itemsize=q.itemsize)


def _heads_first(name: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of an attention of one row as transformers has them, ``[1, heads, T, D]``."""
    if name == "masked_attention":
        return args[:3]
    q, keys, values, lengths = args
    return tuple(states.transpose(1, 2) for states in (q, keys[:, : int(lengths)], values[:, : int(lengths)]))


def plain_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Plain:
    """The same in torch's own functions, as one would write it; masks are made before the clock starts."""
    if name == "markov_walk":
        base, w1, w2, anchor = args
        if options["keep_logits"]:
            return Plain(partial(bench_markov.straight_sampled, *args), lambda ours, theirs: OWN_NOISE)
        vocabulary = options["vocabulary"]

        def walk() -> torch.Tensor:
            previous, tokens = anchor, []
            for slot in range(base.shape[1]):
                row = base[:, slot].float() + F.linear(F.embedding(previous, w1), w2).float()
                previous = row.argmax(-1) if vocabulary is None else vocabulary[row.argmax(-1)]
                tokens.append(previous)
            return torch.stack(tokens, 1)

        return Plain(walk, lambda ours, theirs: _same("tokens", (ours.tokens,), (theirs,)))
    if name == "verify":
        target, tokens, draft, lengths = args
        if options["mode"] == "rejection":
            call = partial(bench_verify.straight_rejection, target, tokens, draft, lengths)
            return Plain(call, lambda ours, theirs: OWN_NOISE)
        call = partial(bench_verify.straight_greedy, target, tokens, lengths)
        return Plain(call, lambda ours, theirs: _same("accepted counts and next tokens", ours, theirs))
    if name == "store_context_kv":
        mine = args[:5] + tuple(cache.clone() for cache in args[5:7]) + args[7:]
        counts = int(args[8][0])
        cut = tuple(one[:, :counts] for one in mine[:2]), tuple(one[:, :counts] for one in mine[3:5])
        theirs = (*cut[0], mine[2], *cut[1], *mine[5:])

        def store() -> tuple[torch.Tensor, torch.Tensor]:
            bench_context_kv.straight(*theirs, **options)
            return mine[5], mine[6]

        return Plain(store, lambda ours, caches: _near(torch.cat(caches), torch.cat(args[5:7])))
    q, k, v = _heads_first(name, args)
    block, length = q.shape[2], k.shape[2]
    causal = name == "masked_attention"
    mask = torch.ones(block, length, dtype=torch.bool).tril(length - block) if causal else None

    def plain() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options["scale"], enable_gqa=True)
        return out.transpose(1, 2)

    return Plain(plain, lambda ours, theirs: _near(theirs, ours))


def _same(what: str, ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> str:
    if not all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)):
        raise ValueError(f"{what} differ")
    return f"{what} equal"


def _near(theirs: torch.Tensor, ours: torch.Tensor) -> str:
    error = rms_error(theirs, ours)
    if not error <= bench_block_attention.BOUND:
        raise ValueError(f"RMS error {error:.1e}")
    return f"RMS error {error:.1e}"


# --- one run ----------------------------------------------------------------------------------------------------------


def alone(
    name: str, args: tuple[Any, ...], options: dict[str, Any], samples: int, copies: list[float]
) -> dict[str, Any]:
    """The op and torch's own in turn, each on cold inputs: microseconds, and their ratio pair by pair.

    ``copies`` takes the rate of the copy before each call, bytes per microsecond.
    """
    ours, plain = partial(getattr(OPS[name], name), *args, **options), plain_of(name, args, options)
    given, theirs = ours(), plain.call()
    equality = plain.equal(given, theirs)
    source, target = torch.ones(2, COPIED // 8, dtype=torch.int64)
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for repeat in range(samples):
        # Now the one first, now the other: whoever comes second finds the machine as the first has left it.
        calls = [("ours", ours), ("torch", plain.call)]
        for who, call in calls if repeat % 2 else calls[::-1]:
            start = clock()
            target.copy_(source)
            between = clock()
            call()
            times[who].append(1e6 * (clock() - between))
            copies.append(2 * COPIED / 1e6 / (between - start))
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["torch"], strict=True)]
    return {
        "alone_us": spread(times["ours"]),
        "torch_us": spread(times["torch"]),
        "torch_over_ours": spread(ratios, 3),
        "equality": equality,
    }


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, digits), "quartiles": [round(low, digits), round(high, digits)]}


def measured(model: Any, draft: Any, ids: torch.Tensor, repeats: int, samples: int) -> list[dict[str, Any]]:
    """The rounds of each mode, in turn, and then their ops by themselves."""
    common = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0, "off_switch": False}
    kept, runs = {}, defaultdict(list)
    for repeat in range(repeats + 1):
        for mode, sampling in MODES.items():
            with watched(mode, draft.config.block_size, None if repeat else KEPT) as seen:
                dspark_fast.generate(model, draft, ids, **common, **sampling)
            if repeat:
                runs[mode].append(seen)
            else:  # which has warmed up, too
                kept[mode] = {key: one.call for key, one in seen.ops.items()}
    return [_of_mode(mode, runs[mode], kept[mode], samples) for mode in MODES]


def _of_mode(mode: str, runs: list[Rounds], kept: dict[tuple[str, str], Any], samples: int) -> dict[str, Any]:
    rounds = [one for run in runs for one in run.seconds]
    begun, whole, rows, copies = sum(len(run.began) for run in runs), statistics.mean(rounds), [], []
    for (name, what), call in kept.items():
        found = [one for run in runs for one in run.ops[name, what].seconds]
        if not found:  # of the prefill alone
            continue
        rows.append(
            {
                "op": name,
                "what": what,
                "calls": round(len(found) / begun),
                "bytes": bytes_of(name, *call),
                "in_round_us": spread([1e6 * one for one in found]),
                "percent_of_round": round(100 * sum(found) / begun / whole, 2),
                **alone(name, *call, samples, copies),
            }
        )
    rate = statistics.median(copies)
    for row in rows:
        row["predicted_us"] = round(row["bytes"] / rate, 2)
        row["percent_of_copy_rate"] = round(100 * row["predicted_us"] / row["in_round_us"]["median"], 1)
    milliseconds, copied = spread([1e3 * one for one in rounds], 2), spread([one / 1e6 for one in copies], 4)
    return {"mode": mode, "rounds": begun, "round_ms": milliseconds, "copy_tb_s": copied, "rows": rows}


def prompt_ids(tokenizer: Any, length: int) -> torch.Tensor:
    """As many tokens of the shipped prompts as the context is to have, int64 ``[1, length]``."""
    text = "\n".join(prompt.messages[-1]["content"] for prompt in shipped_prompts())
    return tokenizer(text, return_tensors="pt")["input_ids"][:, :length]


def check_lossless(model: str, ids: torch.Tensor) -> None:
    """Exit without a file where the pair does not give the tokens of ``model.generate`` in fp32."""
    target, draft, _ = dspark_fast.load(model, dtype=torch.float32, device="cpu")
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if not torch.equal(dspark_fast.generate(target, draft, ids, **common), target.generate(ids, **common)):
        sys.exit("fp32 tokens differ from model.generate: nothing is reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="calls of generate whose rounds are timed")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="pairs of calls of each op by itself")
    parser.add_argument("--out", type=Path, help="the JSON file; results/cpu/round_ops.json by default")
    options = parser.parse_args()
    for name, least in (("repeats", 1), ("samples", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: accepted is {least} or more")
    torch.set_num_threads(1)  # of more, CPU time would be the sum
    dtype = best_dtype(torch.device("cpu"))
    model, draft, tokenizer = dspark_fast.load(options.model, dtype=dtype, device="cpu")
    ids = prompt_ids(tokenizer, CONTEXT)
    check_lossless(options.model, ids)
    start = time.perf_counter(), clock()
    with torch.inference_mode():
        modes = measured(model, draft, ids, options.repeats, options.samples)
    result = {
        "machine": describe("cpu"),
        "model": options.model,
        "draft": draft_name(options.model),
        "dtype": str(dtype).removeprefix("torch."),
        "context": CONTEXT,
        "new_tokens": NEW_TOKENS,
        "block_size": draft.config.block_size,
        "drafted_tokens": draft.config.draft_vocab_size or draft.config.vocab_size,
        "clock": "CPU time of the process",
        "share_of_the_core": round((clock() - start[1]) / (time.perf_counter() - start[0]), 3),
        "modes": modes,
    }
    path = options.out or results_folder("cpu") / "round_ops.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for one in modes:
        print(f"{one['mode']}: {one['rounds']} rounds of {one['round_ms']['median']} ms")
        for row in one["rows"]:
            print(
                f"  {row['what']:24} x{row['calls']:<5g} {row['bytes']:>11,} B  {row['predicted_us']:>8.1f} us "
                f"predicted {row['in_round_us']['median']:>8.1f} in rounds {row['percent_of_round']:>5.2f} % "
                f"{row['alone_us']['median']:>8.1f} alone {row['torch_us']['median']:>8.1f} torch  {row['equality']}"
            )


if __name__ == "__main__":
    main()
