"""Deliberate faults, and by which means each is found.

``law``: a row of the suite, at its own sample size and level. ``planted noise``: a decision under words chosen by hand.
``tail``: the rate of a rare token. ``equality``: tokens that must be the same, draw by draw.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from checks import (
    EQUALITY_ROWS,
    KERNEL_ROWS,
    TAIL_DRAWS,
    accepts_the_impossible,
    accepts_what_16_bits_cannot_tell,
    alone_as_in_a_batch,
    as_gumbel_max,
    keeps_words_of_zero_finite,
    kernels_as_the_reference,
    rare_tokens_at_their_rate,
)
from faults import edited

from dspark_fast import ops, reference
from dspark_fast.drafters import DSparkDrafter
from dspark_fast.engine.round import Round
from dspark_fast.engine.state import DecodingState
from dspark_fast.losslessness import ROWS
from dspark_fast.reference import sampling

MARKOV, VERIFY = inspect.getmodule(inspect.unwrap(reference.markov_walk)), inspect.getmodule(reference.verify)
assert MARKOV is not None and VERIFY is not None
BY_NAME = {row.name: row for row in ROWS}

walk, rejection, coupled = reference.markov_walk, VERIFY._keep_by_rejection, VERIFY._keep_coupled
Fault = Callable[[], Any]  # a context that has it


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: a plain phrase.
        fault: gives a context in which it is there.
        means: ``law``, ``planted noise``, ``tail`` or ``equality``.
        by: the row's name (law), or the check, which raises AssertionError.
        draws: sample size; 0 takes the row's own of the fixed subset.
    """

    name: str
    fault: Fault
    means: str
    by: str | Callable[[], None]
    draws: int = 0


