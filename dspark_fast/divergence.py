"""Where two decodings of the same prompts part, and whether rounding explains it or it is a fault."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import MaxTimeCriteria

from dspark_fast.engine.requests import Request
from dspark_fast.gumbel import GumbelMax
from dspark_fast.reference.sampling import cut_logits


@dataclass
class FirstDifference:
    """Where two decodings of one prompt part.

    Attributes:
        index: how many new tokens are the same.
        ours, baseline: the token that follows in each, None where that one has ended.
        ours_text, baseline_text: the same as text.
        dtype: of the target's logits.
        logit_gap: how far the target's logits of the two tokens are apart, in one pass over the common prefix.
        score_gap: the same after temperature, cuts and noise, in units of logits; infinite (None in JSON) if the cuts
            leave only one of the two. Equal to ``logit_gap`` for greedy decoding.
        ulps: ``score_gap`` in units in the last place of the larger of the two logits.
        rounding: how far rounding alone moves logits at this place: the largest difference between that pass and one
            that reads the prefix from a cache and its last token by itself; at least one unit in the last place.
        near_tie: whether rounding explains the difference: ``score_gap`` is at most twice ``rounding``.
    """

    index: int
    ours: int | None
    baseline: int | None
    ours_text: str
    baseline_text: str
    logit_gap: float | None = None
    score_gap: float | None = None
    dtype: str = ""
    ulps: float | None = None
    rounding: float | None = None
    near_tie: bool = False

    def sentence(self) -> str:
        """The difference in words."""
        start = f"the first {self.index} tokens are the same, then ours has {_quoted(self.ours, self.ours_text)} "
        start += f"and transformers {_quoted(self.baseline, self.baseline_text)}"
        if self.logit_gap is None or self.score_gap is None:
            return f"{start}: a difference that rounding does not explain"
        gap = f"{start}; their logits are {self.logit_gap:.3g} apart"
        if self.score_gap != self.logit_gap:
            gap += f" (with the noise {self.score_gap:.3g})"
        if self.ulps is not None:
            gap += f", {self.ulps:.3g} units in the last place of {self.dtype}"
        verdict = "a near-tie" if self.near_tie else "a difference that rounding does not explain"
        return f"{gap}, where rounding alone moves a logit by up to {self.rounding:.3g}: {verdict}"


@torch.no_grad()
def first_difference(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    ours: list[int],
    baseline: list[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: GumbelMax | None = None,
    before: Sequence[LogitsProcessor] = (),
) -> FirstDifference | None:
    """The first place where two continuations of ``input_ids`` ``[1, S]`` differ, judged by the target itself.

    Args:
        ours, baseline: new token ids.
        tokenizer: shows tokens as text; ids without one.
        processor: what the baseline sampled with; None for greedy decoding.
        before: logits processors that both applied first.

    Returns:
        None if there is no difference.
    """
    if ours == baseline:
        return None
    index = next((i for i, (a, b) in enumerate(zip(ours, baseline)) if a != b), min(len(ours), len(baseline)))
    ids = [tokens[index] if index < len(tokens) else None for tokens in (ours, baseline)]
    texts = ["" if i is None else tokenizer.decode([i]) if tokenizer is not None else f"token {i}" for i in ids]
    found = FirstDifference(index, ids[0], ids[1], texts[0], texts[1])
    if ids[0] is None or ids[1] is None:
        return found

    prefix = torch.cat([input_ids, input_ids.new_tensor([ours[:index]])], dim=1)
    raw = model(input_ids=prefix, logits_to_keep=1).logits[:, -1]
    processors = LogitsProcessorList(before)
    logits = processors(prefix, raw.float())
    larger = logits[0, ids].abs().max().item()
    found.dtype, found.rounding = str(raw.dtype).removeprefix("torch."), torch.finfo(raw.dtype).eps * larger
    if prefix.shape[1] > 1:
        past = model(input_ids=prefix[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        stepped = model(input_ids=prefix[:, -1:], past_key_values=past, logits_to_keep=1).logits[:, -1]
        stepped = processors(prefix, stepped.float())
        moved = (stepped - logits).abs()
        found.rounding = max(found.rounding, moved[moved.isfinite()].max().item())  # processors may have made -inf
    found.logit_gap = found.score_gap = abs(logits[0, ids[0]] - logits[0, ids[1]]).item()
    if processor is not None:
        kept = cut_logits(logits, processor.temperature, processor.top_k, processor.top_p, processor.min_p)[0, ids]
        scores = processor(prefix, logits)[0, ids]
        both = bool(kept.isfinite().all())
        found.score_gap = abs(scores[0] - scores[1]).item() * processor.temperature if both else math.inf
    if math.isfinite(found.score_gap) and larger:
        found.ulps = found.score_gap / (torch.finfo(raw.dtype).eps * 2.0 ** math.floor(math.log2(larger)))
    found.near_tie = found.score_gap <= 2 * found.rounding
    return found


def check_comparable(request: Request, verification: str) -> None:
    """Whether transformers' own ``generate`` can be made to give the same tokens.

    Args:
        request: what the call was asked for.
        verification: of sampling.

    Raises:
        ValueError: naming what keeps it from that.
    """
    if request.do_sample and verification != "coupled":
        raise ValueError(
            "report_divergence is True, but rejection sampling keeps the law, not the tokens, of plain decoding: "
            "accepted are greedy decoding and verification='coupled'"
        )
    for hindered, why in (
        (request.takes_cuts, "a logits processor stands behind top-k, top-p or min-p"),
        (any(isinstance(one, MaxTimeCriteria) for one in request.criteria), "max_time ends either side by the clock"),
        (request.past is not None, "plain decoding cannot go on from these past_key_values"),
    ):
        if hindered:
            raise ValueError(f"report_divergence is True, but {why}: leave it out")


@torch.no_grad()
def divergence(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    output: Any,
    settings: dict[str, Any],
    request: Request,
) -> list[FirstDifference | None]:
    """Decode again with transformers' own ``generate`` and say where each row of ours differs first.

    Args:
        input_ids: int64 ``[B, S]``, as given to ours.
        output: what ours gave: ``[R, S + n]``, R being B times the return sequences, or an output with ``sequences``.
        settings: that call's keywords for ``model.generate``.
        request: what that call was asked for, as transformers prepared it.

    Returns:
        One for each row, None where nothing differs. Rows of a batch are judged alone: what another batch shape rounds
        otherwise counts as rounding only as far as a pass over the row alone shows it.
    """
    sequences, stats = getattr(output, "sequences", output), output.stats
    plain = {**settings, "do_sample": False, "return_dict_in_generate": False, "num_return_sequences": 1}
    stops, pad, cuts = request.stop_tokens, request.pad_token, None
    if request.do_sample and request.temperature > 0:
        cuts = {name: getattr(request, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    returns, width = len(sequences) // len(input_ids), input_ids.shape[1]
    rows = input_ids.repeat_interleave(returns, 0)
    mask = settings.get("attention_mask")
    if mask is not None:
        plain["attention_mask"] = mask.repeat_interleave(returns, 0)
    if request.do_sample:
        sampling = ("temperature", "top_k", "top_p", "min_p")
        plain = {name: value for name, value in plain.items() if name not in sampling}
    if cuts is not None:
        sampler = GumbelMax(seed=stats.seeds, attention_mask=plain.get("attention_mask"), **cuts)
        plain["logits_processor"] = [*(settings.get("logits_processor") or ()), sampler]
    again = model.generate(rows, **plain)
    found = []
    for row, count in enumerate(stats.new_tokens):
        ours, theirs = sequences[row, width : width + count].tolist(), again[row, width:].tolist()
        prompt = rows[row] if mask is None else rows[row][plain["attention_mask"][row].bool()]
        stop = next((place + 1 for place, token in enumerate(theirs) if token in stops), None)
        theirs = theirs[:stop]
        while stop is None and len(theirs) > count and theirs[-1] == pad:  # stop strings or criteria have ended it
            theirs.pop()
        alone = None if cuts is None else GumbelMax(seed=[stats.seeds[row]], **cuts)
        found.append(first_difference(model, prompt[None], ours, theirs, processor=alone, before=request.processors))
    return found


def _quoted(token: int | None, text: str) -> str:
    return "nothing more" if token is None else json.dumps(text, ensure_ascii=False)
