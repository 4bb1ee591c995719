"""Drafters that are language models themselves: a smaller one of the same tokenizer, or the target's first layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dspark_fast.drafters import Noise, Proposal
from dspark_fast.engine.attention import takes_our_attention
from dspark_fast.engine.cache import RaggedCache, widened
from dspark_fast.engine.eligibility import check_layers
from dspark_fast.engine.taps import decoder_layers
from dspark_fast.engine.target import Target, driven
from dspark_fast.reference.sampling import DRAFT, exponentials, greedy_argmax, gumbel_argmax, softmax_statistics


@dataclass
class Known:
    """What an autoregressive drafter knows of each row's text.

    Attributes:
        draft: whose it is.
        cache: its keys and values; the lengths say how many committed tokens it has read.
        tokens: int64 ``[B, C]``, the committed tokens, those that it has still to read included.
        absent: int64 ``[B]``, the absolute position of each row's slot 0, in cache and tokens: tokens before it were
            never seen, because the target read them in another call.
    """

    draft: PreTrainedModel
    cache: RaggedCache
    tokens: torch.Tensor
    absent: torch.Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Known:
        return Known(self.draft, copy.deepcopy(self.cache, memo), self.tokens.clone(), self.absent.clone())


class AutoregressiveDrafter:
    """Any smaller causal language model of the target's vocabulary, which drafts a block token by token.

    Leviathan et al. 2023; Chen et al. 2023. It has a ragged cache of its own, so each row drafts from where it stands.
    What was rejected is rolled back by length; what it has not read (the last draft of a block that was accepted
    whole, a resampled token, whatever was decoded without it) is read in the first pass of the next round.

    Args:
        draft: the model, in eval mode; it may share weights with the target (:func:`first_layers`).
        block_size: drafts per round, which cost a pass each.

    Attributes:
        most: so many drafts per round at most, as the loop finds that they pay; None for all.

    Raises:
        ValueError: for a block size below 1; for a model that cannot be driven in ragged batches, by name.
    """

    target_layer_ids: list[int] = []  # noqa: RUF012

    def __init__(self, draft: PreTrainedModel, *, block_size: int = 5) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: accepted is 1 or more")
        name = type(draft).__name__
        if getattr(draft.config, "is_encoder_decoder", False):
            raise ValueError(f"the drafter {name} is an encoder-decoder: accepted are decoder-only models")
        if check_layers(draft) != "ragged" or not takes_our_attention(draft):
            raise ValueError(f"the drafter {name} can be driven only behind a cache of its own: that cannot draft")
        self.draft = draft
        self.block_size = block_size
        self.most: int | None = None

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that this model cannot draft for.

        Raises:
            ValueError: if it is the target itself, has another vocabulary size, is on another device or in training
                mode; naming both values.
        """
        draft = self.draft
        if draft is target:
            raise ValueError("the drafter is the target itself: accepted is a smaller model, or first_layers(model, n)")
        sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (draft, target)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the drafter's vocab_size is {sizes[0]}, the target's is {sizes[1]}: they must be equal")
        if draft.device != target.device:
            raise ValueError(f"the drafter is on {draft.device}, the target on {target.device}: move one with .to()")
        if draft.training:
            raise ValueError("the drafter is in training mode, where dropout makes noise of its own: call .eval()")

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        self.context = Known(
            self.draft,
            RaggedCache.for_model(self.draft, batch, capacity),
            torch.zeros(batch, capacity, dtype=torch.long, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )
        self._proposed, self.most = False, None

    def grow(self, capacity: int) -> None:
        self.context.cache.grow(capacity)
        self.context.tokens = widened(self.context.tokens, 1, capacity)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 ``[n]``, in new tensors."""
        context = self.context
        context.cache.select(rows)
        context.tokens, context.absent = context.tokens[rows], context.absent[rows]

    def resume(self, context: object, known: torch.Tensor) -> None:
        """Go on after :meth:`begin` from what another call knew, in place.

        Args:
            context: a :class:`Known` of the same model; anything else says nothing.
            known: int64 ``[B]``, the position from which each row's tokens will be committed.
        """
        own = self.context
        if not isinstance(context, Known) or context.draft is not self.draft:
            own.absent.copy_(known)
            return
        own.absent.copy_(torch.minimum(context.absent, known))
        own.cache.copy_(context.cache, torch.minimum(context.cache.lengths, known - own.absent))
        # Both have room for all that is known, and what lies behind that in either is not looked at.
        slots = min(own.tokens.shape[1], context.tokens.shape[1])
        own.tokens[:, :slots] = context.tokens[:, :slots]

    @property
    def memory(self) -> int:
        return self.context.cache.memory

    def commit(
        self, tokens: torch.Tensor, features: torch.Tensor | None, offsets: torch.Tensor, counts: torch.Tensor
    ) -> None:
        context, width = self.context, tokens.shape[1]
        starts = offsets - context.absent
        columns = torch.arange(width, device=tokens.device)
        # What is not committed may stand so far that it does not fit: the last slot is past every row's end.
        slots = (starts[:, None] + columns).clamp(max=context.tokens.shape[1] - 1)
        kept = columns < counts[:, None]
        context.tokens.scatter_(1, slots, torch.where(kept, tokens, context.tokens.gather(1, slots)))
        # Drafts that were rejected are forgotten; the tokens in their place have not been read.
        lengths = context.cache.lengths
        lengths.copy_(torch.minimum(lengths, starts + counts))
        if not self._proposed:  # prompts are read as they come, what follows them with the next block
            with driven(self.draft, [], context.cache) as model:
                self._read(model, starts + counts)

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        context, self._proposed = self.context, True
        places = position - context.absent
        context.tokens.scatter_(1, places[:, None], anchor[:, None])
        origin = torch.zeros_like(position) if noise.mode == "coupled" else position
        end = int(places.max()) + 1
        drafts = self.block_size if self.most is None else min(self.most, self.block_size)
        drafted: list[_Draw] = []
        with driven(self.draft, [], context.cache) as model:
            logits = self._read(model, places + 1)
            while True:
                slot = len(drafted)
                drafted.append(_draw(logits[:, 0], noise, position + 1 + slot, origin))
                if slot + 1 == drafts:
                    break
                # Any token will do where none could be drawn: what follows is not used.
                logits, _ = model.verify(drafted[-1][0].clamp(min=0)[:, None], end + slot + 1)
                model.advance(torch.ones_like(position))
        tokens, *kept = ([part for part in parts if part is not None] for parts in zip(*drafted))
        logits, row_max, log_sum = (torch.stack(parts, 1) if parts else None for parts in kept)
        return Proposal(torch.stack(tokens, 1), torch.full_like(position, drafts), logits, row_max, log_sum)

    def _read(self, model: Target, ends: torch.Tensor) -> torch.Tensor:
        """Read each row's tokens up to slot ``ends`` ``[B]``, in one pass; returns logits ``[B, 1, V]`` at the last."""
        context = self.context
        counts = ends - context.cache.lengths
        columns = torch.arange(int(counts.max()), device=counts.device)
        slots = (context.cache.lengths[:, None] + columns).clamp(max=context.tokens.shape[1] - 1)
        return model.prefill(context.tokens.gather(1, slots), counts, lambda *chunk: None)


# a token, and for rejection what it was drawn from: logits, row_max, log_sum
_Draw = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def _draw(logits: torch.Tensor, noise: Noise, position: torch.Tensor, anchor: torch.Tensor) -> _Draw:
    """Draw one token of each row as :func:`dspark_fast.reference.markov_walk` draws that slot of a block.

    Args:
        logits: ``[B, V]``.
        noise: of the call.
        position: int64 ``[B]``, absolute, of the token to be drawn.
        anchor: int64 ``[B]``, that of the round's anchor; 0 in coupled mode.
    """
    row = logits.float()
    if noise.mode == "greedy":
        return greedy_argmax(row), None, None, None
    greedy = noise.temperature == 0
    divisor = noise.temperature.masked_fill(greedy, 1.0)[:, None]
    waits = exponentials(noise.seed, position, anchor, DRAFT, row.shape[-1]).masked_fill_(greedy[:, None], 1.0)
    token = gumbel_argmax(row / divisor, waits)
    if noise.mode == "coupled":
        return token, None, None, None
    return token, row, *softmax_statistics(row, noise.temperature)


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The target's first layers under its own norm and LM head, as a language model: a drafter that costs no memory.

    Self-speculation by early exit (Zhang et al. 2023, Draft & Verify; Elhoushi et al. 2024, LayerSkip, whose training
    makes early layers better at it). Modules and configuration are new, so that hooks, the attention setting and cache
    slots of one are not the other's; every weight is the target's own tensor.

    Args:
        model: a decoder-only model. Where its weights are put elsewhere later, this has to be made again.
        layers: 1 up to as many as it has; half of them is a usual choice.

    Raises:
        ValueError: for a number of layers out of range, naming both, or a model without a list of decoder layers.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    if not 1 <= layers <= depth:
        raise ValueError(f"layers is {layers}: accepted is 1 to {depth}, as many as {type(model).__name__} has")
    decoder_layers(model)  # raises before anything is copied
    # deepcopy takes what stands here for copied already
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    for module in made.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    del decoder_layers(made)[layers:]
    config = made.config.get_text_config(decoder=True)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return made
