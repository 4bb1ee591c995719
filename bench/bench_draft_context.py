"""What the drafter costs per round as the context grows, ours against re-projecting the context every round.

    python bench/bench_draft_context.py

The cached drafter projects a committed token once; the stateless definition (``reference.draft_block``, which is how
a plain notebook loop decodes) runs ``fc`` and every layer's K and V over the whole context again. Both are
timed in alternation in one process, after their tokens have been found equal. Writes ``draft_context.json`` and
``draft_context.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe, results_folder

import dspark_fast
from dspark_fast.drafters import DSparkDrafter, Noise
from dspark_fast.reference import draft_block

COMMITTED = 2  # tokens projected per round: the acceptance length of the shipped drafter, rounded up


def measure(draft: Any, length: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the draft part of a round at one context length, both ways."""
    config = draft.config
    generator = torch.Generator().manual_seed(length)
    width = len(config.target_layer_ids) * config.hidden_size
    features = torch.randn(1, length, width, generator=generator).to(draft.dtype)
    anchor = torch.randint(config.vocab_size, (1,), generator=generator)
    position = torch.tensor([length])
    noise = Noise("greedy", torch.zeros(1), torch.zeros(1, dtype=torch.long))
    drafter = DSparkDrafter(draft)
    drafter.begin(1, length + 32, draft.device)
    drafter.commit(torch.zeros(1, length, dtype=torch.long), features, torch.zeros(1, dtype=torch.long), position)

    def cached() -> torch.Tensor:
        # The last tokens are committed again, as if the round before had just accepted them.
        last = torch.tensor([COMMITTED])
        drafter.commit(
            torch.zeros(1, COMMITTED, dtype=torch.long), features[:, -COMMITTED:], position - COMMITTED, last
        )
        return drafter.propose(anchor, position, noise).tokens

    def stateless() -> torch.Tensor:
        return draft_block(draft, features, anchor).tokens

    if draft.dtype == torch.float32 and not torch.equal(cached(), stateless()):
        raise SystemExit(f"at {length} tokens of context the two ways draft different tokens: nothing is reported")
    if not repeats:
        return {}
    times: dict[str, list[float]] = {"cached": [], "stateless": []}
    ways: dict[str, Callable[[], torch.Tensor]] = {"cached": cached, "stateless": stateless}
    for _ in range(repeats + 3):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - start) * 1e3)
    row: dict[str, Any] = {"context": length}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values[3:], n=4)
        row[name] = {"median_ms": round(middle, 3), "quartiles_ms": [round(low, 3), round(high, 3)]}
    return row


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()

    _, exact, _ = dspark_fast.load(arguments.model, dtype=torch.float32)
    for length in arguments.contexts:
        measure(exact, length, 0)  # equality, in fp32
    _, draft, _ = dspark_fast.load(arguments.model)
    rows = [measure(draft, length, arguments.repeats) for length in arguments.contexts]
    first, last = rows[0], rows[-1]
    growth = {name: round(last[name]["median_ms"] / first[name]["median_ms"], 3) for name in ("cached", "stateless")}
    result = {
        "machine": describe(),
        "model": arguments.model,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "rows": rows,
        "growth": {"from": first["context"], "to": last["context"], **growth},
    }
    folder = results_folder()
    (folder / "draft_context.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result, folder / "draft_context.png")
    print(f"{'context':>8} {'cached':>10} {'re-projected':>13}  (ms per round, median)")
    for row in rows:
        print(f"{row['context']:>8} {row['cached']['median_ms']:>10.2f} {row['stateless']['median_ms']:>13.2f}")
    print(f"growth {growth['cached']:.2f} x cached, {growth['stateless']:.2f} x re-projected")


def plot(result: dict[str, Any], path: Any) -> None:
    """Both curves with their quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    contexts = [row["context"] for row in result["rows"]]
    for name, label in (("stateless", "context re-projected every round"), ("cached", "dspark-fast: projected once")):
        middle = [row[name]["median_ms"] for row in result["rows"]]
        low, high = zip(*(row[name]["quartiles_ms"] for row in result["rows"]), strict=True)
        axis.plot(contexts, middle, "o-", label=label)
        axis.fill_between(contexts, low, high, alpha=0.2)
    axis.set(xlabel="context (tokens)", ylabel="draft part of a round (ms)", xscale="log", ylim=(0, None))
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.minorticks_off()
    axis.set_title(f"SmolLM2-135M drafter, {result['dtype']}, {result['machine']['device']}", fontsize=9)
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
