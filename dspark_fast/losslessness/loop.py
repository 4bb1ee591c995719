"""Seeded draws from ``dspark_fast.generate`` itself, thousands of rows a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark_fast import reference
from dspark_fast.losslessness.law import model_law

AT_ONCE = 1 << 15  # rows a call


@dataclass(frozen=True, eq=False)
class LoopPair:
    """A call of ``generate`` that is drawn from.

    Attributes:
        make: gives the model and the drafter.
        tokens: new tokens of each row.
        cuts: temperature and cuts.
        prompts: row i of a batch has prompt i modulo their number; shorter ones are padded on the left.
        stop: a token that ends a row; None for none.
        verification, options: further arguments of ``generate``.
        window: the new tokens that are compared; None for all.
    """

    make: Callable[[], tuple[Any, Any]]
    tokens: int
    cuts: dict[str, Any]
    prompts: Sequence[Sequence[int]] = ((1, 3, 2),)
    stop: int | None = None
    verification: str = "rejection"
    options: dict[str, Any] = field(default_factory=dict)
    window: tuple[int, int] | None = None

    def laws(self) -> tuple[Tensor, ...]:
        """The exact law of each prompt's new tokens."""
        model, _ = self.make()
        return tuple(model_law(model, prompt, self.tokens, self.cuts, self.stop) for prompt in self.prompts)

    def arguments(self, rows: int) -> dict[str, Any]:
        """What ``generate`` of either library is called with, but for the noise."""
        width = max(map(len, self.prompts))
        padded = torch.tensor([[0] * (width - len(one)) + list(one) for one in self.prompts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in self.prompts])
        order = torch.arange(rows) % len(self.prompts)
        stop = {} if self.stop is None else {"eos_token_id": self.stop}
        return {
            "input_ids": padded[order],
            "attention_mask": mask[order],
            "max_new_tokens": self.tokens,
            "pad_token_id": 0,
            **stop,
        }


def generated(pair: LoopPair, rows: int, seed: int, at_once: int = AT_ONCE) -> Tensor:
    """New tokens of ``rows`` sequences, padded with 0 to [rows, n]."""
    import dspark_fast

    model, draft = pair.make()
    at_once -= at_once % len(pair.prompts)  # every call begins with the first prompt
    found = []
    for seeds in reference.expand_seeds(seed, rows).split(at_once):
        given = pair.arguments(len(seeds))
        width = given["input_ids"].shape[1]
        out = dspark_fast.generate(
            model,
            draft,
            **given,
            do_sample=True,
            seed=seeds,
            verification=pair.verification,
            **{"off_switch": False, "top_k": 0, **pair.cuts, **pair.options},
        )[:, width:]
        found.append(torch.nn.functional.pad(out, (0, pair.tokens - out.shape[1])))
    return torch.cat(found)
