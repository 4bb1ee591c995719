"""A loaded pair and its settings, and text that is written as it is decoded; torch is imported only when needed."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from dspark_fast.draft import DSparkDraft
    from dspark_fast.stats import Stats

Message = dict[str, str]
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_LONG = {short: long for long, short in _SHORT.items()}


@dataclass(frozen=True)
class Settings:
    """What a command was asked for; see the options of the same names."""

    model: str
    draft: str | None
    dtype: str
    device: str | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | list[int] | None
    verification: str | None
    confidence_threshold: float
    use_markov: bool
    system: str | None = None
    use_draft: bool = True
    threads: int | None = None
    pack_weights: bool | None = None

    def __post_init__(self) -> None:
        # Not torch's generator: a fresh process would draw the same seed every time.
        if self.temperature > 0 and self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(63))

    def cuts(self) -> dict[str, Any]:
        """top-k, top-p and min-p as keywords."""
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def drafting(self) -> dict[str, Any]:
        """What is set of the drafter, as keywords."""
        return {"confidence_threshold": self.confidence_threshold, "use_markov": self.use_markov}


@dataclass
class Answer:
    """New tokens, the text they are, and the figures."""

    tokens: list[int]
    text: str
    stats: Stats


class Session:
    """A target, its drafter (None if there is to be none) and its tokenizer, loaded, with settings.

    Raises:
        ValueError, TargetError: see :func:`dspark_fast.load`; ValueError too where weights are to be packed and none
            can be.
    """

    def __init__(self, settings: Settings) -> None:
        quiet()
        start = time.perf_counter()
        import torch

        from dspark_fast.engine.prepacked import prepackable

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self._past: Cache | None = None
        self.model: PreTrainedModel
        self.draft: DSparkDraft | None
        self.tokenizer: PreTrainedTokenizerBase
        self.model, self.draft, self.tokenizer = _load(settings)
        if settings.pack_weights and not prepackable([self.model]):  # said once, not at each answer of a chat
            raise ValueError(
                f"--pack-weights is given, and the model is in {self.dtype} on {self.device}: accepted is bf16, on a "
                "CPU that multiplies it"
            )
        drafter = f"with the drafter {self.draft_name}" if settings.use_draft else "without a drafter"
        note(f"Loaded {settings.model} {drafter} in {time.perf_counter() - start:.1f} s ({self.dtype}, {self.device})")

    @property
    def dtype(self) -> str:
        """``bf16``, ``fp16``, ``fp32``, or torch's name of another."""
        name = str(self.model.dtype).removeprefix("torch.")
        return _SHORT.get(name, name)

    @property
    def device(self) -> str:
        """``cpu``, or the name of the GPU."""
        import torch

        device = self.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    @property
    def draft_name(self) -> str | None:
        """As given; else the known one, with a word on where it is from; None without a drafter."""
        from dspark_fast.pairs import draft_name

        if not self.settings.use_draft:
            return None
        return draft_name(self.settings.model, self.settings.draft)

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer can lay out a conversation."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def conversation(self, messages: list[Message]) -> torch.Tensor:
        """Messages by the chat template, ready for the model's turn: int64 ``[1, S]``.

        Templates that know ``enable_thinking`` get False: the released Qwen3 drafters are trained without thinking.

        Raises:
            ValueError: the template refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of {self.settings.model} refuses this: {error}") from error
        return encoded["input_ids"].to(self.model.device)

    def plain(self, text: str) -> torch.Tensor:
        """Text as it is: int64 ``[1, S]``."""
        return self.tokenizer(text, return_tensors="pt")["input_ids"].to(self.model.device)

    def room(self, input_ids: torch.Tensor) -> int:
        """``--max-new-tokens``, or less if the model's context ends before.

        Raises:
            ValueError: the prompt is empty or fills the context.
        """
        length = input_ids.shape[1]
        if not length:
            raise ValueError("the prompt is empty: accepted is at least one token")
        context = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if context is None:
            return self.settings.max_new_tokens
        if length >= context:
            raise ValueError(f"the prompt has {length} tokens, and the context of {self.settings.model} is {context}")
        if self.settings.max_new_tokens > context - length:
            note(f"The context of {self.settings.model} ends after {context - length} more tokens: stopping there")
        return min(self.settings.max_new_tokens, context - length)

    def answer(self, input_ids: torch.Tensor, stream: TextStream | None = None) -> Answer:
        """Decode what follows ``input_ids`` ``[1, S]``; what they share with the call before is not read again.

        Raises:
            ValueError, FloatingPointError: see :func:`dspark_fast.generate`.
        """
        import torch

        from dspark_fast import generation

        settings = self.settings
        sampling: dict[str, Any] = {"do_sample": False}
        if settings.temperature > 0:
            sampling = {"do_sample": True, "temperature": settings.temperature, **settings.cuts()}
        output = generation.generate(
            self.model,
            self.draft,
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=self.room(input_ids),
            verification=settings.verification or "rejection",
            seed=settings.seed,
            pack_weights=settings.pack_weights,
            streamer=stream,
            return_dict_in_generate=True,
            past_key_values=self._past,
            **settings.drafting(),
            **sampling,
        )
        self._past = output.past_key_values
        tokens = output.sequences[0, input_ids.shape[1] :].tolist()
        return Answer(tokens, self.tokenizer.decode(tokens, skip_special_tokens=True), output.stats)

    def figures(self, stats: Stats) -> str:
        """One line on what a call did."""
        count = sum(stats.new_tokens)
        parts = [f"{count} token{'' if count == 1 else 's'}"]
        if stats.pauses:
            parts.append(f"{stats.plain_steps} of them without drafts, which seemed to lose time")
        if stats.rounds:
            drafts = f"acceptance length {stats.acceptance_length:.2f}" if self.settings.use_draft else "no drafter"
            parts += [f"{stats.tokens_per_second:.1f} tokens/s", drafts]
        mode = stats.mode
        if mode != "greedy":
            mode += f" at temperature {self.settings.temperature:g}, seed {self.settings.seed}"
        return " | ".join([*parts, mode, self.dtype, self.device])


def _load(settings: Settings) -> tuple[PreTrainedModel, DSparkDraft | None, PreTrainedTokenizerBase]:
    import torch

    from dspark_fast.pairs import best_dtype, chosen_device, load
    from dspark_fast.targets import load_target

    dtype = None if settings.dtype == "auto" else getattr(torch, _LONG[settings.dtype])
    if settings.use_draft:
        return load(settings.model, draft=settings.draft, dtype=dtype, device=settings.device)
    device = chosen_device(settings.device)
    model, tokenizer = load_target(settings.model, best_dtype(device) if dtype is None else dtype, device)
    return model, None, tokenizer


class TextStream:
    """A streamer that hands on text as soon as no later token can change it.

    A character may take several tokens; until it is whole the decoded text ends with U+FFFD and is held back.

    Args:
        tokenizer: decodes.
        write: called with each piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._prompt = True
        self._start = 0  # decoding starts here: one piece back, since a token's text may depend on the one before
        self._done = 0  # tokens up to here are written
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (the first call), then tokens."""
        if self._prompt:
            self._prompt = False
            return
        self.tokens += value.flatten().tolist()
        self._flush(end=False)

    def end(self) -> None:
        """Write what is held back."""
        self._flush(end=True)

    def text(self) -> str:
        """Everything so far."""
        return self._decode(self.tokens)

    def _flush(self, *, end: bool) -> None:
        old = self._decode(self.tokens[self._start : self._done])
        new = self._decode(self.tokens[self._start :])
        if len(new) <= len(old) or (new.endswith("\ufffd") and not end):
            return
        self._write(new[len(old) :])
        self._start, self._done = self._done, len(self.tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def write(text: str) -> None:
    """A piece of the model's text to standard output, at once; a terminal gets no control characters from a model."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c in "\n\t" or c.isprintable() or ord(c) > 0x9F)
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark for the user, to standard error."""
    print(text, file=sys.stderr, flush=True)


def quiet() -> None:
    """Silence the remarks of transformers and the hub's client, and let no character break the output."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub)(\.|$)")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can mend is told in one sentence: exit status 2 for a bad argument, 1 for anything outside.

    Raises:
        typer.Exit: in place of ValueError (2), or of TargetError, OSError, FloatingPointError and a full GPU (1).
    """
    from dspark_fast.wheel import TargetError

    try:
        yield
    except BrokenPipeError:  # `dspark-fast generate ... | head`: typer knows what to do
        raise
    except ValueError as error:
        note(f"Error: {error}")
        raise typer.Exit(2) from None
    except (TargetError, OSError, FloatingPointError) as error:
        note(f"Error: {error}")
        raise typer.Exit(1) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        note(f"Error: {str(error).splitlines()[0]}")
        raise typer.Exit(1) from None
