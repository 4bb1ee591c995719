"""What the decoding loop knows of a drafter, and the drafter that is DSpark."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from dspark_fast import ops
from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.cache import widened
from dspark_fast.engine.compiled import chosen, hindrance


@dataclass(frozen=True)
class Noise:
    """How each row of a batch is sampled.

    Attributes:
        mode: ``greedy``, ``rejection`` or ``coupled``.
        temperature: fp32 ``[B]``; 0 is greedy.
        seed: int64 ``[B]``, one 64-bit seed per row.
    """

    mode: str
    temperature: torch.Tensor
    seed: torch.Tensor


@dataclass(frozen=True)
class Proposal:
    """One round's drafts.

    Attributes:
        tokens: int64 ``[B, T]``.
        lengths: int64 ``[B]`` in 0..T: how many of each row's drafts are to be verified.
        logits: ``[B, T, V]`` that the tokens were drawn from, before the temperature; None where no mode reads them.
        row_max, log_sum: fp32 ``[B, T]`` with ``q(x) = exp((logits_x - row_max) / temperature - log_sum)``.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    logits: torch.Tensor | None = None
    row_max: torch.Tensor | None = None
    log_sum: torch.Tensor | None = None


@dataclass
class Context:
    """The context that a DSpark drafter has cached.

    Attributes:
        draft: whose it is.
        keys, values: ``[layers, B, C, Hkv, D]``.
        absent: int64 ``[B]``, the absolute position of each row's slot 0: tokens before it were never seen, because
            their target states were computed elsewhere.
    """

    draft: DSparkDraft
    keys: torch.Tensor
    values: torch.Tensor
    absent: torch.Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Context:
        return self.clone()

    def clone(self) -> Context:
        """A copy that shares nothing but the drafter."""
        return Context(self.draft, self.keys.clone(), self.values.clone(), self.absent.clone())


class Drafter(Protocol):
    """A model that proposes. One instance serves one call of ``generate`` at a time.

    One that also has ``capturable`` and ``restart`` (see :class:`DSparkDrafter`) can be part of a CUDA graph; one that
    has ``context`` and ``resume`` goes on from ``past_key_values``; with one that has ``select``, finished rows leave
    the batch; one that has ``compile_block`` is compiled along with the target; one that has ``most`` is told there how
    many drafts of the next round will be read at most, None for all; one that has ``finished`` is given the call's own
    tensor of that name, bool ``[B]``: rows that nobody wants drafts for.
    """

    #: most tokens it proposes in a round
    block_size: int
    #: the target layers whose outputs it reads, ascending; may be empty
    target_layer_ids: list[int]

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        """Make room for ``batch`` rows of up to ``capacity`` tokens."""

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row; what is known stays."""

    @property
    def memory(self) -> int:
        """Bytes that its caches take."""

    def commit(
        self, tokens: torch.Tensor, features: torch.Tensor | None, offsets: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Learn of tokens whose target states exist now (first the prompts, then each round's).

        Args:
            tokens: int64 ``[B, N]``.
            features: ``[B, N, m*H]``, the tapped layers' outputs at these tokens; None without taps.
            offsets: int64 ``[B]``, absolute position of each row's first token here.
            counts: int64 ``[B]`` in 0..N: how many of them are committed.
        """

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        """Draft the tokens after ``anchor`` ``[B]``, which stands at ``position`` ``[B]``."""


class NoDrafter:
    """Proposes nothing: the loop then decodes one token per round, which is plain decoding."""

    block_size = 0
    target_layer_ids: list[int] = []  # noqa: RUF012
    memory = 0
    capturable = ("nothing",)

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        self._none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        self._zero = torch.zeros(batch, dtype=torch.long, device=device)

    def grow(self, capacity: int) -> None:
        pass

    def restart(self) -> None:
        pass

    def select(self, rows: torch.Tensor) -> None:
        self._none, self._zero = self._none[rows], self._zero[rows]

    def commit(
        self, tokens: torch.Tensor, features: torch.Tensor | None, offsets: torch.Tensor, counts: torch.Tensor
    ) -> None:
        pass

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        return Proposal(self._none, self._zero)


