"""The examination: agreement as the pair was loaded, every hypothesis tried, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dspark_fast.doctor.hypotheses import Hypothesis, hypotheses
from dspark_fast.doctor.measure import Change, Outcome, change, measure, standard_score, upper_tail
from dspark_fast.doctor.texts import Format, Message, Reading, Text, knows_thinking, read_texts, write_texts
from dspark_fast.doctor.wiring import Wiring, layers_needed
from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.taps import decoder_layers

#: chance that a pair without a fault is told that it has one, over all hypotheses together
LEVEL = 0.01
LEAST_GAIN = 0.005  # of overlap: what is less is no fault, however certain
# Some changes show the drafter the target's state of the anchor, which knows the next token and helps a good pair a
# little too. They must do more.
LEAST_OF_TOLD = 0.03
SCREEN = 3  # hypotheses are first tried on every so many-th block
FINALISTS = 6  # of them are tried on all blocks
LEAST_OF_FEATURES = 0.05  # of agreement: a drafter that has less of its text's own features does not read them
WEAK = 0.15  # agreement in slot 1 below which no pair is called good
NO_DRAFTS = 20  # blocks that are too few to say anything

NAMES = {
    "anchor": "an anchor shifted by one",
    "taps": "taps shifted by a layer",
    "tap norm": "taps taken after a norm",
    "rope base": "a wrong RoPE base",
    "rope offset": "a wrong RoPE offset",
    "mask token": "a wrong mask token",
    "markov head": "a Markov head in a wrong order",
    "embedding": "an embedding that is not the target's",
}


@dataclass(frozen=True)
class Finding:
    """A change that raises agreement, and so names a fault.

    Attributes:
        fault: its name; change, cause: in words.
        numbers: before and after.
    """

    fault: str
    change: str
    cause: str
    numbers: Change

    def sentence(self) -> str:
        n = self.numbers
        return (
            f"With {self.change} agreement rises from {n.before:.2f} to {n.after:.2f} (first slot {n.first_before:.2f} "
            f"to {n.first_after:.2f}; {n.z:.1f} standard errors of the overlap): {self.cause}."
        )


@dataclass
class Examination:
    """What was found.

    Attributes:
        fault: the name of the likely fault; None for a good pair.
        verdict: in sentences.
        format: how prompts were laid out.
        outcome: of the pair as it was loaded.
        shuffled: agreement with the features of another text.
        tried: hypotheses, with their numbers on a part of the blocks.
        findings: those that raise agreement beyond chance; the first is the likely fault.
        texts: number of answers.
    """

    format: Format
    outcome: Outcome
    shuffled: float
    tried: list[tuple[Hypothesis, Change]]
    findings: list[Finding]
    texts: int
    fault: str | None = None
    verdict: list[str] = field(default_factory=list)

    def thirds(self) -> list[tuple[int, int, Outcome]]:
        """First and last position of the anchors in each third of the context, and how the drafter did there."""
        order = self.outcome.positions.argsort(stable=True)
        found = []
        for chosen in order.tensor_split(3):
            if len(chosen):
                part = self.outcome.part(chosen)
                found.append((int(part.positions.min()), int(part.positions.max()), part))
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        thirds = [
            {"from": first, "to": last, "blocks": len(part.right), "agreement": _rounded(part.by_slot)}
            for first, last, part in self.thirds()
        ]
        return {
            "fault": self.fault,
            "verdict": self.verdict,
            "format": str(self.format),
            "texts": self.texts,
            "blocks": len(self.outcome.right),
            "agreement": _rounded(self.outcome.by_slot),
            "agreement_all": round(self.outcome.agreement, 4),
            "overlap": round(self.outcome.mean_overlap, 4),
            "tokens_per_round": round(self.outcome.tau, 3),
            "agreement_shuffled": round(self.shuffled, 4),
            "thirds": thirds,
            "findings": [{**asdict(one), "numbers": asdict(one.numbers)} for one in self.findings],
            "tried": [
                {"fault": one.fault, "change": one.change, "gain": round(numbers.gain, 4), "z": round(numbers.z, 2)}
                for one, numbers in self.tried
            ],
        }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 4) for value in values]


@torch.no_grad()
def examine(
    model: Any,
    draft: DSparkDraft,
    tokenizer: Any,
    prompts: Sequence[Sequence[Message]],
    *,
    format: Format | None = None,
    max_new_tokens: int = 64,
    progress: Callable[[str], None] = lambda what: None,
) -> Examination:
    """Look for the fault of a pair.

    The target answers the prompts greedily, once. At every gamma-th position the drafter drafts a block, as it was
    loaded and then with one connection changed at a time; a change that raises the overlap beyond chance names the
    fault. The level is shared among all changes tried (Bonferroni).

    Args:
        model, draft: the pair.
        tokenizer: the target's.
        prompts: conversations.
        format: how they are laid out; by the chat template without thinking if None.
        max_new_tokens: per answer.
        progress: told a few words before each stage.

    Raises:
        ValueError: without a chat template where one is asked for; where the answers are too short to say anything.
    """
    format = format or Format()
    if format.template and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target has no chat template: ask for prompts without it")
    progress("the target answers")
    texts = write_texts(model, [format.ids(tokenizer, one) for one in prompts], max_new_tokens)
    found = examine_texts(model, draft, tokenizer, texts, format=format, progress=progress)
    other = _other_format(found, tokenizer, format)
    if other is not None:
        progress(f"the target answers {other}")
        texts = write_texts(model, [other.ids(tokenizer, one) for one in prompts], max_new_tokens)
        readings = read_texts(model, texts, draft.config.target_layer_ids, draft.config.block_size)
        _compare_formats(found, other, measure(model, draft, readings))
    return found


def examine_texts(
    model: Any,
    draft: DSparkDraft,
    tokenizer: Any | None,
    texts: Sequence[Text],
    *,
    format: Format | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Examination:
    """As :func:`examine`, on text that the target has written already, in one format."""
    progress("the target reads its answers")
    layers = layers_needed(draft.config.target_layer_ids, len(decoder_layers(model)))
    readings = read_texts(model, texts, layers, draft.config.block_size)
    if sum(int(reading.counted[..., 0].sum()) for reading in readings) < NO_DRAFTS:
        raise ValueError(
            f"the target's answers hold fewer than {NO_DRAFTS} blocks: take more prompts or longer answers"
        )
    progress("the drafter as it was loaded")
    base = measure(model, draft, readings)
    shuffled = measure(model, draft, readings, Wiring(shuffled=True), base.said)
    tried = _screen(model, draft, hypotheses(model, draft, tokenizer), readings, base, progress)
    finding = _confirm(model, draft, tried, readings, base, progress)
    found = Examination(
        format=format or Format(),
        outcome=base,
        shuffled=shuffled.agreement,
        tried=tried,
        findings=[] if finding is None else [finding],
        texts=len(texts),
    )
    _judge(found, draft, change(shuffled, base))
    return found


def _screen(
    model: Any,
    draft: DSparkDraft,
    every: Sequence[Hypothesis],
    readings: Sequence[Reading],
    base: Outcome,
    progress: Callable[[str], None],
) -> list[tuple[Hypothesis, Change]]:
    """Each hypothesis on a part of the blocks, and of the vocabulary: the labels and what the drafter says."""
    few = [reading.sample(SCREEN) for reading in readings]
    before = measure(model, draft, few, columns=base.said)
    tried = []
    for number, one in enumerate(every):
        progress(f"hypothesis {number + 1} of {len(every)}: {one.change}")
        tried.append((one, change(before, measure(model, draft, few, one.wiring, base.said))))
    return sorted(tried, key=lambda pair: -pair[1].z)


def _confirm(
    model: Any,
    draft: DSparkDraft,
    tried: Sequence[tuple[Hypothesis, Change]],
    readings: Sequence[Reading],
    base: Outcome,
    progress: Callable[[str], None],
) -> Finding | None:
    """The change that gains most on all blocks, if over the whole vocabulary too it gains beyond chance."""
    finalists = [one for one, numbers in tried[:FINALISTS] if numbers.gain > 0]
    before = measure(model, draft, readings, columns=base.said) if finalists else base
    ranked = []
    for one in finalists:
        progress(f"all blocks: {one.change}")
        numbers = change(before, measure(model, draft, readings, one.wiring, base.said))
        if _beyond_chance(one, numbers, len(tried)):
            ranked.append((numbers.gain - _least(one), one))
    for _, one in sorted(ranked, key=lambda pair: -pair[0]):
        progress(f"all tokens: {one.change}")
        numbers = change(base, measure(model, draft, readings, one.wiring))
        if _beyond_chance(one, numbers, len(tried)) and _reads(model, draft, readings, one.wiring, base.said):
            return Finding(one.fault, one.change, one.cause, numbers)
    return None


def _reads(model: Any, draft: DSparkDraft, readings: Sequence[Reading], wiring: Wiring, columns: torch.Tensor) -> bool:
    """Whether the drafter, so wired, needs this text's features: a repair brings them to use, an accident does not."""
    theirs = measure(model, draft, readings, replace(wiring, shuffled=True), columns)
    numbers = change(theirs, measure(model, draft, readings, wiring, columns))
    return numbers.p_value < LEVEL and numbers.after - numbers.before > LEAST_OF_FEATURES


