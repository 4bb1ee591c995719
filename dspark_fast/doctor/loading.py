"""What a drafter's checkpoint holds, what it takes from its target, and the memory that the pair needs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dspark_fast.checkpoint import FROM_TARGET, OFFSETS, indexed_files, read_config
from dspark_fast.config import DSparkConfig
from dspark_fast.doctor.hypotheses import shares_weights
from dspark_fast.draft import DSparkDraft
from dspark_fast.pairing import check_pair
from dspark_fast.pairs import best_dtype, chosen_device, draft_folder
from dspark_fast.targets import load_target


class PairRefused(ValueError):
    """The drafter and this target cannot be put together at all.

    Attributes:
        fault: its name.
        repaired: the pair after the one repair that lets it load, if there is one; repair: in words.
    """

    def __init__(self, fault: str, message: str, repaired: Loaded | None = None, repair: str = "") -> None:
        super().__init__(message)
        self.fault, self.repaired, self.repair = fault, repaired, repair


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint against what its configuration asks for.

    Attributes:
        stored: how many there are.
        missing, unexpected, misshaped: by name.
        aliased: taken from the target, and ``differing`` of them stored with other values.
    """

    stored: int
    missing: list[str]
    unexpected: list[str]
    misshaped: list[str]
    aliased: list[str]
    differing: list[str]


@dataclass(frozen=True)
class Memory:
    """Bytes that a pair needs.

    Attributes:
        target: of the target's weights; drafter: of the drafter's own; aliased: of the target's that it also reads.
        target_token, drafter_token: K/V of one token in each one's cache.
        capacity: tokens of the target's whole context; at_capacity: everything for one row of so many.
    """

    target: int
    drafter: int
    aliased: int
    target_token: int
    drafter_token: int
    capacity: int

    @property
    def at_capacity(self) -> int:
        return self.target + self.drafter + self.capacity * (self.target_token + self.drafter_token)


@dataclass(frozen=True)
class Loaded:
    """A pair and what is known of it before it is run."""

    model: Any
    draft: DSparkDraft
    tokenizer: Any
    folder: Path
    inventory: Inventory
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        config = self.draft.config
        tokens = None if self.draft.vocabulary is None else len(self.draft.vocabulary)
        return {
            "tensors": asdict(self.inventory),
            "memory": {**asdict(self.memory), "at_capacity": self.memory.at_capacity},
            "dtype": str(self.draft.dtype).removeprefix("torch."),
            "draft_vocabulary": tokens,
            "block_size": config.block_size,
            "layers": config.num_hidden_layers,
            "taps": config.target_layer_ids,
            "mask_token_id": config.mask_token_id,
            "markov_head": f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else None,
            "confidence_head": config.enable_confidence_head,
        }


