"""Both doors of decoding, and a batch that transformers has answered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import dspark_fast

NEW = 20
LENGTHS = (9, 6, 1, 8)
# What decoding() takes; the rest goes to model.generate in either case.
OURS = ("verification", "seed", "log_probs", "stop_strings", "tokenizer", "streamer", "off_switch")


@pytest.fixture(scope="session")
def through():
    """``through(door, model, draft, ids, **settings)``: the result and its stats.

    The door ``ours`` is generate(), ``transformers`` is model.generate with decoding().
    """

    def work(door, model, draft, ids, **settings):
        if door == "ours":
            out = dspark_fast.generate(model, draft, ids, **settings)
            return out, out.stats
        custom = dspark_fast.decoding(draft, **{name: settings.pop(name) for name in OURS if name in settings})
        out = model.generate(ids, custom_generate=custom, **settings)
        assert out.stats is custom.stats
        return out, out.stats

    return work


@pytest.fixture(scope="session")
def said(make_target, make_draft, prompts):
    """A target, its drafter, a left-padded batch, and the continuations that it has of itself."""
    model, batch = make_target(), prompts(LENGTHS)
    ids, mask = batch.input_ids, batch.attention_mask
    truth = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    new = truth[:, ids.shape[1] :].tolist()
    return SimpleNamespace(model=model, draft=make_draft(model), ids=ids, mask=mask, truth=truth, new=new)


@pytest.fixture(scope="session")
def plainly():
    """``plainly(model, sequences)``: logits of each row read alone, without padding, where the padded row has them."""

    @torch.no_grad()
    def work(model, sequences):
        logits = torch.zeros(*sequences.shape, model.config.vocab_size)
        for row, length in enumerate(LENGTHS):
            logits[row, max(LENGTHS) - length :] = model(sequences[row, None, max(LENGTHS) - length :]).logits[0]
        return logits

    return work
