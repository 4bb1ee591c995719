"""The cache of the target's hidden states: its bytes, what a kill leaves of it, and what it refuses to read."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import time
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from dspark_fast.training import hidden_cache
from dspark_fast.training.hidden_cache import CacheWriter, HiddenCache, Sample

LAYERS, HIDDEN, TOP = [0, 3, 2], 5, 3  # layers in an order of their own
MADE_FOR = {"max_length": 64, "target_weights": "abc"}
FILES = ("shard-00000.bin", "log_total.f32", "samples.jsonl", "top_tokens.i32", "top_probs.f16", "samples.idx")
LENGTHS = (3, 8, 5, 1, 7, 7, 2, 9, 4)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


def any_bits(generator, *shape):
    """bf16 of any bits at all: infinities, subnormals and NaNs of every kind among them."""
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


def made(lengths=LENGTHS, top=TOP, first=0):
    samples = []
    for number, length in enumerate(lengths, first):
        generator = torch.Generator().manual_seed(number)
        states = any_bits(generator, length, (len(LAYERS) + 1) * HIDDEN)
        extra = {"log_total": torch.randn(length, generator=generator)}
        if top:
            extra["top_tokens"] = torch.randint(0, 2**31 - 1, (length, top), generator=generator).int()
            extra["top_probs"] = torch.rand(length, top, generator=generator).half()
        samples.append(
            Sample(
                id=f'ü "{number}"\u2028',
                domain="code",
                input_ids=torch.randint(0, 2**31 - 1, (length,), generator=generator).int(),
                loss_mask=torch.randint(0, 2, (length,), generator=generator).to(torch.uint8),
                features=states[:, :-HIDDEN],
                last_hidden=states[:, -HIDDEN:],  # neither is contiguous
                **extra,
            )
        )
    return samples


def open_writer(folder, top=TOP, **changes):
    given = {"made_for": MADE_FOR, "layer_ids": LAYERS, "hidden_size": HIDDEN, **changes}
    return CacheWriter(folder, top_tokens=top, **given)


def write(folder, groups, top=TOP):
    writer = open_writer(folder, top)
    for group in groups:
        writer.append(group)
    return folder


def assert_same(ours, theirs):
    assert (ours.id, ours.domain) == (theirs.id, theirs.domain)
    for key in ("input_ids", "loss_mask", "features", "last_hidden", "log_total", "top_tokens", "top_probs"):
        a, b = getattr(ours, key), getattr(theirs, key)
        assert (a is None) == (b is None), key
        assert a is None or (a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)), key


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def payload(sample):
    """What the authors' layout says of one sample, in order."""
    length = len(sample.input_ids)
    parts = (struct.pack(f"<{length}i", *sample.input_ids.tolist()), b"\1" * length, bytes(sample.loss_mask.tolist()))
    states = (
        struct.pack(f"<{x.numel()}h", *x.reshape(-1).view(torch.int16).tolist())
        for x in (sample.features.contiguous(), sample.last_hidden.contiguous())
    )
    return [*parts, *states]


def size_of(lengths):
    return sum(lengths) * (6 + 2 * HIDDEN * (len(LAYERS) + 1))


