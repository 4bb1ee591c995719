"""The table of rows: what is drawn, from which law, and from how many draws.

Three levels: ``op`` (the reference's walk and verification alone), ``kernel`` (the Triton twins, interpreted: far
slower, so fewer draws) and ``loop`` (``dspark_fast.generate`` on tiny transformers).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dspark_fast.losslessness import law
from dspark_fast.losslessness.gtest import ALARM, p_value, sample_size
from dspark_fast.losslessness.loop import LoopPair, generated
from dspark_fast.losslessness.pairs import ADVERSARIAL, TablePair, adversarial, model_pair, table_pair
from dspark_fast.losslessness.rounds import committed, walked

#: The total variation that a row sees with power 0.99: (fixed subset, whole suite).
DISTANCE = {"op": (0.02, 0.01), "kernel": (0.3, 0.2), "loop": (0.05, 0.01)}


@dataclass(frozen=True)
class Row:
    """One law and the way to draw from it.

    Attributes:
        name: unique; its first part says what is drawn.
        level: ``op``, ``kernel`` or ``loop``.
        laws: gives the law of each group, float64 [cells]; group g is every row i with i modulo their number = g.
        draw: ``(draws, seed)`` -> tokens [draws, n], of ``vocab_size``.
        vocab_size, tokens: V and n of what is drawn.
        window: the tokens that are compared, all by default.
        slow: left out of the fixed subset.
    """

    name: str
    level: str
    laws: Callable[[], tuple[Tensor, ...]]
    draw: Callable[[int, int], Tensor]
    vocab_size: int
    tokens: int
    window: tuple[int, int] | None = None
    slow: bool = False

    @property
    def level_of_alarm(self) -> float:
        """The p-value below which this row alarms."""
        return ALARM / len(ROWS)

    @cache  # noqa: B019  rows live as long as the module
    def compared(self) -> tuple[Tensor, ...]:
        """The laws of the tokens that are compared."""
        whole = (0, self.tokens)
        window = self.window or whole
        return tuple(law.marginal(one, self.vocab_size, self.tokens, window) for one in self.laws())

    def draws(self, *, subset: bool) -> int:
        """Sample size, by the power calculation."""
        freedom = sum(int((one > 0).sum()) - 1 for one in self.compared())
        return sample_size(freedom, self.distance(subset=subset), self.level_of_alarm)

    def distance(self, *, subset: bool) -> float:
        """The total variation that is seen with power 0.99."""
        return DISTANCE[self.level][0 if subset else 1]

    def p_value(self, draws: int, seed: int) -> float:
        """Of one seeded run. Rows draw from seeds of their own: coupled ones would often be the same tokens."""
        tokens, laws = self.draw(draws, (seed << 32) + zlib.crc32(self.name.encode())), self.compared()
        start, stop = self.window or (0, self.tokens)
        groups = [tokens[group :: len(laws), start:stop] for group in range(len(laws))]
        return p_value([(law.counted(one, self.vocab_size), exact) for one, exact in zip(groups, laws)])


def _walk(name: str, pair: TablePair, **settings: Any) -> Row:
    settings = {"temperature": 1.0, **settings}
    exact = {key: settings[key] for key in ("temperature", "candidates", "logits_dtype") if key in settings}
    return Row(
        f"walk {name}",
        "kernel" if settings.get("backend") == "kernel" else "op",
        lambda: (law.walk_law(pair, exact),),
        lambda draws, seed: walked(pair, draws, seed, {"backend": "reference", **settings}),
        pair.vocab_size,
        pair.block,
    )


def _rounds(name: str, pair: TablePair, *, window: tuple[int, int] | None = None, **settings: Any) -> Row:
    def laws() -> tuple[Tensor, ...]:
        tables = pair.target[: pair.tokens]
        return tuple(
            law.chain_law(law.probabilities(tables, **cuts), pair.anchor) for cuts in settings.get("cuts", ({},))
        )

    return Row(
        f"{settings.get('mode', 'rejection')} {name}",
        "kernel" if settings.get("backend") == "kernel" else "op",
        laws,
        lambda draws, seed: committed(pair, draws, seed, **settings),
        pair.vocab_size,
        pair.tokens,
        window,
    )


CUTS = {
    "temperature-0.7": ({"temperature": 0.7},),
    "temperature-1.6": ({"temperature": 1.6},),
    "top-k": ({"top_k": 2},),
    "top-p": ({"top_p": 0.7},),
    "min-p": ({"min_p": 0.2},),
    "all-cuts": ({"temperature": 1.3, "top_k": 3, "top_p": 0.85, "min_p": 0.1},),
    "each-row-its-own": ({"temperature": 0.7}, {"top_k": 2}, {"temperature": 1.4, "top_p": 0.8}, {"min_p": 0.15}),
}


def _op_rows() -> list[Row]:
    heads = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn", "none": None}
    rows = [_walk(f"{name}-head", table_pair(head=head)) for name, head in heads.items()]
    rows += [
        _walk("coupled", table_pair(), coupled=True),
        _walk("temperature-0.7", table_pair(), temperature=0.7),
        _walk("restricted-vocabulary", table_pair(vocabulary=(0, 2, 3))),
        _walk("candidates", table_pair(), candidates=2),
        _walk("bf16-logits", adversarial("offset-100"), logits_dtype=torch.bfloat16),
        _walk("offset-100", adversarial("offset-100")),
        _walk("32-tokens", table_pair(32, 1, 1)),
    ]
    for mode in ("rejection", "coupled"):
        rounds = partial(_rounds, mode=mode)
        rows += [rounds(f"{name}-head", table_pair(head=head, block=2)) for name, head in heads.items()]
        rows += [rounds(name, table_pair(), cuts=cuts) for name, cuts in CUTS.items()]
        rows += [rounds(name, adversarial(name)) for name in ADVERSARIAL]
        rows.append(rounds("temperature-0.05", table_pair(scale=0.06), cuts=({"temperature": 0.05},)))
        rows += [
            rounds("restricted-vocabulary", table_pair(vocabulary=(0, 2, 3))),
            rounds("ragged-lengths", table_pair(), policy="ragged"),
            rounds("confidence-cut", table_pair(), policy="confident"),
            rounds("cut-by-discarded-drafts", table_pair(), policy="discarded"),
            rounds("block-1", table_pair(block=1)),
            rounds("block-7-last-tokens", table_pair(3, 8, 7, like=2.0), window=(6, 8)),
            rounds("32-tokens", table_pair(32, 2, 2), window=(1, 2)),
        ]
    rows.append(_rounds("candidates", table_pair(head=None), candidates=2))
    return rows


def _kernel_rows() -> list[Row]:
    return [
        _walk("vanilla-head, kernel", table_pair(block=1), backend="kernel"),
        _rounds("block-2, kernel", table_pair(4, 1, 2), backend="kernel"),
        _rounds("block-1, kernel", table_pair(4, 1, 1), mode="coupled", backend="kernel"),
        replace(_rounds("top-p, kernel", table_pair(4, 1, 1), cuts=CUTS["top-p"], backend="kernel"), slow=True),
    ]


RAGGED = ((1, 3, 2), (2,), (3, 1, 0, 2, 1), (0, 2))
WARM = {"temperature": 2.0}  # colder, these targets and drafters agree too seldom


def _loop(name: str, pair: dict[str, Any] | None = None, tokens: int = 3, **settings: Any) -> Row:
    pair = {"vocab_size": 4, **(pair or {})}
    made = LoopPair(partial(model_pair, **pair), tokens=tokens, **{"cuts": WARM, **settings})
    name = f"loop {made.verification} {name}"
    return Row(name, "loop", made.laws, partial(generated, made), pair["vocab_size"], tokens, made.window)


def _loop_rows() -> list[Row]:
    coupled = {"verification": "coupled"}
    return [
        *(_loop(f"{head or 'no'}-head", {"head": head}) for head in ("vanilla", "gated", "rnn", None)),
        _loop("top-k", cuts={"temperature": 2.0, "top_k": 3}),
        _loop("top-p", cuts={"temperature": 2.5, "top_p": 0.8}),
        _loop("min-p", cuts={"temperature": 2.5, "min_p": 0.15}),
        _loop("confidence-cut", {"block": 4}, options={"confidence_threshold": 0.5}),
        _loop("ragged-batch", prompts=RAGGED),
        _loop("stop-token", {"block": 5}, tokens=4, stop=1),
        _loop("restricted-vocabulary", {"vocabulary": (0, 2, 3)}),
        _loop("block-1", {"block": 1}),
        _loop("block-7-last-tokens", {"block": 7, "vocab_size": 3}, tokens=8, window=(6, 8), prompts=((1, 0, 2),)),
        _loop("vanilla-head", **coupled),
        _loop("confidence-cut", {"block": 4}, options={"confidence_threshold": 0.5}, **coupled),
        _loop("ragged-batch-stop-token", {"block": 5}, prompts=RAGGED, stop=1, **coupled),
    ]


ROWS: tuple[Row, ...] = (*_op_rows(), *_kernel_rows(), *_loop_rows())
