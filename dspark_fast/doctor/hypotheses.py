"""What may be wrong with a pair, and the change of wiring that would put each right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark_fast.config import rope_theta_of
from dspark_fast.doctor.wiring import Wiring, final_norm, stored_orders
from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.taps import decoder_layers

BASES = (1e4, 1e5, 5e5, 1e6, 1e7)  # of the rotary frequencies in common use
SPECIAL = 24  # special tokens tried as the mask, at most


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may be wrong.

    Attributes:
        fault: its name.
        change: what is done otherwise, after "with".
        cause: what it would mean that this raises agreement.
        wiring: the change.
    """

    fault: str
    change: str
    cause: str
    wiring: Wiring


def hypotheses(model: Any, draft: DSparkDraft, tokenizer: Any | None) -> list[Hypothesis]:
    """Everything that can be tried on this pair."""
    found = [*_anchors(draft), *_taps(model, draft), *_rotary(model, draft), *_masks(draft, tokenizer)]
    for order in stored_orders(draft):
        found.append(_markov(order))
    if not shares_weights(model, draft):
        change, cause = "the target's own embedding and LM head", "the drafter's copies are not the target's"
        found.append(Hypothesis("embedding", change, cause, Wiring(target_weights=True)))
    return found


def shares_weights(model: Any, draft: DSparkDraft) -> bool:
    """Whether the drafter reads the target's own embedding and head."""
    return draft.embed_tokens is model.get_input_embeddings() and draft.lm_head is model.get_output_embeddings()


def _times(number: int, what: str) -> str:
    return f"{abs(number)} {what}{'' if abs(number) == 1 else 's'} {'later' if number > 0 else 'earlier'}"


def _anchors(draft: DSparkDraft) -> list[Hypothesis]:
    found = []
    for step in (-1, 1):
        one, behind = _times(step, "token"), "ahead" if step < 0 else "behind"
        cause = f"the anchor is shifted by one: the drafter was made for features that stand one token {behind}"
        found.append(Hypothesis("anchor", f"the features placed {one}", cause, Wiring(moved=step)))
        cause = "the anchor is shifted by one: the drafter's context was made to end elsewhere"
        found.append(Hypothesis("anchor", f"a context that ends {one}", cause, Wiring(seen=step)))
        if draft.config.block_size > 1:
            cause = "the anchor is shifted by one: slot 1 was not made for the token right after the anchor"
            found.append(Hypothesis("anchor", f"each slot judged by the token {one}", cause, Wiring(slot=step)))
    return found


def _taps(model: Any, draft: DSparkDraft) -> list[Hypothesis]:
    taps, layers = draft.config.target_layer_ids, decoder_layers(model)
    found = []
    for step in (-1, 1):
        if taps[0] + step >= -1 and taps[-1] + step < len(layers):
            right = [tap + step for tap in taps]
            cause = f"target_layer_ids is probably off by one: {taps} should be {right}"
            found.append(Hypothesis("taps", f"the taps {_times(step, 'layer')}", cause, Wiring(layer=step)))
    if final_norm(model) is not None:
        cause = "the drafter was made for taps after the target's final norm, not for the layers' raw outputs"
        found.append(Hypothesis("tap norm", "the taps put through the final norm", cause, Wiring(norm="final")))
    if all(hasattr(layer, "input_layernorm") for layer in layers):
        cause = "the drafter was made for what enters the next layer's attention, not for the layers' raw outputs"
        found.append(Hypothesis("tap norm", "the taps put through the next layer's norm", cause, Wiring(norm="next")))
    return found


def _rotary(model: Any, draft: DSparkDraft) -> list[Hypothesis]:
    now = rope_theta_of(draft.config)
    of_target = rope_theta_of(model.config.get_text_config(decoder=True))
    found = []
    for theta in dict.fromkeys((of_target, *BASES)):
        if theta != now:
            whose = ", the target's," if theta == of_target else ""
            cause = f"the base of the rotary frequencies is probably wrong: rope_theta is {now:g}, not {theta:g}"
            found.append(Hypothesis("rope base", f"a rope_theta{whose} of {theta:g}", cause, Wiring(theta=theta)))
    block = draft.config.block_size
    for step in dict.fromkeys((-1, 1, -2, 2, -block, block)):
        cause = "the block's positions do not go on from the context's: the offset of RoPE is probably wrong"
        change = f"the block placed {_times(step, 'position')}"
        found.append(Hypothesis("rope offset", change, cause, Wiring(offset=step)))
    return found


def _masks(draft: DSparkDraft, tokenizer: Any | None) -> list[Hypothesis]:
    if draft.config.block_size == 1:
        return []
    config, vocabulary = draft.config, draft.config.vocab_size
    ids = [vocabulary - 1, config.pad_token_id, config.eos_token_id, config.bos_token_id, 0]
    if tokenizer is not None:
        special = [tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, len(tokenizer)]
        added = [id for id, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
        ids += special + tokenizer.all_special_ids + added
    flat = [each for id in ids for each in (id if isinstance(id, list) else [id])]
    known = [id for id in dict.fromkeys(flat) if id is not None and 0 <= id < vocabulary and id != config.mask_token_id]
    return [
        Hypothesis(
            "mask token",
            f"token {id} as the mask",
            f"mask_token_id is probably wrong: it is {config.mask_token_id}, not {id}",
            Wiring(mask=id),
        )
        for id in known[:SPECIAL]
    ]


def _markov(order: tuple[str, ...]) -> Hypothesis:
    kind, *stored = order
    if kind == "off":
        change, cause = "the Markov head left out", "the Markov head harms: its weights are probably in a wrong order"
    elif kind == "swapped":
        change, cause = "W1 and W2 of the Markov head swapped", "markov_w1 and markov_w2 are probably swapped"
    else:
        what = "inputs" if kind == "columns" else "outputs"
        change = f"the Markov head's {what} in the order {', '.join(stored)}"
        cause = f"the Markov head's {what} are probably concatenated in a wrong order"
    return Hypothesis("markov head", change, cause, Wiring(markov=order))
