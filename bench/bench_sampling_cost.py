"""What sampling adds to a round over greedy decoding, in both verification modes.

    python bench/bench_sampling_cost.py

Calls are alternated in one process; each gives its mean seconds per round. Writes ``sampling_cost.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from machine import describe, results_folder

import dspark_fast

PROMPT = "Tell me about the history of the bicycle."
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "rejection": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "rejection, top-k 50": {"do_sample": True, "temperature": 0.8, "top_k": 50},
    "rejection, top-p 0.9": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "coupled": {"do_sample": True, "temperature": 0.8, "top_k": 0, "verification": "coupled"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()

    model, draft, tokenizer = dspark_fast.load(arguments.model)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    per_round: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(arguments.repeats + 1):
        for name, settings in WAYS.items():
            out = dspark_fast.generate(
                model,
                draft,
                prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=arguments.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                off_switch=False,
                seed=repeat,
                **settings,
            )
            if repeat:
                per_round[name].append(out.stats.seconds.rounds / out.stats.rounds)
    rows = []
    for name, seconds in per_round.items():
        ratios = [ours / greedy for ours, greedy in zip(seconds, per_round["greedy"], strict=True)]
        rows.append(
            {
                "way": name,
                "median_ms": round(statistics.median(seconds) * 1e3, 3),
                "over_greedy": round(statistics.median(ratios), 3),
                "over_greedy_range": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
        print(f"{name:>22} {rows[-1]['median_ms']:8.2f} ms per round, {rows[-1]['over_greedy']:.3f} x greedy")
    result = {
        "machine": describe(),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_size": draft.config.block_size,
        "rows": rows,
    }
    (results_folder() / "sampling_cost.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
