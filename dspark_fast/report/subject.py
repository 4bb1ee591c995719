"""A loaded pair, the prompts, and their answers: each decoded once, and held against plain decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dspark_fast.autoregressive import AutoregressiveDrafter, first_layers
from dspark_fast.divergence import first_difference
from dspark_fast.draft import DSparkDraft
from dspark_fast.evaluation import Evaluation, Prompt, evaluate
from dspark_fast.evaluation.conversation import check_room, lay_out
from dspark_fast.report.measurement import counted
from dspark_fast.report.recording import Block, RecordingDrafter
from dspark_fast.stats import Stats

CUT = "the target's first"  # so many of its layers: the name of a drafter that nobody trained to draft
MOST_FP32 = 8_000_000_000  # bytes of a second copy of the pair: a target of 2 B weights, on any machine that holds it


class NotLossless(RuntimeError):
    """Tokens differ from those of plain decoding, and rounding does not explain it; the text says where."""


@dataclass(frozen=True)
class Equality:
    """Answers held against those of transformers' own ``generate``.

    Attributes:
        parts: by way of decoding, how many answers and how many of them have the same tokens.
        near_ties: of the others, in words: where they part, and why rounding explains it. 16-bit arithmetic only.
    """

    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    near_ties: tuple[str, ...] = ()

    def __add__(self, other: Equality) -> Equality:
        """Of different answers."""
        parts = dict(self.parts)
        for way, (answers, identical) in other.parts.items():
            before = parts.get(way, (0, 0))
            parts[way] = before[0] + answers, before[1] + identical
        return Equality(parts, self.near_ties + other.near_ties)

    def __or__(self, other: Equality) -> Equality:
        """Of answers some of which are the same ones: a way that both know counts once."""
        ties = tuple(dict.fromkeys(self.near_ties + other.near_ties))
        return Equality({**self.parts, **other.parts}, ties)

    @property
    def answers(self) -> int:
        return sum(answers for answers, _ in self.parts.values())

    @property
    def identical(self) -> int:
        return sum(identical for _, identical in self.parts.values())

    def sentence(self) -> str:
        """In words."""
        parted = self.answers - self.identical
        if not parted:
            return f"All {counted(self.answers, 'answer')} have the tokens of plain decoding."
        others = (
            "the other parts from it at a near-tie" if parted == 1 else f"the other {parted} part from it at near-ties"
        )
        return (
            f"{self.identical} of {counted(self.answers, 'answer')} have the tokens of plain decoding; {others}, which "
            "16-bit rounding explains."
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Equality:
        return cls({way: (one[0], one[1]) for way, one in data["parts"].items()}, tuple(data["near_ties"]))


@dataclass(frozen=True)
class Answers:
    """All prompts answered greedily, one at a time, by one drafter.

    Attributes:
        evaluation: what was drafted and accepted, counted by the authors' definitions.
        tokens: new tokens by prompt.
        blocks: rounds by prompt; empty lists for a drafter that is not recorded.
        equality: against plain decoding.
    """

    evaluation: Evaluation
    tokens: list[list[int]]
    blocks: list[list[Block]]
    equality: Equality


@dataclass
class Subject:
    """What is measured.

    Attributes:
        model, draft, tokenizer: the pair; the drafter is None where only others are measured.
        small: the autoregressive drafter it is held against; None if the target cannot be driven by one.
        small_name: what it is, for people.
        prompts: of all domains, first turns only, ids unique within each.
        max_new_tokens: of each answer.
        seed: of whatever is random (the training of heads).

    Raises:
        ValueError: for prompts that cannot be asked, or that outgrow the target's context.
    """

    model: Any
    draft: DSparkDraft | None
    tokenizer: Any
    small: AutoregressiveDrafter | None
    small_name: str
    prompts: list[Prompt]
    max_new_tokens: int = 64
    seed: int = 0
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.prompts = [replace(one, follow_ups=()) for one in self.prompts]
        talks = lay_out(self.tokenizer, self.prompts)
        check_room(self.model, self.tokenizer, talks, self.max_new_tokens)
        self.rows = [talk.input_ids(self.tokenizer, []) for talk in talks]

    @property
    def exact(self) -> bool:
        """Whether the target's dtype leaves no room for near-ties."""
        return self.model.dtype.itemsize >= 4

    @property
    def domains(self) -> list[str]:
        """In the order in which they first come."""
        return list(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def text(self, token: int) -> str:
        """One token as text."""
        return self.tokenizer.decode([token])

    def ids(self, index: int) -> torch.Tensor:
        """A prompt, int64 ``[1, S]``."""
        return torch.tensor([self.rows[index]], device=self.model.device)

    def plain(self, progress: Callable[[str], None]) -> list[list[int]]:
        """Every prompt's answer by transformers' own ``generate``, greedily; decoded once."""
        if "plain" not in self._known:
            found = []
            for index in range(len(self.rows)):
                progress(f"plain decoding: {index} of {len(self.rows)} prompts")
                found.append(self.plainly(index))
            self._known["plain"] = found
        return self._known["plain"]

    def plainly(self, index: int, **options: Any) -> list[int]:
        """One prompt's answer by transformers' own ``generate``; ``options`` go to it."""
        ids = self.ids(index)
        pad = self.model.generation_config.pad_token_id
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            pad_token_id=0 if pad is None else pad,
            **options,
        )
        return output[0, ids.shape[1] :].tolist()

    def dspark(
        self, progress: Callable[[str], None], *, use_markov: bool = True, confidence_threshold: float = 0.0
    ) -> Answers:
        """Every prompt's answer with the DSpark drafter; decoded once for each setting, and recorded."""
        key = (use_markov, confidence_threshold)
        if key not in self._known:
            drafter = RecordingDrafter(self.draft, use_markov=use_markov, confidence_threshold=confidence_threshold)
            what = "DSpark" if use_markov else "DSpark without its Markov head"
            what += f", threshold {confidence_threshold:g}" if confidence_threshold else ""
            self._known[key] = self.answers(drafter, progress, what)
        return self._known[key]

    def autoregressive(self, progress: Callable[[str], None]) -> Answers | None:
        """Every prompt's answer with the autoregressive drafter; None where there is none."""
        if "autoregressive" not in self._known:
            known = None if self.small is None else self.answers(self.small, progress, "the autoregressive drafter")
            self._known["autoregressive"] = known
        return self._known["autoregressive"]

    def answers(self, drafter: Any, progress: Callable[[str], None], what: str) -> Answers:
        """Every prompt's answer with a drafter, greedily at batch 1, held against plain decoding.

        Raises:
            NotLossless: naming the prompt and the first token that differs.
        """
        plain, many = self.plain(progress), len(self.prompts)
        place = {(prompt.domain, prompt.id): index for index, prompt in enumerate(self.prompts)}
        tokens: list[list[int]] = [[] for _ in self.prompts]
        blocks: list[list[Block]] = [[] for _ in self.prompts]
        equality, recorded = [Equality()] * many, isinstance(drafter, RecordingDrafter)

        def answered(prompts: list[Prompt], answers: list[list[int]], stats: Stats) -> None:
            (prompt,), (found,) = prompts, answers
            index = place[prompt.domain, prompt.id]
            equality[index] = self.equality(index, found, plain[index], what)
            tokens[index] = found
            if recorded:
                blocks[index] = drafter.blocks(found, stats)

        evaluation = evaluate(
            self.model,
            drafter,
            self.tokenizer,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            batch_size=1,
            on_progress=lambda done: progress(f"{what}: {done} of {many} prompts"),
            on_answers=answered,
        )
        own = {
            name: getattr(drafter, name) for name in ("confidence_threshold", "use_markov") if hasattr(drafter, name)
        }
        return Answers(replace(evaluation, **own), tokens, blocks, sum(equality, Equality()))

    def equality(self, index: int, ours: list[int], plain: list[int], what: str) -> Equality:
        """One answer against plain decoding's.

        Raises:
            NotLossless: if it differs in fp32, or otherwise than at a near-tie.
        """
        if ours == plain:
            return Equality({what: (1, 1)})
        difference = first_difference(self.model, self.ids(index), ours, plain, self.tokenizer)
        prompt = self.prompts[index]
        where = f"{what}, prompt {prompt.id!r} of the domain {prompt.domain!r}: {difference.sentence()}"
        if self.exact or not difference.near_tie:
            raise NotLossless(f"not the tokens of plain decoding, so nothing is reported: {where}")
        return Equality({what: (1, 0)}, (where,))


