"""The target's states over responses: against a plain forward pass, from the cache and live, in batches."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers

from dspark_fast.training import features, hidden_cache
from dspark_fast.training.features import Batches, CachedFeatures, LiveFeatures, check_head, usable, write_features
from dspark_fast.training.hidden_cache import HiddenCache
from dspark_fast.training.responses import Response

VOCABULARY = 97
TAPS = [-1, 0, 2]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(features, "GROUP", 4)
    monkeypatch.setattr(features, "TOGETHER", 3)
    monkeypatch.setattr(features, "ROWS", 7)


@pytest.fixture(scope="module")
def model(make_target):
    return make_target(num_hidden_layers=4)


def made_up(count, start=5, own=20):
    """Responses of 25 to 33 tokens in no order."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for n in range(count):
        ids = torch.randint(1, VOCABULARY, (start + n % 3 + own + 5 * n % 7,), generator=generator).tolist()
        made.append(Response(f"r{n}", "chat" if n % 2 else "code", ids, start + n % 3, True, False))
    return made


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- the states -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("max_length", "top"), [(1024, 5), (23, 0), (1024, VOCABULARY)])
def test_features_are_those_of_a_plain_forward(model, tmp_path, max_length, top):
    answers, told = made_up(10), []
    folder = write_features(
        model, answers, tmp_path, TAPS, max_length=max_length, top_tokens=top, on_progress=told.append
    )
    assert folder == tmp_path and told == [0, 4, 8, 10]
    cache = HiddenCache(folder)
    assert [(name["id"], name["domain"]) for name in cache.names] == [(r.id, r.domain) for r in answers]
    assert cache.manifest["max_length"] == max_length and cache.manifest["hidden_size"] == 64
    for index, response in enumerate(answers):
        row, ids = cache[index], torch.tensor([response.input_ids[:max_length]])
        assert row.input_ids.tolist() == ids[0].tolist()
        out = model(ids, output_hidden_states=True)
        taps = torch.cat([out.hidden_states[layer + 1][0] for layer in TAPS], -1)
        for ours, theirs in ((row.features, taps), (row.last_hidden, out.hidden_states[-1][0])):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-5)
        assert row.loss_mask.tolist() == [int(n >= response.start) for n in range(ids.shape[1])]
        needed = torch.arange(ids.shape[1]) >= response.start - 1
        torch.testing.assert_close(row.log_total, out.logits[0].logsumexp(-1) * needed, rtol=1e-5, atol=1e-5)
        if not top:
            assert row.top_tokens is None and row.top_probs is None
            continue
        law = out.logits[0].softmax(-1)
        probs, tokens = row.top_probs.float(), row.top_tokens.long()
        assert not probs[~needed].any() and not tokens[~needed].any()
        assert (probs[:, :-1] >= probs[:, 1:]).all()
        assert all(len(set(line)) == top for line in tokens[needed].tolist())
        torch.testing.assert_close(probs[needed], law.gather(1, tokens)[needed], rtol=2**-10, atol=1e-6)
        torch.testing.assert_close(probs[needed], law.topk(top).values[needed], rtol=2**-10, atol=1e-6)
        rest = law.scatter(1, tokens, 0.0).sum(-1)
        torch.testing.assert_close((probs.sum(-1) + rest)[needed], torch.ones(int(needed.sum())), rtol=0, atol=1e-3)
        if top == VOCABULARY:
            assert not rest[needed].any()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_reads_features_as_the_targets_distribution(model, tmp_path, dtype):
    """The mass that ``log_total`` and ``last_hidden`` give the whole vocabulary is 1, but for the bf16 rounding."""
    twin = type(model)(model.config).to(dtype).eval()
    twin.load_state_dict(model.state_dict())
    batch = CachedFeatures(write_features(twin, made_up(4), tmp_path, TAPS)).batch(range(4))
    logits = torch.nn.functional.linear(batch.last_hidden.to(dtype), twin.lm_head.weight).float()
    mass = (logits - batch.log_total[..., None]).exp().sum(-1)[batch.loss_mask]
    assert (mass - 1).abs().max() < (1e-5 if dtype == torch.bfloat16 else 0.05)


