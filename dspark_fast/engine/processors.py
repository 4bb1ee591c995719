"""transformers' logits processors over a block of target logits: each position with the prefix that it really has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

_MODULE = RepetitionPenaltyLogitsProcessor.__module__

# What the verification op does itself, in the order in which both do it, and where the config keeps the value; the last
# is the value at which it does nothing.
_WARPERS = {
    "TemperatureLogitsWarper": ("temperature", 1.0),
    "TopKLogitsWarper": ("top_k", 0),
    "TopPLogitsWarper": ("top_p", 1.0),
    "MinPLogitsWarper": ("min_p", 0.0),
}

# transformers' classes whose scores of a row follow from that row's input_ids and scores alone. Several keep tensors
# between calls, but only such as follow from the vocabulary and the device. By name: not every version has all of them.
STATELESS = frozenset(
    {
        *_WARPERS,
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",  # as far as the user's function is
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",  # its generator is seeded anew from the prefix for every row
        "WhisperTimeStampLogitsProcessor",
    }
)
_GUIDANCE = "is classifier-free guidance, which needs a second, unconditional pass of the target: it is not supported"
_REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": _GUIDANCE,
    "DiaClassifierFreeGuidanceLogitsProcessor": _GUIDANCE,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _GUIDANCE,
    "DiaEOSChannelFilterLogitsProcessor": "takes rows for channels of one sequence; here each row is its own",
    "DiaEOSDelayPatternLogitsProcessor": "remembers which rows have ended; a rejected draft cannot be taken back",
    "SynthIDTextWatermarkLogitsProcessor": "remembers the contexts that it has seen; a rejected draft cannot be taken "
    "back",
    "WhisperNoSpeechDetection": "runs the model and keeps what it found; a rejected draft cannot be taken back",
}
# These know the row by its place in the batch, or the batch by its size.
_PLACED = ("EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor")


class Split(NamedTuple):
    """A list of processors, by who does them.

    Attributes:
        before: :class:`Processors` does these, in this order.
        cuts: transformers' own warpers with the config's values, which the verification op does, after ``before``.
        takes_cuts: whether the config's cuts are already in ``before``, so that the op must be given ``top_k=0``,
            ``top_p=1``, ``min_p=0``. It still divides by the temperature: see :class:`Processors`.
    """

    before: list[LogitsProcessor]
    cuts: list[LogitsProcessor]
    takes_cuts: bool


def split(processors: Sequence[LogitsProcessor] | None, config: Any) -> Split:
    """Leave the config's warpers to the verification op, unless another processor stands after one of them.

    Args:
        processors: as transformers prepared them.
        config: the generation config.
    """
    items = list(processors or ())
    own = [_is_of_the_config(item, config) for item in items]
    if not any(own):
        return Split(items, [], False)
    first = own.index(True)
    names = [type(item).__name__ for item in items[first:]]
    expected = [name for name, (key, neutral) in _WARPERS.items() if getattr(config, key) not in (None, neutral)]
    in_order = all(own[first:]) and names == [name for name in _WARPERS if name in names]
    if in_order and set(expected) <= set(names):
        return Split(items[:first], items[first:], False)
    return Split(items, [], True)


def check_processors(processors: Sequence[LogitsProcessor] | None) -> None:
    """Raise for a processor that must not be shown drafts, because it would remember those that are rejected.

    Raises:
        ValueError: naming the class and the reason.
    """
    for item in processors or ():
        name = type(item).__name__
        if isinstance(item, type) or not callable(item):
            raise ValueError(f"the logits processor {item!r} is no object to be called with input_ids and scores")
        if type(item).__module__ != _MODULE:  # a subclass of a known one, too, may remember things
            if getattr(item, "stateless", False) is not True:
                raise ValueError(
                    f"the logits processor {name} does not say that it is stateless: it is accepted with an attribute "
                    "stateless = True, which promises that a row's scores depend on its input_ids and scores alone"
                )
        elif name in _REFUSED:
            raise ValueError(f"the logits processor {name} {_REFUSED[name]}")
        elif name not in STATELESS:
            raise ValueError(f"the logits processor {name} is not known to be stateless: it is not supported")


class Processors:
    """The processors of one call of ``generate``.

    A position's prefix is the row as transformers would have it there: the padding on its left, what is committed, and
    the drafts before the position.

    Args:
        processors: :attr:`Split.before`.
        input_ids: int64 ``[B, S]``, left-padded, as the user gave them.
        padding: int64 ``[B]``, pads on the left of each row.
        temperature: with :attr:`Split.takes_cuts`, the temperature that the verification op is given.

    Attributes:
        on_device: whether a call neither waits for the device nor depends on values on the host, so that it can be part
            of a CUDA graph: nothing but repetition penalties.

    Raises:
        ValueError: for a repetition penalty of another batch size.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        *,
        temperature: float = 1.0,
    ) -> None:
        self._temperature = temperature
        self._stages: list[RepetitionPenalty | _OneByOne] = []
        rest: list[LogitsProcessor] = []
        for item in (*processors, None):
            penalty = type(item) is RepetitionPenaltyLogitsProcessor
            if item is not None and not penalty:
                rest.append(item)
            elif rest:
                self._stages.append(_OneByOne(rest, input_ids, padding))
                rest = []
            if penalty:
                self._stages.append(RepetitionPenalty(item, input_ids, padding))
        self.on_device = all(isinstance(stage, RepetitionPenalty) for stage in self._stages)

    @property
    def kind(self) -> tuple[object, ...]:
        """What a graph has baked in, if ``on_device``: two of one kind differ in the values of tensors alone."""
        return tuple(stage.kind for stage in self._stages if isinstance(stage, RepetitionPenalty))

    def copy_(self, other: Processors) -> None:
        """Take the values of ``other``, which is ``on_device`` too and of the same :attr:`kind`, moving no tensor."""
        for stage, theirs in zip(self._stages, other._stages, strict=True):
            stage.copy_(theirs)

    def __call__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """What the verification op is to be given in place of the logits.

        Args:
            logits: ``[B, T + 1, V]``; left as they are.
            tokens: int64 ``[B, C]``, packed rows, prompt and output from slot 0; what lies behind ``lengths`` is not
                read.
            lengths: int64 ``[B]``, committed tokens, the anchor included.
            drafts: int64 ``[B, T]``; a -1 ends the row's positions.
            counts: int64 ``[B]``, drafts of each row to be looked at; -1 for a finished row.

        Returns:
            fp32 ``[B, T + 1, V]``; positions behind ``counts`` and finished rows are as they were.
        """
        scores = self.scores(logits, tokens, lengths, drafts, counts)
        if self._temperature == 1.0:
            return scores
        # Temperature and cuts are in these scores already, but the op divides by the temperature once more (drafts' own
        # logits need it to), and so it is taken out again.
        return torch.where(_looked_at(drafts, counts)[..., None], scores * self._temperature, scores)

    def scores(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """As the call, but what transformers' processors give: with the temperature, if that is done here."""
        scores = logits.float()  # like transformers, before the first processor
        for stage in self._stages:
            scores = stage(scores, tokens, lengths, drafts, counts)
        return scores


class RepetitionPenalty:
    """transformers' repetition penalty over a whole block at once, on the device.

    A pure function of its arguments, without a wait for the device and with shapes that depend on shapes alone.

    Args:
        processor: transformers'.
        input_ids, padding: see :class:`Processors`.

    Raises:
        ValueError: for a ``prompt_ignore_length`` of another batch size.
    """

    def __init__(
        self, processor: RepetitionPenaltyLogitsProcessor, input_ids: torch.Tensor, padding: torch.Tensor
    ) -> None:
        batch, device = len(input_ids), input_ids.device
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):
            if len(ignored) != batch:
                raise ValueError(f"prompt_ignore_length has {len(ignored)} values for {batch} rows")
            self._ignored = ignored.to(device, copy=True)[:, None]
        else:
            self._ignored = torch.full((batch, 1), ignored or 0, device=device)
        self._penalty = processor.penalty
        self._padding = padding[:, None].clone()
        # Pads count as seen where transformers does not set a length to ignore (before 5.23).
        columns = torch.arange(input_ids.shape[1], device=device)
        counted = (columns < self._padding) & (columns >= self._ignored)
        pads = input_ids.masked_fill(~counted, torch.iinfo(input_ids.dtype).max)
        self._pads = pads if bool(counted.any()) else pads[:, :0]

    @property
    def kind(self) -> tuple[object, ...]:
        """See :attr:`Processors.kind`. The penalty is a number: a tensor may divide with other rounding."""
        return (self._penalty, tuple(self._pads.shape))

    def copy_(self, other: RepetitionPenalty) -> None:
        """See :meth:`Processors.copy_`."""
        self._ignored.copy_(other._ignored)
        self._padding.copy_(other._padding)
        self._pads.copy_(other._pads)

    def __call__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """See :meth:`Processors.__call__`; ``logits`` are fp32."""
        batch, positions, vocabulary = logits.shape
        device = logits.device
        slots = torch.arange(tokens.shape[1], device=device)
        block = torch.arange(positions, device=device)
        lengths = lengths[:, None]
        unread = (slots >= lengths) | (slots + self._padding < self._ignored)
        ahead = (drafts < 0) | (block[:-1] + lengths + self._padding < self._ignored)
        # The column behind the vocabulary takes what is not counted.
        ids = torch.cat(
            [self._pads, tokens.masked_fill(unread, vocabulary), drafts.masked_fill(ahead, vocabulary)], dim=1
        ).clamp(max=vocabulary)
        # The first position that has seen a token: 0 if it is committed, j + 1 if it is draft j.
        since = torch.cat([block.new_zeros(self._pads.shape[1] + tokens.shape[1]), block[1:]]).int()
        first = torch.full((batch, vocabulary + 1), positions, dtype=torch.int32, device=device)
        first.scatter_reduce_(1, ids, since.expand(batch, -1), "amin")
        seen = first[:, None, :vocabulary] <= block[:, None]
        seen &= _looked_at(drafts, counts)[..., None]
        penalised = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
        return torch.where(seen, penalised, logits)


