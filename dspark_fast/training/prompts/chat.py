"""Chat: explanations, advice, opinions, stories, e-mails, role-play and small talk."""

from __future__ import annotations

import random

from dspark_fast.training.prompts.draft import Draft, casual, draw_follow_ups, weighted
from dspark_fast.training.prompts.grammar import fill, load_parts

_PARTS = load_parts("shared", "chat")
_KINDS = {
    "chat_explain": 18, "chat_clause": 9, "chat_howto": 13, "chat_advice": 7, "chat_opinion": 9, "chat_compare": 4,
    "chat_story": 11, "chat_poem": 5, "chat_email": 6, "chat_role": 7, "chat_small": 4, "chat_describe": 5,
    "chat_food": 3, "chat_travel": 4,
}  # fmt: skip
_FOLLOW_UPS = {
    "chat_explain": "more_explain", "chat_clause": "more_explain", "chat_compare": "more_explain",
    "chat_howto": "more_help", "chat_advice": "more_help", "chat_food": "more_help", "chat_travel": "more_help",
    "chat_opinion": "more_talk", "chat_role": "more_talk", "chat_small": "more_talk",
    "chat_story": "more_write", "chat_poem": "more_write", "chat_email": "more_write", "chat_describe": "more_write",
}  # fmt: skip


def draw_chat(rng: random.Random) -> Draft:
    """A request for a conversation, with follow-up turns more often than in any other domain."""
    kind = weighted(rng, _KINDS)
    text = fill(rng, _PARTS, kind)
    follow_ups = draw_follow_ups(rng, _PARTS[_FOLLOW_UPS[kind]], 0.15)
    # The role-play templates bring their own persona; a system message would only contradict it.
    system = rng.choice(_PARTS["system"]) if kind != "chat_role" and rng.random() < 0.06 else None
    return Draft(casual(rng, text), system, follow_ups)