@pytest.mark.gpu
def test_features_made_on_a_gpu_are_written(make_target, tmp_path):
    model = make_target(num_hidden_layers=4, fresh=True)
    on_cpu = CachedFeatures(write_features(model, made_up(5), tmp_path / "cpu", TAPS, top_tokens=3)).batch(range(5))
    model.to("cuda")
    on_gpu = CachedFeatures(write_features(model, made_up(5), tmp_path / "gpu", TAPS, top_tokens=3)).batch(range(5))
    live = LiveFeatures(model, made_up(5), TAPS, top_tokens=3).batch(range(5))
    for key, value in vars(on_cpu).items():
        for other in (getattr(on_gpu, key), getattr(live, key).cpu()):
            torch.testing.assert_close(other.float(), value.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("domain", "own", "expected"), [("chat", 13, False), ("chat", 14, True), ("short", 2, False), ("short", 3, True)]
)
def test_usable(domain, own, expected):
    assert usable(Response("a", domain, [1] * (9 + own), 9, True, False)) is expected


def test_short_answers_are_left_out(model, tmp_path):
    few = [Response(f"few{n}", "chat", list(range(1, 19)), 5, True, False) for n in range(3)]  # 13 of their own
    brief = Response("brief", "short", [1, 2, 3, 4, 5, 6, 7], 4, True, False)
    answers = [few[0], brief, few[1], *made_up(5), few[2]]
    wanted = ["brief", *(f"r{n}" for n in range(5))]
    cached = CachedFeatures(write_features(model, answers, tmp_path / "a", TAPS))
    assert [name["id"] for name in cached.cache.names] == wanted
    assert [r.id for r in LiveFeatures(model, answers, TAPS).responses] == wanted
    nothing = Batches(CachedFeatures(write_features(model, few, tmp_path / "b", TAPS)))
    assert len(nothing) == len(Batches(LiveFeatures(model, few, TAPS))) == 0
    assert not nothing.token_counts(VOCABULARY).any()


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The files that 10 responses give without interruption, and how often the target and the disk are called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "GROUP", 4)
        patch.setattr(features, "TOGETHER", 3)
        patch.setattr(features, "ROWS", 7)
        calls = Counter()
        for owner, name in ((features, "target_states"), (hidden_cache, "_sync")):
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *a, real=real, name=name, **k: (calls.update([name]), real(*a, **k))[1])
        folder = write_features(model, made_up(10), tmp_path_factory.mktemp("whole"), TAPS, top_tokens=2)
    return contents(folder), calls


@pytest.mark.parametrize("where", ["target_states", "_sync"])
def test_an_interruption_anywhere_is_gone_on_from(model, whole, tmp_path, monkeypatch, where):
    files, calls = whole
    owner = features if where == "target_states" else hidden_cache
    real = getattr(owner, where)
    assert calls[where] == (5 if where == "target_states" else 22)  # 3 groups of 7 files, and the first manifest
    for last in range(calls[where]):
        left = [last]

        def interrupted(*args, left=left, **kwargs):
            made = real(*args, **kwargs)
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return made

        monkeypatch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_features(model, made_up(10), tmp_path / str(last), TAPS, top_tokens=2)
        monkeypatch.setattr(owner, where, real)
        write_features(model, made_up(10), tmp_path / str(last), TAPS, top_tokens=2)
        assert contents(tmp_path / str(last)) == files


