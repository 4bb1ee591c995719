"""Threads that generate on one model: each gets its own tokens, also beside one that raises."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import dspark_fast


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target(fresh=True, num_hidden_layers=3, max_position_embeddings=512)
    return model, make_draft(model, num_hidden_layers=1, target_layer_ids=[0, 1])


def hooks(model):
    return [name for name, part in model.named_modules() if part._forward_hooks or part._forward_pre_hooks]


def at_once(*works):
    """Run these in threads that start together; what each returned or raised."""
    start, results = threading.Barrier(len(works)), [None] * len(works)

    def run(at, work):
        start.wait(60)
        try:
            results[at] = work()
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at, work), daemon=True) for at, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("broken", [False, True], ids=["all-right", "one-raises"])
def test_threads_get_their_own_tokens(broken, pair, make_draft, prompts, streamer):
    """Different batches, drafters and modes on one model; one that raises disturbs none."""
    model, draft = pair
    jobs = []
    for lengths, own, mode in (
        ((9, 6, 1, 8), draft, {"do_sample": False}),
        ((5,), make_draft(model, num_hidden_layers=1, block_size=3), {"do_sample": False, "repetition_penalty": 1.3}),
        ((3, 7), draft, {"do_sample": True, "verification": "coupled", "seed": 4, "temperature": 1.3}),
    ):
        batch = prompts(lengths)
        settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 16, **mode}
        jobs.append(SimpleNamespace(ids=batch.input_ids, draft=own, settings=settings))
        jobs[-1].truth = dspark_fast.generate(model, None, batch.input_ids, **settings)

    def right(job):
        return lambda: [dspark_fast.generate(model, job.draft, job.ids, **job.settings) for _ in range(4)]

    def raises():
        caught = 0
        for at in range(4):
            with pytest.raises(RuntimeError, match="as told"):
                listener = streamer(fail_at=at)
                dspark_fast.generate(model, draft, jobs[1].ids, streamer=listener, max_new_tokens=9, do_sample=False)
            caught += 1
        return caught

    works = [right(job) for job in jobs] + ([raises] if broken else [])
    before = model.config._attn_implementation
    results = at_once(*works)
    for job, outs in zip(jobs, results):
        assert isinstance(outs, list), outs
        assert len(outs) == 4 and all(torch.equal(out, job.truth) for out in outs)
    assert not broken or results[-1] == 4
    assert model.config._attn_implementation == before and not hooks(model)


def test_stats_of_a_decoding_are_its_last_calls(pair):
    """One Decoding may be used again; what a call returned keeps its own."""
    model, draft = pair
    custom = dspark_fast.decoding(draft)
    ids = torch.tensor([[5, 6, 7]])
    first = model.generate(ids, custom_generate=custom, max_new_tokens=4, do_sample=False)
    second = model.generate(ids.repeat(2, 1), custom_generate=custom, max_new_tokens=6, do_sample=False)
    assert custom.stats is second.stats and first.stats.new_tokens == [4] and second.stats.new_tokens == [6, 6]