def in_fp32(subject: Subject) -> Subject | None:
    """The same pair in fp32, where no near-tie excuses a difference, on the first prompt of each domain.

    None where the pair is in fp32 already, or would take more than :data:`MOST_FP32` bytes.
    """
    model, draft = subject.model, subject.draft
    values = sum(one.numel() for one in (*model.parameters(), *draft.parameters()))
    if subject.exact or 4 * values > MOST_FP32:
        return None
    target = copy.deepcopy(model).float()
    theirs = {id(part): part for part in (draft.embed_tokens, draft.lm_head)}
    drafter = copy.deepcopy(draft, theirs).float()
    drafter.share(target.get_input_embeddings(), target.get_output_embeddings())
    drafter.take_head_rows()
    chosen = [next(one for one in subject.prompts if one.domain == name) for name in subject.domains]
    return Subject(target, drafter, subject.tokenizer, None, "", chosen, subject.max_new_tokens, subject.seed)


def small_drafter(
    model: Any, other: Any | None, name: str | None, layers: int | None
) -> tuple[AutoregressiveDrafter | None, str]:
    """The autoregressive drafter to measure against, and what it is.

    Args:
        model: the target.
        other: a smaller model of the same vocabulary; None: the target's first layers.
        name: of the smaller model.
        layers: how many; None: half of them.

    Raises:
        ValueError: if what was asked for cannot draft for this target. Where nothing was asked for there is no drafter.
    """
    try:
        if other is not None:
            drafter = AutoregressiveDrafter(other)
            drafter.check(model)
            return drafter, str(name)
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        count = max(1, depth // 2) if layers is None else layers
        return AutoregressiveDrafter(first_layers(model, count)), f"{CUT} {count} of {depth} layers"
    except ValueError as error:
        if other is not None or layers is not None:
            raise
        return None, f"none: {error}"


def untrained(small: str) -> bool:
    """Whether :func:`small_drafter` calls layers so that were cut from the target and not trained to draft."""
    return small.startswith(CUT)


def described(small: str) -> str:
    """What the autoregressive drafter is, and that it is untrained where it is."""
    return f"{small}, untrained" if untrained(small) else small