def edit(function: Callable[..., Any], old: str, new: str) -> Fault:
    return partial(edited, function, old, new)


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """A global of the real code in another form: ``make`` is given the real one."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def law(name: str, fault: Fault, row: str) -> Mutant:
    assert row in BY_NAME, row
    return Mutant(name, fault, "law", row)


def twice(cut: Callable[..., Any]) -> Callable[..., Any]:
    return lambda logits, temperature, *cuts: cut(cut(logits, temperature, *cuts), 1.0, *cuts)


UNCUT_Q = "MarkovWalk(tokens, base_logits.to(logits_dtype), *softmax_statistics(base_logits, temperature[:, None]))"
RESIDUAL = "(p - q).clamp_(min=0.0)"
NOT_RENORMALISED = "torch.cat([(r := (p - q).clamp(min=0.0))[..., :-1], 1 - r[..., :-1].sum(-1, keepdim=True)], -1)"

MUTANTS = (
    law(
        "q from another slot's row",
        edit(rejection, "draft_logits[rows, slot]", "draft_logits[rows, slot - 1]"),
        "rejection vanilla-head",
    ),
    law(
        "q from before the drafter's cut",
        edit(walk, "MarkovWalk(tokens, logits, row_max, log_sum)", UNCUT_Q),
        "rejection candidates",
    ),
    law(
        "drafts and residual share their noise",
        replaced(VERIFY, "TARGET", lambda stream: sampling.DRAFT),
        "rejection vanilla-head",
    ),
    law(
        "drafts and acceptance share their noise",
        replaced(sampling, "ACCEPT", lambda stream: sampling.DRAFT),
        "rejection vanilla-head",
    ),
    law(
        "acceptance and residual share their noise",
        replaced(VERIFY, "TARGET", lambda stream: sampling.ACCEPT),
        "rejection vanilla-head",
    ),
    Mutant(
        "an exponential may be 0 (u = 0 allowed)",
        edit(sampling._to_exponential, ".add_(0.5)", ""),
        "planted noise",
        keeps_words_of_zero_finite,
        2,
    ),
    Mutant(
        "u q <= p: u = 0 accepts what has p = 0",
        edit(rejection, "threshold[:, slot] < p", "threshold[:, slot] <= p"),
        "planted noise",
        accepts_the_impossible,
        2,
    ),
    law(
        "the residual's missing mass goes to the last token",
        edit(rejection, RESIDUAL, NOT_RENORMALISED),
        "rejection vanilla-head",
    ),
    law("p + q in place of the residual", edit(rejection, RESIDUAL, "(p + q)"), "rejection vanilla-head"),
    law("|p - q| in place of the residual", edit(rejection, RESIDUAL, "(p - q).abs()"), "rejection vanilla-head"),
    law("p in place of the residual", edit(rejection, RESIDUAL, "p"), "rejection vanilla-head"),
    law(
        "q / p in place of p / q",
        edit(rejection, "(threshold[:, slot] < p)", "(threshold[:, slot] / q[:, slot].square() * p < 1)"),
        "rejection vanilla-head",
    ),
    law(
        "bonus from the row before",
        edit(
            rejection,
            "cut_logits(target_logits[rows, accepted]",
            "cut_logits(target_logits[rows, (accepted - 1).clamp(min=0)]",
        ),
        "rejection vanilla-head",
    ),
    law(
        "drafts judged by the next row of the target",
        edit(
            rejection,
            "cut_logits(target_logits[:, slot], *cuts).softmax",
            "cut_logits(target_logits[:, slot + 1], *cuts).softmax",
        ),
        "rejection vanilla-head",
    ),
    Mutant(
        "coupled bonus from another stream",
        edit(coupled, "no_anchor, DRAFT,", "no_anchor, DRAFT if slot < draft_tokens.shape[1] else TARGET,"),
        "equality",
        as_gumbel_max,
        EQUALITY_ROWS,
    ),
    law(
        "confidence cut looks at the token it judges",
        edit(
            DSparkDrafter.propose,
            "prev = torch.cat([anchor[:, None], walk.tokens[:, :-1]], dim=1)",
            "prev = walk.tokens",
        ),
        "loop rejection confidence-cut",
    ),
    law(
        "anchor left out of the counter, cut reads discarded drafts",
        edit(walk, "torch.zeros_like(position) if coupled else position", "torch.zeros_like(position)"),
        "rejection cut-by-discarded-drafts",
    ),
    law(
        "drafts sampled in bf16, judged in fp32",
        edit(walk, "(row / divisor).sub_", "(row.bfloat16().float() / divisor).sub_"),
        "rejection offset-100",
    ),
    law(
        "logits rounded after sampling",
        edit(walk, "logits[:, slot] = row\n", "logits[:, slot] = row.bfloat16()\n"),
        "rejection offset-100",
    ),
    law(
        "log_sum of raw logits at a temperature",
        edit(walk, "softmax_statistics(row, temperature)", "softmax_statistics(row, temperature * 0 + 1)"),
        "rejection temperature-0.7",
    ),
    Mutant(
        "noise keyed by row",
        edit(ops.verify, "seed=per_row(seed,", "seed=per_row(torch.arange(len(draft_lengths)),"),
        "equality",
        alone_as_in_a_batch,
        EQUALITY_ROWS,
    ),
    law(
        "one seed shared by all rows",
        replaced(reference, "expand_seeds", lambda expand: lambda *given: expand(*given) * 0 + 5),
        "rejection vanilla-head",
    ),
    law(
        "temperature applied to p only",
        edit(rejection, "((drafted - row_max) / temperature[:, None] - log_sum)", "((drafted - row_max) - log_sum)"),
        "rejection temperature-0.7",
    ),
    law(
        "residual's q without the temperature",
        edit(rejection, "q.div_(temperature[:, None]).sub_", "q.sub_"),
        "rejection temperature-0.7",
    ),
    law("top-p applied twice", replaced(VERIFY, "cut_logits", twice), "rejection top-p"),
    law(
        "the drawn row is not cut",
        edit(
            rejection,
            "cut_logits(target_logits[rows, accepted], *cuts)",
            "cut_logits(target_logits[rows, accepted], cuts[0])",
        ),
        "rejection top-k",
    ),
    law(
        "stop token overrun",
        edit(DecodingState.commit, "torch.minimum(acceptance, self.ends", "torch.minimum(counts, self.ends"),
        "loop rejection stop-token",
    ),
    Mutant(
        "acceptance by a 16-bit uniform",
        edit(sampling.accept_uniform, "word.float() * 2.0**-32", "(word >> 16).float() * 2.0**-16"),
        "planted noise",
        accepts_what_16_bits_cannot_tell,
        2,
    ),
    Mutant(
        "exponentials from a 16-bit uniform",
        edit(
            sampling._to_exponential,
            "words.add_(0.5).mul_(2.0**-32)",
            "words.mul_(2.0**-16).floor_().add_(0.5).mul_(2.0**-16)",
        ),
        "tail",
        rare_tokens_at_their_rate,
        TAIL_DRAWS,
    ),
    Mutant(
        "exponentials from a 24-bit uniform",
        edit(
            sampling._to_exponential,
            "words.add_(0.5).mul_(2.0**-32)",
            "words.mul_(2.0**-8).floor_().add_(0.5).mul_(2.0**-24)",
        ),
        "tail",
        rare_tokens_at_their_rate,
        TAIL_DRAWS,
    ),
    Mutant(
        "the mirrored exponential, -log(u)",
        edit(sampling._to_exponential, ".neg_().log1p_().neg_()", ".log_().neg_()"),
        "tail",
        rare_tokens_at_their_rate,
        TAIL_DRAWS,
    ),
    law(
        "the last token of a block is never verified",
        edit(rejection, "(threshold[:, slot] < p)", "((threshold[:, slot] < p) | (slot == block - 1))"),
        "rejection vanilla-head",
    ),
    law(
        "a cut block's last token from the residual",
        edit(rejection, "rejected = accepted < lengths", "rejected = accepted < block"),
        "rejection confidence-cut",
    ),
    law(
        "the Markov bias is missing from q",
        edit(walk, "logits[:, slot] = row\n", "logits[:, slot] = base_logits[:, slot]\n"),
        "rejection vanilla-head",
    ),
    law(
        "one acceptance uniform for the whole block",
        edit(
            rejection, "accept_uniform(seed[:, None], slots,", "accept_uniform(seed[:, None], slots[:, :1] + 0 * slots,"
        ),
        "rejection vanilla-head",
    ),
    law(
        "coupled noise that does not move with the slot",
        edit(coupled, "position + 1 + slot, no_anchor", "position + 1, no_anchor"),
        "coupled vanilla-head",
    ),
    law(
        "the same position in every round",
        edit(Round._commit, "position=state.lengths - 1", "position=state.ends - 9"),
        "loop rejection block-1",
    ),
    law(
        "the target reads another row's drafts",
        edit(Round.run, "proposal.tokens.clamp(min=0)]", "proposal.tokens.clamp(min=0).roll(1, 0)]"),
        "loop rejection vanilla-head",
    ),
    law(
        "a restricted drafter's columns taken for tokens",
        edit(
            DSparkDrafter._of_all_tokens,
            "index_copy_(2, vocabulary, logits)",
            "index_copy_(2, torch.arange(len(vocabulary)), logits)",
        ),
        "loop rejection restricted-vocabulary",
    ),
    law(
        "a rejected draft is committed, its replacement dropped",
        edit(Round._commit, "run.scatter_(1, accepted[:, None], following[:, None])", "run"),
        "loop rejection vanilla-head",
    ),
)


def in_a_kernel(name: str, module: str, stream: str, other: int) -> Mutant:
    """A kernel's noise from another stream; interpreted, it is seen in a few rows, by comparison with the reference."""

    @contextmanager
    def fault() -> Iterator[None]:
        import triton.language as tl

        owner = importlib.import_module(f"dspark_fast.kernels.{module}")
        with mock.patch.object(owner, stream, tl.constexpr(other)):
            yield

    return Mutant(name, fault, "equality", kernels_as_the_reference, KERNEL_ROWS)


if not torch.cuda.is_available():
    MUTANTS += (
        in_a_kernel("kernel: drafts and acceptance share their noise", "noise", "ACCEPT", sampling.DRAFT),
        in_a_kernel("kernel: drafts and residual share their noise", "verify", "TARGET", sampling.DRAFT),
    )