class DSparkDrafter:
    """DSpark behind the protocol: context K/V per draft layer, projected once per committed token and cached.

    Args:
        draft: joined to its target.
        use_markov: false leaves the Markov bias out, as if the block's tokens were independent.
        confidence_threshold: cut the block before its first slot whose confidence is lower; 0 keeps it whole.

    Attributes:
        most: draft in blocks of so many slots at most; None for whole ones. The slots in front of those that are left
            out see other masks behind them than in training: their drafts may differ, and are accepted nearly as often.
        finished: bool ``[B]``, rows whose context is not read; None for none.

    Raises:
        ValueError: for a threshold outside [0, 1], or above 0 for a drafter without a confidence head.
    """

    def __init__(self, draft: DSparkDraft, *, use_markov: bool = True, confidence_threshold: float = 0.0) -> None:
        if not 0.0 <= confidence_threshold <= 1.0:
            raise ValueError(f"confidence_threshold is {confidence_threshold}: accepted is 0 to 1")
        if confidence_threshold and not draft.config.enable_confidence_head:
            raise ValueError(f"confidence_threshold is {confidence_threshold}, but the drafter has no confidence head")
        self.draft = draft
        self.use_markov = use_markov
        self.confidence_threshold = confidence_threshold
        self.block_size = draft.config.block_size
        self.most: int | None = None
        self.finished: torch.Tensor | None = None
        self.target_layer_ids = list(draft.config.target_layer_ids)

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        config = self.draft.config
        shape = (config.num_hidden_layers, batch, capacity, config.num_key_value_heads, config.head_dim)
        # zeros, not empty: see RaggedLayer.lazy_initialization
        keys, values = (torch.zeros(shape, dtype=self.draft.dtype, device=device) for _ in range(2))
        self.context = Context(self.draft, keys, values, torch.zeros(batch, dtype=torch.long, device=device))
        self._block = torch.arange(self.block_size, device=device)
        self._logits: torch.Tensor | None = None
        self._compiled, self.most, self.finished = False, None, None

    def grow(self, capacity: int) -> None:
        context = self.context
        context.keys, context.values = (widened(one, 2, capacity) for one in (context.keys, context.values))

    @property
    def capturable(self) -> tuple[Hashable, ...]:
        """What a graph of its rounds has baked in, the weights' addresses among it: it asks the host nothing."""
        weights = (*self.draft.parameters(), *self.draft.buffers())
        return type(self), self.use_markov, self.confidence_threshold, hash(tuple(one.data_ptr() for one in weights))

    def restart(self) -> None:
        """Begin again with the same rows and room, without moving a tensor."""
        self.context.absent.zero_()

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 ``[n]``, in new tensors."""
        context = self.context
        context.keys, context.values, context.absent = (
            context.keys[:, rows],
            context.values[:, rows],
            context.absent[rows],
        )
        self._logits = None

    def compile_block(self, position: torch.Tensor) -> bool:
        """Compile the pass over a block, where that is faster; after the prefill.

        It is to run inside :func:`~dspark_fast.engine.compiled.compiling`. Its shape is fixed: from here on the context
        must not grow.

        Args:
            position: int64 ``[B]``, of the next anchors; what the pass writes behind them is drafts.

        Returns:
            Whether that is faster.
        """
        draft, anchor = self.draft, torch.zeros_like(position)
        if hindrance(draft) is not None:
            return False
        plainly = partial(self._block_pass, anchor, position)
        quickly = partial(_compiled_block(), self, anchor, position)
        shape = (*self.context.keys.shape, self.block_size, str(draft.dtype), str(draft.device))
        self._compiled = chosen(draft, shape, plainly, quickly, what="the drafter's pass")
        return self._compiled

    def resume(self, context: Context | None, known: torch.Tensor) -> None:
        """Go on after :meth:`begin` from a context of the same drafter, in place.

        Args:
            context: None if there is none: everything before ``known`` is then absent.
            known: int64 ``[B]``, the position from which each row's tokens will be committed.
        """
        own = self.context
        if context is None or context.draft is not self.draft:
            own.absent.copy_(known)
            return
        own.absent.copy_(torch.minimum(context.absent, known))
        # Both have room for all that is known, and what lies behind that in either is not looked at.
        slots = min(own.keys.shape[2], context.keys.shape[2])
        own.keys[:, :, :slots] = context.keys[:, :, :slots]
        own.values[:, :, :slots] = context.values[:, :, :slots]

    @property
    def memory(self) -> int:
        return self.context.keys.nbytes + self.context.values.nbytes

    def commit(
        self, tokens: torch.Tensor, features: torch.Tensor | None, offsets: torch.Tensor, counts: torch.Tensor
    ) -> None:
        draft = self.draft
        context = draft.context(features)
        positions = offsets[:, None] + torch.arange(context.shape[1], device=context.device)
        cos, sin = draft.rotary_emb(context, positions)
        for index, layer in enumerate(draft.layers):
            k, v = layer.self_attn.keys_values(context)
            self._store(index, k, v, cos, sin, offsets, counts)

    def _block_pass(self, anchor: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's final-normed hidden states ``[B, T, H]``, and base logits ``[B, T, V]`` or ``[B, T, D]``."""
        draft, slots = self.draft, self._block[: self.most]
        positions, counts = position[:, None] + slots, torch.full_like(position, len(slots))
        cos, sin = draft.rotary_emb(self.context.keys, positions)
        reach = position + counts - self.context.absent
        if self.finished is not None:
            reach = reach.masked_fill(self.finished, 0)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._store(index, k, v, cos, sin, position, counts)
            return ops.block_attention(
                q,
                self.context.keys[index],
                self.context.values[index],
                reach,
                scale=draft.config.head_dim**-0.5,
                causal=False,
            )

        hidden = draft(draft.block_ids(anchor)[:, : len(slots)], positions, attend)
        return hidden, draft.logits(hidden)

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        draft = self.draft
        block = partial(_compiled_block(), self) if self._compiled else self._block_pass
        hidden, logits = block(anchor, position)
        w1, w2 = draft.markov_weights() if self.use_markov else (None, None)
        walk = ops.markov_walk(
            logits,
            w1,
            w2,
            anchor,
            temperature=noise.temperature,
            seed=noise.seed,
            position=position,
            coupled=noise.mode == "coupled",
            hidden=hidden,
            keep_logits=noise.mode == "rejection",
            vocabulary=draft.vocabulary,
            **(draft.markov_options() if self.use_markov else {}),
        )
        lengths = torch.full_like(position, hidden.shape[1])
        if self.confidence_threshold:
            # A broken slot's token is -1: any other will do, for its row is refused if it is needed.
            prev = torch.cat([anchor[:, None], walk.tokens[:, :-1]], dim=1).clamp(min=0)
            # Slot k is judged before x_k is looked at; comparing probabilities, so that a threshold of 1 cuts all.
            trusted = draft.confidence(hidden, prev).float().sigmoid() >= self.confidence_threshold
            lengths = trusted.long().cumprod(dim=1).sum(dim=1)
        return Proposal(walk.tokens, lengths, self._of_all_tokens(walk.logits), walk.row_max, walk.log_sum)

    def _of_all_tokens(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """``[B, T, D]`` -> ``[B, T, V]``, -inf for tokens that are never drafted: what verification reads."""
        vocabulary = self.draft.vocabulary
        if logits is None or vocabulary is None:
            return logits
        if self._logits is None:  # once: the other columns stay as they are
            shape = (len(logits), self.block_size, self.draft.config.vocab_size)
            self._logits = logits.new_full(shape, -torch.inf)
        return self._logits[:, : logits.shape[1]].index_copy_(2, vocabulary, logits)

    def _store(
        self,
        index: int,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        offsets: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        norm, context = self.draft.layers[index].self_attn.k_norm, self.context
        keys, values, slots = context.keys[index], context.values[index], offsets - context.absent
        ops.store_context_kv(k, v, norm.weight, cos, sin, keys, values, slots, counts, eps=norm.eps)


@cache
def _compiled_block() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(DSparkDrafter._block_pass, fullgraph=True, dynamic=False)
