"""The model card of a trained drafter: how it was made, from what, and what it reached on prompts not trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dspark_fast.config import DSparkConfig
from dspark_fast.training.evaluate import Acceptance
from dspark_fast.training.recipe import Recipe


def write_card(
    folder: Path,
    *,
    target: str,
    config: DSparkConfig,
    recipe: Recipe,
    command: str,
    metrics: Path,
    acceptance: Sequence[Acceptance],
) -> None:
    """Write ``README.md`` beside the drafter's weights, every figure from this run's own files.

    Args:
        folder: of the drafter.
        target: name of its target.
        config: the drafter's.
        recipe: what was asked for.
        command: the exact command line.
        metrics: the trainer's ``metrics.jsonl``.
        acceptance: from :func:`~dspark_fast.training.evaluate.measure_acceptance`.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last = rows[-1]
    positions = "".join(f" slot {i + 1} |" for i in range(config.block_size))
    table = [f"| prompts | number | tau |{positions}", "|---|---|---|" + "---|" * config.block_size]
    for one in acceptance:
        cells = "".join(f" {value:.2f} |" for value in one.by_position)
        table.append(f"| {one.domain} | {one.prompts} | {one.tau:.2f} |{cells}")
    train = recipe.train
    loss = train.loss
    vocabulary = min(train.vocabulary or config.vocab_size, config.vocab_size)
    text = f"""# DSpark drafter for {target}

A DSpark drafter in the authors' checkpoint layout, for use with dspark-fast. The target's embedding and LM head
are not in the file: they are taken from the target itself.

| | |
|---|---|
| draft layers | {config.num_hidden_layers} |
| block size (gamma) | {config.block_size} |
| tapped target layers | {", ".join(map(str, config.target_layer_ids))} of {config.num_target_layers} |
| Markov head | {config.markov_head_type}, rank {config.markov_rank} |
| confidence head | {"yes" if config.enable_confidence_head else "no"} |

## How it was made

```
{command}
```

Training text: {recipe.tokens:,} tokens or more of the target's own answers (three quarters greedy, the rest at
temperature 0.7, top-p 0.8, top-k 20) to the package's own prompts (maths, code, chat, lists, short answers,
rewriting; seed {recipe.seed}) and, where given, GSM8K's training questions (MIT). None of the public test sets.
2 % of the prompts, chosen by hash, were kept out of training.

{last["step"]:,} steps of {train.sequences} sequences x {train.anchors} anchor blocks, AdamW, peak learning rate
{train.learning_rate:g}, warm-up {train.warm_up:.0%}, cosine to 0; losses weighted {loss.cross_entropy:g}
cross-entropy, {loss.total_variation:g} total variation, {loss.confidence:g} confidence, decay
exp(-j/{loss.decay:g}); loss over the {vocabulary:,} most frequent tokens; initialised from: {recipe.initialise}.

## What it reaches

Greedy acceptance length tau (committed tokens per round, bonus included, pooled over rounds) on held-out prompts,
and the share of drafts accepted at each block position given that those before it were:

{chr(10).join(table)}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
