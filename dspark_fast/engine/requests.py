"""What a call of ``generate`` asks for, read from transformers' prepared arguments; what cannot be done is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, LogitsProcessor, PreTrainedModel, QuantizedCache, StoppingCriteria

from dspark_fast.engine.past import Past
from dspark_fast.engine.processors import check_processors, split
from dspark_fast.engine.stopping import check_criteria

# What the device does, from the generation config: the class, and where it and the config keep the value. One of these
# that somebody made by hand with another value is refused.
_CRITERIA = {"MaxLengthCriteria": "max_length", "EosTokenCriteria": "eos_token_id"}
# What transformers prepares for every call; anything else in its place would reach the target in plain decoding.
_PREPARED = {
    "attention_mask",
    "cache_params",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# Settings of the generation config that ask for something else, and what that is.
_OTHER_METHODS = {
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "prompt_lookup_num_tokens": "assisted decoding by prompt lookup, which is another way to draft",
    "assistant_early_exit": "assisted decoding by the target's own layers, which is another way to draft",
    "use_mtp": "assisted decoding by the target's own heads, which is another way to draft",
    "cache_implementation": "a cache of another kind than ours; accepted are 'dynamic' and 'quantized'",
    "prefill_chunk_size": "prefill in chunks",
}
_TAKEN = [("cache_implementation", "dynamic"), ("cache_implementation", "quantized")]  # some values have no hash
_OUTPUTS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Request:
    """Settings of one call, all rows alike.

    Attributes:
        top_k, top_p, min_p: for the verification op; neutral where ``takes_cuts``.
        processors: logits processors to run before it, as :attr:`~dspark_fast.engine.processors.Split.before`.
        takes_cuts: whether temperature and cuts are among ``processors``.
        criteria: stopping criteria besides length and stop tokens.
        output_scores, output_logits: false without ``return_dict``, as in transformers.
        past: the caller's own cache, with or without tokens; None for the fresh one that transformers made.
        quantised: an empty cache that the target is to be driven behind; None for ours.
    """

    batch: int
    return_sequences: int
    new_tokens: int
    stop_tokens: list[int]
    pad_token: int
    return_dict: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    processors: list[LogitsProcessor]
    takes_cuts: bool
    criteria: list[StoppingCriteria]
    output_scores: bool
    output_logits: bool
    past: Cache | None
    quantised: QuantizedCache | None


_LONGEST = 2**31 - 1  # tokens per row; far beyond, sums of them would wrap around


def read_request(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Request:
    """Read the arguments that transformers' ``generate`` prepared for a callable.

    Raises:
        ValueError: for what speculative decoding does not do, by name, before any work.
    """
    if config is None:
        raise ValueError("generation_config is None: call this through model.generate(custom_generate=...)")
    _refuse(model, input_ids, logits_processor, stopping_criteria, config, model_kwargs)
    eos = config.eos_token_id
    stops = [] if eos is None else [eos] if isinstance(eos, int) else [int(token) for token in eos]
    pad = config.pad_token_id
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise ValueError(
            f"input_ids holds {int(input_ids.min())} to {int(input_ids.max())}: "
            f"accepted are ids from 0 to {vocabulary - 1}"
        )
    before, _, takes_cuts = split(logits_processor, config)
    return_dict = bool(config.return_dict_in_generate)
    cache = _cache(model_kwargs)
    quantised = cache if isinstance(cache, QuantizedCache) else None
    return Request(
        batch=input_ids.shape[0],
        return_sequences=config.num_return_sequences or 1,
        new_tokens=config.max_length - input_ids.shape[1],
        stop_tokens=stops,
        pad_token=pad if pad is not None else (stops[0] if stops else 0),
        return_dict=return_dict,
        do_sample=bool(config.do_sample),
        temperature=_or(config.temperature, 1.0),
        top_k=0 if takes_cuts else _or(config.top_k, 0),
        top_p=1.0 if takes_cuts else _or(config.top_p, 1.0),
        min_p=0.0 if takes_cuts else _or(config.min_p, 0.0),
        processors=before,
        takes_cuts=takes_cuts,
        criteria=_other_criteria(stopping_criteria),
        output_scores=return_dict and bool(config.output_scores),
        output_logits=return_dict and bool(config.output_logits),
        past=None if quantised is not None else _past(cache),
        quantised=quantised,
    )


def _refuse(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> None:
    if model_kwargs.get("inputs_embeds") is not None:  # first: transformers then makes input_ids of no width
        raise ValueError("inputs_embeds is given: accepted are input_ids")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: accepted is [B, S] with S of 1 or more")
    if config.max_length is None or config.max_length <= input_ids.shape[1]:
        raise ValueError(
            f"max_length is {config.max_length} for a prompt of {input_ids.shape[1]} tokens: "
            "give max_new_tokens of 1 or more"
        )
    if config.max_length > _LONGEST:
        raise ValueError(
            f"max_length is {config.max_length}: accepted is up to {_LONGEST}; give a smaller max_new_tokens"
        )
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams is {config.num_beams}: speculative decoding has no beam search, accepted is 1")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise ValueError(f"guidance_scale is {config.guidance_scale}: classifier-free guidance is not supported")
    for name, method in _OTHER_METHODS.items():
        value = getattr(config, name, None)
        if value and (name, value) not in _TAKEN:
            raise ValueError(f"{name} is {value!r}: that is {method}, which is not supported")
    if asked := [name for name in _OUTPUTS if getattr(config, name, None)]:
        raise ValueError(f"{', '.join(asked)} is asked for: accepted are output_scores and output_logits")
    if config.use_cache is False or model_kwargs.get("use_cache") is False:
        raise ValueError("use_cache is False: drafts are verified against a cache, give use_cache=True")
    check_processors(logits_processor)
    _refuse_by_hand(stopping_criteria, config)
    check_criteria(_other_criteria(stopping_criteria))
    cache = _cache(model_kwargs)
    past = _past(cache)
    if past is not None and not isinstance(past, (DynamicCache, Past, QuantizedCache)):
        raise ValueError(
            f"past_key_values is a {type(past).__name__}: accepted are a DynamicCache, an empty QuantizedCache and "
            "what an earlier call gave"
        )
    if isinstance(cache, QuantizedCache):
        _refuse_quantised(cache)
    extra = sorted(name for name, value in model_kwargs.items() if name not in _PREPARED and _matters(name, value))
    if extra:
        raise ValueError(f"{', '.join(extra)} given: speculative decoding passes input_ids alone to the target")
    _refuse_positions(input_ids, model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    checkpointing = "is_activation_checkpointing"  # since transformers 5.23, where the older name warns
    if not hasattr(model, checkpointing):
        checkpointing = "is_gradient_checkpointing"
    if model.training and getattr(model, checkpointing, False):
        raise ValueError("the model trains with gradient checkpointing, which drops the cache: call model.eval() first")


def _refuse_quantised(cache: QuantizedCache) -> None:
    length = cache.get_seq_length()
    if length:
        raise ValueError(f"past_key_values is a QuantizedCache of {length} tokens: accepted is an empty one")
    if any(hasattr(layer, "residual_length") for layer in cache.layers):
        raise ValueError(
            f"the cache's layers are {type(cache.layers[0]).__name__}, which quantises anew every few tokens: what it "
            "holds then depends on how the tokens were grouped into passes; accepted is the backend 'fp8'"
        )


def _matters(name: str, value: Any) -> bool:
    """Whether a model input says something; token types of all zeros are what a tokenizer adds by itself."""
    return value is not None and not (name == "token_type_ids" and not bool(value.any()))


def _refuse_positions(input_ids: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """transformers hands over the positions that the mask gives; others would be ignored by the loop."""
    if positions is None or (mask is not None and mask.shape != input_ids.shape):  # the mask is refused by pack()
        return
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    own = mask.cumsum(1) - 1
    if positions.shape != own.shape or bool(((positions != own) & mask.bool()).any()):
        raise ValueError("position_ids are given: accepted are those that the attention_mask gives, counted from 0")


def _refuse_by_hand(criteria: Any, config: Any) -> None:
    for item in criteria or ():
        name = type(item).__name__
        if name not in _CRITERIA:
            continue
        key = _CRITERIA[name]
        theirs, ours = (_values(getattr(source, key)) for source in (item, config))
        if theirs != ours:
            raise ValueError(
                f"the stopping criterion {name} has {key} {theirs}, the generation config {ours}: "
                f"give {key} to generate instead"
            )


def _other_criteria(criteria: Any) -> list[StoppingCriteria]:
    return [item for item in criteria or () if type(item).__name__ not in _CRITERIA]


def _cache(model_kwargs: dict[str, Any]) -> Cache | None:
    """The caller's, or one that transformers made; Mamba's has a name of its own."""
    given = (model_kwargs.get(name) for name in ("past_key_values", "cache_params"))
    return next((cache for cache in given if cache is not None), None)


def _past(cache: Cache | None) -> Cache | None:
    """The caller's cache: transformers marks it, since it makes one itself where there is none."""
    brought = isinstance(cache, Past) or getattr(cache, "_is_user_defined", False)
    return cache if cache is not None and (brought or cache.is_initialized) else None


def _values(value: Any) -> Any:
    """A setting as plain data, so that a tensor, a list and a number of the same value are equal."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