# --- the layout -------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_authors_layout(tmp_path):
    samples = made()
    write(tmp_path, [samples[:4], samples[4:]])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == {
        "version": 2,
        "num_samples": 9,
        "num_shards": 1,
        "target_layer_ids": LAYERS,
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": HIDDEN,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        "top_tokens": TOP,
        **MADE_FOR,
    }
    index, shard, end = (tmp_path / "samples.idx").read_bytes(), (tmp_path / "shard-00000.bin").read_bytes(), 0
    assert len(index) == 56 * 9
    for number, sample in enumerate(samples):
        parts = payload(sample)
        *offsets, end = accumulate(map(len, parts), initial=end)
        assert struct.unpack_from("<QII5Q", index, 56 * number) == (number, 0, LENGTHS[number], *offsets)
        for offset, part in zip(offsets, parts):
            assert shard[offset : offset + len(part)] == part
    assert end == len(shard) == size_of(LENGTHS)
    for name, kind in (("log_total.f32", "f"), ("top_tokens.i32", "i"), ("top_probs.f16", "e")):
        wanted = [x for s in samples for x in getattr(s, name.split(".")[0]).flatten().tolist()]
        assert list(struct.unpack(f"<{len(wanted)}{kind}", (tmp_path / name).read_bytes())) == wanted
    lines = (tmp_path / "samples.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line) for line in lines] == [{"id": s.id, "domain": s.domain} for s in samples]


@pytest.mark.parametrize("top", [0, TOP])
def test_what_is_written_is_read_bit_for_bit(tmp_path, top):
    """Also NaN and infinities; also where odd masks put what follows them at odd offsets."""
    samples = made(top=top)
    write(tmp_path, [samples[:1], samples[1:6], samples[6:]], top)
    cache, before = HiddenCache(tmp_path), contents(tmp_path)
    assert len(cache) == 9 and cache.lengths == list(LENGTHS)
    assert any(offset % 2 for record in cache.records for offset in record[3:])
    assert set(before) == {"manifest.json", *FILES} - (set() if top else {"top_tokens.i32", "top_probs.f16"})
    for index in (4, *range(-9, 9), 4):
        assert_same(cache[index], samples[index])
        own = samples[index].input_ids[samples[index].loss_mask == 1].long()
        assert torch.equal(cache.own_tokens(index), own) and cache.own_tokens(index).dtype == torch.int64
        cache[index].features.zero_()  # a sample is the reader's own
    assert contents(tmp_path) == before


def test_special_values_survive(tmp_path):
    """Infinities, NaNs of several kinds, -0, the least and the largest."""
    bits = torch.tensor([0x7F80, -0x80, 0x7FC0, 0x7F81, -0x7F, -0x8000, 1, 0x7F7F, -1, 0x3F80], dtype=torch.int16)
    last = bits.view(torch.bfloat16)[:, None].repeat(1, HIDDEN)
    write(tmp_path, [[replace(made((10,))[0], last_hidden=last)]])
    assert HiddenCache(tmp_path)[0].last_hidden.view(torch.int16)[:, 4].tolist() == bits.tolist()


def test_fp32_and_int64_are_stored_in_the_layouts_types(tmp_path):
    sample, states = made((6,))[0], {"features": torch.randn(6, 15), "last_hidden": torch.randn(6, 5)}
    wide = {"input_ids": sample.input_ids.long(), "loss_mask": sample.loss_mask.bool(), **states}
    write(tmp_path, [[replace(sample, **wide)]])
    narrow = {key: value.bfloat16() for key, value in states.items()}
    assert_same(HiddenCache(tmp_path)[0], replace(sample, **narrow))


def authors_cache(folder, samples, shards=((0, "shard-00000.bin"), (1, "shard-00001.bin"))):
    """As the specification has it, with nothing of ours beside it; the samples go to the shards in turn."""
    folder.mkdir()
    index, data = b"", {number: b"" for number, _ in shards}
    for number, sample in enumerate(samples):
        shard, parts = shards[number % len(shards)][0], payload(sample)
        offsets = list(accumulate(map(len, parts), initial=len(data[shard])))[:-1]
        index += struct.pack("<QIIQQQQQ", 100 + number, shard, len(sample.input_ids), *offsets)
        data[shard] += b"".join(parts)
    (folder / "samples.idx").write_bytes(index)
    for number, name in shards:
        (folder / name).write_bytes(data[number])
    manifest = {"version": 2, "num_samples": len(samples), "num_shards": len(shards), "target_layer_ids": LAYERS}
    manifest |= {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56}
    manifest |= {"hidden_size": HIDDEN, "shards": [{"shard_id": i, "file_name": name} for i, name in shards]}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "git_sha": "0", "chat_template": "{{ m }}"}))
    return folder


@pytest.mark.parametrize("shards", [((0, "shard-00000.bin"), (1, "shard-00001.bin")), ((7, "b.bin"), (2, "a.bin"))])
def test_a_cache_of_the_authors_is_read(tmp_path, shards):
    samples = made()
    cache = HiddenCache(authors_cache(tmp_path / "theirs", samples, shards))
    for index, sample in enumerate(samples):
        plain = {"log_total": None, "top_tokens": None, "top_probs": None, "id": str(100 + index), "domain": ""}
        assert_same(cache[index], replace(sample, **plain))


def test_layers_are_chosen_by_name(tmp_path):
    samples = made()
    write(tmp_path, [samples])
    for chosen in ([0], [2], [3, 2], [2, 0], [2, 3, 0], LAYERS):
        cache = HiddenCache(tmp_path, chosen)
        assert cache.layer_ids == chosen
        for index, sample in enumerate(samples):
            columns = [sample.features.unflatten(1, (3, HIDDEN))[:, LAYERS.index(layer)] for layer in chosen]
            assert raw(cache[index].features) == raw(torch.cat(columns, 1))
            assert raw(cache[index].last_hidden) == raw(sample.last_hidden)
    with pytest.raises(ValueError, match=r"holds layers \[0, 3, 2\], not \[1\]"):
        HiddenCache(tmp_path, [0, 1])