def load_pair(
    name: str,
    *,
    draft: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Loaded:
    """As :func:`dspark_fast.load`, but a drafter whose copies of the target's weights differ is loaded with these.

    Raises:
        ValueError: for what is no drafter, or not there.
        PairRefused: for a drafter that does not fit its own configuration, or this target.
        TargetError: the target or the drafter cannot be had.
    """
    device = chosen_device(device)
    for what, given in (("target", name), ("drafter", draft)):
        if given is not None and str(given).startswith(("/", ".", "~")) and not Path(given).expanduser().is_dir():
            raise ValueError(f"the {what} is {str(given)!r}, and there is no such folder")
    folder = draft_folder(name, draft, progress=True, offline=False)
    if _shifted(folder) is None:
        read_config(folder)  # before the target is fetched
    model, tokenizer = load_target(name, best_dtype(device) if dtype is None else dtype, device)
    return join(model, tokenizer, folder)


def join(model: Any, tokenizer: Any, folder: Path) -> Loaded:
    """A target and the checkpoint of a drafter; see :func:`load_pair`."""
    shifted = _shifted(folder)
    try:
        config = read_config(folder)
        check_pair(config, model)
    except ValueError as error:
        if shifted is not None:
            raise _repaired(str(error), folder, shifted, model, tokenizer) from None
        raise PairRefused("target", str(error)) from None
    found = _inventory(folder, config, model)
    try:
        if found.differing and set(FROM_TARGET) <= _stored(folder).keys():
            # The loader refuses them, rightly; here both are tried, and the better one tells where the fault is.
            draft = DSparkDraft.from_pretrained(folder, dtype=model.dtype, device=model.device)
        else:
            draft = DSparkDraft.from_pretrained(folder, target=model)
    except ValueError as error:
        raise PairRefused("embedding" if found.differing else "checkpoint", str(error)) from None
    return Loaded(model, draft, tokenizer, folder, found, memory_of(model, draft))


def _shifted(folder: Path) -> list[int] | None:
    """The taps one layer earlier, for a configuration whose last tap is the target's last layer; None for others."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        taps, depth = data["target_layer_ids"], data["num_target_layers"]
        return [tap - 1 for tap in taps] if taps[-1] == depth - 1 and taps[0] >= 0 else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # read_config says what is wrong with it
        return None


def _repaired(message: str, folder: Path, taps: list[int], model: Any, tokenizer: Any) -> PairRefused:
    """The refusal of a drafter, with the pair that it makes with other taps."""
    try:
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            for path in folder.iterdir():
                if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
                    os.symlink(path.resolve(), copy / path.name)
            data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (copy / "config.json").write_text(json.dumps({**data, "target_layer_ids": taps}), encoding="utf-8")
            repaired = join(model, tokenizer, copy)
    except (ValueError, OSError):
        return PairRefused("checkpoint", message)
    return PairRefused("taps", message, repaired, f"the taps one layer earlier, {taps}")


def _stored(folder: Path) -> dict[str, tuple[Path, list[int]]]:
    """File and shape of each stored tensor."""
    stored = {}
    for file in sorted(indexed_files(folder)):
        with safe_open(folder / file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                stored[key] = folder / file, tensors.get_slice(key).get_shape()
    return stored


def _inventory(folder: Path, config: DSparkConfig, model: Any) -> Inventory:
    try:
        stored = _stored(folder)
    except Exception as error:  # safetensors raises its own, and OSError
        raise PairRefused("checkpoint", f"{folder}: the weights cannot be read: {error}") from None
    with torch.device("meta"):
        own = {key: list(value.shape) for key, value in DSparkDraft(config).state_dict().items()}
    if config.draft_vocab_size is not None:
        own[OFFSETS] = [config.draft_vocab_size]
    differing = []
    for key in sorted(set(stored) & set(FROM_TARGET)):
        module = model.get_input_embeddings() if key == "embed_tokens.weight" else model.get_output_embeddings()
        with safe_open(stored[key][0], framework="pt") as tensors:
            copy, weight = tensors.get_tensor(key), module.weight.detach().cpu()
        if copy.shape != weight.shape or not torch.equal(copy.to(weight.dtype), weight):
            differing.append(key)
    return Inventory(
        stored=len(stored),
        missing=sorted(set(own) - set(stored)),
        unexpected=sorted(set(stored) - set(own) - set(FROM_TARGET)),
        misshaped=sorted(key for key in set(stored) & set(own) if stored[key][1] != own[key]),
        aliased=sorted(set(FROM_TARGET) - set(differing)),
        differing=differing,
    )


def memory_of(model: Any, draft: DSparkDraft) -> Memory:
    """From the weights and the configurations; nothing is allocated."""
    target, config = model.config.get_text_config(decoder=True), draft.config
    heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    width = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    own = [*draft.parameters(), *draft.buffers()]
    shared = [draft.tied(name).weight for name in FROM_TARGET.values()] if shares_weights(model, draft) else []
    drafted = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return Memory(
        target=_bytes(model.parameters()),
        drafter=_bytes(own),
        aliased=_bytes(shared),
        target_token=2 * target.num_hidden_layers * heads * width * model.dtype.itemsize,
        drafter_token=drafted * draft.dtype.itemsize,
        capacity=getattr(target, "max_position_embeddings", None) or 4096,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors, each storage once: a target may tie its embedding to its head."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
