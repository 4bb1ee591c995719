"""Call after call, with errors in between: nothing is left behind, and nothing grows.

``pytest tests/test_soak.py -m soak`` makes 2,000 calls.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteria

import dspark_fast
from dspark_fast import generation
from dspark_fast.engine import graphs
from dspark_fast.engine.cache import RaggedCache

WARM_UP = 40
# Growth that is none: what the allocator keeps, and the interpreter. Of 150 calls a K/V cache of each would be more.
MOST_MIB = 8
linux = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim"),
    reason="resident memory is read from /proc, and glibc is asked to give back what is free",
)


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target(fresh=True, num_hidden_layers=3, max_position_embeddings=512)
    return model, make_draft(model, num_hidden_layers=1, target_layer_ids=[0, 1])


def hooks(model):
    return [name for name, part in model.named_modules() if part._forward_hooks or part._forward_pre_hooks]


def resident():
    """MiB of this process in memory, without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def tensors():
    """MiB of all tensors that are alive."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        dense = type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout == torch.strided
        if dense and one.device.type == "cpu":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / 2**20


class Long(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 16 == 0


class Calls:
    """Calls of every kind, drawn from a seed."""

    def __init__(self, model, draft, streamer, seed=0):
        self.model, self.draft, self.streamer = model, draft, streamer
        self.dice = random.Random(seed)
        self.made = {"right": 0, "raised": 0, "compared": 0}

    def __call__(self):
        dice = self.dice
        lengths = [dice.randint(1, 40) for _ in range(dice.randint(1, 5))]
        mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(1, 97, mask.shape, generator=torch.Generator().manual_seed(dice.getrandbits(30))) * mask
        settings = {"attention_mask": mask, "max_new_tokens": dice.randint(1, 16)}
        settings |= dice.choice(
            [
                {"do_sample": False},
                {"do_sample": False},
                {"do_sample": True, "seed": dice.getrandbits(60)},
                {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
                {"do_sample": True, "verification": "coupled", "min_p": 0.05},
            ]
        )
        settings |= dice.choice(
            [
                {},
                {},
                {"repetition_penalty": 1.2},
                {"no_repeat_ngram_size": 2},
                {"eos_token_id": [3, 50]},
                {"stopping_criteria": [Long()]},
                {"off_switch": True},
                {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "log_probs": True},
                {"return_dict_in_generate": True},
            ]
        )
        draft = dice.choice([self.draft, self.draft, self.draft, None])
        trouble = dice.choice([None] * 6 + ["streamer", "interrupt", "argument", "nan"])
        if trouble is None:
            out = dspark_fast.generate(self.model, draft, ids, **settings)
            self.made["right"] += 1
            if settings.get("return_dict_in_generate") and out.past_key_values is not None:
                longer = torch.nn.functional.pad(mask, (0, out.sequences.shape[1] - mask.shape[1]), value=1)
                plain = {"attention_mask": longer, "max_new_tokens": 3, "past_key_values": out.past_key_values}
                dspark_fast.generate(self.model, draft, out.sequences, **plain)
            elif settings.keys() <= {"attention_mask", "max_new_tokens", "do_sample"} and not settings["do_sample"]:
                assert torch.equal(out, self.model.generate(ids, **settings))
                self.made["compared"] += 1
            return
        self.made["raised"] += 1
        if trouble in ("streamer", "interrupt"):
            error = RuntimeError if trouble == "streamer" else KeyboardInterrupt
            settings |= {"streamer": self.streamer(fail_at=0, error=error)}
            with pytest.raises(error, match="as told"):
                dspark_fast.generate(self.model, draft, ids[:1], **{**settings, "attention_mask": mask[:1]})
        elif trouble == "argument":
            bad = dice.choice([{"num_beams": 2}, {"seed": [1] * 9}, {"confidence_threshold": 2.0}])
            with pytest.raises(ValueError):
                dspark_fast.generate(self.model, draft or self.draft, ids, **{**settings, **bad})
        else:
            handle = self.model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
            with pytest.raises(FloatingPointError):
                dspark_fast.generate(self.model, draft, ids, **settings)
            handle.remove()


def soaked(calls, count):
    """MiB by which memory and tensors have grown from after the warm-up."""
    for at in range(WARM_UP + count):
        if at == WARM_UP:
            before = resident(), tensors()
        calls()
    return resident() - before[0], tensors() - before[1]


@linux
@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.soak)])
def test_nothing_is_left_and_nothing_grows(count, pair, streamer):
    model, draft = pair
    ids = torch.tensor([[5, 17, 40, 3, 88]])
    said = model.generate(ids, max_new_tokens=12, do_sample=False)
    before = model.config._attn_implementation, model.config.to_dict(), sorted(model.__dict__), hooks(model)
    threads = threading.active_count()
    calls = Calls(model, draft, streamer)
    grown, held = soaked(calls, count)
    print(f"\n{calls.made}: {grown:.1f} MiB of memory, {held:.3f} MiB of tensors")
    after = model.config._attn_implementation, model.config.to_dict(), sorted(model.__dict__), hooks(model)
    assert after == before and not hooks(draft) and threading.active_count() == threads
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), said)
    assert min(calls.made.values()) >= count // 40
    assert grown < MOST_MIB and held < 0.1


@linux
@pytest.mark.slow
def test_a_leak_would_be_seen(pair, streamer, monkeypatch):
    """One K/V cache that is kept per call."""
    kept, make = [], RaggedCache.for_model.__func__

    def leaking(cls, *args):
        kept.append(make(cls, *args))
        return kept[-1]

    monkeypatch.setattr(RaggedCache, "for_model", classmethod(leaking))
    grown, held = soaked(Calls(*pair, streamer), 150)
    print(f"\n{grown:.1f} MiB of memory, {held:.1f} MiB of tensors")
    assert grown > MOST_MIB and held > 8


@pytest.mark.slow
def test_graphs_are_kept_for_a_few_kinds_of_call_alone(pair, streamer, on_a_cpu, monkeypatch):
    """With the stand-in for the recorder, and errors in between."""
    monkeypatch.setattr(generation, "obstacle", lambda model, drafter, device: None)
    monkeypatch.setattr(graphs, "MOST_KEPT", 2)
    model, draft = pair
    kinds = [(rows, sampled) for rows in (1, 2) for sampled in (False, True)]
    held = []
    for rows, sampled in kinds + kinds:
        ids = torch.full((rows, 6), 7)
        settings = {"max_new_tokens": 6, "do_sample": sampled, "seed": 3, "use_graph": True}
        out = dspark_fast.generate(model, draft, ids, **settings)
        assert out.stats.graph and torch.equal(out, dspark_fast.generate(model, draft, ids, **settings))
        if rows == 1:
            with pytest.raises(RuntimeError, match="as told"):
                dspark_fast.generate(model, draft, ids, streamer=streamer(fail_at=1), **settings)
        assert len(graphs._kept) <= 2
        on_a_cpu.clear()  # it keeps what it has recorded
        held.append(tensors())
    assert held[-1] < held[3] + 0.1
    dspark_fast.clear_graphs()
    assert not graphs._kept and tensors() < max(held) - 0.05


# --- threads ---


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
