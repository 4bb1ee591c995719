"""One round: draft, verify, commit, and the context of what was committed. On a GPU nothing here waits for the host."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dspark_fast import ops
from dspark_fast.drafters import Drafter, Noise, Proposal
from dspark_fast.engine.outputs import Outputs
from dspark_fast.engine.processors import Processors
from dspark_fast.engine.state import DecodingState
from dspark_fast.engine.target import Target
from dspark_fast.stats import Clock


@dataclass(frozen=True)
class Cuts:
    """The target's cuts, in transformers' order after the temperature; scalars or ``[B]`` tensors."""

    top_k: int | torch.Tensor = 0
    top_p: float | torch.Tensor = 1.0
    min_p: float | torch.Tensor = 0.0


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits.

    Attributes:
        noise: mode, temperature and seed of each row.
        cuts: of the target's distribution, after the processors.
        processors: what else changes the target's logits; None if nothing does.
    """

    noise: Noise
    cuts: Cuts = Cuts()
    processors: Processors | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What a graph has baked in: two of one kind differ in the values of tensors alone."""
        given = (isinstance(cut, torch.Tensor) for cut in (self.cuts.top_k, self.cuts.top_p, self.cuts.min_p))
        return (self.noise.mode, *given, self.processors and self.processors.kind)

    def per_row(self) -> Sampling:
        """The same with each cut that is not neutral as a ``[B]`` tensor, so that another call's values fit in."""
        like, neutral = self.noise.temperature, Cuts()
        cuts = {
            name: getattr(self.cuts, name)
            if getattr(self.cuts, name) == getattr(neutral, name)
            else torch.full_like(like, getattr(self.cuts, name), dtype=torch.long if name == "top_k" else like.dtype)
            for name in ("top_k", "top_p", "min_p")
        }
        return replace(self, cuts=Cuts(**cuts))

    def select(self, rows: torch.Tensor) -> Sampling:
        """Of these rows alone, int64 ``[n]``; for numbers as cuts and no processors."""
        noise = replace(self.noise, temperature=self.noise.temperature[rows], seed=self.noise.seed[rows])
        return replace(self, noise=noise)

    def copy_(self, other: Sampling) -> None:
        """Take the values of ``other``, which is of the same :attr:`kind`, without moving a tensor."""
        self.noise.temperature.copy_(other.noise.temperature)
        self.noise.seed.copy_(other.noise.seed)
        for name in ("top_k", "top_p", "min_p"):
            cut = getattr(self.cuts, name)
            if isinstance(cut, torch.Tensor):
                cut.copy_(getattr(other.cuts, name))
        if self.processors is not None:
            self.processors.copy_(other.processors)


# Plain steps whose features wait to be shown to the drafter together.
_MOST_WAITING = 64


