"""The optimisation: AdamW, warm-up, cosine, checkpoints from which a run goes on exactly where it stood."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspark_fast.draft import DSparkDraft
from dspark_fast.training.blocks import sample_anchors
from dspark_fast.training.features import FeatureStore, Sequences
from dspark_fast.training.loss import Loss, LossWeights, Vocabulary, dspark_loss

# What of a drafter's configuration a checkpoint belongs to
SHAPE = (
    "num_hidden_layers", "hidden_size", "vocab_size", "block_size", "mask_token_id", "target_layer_ids", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


@dataclass(frozen=True)
class TrainSettings:
    """How to train. The defaults are the paper's (section 4.5) but for what a small machine needs.

    Attributes:
        steps: optimiser steps; the cosine ends there.
        learning_rate: peak.
        warm_up: share of the steps.
        sequences: per step (512 in the paper).
        anchors: per sequence (512 in the paper).
        clip: gradient norm.
        loss: weights of the terms.
        vocabulary: take the loss over so many most frequent tokens, 0 for all; see
            :class:`~dspark_fast.training.loss.Vocabulary`.
        heads_only: train the Markov and confidence heads alone.
        seed: of the order of the data and of the anchors.
        save_every, evaluate_every: steps.
    """

    steps: int = 4000
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    sequences: int = 8
    anchors: int = 48
    clip: float = 1.0
    loss: LossWeights = field(default_factory=LossWeights)
    vocabulary: int = 8192
    heads_only: bool = False
    seed: int = 42
    save_every: int = 200
    evaluate_every: int = 200


class Trainer:
    """Trains a drafter on feature shards.

    Everything random is a function of (seed, step), so a run that was stopped and resumed on the same shards has the
    losses of one that was not; on other shards, or with other frozen weights, it is refused.

    Args:
        draft: joined to its target, fp32.
        train, held_out: features; ``held_out`` may be empty.
        folder: of ``metrics.jsonl`` and the checkpoint.
        settings: see :class:`TrainSettings`.
        on_step: told each step's metrics.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        train: FeatureStore,
        held_out: FeatureStore,
        folder: Path,
        settings: TrainSettings,
        on_step: Callable[[dict[str, float]], None] = lambda metrics: None,
    ) -> None:
        if not len(train):
            raise ValueError("there are no features to train on")
        self.draft = draft
        self.train_store, self.held_out = train, held_out
        self.folder, self.settings = folder, settings
        self.on_step = on_step
        self.step = 0
        heads = ("markov_head.", "confidence_head.")
        self.parameters = {
            name: parameter
            for name, parameter in draft.named_parameters()
            if name not in ("embed_tokens.weight", "lm_head.weight")
            and (not settings.heads_only or name.startswith(heads))
        }
        if not self.parameters:
            raise ValueError("heads_only is set, but the drafter has neither a Markov nor a confidence head")
        draft.requires_grad_(False)
        for module in (draft.embed_tokens, draft.lm_head):  # the target's own: no gradient is wanted or paid for
            module.requires_grad_(False)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=settings.learning_rate, weight_decay=0.0)
        self.vocabulary = self._vocabulary()

    def run(self) -> None:
        """Train to the last step, from the checkpoint in the folder if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.resume()
        start, blocks = time.perf_counter(), 0
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as log:
            while self.step < self.settings.steps:
                loss, norm = self._update()
                blocks += int(loss.counted[..., 0].sum())
                metrics = {
                    "step": self.step,
                    "learning_rate": self._learning_rate(self.step),
                    "gradient_norm": norm,
                    "blocks_per_second": blocks / (time.perf_counter() - start),
                    **describe(loss),
                }
                if len(self.held_out) and self.step % self.settings.evaluate_every == 0:
                    metrics["held_out"] = self.evaluate()
                log.write(json.dumps(_finite(metrics)) + "\n")
                log.flush()
                self.on_step(metrics)
                if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                    self.save()

    def _update(self) -> tuple[Loss, float]:
        self.draft.train()
        loss = self._loss(self._batch(self.step), generator=torch.Generator().manual_seed(self._number(self.step)))
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip).item()
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        self.optimizer.step()
        return loss, norm

    def _loss(self, batch: Sequences, generator: torch.Generator) -> Loss:
        device = self.draft.device
        anchors, valid = sample_anchors(batch.loss_mask, self.settings.anchors, generator)
        # bf16 products with fp32 weights: 4 times fp32 on a CPU that has them, and what the authors train with.
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return dspark_loss(
                self.draft,
                batch.input_ids.to(device),
                batch.features.to(device),
                batch.last_hidden.to(device),
                batch.loss_mask.to(device),
                anchors.to(device),
                valid.to(device),
                weights=self.settings.loss,
                vocabulary=self.vocabulary,
                log_total=batch.log_total.to(device),
            )

    def _batch(self, step: int) -> Sequences:
        """The batch of a step: a fresh permutation of the data each epoch."""
        per_epoch = len(self.train_store)
        epoch, index = divmod(step, per_epoch)
        order = torch.randperm(per_epoch, generator=torch.Generator().manual_seed(self._number(epoch) + 1))
        return self.train_store[int(order[index])]

    def _number(self, counter: int) -> int:
        return self.settings.seed * 1_000_003 + 2 * counter

    def _learning_rate(self, step: int) -> float:
        warm_up = max(1, round(self.settings.warm_up * self.settings.steps))
        if step < warm_up:
            return self.settings.learning_rate * step / warm_up
        progress = (step - warm_up) / max(1, self.settings.steps - warm_up)
        return self.settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))

    def _vocabulary(self) -> Vocabulary | None:
        size, wanted = self.draft.config.vocab_size, self.settings.vocabulary
        if not 0 < wanted < size:
            return None
        counts = self.train_store.token_counts(size)
        ids = counts.topk(wanted).indices.sort().values
        return Vocabulary(ids.to(self.draft.device), size)

    @torch.no_grad()
    def evaluate(self, batches: int = 8) -> dict[str, Any]:
        """The losses on held-out features, always the same anchors."""
        self.draft.eval()
        found = []
        for index in range(min(batches, len(self.held_out))):
            found.append(describe(self._loss(self.held_out[index], torch.Generator().manual_seed(index))))
        return {key: _mean([one[key] for one in found]) for key in found[0]}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write weights, optimiser state and position; aside first, then moved, so that there is always a whole one."""
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            tensors[f"mean.{name}"], tensors[f"square.{name}"] = state["exp_avg"], state["exp_avg_sq"]
        extra = {"step": str(self.step), "settings": json.dumps(self._settings(), sort_keys=True)}
        aside = self.folder / f".checkpoint.{os.getpid()}"
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, aside, metadata=extra)
        os.replace(aside, self.folder / "checkpoint.safetensors")

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if there is one; metrics written after it are dropped.

        Raises:
            ValueError: if it was made with other settings, naming those that differ.
        """
        path = self.folder / "checkpoint.safetensors"
        if not path.is_file():
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that was stopped before its first
            return
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            extra = file.metadata()
        theirs, ours = json.loads(extra["settings"]), json.loads(json.dumps(self._settings()))
        loose = ("save_every", "evaluate_every")
        changed = [key for key in ours if key not in loose and theirs.get(key, ours[key]) != ours[key]]
        if changed:
            values = "; ".join(f"{key} was {theirs.get(key)}, is {ours[key]}" for key in changed)
            raise ValueError(
                f"{path} was made with other settings: {values}; take another folder, or delete it to train anew"
            )
        tensors = load_file(path)
        self.step = int(extra["step"])
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[f"weight.{name}"])
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": tensors[f"mean.{name}"].to(parameter.device),
                "exp_avg_sq": tensors[f"square.{name}"].to(parameter.device),
            }
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = (line for line in lines if line.endswith("\n"))
            kept = [line for line in whole if json.loads(line)["step"] <= self.step]
            metrics.write_text("".join(kept), encoding="utf-8")

    def _settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with this one."""
        frozen = hashlib.sha256()
        for name, weight in self.draft.named_parameters():
            if name not in self.parameters:
                frozen.update(weight.detach().float().cpu().numpy().tobytes())
        return {
            **asdict(self.settings),
            **{key: getattr(self.draft.config, key) for key in SHAPE},
            "shards": [shard.name for shard in self.train_store.shards],
            "frozen": frozen.hexdigest()[:16],
        }


def describe(loss: Loss) -> dict[str, Any]:
    """A loss as plain numbers; ``accept`` is c* by block position, ``tau`` the acceptance length that they make."""
    weight = loss.counted.sum((0, 1)).clamp(min=1)
    accept = (loss.overlap * loss.counted).sum((0, 1)) / weight
    return {
        "loss": loss.total.item(),
        "cross_entropy": loss.cross_entropy.item(),
        "total_variation": loss.total_variation.item(),
        "confidence": loss.confidence.item(),
        "tau": loss.expected_acceptance_length(),
        "accept": [round(value, 4) for value in accept.tolist()],
    }


def _finite(value: Any) -> Any:
    """NaN, which JSON has no word for, as None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")
