"""From a target's name to a trained drafter: responses, features, training, measurement; each stage resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dspark_fast.config import DSparkConfig
from dspark_fast.draft import DSparkDraft
from dspark_fast.training.evaluate import Acceptance, held_out_prompts, measure_acceptance, with_mean
from dspark_fast.training.features import Batches, CachedFeatures, LiveFeatures, check_head, write_features
from dspark_fast.training.initialise import initialise_from_target
from dspark_fast.training.prompts import Prompt, read_prompts, training_prompts
from dspark_fast.training.responses import Response, generate_responses, merge_parts, read_responses
from dspark_fast.training.trainer import Trainer, TrainSettings
from dspark_fast.training.workers import Workers

# on_progress(stage, done, of): `of` is 0 where the stage has no known end
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run gives.

    Attributes:
        tokens: answer tokens to have the target generate.
        max_new_tokens: per answer.
        shape: overrides of the drafter's configuration (``num_hidden_layers``, ``block_size``, ``markov_rank``, ...).
        initialise: ``target`` begins as the target's last layers where their shapes allow, ``random`` as the authors.
        live: run the target for every batch instead of keeping its states on disk.
        train: of the optimisation.
        seed: of the prompts' order, the sampling and the initial weights.
    """

    tokens: int = 500_000
    max_new_tokens: int = 192
    shape: dict[str, Any] = field(default_factory=dict)
    initialise: str = "target"
    live: bool = False
    train: TrainSettings = field(default_factory=TrainSettings)
    seed: int = 0


def collect(
    model: Any,
    tokenizer: Any,
    folder: Path,
    recipe: Recipe,
    layer_ids: Sequence[int],
    *,
    prompt_files: Sequence[Path] = (),
    gsm8k: Path | None = None,
    workers: Workers | None = None,
    on_progress: OnProgress = lambda stage, done, of: None,
) -> tuple[Batches, Batches]:
    """Stages 1 and 2: responses and their features, both kept in ``folder`` and continued if half done.

    Args:
        model, tokenizer: the target.
        folder: of ``responses.jsonl`` and ``features/``.
        recipe: how much.
        layer_ids: the tapped layers.
        prompt_files: the user's own prompts as JSONL; read first, the built-in ones after.
        gsm8k: GSM8K training questions as JSONL, mixed into the built-in prompts.
        workers: processes that share the answering; the features are then the first one's work, or everyone's if live.
        on_progress: told the stage, what is done and of how much.

    Returns:
        Features to train on, and those held out.
    """
    workers = workers or Workers()
    check_head(model)
    if workers.first:
        made_for = remember(folder, model, recipe)
        merge_parts(folder)
    workers.wait()
    prompts: Iterable[Prompt] = chain(*map(read_prompts, prompt_files), training_prompts(recipe.seed, gsm8k))
    generate_responses(
        model,
        tokenizer,
        prompts,
        folder / "responses.jsonl",
        tokens=recipe.tokens,
        max_new_tokens=recipe.max_new_tokens,
        seed=recipe.seed,
        workers=workers,
        on_progress=lambda done: on_progress("responses", done, recipe.tokens),
    )
    workers.wait()
    if workers.first:
        merge_parts(folder)
    workers.wait()
    responses = list(read_responses(folder / "responses.jsonl"))
    parts = {chosen: [r for r in responses if r.held_out == chosen] for chosen in (False, True)}
    together = recipe.train.sequences
    if recipe.live:
        train, held_out = (_live(model, parts[chosen], layer_ids, recipe) for chosen in (False, True))
        return Batches(train, together), Batches(held_out, together)
    done = 0
    for chosen, name in ((True, "held-out"), (False, "train")):
        if workers.first:
            write_features(
                model,
                parts[chosen],
                folder / "features" / name,
                layer_ids,
                top_tokens=recipe.train.top_tokens,
                made_for=made_for,
                on_progress=lambda n, before=done: on_progress("features", before + n, len(responses)),
            )
        done += len(parts[chosen])
    workers.wait()
    train, held_out = (CachedFeatures(folder / "features" / name) for name in ("train", "held-out"))
    return Batches(train, together), Batches(held_out, together)


def _live(model: Any, responses: list[Response], layer_ids: Sequence[int], recipe: Recipe) -> LiveFeatures:
    whole = not 0 < recipe.train.vocabulary < model.get_output_embeddings().weight.shape[0]
    return LiveFeatures(model, responses, layer_ids, top_tokens=recipe.train.top_tokens, log_total=not whole)


def remember(folder: Path, model: Any, recipe: Recipe) -> dict[str, Any]:
    """Note in ``run.json`` whose answers the folder holds; a folder of other answers is refused.

    Returns:
        What names the target: its configuration's name, its class and a hash of some of its weights.

    Raises:
        ValueError: naming what differs, with both values.
    """
    weight = model.get_input_embeddings().weight[:64].detach().float().cpu()
    ours = {
        "target": type(model).__name__,
        "weights": hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16],
        "max_new_tokens": recipe.max_new_tokens,
        "seed": recipe.seed,
    }
    path = folder / "run.json"
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        for key, value in ours.items():
            if theirs.get(key) != value:
                raise ValueError(f"{folder} holds answers with {key} {theirs.get(key)}, asked for is {value}")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    return {
        "target_model_name_or_path": getattr(model.config, "_name_or_path", ""),
        "target_class": ours["target"],
        "target_weights": ours["weights"],
    }


def fresh_draft(model: Any, recipe: Recipe, sample: torch.Tensor) -> DSparkDraft:
    """A new drafter for ``model``, fp32, initialised as the recipe says.

    Raises:
        ValueError: for an ``initialise`` other than ``target`` and ``random``, or a shape that cannot be.
    """
    if recipe.initialise not in ("target", "random"):
        raise ValueError(f"initialise is {recipe.initialise!r}: accepted are 'target' and 'random'")
    torch.manual_seed(recipe.seed)
    draft = DSparkDraft(DSparkConfig.from_target(model.config, **recipe.shape)).float().tie_to(model)
    if recipe.initialise == "target":
        initialise_from_target(draft, model, sample)
    return draft


def train_draft(
    model: Any,
    draft: DSparkDraft,
    train: Batches,
    held_out: Batches,
    folder: Path,
    recipe: Recipe,
    *,
    on_step: Callable[[dict[str, Any]], None] = lambda metrics: None,
    workers: Workers | None = None,
) -> DSparkDraft:
    """Stage 3: optimise, write the drafter to ``folder / "draft"`` in bf16, and return it in the target's dtype."""
    workers = workers or Workers()
    Trainer(draft, train, held_out, folder, recipe.train, on_step, workers).run()
    draft.requires_grad_(False).eval().to(torch.bfloat16)
    if workers.first:
        draft.save_pretrained(folder / "draft")
    return draft.to(model.dtype)


def measure(
    model: Any,
    tokenizer: Any,
    draft: DSparkDraft,
    folder: Path,
    *,
    per_domain: int = 16,
    on_progress: OnProgress = lambda stage, done, of: None,
) -> list[Acceptance]:
    """Stage 4: greedy acceptance length on the built-in held-out prompts, written to ``acceptance.json``."""
    prompts = held_out_prompts(tokenizer, per_domain)
    results = measure_acceptance(
        model, draft, prompts, on_progress=lambda done: on_progress("measure", done, len(prompts))
    )
    rows = [result.to_dict() for result in with_mean(results)]
    (folder / "acceptance.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return results
