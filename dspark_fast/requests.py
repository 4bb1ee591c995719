"""What a call of ``generate`` asks for, read from transformers' prepared arguments; what cannot be done is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

# What the loop itself does, from the generation config: the class, and where it and the config keep the value. Anything
# else is refused by name, and so is one of these that somebody made by hand with another value.
_PROCESSORS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
_CRITERIA = {"MaxLengthCriteria": "max_length", "EosTokenCriteria": "eos_token_id"}
# What transformers prepares for every call; anything else in its place would reach the target in plain decoding.
_PREPARED = {
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
_OTHER_METHODS = (
    "penalty_alpha",
    "dola_layers",
    "cache_implementation",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
)
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Request:
    """Settings of one call, all rows alike."""

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
    return Request(
        batch=input_ids.shape[0],
        return_sequences=config.num_return_sequences or 1,
        new_tokens=config.max_length - input_ids.shape[1],
        stop_tokens=stops,
        pad_token=pad if pad is not None else (stops[0] if stops else 0),
        return_dict=bool(config.return_dict_in_generate),
        do_sample=bool(config.do_sample),
        temperature=_or(config.temperature, 1.0),
        top_k=_or(config.top_k, 0),
        top_p=_or(config.top_p, 1.0),
        min_p=_or(config.min_p, 0.0),
    )


def _refuse(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> None:
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: accepted is [B, S] with S of 1 or more")
    if config.max_length is None or config.max_length <= input_ids.shape[1]:
        raise ValueError(
            f"max_length is {config.max_length} for a prompt of {input_ids.shape[1]} tokens: "
            "give max_new_tokens of 1 or more"
        )
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams is {config.num_beams}: speculative decoding has no beam search, accepted is 1")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise ValueError(f"guidance_scale is {config.guidance_scale}: classifier-free guidance is not supported")
    for name in _OTHER_METHODS:
        if getattr(config, name, None):
            raise ValueError(f"{name} is {getattr(config, name)!r}: speculative decoding has no such setting")
    if asked := [name for name in _OUTPUTS if getattr(config, name, None)]:
        raise ValueError(f"{', '.join(asked)} is asked for: only the sequences are returned so far")
    _refuse_unknown("logits processor", logits_processor, _PROCESSORS, config)
    _refuse_unknown("stopping criterion", stopping_criteria, _CRITERIA, config)
    past = model_kwargs.get("past_key_values")
    if past is not None and (past.get_seq_length() or getattr(past, "_is_user_defined", False)):
        raise ValueError(
            f"past_key_values is given, with {past.get_seq_length()} tokens: a cache cannot be handed in yet"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is given: accepted are input_ids")
    extra = sorted(name for name, value in model_kwargs.items() if name not in _PREPARED and _matters(name, value))
    if extra:
        raise ValueError(f"{', '.join(extra)} given: speculative decoding passes input_ids alone to the target")
    _refuse_positions(input_ids, model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    checkpointing = "is_activation_checkpointing"  # since transformers 5.23, where the older name warns
    if not hasattr(model, checkpointing):
        checkpointing = "is_gradient_checkpointing"
    if model.training and getattr(model, checkpointing, False):
        raise ValueError("the model trains with gradient checkpointing, which drops the cache: call model.eval() first")


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


def _refuse_unknown(kind: str, items: Any, known: dict[str, str], config: Any) -> None:
    for item in items or ():
        name = type(item).__name__
        if name not in known:
            raise ValueError(f"the {kind} {name} is not supported; accepted are {', '.join(sorted(known))}")
        theirs, ours = (_values(getattr(source, known[name])) for source in (item, config))
        by_hand = theirs != ours or getattr(item, "min_tokens_to_keep", 1) != 1
        if by_hand or (kind == "logits processor" and not config.do_sample):
            raise ValueError(
                f"the {kind} {name} has {known[name]} {theirs}, the generation config {ours}: "
                f"give {known[name]} to generate instead"
            )


def _values(value: Any) -> Any:
    """A setting as plain data, so that a tensor, a list and a number of the same value are equal."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
