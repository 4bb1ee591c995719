"""Targets and drafters small enough to enumerate: tables of logits for the ops, random transformers for the loop."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
WIDTH = 6  # hidden states of gated and rnn heads
RANK = 3
POSITION = 7  # of the anchor: any
TRUSTED = (True, False, True, True, False, True)  # by token, repeated: the slot behind it may be drafted


@dataclass(frozen=True)
class TablePair:
    """p of the i-th token is a table by the token before it; q is base logits and a Markov head.

    Attributes:
        target: fp32 [n + T, V, V], logits of token i behind each token.
        base: fp32 [n + T, V], the drafter's base logits of token i.
        w1, w2: fp32 [V, R], or None twice.
        head: options of ``markov_walk`` for a gated or rnn head.
        hidden: fp32 [n + T, H], or None.
        vocabulary: int64 [D], the tokens that may be drafted; None for all.
        tokens: n, committed tokens whose law is compared.
        block: T.
    """

    target: Tensor
    base: Tensor
    w1: Tensor | None
    w2: Tensor | None
    tokens: int
    block: int
    head: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None
    vocabulary: Tensor | None = None
    anchor: int = 1

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target.shape[-1]


def table_pair(
    vocab_size: int = 4,
    tokens: int = 3,
    block: int = 3,
    *,
    head: str | None = "vanilla",
    like: float = 0.6,
    vocabulary: tuple[int, ...] | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> TablePair:
    """A random pair.

    like: the drafter's logits lean to the target's by so much, which raises acceptance; scale: of all logits.
    """
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    rows = tokens + block
    base, w1, w2 = random(rows, vocab_size), random(vocab_size, RANK), random(vocab_size, RANK) / RANK**0.5
    options, hidden = {}, None
    if head in ("gated", "rnn"):
        shape = (RANK, WIDTH + RANK) if head == "gated" else (3 * RANK, 2 * RANK + WIDTH)
        options = {"head": head, "head_weight": random(*shape), "head_bias": random(shape[0])}
        hidden = random(rows, WIDTH)
    bias = w1 @ w2.T if head is not None else 0.0
    target = like * (base[:, None] + bias) + random(rows, vocab_size, vocab_size)
    if head is None:
        w1 = w2 = None
    chosen = None if vocabulary is None else torch.tensor(vocabulary)
    base, target, w2 = base * scale, target * scale, None if w2 is None else w2 * scale
    return TablePair(target, base, w1, w2, tokens, block, options, hidden, chosen)


def adversarial(name: str) -> TablePair:
    """A pair at the edge of what floating point and supports allow; the names are keys of ``ADVERSARIAL``."""
    return ADVERSARIAL[name](table_pair(seed=11))


def _same(pair: TablePair) -> TablePair:
    return replace(pair, target=pair.base[:, None] + pair.w1 @ pair.w2.T)


def _disjoint(pair: TablePair) -> TablePair:
    even = torch.arange(pair.vocab_size) % 2 == 0
    return replace(pair, target=pair.target.masked_fill(even, -INF), base=pair.base.masked_fill(~even, -INF))


def _one_hot(pair: TablePair) -> TablePair:
    only = torch.full_like(pair.base, -INF)
    return replace(pair, base=only.scatter_(1, pair.base.argmax(1, keepdim=True), 0.0))


def _zeros(pair: TablePair) -> TablePair:
    nothing = torch.zeros_like
    return replace(pair, target=nothing(pair.target), base=nothing(pair.base), w1=nothing(pair.w1))


def _holes(pair: TablePair) -> TablePair:
    made = torch.Generator().manual_seed(5)
    target = pair.target.masked_fill(torch.rand(pair.target.shape, generator=made) < 0.4, -INF)
    base = pair.base.masked_fill(torch.rand(pair.base.shape, generator=made) < 0.4, -INF)
    target[..., 0], base[..., 1] = pair.target[..., 0], pair.base[..., 1]  # no row without a token
    return replace(pair, target=target, base=base)


def _near_ties(pair: TablePair) -> TablePair:
    return replace(pair, target=3 + pair.target / 256, base=3 + pair.base / 256, w1=pair.w1 / 256)


def _offset(pair: TablePair) -> TablePair:
    return replace(pair, target=pair.target + 100, base=pair.base + 100)


ADVERSARIAL = {
    "p-is-q": _same,
    "disjoint-supports": _disjoint,
    "one-hot-q": _one_hot,
    "zeros": _zeros,
    "holes": _holes,
    "near-ties": _near_ties,
    "offset-100": _offset,
}


@functools.lru_cache(maxsize=32)
def model_pair(
    head: str | None = "vanilla", block: int = 3, vocab_size: int = 4, vocabulary: tuple[int, ...] | None = None
) -> tuple[Any, Any]:
    """A Llama of two layers and a drafter of one, random, that agree now and then; the drafter trusts some tokens.

    Its confidence head trusts the slots behind ``TRUSTED`` tokens alone, so a cut hangs on what was drafted before it.
    """
    import transformers

    from dspark_fast import DSparkConfig, DSparkDraft
    from dspark_fast.vocabulary import restricted

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=1.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        rank = 0 if head is None else vocab_size - 1
        options = {"markov_head_type": head or "vanilla", "markov_rank": rank, "num_hidden_layers": 1}
        options |= {"target_layer_ids": [0], "initializer_range": 1.0, "intermediate_size": 8, "block_size": block}
        draft = DSparkDraft(DSparkConfig.from_target(config, **options)).tie_to(model).eval()
    if rank:
        with torch.no_grad():
            known = torch.cat([draft.markov_head.markov_w1.weight, torch.ones(vocab_size, 1)], 1)
            wish = torch.tensor([3.0 if trusted else -3.0 for trusted in TRUSTED[:vocab_size]])
            trust = torch.linalg.solve(known, wish)
            draft.confidence_head.proj.weight[0] = torch.cat([torch.zeros(8), trust[:rank]])
            draft.confidence_head.proj.bias[0] = trust[rank]
    return model, draft if vocabulary is None else restricted(draft, torch.tensor(vocabulary))
