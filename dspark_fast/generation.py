"""The users' doors: ``generate``, and ``decoding`` for transformers' own ``generate(custom_generate=...)``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dspark_fast import arguments
from dspark_fast.arguments import Options
from dspark_fast.autoregressive import AutoregressiveDrafter
from dspark_fast.divergence import check_comparable, divergence
from dspark_fast.draft import DSparkDraft
from dspark_fast.drafters import Drafter, DSparkDrafter, NoDrafter, Noise
from dspark_fast.engine.compiled import hindrance
from dspark_fast.engine.eligibility import Path, choose_target
from dspark_fast.engine.graphs import obstacle
from dspark_fast.engine.loop import Plan, decode
from dspark_fast.engine.outputs import Outputs
from dspark_fast.engine.own_past import OwnPast
from dspark_fast.engine.packing import pack
from dspark_fast.engine.past import Past, taken
from dspark_fast.engine.prepacked import to_pack
from dspark_fast.engine.processors import Processors, named
from dspark_fast.engine.requests import Request, read_request
from dspark_fast.engine.round import Cuts, Sampling
from dspark_fast.engine.state import Limits
from dspark_fast.engine.stopping import Stopping, stop_string_criterion
from dspark_fast.engine.switch import Switch
from dspark_fast.engine.target import PREFILL_CHUNK
from dspark_fast.pairing import check_pair
from dspark_fast.seeds import row_seeds
from dspark_fast.stats import Stats

OFF_SWITCH = True  #: what ``off_switch=None`` means, but in rejection mode with an explicit seed

_PROTOCOL = ("block_size", "target_layer_ids", "begin", "grow", "commit", "propose")


class Decoding:
    """A callable for ``model.generate(..., custom_generate=...)``; see :func:`decoding`.

    Attributes:
        stats: figures of the last call.
        request: what the last call was asked for.
    """

    def __init__(self, draft: DSparkDraft | PreTrainedModel | Drafter | None, options: Options) -> None:
        arguments.check_options(options)
        self._draft = draft
        self._drafter = _drafter_of(draft, options)
        self._options = options
        self._streamer = options.streamer
        strings = options.stop_strings
        self._criteria = [] if strings is None else [stop_string_criterion(strings, options.tokenizer)]
        self.stats: Stats | None = None
        self.request: Request | None = None
        self.compared = False  # with plain decoding, which must then be able to do the same

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
        lists = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        arguments.check_prepared(input_ids, generation_config, {**model_kwargs, **lists})
        input_ids = input_ids.long()  # as transformers' own generate makes them of int32
        request = read_request(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        arguments.check_request(self._options, request)
        self._check_pair(model)
        if self.compared:
            check_comparable(request, self._options.verification)
        self.request = request
        prompts, lengths = pack(input_ids, model_kwargs.get("attention_mask"))
        plan = self._plan(model, request, input_ids, prompts, lengths)
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        with named(request.processors):
            decoded = decode(model, self._drafter, prompts, lengths, plan)
        self.stats = decoded.stats
        if self._streamer is not None:
            self._streamer.end()
        sequences = _sequences(input_ids, decoded.rows, request.pad_token)
        if not request.return_dict:
            sequences.stats = self.stats  # type: ignore[attr-defined]
            return sequences
        extras = {} if plan.outputs is None else plan.outputs.stacked([len(row) for row in decoded.rows])
        log_probs = extras.pop("log_probs", None)
        output = GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=decoded.past, **extras)
        output.stats, output.log_probs = self.stats, log_probs  # type: ignore[attr-defined]
        return output

    def _plan(
        self,
        model: PreTrainedModel,
        request: Request,
        input_ids: torch.Tensor,
        prompts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> Plan:
        """How the call is decoded; what cannot be is refused here, before any work."""
        options, device, padding = self._options, input_ids.device, input_ids.shape[1] - lengths
        noise = self._noise(request, len(lengths), device)
        processors = None
        if request.processors:
            taken_out = request.temperature if request.takes_cuts and request.do_sample else 1.0
            processors = Processors(request.processors, input_ids, padding, temperature=taken_out)
        cuts = Cuts(request.top_k, request.top_p, request.min_p) if request.do_sample else Cuts()
        limits = Limits(request.new_tokens, torch.tensor(request.stop_tokens, dtype=torch.long, device=device))
        criteria = [*request.criteria, *self._criteria]
        wanted = {"scores": request.output_scores, "logits": request.output_logits, "log_probs": options.log_probs}
        wanted = [name for name, asked in wanted.items() if asked]
        past = taken(request.past, model, prompts, padding)
        path = self._path(model, request, past, prompts, lengths)
        return Plan(
            Sampling(noise, cuts, processors),
            limits,
            stopping=Stopping(criteria, input_ids, request.new_tokens) if criteria else None,
            outputs=Outputs(len(lengths), wanted) if wanted else None,
            switch=Switch() if self._switches(noise.mode) else None,
            on_commit=self._stream,
            path=path,
            graph=self._graphs(model, device, path, processors, bool(wanted)),
            compiled=self._compiles(model, path),
            strict=options.use_graph is True,
            past=past,
            quantised=request.quantised,
            prepacked=to_pack(self._models(model), options.pack_weights),
            keep=request.return_dict,
        )

    def _noise(self, request: Request, batch: int, device: torch.device) -> Noise:
        options, sampling = self._options, request.do_sample
        temperature = request.temperature if sampling else 0.0
        seeds = row_seeds(options.seed, options.generator, batch, request.return_sequences, sampling=sampling)
        return Noise(
            mode=options.verification if sampling else "greedy",
            temperature=torch.full((batch,), temperature, dtype=torch.float32, device=device),
            seed=seeds.to(device),
        )

    def _path(
        self, model: PreTrainedModel, request: Request, past: Past | None, prompts: torch.Tensor, lengths: torch.Tensor
    ) -> Path:
        """How the target is driven; raises if it cannot be, so far or behind this past."""
        known = torch.zeros_like(lengths) if past is None else past.common(prompts, lengths)
        longest = int(lengths.max())
        arguments.check_positions(model, longest, request.new_tokens)
        path = choose_target(
            model,
            len(lengths),
            # What is known was read by a pass that reached no further than that.
            shortest=int(torch.where(known > 0, known, lengths).min()),
            longest=longest,
            total=longest + request.new_tokens + self._drafter.block_size,
            chunk=PREFILL_CHUNK,
            own=request.quantised is not None or isinstance(past, OwnPast),
        )
        if path == "own" and past is not None and not isinstance(past, OwnPast):
            raise ValueError(
                f"past_key_values is a {type(request.past).__name__}, but {type(model).__name__} is driven behind its "
                "own cache: accepted is what an earlier call gave"
            )
        return path

    def _stream(self, rows: list[list[int]]) -> None:
        for token in rows[0] if self._streamer is not None else ():
            self._streamer.put(torch.tensor([token]))

    def _switches(self, mode: str) -> bool:
        """Whether speculation may be switched off by the clock: in rejection mode tokens would depend on that."""
        if self._drafter.block_size == 0:
            return False
        options = self._options
        if options.off_switch is not None:
            return options.off_switch
        return OFF_SWITCH and (mode != "rejection" or (options.seed is None and options.generator is None))

    def _graphs(
        self, model: PreTrainedModel, device: torch.device, path: str, processors: Processors | None, outputs: bool
    ) -> bool:
        """Whether rounds are captured; raises if they were to be and cannot."""
        if self._options.use_graph is False:
            return False
        why = obstacle(model, self._drafter, device)
        if path == "own":
            why = f"{type(model).__name__} is driven behind its own cache"
        elif processors is not None and not processors.on_device:
            why = "there are logits processors that run on the host"
        elif outputs:
            why = "scores, logits or log-probabilities are asked for, which the host collects"
        if why and self._options.use_graph:
            raise ValueError(f"use_graph is True, but {why}")
        return not why

    def _compiles(self, model: PreTrainedModel, path: str) -> bool:
        """Whether the target's passes are compiled; raises if they were to be and cannot."""
        if not self._options.compile_target:
            return False
        why = f"{type(model).__name__} is driven behind its own cache" if path == "own" else hindrance(model)
        if why:
            raise ValueError(f"compile_target is True, but {why}")
        return True

    def _models(self, model: PreTrainedModel) -> list[nn.Module]:
        """The target, and the model that drafts if the drafter says which."""
        inner = getattr(self._drafter, "draft", None)
        return [model, inner] if isinstance(inner, nn.Module) else [model]

    def _check_pair(self, model: PreTrainedModel) -> None:
        draft = self._draft
        if isinstance(draft, DSparkDraft):
            check_pair(draft.config, model)
            draft.tied("embed_tokens")
            if draft.device != model.device:
                raise ValueError(f"the drafter is on {draft.device}, the target on {model.device}: move one with .to()")
        elif isinstance(self._drafter, AutoregressiveDrafter):
            self._drafter.check(model)


