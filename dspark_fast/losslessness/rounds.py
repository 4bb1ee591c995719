"""Seeded draws from the two ops alone, over a table pair: rounds without a model, thousands of rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dspark_fast import ops, reference
from dspark_fast.losslessness.pairs import POSITION, TRUSTED, TablePair

CHUNK = 1 << 16  # rows at a time, so that they stay in the processor's caches
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# (round, rows [B], anchor [B], drafts [B, T], the last round's discarded draft for the first slot [B] or -1) -> lengths
Policy = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


def full(number: int, rows: Tensor, anchor: Tensor, drafts: Tensor, discarded: Tensor) -> Tensor:
    """The whole block."""
    return torch.full_like(anchor, drafts.shape[1])


def ragged(number: int, rows: Tensor, anchor: Tensor, drafts: Tensor, discarded: Tensor) -> Tensor:
    """0 .. T, row by row."""
    return (rows + number) % (drafts.shape[1] + 1)


def confident(number: int, rows: Tensor, anchor: Tensor, drafts: Tensor, discarded: Tensor) -> Tensor:
    """Up to the first slot behind a token that is not trusted: a cut that reads what was drafted before it."""
    trusted = torch.tensor(TRUSTED)[torch.cat([anchor[:, None], drafts[:, :-1]], 1) % len(TRUSTED)]
    return trusted.long().cumprod(1).sum(1)


def discarded(number: int, rows: Tensor, anchor: Tensor, drafts: Tensor, discarded: Tensor) -> Tensor:
    """Nothing where the last round had drafted an even token for the slot that comes first now, and discarded it."""
    return torch.where((discarded >= 0) & (discarded % 2 == 0), 0, drafts.shape[1])


POLICIES = {"full": full, "ragged": ragged, "confident": confident, "discarded": discarded}


def chunks(seed: int, rows: int, at_once: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and their seeds."""
    seeds = reference.expand_seeds(seed, rows)
    numbers = torch.arange(rows)
    return zip(numbers.split(at_once), seeds.split(at_once))


def draft(pair: TablePair, first: Tensor, anchor: Tensor, seeds: Tensor, settings: dict):
    """One walk of each row, its first draft being token ``first`` [B] of the pair's tables."""
    slots = first[:, None] + torch.arange(pair.block)
    base, w2 = pair.base[slots], pair.w2
    if pair.vocabulary is not None:
        base, w2 = base[..., pair.vocabulary], None if w2 is None else w2[pair.vocabulary]
    return ops.markov_walk(
        base,
        pair.w1,
        w2,
        anchor,
        seed=seeds,
        position=POSITION + first,
        hidden=None if pair.hidden is None else pair.hidden[slots],
        vocabulary=pair.vocabulary,
        **pair.head,
        **settings,
    )


def walked(pair: TablePair, rows: int, seed: int, settings: dict) -> Tensor:
    """The drafts of ``rows`` walks: [rows, T]."""
    found = []
    for numbers, seeds in chunks(seed, rows):
        zeros = torch.zeros_like(numbers)
        found.append(draft(pair, zeros, zeros + pair.anchor, seeds, settings).tokens)
    return torch.cat(found)


def committed(
    pair: TablePair,
    rows: int,
    seed: int,
    *,
    mode: str = "rejection",
    policy: str = "full",
    cuts: tuple[dict, ...] = ({},),
    backend: str = "reference",
    candidates: int = 0,
    accepted: list[Tensor] | None = None,
) -> Tensor:
    """The first n tokens of ``rows`` sequences: [rows, n], by as many rounds of walk and verification as it takes.

    cuts: settings of the target; row i has the (i modulo their number)-th. ``accepted`` collects each round's counts.
    """
    found = []
    for numbers, seeds in chunks(seed, rows):
        tokens = torch.zeros(len(numbers), pair.tokens + pair.block + 1, dtype=torch.int64)
        lengths = torch.zeros_like(numbers)
        last = torch.full((len(numbers), pair.block), -1)  # the last round's drafts, from its first rejected slot on
        values = {name: torch.tensor([{**NEUTRAL, **cut}[name] for cut in cuts]) for name in NEUTRAL}
        alive, number = torch.arange(len(numbers)), 0
        while len(alive):
            start, own = lengths[alive], numbers[alive]
            anchor = torch.where(start == 0, pair.anchor, tokens[alive, start - 1])
            # A cut that all rows have is a number, as a user gives it: neutral ones then cost nothing.
            settings = {name: one[own % len(one)] if len(one) > 1 else one.item() for name, one in values.items()}
            keep = {"keep_logits": mode == "rejection", "coupled": mode == "coupled", "candidates": candidates}
            keep |= {"temperature": settings["temperature"], "backend": backend}
            walk = draft(pair, start, anchor, seeds[alive], keep)
            drafts = POLICIES[policy](number, own, anchor, walk.tokens, last[alive, 0])
            before = torch.cat([anchor[:, None], walk.tokens], 1)
            kept, following = ops.verify(
                pair.target[start[:, None] + torch.arange(pair.block + 1), before],
                walk.tokens,
                _of_all_tokens(pair, walk.logits),
                drafts,
                seed=seeds[alive],
                position=POSITION + start,
                mode=mode,
                draft_row_max=walk.row_max,
                draft_log_sum=walk.log_sum,
                backend=backend,
                **settings,
            )
            run = torch.cat([walk.tokens, following[:, None]], 1).scatter_(1, kept[:, None], following[:, None])
            # What lies behind a row's run is overwritten by its next one.
            tokens[alive[:, None], (start[:, None] + torch.arange(pair.block + 1)).clamp(max=tokens.shape[1] - 1)] = run
            beyond = torch.cat([walk.tokens, torch.full_like(walk.tokens, -1), torch.full_like(anchor, -1)[:, None]], 1)
            last[alive] = beyond.gather(1, kept[:, None] + 1 + torch.arange(pair.block))
            if accepted is not None:
                accepted.append(kept)
            lengths[alive] = start + kept + 1
            alive, number = alive[lengths[alive] < pair.tokens], number + 1
        found.append(tokens[:, : pair.tokens])
    return torch.cat(found)


def _of_all_tokens(pair: TablePair, logits: Tensor | None) -> Tensor | None:
    """[B, T, D] -> [B, T, V], -inf for tokens that are never drafted."""
    if logits is None or pair.vocabulary is None:
        return logits
    whole = logits.new_full((*logits.shape[:2], pair.vocab_size), -torch.inf)
    return whole.index_copy_(2, pair.vocabulary, logits)
