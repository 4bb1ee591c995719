"""transformers' stopping criteria, row by row: each committed token is shown to them as a plain step would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria, MaxTimeCriteria, StopStringCriteria


def check_criteria(criteria: Sequence[StoppingCriteria]) -> None:
    """Raise for a criterion that cannot work here.

    Raises:
        ValueError: naming the class.
    """
    for item in criteria:
        if isinstance(item, ConfidenceCriteria):
            raise ValueError(
                f"the stopping criterion {type(item).__name__} reads the scores of every step, which are not kept: "
                "it is not supported"
            )


def stop_string_criterion(stop_strings: str | Sequence[str], tokenizer: Any) -> StopStringCriteria:
    """transformers' criterion for ``stop_strings`` and ``tokenizer``, which it cannot make for a callable by itself.

    Raises:
        ValueError: without a tokenizer, or for an empty list or string.
    """
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings is {stop_strings!r}: accepted are a string or a list of them, none empty")
    if tokenizer is None:
        raise ValueError(f"stop_strings is {stop_strings!r}, but there is no tokenizer: give tokenizer as well")
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)


class Stopping:
    """All criteria but those of length and stop tokens, which the device does.

    A criterion is called as in a plain step, but for one row: ``input_ids`` int64 ``[1, L]`` up to and including a
    token that the row has just committed, with the padding on the left as the user gave it, and ``scores`` None. One
    that keeps a count of its calls, or knows rows by their place, would count otherwise than in plain decoding.

    Args:
        criteria: without ``MaxLengthCriteria`` and ``EosTokenCriteria``.
        input_ids: int64 ``[B, S]``, left-padded, as the user gave them.
        new_tokens: the most that a row can commit.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], input_ids: torch.Tensor, new_tokens: int) -> None:
        batch, width = input_ids.shape
        self._lengths = [width] * batch
        self._criteria: list[tuple[StoppingCriteria, torch.Tensor]] = []
        self._rows: dict[torch.device, torch.Tensor] = {}
        for item in criteria:
            # transformers' own are faster on the CPU, where their answer needs no wait for the device; somebody's own
            # may hold tensors that are where the model is.
            local = type(item) in (MaxTimeCriteria, StopStringCriteria)
            device = torch.device("cpu") if local else input_ids.device
            if device not in self._rows:
                self._rows[device] = torch.zeros(batch, width + new_tokens, dtype=torch.long, device=device)
                self._rows[device][:, :width] = input_ids
            self._criteria.append((item, self._rows[device]))

    def first_stop(self, row: int, tokens: Sequence[int]) -> int | None:
        """Take what a row has just committed.

        Args:
            row: which.
            tokens: in order. Those that do not stand are forgotten.

        Returns:
            How many of them stand: up to and including the first after which a criterion says stop; None if none does.
        """
        start = self._lengths[row]
        for ids in self._rows.values():
            ids[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        for count in range(1, len(tokens) + 1):
            self._lengths[row] = start + count
            shown = slice(0, start + count)
            # All of them are asked, as in a plain step, even behind one that says stop.
            answers = [bool(item(ids[row : row + 1, shown], None)) for item, ids in self._criteria]
            if any(answers):
                return count
        return None
