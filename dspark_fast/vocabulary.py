"""A drafter that can draft only the most frequent tokens, and so reads a part of the LM head and of W2.

What it never drafts has probability 0 in q, which is all that verification needs to know: outputs stay what they were.
It is FR-Spec's idea (Zhao et al. 2025); in a checkpoint it is written as EAGLE-3 and the speculators library do:
``draft_vocab_size`` D, and a tensor ``d2t``, int64 ``[D]``: column i of the drafter's logits is token ``i + d2t[i]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_fast.draft import DSparkDraft


@torch.no_grad()
def restricted(draft: DSparkDraft, tokens: torch.Tensor) -> DSparkDraft:
    """A copy of ``draft`` that drafts nothing but ``tokens``.

    Args:
        draft: one that can draft every token, joined to its target or not.
        tokens: int64 ``[D]``, ascending, D at least 1.

    Raises:
        ValueError: if the drafter is restricted already, or the tokens are not ascending ids of its vocabulary.
    """
    if not isinstance(draft, DSparkDraft):
        raise ValueError(f"draft is a {type(draft).__name__}: accepted is a DSparkDraft")
    if draft.vocabulary is not None:
        raise ValueError(f"this drafter is restricted to {len(draft.vocabulary)} tokens already: restrict whole(draft)")
    tokens = check_vocabulary(tokens, draft.config.vocab_size).to(draft.device)
    return _with_rows(draft, tokens, lambda w2: w2[tokens])


@torch.no_grad()
def whole(draft: DSparkDraft) -> DSparkDraft:
    """The drafter that drafts every token: itself, or a copy whose W2 is zero for tokens that it could not draft."""
    tokens, vocab_size = draft.vocabulary, draft.config.vocab_size
    if tokens is None:
        return draft
    return _with_rows(draft, None, lambda w2: w2.new_zeros(vocab_size, w2.shape[1]).index_copy_(0, tokens, w2))


def check_vocabulary(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``tokens`` itself, if they are ascending ids below ``vocab_size``.

    Raises:
        ValueError: if they are not, naming the first that is out of place.
    """
    if not isinstance(tokens, torch.Tensor):
        raise ValueError(f"tokens is a {type(tokens).__name__}: accepted is an int64 tensor [D]")
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or not len(tokens):
        raise ValueError(f"tokens is {tokens.dtype} {list(tokens.shape)}: accepted is int64 [D], D at least 1")
    before = torch.cat([tokens.new_full((1,), -1), tokens[:-1]])
    misplaced = ((tokens <= before) | (tokens >= vocab_size)).nonzero()
    if len(misplaced):
        place = int(misplaced[0])
        raise ValueError(
            f"token {int(tokens[place])} of the draft vocabulary comes after {int(before[place])}: "
            f"accepted are ascending ids below {vocab_size}"
        )
    return tokens


def _with_rows(
    draft: DSparkDraft, tokens: torch.Tensor | None, rows: Callable[[torch.Tensor], torch.Tensor]
) -> DSparkDraft:
    """A drafter of the same weights and another vocabulary, W2 put through ``rows``."""
    config = copy.deepcopy(draft.config)
    config.draft_vocab_size = None if tokens is None else len(tokens)
    state = {key: value.clone() for key, value in draft.state_dict().items()}
    name = "markov_head.markov_w2.weight"
    if name in state:
        state[name] = rows(state[name])
    with torch.device("meta"):
        other = DSparkDraft(config)
    own = {name: module for name in ("embed_tokens", "lm_head") if (module := draft._modules.get(name)) is not None}
    for name, module in own.items():
        setattr(other, name, module)
    other.load_state_dict(state, assign=True)
    other.rotary_emb = Qwen3RotaryEmbedding(config).to(draft.device)
    other.vocabulary = tokens
    if not own:
        other.share(draft.embed_tokens, draft.lm_head)
    other.take_head_rows()
    return other.requires_grad_(draft.fc.weight.requires_grad).train(draft.training)
