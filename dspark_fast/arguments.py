"""What ``generate`` and ``decoding`` are given: our options, and checks that name a wrong value before any work.

``generate`` looks before transformers does, whose errors name neither argument nor value; ``decoding`` looks at its own
options when it is made, and at what transformers made of the rest when it is called.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from dspark_fast.engine.past import Past
from dspark_fast.engine.positions import learned_positions
from dspark_fast.engine.requests import Request

VERIFICATIONS = ("rejection", "coupled")

_LARGEST = 3.0e38  # of fp32, all but
# transformers drops these without a word when it calls a callable
_NOT_PASSED_ON = ("custom_generate", "assistant_model", "synced_gpus")


@dataclass(frozen=True)
class Options:
    """Our own options of a call, as they were given. :func:`dspark_fast.decoding` says what each of them means."""

    verification: str
    seed: int | Sequence[int] | torch.Tensor | None
    generator: torch.Generator | None
    confidence_threshold: float
    use_markov: bool
    off_switch: bool | None
    use_graph: bool | None
    compile_target: bool
    pack_weights: bool | None
    log_probs: bool
    stop_strings: str | Sequence[str] | None
    tokenizer: Any
    streamer: Any


def check_arguments(
    model: Any, input_ids: Any, options: Options, report_divergence: Any, given: dict[str, Any]
) -> None:
    """Refuse values of the wrong kind; what is out of range is refused where its range is known.

    Args:
        model, input_ids, report_divergence: of ``generate``.
        options: its own.
        given: its keywords for ``model.generate``.

    Raises:
        ValueError: naming the argument, its value and what is accepted.
    """
    # Not by class: what torch.compile and adapters wrap a model in are other classes, which hand its parts on.
    if not all(hasattr(model, name) for name in ("generate", "config", "generation_config")):
        raise ValueError(f"model is a {type(model).__name__}: accepted is a transformers model")
    if given.get("inputs_embeds") is None:  # refused later, by name
        _check_input(input_ids, given.get("attention_mask"))
    _check_own({**vars(options), "report_divergence": report_divergence})
    _check_kinds(given, _GIVEN)


def check_options(options: Options) -> None:
    """:func:`check_arguments` for our own options alone; and that no two of them stand in each other's way."""
    _check_own(vars(options))
    if options.verification not in VERIFICATIONS:
        accepted = ", ".join(map(repr, VERIFICATIONS))
        raise ValueError(f"verification is {options.verification!r}: accepted are {accepted}")
    if options.seed is not None and options.generator is not None:
        raise ValueError("seed and generator are both given: accepted is one of them")


def check_prepared(input_ids: Any, config: Any, given: dict[str, Any]) -> None:
    """:func:`check_arguments` for what transformers hands to a callable: it has put settings into ``config``."""
    if given.get("inputs_embeds") is None:
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        _check_input(input_ids, mask)
        if mask is None and positions is not None and positions.shape != input_ids.shape:
            # transformers makes them of the mask, and drops one of all ones
            raise ValueError(
                f"position_ids or attention_mask has shape {list(positions.shape)}, input_ids {list(input_ids.shape)}: "
                "accepted is a mask of the same shape"
            )
    _check_kinds({**{name: getattr(config, name, None) for name in _GIVEN}, **given}, _GIVEN)


def check_bound(prompt: int, new: int, most: int) -> None:
    """Refuse a ``max_length`` of ``most`` that ``new`` tokens behind a prompt of ``prompt`` tokens might exceed."""
    if prompt + new > most:
        raise ValueError(
            f"max_length is {most}, but the prompt has {prompt} tokens and max_new_tokens is {new}: "
            f"accepted is max_new_tokens of {most - prompt} or less"
        )