class Round:
    """What one round does to a call's tensors.

    What plain steps commit is shown to the drafter when it drafts again: one by one each of them would pay for it.

    Args:
        target, drafter, state, sampling: of the call.
        outputs: keeps scores and the like for the caller; None if none were asked for.
        clock: times the parts; None in a graph, which has none that the host could time.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        state: DecodingState,
        sampling: Sampling,
        outputs: Outputs | None,
        clock: Clock | None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.state = state
        self.sampling = sampling
        self.outputs = outputs
        self.part = clock.part if clock is not None else lambda name: nullcontext()
        self._waiting: list[_Step] = []
        self._share()

    def prefill(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Read the prompts and commit each row's first token; arguments as of :meth:`Target.prefill`."""
        logits = self.target.prefill(tokens, counts, self.drafter.commit)
        self._commit(logits, self._nothing, self._nothing.lengths)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 ``[n]``."""
        self.settle()
        for one in (self.target, self.drafter, self.state):
            one.select(rows)
        self.sampling = self.sampling.select(rows)
        self._share()

    def _share(self) -> None:
        """Tensors of the state that others hold on to."""
        self._nothing = Proposal(*self.state.no_drafts)
        for one in (self.target, self.drafter):
            if hasattr(one, "finished"):
                one.finished = self.state.finished

    def run(self, longest: int | None, *, drafting: bool, most: int | None = None) -> int:
        """One round.

        Args:
            longest: committed tokens of the longest row that is not finished; None in a graph.
            drafting: false for a plain step: the target alone, one token.
            most: verify so many drafts of each row at most; None for all. A graph has no choice.

        Returns:
            Drafts of each row that the target has read.
        """
        state = self.state
        position, anchor = state.lengths - 1, state.anchor
        proposal = self._nothing
        if drafting:
            most = min((bound for bound in (most, self.target.room) if bound is not None), default=None)
            if hasattr(self.drafter, "most"):
                self.drafter.most = None if most is None else max(1, most)
            with self.part("draft"):
                self.settle()
                proposal = self.drafter.propose(anchor, position, self.sampling.noise)
            if most is not None and most < proposal.tokens.shape[1]:
                proposal = _shortened(replace(proposal, lengths=proposal.lengths.clamp(max=most)), most)
        with self.part("verify" if drafting else "plain"):
            lengths = proposal.lengths.masked_fill(state.finished, -1)
            if longest is not None and lengths.device.type == "cpu" and not self.target.compiled:
                proposal = _shortened(proposal, int(lengths.max()))
            ids = torch.cat([anchor[:, None], proposal.tokens.clamp(min=0)], dim=1)
            end = None if longest is None else longest + ids.shape[1] - 1
            logits, features = self.target.verify(ids, end)
            taken = self._commit(logits, proposal, lengths)
            self.target.advance(taken)
        with self.part("draft" if drafting else "plain"):
            if drafting or longest is None:  # a graph is replayed: it holds one step and not those before
                self.drafter.commit(ids, features, position, taken)
            else:
                self._waiting.append(_Step(ids, features, position, taken))
                if len(self._waiting) == _MOST_WAITING:
                    self.settle()
        return ids.shape[1] - 1

    def settle(self) -> None:
        """Show the drafter what plain steps have committed since it drafted."""
        if not self._waiting:
            return
        steps, self._waiting = self._waiting, []
        features = None if steps[0].features is None else torch.cat([step.features for step in steps], dim=1)
        # A row is finished once and for all: what it has taken stands in front.
        taken = torch.stack([step.taken for step in steps]).sum(dim=0)
        self.drafter.commit(torch.cat([step.ids for step in steps], dim=1), features, steps[0].position, taken)

    def _commit(self, logits: torch.Tensor, proposal: Proposal, lengths: torch.Tensor) -> torch.Tensor:
        """Judge drafts by the target's logits ``[B, T+1, V]`` and commit; returns tokens taken, ``[B]``."""
        state, sampling = self.state, self.sampling
        processed = logits
        if sampling.processors is not None:
            processed = sampling.processors(logits, state.tokens, state.lengths, proposal.tokens, lengths)
        cuts = {"top_k": sampling.cuts.top_k, "top_p": sampling.cuts.top_p, "min_p": sampling.cuts.min_p}
        cuts["temperature"] = sampling.noise.temperature
        accepted, following = ops.verify(
            processed,
            proposal.tokens,
            proposal.logits,
            lengths,
            seed=sampling.noise.seed,
            mode=sampling.noise.mode,
            position=state.lengths - 1,
            draft_row_max=proposal.row_max,
            draft_log_sum=proposal.log_sum,
            **cuts,
        )
        run = torch.cat([proposal.tokens, following[:, None]], dim=1)
        run.scatter_(1, accepted[:, None], following[:, None])
        taken = state.commit(run, accepted + 1, lengths.clamp(min=0))
        if self.outputs is not None:
            self.outputs.keep(logits, processed, state.report, None if sampling.noise.mode == "greedy" else cuts)
        return taken


class _Step(NamedTuple):
    """What :meth:`Drafter.commit` is to be told of a plain step; ids ``[B, 1]``."""

    ids: torch.Tensor
    features: torch.Tensor | None
    position: torch.Tensor
    taken: torch.Tensor


def _shortened(proposal: Proposal, drafted: int) -> Proposal:
    """Without the slots that no row has verified: they need not be read by the target either."""
    drafted = max(drafted, 0)
    if drafted == proposal.tokens.shape[1]:
        return proposal
    parts = (proposal.logits, proposal.row_max, proposal.log_sum)
    return Proposal(
        proposal.tokens[:, :drafted], proposal.lengths, *(None if one is None else one[:, :drafted] for one in parts)
    )
