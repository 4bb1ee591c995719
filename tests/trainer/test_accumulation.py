"""Several batches in a step: their gradients are those of one batch of all, whoever reads which."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from dspark_fast.training import trainer
from dspark_fast.training.features import Sequences
from dspark_fast.training.workers import Workers


def merged(batches):
    """Several batches as one, padded on the right."""
    width = max(batch.sequences.input_ids.shape[1] for batch in batches)

    def padded(value):
        return F.pad(value, (0, 0) * (value.ndim - 2) + (0, width - value.shape[1]))

    def parts(kind, values, pad):
        columns = {field.name: [getattr(value, field.name) for value in values] for field in fields(kind)}
        return kind(**{key: None if of[0] is None else torch.cat([*map(pad, of)]) for key, of in columns.items()})

    return trainer._Batch(
        sequences=parts(Sequences, [batch.sequences for batch in batches], padded),
        anchors=torch.cat([batch.anchors for batch in batches]),
        valid=torch.cat([batch.valid for batch in batches]),
        labels=parts(type(batches[0].labels), [batch.labels for batch in batches], lambda value: value),
    )


def updated(one, batches):
    """The metrics of a step and the gradients that it took."""
    tally, norm = one._update(batches)
    return tally, norm, {name: parameter.grad.clone() for name, parameter in one.parameters.items()}


@pytest.mark.parametrize("options", [{}, {"vocabulary": 0}, {"top_tokens": 4}], ids=str)
def test_accumulating_is_one_batch_of_all(cached, tmp_path, monkeypatch, options):
    """In fp32: with bf16 products the gradients of one batch alone are less far off than rounding."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    settings = replace(cached.settings, accumulate=2, clip=1e-2, **options)
    batches = cached.trainer(tmp_path, settings)._batches_of(1)
    one_by_one = [cached.trainer(tmp_path, replace(settings, accumulate=1))._batches_of(n)[0] for n in (2, 3)]
    for ours, theirs in zip(batches, one_by_one, strict=True):
        assert torch.equal(ours.sequences.input_ids, theirs.sequences.input_ids)
        assert torch.equal(ours.anchors, theirs.anchors)
    assert len({batch.labels.totals()[1].item() for batch in batches}) == 2  # a mean of means would be another
    tally, norm, ours = updated(cached.trainer(tmp_path, settings), batches)
    pooled, pooled_norm, theirs = updated(cached.trainer(tmp_path, settings), [merged(batches)])
    assert norm == pytest.approx(pooled_norm, rel=1e-5)
    assert tally.blocks == pooled.blocks
    for key, value in tally.means().items():
        assert value == pytest.approx(pooled.means()[key], rel=1e-5), key
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() < 1e-5 * grad.abs().max() + 1e-9, name
    _, other_norm, _ = updated(cached.trainer(tmp_path, settings), batches[:1])
    assert abs(other_norm - norm) > 1e-2 * norm


def test_workers_and_accumulation_share_the_numbers_of_batches(cached, tmp_path, monkeypatch):
    numbers = []
    one = cached.trainer(tmp_path)
    monkeypatch.setattr(one, "_batch", numbers.append)
    for count, each in ((1, 6), (2, 3), (3, 2)):
        numbers.clear()
        one.settings = replace(one.settings, accumulate=each)
        for step in range(3):
            for rank in range(count):
                one.workers = Workers(rank, count)
                one._batches_of(step)
        assert numbers == list(range(18))
