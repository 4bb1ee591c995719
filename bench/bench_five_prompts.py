"""Five unlike prompts against transformers' own decoding: the same tokens, the acceptance length, the speedup.

    python bench/bench_five_prompts.py

Each prompt is decoded with ours and with ``model.generate`` in alternation: greedily in fp32 and in coupled mode at
temperature 0.8 with seed 1 in fp32, where every token must be the same, and greedily in the machine's best dtype, where
the speedup is measured. If a token of the fp32 runs differs, nothing is written. None of the prompts is in the training
data of the shipped drafter. Writes ``five_prompts.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import torch
from machine import describe, results_folder
from rich.console import Console
from rich.table import Table

import dspark_fast
from dspark_fast.compare import Comparison, compare
from dspark_fast.pairs import best_dtype, draft_name

PROMPTS = {
    "maths": "A train travels 60 km in 45 minutes. What is its average speed in km/h?",
    "code": "Write a Python function that checks whether a string is a palindrome.",
    "chat": "Explain why the sky is blue to a ten-year-old.",
    "list": "List ten fruits and their colours.",
    "short answer": "What is the capital of France?",
}


def run(
    model: Any, draft: Any, tokenizer: Any, arguments: argparse.Namespace, **settings: Any
) -> dict[str, Comparison]:
    """A comparison of each prompt."""
    found = {}
    for name, prompt in PROMPTS.items():
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        found[name] = compare(
            model, draft, ids, tokenizer=tokenizer, max_new_tokens=arguments.max_new_tokens, **settings
        )
        print(f"{found[name].dtype}, {found[name].mode}, {name}: identical {found[name].identical}", file=sys.stderr)
    return found


def row(name: str, one: Comparison) -> dict[str, Any]:
    """What is kept of a comparison."""
    keys = (
        "mode",
        "dtype",
        "identical",
        "acceptance_length",
        "speedup",
        "speedup_least",
        "speedup_most",
        "predicted_speedup",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "seconds_per_round",
        "seconds_per_plain_step",
        "first_difference",
    )
    data = one.to_dict()
    return {"prompt": name, "new_tokens": len(one.tokens), **{key: data[key] for key in keys}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="a drafter other than the one that is shipped")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    exact = dspark_fast.load(arguments.model, draft=arguments.draft, dtype=torch.float32)
    equal = {
        "greedy": run(*exact, arguments, repeats=1),
        "coupled": run(*exact, arguments, repeats=1, temperature=0.8, seed=1),
    }
    for mode, found in equal.items():
        for name, one in found.items():
            if not one.identical:
                sys.exit(f"{mode}, {name}: {one.first_difference.sentence()}: nothing is reported")
    dtype = best_dtype(exact[0].device)
    fast = run(
        *dspark_fast.load(arguments.model, draft=arguments.draft, dtype=dtype), arguments, repeats=arguments.repeats
    )

    rows = [row(name, one) for found in (*equal.values(), fast) for name, one in found.items()]
    mean = {
        "acceptance_length": statistics.mean(one.acceptance_length for one in fast.values()),
        "speedup": statistics.mean(one.speedup for one in fast.values()),
        "predicted_speedup": statistics.mean(one.predicted_speedup for one in fast.values()),
    }
    pair = {"model": arguments.model, "draft": draft_name(arguments.model, arguments.draft)}
    result = {"machine": describe(), **pair, "prompts": PROMPTS, "rows": rows, "mean": mean}
    (results_folder() / "five_prompts.json").write_text(json.dumps(result, indent=2) + "\n")

    table = Table(title=f"{arguments.model}, greedy, {dtype}")
    for heading in (
        "prompt",
        "tokens",
        "tau",
        "speedup",
        "spread",
        "predicted",
        "same tokens: here",
        "fp32",
        "fp32, T 0.8",
    ):
        table.add_column(heading)
    for name, one in fast.items():
        table.add_row(
            name,
            str(len(one.tokens)),
            f"{one.acceptance_length:.2f}",
            f"{one.speedup:.2f}",
            f"{one.speedup_least:.2f} to {one.speedup_most:.2f}",
            f"{one.predicted_speedup:.2f}",
            "yes" if one.identical else f"{one.first_difference.index} of {len(one.tokens)}",
            "yes",
            "yes",
        )
    Console().print(table)
    print(f"mean: acceptance length {mean['acceptance_length']:.2f}, speedup {mean['speedup']:.2f}")


if __name__ == "__main__":
    main()