def test_what_is_there_is_kept(model, whole, tmp_path, monkeypatch):
    answers, told = made_up(10), []
    write_features(model, answers[:6], tmp_path, TAPS, top_tokens=2)
    before = contents(tmp_path)
    write_features(model, answers, tmp_path, TAPS, top_tokens=2, on_progress=told.append)
    after = contents(tmp_path)
    assert told == [6, 10]
    assert all(after[name].startswith(data) for name, data in before.items() if name != "manifest.json")
    assert after["samples.jsonl"] == whole[0]["samples.jsonl"] and after["samples.idx"] == whole[0]["samples.idx"]

    def never(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(features, "target_states", never)
    write_features(model, answers, tmp_path, TAPS, top_tokens=2)
    assert contents(tmp_path) == after


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"responses": [*made_up(3)[::-1], *made_up(6)[3:]]}, "holds r0 where the responses have r2"),
        ({"responses": [*made_up(5), replace(made_up(1)[0], id="x")]}, "holds r5 where the responses have x"),
        ({"layer_ids": [0, 1, 3]}, r"target_layer_ids is \[-1, 0, 2\], asked for is \[0, 1, 3\]"),
        ({"max_length": 30}, "max_length is 1024, asked for is 30"),
        ({"top_tokens": 2}, "top_tokens is 0, asked for is 2"),
        ({"made_for": {"target_weights": "b"}}, "target_weights is a, asked for is b"),
    ],
    ids=["order", "last", "layers", "length", "top", "target"],
)
def test_features_of_something_else_are_not_taken_for_these(model, tmp_path, changes, message):
    """They must not be trained on in silence: the widths may well be the same."""
    given = {"responses": made_up(6), "layer_ids": TAPS, "made_for": {"target_weights": "a"}}
    write_features(model, folder=tmp_path, **given)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        write_features(model, folder=tmp_path, **{**given, **changes})
    assert contents(tmp_path) == before


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cached(model, tmp_path_factory):
    return write_features(model, made_up(11), tmp_path_factory.mktemp("cached"), TAPS, top_tokens=5)


def test_rows_are_padded_on_the_right_and_keep_their_values(cached):
    source = CachedFeatures(cached)
    for chosen in ([7], [3, 10, 0], [1, 2, 3, 4, 5]):
        batch = source.batch(chosen)
        assert len(batch) == len(chosen)
        assert batch.input_ids.dtype == batch.top_tokens.dtype == torch.int64
        assert batch.loss_mask.dtype == torch.bool and batch.top_probs.dtype == torch.float32
        assert batch.input_ids.shape[1] == max(source.lengths[index] for index in chosen)
        for row, index in enumerate(chosen):
            stored = vars(source.cache[index])
            for key, value in vars(batch).items():
                length = source.lengths[index]
                assert torch.equal(value[row, :length], stored[key].to(value.dtype)), key
                assert not value[row, length:].any(), key


