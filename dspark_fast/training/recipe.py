"""From a target's name to a trained drafter: responses, features, training, measurement; each stage resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dspark_fast.config import DSparkConfig
from dspark_fast.draft import DSparkDraft
from dspark_fast.evaluation import MEAN_OF, evaluate, held_out_prompts
from dspark_fast.training.acceptance import NEW_TOKENS, Acceptance, acceptance_rows
from dspark_fast.training.features import Batches, CachedFeatures, LiveFeatures, check_head, write_features
from dspark_fast.training.initialise import initialise_from_target
from dspark_fast.training.preflight import INITIALISE, accepted, answer_tokens, note_run, read_run, run_of, written_with
from dspark_fast.training.prompts import Prompt, read_prompts, training_prompts
from dspark_fast.training.responses import Response, generate_responses, merge_parts, read_responses
from dspark_fast.training.trainer import Trainer, TrainSettings
from dspark_fast.training.workers import Workers
from dspark_fast.vocabulary import restricted
from dspark_fast.writing import write_whole

HELD_OUT_TOGETHER = 8  # sequences per batch, whatever --sequences is: evaluation looks at the first 8 batches

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
        whole_vocabulary: write a drafter that can draft every token, though the loss was over a part of them. Else it
            drafts that part alone, see :mod:`dspark_fast.vocabulary`.
        train: of the optimisation.
        seed: of the prompts' order, the sampling and the initial weights.
    """

    tokens: int = 500_000
    max_new_tokens: int = 192
    shape: dict[str, Any] = field(default_factory=dict)
    initialise: str = "target"
    live: bool = False
    whole_vocabulary: bool = False
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
        on_progress: told the stage, what is done and of how much; of this worker's share of the responses.

    Returns:
        Features to train on, and those held out.

    Raises:
        ValueError: for a folder of other answers or features; for a prompt that the chat template refuses.
    """
    workers = workers or Workers()
    check_head(model)
    if workers.first:
        made_for = remember(folder, model, recipe)
        merge_parts(folder)
    workers.wait()
    prompts: Iterable[Prompt] = chain(*map(read_prompts, prompt_files), training_prompts(recipe.seed, gsm8k))
    # What is there is no worker's share of what is missing.
    before = answer_tokens(folder) if workers.count > 1 else 0
    before = before if before < recipe.tokens else 0
    share = -(-(recipe.tokens - before) // workers.count)
    workers.wait()  # all have read what was there before one writes more
    generate_responses(
        model,
        tokenizer,
        accepted(tokenizer, prompts),
        folder / "responses.jsonl",
        tokens=recipe.tokens,
        max_new_tokens=recipe.max_new_tokens,
        seed=recipe.seed,
        workers=workers,
        on_progress=lambda done: on_progress("responses", done - before, share),
    )
    workers.wait()
    if workers.first:
        merge_parts(folder)
        note_run(folder, run_of(model, recipe), tokens=max(recipe.tokens, read_run(folder).get("tokens", 0)))
    workers.wait()
    responses = list(read_responses(folder / "responses.jsonl"))
    parts = {chosen: [r for r in responses if r.held_out == chosen] for chosen in (False, True)}
    together = (recipe.train.sequences, HELD_OUT_TOGETHER)
    if recipe.live:
        sources = [_live(model, parts[chosen], layer_ids, recipe) for chosen in (False, True)]
    else:
        if workers.first:
            _extract(model, parts, folder / "features", layer_ids, recipe, made_for, on_progress)
        workers.wait()
        sources = [CachedFeatures(folder / "features" / name, layer_ids) for name in ("train", "held-out")]
    train, held_out = map(Batches, sources, together)
    return train, held_out


def _extract(
    model: Any,
    parts: dict[bool, list[Response]],
    folder: Path,
    layer_ids: Sequence[int],
    recipe: Recipe,
    made_for: dict[str, Any],
    on_progress: OnProgress,
) -> None:
    """Stage 2, cached; ``parts`` are the responses by whether they are held out."""
    done, of = 0, sum(map(len, parts.values()))
    for chosen, name in ((True, "held-out"), (False, "train")):
        # A folder with more taps or top tokens than are wanted goes on with its own, and is read in part.
        layers, top_tokens = written_with(folder / name, layer_ids, recipe.train.top_tokens)
        write_features(
            model,
            parts[chosen],
            folder / name,
            layers,
            top_tokens=top_tokens,
            made_for=made_for,
            on_progress=lambda n, before=done: on_progress("features", before + n, of),
        )
        done += len(parts[chosen])


def _live(model: Any, responses: list[Response], layer_ids: Sequence[int], recipe: Recipe) -> LiveFeatures:
    whole = not 0 < recipe.train.vocabulary < model.get_output_embeddings().weight.shape[0]
    return LiveFeatures(model, responses, layer_ids, top_tokens=recipe.train.top_tokens, log_total=not whole)


def remember(folder: Path, model: Any, recipe: Recipe) -> dict[str, Any]:
    """Note in ``run.json`` whose answers the folder holds; a folder of other answers is refused.

    Returns:
        What names the target: its configuration's name, its class and a hash of a little of all its weights. The name
        is a remark: a folder that was moved is the same target.

    Raises:
        ValueError: naming what differs, with both values.
    """
    ours = run_of(model, recipe)
    note_run(folder, ours)
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
    if recipe.initialise not in INITIALISE:
        raise ValueError(f"initialise is {recipe.initialise!r}: accepted are {' and '.join(map(repr, INITIALISE))}")
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
    trainer = Trainer(draft, train, held_out, folder, recipe.train, on_step, workers)
    trainer.run()
    if trainer.vocabulary is not None and not recipe.whole_vocabulary:
        draft = restricted(draft, trainer.vocabulary.ids)
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
    """Stage 4: greedy acceptance length on the built-in held-out prompts; the rows, as in ``acceptance.json``."""
    prompts = held_out_prompts(tokenizer, per_domain)
    result = evaluate(
        model,
        draft,
        tokenizer,
        prompts,
        max_new_tokens=NEW_TOKENS,
        mean_of=MEAN_OF,
        on_progress=lambda done: on_progress("measure", done, len(prompts)),
    )
    rows = acceptance_rows(result)
    write_whole(folder / "acceptance.json", json.dumps([row.to_dict() for row in rows], indent=2) + "\n")
    return rows
