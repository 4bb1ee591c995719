"""Two ideas for reading less of W2, tried on a real drafter: eight bits, and skipping tiles that cannot win.

    python bench/markov_tries.py

Neither needs a GPU to be judged: what counts is bytes, and acceptance. Eight bits halve the bytes of a step; the price
is acceptance, if any (q is what was sampled from, so the output stays right). A tile of 64 tokens may be skipped, in
greedy and coupled mode, where the largest U (or race key) of the tile plus |f| times the largest row norm of W2 in the
tile, which bounds the dot (Cauchy-Schwarz), stays below a score that is known before the step: that of the token with
the largest U, or (the best that any such scheme could know) the winner's own. Writes ``markov_tries.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bench_five_prompts import PROMPTS
from machine import describe, results_folder

import dspark_fast
from dspark_fast import ops
from dspark_fast.reference.sampling import DRAFT, exponentials

TILE = 64  # tokens, as in the kernel's launch table
KNOWN, BOUND, SLACK = 2.0**-7, 2.0**-6, 2.0**-20  # what kernels/markov_bound.py takes off, adds, and adds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    model, draft, tokenizer = dspark_fast.load(arguments.model)
    prompts = []
    for prompt in PROMPTS.values():
        chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        prompts.append(torch.tensor([chat["input_ids"] if hasattr(chat, "keys") else chat]))

    def acceptance(**settings: Any) -> float:
        lengths: list[int] = []
        for ids in prompts:
            out = dspark_fast.generate(
                model,
                draft,
                ids,
                max_new_tokens=arguments.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                off_switch=False,
                **settings,
            )
            lengths += out.stats.acceptance_lengths[0]
        return statistics.fmean(lengths)

    modes: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "rejection": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1},
        "coupled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1, "verification": "coupled"},
    }
    tiles = {}
    for name in ("greedy", "coupled"):
        with skipping(coupled=name == "coupled") as shares:
            acceptance(**modes[name])
        tiles[name] = {known: round(statistics.fmean(values), 4) for known, values in shares.items()}
        print(f"{name}: share of tiles that must be read {tiles[name]}")

    weight = draft.markov_head.markov_w2.weight
    exact, rows = weight.detach().clone(), []
    for name, rounded in eight_bits(exact).items():
        weight.data.copy_(rounded)
        error = (rounded.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()
        taus = {mode: round(acceptance(**settings), 3) for mode, settings in modes.items()}
        rows.append({"w2": name, "relative_error": round(float(error), 5), "tau": taus})
        print(f"W2 in {name}: error {float(error):.4f}, tau {taus}")
    weight.data.copy_(exact)

    result = {
        "machine": describe(),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tile": TILE,
        "share_of_tiles_read": tiles,
        "eight_bits": rows,
    }
    (results_folder() / "markov_tries.json").write_text(json.dumps(result, indent=2) + "\n")


@contextmanager
def skipping(*, coupled: bool) -> Iterator[dict[str, list[float]]]:
    """While it lasts, every walk adds the share of tiles that a bound could not rule out, slot by slot."""
    shares: dict[str, list[float]] = {"largest U known": [], "winner known": []}
    walk = ops.markov_walk

    def watched(
        base_logits: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, anchor: torch.Tensor, **options: Any
    ) -> Any:
        drawn = walk(base_logits, w1, w2, anchor, **options)
        norms = tiled(w2.float().norm(dim=-1), 0.0).amax(-1)
        previous = torch.cat([anchor[:, None], drawn.tokens[:, :-1]], 1)
        for slot in range(base_logits.shape[1]):
            known = base_logits[0, slot].float()
            if coupled:
                position = torch.as_tensor(options["position"]).reshape(-1)[:1] + 1 + slot
                seed = torch.as_tensor(options["seed"]).reshape(-1)[:1]
                known = known - exponentials(seed, position, torch.zeros_like(position), DRAFT, len(known))[0].log()
            feature = w1[previous[0, slot]].float()
            score = known + w2.float() @ feature
            favourite = int(known.argmax())
            sure = score[favourite] - KNOWN * (w2[favourite].float() * feature).abs().sum()
            base = tiled(known, -torch.inf).amax(-1)
            bound = base + norms * feature.norm() * (1 + BOUND) + SLACK * (base.abs() + sure.abs() + 32)
            shares["largest U known"].append(float((bound >= sure).float().mean()))
            shares["winner known"].append(float((bound >= score.max()).float().mean()))
        return drawn

    ops.markov_walk = watched
    try:
        yield shares
    finally:
        ops.markov_walk = walk


def tiled(row: torch.Tensor, fill: float) -> torch.Tensor:
    """[V] as [tiles, TILE], the last tile filled up."""
    return torch.nn.functional.pad(row, (0, -len(row) % TILE), value=fill).view(-1, TILE)


def eight_bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """W2 as it is, in e4m3 under one scale for all of it (which W1 can carry), and in int8 under one for each row."""
    w = weight.float()
    scale = w.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    steps = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127  # some rows are zero
    return {
        str(weight.dtype).removeprefix("torch."): weight,
        "float8_e4m3fn": ((w / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype),
        "int8": ((w / steps).round() * steps).to(weight.dtype),
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