class Numbers:
    """A source of nothing but lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def batch(self, indices):
        return list(indices)


@pytest.mark.parametrize(("count", "together"), [(0, 3), (1, 3), (4, 2), (11, 3), (30, 8), (13, 1)])
def test_batches_hold_each_response_once_with_others_of_like_length(count, together):
    lengths = torch.randint(1, 50, (count,)).tolist()
    batches = Batches(Numbers(lengths), together)
    rows = [batches[index] for index in range(len(batches))]
    assert rows == [Batches(Numbers(lengths), together)[index] for index in range(len(batches))]
    assert sorted(index for row in rows for index in row) == list(range(count))
    assert all(1 <= len(row) <= together for row in rows)
    assert len(rows) == count // 4 * -(-4 // together) + -(-(count % 4) // together)
    for first in range(0, count, 4):  # GROUP
        group = [row for row in rows if row[0] // 4 == first // 4]
        found = [lengths[index] for row in group for index in row]
        assert found == sorted(lengths[first : first + 4])


def test_batches_read_the_source(cached):
    source = CachedFeatures(cached)
    batches = Batches(source, 3)
    seen = [tuple(row[row > 0].tolist()) for index in range(len(batches)) for row in batches[index].input_ids]
    assert sorted(seen) == sorted(tuple(r.input_ids) for r in made_up(11))


def test_token_counts(model, cached):
    answers = made_up(11)
    for source, rows, end in (
        (CachedFeatures(cached), answers, None),
        (CachedFeatures(cached, limit=4), answers[:4], None),
        (LiveFeatures(model, answers, TAPS), answers, None),
        (LiveFeatures(model, answers, TAPS, max_length=15), answers, 15),
    ):
        counts = Counter(token for r in rows for token in r.input_ids[r.start : end])
        assert Batches(source).token_counts(VOCABULARY).tolist() == [counts[token] for token in range(VOCABULARY)]


def test_sequences_take_as_many_top_tokens_as_are_asked_for(cached):
    batch = CachedFeatures(cached).batch([0, 1])
    cpu = torch.device("cpu")
    for count in (1, 5):
        moved = batch.to(cpu, top_tokens=count)
        assert torch.equal(moved.top_tokens, batch.top_tokens[..., :count])
        assert torch.equal(moved.top_probs, batch.top_probs[..., :count])
    without = batch.to(cpu)
    assert without.top_tokens is None and without.top_probs is None
    assert torch.equal(without.log_total, batch.log_total)
    for source, there in ((batch, 5), (without, 0)):
        with pytest.raises(ValueError, match=f"top_tokens is 6, the features hold {there}: make them again"):
            source.to(cpu, top_tokens=6)


# --- live -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_batches_are_the_cached_ones(model, tmp_path, dtype):
    twin = type(model)(model.config).to(dtype).eval()
    twin.load_state_dict(model.state_dict())
    made = write_features(twin, made_up(6), tmp_path, TAPS, max_length=27, top_tokens=5)
    cached = CachedFeatures(made)
    live = LiveFeatures(twin, made_up(6), TAPS, max_length=27, top_tokens=5)
    assert live.lengths == cached.lengths and live.identity() == cached.identity()
    for chosen in ([4], [0, 3, 1]):
        ours, theirs = live.batch(chosen), cached.batch(chosen)
        assert not ours.features.requires_grad
        for key in ("input_ids", "loss_mask"):
            assert torch.equal(getattr(ours, key), getattr(theirs, key))
        near = {"rtol": 2**-8, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
        for key in ("features", "last_hidden", "log_total", "top_probs"):
            assert getattr(ours, key).dtype == (dtype if key in ("features", "last_hidden") else torch.float32)
            torch.testing.assert_close(getattr(ours, key).float(), getattr(theirs, key).float(), **near)
        if dtype == torch.float32:
            assert torch.equal(ours.top_tokens, theirs.top_tokens)
            torch.testing.assert_close(ours.log_total, theirs.log_total, rtol=1e-5, atol=1e-5)


def test_live_batches_without_what_the_loss_does_not_read(model):
    batch = LiveFeatures(model, made_up(3), TAPS, log_total=False).batch([0, 2])
    assert batch.log_total is None and batch.top_tokens is None and batch.top_probs is None


def test_an_identity_says_which_responses_in_which_order(model, cached):
    answers = made_up(11)
    plain = LiveFeatures(model, answers, TAPS).identity()
    assert plain == LiveFeatures(model, answers, TAPS).identity() == CachedFeatures(cached).identity()
    longer = replace(answers[4], input_ids=[*answers[4].input_ids, 5])
    others = [
        LiveFeatures(model, answers[:10], TAPS),
        LiveFeatures(model, answers[::-1], TAPS),
        LiveFeatures(model, [*answers[:4], replace(answers[4], id="x"), *answers[5:]], TAPS),
        LiveFeatures(model, [*answers[:4], longer, *answers[5:]], TAPS),
        LiveFeatures(model, answers, TAPS, max_length=26),
        LiveFeatures(model, answers, [-1, 0, 3]),
        CachedFeatures(cached, [-1, 0]),
        CachedFeatures(cached, [0, -1, 2]),
        CachedFeatures(cached, limit=9),
    ]
    assert len({plain, *(other.identity() for other in others)}) == 1 + len(others)
    assert CachedFeatures(cached, limit=10).identity() == others[0].identity()
    assert json.loads((cached / "manifest.json").read_text())["num_samples"] == 11


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Granite", "Gemma2"])
def test_a_target_that_changes_its_logits_behind_the_head_is_refused(kind):
    torch.manual_seed(0)
    geometry = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    geometry |= {"num_key_value_heads": 2, "vocab_size": 97, "initializer_range": 0.25, "tie_word_embeddings": False}
    geometry |= {"logits_scaling": 8.0} if kind == "Granite" else {"final_logit_softcapping": 2.0, "head_dim": 16}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**geometry)).eval()
    with pytest.raises(ValueError, match=f"{kind}ForCausalLM changes its logits"):
        check_head(model)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen2", "Gemma"])
def test_a_target_whose_logits_are_its_heads_is_not(kind, make_target):
    check_head(make_target(kind))
