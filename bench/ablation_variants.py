"""The drafters of the ablation: one baseline, and what each question changes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choices:
    """One drafter and how it is trained; the defaults are the baseline."""

    depth: int = 2
    rank: int = 64
    block: int = 7
    head: str = "vanilla"
    cross_entropy: float = 0.1
    total_variation: float = 0.9
    taps: tuple[int, ...] = (8, 15, 28)
    initialise: str = "target"
    vocabulary: int = 6144
    top_tokens: int = 0
    learning_rate: float = 2e-3
    markov_rate: float = 8.0
    seed: int = 0

    def shape(self) -> dict[str, Any]:
        """Overrides of the drafter's configuration."""
        return {
            "num_hidden_layers": self.depth,
            "block_size": self.block,
            "markov_rank": self.rank,
            "markov_head_type": self.head,
            "target_layer_ids": list(self.taps),
        }

    def time_key(self) -> str:
        """Names what a round's time depends on."""
        return f"depth {self.depth}, rank {self.rank}, block {self.block}, {self.head}, {len(self.taps)} taps"


#: In the order in which they are trained.
VARIANTS = {
    "baseline": Choices(),
    "depth-3": Choices(depth=3),
    "depth-1": Choices(depth=1),
    "rank-0": Choices(rank=0),
    "loss-ce": Choices(cross_entropy=1.0, total_variation=0.0),
    "block-4": Choices(block=4),
    "markov-rate-1": Choices(markov_rate=1.0),
    "head-gated": Choices(head="gated"),
    "head-rnn": Choices(head="rnn"),
    "init-random": Choices(initialise="random"),
    "taps-last": Choices(taps=(28,)),
    "rate-6e-4": Choices(learning_rate=6e-4),
    "block-10": Choices(block=10),
    "rank-256": Choices(rank=256),
    "top-64": Choices(top_tokens=64),
    "vocabulary-2048": Choices(vocabulary=2048),
    "taps-five": Choices(taps=(1, 8, 15, 22, 28)),
    "loss-tv": Choices(cross_entropy=0.0, total_variation=1.0),
    "rank-32": Choices(rank=32),
    "vocabulary-all": Choices(vocabulary=0),
    "baseline-seed1": Choices(seed=1),
    "baseline-seed2": Choices(seed=2),
}

#: Each question with its answers, in the order of the axis: label and variant.
QUESTIONS = {
    "layers": {"1": "depth-1", "2": "baseline", "3": "depth-3"},
    "Markov rank": {"none": "rank-0", "32": "rank-32", "64": "baseline", "256": "rank-256"},
    "block size": {"4": "block-4", "7": "baseline", "10": "block-10"},
    "Markov head": {"vanilla": "baseline", "gated": "head-gated", "rnn": "head-rnn"},
    "loss": {"CE": "loss-ce", "0.1 CE + 0.9 TV": "baseline", "TV": "loss-tv"},
    "taps": {"last": "taps-last", "three": "baseline", "five": "taps-five"},
    "first weights": {"random": "init-random", "the target's": "baseline"},
    "tokens in the loss": {"2,048": "vocabulary-2048", "6,144": "baseline", "all": "vocabulary-all"},
    "target's probabilities": {"64 largest": "top-64", "exact": "baseline"},
    "learning rate": {"6e-4": "rate-6e-4", "2e-3": "baseline"},
    "of W1 and W2, times": {"1": "markov-rate-1", "8": "baseline"},
}
