"""Training curves: the drafter's body stays as it is, its Markov and confidence heads are learnt anew."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from dspark_fast.draft import DSparkDraft
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.report.measurement import Measurement, NotMeasurable, Progress, Table, counted, number, plain
from dspark_fast.report.style import DSPARK, GOOD, INK, OFF, PLAIN, canvas, from_zero, key_above, label_bars
from dspark_fast.report.subject import Equality, Subject
from dspark_fast.vocabulary import restricted, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANSWERS = 64  # of the target, to train on
NEW_TOKENS = 64  # of each
STEPS = 120
EVALUATE_EVERY = 15
SEQUENCES, ANCHORS = 4, 16  # per step
LARGE = 8192  # of a larger vocabulary the loss is taken over so many most frequent tokens
W1_STD = 0.25  # as our trainer begins: with the authors' 0.02 the later slots learn less (training/initialise.py)

LOSSES = {
    "loss": ("total", INK),
    "cross_entropy": ("cross-entropy, nats", DSPARK),
    "total_variation": ("L1 distance, 0 to 2", "#d2822a"),
    "confidence": ("confidence BCE, nats", GOOD),
}


@dataclass(frozen=True)
class Heads(Measurement):
    """Fresh heads on a frozen body, trained on the target's own answers for a few steps.

    Attributes:
        steps: optimiser steps.
        answers, tokens: what was trained on: the target's answers, and their tokens.
        curves: by name of :data:`LOSSES`, the training loss at each step; a head that is not there is left out.
        held_out: looks at answers to the report's prompts, teacher-forced, temperature 1: ``step``, ``tau``,
            ``accept`` by position, and ``ece`` by position with a confidence head.
        taus: greedy decoding of the report's prompts: ``before`` and ``after`` training, ``off`` with the Markov bias
            left out, which training does not change, and ``given``, the drafter as it was loaded.
        equality: all of these answers against plain decoding.
    """

    steps: int
    answers: int
    tokens: int
    curves: dict[str, tuple[float, ...]]
    held_out: tuple[dict[str, Any], ...]
    taus: dict[str, float]
    equality: Equality

    name: ClassVar[str] = "training"
    title: ClassVar[str] = "Training the heads"

    @classmethod
    def measure(cls, subject: Subject, progress: Progress) -> Heads:
        if not subject.draft.config.markov_rank:
            raise NotMeasurable("the drafter has no Markov head to train")
        with tempfile.TemporaryDirectory(prefix="dspark-fast-") as folder:
            return _train(subject, Path(folder), progress)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Heads:
        curves = {name: tuple(map(_nan, values)) for name, values in data["curves"].items()}
        taus = {name: _nan(value) for name, value in data["taus"].items()}
        rest = (data["steps"], data["answers"], data["tokens"])
        return cls(*rest, curves, tuple(data["held_out"]), taus, Equality.from_dict(data["equality"]))

    def to_dict(self) -> dict[str, Any]:
        return plain(asdict(self))

    def draw(self) -> Figure:
        figure, (losses, accept, taus) = canvas(3, width=12.6, height=4.4, width_ratios=[4, 4, 3.4])
        steps = range(1, self.steps + 1)
        for name, values in self.curves.items():
            label, color = LOSSES[name]
            losses.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            losses.plot(steps, _smooth(values), color=color, linewidth=2, label=label)
        losses.set(title="training losses (bold: running mean)", xlabel="step", ylabel="loss, units in the legend")
        # Thin lines are single batches: a lone spike may leave the picture, and never under the legend.
        most = max(max(value for value in values if not math.isnan(value)) for values in self.curves.values())
        key_above(losses, min(most, 2 * max(max(_smooth(values)) for values in self.curves.values())), ncols=2)
        looked = [one["step"] for one in self.held_out]
        slots = len(self.held_out[0]["accept"])
        from matplotlib import colormaps

        for slot in range(slots):
            values = [one["accept"][slot] for one in self.held_out]
            color = colormaps["viridis"](0.85 * slot / max(1, slots - 1))
            accept.plot(looked, values, "o-", markersize=3.5, color=color, label=f"position {slot + 1}")
        accept.set(title="held-out acceptance, teacher-forced", xlabel="step", ylabel="c* = 1 - L1 / 2", ylim=(0, 1))
        key_above(accept, 1, ncols=3)
        shown = {name: (label, color) for name, (label, color) in _BARS.items() if name in self.taus}
        values = [self.taus[name] for name in shown]
        bars = taus.bar(range(len(shown)), values, 0.68, color=[color for _, color in shown.values()])
        label_bars(taus, bars, [number(value) for value in values])
        taus.set_xticks(range(len(shown)), [label for label, _ in shown.values()], fontsize=8.5)
        taus.set(title="greedy decoding", ylabel="tau: tokens committed per round")
        taus.axhline(1, color=PLAIN, linewidth=1.2, linestyle="--")
        from_zero(taus, max(values))
        return figure

    def sentences(self) -> list[str]:
        before, after, off = (self.taus[name] for name in ("before", "after", "off"))
        said = [
            f"{self.steps} steps on {counted(self.answers, 'answer')} of the target ({counted(self.tokens, 'token')}) "
            f"take fresh heads from a tau of {number(before)} to {number(after)}; with the Markov head switched off it "
            f"is {number(off)} all along, for the body does not learn."
        ]
        given = self.taus["given"]
        if after < given:
            said.append(f"The drafter as it was loaded reaches {number(given)}: its heads saw far more text.")
        else:
            said.append(f"The drafter as it was loaded reaches {number(given)}, no more than these few steps give.")
        first, last = self.held_out[0].get("ece"), self.held_out[-1].get("ece")
        if first and last:
            errors = f"{number(_mean(first), 3)} to {number(_mean(last), 3)}"
            said.append(f"The confidence head's calibration error goes from {errors}, the mean over positions.")
        return said

    def tables(self) -> list[Table]:
        rows = tuple((label.replace("\n", " "), number(self.taus[name])) for name, (label, _) in _BARS.items())
        slots = [f"position {slot + 1}" for slot in range(len(self.held_out[0]["accept"]))]
        looks = tuple(
            (str(one["step"]), number(_nan(one["tau"])), *(number(_nan(value)) for value in one["accept"]))
            for one in (self.held_out[0], self.held_out[len(self.held_out) // 2], self.held_out[-1])
        )
        return [
            Table(("heads", "tau"), rows, "greedy decoding of the report's prompts"),
            Table(("step", "tau", *slots), looks, "held-out text, teacher-forced, at temperature 1"),
        ]


_BARS = {
    "off": ("head\noff", OFF),
    "before": ("fresh\nhead", PLAIN),
    "after": ("trained\nhead", DSPARK),
    "given": ("head as\nloaded", "#1a3d66"),
}


def _train(subject: Subject, folder: Path, progress: Progress) -> Heads:
    from dspark_fast.training.features import Batches, CachedFeatures, check_head, write_features
    from dspark_fast.training.preflight import accepted
    from dspark_fast.training.prompts import training_prompts
    from dspark_fast.training.responses import Response, generate_responses, read_responses
    from dspark_fast.training.trainer import Trainer, TrainSettings

    model, taps = subject.model, list(subject.draft.config.target_layer_ids)
    try:
        check_head(model)
    except ValueError as error:
        raise NotMeasurable(str(error)) from None
    prompts = islice(accepted(subject.tokenizer, training_prompts(subject.seed)), ANSWERS)
    generate_responses(
        model,
        subject.tokenizer,
        prompts,
        folder / "responses.jsonl",
        tokens=ANSWERS * NEW_TOKENS,  # more than they give: the prompts end first
        batch_size=16,
        max_new_tokens=min(NEW_TOKENS, subject.max_new_tokens),
        seed=subject.seed,
        on_progress=lambda done: progress(f"{counted(done, 'answer token')} of the target"),
    )
    train = [one for one in read_responses(folder / "responses.jsonl") if not one.held_out]
    # What the report's own prompts were answered with is what tau is taken on, and is not trained on.
    held = [
        Response(prompt.id, prompt.domain, row + answer, len(row), True, True)
        for prompt, row, answer in zip(subject.prompts, subject.rows, subject.plain(progress), strict=True)
    ]
    batches = []
    for name, responses, together in (("train", train, SEQUENCES), ("held-out", held, 8)):
        progress(f"the target's states over {counted(len(responses), 'answer')}")
        source = CachedFeatures(write_features(model, responses, folder / name, taps))
        batches.append(Batches(source, together))
    if not len(batches[0]) or not len(batches[1]):
        raise NotMeasurable("the target's answers are too short to train on")

    draft = _fresh(subject.draft, subject.seed)
    before, equality = _tau(subject, draft, progress, "fresh heads")
    trained = _copy(draft).float()
    settings = TrainSettings(
        steps=STEPS,
        sequences=SEQUENCES,
        anchors=ANCHORS,
        vocabulary=LARGE if draft.config.vocab_size > LARGE else 0,
        heads_only=True,
        seed=subject.seed,
        save_every=STEPS,
        evaluate_every=EVALUATE_EVERY,
    )

    def told(metrics: dict[str, Any]) -> None:
        progress(f"step {metrics['step']} of {STEPS}")

    trainable = [parameter.requires_grad for parameter in model.parameters()]
    try:
        trainer = Trainer(trained, *batches, folder / "run", settings, told)
        looks = [{"step": 0, **trainer.evaluate()}]
        trainer.run()
    finally:  # the trainer freezes what it shares with the target
        for parameter, had in zip(model.parameters(), trainable, strict=True):
            parameter.requires_grad_(had)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    looks += [{"step": row["step"], **row["held_out"]} for row in rows if "held_out" in row]

    done = _like(trained.eval().requires_grad_(False), subject.draft)
    after, more = _tau(subject, done, progress, "trained heads")
    off, given = subject.dspark(progress, use_markov=False), subject.dspark(progress)
    curves = {name: tuple(row[name] for row in rows) for name in LOSSES if any(row[name] for row in rows)}
    kept = tuple({key: one[key] for key in ("step", "tau", "accept", "ece") if key in one} for one in looks)
    taus = {"before": before, "after": after}
    taus |= {name: one.evaluation.pooled.tau for name, one in (("off", off), ("given", given))}
    equality = equality | more | off.equality | given.equality
    tokens = sum(len(one.input_ids) - one.start for one in train)
    return Heads(len(rows), len(train), tokens, curves, kept, taus, equality)


@torch.no_grad()
def _fresh(draft: DSparkDraft, seed: int) -> DSparkDraft:
    """A copy that drafts every token, with heads that know nothing: W2 is zero, so the Markov bias is too."""
    made = _copy(whole(draft))
    noise = torch.Generator(device=made.device).manual_seed(seed)
    heads = [made.markov_head] + ([made.confidence_head] if made.config.enable_confidence_head else [])
    for head in heads:
        for module in head.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = W1_STD if isinstance(module, nn.Embedding) else made.config.initializer_range
                module.weight.normal_(std=std, generator=noise)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
    made.markov_head.markov_w2.weight.zero_()
    return made.eval()


def _copy(draft: DSparkDraft) -> DSparkDraft:
    """With weights of its own, but the target's embedding and LM head."""
    return copy.deepcopy(draft, {id(part): part for part in (draft.embed_tokens, draft.lm_head)})


def _like(draft: DSparkDraft, given: DSparkDraft) -> DSparkDraft:
    """In the dtype of the given drafter, and of its vocabulary: decoding then differs by the heads alone."""
    draft = _copy(draft).to(given.dtype)
    if given.vocabulary is None or draft.vocabulary is not None:
        return draft
    return restricted(draft, given.vocabulary)


def _tau(subject: Subject, draft: DSparkDraft, progress: Progress, what: str) -> tuple[float, Equality]:
    """The acceptance length of greedy decoding over the report's prompts."""
    drafter = DSparkDrafter(_like(draft, subject.draft))
    answers = subject.answers(drafter, progress, what)
    return answers.evaluation.pooled.tau, answers.equality


def _smooth(values: tuple[float, ...], keep: float = 0.9) -> list[float]:
    """Exponential mean, unbiased at the start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        if not math.isnan(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(total / weight if weight else math.nan)
    return out


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
