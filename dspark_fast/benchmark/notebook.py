"""The loop of the notebook that DSpark is explained with: plain to read, and what a round costs without an engine."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.taps import tapped
from dspark_fast.reference import draft_block


class Decoded(NamedTuple):
    """What :func:`by_reference` gave.

    Attributes:
        tokens: int64 ``[1, n]``.
        rounds: after the first token.
        seconds: after the first token, and ``first`` until then.
        drafting, verifying: seconds of the drafter and the target in the rounds; on a GPU they only say when the host
            had queued the work.
        accepted: drafts accepted in each round.
    """

    tokens: torch.Tensor
    rounds: int
    seconds: float
    first: float
    drafting: float
    verifying: float
    accepted: list[int]


@torch.no_grad()
def by_reference(
    model: PreTrainedModel,
    draft: DSparkDraft,
    ids: torch.Tensor,
    new_tokens: int,
    table: torch.Tensor | None = None,
    *,
    cached: bool,
) -> Decoded:
    """One row, greedily, with ``dspark_fast.reference.draft_block``, which projects the whole context every round.

    Args:
        ids: int64 ``[1, S]``.
        new_tokens: how many are decoded, stop tokens or not.
        table: drafts for every anchor, int64 ``[1, N, T]``, to put in the place of the drafter's, which is run all the
            same; None keeps its own.
        cached: the target has its own ``DynamicCache``, cropped after every round, as in the notebook; otherwise it
            reads the whole text again every round.
    """
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    start, accepted_of = ids.shape[1], []
    cache = DynamicCache(config=model.config) if cached else None
    settings = {"past_key_values": cache, "use_cache": cached}
    drafting = verifying = 0.0
    wait()
    entered = time.perf_counter()
    with tapped(model, draft.config.target_layer_ids) as taps:
        first = model(input_ids=ids, logits_to_keep=1, **settings).logits.argmax(-1)
        features, text = taps.take(), torch.cat([ids, first], dim=1)
        wait()
        begun = time.perf_counter()
        while text.shape[1] < start + new_tokens:
            known, at = text.shape[1] - 1, time.perf_counter()
            drafts = draft_block(draft, features, text[:, -1]).tokens
            if table is not None:
                drafts = table[:, known - start]
            drafted = time.perf_counter()
            block = torch.cat([text[:, -1:], drafts], dim=1)
            read = block if cached else torch.cat([text[:, :-1], block], dim=1)
            said = model(input_ids=read, logits_to_keep=block.shape[1], **settings).logits.argmax(-1)
            accepted = int((said[0, :-1] == drafts[0]).long().cumprod(0).sum())
            drafting, verifying = drafting + drafted - at, verifying + time.perf_counter() - drafted
            dropped = drafts.shape[1] - accepted
            text = torch.cat([text, said[:, : accepted + 1]], dim=1)
            new = taps.take()
            if cached:
                if dropped:
                    cache.crop(-dropped)
                features = torch.cat([features, new[:, : accepted + 1]], dim=1)
            else:
                features = new[:, : text.shape[1] - 1]
            accepted_of.append(accepted)
        wait()
        end = time.perf_counter()
    tokens = text[:, start : start + new_tokens]
    return Decoded(tokens, len(accepted_of), end - begun, begun - entered, drafting, verifying, accepted_of)
