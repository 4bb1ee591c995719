"""The decoding loop: draft, verify, commit, each row at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from dspark_fast import ops
from dspark_fast.drafters import Drafter, Noise
from dspark_fast.stats import Clock, Stats
from dspark_fast.target import driven

# on_commit(rows): the tokens that each row has just committed; an empty list for a row that is finished
OnCommit = Callable[[list[list[int]]], None]


@dataclass(frozen=True)
class Limits:
    """When a row ends.

    Attributes:
        new_tokens: at most so many, at least 1.
        stop_tokens: int64 ``[n]``; a row ends on the first of these that it commits.
    """

    new_tokens: int
    stop_tokens: torch.Tensor


@dataclass(frozen=True)
class Cuts:
    """The target's cuts, in transformers' order after the temperature; scalars or ``[B]`` tensors."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class DecodingState:
    """Committed tokens of every row.

    Attributes:
        tokens: int64 ``[B, C]``, prompt and output from slot 0.
        lengths: int64 ``[B]``, committed tokens, the anchor (the last of them) included.
        prompt_lengths: int64 ``[B]``.
        finished: bool ``[B]``.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    finished: torch.Tensor
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = int(self.lengths.max())

    @property
    def anchor(self) -> torch.Tensor:
        """``[B]``, the last committed token of each row."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    def commit(self, run: torch.Tensor, counts: torch.Tensor, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each row's run up to its first stop token and the length limit; finished rows take nothing.

        Args:
            run: int64 ``[B, T]``.
            counts: int64 ``[B]``, how many tokens of the run are valid.
            limits: when a row ends.

        Returns:
            Tokens committed, int64 ``[B]``; and the run's valid length up to its first stop token, not trimmed by the
            length limit, which is what an acceptance length counts.
        """
        columns = torch.arange(run.shape[1], device=run.device)
        stops = torch.isin(run, limits.stop_tokens) & (columns < counts[:, None])
        before = (stops.long().cumsum(1) - stops.long()) == 0  # up to and including the first stop
        lengths = (before & (columns < counts[:, None])).sum(1)
        room = limits.new_tokens - (self.lengths - self.prompt_lengths)
        taken = torch.minimum(lengths, room).masked_fill(self.finished, 0)

        rows, slots = (columns < taken[:, None]).nonzero(as_tuple=True)
        self.tokens[rows, self.lengths[rows] + slots] = run[rows, slots]
        self.lengths += taken
        stopped = (stops & (columns < taken[:, None])).any(1)
        self.finished |= stopped | (self.lengths - self.prompt_lengths >= limits.new_tokens)
        self.longest = int(self.lengths.max())
        return taken, lengths


def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: torch.Tensor,
    prompt_lengths: torch.Tensor,
    *,
    noise: Noise,
    cuts: Cuts,
    limits: Limits,
    on_commit: OnCommit = lambda rows: None,
) -> tuple[DecodingState, Stats]:
    """Decode a batch to its end.

    Lossless: greedy and coupled output is what the target alone would give; rejection output has its distribution.

    Args:
        model: the target, in eval mode.
        drafter: proposes; see :class:`~dspark_fast.drafters.Drafter`.
        prompts: int64 ``[B, S]``, packed to slot 0.
        prompt_lengths: int64 ``[B]``, at least 1 each.
        noise, cuts, limits: see there.
        on_commit: called after every commit. An exception in it, or an interrupt, leaves the model as it was.

    Returns:
        The final state and the figures.

    Raises:
        FloatingPointError: if logits that are needed are NaN, naming row and position.
    """
    device = prompts.device
    batch, width = prompts.shape
    capacity = width + limits.new_tokens + drafter.block_size + 1
    tokens = torch.zeros(batch, capacity, dtype=torch.long, device=device)
    tokens[:, :width] = prompts
    state = DecodingState(
        tokens, prompt_lengths.clone(), prompt_lengths, torch.zeros(batch, dtype=torch.bool, device=device)
    )
    stats = Stats(batch, noise.mode, noise.seed.tolist(), drafter.block_size, capacity)
    clock = Clock(stats.seconds, device)
    no_drafts = torch.zeros(batch, 0, dtype=torch.long, device=device)
    sampling = {
        "temperature": noise.temperature,
        "seed": noise.seed,
        "mode": noise.mode,
        "top_k": cuts.top_k,
        "top_p": cuts.top_p,
        "min_p": cuts.min_p,
    }

    with driven(model, drafter.target_layer_ids, batch, capacity) as target:
        with clock.part("prefill"):
            drafter.begin(batch, capacity, device)
            logits, features = target.prefill(prompts, prompt_lengths)
            drafter.commit(prompts, features, torch.zeros_like(prompt_lengths), prompt_lengths)
            first = ops.verify(
                logits, no_drafts, None, torch.zeros_like(prompt_lengths), position=prompt_lengths - 1, **sampling
            )[1]
        with clock.part("bookkeeping"):
            _commit(state, stats, first[:, None], torch.ones_like(prompt_lengths), limits, on_commit)

        while not bool(state.finished.all()):
            position = state.lengths - 1
            with clock.part("draft"):
                proposal = drafter.propose(state.anchor, position, noise)
            with clock.part("verify"):
                lengths = proposal.lengths.masked_fill(state.finished, -1)
                # Slots that no row verifies are not read by the target either.
                drafted = int(lengths.max())
                ids = torch.cat([state.anchor[:, None], proposal.tokens[:, :drafted].clamp(min=0)], dim=1)
                logits, features = target.verify(ids, state.longest - 1)
                accepted, following = ops.verify(
                    logits,
                    proposal.tokens[:, :drafted],
                    None if proposal.logits is None else proposal.logits[:, :drafted],
                    lengths,
                    position=position,
                    draft_row_max=None if proposal.row_max is None else proposal.row_max[:, :drafted],
                    draft_log_sum=None if proposal.log_sum is None else proposal.log_sum[:, :drafted],
                    **sampling,
                )
            with clock.part("bookkeeping"):
                run = torch.cat([proposal.tokens[:, :drafted], following[:, None]], dim=1)
                run.scatter_(1, accepted[:, None], following[:, None])
                taken, acceptance = _commit(state, stats, run, accepted + 1, limits, on_commit)
                _count(stats, taken, acceptance, lengths, accepted)
                target.cache.lengths += taken
            with clock.part("draft"):
                drafter.commit(ids, features, position, taken)
    return state, stats


def _commit(
    state: DecodingState,
    stats: Stats,
    run: torch.Tensor,
    counts: torch.Tensor,
    limits: Limits,
    on_commit: OnCommit,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Commit a run and tell the caller; NaN logits, which come back as token -1, are raised here."""
    before = state.lengths.clone()
    taken, acceptance = state.commit(run, counts, limits)
    # Only now: a NaN behind a stop token or the length limit is in nobody's way.
    columns = torch.arange(run.shape[1], device=run.device)
    invalid = (run < 0) & (columns < taken[:, None])
    if bool(invalid.any()):
        row, column = invalid.nonzero()[0].tolist()
        position = int(before[row]) + column
        raise FloatingPointError(f"the logits of row {row} for position {position} are NaN or all -inf")
    rows = [tokens[:n] for tokens, n in zip(run.tolist(), taken.tolist(), strict=True)]
    for row, tokens in enumerate(rows):
        stats.new_tokens[row] += len(tokens)
    on_commit(rows)
    return taken, acceptance


def _count(
    stats: Stats, taken: torch.Tensor, acceptance: torch.Tensor, lengths: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Add one round to the figures; rows that were finished before it took nothing and are not counted."""
    stats.rounds += 1
    columns = zip(taken.tolist(), acceptance.tolist(), lengths.tolist(), accepted.tolist(), strict=True)
    for row, (took, committed, proposed, right) in enumerate(columns):
        if not took:
            continue
        stats.acceptance_lengths[row].append(committed)
        # Behind an accepted stop token nothing was really proposed.
        for slot in range(min(proposed, committed) if committed <= right else proposed):
            stats.proposed[slot] += 1
            stats.accepted[slot] += slot < right