@contextmanager
def named(processors: Sequence[LogitsProcessor]) -> Iterator[None]:
    """Logits that are no numbers are told with the processors of somebody's own that may have made them so."""
    try:
        yield
    except FloatingPointError as error:
        names = [type(item).__name__ for item in processors if type(item).__module__ != _MODULE]
        if not names:
            raise
        raise FloatingPointError(f"{error}, as the logits processor {', '.join(names)} left them") from error


class _Foreign:
    """Somebody's own processor; what it gives must be scores."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        given, name = self._processor(input_ids, scores), type(self._processor).__name__
        if not isinstance(given, torch.Tensor) or given.layout != torch.strided:
            raise ValueError(f"the logits processor {name} gave a {type(given).__name__}: accepted is a dense tensor")
        if given.shape != scores.shape or given.device != scores.device:
            raise ValueError(
                f"the logits processor {name} gave a tensor {list(given.shape)} on {given.device}: "
                f"accepted is {list(scores.shape)} on {scores.device}"
            )
        if given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"the logits processor {name} gave {given.dtype}: accepted are real numbers")
        return given


class _OneByOne:
    """Any processors, called as a plain step calls them: equal-length, left-padded rows, all of a length at once."""

    def __init__(self, processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, padding: torch.Tensor) -> None:
        self._input_ids = input_ids
        self._padding = padding
        self._shown: list[int] = []
        foreign = [item for item in processors if type(item).__module__ != _MODULE]
        constrained = [type(item) is PrefixConstrainedLogitsProcessor for item in processors]
        # Somebody's own processor may keep a table of rows: its row is shown at its place, in a batch of the full size.
        self._whole_batch = bool(foreign) or any(type(item).__name__ in _PLACED for item in processors)
        # Code of somebody's own sees no prefix that its scores forbid, since in plain decoding it never would.
        self._only_possible = bool(foreign) or any(constrained)
        self._processors = LogitsProcessorList(
            self._by_row(item) if by_row else _Foreign(item) if item in foreign else item
            for item, by_row in zip(processors, constrained)
        )

    def _by_row(self, item: PrefixConstrainedLogitsProcessor) -> PrefixConstrainedLogitsProcessor:
        """The user's function is told the row, which is not always the place in the batch shown."""
        allowed = item._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda place, ids: allowed(self._shown[place], ids), 1)

    def __call__(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """See :meth:`Processors.__call__`; ``logits`` are fp32."""
        batch = len(logits)
        widths = (self._padding + lengths).tolist()
        ends = _looked_at(drafts, counts).sum(1).tolist()
        rows_ids = self._padded(tokens, lengths, drafts, max(widths))
        out = logits.clone()
        # Shorter prefixes first, so that each row's positions come in order.
        for length in sorted({width + slot for width, end in zip(widths, ends) for slot in range(end)}):
            rows = [row for row in range(batch) if 0 <= length - widths[row] < ends[row]]
            if not rows:  # they have ended meanwhile
                continue
            # A row without a position of this length is filled in by another.
            shown = [row if row in rows else rows[0] for row in range(batch)] if self._whole_batch else rows
            self._shown = shown
            scores = self._processors(rows_ids[shown, :length], logits[shown, [length - widths[row] for row in shown]])
            slots = [length - widths[row] for row in rows]
            out[rows, slots] = (scores[rows] if self._whole_batch else scores).to(out.dtype)
            if self._only_possible and drafts.shape[1]:
                last = drafts.shape[1] - 1  # behind the last position there is no draft, and nothing to end
                following = drafts[rows, [min(slot, last) for slot in slots]].clamp(min=0)
                for row, slot, score in zip(rows, slots, out[rows, slots, following].tolist()):
                    if score == -math.inf:
                        ends[row] = min(ends[row], slot + 1)
        return out

    def _padded(self, tokens: torch.Tensor, lengths: torch.Tensor, drafts: torch.Tensor, longest: int) -> torch.Tensor:
        """``[B, longest + T]``: each row's pads, committed tokens and drafts; what lies behind means nothing."""
        known, capacity = self._input_ids.shape[1], tokens.shape[1]
        source = torch.cat([self._input_ids, tokens, drafts.clamp(min=0)], dim=1)
        columns = torch.arange(longest + drafts.shape[1], device=tokens.device).expand(len(tokens), -1)
        slots = columns - self._padding[:, None]
        behind = slots - lengths[:, None]
        index = torch.where(slots < 0, columns, torch.where(behind < 0, known + slots, known + capacity + behind))
        return source.gather(1, index.clamp(max=source.shape[1] - 1))


def _is_of_the_config(item: LogitsProcessor, config: Any) -> bool:
    """Whether it is a warper that transformers made from the config; one made by hand may cut otherwise."""
    name = type(item).__name__
    return bool(
        config.do_sample
        and type(item).__module__ == _MODULE
        and name in _WARPERS
        and getattr(item, _WARPERS[name][0]) == getattr(config, _WARPERS[name][0])
        and getattr(item, "min_tokens_to_keep", 1) == 1
        and getattr(item, "filter_value", -math.inf) == -math.inf
    )


def _looked_at(drafts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[B, T + 1]``: up to ``counts``, and not behind a draft that there is none of."""
    whole = (drafts >= 0).long().cumprod(1).sum(1)
    columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    return columns <= torch.minimum(counts, whole)[:, None]