def _beyond_chance(one: Hypothesis, numbers: Change, tried: int) -> bool:
    return numbers.p_value < LEVEL / tried and numbers.gain > _least(one)


def _least(one: Hypothesis) -> float:
    """What a change must gain before it means anything."""
    return LEAST_OF_TOLD if one.wiring.seen > 0 or one.wiring.moved < 0 else LEAST_GAIN


def _judge(found: Examination, draft: DSparkDraft, by_features: Change) -> None:
    """Write the verdict."""
    outcome = found.outcome
    ruled_out = ", ".join(name for fault, name in NAMES.items() if any(one.fault == fault for one, _ in found.tried))
    if found.findings:
        found.fault = found.findings[0].fault
        found.verdict.append(found.findings[0].sentence())
    elif by_features.p_value > LEVEL or by_features.after - by_features.before < LEAST_OF_FEATURES:
        found.fault = "target"
        found.verdict.append(
            f"Agreement is {outcome.agreement:.2f}, and with the features of another text {found.shuffled:.2f}: the "
            "drafter reads nothing from this target's states. It was probably made for another target of the same shape"
            + (", or it is untrained: all its norms are 1." if _untrained(draft) else ", or hardly trained.")
        )
        found.verdict.append(f"No change of wiring helps, which rules out: {ruled_out}.")
    elif outcome.by_slot[0] < WEAK:
        found.fault = "weak"
        found.verdict.append(
            f"Agreement in slot 1 is {outcome.by_slot[0]:.2f}, which is little, though the drafter does read this "
            f"target's states. No change of wiring helps, which rules out: {ruled_out}. It may be trained too little, "
            "or for another version of this target, or on other text."
        )
    else:
        found.verdict.append(
            f"This is a good pair: agreement is {outcome.by_slot[0]:.2f} in slot 1 and {outcome.agreement:.2f} over "
            f"all slots, about {outcome.tau:.2f} tokens per round on texts that are given (decoding has fewer), "
            f"and none of {len(found.tried)} changes of wiring "
            "raises it beyond chance."
        )
    _say_decay(found)


