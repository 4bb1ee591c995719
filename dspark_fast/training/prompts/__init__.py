"""Training prompts: a deterministic, varied stream of requests for the target model to answer, or the user's own."""

from dspark_fast.training.prompts.prompt import (
    EXCLUSIONS,
    HELD_OUT_SHARE,
    Prompt,
    is_excluded,
    is_held_out,
    make_prompt,
    repeats_held_out,
)
from dspark_fast.training.prompts.reading import read_prompts
from dspark_fast.training.prompts.stream import SHARES, training_prompts

__all__ = [
    "Prompt",
    "make_prompt",
    "training_prompts",
    "SHARES",
    "read_prompts",
    "is_held_out",
    "repeats_held_out",
    "HELD_OUT_SHARE",
    "is_excluded",
    "EXCLUSIONS",
]
