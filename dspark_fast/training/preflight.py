"""What would stop a training run in its later stages, looked at before the first: hours of generation lie between."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from dspark_fast.config import DSparkConfig
from dspark_fast.evaluation import held_out_prompts
from dspark_fast.evaluation.conversation import check_room, lay_out
from dspark_fast.pairing import check_pair
from dspark_fast.training import checkpoints
from dspark_fast.training.acceptance import NEW_TOKENS
from dspark_fast.training.features import check_head
from dspark_fast.training.prompts import Prompt
from dspark_fast.training.responses import conversation_ids, read_responses
from dspark_fast.writing import write_whole

if TYPE_CHECKING:
    from dspark_fast.training.recipe import Recipe

INITIALISE = ("target", "random")
RUN = 2  # version of run.json; the first one's hash, of a few embedding rows, did not tell fine-tunes apart


def preflight(
    model: Any,
    tokenizer: Any,
    folder: Path,
    recipe: Recipe,
    config: DSparkConfig,
    *,
    per_domain: int = 16,
    workers: int = 1,
) -> None:
    """Refuse now what a later stage would refuse.

    Args:
        model, tokenizer: the target.
        folder: of the run; what an earlier run left there is compared with what is asked for.
        recipe: what is asked for.
        config: of the drafter, fresh or given.
        per_domain: held-out prompts of the last stage.
        workers: processes of this run.

    Raises:
        ValueError: naming what cannot be, and with which value.
    """
    check_pair(config, model)
    check_head(model)
    if recipe.initialise not in INITIALISE:
        raise ValueError(f"initialise is {recipe.initialise!r}: accepted are {' and '.join(map(repr, INITIALISE))}")
    if recipe.train.heads_only and not (config.markov_rank or config.enable_confidence_head):
        raise ValueError("heads_only is set, but the drafter has neither a Markov nor a confidence head")
    if recipe.train.top_tokens > config.vocab_size:
        raise ValueError(f"top_tokens is {recipe.train.top_tokens}, and the vocabulary has {config.vocab_size} tokens")
    check_room(model, tokenizer, lay_out(tokenizer, held_out_prompts(tokenizer, per_domain)), NEW_TOKENS)
    _same_run(folder, run_of(model, recipe))
    if not recipe.live:
        for name in ("held-out", "train"):
            written_with(folder / "features" / name, config.target_layer_ids, recipe.train.top_tokens)
    _same_training(folder, recipe, config, workers)


def written_with(folder: Path, layer_ids: Sequence[int], top_tokens: int) -> tuple[list[int], int]:
    """The taps and the number of top tokens to write features with: the folder's own, of which ours must be a part.

    Raises:
        ValueError: for a folder that lacks some of what is wanted.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return list(layer_ids), top_tokens
    manifest = json.loads(path.read_text(encoding="utf-8"))
    there, top = manifest.get("target_layer_ids", []), manifest.get("top_tokens", 0)
    if missing := [layer for layer in layer_ids if layer not in there]:
        raise ValueError(
            f"{folder} was made for something else: it holds the target's layers {there}, not {missing}. "
            "Take another --out or delete the folder"
        )
    if top_tokens > top:
        raise ValueError(
            f"{folder} was made for something else: top_tokens is {top}, asked for is {top_tokens}. "
            "Take another --out or delete the folder"
        )
    return list(there), top


def accepted(tokenizer: Any, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """The prompts without those whose system message the chat template refuses, as some do with every one.

    Raises:
        ValueError: for a prompt without a system message that the template refuses, naming it.
    """
    for prompt in prompts:
        try:
            conversation_ids(tokenizer, list(prompt.messages))
        except TemplateError as error:
            if any(message["role"] == "system" for message in prompt.messages):
                continue
            text = prompt.messages[-1]["content"][:40]
            raise ValueError(f"the target's chat template refuses the prompt {text!r}: {error}") from error
        yield prompt


# --- whose answers a folder holds -------------------------------------------------------------------------------------


def run_of(model: Any, recipe: Recipe) -> dict[str, Any]:
    """What the answers of a folder depend on, as ``run.json`` has it."""
    return {
        "version": RUN,
        "target": type(model).__name__,
        "weights": fingerprint(model),
        "max_new_tokens": recipe.max_new_tokens,
        "seed": recipe.seed,
    }


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """16 hexadecimal digits of a little of every parameter, which a fine-tune of the same model does not share."""
    digest = hashlib.sha256(_bytes(model.get_input_embeddings().weight[:64]))
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + _bytes(parameter.reshape(-1)[:64]))
    return digest.hexdigest()[:16]


def _bytes(values: torch.Tensor) -> bytes:
    return values.detach().float().cpu().contiguous().numpy().tobytes()


def read_run(folder: Path) -> dict[str, Any]:
    """``run.json`` of a folder; empty where there is none.

    Raises:
        ValueError: for one that an earlier version of the package wrote.
    """
    path = folder / "run.json"
    if not path.is_file():
        return {}
    run = json.loads(path.read_text(encoding="utf-8"))
    if run.get("version") != RUN:
        raise ValueError(
            f"{path} is of an earlier version of this package, which did not tell fine-tunes of one model apart: take "
            "another --out or, if the answers are this target's own, delete run.json and features in it"
        )
    return run


def _same_run(folder: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """``run.json`` of the folder, which must be of the same answers.

    Raises:
        ValueError: naming what differs, with both values.
    """
    theirs = read_run(folder)
    for key, value in ours.items():
        if theirs and theirs.get(key) != value:
            raise ValueError(f"{folder} holds answers with {key} {theirs.get(key)}, asked for is {value}")
    return theirs


def note_run(folder: Path, ours: dict[str, Any], **more: Any) -> None:
    """Write ``run.json``, with what an earlier run noted there and ``more``.

    Raises:
        ValueError: for a folder of other answers.
    """
    theirs = _same_run(folder, ours)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "run.json", json.dumps({**theirs, **ours, **more}, indent=2) + "\n")


def answer_tokens(folder: Path) -> int:
    """Tokens of the answers in the folder, those of workers' parts included."""
    files = [folder / "responses.jsonl", *folder.glob("responses.part-*.jsonl")]
    return sum(len(response.input_ids) - response.start for path in files for response in read_responses(path))


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def _same_training(folder: Path, recipe: Recipe, config: DSparkConfig, workers: int) -> None:
    """The folder's checkpoint is one to go on from, as far as can be said before there are responses.

    Raises:
        ValueError: for other settings, or more answers than it was trained on.
    """
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return
    checkpoints.check_settings(path, checkpoints.known_settings(recipe.train, config, workers))
    # Asked for before: all prompts may have been answered and still be fewer tokens than that.
    before, there = read_run(folder).get("tokens", 0), answer_tokens(folder)
    if recipe.tokens > max(before, there):
        raise ValueError(
            f"--tokens is {recipe.tokens}, but {path} belongs to the {there} answer tokens that there are: ask for "
            f"--tokens {before or there} to go on with it, or delete it to train anew on more"
        )
