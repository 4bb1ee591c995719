"""Call after call, with errors in between: nothing is left behind, and nothing grows.

``pytest tests/test_soak.py -m soak`` makes more than 2,000 calls, and with ``DSPARK_FAST_SOAK_JSON=soak.json`` writes
down there what it found.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import StoppingCriteria

import dspark_fast
from dspark_fast import generation
from dspark_fast.engine import compiled, graphs
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.machine import describe

# What oneDNN has made for one shape of a bf16 product it keeps, for 1,024 shapes in each of two caches: 300 calls of
# `model.generate` of random lengths take 280 MiB so. Read at the first product, so they are set before any test runs.
for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(name, "32")

WARM_UP = 40
# Growth that is none: what the allocator keeps, and the interpreter. Of 150 calls a K/V cache of each would be more.
MOST_MIB = 8
linux = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim"),
    reason="resident memory is read from /proc, and glibc is asked to give back what is free",
)


@pytest.fixture
def pairs(make_target, make_draft):
    """One in fp32 and one in bf16: a target, a DSpark drafter and a language model that drafts."""

    def make(dtype):
        model = make_target(fresh=True, num_hidden_layers=3, max_position_embeddings=512).to(dtype)
        draft = make_draft(model, num_hidden_layers=1, target_layer_ids=[0, 1]).to(dtype)
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
        small = make_target("Llama", fresh=True, **sizes).to(dtype)
        return SimpleNamespace(model=model, drafts={"dspark": draft, "autoregressive": small, "none": None})

    return [make(torch.float32), make(torch.bfloat16)]


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


def hooks(model):
    return [name for name, part in model.named_modules() if part._forward_hooks or part._forward_pre_hooks]


def left(pairs):
    """All that a call might leave on the models."""
    models = [one for pair in pairs for one in (pair.model, *pair.drafts.values()) if one is not None]
    attributes = [sorted(part.__dict__) for one in models for part in one.modules()]
    configs = [(one.config._attn_implementation, one.config.to_dict()) for one in models]
    return [hooks(one) for one in models], attributes, configs


class Long(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 16 == 0


SAMPLING = [
    lambda dice: {"do_sample": True, "seed": dice.getrandbits(60)},
    lambda dice: {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
    lambda dice: {"do_sample": True, "verification": "coupled", "min_p": 0.05},
]
ADDED = [
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


class Calls:
    """Calls of every kind, drawn from a seed; ``made`` counts them, in groups."""

    def __init__(self, pairs, streamer, seed=0):
        self.pairs, self.streamer = pairs, streamer
        self.dice = random.Random(seed)
        self.made = defaultdict(Counter)
        self.kinds = [self.single] * 8 + [self.chat, self.return_sequences]

    @property
    def count(self):
        return self.made["kind"].total()

    def __call__(self):
        self.dice.choice(self.kinds)(self.dice.choice(self.pairs))

    def generate(self, kind, pair, drafter, ids, **settings):
        mode = settings.get("verification", "rejection") if settings.get("do_sample") else "greedy"
        dtype = str(pair.model.dtype).removeprefix("torch.")
        for group, member in {"kind": kind, "drafter": drafter, "mode": mode, "dtype": dtype}.items():
            self.made[group][member] += 1
        return dspark_fast.generate(pair.model, pair.drafts[drafter], ids, **settings)

    def compare(self, pair, out, ids, **settings):
        """With the target alone, where all of a pass's sums are exact enough."""
        if pair.model.dtype == torch.float32:
            assert torch.equal(out, pair.model.generate(ids, do_sample=False, **settings))
            self.made["compared"]["equal to the target's own"] += 1

    def prompts(self, rows):
        dice = self.dice
        lengths = torch.tensor([dice.randint(1, 40) for _ in range(rows)])
        mask = (torch.arange(lengths.max()) >= lengths.max() - lengths[:, None]).long()
        return self.tokens(mask.shape) * mask, mask

    def tokens(self, shape):
        return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(self.dice.getrandbits(30)))

    def drafter(self):
        return self.dice.choice(["dspark", "dspark", "autoregressive", "none"])

    def single(self, pair):
        """One call, of which four in ten are to fail."""
        dice, model, drafter = self.dice, pair.model, self.drafter()
        ids, mask = self.prompts(dice.randint(1, 5))
        settings = {"attention_mask": mask, "max_new_tokens": dice.randint(1, 16), "do_sample": False}
        settings |= dice.choice([lambda dice: {}, lambda dice: {}, *SAMPLING])(dice) | dice.choice(ADDED)
        trouble = dice.choice([None] * 6 + ["streamer raises", "interrupt", "bad argument", "NaN"])
        if trouble is None:
            out = self.generate("single", pair, drafter, ids, **settings)
            if settings.get("return_dict_in_generate") and out.past_key_values is not None:
                longer = torch.nn.functional.pad(mask, (0, out.sequences.shape[1] - mask.shape[1]), value=1)
                plain = {"attention_mask": longer, "max_new_tokens": 3, "past_key_values": out.past_key_values}
                self.generate("single", pair, drafter, out.sequences, **plain)
            elif settings.keys() <= {"attention_mask", "max_new_tokens", "do_sample"} and not settings["do_sample"]:
                self.compare(pair, out, ids, attention_mask=mask, max_new_tokens=settings["max_new_tokens"])
        elif trouble in ("streamer raises", "interrupt"):
            error = KeyboardInterrupt if trouble == "interrupt" else RuntimeError
            settings |= {"streamer": self.streamer(fail_at=0, error=error), "attention_mask": mask[:1]}
            with pytest.raises(error, match="as told"):
                self.generate(trouble, pair, drafter, ids[:1], **settings)
        elif trouble == "bad argument":
            bad = dice.choice([{"num_beams": 2}, {"seed": [1] * 9}, {"confidence_threshold": 2.0}])
            with pytest.raises(ValueError):
                self.generate(trouble, pair, "dspark", ids, **{**settings, **bad})
        else:
            handle = model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
            with pytest.raises(FloatingPointError):
                self.generate(trouble, pair, drafter, ids, **settings)
            handle.remove()

    def chat(self, pair):
        """Three or four turns, each with what the one before gave; now and then another drafter, or an edited text."""
        dice, drafter, past = self.dice, self.drafter(), None
        ids, mask = self.prompts(dice.randint(1, 3))
        for _ in range(dice.randint(3, 4)):
            settings = {"attention_mask": mask, "max_new_tokens": dice.randint(1, 20)}
            kept = {"return_dict_in_generate": True, "past_key_values": past, "do_sample": False}
            out = self.generate("turn of a chat", pair, drafter, ids, **settings, **kept)
            self.compare(pair, out.sequences, ids, **settings)
            past, text = out.past_key_values, out.sequences
            text = text[:, : text.shape[1] - dice.choice([0, 0, 2])]
            ids = torch.cat([text, self.tokens((len(text), dice.randint(1, 12)))], dim=1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            drafter = dice.choice([drafter] * 4 + [self.drafter()])

    def return_sequences(self, pair):
        dice = self.dice
        ids, mask = self.prompts(dice.randint(1, 3))
        settings = {"attention_mask": mask, "max_new_tokens": dice.randint(1, 16)} | dice.choice(SAMPLING)(dice)
        count = dice.randint(2, 4)
        out = self.generate("return sequences", pair, self.drafter(), ids, num_return_sequences=count, **settings)
        assert len(out) == count * len(ids)

    def compile(self, pair):
        """Of one shape, so that it is compiled once."""
        pair, ids = self.pairs[0], self.tokens((2, 6))
        out = self.generate(
            "compiled", pair, "dspark", ids, max_new_tokens=10, do_sample=False, off_switch=False, compile_target=True
        )
        assert out.stats.compiled
        self.compare(pair, out, ids, max_new_tokens=10)


def soaked(calls, count, samples=1):
    """What there was after the warm-up and then at ``samples`` times up to the end of ``count`` calls."""
    seen = SimpleNamespace(calls=[], memory=[], tensors=[], threads=[])
    for kind in dict.fromkeys(calls.kinds):
        for pair in calls.pairs:
            kind(pair)
    after = calls.count + WARM_UP
    while len(seen.calls) <= samples:
        if calls.count - after >= len(seen.calls) * count // samples:
            seen.calls.append(calls.count - after)
            seen.memory.append(resident())
            seen.tensors.append(tensors())
            seen.threads.append(threading.active_count())
        calls()
    seen.grown, seen.held = seen.memory[-1] - seen.memory[0], seen.tensors[-1] - seen.tensors[0]
    print(f"\n{dict(calls.made)}: {seen.grown:.1f} MiB of memory, {seen.held:.3f} MiB of tensors")
    return seen


def unharmed(pairs, calls, count, samples=1):
    """:func:`soaked`, after which everything is as before."""
    ids = torch.tensor([[5, 17, 40, 3, 88]])
    said = [pair.model.generate(ids, max_new_tokens=12, do_sample=False) for pair in pairs]
    before = left(pairs)
    seen = soaked(calls, count, samples)
    assert left(pairs) == before and not any(before[0])
    assert all(
        torch.equal(pair.model.generate(ids, max_new_tokens=12, do_sample=False), one) for pair, one in zip(pairs, said)
    )
    assert seen.grown < MOST_MIB and seen.held < 0.1 and seen.threads[-1] <= seen.threads[0]
    assert min(min(group.values()) for name, group in calls.made.items()) >= count // 100
    assert [len(calls.made[group]) for group in ("drafter", "mode", "dtype")] == [3, 3, 2]
    return seen


@linux
@pytest.mark.slow
def test_nothing_is_left_and_nothing_grows(pairs, streamer):
    unharmed(pairs, Calls(pairs, streamer), 150)


@linux
@pytest.mark.slow
@pytest.mark.soak
def test_nor_in_two_thousand_calls(pairs, streamer, monkeypatch):
    """Some with a compiled target and drafter, whatever the clock says of those."""
    told = itertools.cycle((2.0, 1.0))
    monkeypatch.setattr(compiled, "_seconds", lambda work, device: next(told))
    torch._dynamo.reset()
    counters.clear()
    calls = Calls(pairs, streamer)
    calls.kinds = calls.kinds * 4 + [calls.compile]
    start = time.perf_counter()
    seen = unharmed(pairs, calls, 2000, samples=10)
    made = {name: dict(sorted(group.items(), key=str)) for name, group in calls.made.items()}
    traces = counters["stats"]["unique_graphs"]
    assert traces == 2  # the target's and the drafter's
    if path := os.environ.get("DSPARK_FAST_SOAK_JSON"):
        result = {
            "machine": describe(),
            "calls": {"all": calls.count, **made},
            "seconds": round(time.perf_counter() - start),
            "at_call": seen.calls,
            "memory_mib": [round(one, 2) for one in seen.memory],
            "tensors_mib": [round(one, 4) for one in seen.tensors],
            "threads": seen.threads,
            "hooks_left": sum(len(names) for names in left(pairs)[0]),
            "traces_compiled": traces,
            "graphs_kept": len(graphs._kept),
        }
        Path(path).write_text(json.dumps(result, indent=2) + "\n")


@linux
@pytest.mark.slow
def test_a_leak_would_be_seen(pairs, streamer, monkeypatch):
    """One K/V cache that is kept per call."""
    kept, make = [], RaggedCache.for_model.__func__

    def leaking(cls, *args):
        kept.append(make(cls, *args))
        return kept[-1]

    monkeypatch.setattr(RaggedCache, "for_model", classmethod(leaking))
    seen = soaked(Calls(pairs[:1], streamer), 150)
    assert seen.grown > MOST_MIB and seen.held > 8


@pytest.mark.slow
def test_graphs_are_kept_for_a_few_kinds_of_call_alone(pairs, streamer, on_a_cpu, monkeypatch):
    """With the stand-in for the recorder, and errors in between."""
    monkeypatch.setattr(generation, "obstacle", lambda model, drafter, device: None)
    monkeypatch.setattr(graphs, "MOST_KEPT", 2)
    model, draft = pairs[0].model, pairs[0].drafts["dspark"]
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
