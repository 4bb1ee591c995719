"""What each choice of the DSpark recipe is worth on a small target: one baseline, one thing changed at a time.

    python bench/ablation.py --run FOLDER            # trains and measures every variant; started again, it goes on
    python bench/ablation.py --run FOLDER --time     # times their shapes, on an idle machine
    python bench/ablation.py --plot                  # table and figure again, from ablation.json alone

FOLDER is what ``dspark-fast train --out FOLDER`` left: responses and their features with all taps and the largest
probabilities that the variants ask for. A variant keeps ``metrics.jsonl`` and ``result.json`` in
``FOLDER/ablation/<name>/``; its checkpoint is deleted once it has been measured.

Held fixed: the responses and their order, steps, sequences per step, decay of the loss over the block,
the confidence head and its loss, the seed of the weights (equal shapes begin with equal noise), the held-out prompts.
Of the anchors, so many are taken per sequence that anchors times block size is the baseline's number of slots; a larger
block therefore sees fewer anchors, and they are other ones. A drafter with more weights gets no more steps.

Two figures say how good a variant is. **tau** is the greedy acceptance length on held-out prompts in bf16, pooled over
rounds within a domain, plain mean over domains. The **teacher-forced** tau is what the exact distributions of drafter
and target over the whole vocabulary promise at temperature 1 on held-out responses, whatever loss a variant was trained
with; it can be compared between variants of one block size alone. The baseline is trained with two further seeds, and
what they differ by is what a difference between two single runs has to exceed.

Time does not depend on weights: ``--time`` takes fresh drafters of each shape, all in one process, one after the other
and all again, and the median. The predicted speedup is ``tau * T_plain / (T_draft + T_verify + T_bookkeeping)`` at
batch 1.

Writes ``ablation.json`` and ``ablation.png`` to ``results/cpu/``, and the table into ``README.md``; with ``--out`` the
two files alone, there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ablation_report import noise, report, write
from ablation_variants import VARIANTS, Choices
from machine import describe, results_folder

from dspark_fast.compare import compare
from dspark_fast.evaluation import MEAN_OF, Prompt, evaluate, held_out_prompts
from dspark_fast.training.features import Batches, CachedFeatures
from dspark_fast.training.loss import LossWeights
from dspark_fast.training.recipe import Recipe, fresh_draft
from dspark_fast.training.responses import conversation_ids
from dspark_fast.training.trainer import Trainer, TrainSettings

README = Path(__file__).parent / "README.md"
HELD_OUT = 64  # responses of the teacher-forced figure, in the 8 batches that the trainer evaluates


@dataclass(frozen=True)
class Settings:
    """What all variants have in common."""

    responses: int = 1216
    steps: int = 608
    sequences: int = 4
    anchors: int = 24
    per_domain: int = 12
    max_new_tokens: int = 64

    def training(self, choices: Choices) -> TrainSettings:
        """Of one variant: anchors for as many slots as the baseline has."""
        return TrainSettings(
            steps=self.steps,
            learning_rate=choices.learning_rate,
            markov_rate=choices.markov_rate,
            sequences=self.sequences,
            anchors=self.anchors_of(choices.block),
            loss=LossWeights(choices.cross_entropy, choices.total_variation),
            vocabulary=choices.vocabulary,
            top_tokens=choices.top_tokens,
            seed=choices.seed,
            save_every=100,
            evaluate_every=self.steps + 1,
        )

    def anchors_of(self, block: int) -> int:
        """Anchors per sequence at a block size."""
        return max(1, round(self.anchors * Choices().block / block))


def train_variant(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    name: str,
    choices: Choices,
    run: Path,
    work: Path,
    settings: Settings,
) -> dict[str, Any]:
    """Train and measure one variant, or take its result if there is one.

    Raises:
        SystemExit: for a result of other settings, or too few responses.
    """
    folder = work / name
    path = folder / "result.json"
    asked = json.loads(json.dumps({"name": name, "choices": asdict(choices), "settings": asdict(settings)}))
    if path.is_file():
        result = json.loads(path.read_text())
        if any(result[key] != value for key, value in asked.items()):
            raise SystemExit(f"{path} was made with other settings: delete its folder or take another with --work")
        return result
    began = time.perf_counter()
    source = CachedFeatures(run / "features" / "train", choices.taps, settings.responses)
    if len(source.lengths) < settings.responses:
        raise SystemExit(
            f"{run} holds features of {len(source.lengths)} responses, --responses is {settings.responses}"
        )
    train = Batches(source, settings.sequences)
    held_out = Batches(CachedFeatures(run / "features" / "held-out", choices.taps, HELD_OUT), HELD_OUT // 8)
    training = settings.training(choices)
    recipe = Recipe(shape=choices.shape(), initialise=choices.initialise, train=training, seed=choices.seed)
    draft = fresh_draft(model, recipe, train[0].input_ids[:2])
    trainer = Trainer(draft, train, held_out, folder, training)
    trainer.run()
    trained = sum(parameter.numel() for parameter in trainer.parameters.values())

    # The same question for every variant: exact, over the whole vocabulary, at the same number of anchors.
    judge = replace(training, vocabulary=0, top_tokens=0, anchors=settings.anchors)
    teacher_forced = Trainer(draft, held_out, held_out, folder, judge).evaluate()
    trained_in = time.perf_counter() - began
    draft.requires_grad_(False).eval().to(torch.bfloat16).to(model.dtype)
    found = evaluate(
        model,
        draft,
        tokenizer,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.per_domain,
        mean_of=MEAN_OF,
    )
    counts = {**found.domains, "all": found.pooled}
    result = {
        **asked,
        "tau": {"mean": _number(found.mean_tau), **{name: _number(one.tau) for name, one in counts.items()}},
        "by_position": {name: [_number(share, 3) for share in one.conditional] for name, one in counts.items()},
        "rounds": {name: one.rounds for name, one in counts.items()},
        "prompts": {name: one.prompts for name, one in counts.items()},
        "teacher_forced": {
            "responses": len(held_out.source.lengths),
            "tau": _number(teacher_forced["tau"]),
            "accept": teacher_forced["accept"],
        },
        "parameters": trained,
        "megabytes": round(trained * 2 / 1e6, 1),
        "training_tokens": sum(len(source.own_tokens(index)) for index in range(len(source.lengths))),
        "anchors": training.anchors,
        "seconds": {
            "training": round(trained_in),
            "measuring": round(time.perf_counter() - began - trained_in),
            "cores": torch.get_num_threads(),
        },
        "machine": describe(),
    }
    write(path, result)
    for left in ("checkpoint.safetensors", "best.safetensors"):
        (folder / left).unlink(missing_ok=True)
    return result


def time_shapes(
    model: Any, input_ids: torch.Tensor, variants: dict[str, Choices], *, repeats: int, new_tokens: int
) -> dict[str, Any]:
    """Milliseconds of a round for every shape, and of a plain step, in alternation."""
    shapes: dict[str, Any] = {}
    for choices in variants.values():
        if choices.time_key() not in shapes:
            recipe = Recipe(shape=choices.shape(), initialise="random")
            draft = fresh_draft(model, recipe, input_ids).requires_grad_(False).eval().to(model.dtype)
            shapes[choices.time_key()] = draft
    parts: dict[str, list[dict[str, float]]] = {key: [] for key in shapes}
    plain = []
    for repeat in range(repeats):
        order = list(shapes) if repeat % 2 == 0 else list(shapes)[::-1]
        for key in order:
            found = compare(model, shapes[key], input_ids, max_new_tokens=new_tokens, repeats=2)
            if not found.seconds_per_round or not found.seconds_per_plain_step:
                raise SystemExit("the prompt is answered by one token: nothing can be timed on it")
            parts[key].append(found.seconds_per_round)
            plain.append(found.seconds_per_plain_step)
        print(f"timed {repeat + 1} of {repeats}", flush=True)
    rounds = {
        key: {part: _spread([one[part] for one in values]) for part in values[0]} for key, values in parts.items()
    }
    return {
        "machine": describe(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": input_ids.shape[1],
        "new_tokens": new_tokens,
        "repeats": repeats,
        "plain_ms": _spread(plain),
        "rounds_ms": rounds,
    }


def _spread(seconds: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {"median": round(middle * 1e3, 3), "quartiles": [round(low * 1e3, 3), round(high * 1e3, 3)]}


def join(model: str, work: Path, variants: dict[str, Choices]) -> dict[str, Any]:
    """The results of all finished variants with their times, as ``ablation.json`` holds them.

    Raises:
        SystemExit: if none is finished, or two were made with different settings.
    """
    rows = [json.loads(path.read_text()) for name in variants if (path := work / name / "result.json").is_file()]
    if not rows:
        raise SystemExit(f"{work} holds no result.json yet")
    settings = rows[0]["settings"]
    for row in rows:
        if row.pop("settings") != settings:
            raise SystemExit(f"{row['name']} and {rows[0]['name']} in {work} were made with different settings")
    path = work / "ablation_times.json"
    times = json.loads(path.read_text()) if path.is_file() else None
    for row in rows:
        key = Choices(**{**row["choices"], "taps": tuple(row["choices"]["taps"])}).time_key()
        row["ms"] = row["predicted_speedup"] = None
        if times and key in times["rounds_ms"]:
            spread = times["rounds_ms"][key]
            row["ms"] = {part: value["median"] for part, value in spread.items()}
            if row["tau"]["mean"] is not None:
                whole = sum(row["ms"].values())
                row["predicted_speedup"] = round(row["tau"]["mean"] * times["plain_ms"]["median"] / whole, 3)
    return {
        "machine": rows[0]["machine"],
        "model": model,
        "settings": settings,
        "noise": noise(rows),
        "rows": [{key: value for key, value in row.items() if key != "machine"} for row in rows],
        "times": times,
    }


def _number(value: float, digits: int = 4) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def main() -> None:
    fixed = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="what `dspark-fast train --out FOLDER` left")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--responses", type=int, default=fixed.responses, help="the first so many are trained on")
    parser.add_argument("--steps", type=int, default=fixed.steps)
    parser.add_argument("--sequences", type=int, default=fixed.sequences, help="per step")
    parser.add_argument("--anchors", type=int, default=fixed.anchors, help="per sequence, at the baseline's block size")
    parser.add_argument("--per-domain", type=int, default=fixed.per_domain, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=fixed.max_new_tokens, help="per held-out prompt")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=VARIANTS, help="train these variants alone")
    parser.add_argument("--time", action="store_true", help="time every variant's shape instead of training")
    parser.add_argument("--repeats", type=int, default=7, help="of the timing")
    parser.add_argument("--plot", action="store_true", help="table and figure from ablation.json alone")
    parser.add_argument("--work", type=Path, help="folder of the variants; FOLDER/ablation by default")
    parser.add_argument("--out", type=Path, help="folder of JSON and figure; by default results/cpu, and README.md too")
    options = parser.parse_args()
    folder, readme = options.out or results_folder(), None if options.out else README
    folder.mkdir(parents=True, exist_ok=True)
    if options.plot:
        report(json.loads((folder / "ablation.json").read_text()), folder, readme)
        return
    if options.run is None:
        parser.error("--run is needed but for --plot")
    work = options.work or options.run / "ablation"
    settings = Settings(**{key: getattr(options, key) for key in asdict(fixed)})

    from dspark_fast.targets import load_target

    model, tokenizer = load_target(options.model, torch.bfloat16, torch.device("cpu"))
    prompts = [one for one in held_out_prompts(tokenizer, settings.per_domain) if one.domain in MEAN_OF]
    if options.time:
        chat = next(one for one in prompts if one.domain == "chat")
        ids = torch.tensor([conversation_ids(tokenizer, list(chat.messages))])
        times = time_shapes(model, ids, VARIANTS, repeats=options.repeats, new_tokens=16)
        write(work / "ablation_times.json", times)
    else:
        names = [name for name in VARIANTS if not options.only or name in options.only]
        for number, name in enumerate(names, 1):
            result = train_variant(model, tokenizer, prompts, name, VARIANTS[name], options.run, work, settings)
            seconds = result["seconds"]
            print(
                f"{number} of {len(names)}, {name}: tau {result['tau']['mean']}, "
                f"{seconds['training']} s to train, {seconds['measuring']} s to measure",
                flush=True,
            )
    result = join(options.model, work, VARIANTS)
    write(folder / "ablation.json", result)
    report(result, folder, readme)


if __name__ == "__main__":
    main()