def decoding(
    draft: DSparkDraft | PreTrainedModel | Drafter | None,
    *,
    verification: str = "rejection",
    seed: int | Sequence[int] | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    off_switch: bool | None = None,
    use_graph: bool | None = None,
    compile_target: bool = False,
    pack_weights: bool | None = None,
    log_probs: bool = False,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
) -> Decoding:
    """Speculative decoding as a callable: ``model.generate(..., custom_generate=dspark_fast.decoding(draft))``.

    Everything else (``max_new_tokens``, ``do_sample``, ``temperature``, ...) goes to ``model.generate`` as usual.
    transformers does not hand ``streamer``, ``stop_strings`` and ``tokenizer`` to a callable, so they are given here.

    Args:
        draft: a :class:`~dspark_fast.draft.DSparkDraft` joined to the target; or a smaller causal model of the same
            vocabulary (:class:`~dspark_fast.autoregressive.AutoregressiveDrafter` says how far ahead it drafts); or any
            :class:`~dspark_fast.drafters.Drafter`; or None, which decodes plainly.
        verification: when sampling. ``rejection`` (Leviathan et al. 2023; Chen et al. 2023) keeps the target's
            distribution. ``coupled`` (Daliri, Musco and Suresh 2024) gives exactly the tokens of plain Gumbel-max
            sampling with the same seed, whatever the drafter, at a lower acceptance.
        seed: 64-bit integer, expanded over (prompt, return sequence); or one per row, taken as they are.
        generator: draws the seed when none is given; without either, torch's global generator does.
        confidence_threshold: 0 to 1; cut each block before its first slot of lower confidence (zero drafts allowed).
        use_markov: false drops the Markov bias.
        off_switch: decode plainly for a while when speculation is measured to lose, and try again; and verify no more
            drafts of a block than are measured to pay. Which tokens are drafted then depends on the clock: greedy and
            coupled output does not change by it (in 16 bits a near-tie may fall otherwise, since passes of other widths
            round otherwise), in rejection mode a seed does not give the same tokens again. None: on, but off in
            rejection mode with ``seed`` or ``generator``.
        use_graph: replay rounds as CUDA graphs, which keep the caches' memory for the next call
            (:func:`dspark_fast.clear_graphs` frees it). None: where that works. The tokens are the same.
        compile_target: compile the target's pass over a block with ``torch.compile``, and use that if it is measured to
            be faster; on a CPU the drafter's too. Once per process for each new batch size and capacity, which takes as
            long as ``.stats.seconds.compilation`` says.
        pack_weights: on a CPU, run the linear layers in bf16 on copies of their weights that are laid out for the
            processor: as much memory again, kept for the next call as long as the model lives. Each call reads
            the weights once to see whether they have changed. None: where that is at most 2 GiB. True raises ValueError
            where there is nothing to pack.
        log_probs: give ``.log_probs``, fp32 ``[B, n]``: of each new token under the target's own logits, before
            processors, temperature and cuts. It needs ``return_dict_in_generate``.
        stop_strings, tokenizer: as in transformers: a row ends with the token that completes one of the strings, and is
            padded from there on.
        streamer: as in transformers; batch 1.

    Raises:
        ValueError: for an argument out of range, naming it, its value and what is accepted.
    """
    options = Options(
        verification=verification,
        seed=seed,
        generator=generator,
        confidence_threshold=confidence_threshold,
        use_markov=use_markov,
        off_switch=off_switch,
        use_graph=use_graph,
        compile_target=compile_target,
        pack_weights=pack_weights,
        log_probs=log_probs,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        streamer=streamer,
    )
    return Decoding(draft, options)


