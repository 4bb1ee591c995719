"""A pair whose drafter is right now and then, as the report measures one, and what its measurements are asked."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

QUESTIONS = {"maths": ("What is 2 + 3?", "Half of 18?"), "chat": ("Hi there!", "Why?")}
NEW_TOKENS = 16


def quietly(text):
    pass


def prompts():
    from dspark_fast.evaluation import Prompt

    asked = ((domain, text) for domain, texts in QUESTIONS.items() for text in texts)
    return [
        Prompt(f"{domain}-{number}", domain, ({"role": "user", "content": text},))
        for number, (domain, text) in enumerate(asked)
    ]


def again(one):
    """The same by way of JSON."""
    back = type(one).from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False)))
    assert back.to_dict() == one.to_dict()
    assert back.sentences() == one.sentences() and back.tables() == one.tables() and back.strips() == one.strips()
    assert all(len(row) == len(table.columns) for table in one.tables() for row in table.rows)
    return back


@pytest.fixture(scope="session")
def make_subject(make_target, make_draft, characters):
    """``make_subject()``: a pair with :func:`prompts`, and the target's first 3 layers as the small model.

    The drafter's Markov head knows which character mostly followed which in the target's own answers; its body says
    little.
    """
    from dspark_fast.autoregressive import AutoregressiveDrafter, first_layers
    from dspark_fast.report.subject import Subject

    def make():
        model = characters.target(make_target)
        draft = make_draft(model, markov_rank=model.config.vocab_size)
        after = torch.zeros(model.config.vocab_size, model.config.vocab_size)
        for row in Subject(model, None, characters.tokenizer, None, "", prompts(), 2 * NEW_TOKENS).plain(quietly):
            for one, other in pairwise(row):
                after[other, one] += 1
        with torch.no_grad():
            draft.norm.weight.mul_(0.01)
            draft.markov_head.markov_w1.weight.copy_(torch.eye(len(after)))
            draft.markov_head.markov_w2.weight.copy_(after)
            draft.confidence_head.proj.weight.mul_(6)
        small = AutoregressiveDrafter(first_layers(model, 3), block_size=4)
        return Subject(model, draft, characters.tokenizer, small, "3 layers", prompts(), NEW_TOKENS)

    return make
