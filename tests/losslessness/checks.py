"""Checks that need no law: decisions under planted noise, rates of rare tokens word by word, tokens draw by draw."""

from __future__ import annotations

import math

import torch
from planted import words

import dspark_fast
from dspark_fast import ops
from dspark_fast.gumbel import GumbelMax
from dspark_fast.losslessness.loop import LoopPair
from dspark_fast.losslessness.pairs import model_pair, table_pair
from dspark_fast.losslessness.rounds import committed
from dspark_fast.reference.sampling import ACCEPT, DRAFT, TARGET

INF = float("inf")
EQUALITY_ROWS = 64
KERNEL_ROWS = 24
EDGE = 4096  # words looked at, at either end of 0 .. 2^32 - 1
TAIL_DRAWS = 2 * EDGE
RARE = (1e-6, 1e-7, 1e-8)
RAGGED = ((1, 3, 2), (2,), (3, 1, 0, 2, 1), (0, 2))
AT = {"temperature": 1.0, "seed": 3, "position": 5}


def drawn_by_the_walk(logits: torch.Tensor) -> torch.Tensor:
    """One token of each row of ``logits`` [B, V], by the walk."""
    return ops.markov_walk(logits[:, None], None, None, torch.zeros(len(logits)).long(), **AT).tokens[:, 0]


def drawn_by_verification(logits: torch.Tensor) -> torch.Tensor:
    """The same by verification without drafts, as a first token and a bonus are drawn."""
    none = torch.zeros(len(logits)).long()
    return ops.verify(logits[:, None], none[:, None][:, :0], None, none, **AT)[1]


def coupled(logits: torch.Tensor) -> torch.Tensor:
    """The same in coupled mode."""
    none = torch.zeros(len(logits)).long()
    return ops.verify(logits[:, None], none[:, None][:, :0], None, none, mode="coupled", **AT)[1]


DOORS = {"walk": (drawn_by_the_walk, DRAFT), "bonus": (drawn_by_verification, TARGET), "coupled": (coupled, DRAFT)}


def keeps_words_of_zero_finite() -> None:
    """The least word makes its token win if it can be drawn at all, and never if it cannot."""
    for name, (draw, stream) in DOORS.items():
        with words({(stream, 2): 0}):
            found = draw(torch.tensor([[0.0, 0, 0, 0], [0, 0, -INF, 0]])).tolist()
        assert found == [2, 0], f"{name} draws {found} under the word 0 at token 2"


def accepts_the_impossible() -> None:
    """A draft of p = 0 is rejected under u = 0; one of p = q is kept under the largest u."""
    target = torch.tensor([[-INF, 0.0, 0.0], [0.0, 0.0, 0.0]])[:, None].expand(2, 2, 3)
    with words({(ACCEPT, 0): torch.tensor([0, 2**32 - 1])}):
        draft = torch.zeros(2, 1, 3)
        kept, _ = ops.verify(target, torch.zeros(2, 1).long(), draft, torch.ones(2).long(), **AT)
    assert kept.tolist() == [0, 1], f"of p = 0 under u = 0 and p = q under the largest u, {kept.tolist()} are kept"


def accepts_what_16_bits_cannot_tell() -> None:
    """q = 1 and p = 2^-20, then 2^-18: u = 2^-19 rejects the first and keeps the second."""
    odds = torch.tensor([2.0**-20, 2.0**-18])
    target = torch.stack([odds.log(), (1 - odds).log()], 1)[:, None].expand(2, 2, 2)
    draft = torch.tensor([0.0, -INF]).expand(2, 1, 2)
    with words({(ACCEPT, 0): 1 << 13}):
        kept, _ = ops.verify(target, torch.zeros(2, 1).long(), draft, torch.ones(2).long(), **AT)
    assert kept.tolist() == [0, 1], f"of p = 2^-20 and 2^-18 under u = 2^-19, {kept.tolist()} are kept"


def winning_words(draw, stream: int, p: float) -> int:
    """Of all 2^32 words, how many let a token of probability p beat one of 1 - p whose word is the middle one.

    Only the ends are tried: a token as rare as this wins under nothing else.
    """
    ends = torch.cat([torch.arange(EDGE), 2**32 - EDGE + torch.arange(EDGE)])
    logits = torch.tensor([math.log1p(-p), math.log(p)]).expand(len(ends), 2)
    with words({(stream, 1): ends}):
        return int((draw(logits) == 1).sum())


def should_win(p: float) -> float:
    """The same for exact numbers: e < p / (1 - p) log 2."""
    return -math.expm1(-p / (1 - p) * math.log(2)) * 2.0**32


def rare_tokens_at_their_rate() -> None:
    """1 % for a probability of 1e-6, and one word more or less where only some dozens win."""
    for name, (draw, stream) in DOORS.items():
        for p in RARE:
            found, exact = winning_words(draw, stream, p), should_win(p)
            assert abs(found - exact) <= max(1.0, 0.002 * exact), f"{name}: {found} words of {exact:.1f} at p = {p}"


def gumbel_max(pair: LoopPair, seeds: torch.Tensor) -> torch.Tensor:
    """The same call with plain Gumbel-max sampling inside transformers' own ``generate``: [rows, n], padded with 0."""
    model, _ = pair.make()
    given = pair.arguments(len(seeds))
    noise = GumbelMax(seed=seeds, attention_mask=given["attention_mask"], **{"top_k": 0, **pair.cuts})
    return model.generate(**given, do_sample=False, logits_processor=[noise])


def speculated(pair: LoopPair, seeds: torch.Tensor) -> torch.Tensor:
    """``dspark_fast.generate`` with these seeds: [rows, S + n]."""
    model, draft = pair.make()
    return dspark_fast.generate(
        model,
        draft,
        **pair.arguments(len(seeds)),
        do_sample=True,
        seed=seeds,
        off_switch=False,
        verification=pair.verification,
        **{"top_k": 0, **pair.cuts},
        **pair.options,
    )


def as_gumbel_max() -> None:
    """Coupled decoding gives plain sampling's tokens."""
    pair = LoopPair(model_pair, 6, {"temperature": 2.0}, verification="coupled", prompts=RAGGED)
    seeds = torch.arange(EQUALITY_ROWS) * 7919
    other = int((speculated(pair, seeds) != gumbel_max(pair, seeds)).any(1).sum())
    assert not other, f"{other} of {EQUALITY_ROWS} rows differ from plain Gumbel-max sampling"


def alone_as_in_a_batch() -> None:
    """A row has the tokens that its seed gives it alone."""
    pair = LoopPair(model_pair, 6, {"temperature": 2.0})
    seeds = torch.arange(EQUALITY_ROWS) * 7919
    together = speculated(pair, seeds)
    for row in (3, 17, EQUALITY_ROWS - 1):
        same = torch.equal(speculated(pair, seeds[row : row + 1])[0], together[row])
        assert same, f"row {row} differs alone from what it is in a batch"


def kernels_as_the_reference() -> None:
    """The same tokens from the kernels and from the reference, round for round."""
    pair = table_pair(4, 1, 2)
    kernel, reference = (committed(pair, KERNEL_ROWS, 1, backend=backend) for backend in ("kernel", "reference"))
    other = int((kernel != reference).any(1).sum())
    assert not other, f"{other} of {KERNEL_ROWS} rows differ from the reference's"
