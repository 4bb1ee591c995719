"""The optimisation: AdamW, warm-up, cosine, checkpoints from which a run goes on exactly where it stood."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn

from dspark_fast.draft import DSparkDraft
from dspark_fast.training import checkpoints
from dspark_fast.training.blocks import RunBlocks, run_blocks, sample_anchors
from dspark_fast.training.features import Batches, Sequences
from dspark_fast.training.loss import Labels, Loss, LossWeights, Vocabulary, dspark_loss, make_labels
from dspark_fast.training.metrics import Tally, best_so_far, finite
from dspark_fast.training.workers import Workers


@dataclass(frozen=True)
class TrainSettings:
    """How to train. The defaults are the paper's (section 4.5) but for what a small machine needs.

    Attributes:
        steps: optimiser steps; the cosine ends there.
        learning_rate: peak.
        markov_rate: the Markov weights W1 and W2 learn this many times as fast, since a row of theirs is met only where
            its token is: after 200 steps on SmolLM2 the held-out tau was 1.24 with 1, 1.28 with 4, 1.31 with 8, 1.32
            with 16 (bench/results/cpu/training_tries.json).
        warm_up: share of the steps.
        sequences: per batch.
        accumulate: batches per step (the paper's step has 512 sequences).
        anchors: per sequence (512 in the paper).
        clip: gradient norm.
        loss: weights of the terms.
        vocabulary: take the loss over so many most frequent tokens, 0 for all; see
            :class:`~dspark_fast.training.loss.Vocabulary`.
        top_tokens: train on the target's so many largest probabilities, the rest being one mass; 0 takes the whole
            distribution. The distance is then a lower bound, so c* and tau of a training step are too high, and the
            confidence head, which learns that c*, will promise too much. Held-out figures are of the whole
            distribution.
        heads_only: train the Markov and confidence heads alone.
        seed: of the order of the data and of the anchors.
        save_every, evaluate_every: steps.
        patience: stop after so many evaluations without a better held-out acceptance length, 0 never.
        compile: compile the drafter's pass, on a GPU with ``flex_attention``; None does on a GPU.
    """

    steps: int = 4000
    learning_rate: float = 2e-3
    markov_rate: float = 8.0
    warm_up: float = 0.04
    sequences: int = 8
    accumulate: int = 1
    anchors: int = 48
    clip: float = 1.0
    loss: LossWeights = field(default_factory=LossWeights)
    vocabulary: int = 8192
    top_tokens: int = 0
    heads_only: bool = False
    seed: int = 42
    save_every: int = 200
    evaluate_every: int = 200
    patience: int = 0
    compile: bool | None = None


@dataclass(frozen=True)
class _Batch:
    """One batch of a step, with its anchors and labels, which are small and on the drafter's device already."""

    sequences: Sequences
    anchors: torch.Tensor
    valid: torch.Tensor
    labels: Labels

    def to(self, device: torch.device) -> _Batch:
        """With its sequences, which are large, on the device too."""
        return replace(self, sequences=self.sequences.to(device, top_tokens=None))


class Objective(nn.Module):
    """The loss of one batch as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, draft: DSparkDraft, weights: LossWeights, vocabulary: Vocabulary | None, compiled: bool) -> None:
        super().__init__()
        self.draft, self.weights, self.vocabulary = draft, weights, vocabulary
        self.run = _compiled(draft.device) if compiled else run_blocks

    def forward(self, batch: _Batch, totals: torch.Tensor) -> Loss:
        sequences = batch.sequences
        # bf16 products with fp32 weights: 4 times fp32 on a CPU that has them, and what the authors train with.
        with torch.autocast(sequences.input_ids.device.type, dtype=torch.bfloat16):
            return dspark_loss(
                self.draft,
                sequences.input_ids,
                sequences.features,
                sequences.last_hidden,
                sequences.loss_mask,
                batch.anchors,
                batch.valid,
                weights=self.weights,
                vocabulary=self.vocabulary,
                log_total=sequences.log_total,
                top_tokens=sequences.top_tokens,
                top_probs=sequences.top_probs,
                labels=batch.labels,
                totals=totals,
                run=self.run,
            )


def _compiled(device: torch.device) -> RunBlocks:
    """The drafter's pass compiled, for any lengths; with ``flex_attention`` on a GPU (it has no backward on a CPU)."""
    run = torch.compile(partial(run_blocks, flex=device.type == "cuda"), dynamic=True)

    def call(*arguments: Any) -> torch.Tensor:
        # Inside DistributedDataParallel dynamo would split the graph at gradient buckets; flex_attention forbids it.
        with torch._dynamo.config.patch(optimize_ddp=False):
            return run(*arguments)

    return call


class Trainer:
    """Trains a drafter on batches of features.

    Everything random is a function of (seed, number of the batch), so a run that was stopped and resumed on the same
    responses has the losses of one that was not; on other ones, or with other frozen weights, it is refused. Equal to
    the last bit on a CPU: on a GPU the gradients of embeddings and of ``flex_attention`` are summed atomically, in an
    order that may change from run to run.

    Batches are numbered through steps, workers and accumulation alike: W workers that accumulate A batches take the
    steps of one worker that accumulates W*A, but for the rounding of sums.

    Args:
        draft: joined to its target, fp32, one that can draft every token.
        train, held_out: features; ``held_out`` may be empty.
        folder: of ``metrics.jsonl`` and the checkpoint; only the first worker writes.
        settings: see :class:`TrainSettings`.
        on_step: told each step's metrics. A number that is not finite is None there, as ``tau`` is where no block is
            full, of the step or (in ``held_out``) of the held-out text.
        workers: the processes of this run; this one alone if None.

    Raises:
        ValueError: nothing to train on or nothing to train; a drafter of a part of the vocabulary; top tokens wanted
            that the features lack.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        train: Batches,
        held_out: Batches,
        folder: Path,
        settings: TrainSettings,
        on_step: Callable[[dict[str, Any]], None] = lambda metrics: None,
        workers: Workers | None = None,
    ) -> None:
        if not len(train):
            raise ValueError("there are no features to train on")
        if draft.vocabulary is not None:
            raise ValueError(
                f"the drafter drafts {len(draft.vocabulary)} tokens only: train dspark_fast.vocabulary.whole(draft)"
            )
        self.draft = draft
        self.train_batches, self.held_out = train, held_out
        self.folder, self.settings = folder, settings
        self.on_step = on_step
        self.workers = workers or Workers()
        self.step = 0
        self._reading = Lock()
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
        tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        groups = [
            {"params": [p for name, p in self.parameters.items() if (name in tables) == fast], "rate": rate}
            for fast, rate in ((False, 1.0), (True, settings.markov_rate))
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            weight_decay=0.0,
            fused=True,  # 8 ms instead of 37 for a drafter of 14 M weights on one core
        )
        self.vocabulary = self._vocabulary()
        compiled = draft.device.type == "cuda" if settings.compile is None else settings.compile
        self.objective = Objective(draft, settings.loss, self.vocabulary, compiled)
        self.replica = self.workers.wrap(self.objective)

    @cached_property
    def frozen(self) -> str:
        """A hash of the weights that are not trained; they stay as they are, so it is computed once."""
        return checkpoints.frozen_hash(self)

    def run(self) -> None:
        """Train to the last step (or until ``patience`` is out), from the checkpoint in the folder if there is one.

        At the end the drafter has the weights of the evaluation with the best held-out acceptance length where
        ``patience`` is set, else the last ones. A run whose patience was out goes on if there is more of it now.

        Raises:
            FloatingPointError: for a loss or gradient that is not finite, naming the step, before it is applied; for a
                confidence that is not, in an evaluation. Nothing is saved after it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        history = checkpoints.resume(self)
        start, blocks = time.perf_counter(), 0
        batches = self._batches(self.step)
        log = (self.folder / "metrics.jsonl").open("a", encoding="utf-8") if self.workers.first else None
        try:
            over = self.step >= self.settings.steps or self._stopped(history)
            while not over:
                tally, norm = self._update(next(batches))
                blocks += tally.blocks
                metrics = {
                    "step": self.step,
                    "learning_rate": self._learning_rate(self.step),
                    "gradient_norm": norm,
                    "blocks_per_second": blocks / (time.perf_counter() - start),
                    **tally.means(),
                }
                if len(self.held_out) and self.step % self.settings.evaluate_every == 0:
                    metrics["held_out"] = self.evaluate()
                    metrics |= self._judge([*history, metrics])
                metrics = finite(metrics)
                history.append({key: metrics[key] for key in ("step", "held_out", "stopped") if key in metrics})
                if log is not None:
                    log.write(json.dumps(metrics) + "\n")
                    log.flush()
                self.on_step(metrics)
                over = self.step == self.settings.steps or "stopped" in metrics
                if log is not None and (self.step % self.settings.save_every == 0 or over):
                    checkpoints.save(self)
        finally:
            batches.close()
            if log is not None:
                log.close()
        if self.settings.patience:
            checkpoints.load_best(self, history)

    def _stopped(self, history: list[dict[str, Any]]) -> bool:
        """Whether patience was out, and is by the present settings, which may be others."""
        return "stopped" in (history[-1] if history else {}) and 0 < self.settings.patience <= best_so_far(history)[1]

    def _judge(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        """Keep the weights of the best evaluation; say so if patience is out."""
        best, since = best_so_far(history)
        if since == 0 and self.workers.first:  # whatever the patience: the run may be taken up with another
            checkpoints.save_best(self)
        over = 0 < self.settings.patience <= since
        if not self.workers.first_says(over, self.draft.device):
            return {}
        return {"stopped": f"no better held-out tau since step {best}"}

    def _update(self, batches: list[_Batch]) -> tuple[Tally, float]:
        """One step over this worker's batches."""
        self.draft.train()
        totals = self.workers.sum(torch.stack([batch.labels.totals() for batch in batches]).sum(0))
        tally = Tally(self.draft.config.block_size)
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(batches):
            with self.workers.synchronised(self.replica, number == len(batches) - 1):
                # one batch at a time: features of all of them would be the most that the device has to hold
                loss = self.replica(batch.to(self.draft.device), totals)
                # the wrapper takes the mean over workers, the totals are already those of all
                (loss.total * self.workers.count).backward()
            tally.add(loss)
        tally = tally.over(self.workers)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip).item()
        loss = tally.losses[0].item()
        if not (math.isfinite(norm) and math.isfinite(loss)):  # all workers see the same sums
            raise FloatingPointError(
                f"step {self.step + 1} has loss {loss} and gradient norm {norm}: it is not applied, and the run stops"
            )
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * self._learning_rate(self.step)
        self.optimizer.step()
        return tally, norm

    def _batches(self, step: int) -> Iterator[list[_Batch]]:
        """This worker's batches of each step; the next step's are read from disk while this one computes."""
        device = self.draft.device
        # the current GPU is a thread's own: a live target's kernels would be launched on the first one
        options = {"initializer": torch.cuda.set_device, "initargs": (device,)} if device.type == "cuda" else {}
        with ThreadPoolExecutor(1, **options) as reader:
            ahead = reader.submit(self._batches_of, step)
            for later in count(step + 1):
                batches, ahead = ahead.result(), reader.submit(self._batches_of, later)
                yield batches

    def _batches_of(self, step: int) -> list[_Batch]:
        each, workers = self.settings.accumulate, self.workers
        first = (step * workers.count + workers.rank) * each
        return [self._batch(number) for number in range(first, first + each)]

    def _batch(self, number: int) -> _Batch:
        """The batch of a number: a fresh permutation of the data each epoch."""
        per_epoch = len(self.train_batches)
        epoch, index = divmod(number, per_epoch)
        order = torch.randperm(per_epoch, generator=torch.Generator().manual_seed(self._number(epoch) + 1))
        sequences = self._read(self.train_batches, int(order[index]))
        return self._prepare(sequences, self._number(number), self.settings.top_tokens)

    def _read(self, batches: Batches, index: int) -> Sequences:
        """One batch at a time: two passes of a live target at once would find each other's states in their taps."""
        with self._reading:
            return batches[index]

    def _prepare(self, sequences: Sequences, seed: int, top_tokens: int) -> _Batch:
        """Choose anchors and make labels, on the drafter's device; the sequences stay where the source made them."""
        anchors, valid = sample_anchors(
            sequences.loss_mask.cpu(), self.settings.anchors, torch.Generator().manual_seed(seed)
        )
        device = self.draft.device
        sequences = sequences.to(sequences.features.device, top_tokens=top_tokens)
        if device.type == "cuda":
            sequences = sequences.pinned()
        anchors, valid = anchors.to(device), valid.to(device)
        labels = make_labels(
            sequences.input_ids.to(device),
            sequences.loss_mask.to(device),
            anchors,
            valid,
            self.draft.config.block_size,
            self.settings.loss.decay,
            self.vocabulary,
        )
        return _Batch(sequences, anchors, valid, labels)

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
        counts = self.train_batches.token_counts(size)
        ids = counts.topk(wanted).indices.sort().values
        return Vocabulary(ids.to(self.draft.device), size)

    @torch.no_grad()
    def evaluate(self, batches: int = 8) -> dict[str, Any]:
        """The losses on held-out features, always the same anchors; every worker computes the same.

        Judged by the target's whole distribution over the loss's vocabulary, whatever ``top_tokens`` the drafter is
        trained with: of a bound on the distance, c* and tau would be too high.

        Raises:
            FloatingPointError: for a confidence that is not finite.
        """
        self.draft.eval()
        tally = Tally(self.draft.config.block_size)
        for index in range(min(batches, len(self.held_out))):
            batch = self._prepare(self._read(self.held_out, index), index, top_tokens=0)
            tally.add(self.objective(batch.to(self.draft.device), batch.labels.totals()))
        return tally.means(evaluated=True)
