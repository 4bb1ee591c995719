"""The trainer's checkpoints: safetensors, written aside and moved, so that there is always a whole one."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark_fast.training.metrics import best_so_far

if TYPE_CHECKING:
    from dspark_fast.config import DSparkConfig
    from dspark_fast.training.trainer import Trainer, TrainSettings

# What of a drafter's configuration a checkpoint belongs to
SHAPE = (
    "num_hidden_layers", "hidden_size", "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
# Settings that may change from one run to the next without changing what is computed
LOOSE = ("save_every", "evaluate_every", "patience", "compile")


def save(trainer: Trainer) -> None:
    """Write weights, optimiser state and position."""
    tensors = _weights(trainer)
    for name, parameter in trainer.parameters.items():
        state = trainer.optimizer.state[parameter]
        tensors[f"mean.{name}"], tensors[f"square.{name}"] = state["exp_avg"], state["exp_avg_sq"]
    extra = {"step": str(trainer.step), "settings": json.dumps(_settings(trainer), sort_keys=True)}
    _write(tensors, trainer.folder / "checkpoint.safetensors", extra)


def save_best(trainer: Trainer) -> None:
    """Write the weights of the best evaluation so far."""
    _write(_weights(trainer), trainer.folder / "best.safetensors", {"step": str(trainer.step)})


def load_best(trainer: Trainer, history: list[dict[str, Any]]) -> None:
    """Give the drafter the weights of the best evaluation of ``history``; nothing happens if there was none.

    Warns, and leaves the weights as they are, where those of the best evaluation are lost: of a run that was stopped
    after it, before its next checkpoint, and went on without an evaluation at that step.
    """
    path, (best, _) = trainer.folder / "best.safetensors", best_so_far(history)
    there = trainer.workers.first and path.is_file() and _step(path) == best
    # the file was written by the first one's history, and is whole when the first one says so
    if trainer.workers.first_says(there, trainer.draft.device):
        _load(trainer, load_file(path))
    elif best and trainer.workers.first:
        warnings.warn(
            f"the weights of the best evaluation, at step {best}, are lost: the drafter keeps the last ones",
            stacklevel=2,
        )


def resume(trainer: Trainer) -> list[dict[str, Any]]:
    """Go on from the folder's checkpoint, if there is one; metrics written after it are dropped.

    Returns:
        The metrics up to there: step, and held-out figures and the reason of a stop where there are any.

    Raises:
        ValueError: if it was made with other settings, naming those that differ.
    """
    path, metrics = trainer.folder / "checkpoint.safetensors", trainer.folder / "metrics.jsonl"
    best = trainer.folder / "best.safetensors"
    if trainer.workers.first:  # what a kill cut short; safetensors writes its files aside too, as .tmp and 6 characters
        for name in (".checkpoint.*", ".best.*", ".metrics.*", ".tmp??????"):
            for aside in trainer.folder.glob(name):
                aside.unlink(missing_ok=True)
    if not path.is_file():
        trainer.workers.wait()
        if trainer.workers.first:  # of a run that was stopped before its first checkpoint
            metrics.unlink(missing_ok=True)
            best.unlink(missing_ok=True)
        return []
    check_settings(path, _settings(trainer))
    tensors = load_file(path)
    trainer.step = _step(path)
    _load(trainer, tensors)
    for name, parameter in trainer.parameters.items():
        trainer.optimizer.state[parameter] = {
            "step": torch.tensor(float(trainer.step)),
            "exp_avg": tensors[f"mean.{name}"].to(parameter.device),
            "exp_avg_sq": tensors[f"square.{name}"].to(parameter.device),
        }
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.is_file() else []
    trainer.workers.wait()  # all have read before the first one writes
    rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
    rows = [(line, row) for line, row in rows if row["step"] <= trainer.step]
    if trainer.workers.first:
        aside = trainer.folder / f".metrics.{os.getpid()}"
        aside.write_text("".join(line for line, _ in rows), encoding="utf-8")
        os.replace(aside, metrics)
    history = [{key: row[key] for key in ("step", "held_out", "stopped") if key in row} for _, row in rows]
    # Of an evaluation after the checkpoint, which may never come again if it is now another step's turn
    if trainer.workers.first and best.is_file() and _step(best) != best_so_far(history)[0]:
        best.unlink()
    return history


def check_settings(path: Path, ours: dict[str, Any]) -> None:
    """Whether a checkpoint is one to go on from, by as many settings as are known.

    Raises:
        ValueError: naming those that differ, with both values.
    """
    with safe_open(path, framework="pt") as file:
        theirs = json.loads(file.metadata()["settings"])
    ours = json.loads(json.dumps(ours))  # as JSON has tuples and numbers
    changed = [key for key in ours if key not in LOOSE and theirs.get(key, ours[key]) != ours[key]]
    if changed:
        values = "; ".join(f"{key} was {theirs.get(key)}, is {ours[key]}" for key in changed)
        raise ValueError(
            f"{path} was made with other settings: {values}; take another folder, or delete it to train anew"
        )


def known_settings(settings: TrainSettings, config: DSparkConfig, workers: int) -> dict[str, Any]:
    """What of them is known before there is anything to train on."""
    # workers that share a step's batches among them change nothing but who computes what
    shared = {"accumulate": settings.accumulate * workers}
    return {**asdict(settings), **shared, **{key: getattr(config, key) for key in SHAPE}}


def frozen_hash(trainer: Trainer) -> str:
    """Of the weights that are not trained, 16 hexadecimal digits."""
    frozen = hashlib.sha256()
    for name, weight in trainer.draft.named_parameters():
        if name not in trainer.parameters:
            frozen.update(weight.detach().float().cpu().numpy().tobytes())
    return frozen.hexdigest()[:16]


def _step(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"weight.{name}": parameter.detach() for name, parameter in trainer.parameters.items()}


@torch.no_grad()
def _load(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in trainer.parameters.items():
        parameter.copy_(tensors[f"weight.{name}"])


def _write(tensors: dict[str, torch.Tensor], path: Path, extra: dict[str, str]) -> None:
    aside = path.parent / f".{path.stem}.{os.getpid()}"
    try:
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, aside, metadata=extra)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _settings(trainer: Trainer) -> dict[str, Any]:
    """What a run that goes on must have in common with this one."""
    return {
        **known_settings(trainer.settings, trainer.draft.config, trainer.workers.count),
        "responses": trainer.train_batches.source.identity(),
        "frozen": trainer.frozen,
    }