def test_an_empty_cache(tmp_path):
    writer = open_writer(tmp_path)
    cache = HiddenCache(tmp_path)
    assert len(cache) == len(writer) == 0 and cache.lengths == [] and cache.layer_ids == LAYERS
    assert cache.manifest["shards"] == []
    write(tmp_path, [made()])
    assert len(HiddenCache(tmp_path)) == 9


def test_a_new_shard_begins_where_one_is_full(tmp_path, monkeypatch):
    samples = made()
    for number, limit in enumerate((1, size_of(LENGTHS[:4]), size_of(LENGTHS[:4]) + 1)):
        monkeypatch.setattr(hidden_cache, "SHARD_BYTES", limit)
        folder = write(tmp_path / str(number), [samples[:2], samples[2:4], samples[4:7], samples[7:]])
        cache = HiddenCache(folder)
        shards = [record[1] for record in cache.records]
        assert shards == ([0, 0, 1, 1, 2, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 7 + [1, 1])[number]
        assert all(r[3] == 0 for r, before in zip(cache.records, [None, *shards]) if r[1] != before)
        names = [f"shard-{n:05d}.bin" for n in range(shards[-1] + 1)]
        assert sorted(path.name for path in folder.glob("shard-*")) == names
        assert cache.manifest["num_shards"] == len(names)
        assert cache.manifest["shards"] == [{"shard_id": n, "file_name": name} for n, name in enumerate(names)]
        for index in (8, *range(9)):
            assert_same(cache[index], samples[index])


def test_a_shard_larger_than_the_memory_is_read(tmp_path):
    """The authors' have 64 GiB: mapping one must not claim memory for it."""
    write(tmp_path, [made()])
    os.truncate(tmp_path / "shard-00000.bin", 2**40)  # a hole, which takes no room
    assert_same(HiddenCache(tmp_path)[8], made()[8])
    os.unlink(tmp_path / "shard-00000.bin")


# --- interruptions ----------------------------------------------------------------------------------------------------

GROUPS = ((0, 3), (3, 6), (6, 9))


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """Every state that a kill can leave, as ``(groups done, folder)``; what was written; and its files.

    The files grow in the order of FILES; the third group begins a shard. Each state is a folder of its own.
    """
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", size_of(LENGTHS[:6]))
    samples = made()
    writer, states = open_writer(tmp_path / "whole"), [contents(tmp_path / "whole")]
    for first, last in GROUPS:
        writer.append(samples[first:last])
        states.append(contents(tmp_path / "whole"))

    def each():
        for done, (before, after) in enumerate(pairwise(states)):
            order = [("shard-00001.bin" if done == 2 else "shard-00000.bin"), *FILES[1:]]
            for number, name in enumerate(order):
                old, new = before.get(name, b""), after[name]
                assert new.startswith(old)
                added = len(new) - len(old)
                for place in {0, 1, added // 2, added - 1, added, *((55, 56, 57) if name == "samples.idx" else ())}:
                    state = {**before, **{other: after[other] for other in order[:number]}}
                    state[name] = new[: len(old) + place]
                    yield done, state
            half = len(after["manifest.json"]) // 2
            yield (
                done,
                {**after, "manifest.json": before["manifest.json"], ".manifest.json": after["manifest.json"][:half]},
            )
        for name in ("shard-00001.bin", *FILES[1:]):
            yield 3, {**states[3], name: states[3][name] + b"\1\2\3"}

    def folders():
        for number, (done, state) in enumerate(each()):
            folder = tmp_path / f"state-{number}"
            folder.mkdir()
            for name, data in state.items():
                (folder / name).write_bytes(data)
            yield done, folder
            shutil.rmtree(folder)

    return samples, states[3], folders()


def test_after_a_kill_at_any_byte(killed):
    """A reader sees a whole smaller cache, and a writer goes on to the files of one that was not killed."""
    samples, whole, folders = killed
    for done, folder in folders:
        before = contents(folder)
        cache = HiddenCache(folder)
        assert len(cache) == 3 * done
        for index in range(3 * done):
            assert_same(cache[index], samples[index])
        assert contents(folder) == before
        records = len(before.get("samples.idx", b"")) // 56
        assert 3 * done <= records <= 3 * done + 3
        writer = open_writer(folder)
        assert writer.ids == [sample.id for sample in samples[:records]]
        for first, last in GROUPS:
            if rest := samples[max(first, records) : last]:
                writer.append(rest)
        assert contents(folder) == whole
    assert int(folder.name.removeprefix("state-")) > 80


def test_a_reader_at_work_while_a_group_is_written(tmp_path, monkeypatch):
    samples = made()
    writer = open_writer(tmp_path)
    writer.append(samples[:3])
    early, real, looks = HiddenCache(tmp_path), hidden_cache._sync, []

    def look(file):
        real(file)
        looks.append(file.name)
        for cache in (early, HiddenCache(tmp_path)):
            assert len(cache) == 3
            for index in range(3):
                assert_same(cache[index], samples[index])

    monkeypatch.setattr(hidden_cache, "_sync", look)
    writer.append(samples[3:])
    assert len(looks) == 7  # every file of the cache
    assert len(HiddenCache(tmp_path)) == 9 and len(early) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_killed_by_a_signal_loses_at_most_its_group(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", size_of(LENGTHS) * 7)
    groups, moments = [made(first=9 * n) for n in range(60)], random.Random(5)
    whole, folder = contents(write(tmp_path / "whole", groups)), tmp_path / "killed"
    assert "shard-00007.bin" in whole
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.001))

    def go_on():
        writer = open_writer(folder)
        found = len(writer)
        for group in groups[found // 9 :]:
            writer.append(group[len(writer) % 9 :])
        return found

    for kill in range(5):
        child = os.fork()
        if child == 0:  # must not come back into pytest, whatever happens
            try:
                go_on()
            finally:
                os._exit(0)
        deadline, index = time.monotonic() + 20, folder / "samples.idx"
        while not index.is_file() or index.stat().st_size < 56 * 9 * (5 * kill + 1):
            assert time.monotonic() < deadline, "the writer does not get on"
        time.sleep(moments.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it had ended before"
        cache = HiddenCache(folder)
        assert len(cache) % 9 == 0 and 9 * 5 * kill <= len(cache) < 540
        for number in range(len(cache)):
            assert_same(cache[number], groups[number // 9][number % 9])
    assert len(cache) <= go_on() <= len(cache) + 9
    assert contents(folder) == whole


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": [0, 2, 3]}, r"target_layer_ids is \[0, 3, 2\], asked for is \[0, 2, 3\]"),
        ({"hidden_size": 6}, "hidden_size is 5, asked for is 6"),
        ({"top": 4}, "top_tokens is 3, asked for is 4"),
        ({"made_for": {**MADE_FOR, "max_length": 65}}, "something else: max_length is 64, asked for is 65. Take"),
        ({"made_for": {"max_length": 64}}, "target_weights is abc, asked for is None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("samples", [0, 9])
def test_a_cache_of_something_else_is_not_continued(tmp_path, changes, message, samples):
    write(tmp_path, [made()] if samples else [])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_writer(tmp_path, **changes)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [name for name in FILES if name != "samples.idx"])
@pytest.mark.parametrize("rest", ["less", "none", "gone"])
def test_a_file_cut_short_is_named(tmp_path, name, rest):
    """By the reader and by the writer, which must not write behind a hole."""
    write(tmp_path, [made()])
    if rest == "gone":
        (tmp_path / name).unlink()
    else:
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 1 if rest == "less" else 0)
    with pytest.raises(ValueError, match=name):
        open_writer(tmp_path)
    if rest == "gone" and name in ("samples.jsonl", "log_total.f32"):  # the authors' caches have none
        HiddenCache(tmp_path)[0]
    else:
        with pytest.raises(ValueError, match=name):
            HiddenCache(tmp_path)


def test_an_earlier_shard_cut_short_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_cache, "SHARD_BYTES", 1)
    write(tmp_path, [made()[:6], made()[6:]])
    os.truncate(tmp_path / "shard-00000.bin", size_of(LENGTHS[:6]) - 1)
    with pytest.raises(ValueError, match=rf"shard-00000\.bin has {size_of(LENGTHS[:6]) - 1} bytes, its index speaks"):
        HiddenCache(tmp_path)


@pytest.mark.parametrize("left", [0, 56 * 9 - 1])
def test_an_index_shorter_than_the_manifest_is_named(tmp_path, left):
    write(tmp_path, [made()])
    os.truncate(tmp_path / "samples.idx", left)
    with pytest.raises(ValueError, match=rf"samples\.idx has {left} bytes, too few for 9 records"):
        HiddenCache(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("version", 1), ("hidden_dtype", "float16"), ("index_record_size", 48)])
def test_another_layout_is_named(tmp_path, key, value):
    write(tmp_path, [made()])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(ValueError, match=rf"manifest\.json: {key} is {value}, this code reads"):
        HiddenCache(tmp_path)


def test_what_is_no_cache_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no manifest"):
        HiddenCache(tmp_path)
    authors_cache(tmp_path / "theirs", made(), ((0, "a.bin"),))
    path = tmp_path / "theirs" / "manifest.json"
    path.write_text(path.read_text().replace('"shard_id": 0', '"shard_id": 1'))
    with pytest.raises(ValueError, match="sample 0 is in shard 0"):
        HiddenCache(tmp_path / "theirs")