def check_positions(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Refuse ``new`` tokens behind a prompt of ``prompt`` tokens that the model has no positions for."""
    table = learned_positions(model)
    if table is not None and prompt + new - 1 > table:  # the last token is never read
        raise ValueError(
            f"max_new_tokens is {new} behind a prompt of {prompt} tokens, and {type(model).__name__} has learned "
            f"{table} positions: accepted is up to {max(table - prompt + 1, 0)}"
        )


def check_request(options: Options, request: Request) -> None:
    """Refuse options that the rest of the call leaves no place for."""
    if options.log_probs and not request.return_dict:
        raise ValueError("log_probs is True, but there is nothing to give them on: set return_dict_in_generate=True")
    if options.streamer is not None and request.batch > 1:
        raise ValueError(f"streamer takes one row, the batch has {request.batch}: rows advance at their own pace")


def check_passed_on(given: dict[str, Any]) -> None:
    """Refuse what transformers would not hand to a callable, among the keywords for ``model.generate``."""
    for name in _NOT_PASSED_ON:
        if given.get(name) is not None:
            raise ValueError(f"{name} is given, which speculative decoding does not take: leave it out")


def _check_own(own: dict[str, Any]) -> None:
    for name in _NEVER_NONE:
        if name in own and own[name] is None:
            raise ValueError(f"{name} is None: accepted is {_OWN[name][1]}")
    _check_kinds(own, _OWN)


def _check_kinds(values: dict[str, Any], kinds: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, (fits, accepted) in kinds.items():
        value = values.get(name)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {reprlib.repr(value)}: accepted is {accepted}")


def _check_input(input_ids: Any, mask: Any) -> None:
    for name, given in (("input_ids", input_ids), ("attention_mask", mask)):
        if name == "attention_mask" and given is None:
            continue
        if not isinstance(given, torch.Tensor) or given.layout != torch.strided or given.dim() != 2:
            what = f"of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"
            raise ValueError(f"{name} is {what}: accepted is a dense tensor [B, S]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids is {input_ids.dtype}: accepted are int64 and int32")
    if not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}: accepted is [B, S] with S of 1 or more")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(input_ids.shape)}: "
            "accepted is a mask of the same shape"
        )


def _integer(least: int, most: int) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        try:
            return not isinstance(value, bool) and least <= operator.index(value) <= most  # numpy's integers too
        except TypeError:
            return False

    return fits


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _temperature(value: Any) -> bool:
    """Infinite is as transformers has it; what fp32 cannot hold is not."""
    return _number(value) and not (0 < value < 1e-30) and (value == math.inf or not value > _LARGEST)


def _tokens(value: Any) -> bool:
    """Stop tokens: one, or some, in any of the forms that transformers takes."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point()
    some = value if isinstance(value, (list, tuple, set)) else [value]
    return all(_integer(-(2**63), 2**63 - 1)(one) for one in some)


def _strings(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and not isinstance(value, bytes))


def _seeds(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**64
    return isinstance(value, (Sequence, torch.Tensor)) and not isinstance(value, (str, bytes))


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_FLAGS = ("use_markov", "off_switch", "use_graph", "compile_target", "pack_weights", "log_probs", "report_divergence")
_NEVER_NONE = ("use_markov", "compile_target", "log_probs", "report_divergence", "confidence_threshold")
_OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_FLAGS, (_flag, "True or False")),
    "confidence_threshold": (_number, "0 to 1"),
    "seed": (_seeds, "an integer of 64 bits or one per row"),
    "generator": (lambda value: isinstance(value, torch.Generator), "a torch.Generator"),
    "streamer": (lambda value: hasattr(value, "put") and hasattr(value, "end"), "a transformers streamer"),
    "stop_strings": (_strings, "a string or a list of them, none empty"),
    "tokenizer": (lambda value: hasattr(value, "get_vocab"), "a transformers tokenizer"),
}
_GIVEN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (_integer(-(2**70), 2**31 - 1), f"an integer of 1 to {2**31 - 1}"),
    "max_length": (_integer(-(2**70), 2**31 - 1), f"an integer of 1 to {2**31 - 1}"),
    "num_return_sequences": (_integer(1, 2**62), "an integer of 1 or more"),
    "temperature": (_temperature, "0, or 1e-30 to 3e38"),
    "top_k": (lambda value: not isinstance(value, int) or value < 2**63, "an integer of 64 bits"),
    "eos_token_id": (_tokens, "a token id or a list of them"),
    "generation_config": (lambda value: isinstance(value, GenerationConfig), "a GenerationConfig"),
    "past_key_values": (lambda value: isinstance(value, (Cache, Past)), "what an earlier call handed back"),
    "logits_processor": (lambda value: isinstance(value, Sequence), "a list of logits processors"),
    "stopping_criteria": (
        lambda value: isinstance(value, Sequence) and all(map(callable, value)),
        "a list of stopping criteria",
    ),
}
