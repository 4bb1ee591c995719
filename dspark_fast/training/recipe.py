"""From a target's name to a trained drafter: responses, features, training, measurement; each stage resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dspark_fast.config import DSparkConfig
from dspark_fast.draft import DSparkDraft
from dspark_fast.training.evaluate import Acceptance, measure_acceptance
from dspark_fast.training.features import FeatureStore, check_head, write_features
from dspark_fast.training.initialise import initialise_from_target
from dspark_fast.training.prompts import Prompt, read_prompts, training_prompts
from dspark_fast.training.responses import generate_responses, read_responses
from dspark_fast.training.trainer import Trainer, TrainSettings

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
        train: of the optimisation.
        seed: of the prompts' order, the sampling and the initial weights.
    """

    tokens: int = 500_000
    max_new_tokens: int = 192
    shape: dict[str, Any] = field(default_factory=dict)
    initialise: str = "target"
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
    on_progress: OnProgress = lambda stage, done, of: None,
) -> tuple[FeatureStore, FeatureStore]:
    """Stages 1 and 2: responses and their features, both kept in ``folder`` and continued if half done.

    Args:
        model, tokenizer: the target.
        folder: of ``responses.jsonl`` and ``features/``.
        recipe: how much.
        layer_ids: the tapped layers.
        prompt_files: the user's own prompts as JSONL; read first, the built-in ones after.
        gsm8k: GSM8K training questions as JSONL, mixed into the built-in prompts.

    Returns:
        Features to train on, and those held out.
    """
    check_head(model)
    remember(folder, model, recipe)
    path = folder / "responses.jsonl"
    prompts: Iterable[Prompt] = chain(*map(read_prompts, prompt_files), training_prompts(recipe.seed, gsm8k))
    generate_responses(
        model,
        tokenizer,
        prompts,
        path,
        tokens=recipe.tokens,
        max_new_tokens=recipe.max_new_tokens,
        seed=recipe.seed,
        on_progress=lambda done: on_progress("responses", done, recipe.tokens),
    )
    responses = list(read_responses(path))
    shards = write_features(
        model,
        responses,
        folder / "features",
        layer_ids,
        on_progress=lambda done: on_progress("features", done, len(responses)),
    )
    train = [shard for shard in shards if shard.name.startswith("train")]
    held_out = [shard for shard in shards if shard.name.startswith("held-out")]
    together = recipe.train.sequences
    return FeatureStore(train, together), FeatureStore(held_out, together)


def remember(folder: Path, model: Any, recipe: Recipe) -> None:
    """Note in ``run.json`` whose answers the folder holds; a folder of other answers is refused.

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
    train: FeatureStore,
    held_out: FeatureStore,
    folder: Path,
    recipe: Recipe,
    *,
    on_step: Callable[[dict[str, Any]], None] = lambda metrics: None,
) -> DSparkDraft:
    """Stage 3: optimise, write the drafter to ``folder / "draft"`` in bf16, and return it in the target's dtype."""
    Trainer(draft, train, held_out, folder, recipe.train, on_step).run()
    draft.requires_grad_(False).eval().to(torch.bfloat16)
    draft.save_pretrained(folder / "draft")
    return draft.to(model.dtype)


def measure(
    model: Any,
    draft: DSparkDraft,
    folder: Path,
    *,
    per_domain: int = 8,
    on_progress: OnProgress = lambda stage, done, of: None,
) -> list[Acceptance]:
    """Stage 4: greedy acceptance length on held-out prompts, written to ``acceptance.json``."""

    def held_out() -> Iterator[Any]:
        return (r for r in read_responses(folder / "responses.jsonl") if r.held_out and "+" not in r.id)

    results = measure_acceptance(
        model, draft, held_out(), per_domain=per_domain, on_progress=lambda done: on_progress("measure", done, 0)
    )
    (folder / "acceptance.json").write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    return results