def generate(
    model: PreTrainedModel,
    draft: DSparkDraft | PreTrainedModel | Drafter | None,
    input_ids: torch.Tensor,
    *,
    verification: str = "rejection",
    seed: int | Sequence[int] | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    confidence_threshold: float = 0.0,
    use_markov: bool = True,
    off_switch: bool | None = None,
    use_graph: bool | None = None,
    compile_target: bool = False,
    pack_weights: bool | None = None,
    log_probs: bool = False,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    report_divergence: bool = False,
    **kwargs: Any,
) -> Any:
    """Generate with ``model``, several tokens per forward pass; what comes out is what ``model.generate`` would give.

    Greedy: the same tokens (in 16-bit arithmetic a near-tie may fall the other way, since a pass over several tokens
    rounds differently from a pass over one, and packed weights from plain ones). Sampling: the same distribution, or
    with ``verification="coupled"`` the tokens of plain Gumbel-max sampling with the same seed.

    Args:
        model: any decoder-only transformers model that takes its attention from transformers' interface, in eval mode.
        draft, verification, seed, generator, confidence_threshold, use_markov, off_switch, use_graph, compile_target,
            pack_weights, log_probs, stop_strings, tokenizer, streamer: see :func:`decoding`.
        input_ids: int64 ``[B, S]``, left-padded where ``attention_mask`` is 0.
        report_divergence: decode again with transformers' own ``generate`` and say in ``.stats.divergence`` where each
            row differs first, by how much, and whether rounding explains it. Greedy, or ``verification="coupled"``.
        **kwargs: what ``model.generate`` takes: ``attention_mask``, ``generation_config`` and its overrides
            (``max_new_tokens``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``eos_token_id``,
            ``repetition_penalty`` and other settings of stateless logits processors, ``logits_processor``,
            ``stopping_criteria``, ``num_return_sequences``, ``return_dict_in_generate``, ``output_scores``,
            ``output_logits``, ...). ``past_key_values`` goes on from what an earlier call with
            ``return_dict_in_generate`` handed back, or from a ``DynamicCache``, without reading it again.
            ``max_length`` beside ``max_new_tokens`` bounds the caches: what might exceed it is refused.

    Returns:
        What ``model.generate`` returns: ``[B, S + n]``, or a ``GenerateDecoderOnlyOutput``; with ``.stats``
        (:class:`~dspark_fast.stats.Stats`) on it.

    Raises:
        ValueError: for a drafter that cannot belong to the target, or a setting that is out of range or cannot be
            combined with speculative decoding; before any work, naming it.
        FloatingPointError: if the target's logits are NaN, naming row and position.
    """
    options = Options(
        verification=verification,
        seed=seed,
        generator=generator,
        confidence_threshold=confidence_threshold,
        use_markov=use_markov,
        off_switch=off_switch,
        use_graph=use_graph,
        compile_target=compile_target,
        pack_weights=pack_weights,
        log_probs=log_probs,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        streamer=streamer,
    )
    arguments.check_arguments(model, input_ids, options, report_divergence, kwargs)
    # transformers would let max_new_tokens win; whoever gives both wants the caches bounded.
    if kwargs.get("max_length") is not None and kwargs.get("max_new_tokens") is not None:
        arguments.check_bound(input_ids.shape[1], kwargs["max_new_tokens"], kwargs.pop("max_length"))
    # transformers would make a criterion of those in a config, and has no tokenizer then.
    config = kwargs.get("generation_config") or model.generation_config
    if getattr(config, "stop_strings", None) is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
        if options.stop_strings is None:
            options = replace(options, stop_strings=config.stop_strings)
    custom = Decoding(draft, options)
    arguments.check_passed_on(kwargs)
    if not report_divergence:
        return model.generate(input_ids, custom_generate=custom, **kwargs)
    custom.compared = True
    output = model.generate(input_ids, custom_generate=custom, **kwargs)
    settings = kwargs
    if options.stop_strings is not None:
        settings = {**kwargs, "stop_strings": options.stop_strings, "tokenizer": tokenizer}
    output.stats.divergence = divergence(model, input_ids, output, settings, custom.request)
    return output


def _drafter_of(draft: DSparkDraft | PreTrainedModel | Drafter | None, options: Options) -> Drafter:
    """What proposes for a call."""
    if isinstance(draft, DSparkDraft):
        return DSparkDrafter(draft, use_markov=options.use_markov, confidence_threshold=options.confidence_threshold)
    if isinstance(draft, PreTrainedModel):
        draft = AutoregressiveDrafter(draft)
    if draft is not None and not all(hasattr(draft, name) for name in _PROTOCOL):
        raise TypeError(f"draft is {draft!r}: accepted are a DSparkDraft, a causal model, a Drafter or None")
    if not options.use_markov or options.confidence_threshold:
        raise ValueError("use_markov and confidence_threshold are settings of a DSparkDraft")
    return NoDrafter() if draft is None else draft


def _sequences(input_ids: torch.Tensor, rows: list[list[int]], pad_token: int) -> torch.Tensor:
    """The input as it came with each row's output behind it, padded on the right to the longest."""
    longest = max(map(len, rows))
    padded = [row + [pad_token] * (longest - len(row)) for row in rows]
    return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long, device=input_ids.device)], dim=1)
