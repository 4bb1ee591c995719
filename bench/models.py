"""The shapes that the microbenchmarks run at: what the drafter and the target of each model look like to an op."""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 7  # drafted tokens per round, as in the released drafters


class Model(NamedTuple):
    """V, R, Hq, Hkv, D and H of one pair."""

    vocab: int
    rank: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


# An op sees no difference between Qwen3-4B and 8B but H (gated and rnn heads), nor between 8B and 14B but Hq and H.
MODELS = {
    "Qwen3-4B": Model(vocab=151_936, rank=256, heads=32, kv_heads=8, head_dim=128, hidden=2560),
    "Qwen3-8B": Model(vocab=151_936, rank=256, heads=32, kv_heads=8, head_dim=128, hidden=4096),
    "Qwen3-14B": Model(vocab=151_936, rank=256, heads=40, kv_heads=8, head_dim=128, hidden=5120),
    "SmolLM2-135M": Model(vocab=49_152, rank=64, heads=9, kv_heads=3, head_dim=64, hidden=576),
    # No model: a shape that the tests and the interpreter get through at once. 203 is no multiple of anything.
    "tiny": Model(vocab=203, rank=16, heads=6, kv_heads=2, head_dim=16, hidden=32),
}
