"""``past_key_values`` of a target behind its own cache: a chat goes on from the end of what was read."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

from dspark_fast.drafters import Context
from dspark_fast.engine.own_cache import OwnState
from dspark_fast.engine.past import Past


class OwnPast(Past):
    """What :class:`~dspark_fast.engine.own_cache.OwnCacheTarget` knows of one row.

    A recurrent state has no shorter one in it, and a window no longer holds what has left it: a prompt has to go on
    from all of it, or is read anew.

    Args:
        state: of the target; taken over.
        tokens: int64 ``[1, C]``: what the state is of.
        context, model: as for :class:`~dspark_fast.engine.past.Past`.
    """

    def __init__(self, state: OwnState, tokens: torch.Tensor, context: Context | None, model: PreTrainedModel) -> None:
        super().__init__(state.cache, tokens, context, model)
        self._state = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._state.length

    def state(self) -> OwnState:
        """A copy: several calls may go on from the same past."""
        return copy.deepcopy(self._state)

    def common(self, prompts: torch.Tensor, prompt_lengths: torch.Tensor) -> torch.Tensor:
        """How many tokens need not be read again, int64 ``[1]``: all of them or none."""
        known = self._state.length
        whole = known < int(prompt_lengths) and torch.equal(prompts[:, :known], self.tokens[:, :known])
        return torch.full_like(prompt_lengths, known if whole else 0)
