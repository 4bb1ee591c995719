"""Exact laws by enumeration, in float64: the target's, and the walk's. No line of sampling or verification runs here.

A law of n tokens is a float64 tensor [V^n]; a sequence's cell is its number in base V, its first token the highest
digit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_fast.reference.markov import markov_bias


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """softmax(l / T) with transformers' cuts, written for the eye: [..., V] -> float64 [..., V]. T = 0: the argmax."""
    vocab_size = logits.shape[-1]
    logits = logits.double()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).double()
    p = (logits / temperature).softmax(-1)
    if 0 < top_k < vocab_size:
        p = p * (p >= p.topk(top_k, -1).values[..., -1:])
        p = p / p.sum(-1, keepdim=True)
    if top_p < 1:
        above = (p[..., None, :] * (p[..., None, :] > p[..., :, None])).sum(-1)
        p = p * (above < top_p)
        p = p / p.sum(-1, keepdim=True)
    if min_p > 0:
        p = p * (p >= min_p * p.amax(-1, keepdim=True))
        p = p / p.sum(-1, keepdim=True)
    return p


def chain_law(tables: Tensor, anchor: int) -> Tensor:
    """Of tokens that depend on the one before them: tables float64 [n, V, V], row of the token before -> [V^n]."""
    vocab_size = tables.shape[-1]
    law = torch.ones(1, dtype=torch.float64)
    before = torch.tensor([anchor])
    for table in tables:
        law = (law[:, None] * table[before]).flatten()
        before = torch.arange(vocab_size).repeat(len(law) // vocab_size)
    return law


def walk_law(pair, settings: dict) -> Tensor:
    """Of the T tokens that a walk from the pair's anchor drafts: [V^T], by teacher-forcing every block."""
    block, vocab_size = pair.block, pair.vocab_size
    blocks = torch.tensor(list(itertools.product(range(vocab_size), repeat=block)))
    before = torch.cat([torch.full((len(blocks), 1), pair.anchor), blocks[:, :-1]], 1)
    logits = pair.base[:block].double().expand(len(blocks), -1, -1)
    if pair.w1 is not None:
        weights = {name: value if isinstance(value, str) else value.double() for name, value in pair.head.items()}
        hidden = None if pair.hidden is None else pair.hidden[:block].double().expand(len(blocks), -1, -1)
        logits = logits + markov_bias(before, pair.w1.double(), pair.w2.double(), hidden=hidden, **weights)
    if pair.vocabulary is not None:
        outside = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, pair.vocabulary, False)
        logits = logits.masked_fill(outside, -torch.inf)
    if candidates := settings.get("candidates", 0):
        smallest = pair.base[:block].topk(candidates, -1).values[..., -1:]
        logits = logits.masked_fill(pair.base[:block] < smallest, -torch.inf)
    if dtype := settings.get("logits_dtype"):
        logits = logits.float().to(dtype).double()
    q = probabilities(logits, settings["temperature"])
    return q.gather(-1, blocks[..., None])[..., 0].prod(-1)


@torch.no_grad()
def model_law(model, prompt: Sequence[int], tokens: int, cuts: dict, stop: int | None = None) -> Tensor:
    """Of the next ``tokens`` tokens of a transformers model: [V^tokens]. After a stop token there is padding, id 0."""
    vocab_size = model.config.vocab_size
    law = torch.ones(1, dtype=torch.float64)
    prefixes = torch.empty(1, 0, dtype=torch.int64)
    for _ in range(tokens):
        ids = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], 1)
        p = probabilities(model(ids).logits[:, -1], **cuts)
        if stop is not None:
            stopped = (prefixes == stop).any(1)
            p[stopped] = torch.nn.functional.one_hot(torch.tensor(0), vocab_size).double()
        law = (law[:, None] * p).flatten()
        following = torch.arange(vocab_size).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab_size, 0), following], 1)
    return law


def marginal(law: Tensor, vocab_size: int, tokens: int, window: tuple[int, int]) -> Tensor:
    """The law of tokens ``window[0] .. window[1] - 1`` alone."""
    start, stop = window
    return law.reshape(vocab_size**start, vocab_size ** (stop - start), vocab_size ** (tokens - stop)).sum((0, 2))


def counted(tokens: Tensor, vocab_size: int) -> Tensor:
    """How often each cell was drawn: int64 [N, n] -> int64 [V^n]. A token outside the vocabulary is an error."""
    if len(tokens) and not (0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size):
        raise ValueError(f"drawn tokens run from {int(tokens.min())} to {int(tokens.max())}: V is {vocab_size}")
    weights = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return (tokens * weights).sum(1).bincount(minlength=vocab_size ** tokens.shape[1])
