"""The users' doors: ``generate``, and ``decoding`` for transformers' own ``generate(custom_generate=...)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspark_fast.draft import DSparkDraft
from dspark_fast.drafters import Drafter, DSparkDrafter, NoDrafter, Noise
from dspark_fast.loop import Plan, decode
from dspark_fast.packing import pack
from dspark_fast.pairing import check_pair
from dspark_fast.reference import expand_seeds
from dspark_fast.requests import Request, read_request
from dspark_fast.round import Cuts, Sampling
from dspark_fast.state import DecodingState, Limits
from dspark_fast.stats import Stats

VERIFICATIONS = ("rejection", "coupled")
_PROTOCOL = ("block_size", "target_layer_ids", "begin", "commit", "propose")
# transformers drops these without a word when it calls a callable
_NOT_PASSED_ON = ("custom_generate", "assistant_model", "stop_strings", "synced_gpus")


class Decoding:
    """A callable for ``model.generate(..., custom_generate=...)``; see :func:`decoding`.

    Attributes:
        stats: figures of the last call.
    """

    def __init__(
        self,
        draft: DSparkDraft | Drafter | None,
        *,
        verification: str,
        seed: int | Sequence[int] | torch.Tensor | None,
        generator: torch.Generator | None,
        confidence_threshold: float,
        use_markov: bool,
        streamer: Any,
    ) -> None:
        if verification not in VERIFICATIONS:
            raise ValueError(f"verification is {verification!r}: accepted are {', '.join(map(repr, VERIFICATIONS))}")
        if seed is not None and generator is not None:
            raise ValueError("seed and generator are both given: accepted is one of them")
        if isinstance(draft, DSparkDraft):
            self._drafter: Drafter = DSparkDrafter(
                draft, use_markov=use_markov, confidence_threshold=confidence_threshold
            )
        elif draft is not None and not all(hasattr(draft, name) for name in _PROTOCOL):
            raise TypeError(f"draft is {draft!r}: accepted are a DSparkDraft, a Drafter or None")
        else:
            if not use_markov or confidence_threshold:
                raise ValueError("use_markov and confidence_threshold are settings of a DSparkDraft")
            self._drafter = NoDrafter() if draft is None else draft
        self._draft = draft
        self._verification = verification
        self._seed = seed
        self._generator = generator
        self._streamer = streamer
        self.stats: Stats | None = None

    # transformers takes every parameter that it sees here and does not know out of the user's keywords: its own names.
    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        request = read_request(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        self._check(model, request)
        prompts, lengths = pack(input_ids, model_kwargs.get("attention_mask"))
        batch = len(lengths)
        temperature = request.temperature if request.do_sample else 0.0
        noise = Noise(
            mode=self._verification if request.do_sample else "greedy",
            temperature=torch.full((batch,), temperature, dtype=torch.float32, device=input_ids.device),
            seed=self._seeds(batch, request).to(input_ids.device),
        )
        streamer = self._streamer
        if streamer is not None:
            streamer.put(input_ids.cpu())

        def stream(rows: list[list[int]]) -> None:
            for token in rows[0] if streamer is not None else ():
                streamer.put(torch.tensor([token]))

        cuts = Cuts(request.top_k, request.top_p, request.min_p) if request.do_sample else Cuts()
        plan = Plan(
            Sampling(noise, cuts),
            Limits(request.new_tokens, torch.tensor(request.stop_tokens, dtype=torch.long, device=input_ids.device)),
            on_commit=stream,
        )
        state, self.stats = decode(model, self._drafter, prompts, lengths, plan)
        if streamer is not None:
            streamer.end()
        sequences = _sequences(input_ids, state, request.pad_token)
        if not request.return_dict:
            sequences.stats = self.stats  # type: ignore[attr-defined]
            return sequences
        output = GenerateDecoderOnlyOutput(sequences=sequences)
        output.stats = self.stats  # type: ignore[attr-defined]
        return output

    def _check(self, model: PreTrainedModel, request: Request) -> None:
        if self._streamer is not None and request.batch > 1:
            raise ValueError(f"streamer takes one row, the batch has {request.batch}: rows advance at their own pace")
        draft = self._draft
        if isinstance(draft, DSparkDraft):
            check_pair(draft.config, model)
            draft.tied("embed_tokens")
            if draft.device != model.device:
                raise ValueError(f"the drafter is on {draft.device}, the target on {model.device}: move one with .to()")

    def _seeds(self, batch: int, request: Request) -> torch.Tensor:
        """One 64-bit seed per row: a list as it is, anything else expanded over (prompt, return sequence)."""
        if self._seed is not None and not isinstance(self._seed, int):
            given = self._seed
            values = torch.atleast_1d(given).tolist() if isinstance(given, torch.Tensor) else list(given)
            if len(values) != batch:
                raise ValueError(f"seed has {len(values)} values for {batch} rows: accepted are an int or one per row")
            return torch.tensor([_signed(value) for value in values])
        seed = self._seed
        if seed is None and not request.do_sample:
            seed = 0  # nothing is drawn, so torch's generator is left alone
        if seed is None:
            device = self._generator.device if self._generator is not None else "cpu"
            drawn = torch.randint(-(2**63), 2**63 - 1, (1,), generator=self._generator, device=device)
            seed = int(drawn)
        elif not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed is {seed}: accepted are integers of 64 bits")
        return expand_seeds(seed, batch // request.return_sequences, request.return_sequences)


def decoding(
    draft: DSparkDraft | Drafter | None,
    *,
    verification: str = "rejection",
    seed: int | Sequence[int] | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    streamer: Any = None,
) -> Decoding:
    """Speculative decoding as a callable: ``model.generate(..., custom_generate=dspark_fast.decoding(draft))``.

    Everything else (``max_new_tokens``, ``do_sample``, ``temperature``, ...) goes to ``model.generate`` as usual.
    transformers does not hand a ``streamer`` to a callable, so it is given here.

    Args:
        draft: a :class:`~dspark_fast.draft.DSparkDraft` joined to the target; or any
            :class:`~dspark_fast.drafters.Drafter`; or None, which decodes plainly.
        verification: when sampling. ``rejection`` (Leviathan et al. 2023; Chen et al. 2023) keeps the target's
            distribution. ``coupled`` (Daliri, Musco and Suresh 2024) gives exactly the tokens of plain Gumbel-max
            sampling with the same seed, whatever the drafter, at a lower acceptance.
        seed: 64-bit integer, expanded over (prompt, return sequence); or one per row, taken as they are.
        generator: draws the seed when none is given; without either, torch's global generator does.
        confidence_threshold: 0 to 1; cut each block before its first slot of lower confidence (zero drafts allowed).
        use_markov: false drops the Markov bias.
        streamer: as in transformers; batch 1.

    Raises:
        ValueError: for an argument out of range, naming it, its value and what is accepted.
    """
    return Decoding(
        draft,
        verification=verification,
        seed=seed,
        generator=generator,
        confidence_threshold=confidence_threshold,
        use_markov=use_markov,
        streamer=streamer,
    )


def generate(
    model: PreTrainedModel,
    draft: DSparkDraft | Drafter | None,
    input_ids: torch.Tensor,
    *,
    verification: str = "rejection",
    seed: int | Sequence[int] | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    streamer: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with ``model``, several tokens per forward pass; what comes out is what ``model.generate`` would give.

    Greedy: the same tokens (in 16-bit arithmetic a near-tie may fall the other way, since a pass over several tokens
    rounds differently from a pass over one). Sampling: the same distribution, or with ``verification="coupled"`` the
    tokens of plain Gumbel-max sampling with the same seed.

    Args:
        model: any decoder-only transformers model that takes its attention from transformers' interface, in eval mode.
        draft, verification, seed, generator, confidence_threshold, use_markov, streamer: see :func:`decoding`.
        input_ids: int64 ``[B, S]``, left-padded where ``attention_mask`` is 0.
        **kwargs: what ``model.generate`` takes: ``attention_mask``, ``generation_config`` and its overrides
            (``max_new_tokens``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``eos_token_id``,
            ``num_return_sequences``, ``return_dict_in_generate``, ...).

    Returns:
        What ``model.generate`` returns: ``[B, S + n]``, or a ``GenerateDecoderOnlyOutput``; with ``.stats``
        (:class:`~dspark_fast.stats.Stats`) on it.

    Raises:
        ValueError: for a drafter that cannot belong to the target, or a setting that is out of range or cannot be
            combined with speculative decoding; before any work, naming it.
        FloatingPointError: if the target's logits are NaN, naming row and position.
    """
    custom = decoding(
        draft,
        verification=verification,
        seed=seed,
        generator=generator,
        confidence_threshold=confidence_threshold,
        use_markov=use_markov,
        streamer=streamer,
    )
    for name in _NOT_PASSED_ON:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is given, which speculative decoding does not take: leave it out")
    return model.generate(input_ids, custom_generate=custom, **kwargs)


def _signed(seed: Any) -> int:
    """A 64-bit seed as the signed integer that torch keeps it as."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed holds {seed}: accepted are integers of 64 bits")
    return (seed + 2**63) % 2**64 - 2**63


def _sequences(input_ids: torch.Tensor, state: DecodingState, pad_token: int) -> torch.Tensor:
    """The input as it came with each row's output behind it, padded on the right to the longest."""
    counts = state.lengths - state.prompt_lengths
    new = torch.full((len(counts), int(counts.max())), pad_token, dtype=torch.long, device=input_ids.device)
    columns = torch.arange(new.shape[1], device=input_ids.device)
    rows, slots = (columns < counts[:, None]).nonzero(as_tuple=True)
    new[rows, slots] = state.tokens[rows, state.prompt_lengths[rows] + slots]
    return torch.cat([input_ids, new], dim=1)
