"""What a tiny drafter is trained on, with the target's states, and what a run wrote."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_pairs import VOCABULARY


@pytest.fixture(scope="session")
def batch_of():
    """``batch_of(model, draft)``: random sequences with the target's own taps, padded on the right, and anchors.

    ``loss_mask`` also has a hole.
    """
    import torch.nn.functional as F

    from dspark_fast.engine.taps import tapped

    @torch.no_grad()
    def make(model, draft, lengths=(23, 17), starts=(6, 4)):
        generator = torch.Generator().manual_seed(4)
        width = max(lengths)
        inside = torch.arange(width) < torch.tensor(lengths)[:, None]
        ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator) * inside
        mask = inside & (torch.arange(width) >= torch.tensor(starts)[:, None])
        mask[0, 13] = False
        taps, last = [], []
        for row, length in zip(ids, lengths):
            with tapped(model, draft.config.target_layer_ids) as caught:
                hidden = model.get_decoder()(input_ids=row[None, :length], use_cache=False).last_hidden_state
                taps.append(F.pad(caught.take()[0], (0, 0, 0, width - length)))
                last.append(F.pad(hidden[0], (0, 0, 0, width - length)))
        last = torch.stack(last)
        return SimpleNamespace(
            lengths=lengths,
            input_ids=ids,
            loss_mask=mask,
            features=torch.stack(taps),
            last_hidden=last,
            log_total=F.linear(last, model.lm_head.weight).logsumexp(-1),
            anchors=torch.tensor([[6, 11, 14, 21], [4, 10, 15, 0]]),
            valid=torch.tensor([[True, True, True, True], [True, True, True, False]]),
        )

    return make


@pytest.fixture(scope="session")
def cached(make_target, make_draft, tmp_path_factory):
    """Features of 8 responses to train on and 2 held out, few tokens in them, so they can be learnt; and trainers."""
    from dspark_fast.training.features import Batches, CachedFeatures, write_features
    from dspark_fast.training.responses import Response
    from dspark_fast.training.trainer import Trainer, TrainSettings

    model = make_target(fresh=True)
    generator = torch.Generator().manual_seed(10)
    responses = []
    for number in range(10):
        length = 30 + number
        ids = torch.randint(1, 12, (length,), generator=generator).repeat_interleave(2)[:length]
        responses.append(Response(f"r{number}", "chat", ids.tolist(), 6, True, number >= 8))
    folder = tmp_path_factory.mktemp("cached")
    layers = make_draft(model).config.target_layer_ids
    train = write_features(model, responses[:8], folder / "train", layers, top_tokens=6)
    held_out = write_features(model, responses[8:], folder / "held-out", layers, top_tokens=6)
    settings = TrainSettings(
        steps=6, learning_rate=3e-3, warm_up=0.34, sequences=2, anchors=6, vocabulary=40, save_every=3, evaluate_every=2
    )

    def trainer(to, settings=settings, *, draft=None, limit=None, held_out=None, on_step=lambda metrics: None, **shape):
        draft = draft or make_draft(model, **shape)
        stores = [
            Batches(CachedFeatures(folder / name, limit=first), settings.sequences)
            for name, first in (("train", limit), ("held-out", held_out))
        ]
        return Trainer(draft, *stores, to, settings, on_step)

    return SimpleNamespace(
        model=model, responses=responses, train=train, held_out=held_out, settings=settings, trainer=trainer
    )


def weights_of(draft):
    return {name: value.detach().clone() for name, value in draft.state_dict().items()}


def metrics_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "blocks_per_second"} for row in rows]


@pytest.fixture(scope="session")
def whole(cached, tmp_path_factory):
    """An uninterrupted training run, which others are held against."""
    folder = tmp_path_factory.mktemp("whole")
    rates = []
    one = cached.trainer(folder)
    one.on_step = lambda metrics: rates.append((metrics["learning_rate"], one.optimizer.param_groups[0]["lr"]))
    one.run()
    return SimpleNamespace(folder=folder, draft=one.draft, weights=weights_of(one.draft), rates=rates, trainer=one)
