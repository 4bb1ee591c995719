"""The engine against transformers' own ``generate``, whole calls in alternation, and where the time of a round goes.

    python bench/bench_engine.py
    python bench/bench_engine.py --only worst --repeats 15

Parts, each refused if its fp32 tokens are not those of ``model.generate``: ``passes``, what n tokens cost in one pass
of the target; ``prompts``, ten prompts alone; ``compiled``, the same with ``compile_target``; ``batch``, eight of them
together; ``worst``, a drafter of random weights, which the off-switch has to find out; ``profile``, the share of a
round outside model and ops. Prompts are decoded to a fixed length, without stop tokens. Beside every call stands one of
ours without a drafter: on a CPU it is faster than ``model.generate`` too, and what it gains is not speculation's.
Writes ``engine.json``; a part that is left out stays as it was.
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
from typing import Any

import torch
from machine import describe, results_folder
from rich.console import Console
from rich.table import Table

import dspark_fast
from dspark_fast import ops
from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.prepacked import prepackable, prepacked
from dspark_fast.engine.target import RaggedTarget, driven
from dspark_fast.pairs import best_dtype, draft_name

PROMPTS = [
    "A train travels 60 km in 45 minutes. What is its average speed in km/h?",
    "Write a Python function that checks whether a string is a palindrome.",
    "Explain why the sky is blue to a ten-year-old.",
    "List ten fruits and their colours.",
    "What is the capital of France?",
    "Anna has 24 apples. She gives a third to Tom and eats two. How many are left?",
    "Write a Python function that merges two sorted lists.",
    "What should I think of when I buy a second-hand bicycle?",
    "List the planets of the solar system from the sun outwards.",
    "Rewrite more politely: Send me the report now, you are late.",
]
# Its answer goes on for more than 256 tokens: behind an end the target repeats itself, which is easy to draft.
LONG = "Write a long story about a lighthouse keeper and his dog."
PARTS = ("passes", "prompts", "compiled", "batch", "worst", "profile")


class Bench:
    """A pair in the machine's best dtype and one in fp32, and the prompts as token ids."""

    def __init__(self, name: str, draft: str | None, new_tokens: int, repeats: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.exact, self.exact_draft, self.tokenizer = dspark_fast.load(name, draft=draft, dtype=torch.float32)
        self.dtype = best_dtype(torch.device(device))
        self.model, self.draft, _ = dspark_fast.load(name, draft=draft, dtype=self.dtype)
        self.new_tokens, self.repeats = new_tokens, repeats
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    def ids(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        """The prompts by the chat template, left-padded."""
        return self.tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self.model.device)

    def pairs(self, prompts: list[str], draft: Any, exact_draft: Any, repeats: int, new: int, **ours: Any) -> dict:
        """Alternated calls; the speedup is of whole calls."""
        batch = self.ids(prompts)
        common = {**batch, "max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        truth = self.exact.generate(**common)
        if not torch.equal(dspark_fast.generate(self.exact, exact_draft, **common, **ours), truth):
            sys.exit(f"fp32 tokens differ from model.generate for {prompts}: nothing is reported")
        speedups, undrafted, gains, stats = [], [], [], None
        for repeat in range(repeats + 1):
            seconds, stats = timed(lambda: dspark_fast.generate(self.model, draft, **common, **ours).stats)
            without, _ = timed(lambda: dspark_fast.generate(self.model, None, **common, **ours))
            theirs, _ = timed(lambda: self.model.generate(**common))
            if repeat:  # the first of each warms up
                speedups.append(theirs / seconds)
                undrafted.append(theirs / without)
                gains.append(without / seconds)
        return {
            **spread(speedups),
            "no_drafter": spread(undrafted),
            "over_no_drafter": spread(gains),
            "pairs": repeats,
            "acceptance_length": None if not stats.rounds else stats.acceptance_length,
            "rounds": stats.rounds,
            "plain_steps": stats.plain_steps,
            "pauses": stats.pauses,
        }

    # --- parts ---

    def prompts(self) -> dict[str, Any]:
        rows = [
            {"prompt": prompt, **self.pairs([prompt], self.draft, self.exact_draft, self.repeats, self.new_tokens)}
            for prompt in PROMPTS
        ]
        return {"rows": rows, "mean_speedup": statistics.mean(row["speedup"] for row in rows)}

    def compiled(self) -> dict[str, Any]:
        """As ``prompts``, our target compiled, transformers' not."""
        rows = []
        for prompt in PROMPTS:
            settings = {"repeats": self.repeats, "new": self.new_tokens, "compile_target": True}
            rows.append({"prompt": prompt, **self.pairs([prompt], self.draft, self.exact_draft, **settings)})
        return {"rows": rows, "mean_speedup": statistics.mean(row["speedup"] for row in rows)}

    def batch(self) -> dict[str, Any]:
        rows = []
        ways = {
            "always drafting": {"off_switch": False},
            "with the off-switch": {"off_switch": True},
            "with the off-switch, compiled": {"off_switch": True, "compile_target": True},
        }
        for name, ours in ways.items():
            found = self.pairs(PROMPTS[:8], self.draft, self.exact_draft, self.repeats, self.new_tokens, **ours)
            rows.append({"name": name, "batch": 8, **found})
        return {"rows": rows}

    def worst(self) -> dict[str, Any]:
        torch.manual_seed(0)
        random = DSparkDraft(self.draft.config).tie_to(self.exact)
        ours = {"off_switch": True}
        exact, fast = random, DSparkDraft(self.draft.config).tie_to(self.model).to(self.dtype)
        fast.load_state_dict(random.state_dict())
        return self.pairs([LONG], fast, exact, max(self.repeats, 15), 256, **ours)

    def passes(self) -> dict[str, Any]:
        rows = []
        for batch, sizes in ((1, (1, 2, 4, 8, 16, 32, 64, 128)), (8, (1, 2, 4, 8, 16))):
            context, longest = 64, max(sizes)
            ids = torch.randint(1, 1000, (batch, context + longest), device=self.model.device)
            cache = RaggedCache.for_model(self.model, batch, context + longest + 1)
            times = defaultdict(list)
            packed = prepacked(prepackable([self.model]))
            with torch.no_grad(), packed, driven(self.model, [], cache) as target:
                target.prefill(ids[:, :context], torch.full((batch,), context), lambda *_: None)
                for repeat in range(8):
                    for size in sizes:
                        start = time.perf_counter()
                        target.verify(ids[:, :size], context + size)
                        if repeat:
                            times[size].append(time.perf_counter() - start)
            rows += [
                {"rows": batch, "tokens": batch * size, "milliseconds": 1e3 * statistics.median(times[size])}
                for size in sizes
            ]
        one = rows[0]["milliseconds"]
        for row in rows:
            row["relative"] = row["milliseconds"] / one
        return {"rows": rows}

    def profile(self) -> dict[str, Any]:
        common = {**self.ids(PROMPTS[2:3]), "max_new_tokens": 128, "do_sample": False, "eos_token_id": None}
        with timers() as spent:
            for repeat in range(3):
                if repeat == 1:
                    spent.clear()
                    seconds, rounds = 0.0, 0
                out = dspark_fast.generate(self.model, self.draft, **common, pad_token_id=0, off_switch=False)
                if repeat:
                    seconds, rounds = seconds + out.stats.seconds.rounds, rounds + out.stats.rounds
        rest = seconds - sum(spent.values())
        rows = [{"part": part, "milliseconds": 1e3 * time / rounds} for part, time in sorted(spent.items())]
        rows.append({"part": "everything else", "milliseconds": 1e3 * rest / rounds})
        return {"rows": rows, "round_milliseconds": 1e3 * seconds / rounds, "outside": rest / seconds}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def spread(ratios: list[float]) -> dict[str, float]:
    """Of a call's pairs."""
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


@contextmanager
def timers() -> Iterator[dict[str, float]]:
    """Seconds inside the models and the ops of rounds, by part; what is inside another is counted there."""
    spent: dict[str, float] = defaultdict(float)
    depth = 0
    held: list[tuple[Any, str, Any]] = []

    def time_it(owner: Any, name: str, part: str | Callable[..., str]) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    spent[part if isinstance(part, str) else part(*args)] += time.perf_counter() - start

        held.append((owner, name, inner))
        setattr(owner, name, timed)

    time_it(RaggedTarget, "_forward", "target")  # positions and features before and behind it are ours
    # The prefill is no round.
    prefill = RaggedTarget.prefill

    def unseen(*args: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return prefill(*args)
        finally:
            depth -= 1

    held.append((RaggedTarget, "prefill", prefill))
    RaggedTarget.prefill = unseen
    for name in ("forward", "context", "logits", "confidence"):
        time_it(DSparkDraft, name, "drafter")
    from dspark_fast.draft import DraftAttention

    time_it(DraftAttention, "keys_values", "drafter")
    time_it(ops, "call", lambda name, *_: f"op {name}")
    try:
        yield spent
    finally:
        for owner, name, inner in held:
            setattr(owner, name, inner)


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Any rows of one shape; a spread in one cell, counts in the file alone."""
    made = Table(title=title)
    kept = [key for key in rows[0] if key not in ("least", "most", "pairs", "rounds", "plain_steps", "pauses")]
    for key in kept:
        made.add_column(key.replace("_", " "))
    for row in rows:
        made.add_row(*(cell(row if key == "speedup" else row[key]) for key in kept))
    return made


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['speedup']:.2f} ({value['least']:.2f}-{value['most']:.2f})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="a drafter other than the one that is shipped")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.draft, arguments.max_new_tokens, arguments.repeats)
    file = results_folder(bench.model.device.type) / "engine.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    console = Console()
    for part in arguments.only:
        found = getattr(bench, part)()
        found["machine"], found["dtype"] = describe(), str(bench.dtype)
        found["draft"] = draft_name(arguments.model, arguments.draft)
        result["model"], result[part] = arguments.model, found
        file.write_text(json.dumps(result, indent=2) + "\n")
        rows = found.get("rows") or [
            {key: value for key, value in found.items() if key not in ("machine", "dtype", "draft")}
        ]
        console.print(table(f"{part} ({arguments.model}, {bench.dtype})", rows))
        for key in ("mean_speedup", "outside"):
            if key in found:
                print(f"{key.replace('_', ' ')}: {found[key]:.3f}")


if __name__ == "__main__":
    main()
