"""The model card of a trained drafter: how it was made, from what, and what it reached on prompts not trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dspark_fast.checkpoint import indexed_files
from dspark_fast.config import DSparkConfig
from dspark_fast.evaluation import MEAN_OF
from dspark_fast.training.acceptance import Acceptance
from dspark_fast.training.recipe import Recipe
from dspark_fast.training.trainer import TrainSettings

PLOT = "training.png"  # shown in the card if it lies beside it


def write_card(
    folder: Path,
    *,
    target: str,
    config: DSparkConfig,
    recipe: Recipe,
    command: str,
    metrics: Path,
    acceptance: Sequence[Acceptance],
    answer_tokens: int,
    measure_command: str,
    begins: str,
    workers: int = 1,
    trained_on: str | None = None,
) -> None:
    """Write ``README.md`` beside the drafter's weights, every figure from this run's own files and the arguments.

    Args:
        folder: of the drafter, already saved; ``training.png`` in it is shown.
        target: name of its target.
        config: the drafter's.
        recipe: what was asked for.
        command: the exact command line that trained it.
        metrics: the trainer's ``metrics.jsonl``.
        acceptance: from :func:`~dspark_fast.training.recipe.measure`.
        answer_tokens: of the target's own answers that there were to train on, held-out ones not counted.
        measure_command: the command line that measures ``acceptance`` again.
        begins: what the drafter began as, in words.
        workers: processes that trained it together.
        trained_on: the machine and the time it took, as a sentence.

    Raises:
        FileNotFoundError: without the drafter's weights or metrics.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = recipe.train
    parameters, trained, size = _weights(folder, heads_only=train.heads_only)
    part = "all trained" if trained == parameters else f"{trained:,} of them trained"
    plot = f"\n![training curves]({PLOT})\n" if (folder / PLOT).is_file() else ""
    machine = f"\n{trained_on}\n" if trained_on else ""
    part_of = config.draft_vocab_size is not None
    and_more = ", with `draft_vocab_size` and `d2t` besides" if part_of else ""
    drafted = f"the {config.draft_vocab_size:,} most frequent of {config.vocab_size:,}" if part_of else "all"
    text = f"""# DSpark drafter for {target}

A DSpark drafter in the authors' checkpoint layout{and_more}, for use with dspark-fast. The target's
embedding and LM head are not in the file: they are taken from the target itself.

| | |
|---|---|
| draft layers | {config.num_hidden_layers} |
| block size (gamma) | {config.block_size} |
| tapped target layers | {", ".join(map(str, config.target_layer_ids))} of {config.num_target_layers} |
| Markov head | {config.markov_head_type}, rank {config.markov_rank} |
| confidence head | {"yes" if config.enable_confidence_head else "no"} |
| tokens that it drafts | {drafted} |
| parameters | {parameters:,} ({part}), {size / 1e6:.1f} MB |

## How it was made

```
{command}
```

Training text: {answer_tokens:,} answer tokens (asked for: {recipe.tokens:,} with the held-out ones), the target's own
answers (three quarters greedy, the rest at temperature 0.7, top-p 0.8, top-k 20) to the package's own prompts (maths,
code, chat, lists, short answers, rewriting; seed {recipe.seed}) and, where given, the user's own and GSM8K's training
questions (MIT). None of the public test sets. 2 % of the prompts, chosen by hash, were kept out of training.

{_optimisation(train, rows[-1], workers)}{_shipped(train, metrics.parent / "best.safetensors")}
{_approximations(train, config)}
Initialised from: {begins}.
{machine}{plot}
## What it reaches

Greedy acceptance length tau (committed tokens per round, bonus included, pooled over rounds) on held-out prompts, and
the share of drafts accepted at each block position given that those before it were. `mean` is the plain mean over
{", ".join(MEAN_OF[:-1])} and {MEAN_OF[-1]}, `all` is pooled over all rounds.

{_table(acceptance, config.block_size)}

To measure it again:

```
{measure_command}
```
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _weights(folder: Path, *, heads_only: bool) -> tuple[int, int, int]:
    """Parameters on disk, how many of them were trained, and their bytes."""
    total = trained = size = 0
    for name in sorted(indexed_files(folder)):
        size += (folder / name).stat().st_size
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is no dict)
                number = math.prod(file.get_slice(key).get_shape())
                total += number
                trained += number * (not heads_only or key.startswith(("markov_head.", "confidence_head.")))
    return total, trained, size


def _shipped(train: TrainSettings, best: Path) -> str:
    """Which weights these are, where a run with patience chose them."""
    if not train.patience or not best.is_file():
        return ""
    with safe_open(best, framework="pt") as file:
        step = int(file.metadata()["step"])
    return f"\nThe weights are those of step {step:,}, which had the best held-out acceptance length."


def _optimisation(train: TrainSettings, last: dict[str, Any], workers: int) -> str:
    loss = train.loss
    steps = f"{last['step']:,}" if last["step"] == train.steps else f"{last['step']:,} of {train.steps:,}"
    batch = f"{train.accumulate} x {train.sequences}" if train.accumulate > 1 else f"{train.sequences}"
    if workers > 1:
        batch = f"{workers} workers x {train.accumulate} x {train.sequences}"
    stopped = f" Stopped early: {last['stopped']}." if last.get("stopped") else ""
    return (
        f"{steps} steps of {batch} sequences x {train.anchors} anchor blocks, AdamW, peak learning rate "
        f"{train.learning_rate:g}\n(Markov weights {train.markov_rate:g} times that), warm-up {train.warm_up:.0%}, "
        f"cosine to 0.{stopped} Losses weighted "
        f"{loss.cross_entropy:g} cross-entropy, {loss.total_variation:g} total variation,\n"
        f"{loss.confidence:g} confidence, decay exp(-j/{loss.decay:g})."
    )


def _approximations(train: TrainSettings, config: DSparkConfig) -> str:
    """What the loss leaves out, in words."""
    vocabulary = min(train.vocabulary or config.vocab_size, config.vocab_size)
    found = []
    if vocabulary < config.vocab_size:
        found.append(f"over the {vocabulary:,} most frequent of {config.vocab_size:,} tokens, the rest as one mass")
    if train.top_tokens:
        found.append(f"of the target the {train.top_tokens:,} largest probabilities, the rest as one mass")
    return f"Approximations in the loss: {'; '.join(found) or 'none, it runs over the whole vocabulary'}."


def _table(acceptance: Sequence[Acceptance], block: int) -> str:
    slots = "".join(f" slot {slot + 1} |" for slot in range(block))
    lines = [f"| prompts | number | tau |{slots}", "|---|---|---|" + "---|" * block]
    for one in acceptance:
        shares = [f"{share:.2f}" if not math.isnan(share) else "-" for share in one.by_position]
        cells = [one.domain, str(one.prompts), f"{one.tau:.2f}", *shares, *[""] * (block - len(shares))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
