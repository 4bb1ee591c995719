"""Whether an autoregressive drafter of two layers would pay: what one costs, and how often it would have to be right.

    python bench/two_layer_drafter.py    # writes results/cpu/two_layer_drafter.json; three minutes on one core

What a drafter costs does not depend on what its weights are, so none has to be trained to know it. The target's first
two layers under its own norm and head (``first_layers(model, 2)``) have the shape of a trained drafter of two layers;
the same under a head over the tokens that the shipped drafter drafts is the cheapest that one would train. Timed in
turn, as the engine runs them (weights packed, one row, 256 tokens of context): a block of each, one of the shipped
DSpark drafter, and the target's pass over 1 to 8 tokens. A turn's costs are counted in its plain step; a figure is the
median of the repeats, a repeat's that of its turns. In fp32 every drafter has to give the tokens of ``model.generate``
first.

The rest is computed (:func:`answers`, by ``dspark_fast.analysis``): the acceptance at which two layers gain anything,
that at which they match the DSpark drafter, and what they would gain at the DSpark drafter's own. What is said of it is
in ``claims_two_layer.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from claims_two_layer import DSPARK, NAME, SMALL, WHOLE, passes_of, sentence, table, timed
from machine import describe, results_folder
from torch import nn
from transformers import PreTrainedModel
from trust import disturbed, refuse_other_drafter

import dspark_fast
from dspark_fast import analysis, first_layers, ops
from dspark_fast.autoregressive import AutoregressiveDrafter
from dspark_fast.draft import DSparkDraft
from dspark_fast.drafters import Drafter, DSparkDrafter, Noise
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.prepacked import prepackable, prepacked
from dspark_fast.engine.target import Target, driven
from dspark_fast.evaluation import shipped_prompts
from dspark_fast.pairs import best_dtype, draft_name

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAYERS, CONTEXT, NEW_TOKENS, REPEATS, TURNS = 2, 256, 16, 7, 40
DRAFTS = range(1, 8)  # per round
COMMITTED = 2  # tokens whose context a round adds: the acceptance length of the shipped drafter, rounded
ALPHAS = [step / 10 for step in range(1, 10)]
STEPS = 10_000  # of alpha, between which it is looked for
PLAIN = "a plain step"

Spread = dict[str, Any]


# --- measured ---------------------------------------------------------------------------------------------------------


def with_small_head(model: PreTrainedModel, draft: DSparkDraft) -> PreTrainedModel:
    """Two layers under a head over the tokens that ``draft`` drafts.

    It drafts their places in that list and not the tokens, one look-up less: what is drafted costs nothing else.
    """
    made = first_layers(model, LAYERS)
    weight = made.get_output_embeddings().weight.detach()[draft.vocabulary]
    head = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    head.weight.data.copy_(weight)
    made.set_output_embeddings(head)
    return made.eval()


def drafters_of(model: PreTrainedModel, draft: DSparkDraft) -> dict[str, Drafter]:
    """All of one block size."""
    two_layers = {WHOLE: first_layers(model, LAYERS), SMALL: with_small_head(model, draft)}
    block = draft.config.block_size
    made = {name: AutoregressiveDrafter(one, block_size=block) for name, one in two_layers.items()}
    return {DSPARK: DSparkDrafter(draft), **made}


def check_lossless(ids: torch.Tensor) -> None:
    """Exit without a file where a drafter does not give the tokens of ``model.generate`` in fp32."""
    model, draft, _ = dspark_fast.load(MODEL, dtype=torch.float32, device="cpu")
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    truth = model.generate(ids, **common)
    for name, drafter in drafters_of(model, draft).items():
        if not torch.equal(dspark_fast.generate(model, drafter, ids, off_switch=False, **common), truth):
            sys.exit(f"fp32 tokens differ from model.generate ({name}): nothing is reported")


@torch.no_grad()
def measured(model: PreTrainedModel, draft: DSparkDraft, ids: torch.Tensor, repeats: int, turns: int) -> dict[str, Any]:
    """What :func:`answers` takes as costs, and milliseconds of a plain step."""
    drafters, packed = drafters_of(model, draft), prepackable([model, draft])
    packed += prepackable([drafters[WHOLE].draft, drafters[SMALL].draft])
    cache, features = RaggedCache.for_model(model, 1, CONTEXT + len(ids[0]) + 1), []
    for drafter in drafters.values():
        drafter.begin(1, CONTEXT + len(ids[0]) + 1, ids.device)

    def known(*chunk: torch.Tensor) -> None:
        features.append(chunk[1])
        for drafter in drafters.values():
            drafter.commit(*chunk)

    with prepacked(packed), driven(model, draft.config.target_layer_ids, cache) as target:
        target.prefill(ids[:, :CONTEXT], torch.tensor([CONTEXT]), known)
        last = torch.cat(features, dim=1)[:, -COMMITTED:]
        calls = {name: partial(_draft, drafter, ids, last) for name, drafter in drafters.items()}
        calls |= {drafts: partial(_verify, target, ids[:, CONTEXT:][:, : drafts + 1]) for drafts in DRAFTS}
        calls[PLAIN] = partial(_verify, target, ids[:, CONTEXT : CONTEXT + 1])
        times = [_turns(calls, turns if repeat else 3) for repeat in range(repeats + 1)][1:]  # the first warms up
    found = {name: spread([one[name] for one in times]) for name in calls}
    return {
        "block_size": draft.config.block_size,
        "block": {name: found[name] for name in drafters},
        "passes": {str(drafts): found[drafts] for drafts in DRAFTS},
        "plain_step_ms": spread([one["ms"] for one in times]),
    }


def _draft(drafter: Drafter, ids: torch.Tensor, features: torch.Tensor) -> None:
    """A round's part: the last committed tokens become known again, which takes back what was drafted; a block."""
    position = torch.tensor([CONTEXT])
    drafter.commit(ids[:, CONTEXT - COMMITTED : CONTEXT], features, position - COMMITTED, torch.tensor([COMMITTED]))
    drafter.propose(ids[:, CONTEXT], position, Noise("greedy", torch.zeros(1), torch.zeros(1, dtype=torch.long)))


