"""Target hidden states on disk, in the layout of the authors' cache (version 2); a kill loses at most one group.

    manifest.json     version, layers, dtypes, shards; what the target was
    samples.idx       56 bytes per sample: id, shard, length and five byte offsets, little-endian
    shard-00000.bin   per sample: int32 ids [L], uint8 attention mask [L], uint8 loss mask [L], bf16 taps [L, m*H],
                      bf16 last hidden state [L, H] (after the target's final norm)

and, beside them, what a loss that does not run the target's whole LM head needs:

    samples.jsonl     id and domain of each sample
    log_total.f32     fp32 per token: log of the softmax denominator over the whole vocabulary, 0 where no label follows
    top_tokens.i32, top_probs.f16   [L, K] per sample: the K largest probabilities, 0 where no label follows
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch

RECORD = struct.Struct("<QIIQQQQQ")
SHARD_BYTES = 2**30
DTYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}

# Of a manifest; a target whose folder was moved is the same one, its class and weights say which
NOT_COMPARED = ("num_samples", "num_shards", "shards", "target_model_name_or_path")


@dataclass(frozen=True)
class Sample:
    """One response with the target's states.

    Attributes:
        id, domain: of the response.
        input_ids: int32 ``[L]``.
        loss_mask: uint8 ``[L]``, 1 on the target's own tokens.
        features: bf16 ``[L, m*H]``.
        last_hidden: bf16 ``[L, H]``.
        log_total: fp32 ``[L]``, or None for a cache that has none.
        top_tokens: int32 ``[L, K]``, ``top_probs`` fp16 ``[L, K]``, largest first; None where none were kept.
    """

    id: str
    domain: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last_hidden: torch.Tensor
    log_total: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    top_probs: torch.Tensor | None = None


class CacheWriter:
    """Appends groups of samples to a cache, after what a run before this one left whole.

    Args:
        folder: of the cache; made if it does not exist.
        made_for: what the target and the extraction were; goes into the manifest, must equal what is there (but for
            the target's name).
        layer_ids: the tapped layers.
        hidden_size: H.
        top_tokens: K, 0 for none.

    Raises:
        ValueError: for a cache made for something else, naming what differs.
    """

    def __init__(
        self, folder: Path, made_for: dict[str, Any], layer_ids: Sequence[int], hidden_size: int, top_tokens: int = 0
    ) -> None:
        self.folder = folder
        self.manifest = {
            "version": 2,
            "target_layer_ids": list(layer_ids),
            **DTYPES,
            "index_record_size": RECORD.size,
            "hidden_size": hidden_size,
            "top_tokens": top_tokens,
            **made_for,
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._check_manifest()
        self.ids: list[str] = []
        self._tokens = 0
        self._shard, self._end = 0, 0
        self._take_up()

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, samples: Sequence[Sample]) -> None:
        """Write a group; the index, which alone makes samples exist, comes last."""
        if self._end >= SHARD_BYTES:
            self._shard, self._end = self._shard + 1, 0
        files = {"shard": f"shard-{self._shard:05d}.bin", "log_total": "log_total.f32", "jsonl": "samples.jsonl"}
        if self.manifest["top_tokens"]:
            files |= {"top_tokens": "top_tokens.i32", "top_probs": "top_probs.f16"}
        data: dict[str, list[bytes]] = {key: [] for key in files}
        index, end = [], self._end
        for number, sample in enumerate(samples, len(self.ids)):
            parts = [
                _bytes(sample.input_ids, torch.int32),
                bytes([1]) * len(sample.input_ids),  # no padding is ever stored
                _bytes(sample.loss_mask, torch.uint8),
                _bytes(sample.features, torch.bfloat16),
                _bytes(sample.last_hidden, torch.bfloat16),
            ]
            offsets = list(accumulate(map(len, parts), initial=end))
            index.append(RECORD.pack(number, self._shard, len(sample.input_ids), *offsets[:-1]))
            end = offsets[-1]
            data["shard"] += parts
            data["log_total"].append(_bytes(sample.log_total, torch.float32))
            data["jsonl"].append(json.dumps({"id": sample.id, "domain": sample.domain}).encode() + b"\n")
            if self.manifest["top_tokens"]:
                data["top_tokens"].append(_bytes(sample.top_tokens, torch.int32))
                data["top_probs"].append(_bytes(sample.top_probs, torch.float16))
        for key, name in files.items():
            with open(self.folder / name, "ab") as file:
                file.writelines(data[key])
                _sync(file)
        with open(self.folder / "samples.idx", "ab") as file:
            file.writelines(index)
            _sync(file)
        self.ids += [sample.id for sample in samples]
        self._tokens += sum(len(sample.input_ids) for sample in samples)
        self._end = end
        self._write_manifest()

    def _check_manifest(self) -> None:
        path = self.folder / "manifest.json"
        if not path.is_file():
            return
        theirs = json.loads(path.read_text(encoding="utf-8"))
        keys = [key for key in {**self.manifest, **theirs} if key not in NOT_COMPARED]
        differs = [key for key in keys if theirs.get(key) != self.manifest.get(key)]
        if differs:
            what = "; ".join(f"{key} is {theirs.get(key)}, asked for is {self.manifest.get(key)}" for key in differs)
            raise ValueError(f"{self.folder} was made for something else: {what}. Take another folder or delete it")

    def _take_up(self) -> None:
        """Cut every file to what the index knows: an interrupted group left bytes behind it."""
        path = self.folder / "samples.idx"
        data = path.read_bytes() if path.is_file() else b""
        records = list(RECORD.iter_unpack(data[: len(data) - len(data) % RECORD.size]))
        self._tokens = sum(record[2] for record in records)
        sizes = {"samples.idx": len(records) * RECORD.size, "log_total.f32": self._tokens * 4}
        if top := self.manifest["top_tokens"]:
            sizes |= {"top_tokens.i32": self._tokens * 4 * top, "top_probs.f16": self._tokens * 2 * top}
        if records:
            self._shard = records[-1][1]
            self._end = _end(records[-1], self.manifest["hidden_size"])
        names, sizes["samples.jsonl"] = _names(self.folder / "samples.jsonl", len(records))
        self.ids = [name["id"] for name in names]
        for shard in self.folder.glob("shard-*.bin"):
            if int(shard.stem.removeprefix("shard-")) > self._shard:
                sizes[shard.name] = 0
        sizes[f"shard-{self._shard:05d}.bin"] = self._end
        for name, size in sizes.items():
            file = self.folder / name
            there = file.stat().st_size if file.is_file() else 0
            if there < size:
                raise ValueError(f"{file} has {there} bytes, its index speaks of {size}: delete the folder")
            if there > size:
                os.truncate(file, size)
        self._write_manifest()

    def _write_manifest(self) -> None:
        shards = [{"shard_id": i, "file_name": f"shard-{i:05d}.bin"} for i in range(self._shard + 1 if self.ids else 0)]
        full = {**self.manifest, "num_samples": len(self.ids), "num_shards": len(shards), "shards": shards}
        aside = self.folder / ".manifest.json"
        with open(aside, "wb") as file:
            file.write(json.dumps(full, indent=2).encode() + b"\n")
            _sync(file)
        os.replace(aside, self.folder / "manifest.json")


class HiddenCache:
    """A cache to read: ours, or one that the authors' code wrote (which has no ``log_total`` and no top tokens).

    Args:
        folder: of the cache.
        layer_ids: read these taps alone, a part of what is there; None reads all.

    Raises:
        ValueError: for a folder that is no such cache, is cut short, or lacks a layer, naming what is wrong.
    """

    def __init__(self, folder: Path, layer_ids: Sequence[int] | None = None) -> None:
        self.folder = folder
        path = folder / "manifest.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no manifest.json: it is no cache of hidden states")
        self.manifest = json.loads(path.read_text(encoding="utf-8"))
        for key, wanted in {"version": 2, "index_record_size": RECORD.size, **DTYPES}.items():
            if self.manifest.get(key) != wanted:
                raise ValueError(f"{path}: {key} is {self.manifest.get(key)}, this code reads {wanted}")
        count = self.manifest["num_samples"]
        data = (folder / "samples.idx").read_bytes() if self._has("samples.idx") else b""
        if len(data) < count * RECORD.size:
            raise ValueError(f"{folder / 'samples.idx'} has {len(data)} bytes, too few for {count} records")
        # More are no error: a writer that is at work adds to the index first and to the manifest last.
        self.records = list(RECORD.iter_unpack(data[: count * RECORD.size]))
        self.lengths = [record[2] for record in self.records]
        *self._starts, self._tokens = accumulate(self.lengths, initial=0)
        self._maps: dict[str, mmap.mmap] = {}
        self._shards = {shard["shard_id"]: shard["file_name"] for shard in self.manifest["shards"]}
        if self._has("samples.jsonl"):
            self.names, _ = _names(folder / "samples.jsonl", count)
        else:
            self.names = [{"id": str(record[0]), "domain": ""} for record in self.records]
        self._check_sizes()
        self.layer_ids = list(self.manifest["target_layer_ids"] if layer_ids is None else layer_ids)
        missing = [layer for layer in self.layer_ids if layer not in self.manifest["target_layer_ids"]]
        if missing:
            raise ValueError(f"{folder} holds layers {self.manifest['target_layer_ids']}, not {missing}")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        """One sample, copied out of the file."""
        _, _, length, *offsets = self.records[index]
        start, hidden = self._starts[index], self.manifest["hidden_size"]
        file = self._shard(index)
        all_layers = self.manifest["target_layer_ids"]
        features = self._read(file, torch.bfloat16, offsets[3], length, len(all_layers), hidden)
        if self.layer_ids != all_layers:
            features = features[:, [all_layers.index(layer) for layer in self.layer_ids]]
        extra: dict[str, torch.Tensor] = {}
        if self._has("log_total.f32"):
            extra["log_total"] = self._read("log_total.f32", torch.float32, start * 4, length)
        if top := self.manifest.get("top_tokens", 0):
            extra["top_tokens"] = self._read("top_tokens.i32", torch.int32, start * 4 * top, length, top)
            extra["top_probs"] = self._read("top_probs.f16", torch.float16, start * 2 * top, length, top)
        return Sample(
            **self.names[index],
            input_ids=self._read(file, torch.int32, offsets[0], length),
            loss_mask=self._read(file, torch.uint8, offsets[2], length),
            features=features.flatten(1),
            last_hidden=self._read(file, torch.bfloat16, offsets[4], length, hidden),
            **extra,
        )

    def own_tokens(self, index: int) -> torch.Tensor:
        """The sample's tokens that are the target's own, int64, without reading its states."""
        _, _, length, *offsets = self.records[index]
        ids = self._read(self._shard(index), torch.int32, offsets[0], length)
        return ids[self._read(self._shard(index), torch.uint8, offsets[2], length).bool()].long()

    def _shard(self, index: int) -> str:
        return self._shards[self.records[index][1]]

    def _has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _read(self, name: str, dtype: torch.dtype, offset: int, *shape: int) -> torch.Tensor:
        if name not in self._maps:
            with open(self.folder / name, "rb") as file:
                # read only: a writable map of the authors' 64 GiB shards would need as much memory
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memoryview(self._maps[name]) as view:
            # copied: an offset need not be a multiple of the item's size
            part = bytearray(view[offset : offset + math.prod(shape) * dtype.itemsize])
        return torch.frombuffer(part, dtype=dtype).view(shape)

    def _check_sizes(self) -> None:
        wanted: dict[str, int] = {}
        for index, record in enumerate(self.records):
            if record[1] not in self._shards:
                raise ValueError(f"{self.folder}: sample {index} is in shard {record[1]}, which no manifest names")
            wanted[self._shard(index)] = max(
                wanted.get(self._shard(index), 0), _end(record, self.manifest["hidden_size"])
            )
        if self._has("log_total.f32"):
            wanted["log_total.f32"] = self._tokens * 4
        if top := self.manifest.get("top_tokens", 0):
            wanted |= {"top_tokens.i32": self._tokens * 4 * top, "top_probs.f16": self._tokens * 2 * top}
        for name, size in wanted.items():
            there = (self.folder / name).stat().st_size if self._has(name) else 0
            if there < size:
                raise ValueError(f"{self.folder / name} has {there} bytes, its index speaks of {size}")


def _end(record: tuple[int, ...], hidden_size: int) -> int:
    return record[7] + record[2] * hidden_size * 2


def _names(path: Path, count: int) -> tuple[list[dict[str, str]], int]:
    """The first ``count`` lines of ``samples.jsonl`` and how many bytes they are; those behind may be half written."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    lines = [line for line in lines if line.endswith(b"\n")][:count]
    if len(lines) < count:
        raise ValueError(f"{path} names {len(lines)} of {count} samples")
    return [json.loads(line) for line in lines], sum(map(len, lines))


def _bytes(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    return tensor.to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