def _say_decay(found: Examination) -> None:
    """Whether agreement fades with the position, for whoever reads the table."""
    parts = [part for _, _, part in found.thirds()]
    early, late = parts[0], parts[-1]
    scores = [one.overlap.sum(dim=1) / one.counted.sum(dim=1).clamp(min=1) for one in (early, late)]
    error = math.sqrt(sum((one.var() / len(one)).item() for one in scores))
    if error and upper_tail((scores[0].mean() - scores[1].mean()).item() / error) < LEVEL:
        found.verdict.append(
            f"Agreement falls from {early.agreement:.2f} in the first third of the context to {late.agreement:.2f} in "
            "the last."
        )


def _untrained(draft: DSparkDraft) -> bool:
    norms = [value for name, value in draft.named_parameters() if "norm" in name]
    return all(bool((norm == 1).all()) for norm in norms)


def _other_format(found: Examination, tokenizer: Any, format: Format) -> Format | None:
    """What to compare the prompts' format with: the usual one, or, for a pair without a reason to be bad, the other."""
    if format != Format():
        return Format() if getattr(tokenizer, "chat_template", None) else None
    no_reason = found.fault in ("target", "weak")
    return Format(thinking=True) if no_reason and knows_thinking(tokenizer) else None


def _compare_formats(found: Examination, other: Format, theirs: Outcome) -> None:
    """A fault if the drafter does clearly better on the same prompts laid out otherwise, and than with any change."""
    ours = found.outcome
    prompts = sorted(set(ours.prompts.tolist()) & set(theirs.prompts.tolist()))

    def means(one: Outcome) -> torch.Tensor:
        parts = [one.part(one.prompts == prompt) for prompt in prompts]
        return torch.tensor([part.mean_overlap for part in parts], dtype=torch.float64)

    z = standard_score(means(theirs) - means(ours))
    numbers = f"agreement is {ours.agreement:.2f} {found.format} and {theirs.agreement:.2f} {other}"
    if upper_tail(z) < LEVEL and theirs.mean_overlap - ours.mean_overlap > LEAST_GAIN:
        explained = found.findings and found.findings[0].numbers.after >= theirs.agreement
        if not explained:
            found.findings.clear()
            found.fault = "thinking" if found.format.thinking != other.thinking else "chat template"
            found.verdict.clear()
        found.verdict.append(
            f"On the same prompts {numbers} ({z:.1f} standard errors of the overlap, prompt by prompt): the drafter "
            f"was made for text {other}."
        )
    else:
        found.verdict.append(f"On the same prompts {numbers}: no more than chance, or no less.")