def _verify(target: Target, ids: torch.Tensor) -> None:
    """The pass over an anchor and its drafts, and their acceptance; the cache's length stays."""
    logits, _ = target.verify(ids, CONTEXT + ids.shape[1])
    lengths = torch.tensor([ids.shape[1] - 1])
    ops.verify(logits, ids[:, 1:], None, lengths, temperature=0.0, seed=0, position=CONTEXT, mode="greedy")


def _turns(calls: Mapping[Any, Any], turns: int) -> dict[Any, float]:
    """Medians of what each call costs in plain steps of its turn, and milliseconds of these."""
    costs: dict[Any, list[float]] = defaultdict(list)
    for turn in range(turns):
        seconds = {}
        # Now in this order, now in the other: each finds the caches as the one before has left them.
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            calls[name]()
            seconds[name] = time.perf_counter() - start
        costs["ms"].append(1e3 * seconds[PLAIN])
        for name, taken in seconds.items():
            costs[name].append(taken / seconds[PLAIN])
    return {name: statistics.median(values) for name, values in costs.items()}


def spread(values: Sequence[float]) -> Spread:
    """Of the repeats, which are kept: what they share, such as a slow plain step, is the same in all of a repeat."""
    kept = [round(value, 4) for value in values]
    return {"median": round(statistics.median(kept), 4), "least": min(kept), "most": max(kept), "repeats": kept}


def share_of_weights(model: nn.Module, drafter: nn.Module) -> float:
    """Of what a pass of the target reads, what one of the drafter does: the weights of their linear layers."""
    layers = ([one for one in whole.modules() if isinstance(one, nn.Linear)] for whole in (drafter, model))
    mine, all_of_it = (sum(layer.weight.numel() for layer in found) for found in layers)
    return round(mine / all_of_it, 4)


def acceptance_of(evaluation: dict[str, Any]) -> list[float]:
    """By position: of the drafts there, all before them accepted, the share that is accepted, greedily.

    From the mean over domains of how often each position is accepted, as ``mean_tau`` is their mean.

    Args:
        evaluation: what ``dspark-fast eval`` has written.
    """
    (found,) = (one for one in evaluation["results"] if one["temperature"] == 0)
    domains = [found["domains"][name]["survival"] for name in found["mean_of"]]
    survival = [statistics.mean(position) for position in zip(*domains, strict=True)]
    return [round(after / before, 4) for before, after in zip([1.0, *survival], survival)]


# --- computed ---------------------------------------------------------------------------------------------------------


def best(alpha: analysis.Alpha, cost: float, passes: Mapping[int, float]) -> tuple[int, float]:
    """The number of drafts with the largest predicted speedup over plain decoding, one at least; and that speedup.

    Not :func:`dspark_fast.analysis.best_drafts`, for which a pass costs the same however long it is.

    Args:
        alpha: 0 to 1, or one for each position; more drafts than positions are left out.
        cost: c, of one draft in plain steps.
        passes: by number of drafts, what verifying them costs in plain steps.
    """
    found = {
        drafts: analysis.speedup(alpha, drafts, cost, verify)
        for drafts, verify in passes.items()
        if isinstance(alpha, float) or drafts <= len(alpha)
    }
    drafts = max(found, key=found.__getitem__)
    return drafts, found[drafts]


def needed(speedup: float, cost: float, passes: Mapping[int, float]) -> float | None:
    """The least alpha whose :func:`best` is ``speedup`` or more; None if that of 1 is less."""
    step = bisect_left(range(STEPS + 1), speedup, key=lambda step: best(step / STEPS, cost, passes)[1])
    return step / STEPS if step <= STEPS else None


def answers(costs: dict[str, Any], acceptance: Sequence[float]) -> dict[str, Any]:
    """What the costs and the DSpark drafter's acceptance by position say.

    Args:
        costs: in plain steps: ``block``, of each drafter's block of ``block_size`` drafts, and ``passes``, by number of
            drafts what verifying them costs; each a :func:`spread`.
        acceptance: one for each position of the block.

    Returns:
        ``dspark``, its speedup over no drafter; ``two_layers``, by head: what a draft costs (``draft``), the alpha that
        breaks even (``breaks_even``) and that which is as fast as the DSpark drafter (``matches``), both None where
        none is enough, the speedup at its acceptance and at others; ``behind_in``, in how many repeats it is then ahead
        of both.
    """
    passes, size = passes_of(costs), costs["block_size"]
    dspark = _at(acceptance, DSPARK, costs, {size: passes[size]})
    two_layers = {}
    for name in (WHOLE, SMALL):
        cost = costs["block"][name]["median"] / size
        by_alpha = ((alpha, *best(alpha, cost, passes)) for alpha in ALPHAS)
        two_layers[name] = {
            "draft": round(cost, 4),
            "breaks_even": needed(1.0, cost, passes),
            "matches": needed(dspark["speedup"], cost, passes),
            "at_its_acceptance": _at(acceptance, name, costs, passes),
            "by_alpha": [
                {"alpha": alpha, "drafts": drafts, "speedup": round(speedup, 4)} for alpha, drafts, speedup in by_alpha
            ],
        }
    reached = [one["at_its_acceptance"] for one in two_layers.values()]
    return {
        "dspark": dspark,
        "two_layers": two_layers,
        "behind_in": sum(max(ours) < rival for rival, *ours in zip(*(one["repeats"] for one in (dspark, *reached)))),
    }


def _at(acceptance: Sequence[float], name: str, costs: dict[str, Any], passes: Mapping[int, float]) -> dict[str, Any]:
    """The best speedup, and that of the same number of drafts in each repeat."""
    size, block = costs["block_size"], costs["block"][name]
    drafts, speedup = best(acceptance, block["median"] / size, passes)
    both = zip(block["repeats"], costs["passes"][str(drafts)]["repeats"], strict=True)
    repeats = [analysis.speedup(acceptance, drafts, drafting / size, verify) for drafting, verify in both]
    return {"drafts": drafts, **spread(repeats), "speedup": round(speedup, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--turns", type=int, default=TURNS, help="of each repeat")
    parser.add_argument("--out", type=Path, help=f"the JSON file; results/cpu/{NAME} by default")
    options = parser.parse_args()
    for name in ("repeats", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: accepted is 1 or more")
    torch.set_num_threads(1)
    evaluation = json.loads((results_folder() / "eval.json").read_text(encoding="utf-8"))
    refuse_other_drafter(evaluation, MODEL, "eval.json")
    dtype = best_dtype("cpu")
    model, draft, tokenizer = dspark_fast.load(MODEL, dtype=dtype, device="cpu")
    text = "\n".join(prompt.messages[-1]["content"] for prompt in shipped_prompts())
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : CONTEXT + max(DRAFTS) + 1]
    check_lossless(ids)
    costs, acceptance = measured(model, draft, ids, options.repeats, options.turns), acceptance_of(evaluation)
    two_layers = {WHOLE: first_layers(model, LAYERS), SMALL: with_small_head(model, draft)}
    result = {
        "machine": describe(),
        "model": MODEL,
        "draft": draft_name(MODEL),
        "dtype": str(dtype).removeprefix("torch."),
        "context": CONTEXT,
        "repeats": options.repeats,
        "turns": options.turns,
        "vocabulary": model.config.vocab_size,
        "head_tokens": len(draft.vocabulary),
        "share_of_weights": {name: share_of_weights(model, one) for name, one in two_layers.items()},
        "acceptance": {"file": "eval.json", "temperature": 0.0, "by_position": acceptance},
        "costs": costs,
        "answers": answers(costs, acceptance),
    }
    result["sentence"] = sentence(result)
    path = options.out or results_folder() / NAME
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)


def show(result: dict[str, Any]) -> None:
    """On the terminal."""
    costs = result["costs"]
    print(
        f"plain step: {costs['plain_step_ms']['median']:.1f} ms; in these, blocks of {costs['block_size']} and passes:"
    )
    for what in ("block", "passes"):
        for name, one in costs[what].items():
            print(f"  {what} {name:18} {one['median']:.3f} ({one['least']:.3f} to {one['most']:.3f})")
    for name, one in result["answers"]["two_layers"].items():
        shown = "  ".join(f"{at['alpha']:g}: {at['speedup']:.2f} (K {at['drafts']})" for at in one["by_alpha"])
        print(f"speedup by alpha, {name}:  {shown}")
    print("\n".join(["", *table(result), "", result["sentence"]]))
    if disturbed(timed(result), "least", "most"):
        print("The machine was not left alone: measure again before any of this is quoted.")


if __name__ == "__main__":
    main()
