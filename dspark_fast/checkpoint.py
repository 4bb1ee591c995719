"""Reading and writing drafters in the authors' layout: ``config.json`` and safetensors, nothing else, never pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig

from dspark_fast.config import ARCHITECTURE, DSparkConfig
from dspark_fast.pairing import check_pair
from dspark_fast.vocabulary import check_vocabulary
from dspark_fast.writing import replacing, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dspark_fast.draft import DSparkDraft

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FROM_TARGET = {"embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"}
OFFSETS = "d2t"
_FLOATS = ("F32", "BF16", "F16", "F64")


def load_draft(
    cls: type[DSparkDraft],
    name: str | os.PathLike[str],
    *,
    target: PreTrainedModel | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    revision: str | None,
) -> DSparkDraft:
    """See :meth:`DSparkDraft.from_pretrained`."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype}: accepted is a floating-point dtype of torch")
    if target is not None and not hasattr(target, "get_output_embeddings"):
        raise ValueError(f"target is a {type(target).__name__}: accepted is a transformers model")
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {str(error).splitlines()[0]}") from None
    folder = _folder(name, revision)
    config = read_config(folder)
    if target is not None:
        check_pair(config, target)
        dtype = dtype or target.dtype
        device = device or target.device
    stored = _stored(folder)
    with torch.device("meta"):
        draft = cls(config)
    own = {key: tuple(value.shape) for key, value in draft.state_dict().items()}
    shapes = {key: shape for key, (_, shape) in stored.items()}
    _check_names(folder, shapes, own, needs_target_weights=target is None, config=config)

    dtype = dtype or config.dtype or torch.get_default_dtype()
    state: dict[str, torch.Tensor] = {}
    for file in sorted({file for file, _ in stored.values()}):
        with safe_open(file, framework="pt") as tensors:
            for key in (key for key, (where, _) in stored.items() if where == file):
                if key in FROM_TARGET and target is not None:
                    _check_copy(key, tensors.get_tensor(key), target, folder)
                else:
                    tensor = tensors.get_tensor(key)
                    state[key] = tensor.to(device or "cpu", torch.int64 if key == OFFSETS else dtype)
    for key, attribute in FROM_TARGET.items():
        if key in state:
            weight = state.pop(key)
            setattr(draft, attribute, _holder(attribute, weight))
    if config.draft_vocab_size is not None:
        tokens = state.pop(OFFSETS)
        tokens += torch.arange(len(tokens), device=tokens.device)
        try:
            draft.vocabulary = check_vocabulary(tokens, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{folder}: {OFFSETS} is not what it should be: {error}") from None
    draft.load_state_dict(state, assign=True, strict=False)
    draft.rotary_emb = type(draft.rotary_emb)(config).to(device or "cpu")  # its frequencies are not stored
    draft.eval().requires_grad_(False)
    draft.take_head_rows()
    return draft if target is None else draft.tie_to(target)


def save_draft(draft: DSparkDraft, folder: Path, *, include_target_weights: bool) -> None:
    """See :meth:`DSparkDraft.save_pretrained`. The weights are written aside and moved, so no half file is left."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().cpu().contiguous() for key, value in draft.state_dict().items()}
    if draft.vocabulary is not None:
        state[OFFSETS] = (draft.vocabulary - torch.arange(len(draft.vocabulary), device=draft.device)).cpu()
    if include_target_weights:
        for key, attribute in FROM_TARGET.items():
            # clone: a target that ties its embedding and head has one storage, and safetensors refuses shared ones
            state[key] = draft.tied(attribute).weight.detach().cpu().clone()
    else:
        state = {key: value for key, value in state.items() if key not in FROM_TARGET}
    # Without what every transformers configuration has by default (labels, output flags): the authors' files lack it.
    inert = PreTrainedConfig().to_dict()
    config = {key: value for key, value in draft.config.to_dict().items() if inert.get(key, ...) != value}
    config["dtype"] = str(draft.dtype).removeprefix("torch.")
    config["architectures"] = [ARCHITECTURE]
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    with replacing(folder / WEIGHTS) as aside:
        save_file(state, aside, metadata={"format": "pt"})


def read_config(folder: Path) -> DSparkConfig:
    """``config.json`` of a drafter.

    Raises:
        ValueError: if it is not one that can be loaded, naming the key and its value.
        OSError: if the folder has none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise OSError(f"{folder} has no config.json: not a drafter's checkpoint")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}: accepted is a JSON object")
    architectures = data.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{path}: architectures is {data.get('architectures')}; accepted is [{ARCHITECTURE!r}]"
            + (" (Gemma-4 drafters are not supported yet)" if architecture == "Gemma4DSparkModel" else "")
        )
    missing = [key for key in ("block_size", "mask_token_id", "target_layer_ids", "hidden_size") if key not in data]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}: not a DSpark drafter's configuration")
    # auto_map names code; what begins with _ is transformers' own, and may name a kernel to fetch from the hub.
    data = {key: value for key, value in data.items() if key != "auto_map" and not key.startswith("_")}
    if data.pop("quantization_config", None) is not None:
        raise ValueError(f"{path} has a quantization_config: drafters are read in floating point only")
    dtype = data.get("dtype", data.get("torch_dtype"))
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ValueError(f"{path}: dtype is {dtype!r}, accepted is float32, bfloat16, float16 or float64")
    try:
        config = DSparkConfig.from_dict(data)
        config.check()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not a drafter's configuration: {error}") from None
    return config


def _folder(name: str | os.PathLike[str], revision: str | None) -> Path:
    """The local folder of a checkpoint, fetched from the hub if ``name`` is no folder."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(str(name), revision=revision, allow_patterns=["config.json", "*.safetensors", INDEX])
        )
    except HFValidationError:
        raise OSError(f"{name} is neither a folder nor a name on the hub") from None


def _stored(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of each stored tensor, from the files' own headers: an index only says which files there are."""
    files = indexed_files(folder)
    if files == {WEIGHTS} and not (folder / WEIGHTS).is_file():
        raise OSError(f"{folder} has neither {WEIGHTS} nor {INDEX}; weights are read from safetensors only")
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in sorted(files):
        path = folder / file
        try:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    held = tensors.get_slice(key)
                    accepted = ("I64",) if key == OFFSETS else _FLOATS
                    if held.get_dtype() not in accepted:
                        raise ValueError(f"{path}: {key} is {held.get_dtype()}, accepted is {' or '.join(accepted)}")
                    stored[key] = path, tuple(held.get_shape())
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
    return stored


def indexed_files(folder: Path) -> set[str]:
    """The weight files that a checkpoint consists of: those its index names, or the one file of an unsharded one.

    Raises:
        ValueError: if the index is broken or names a file outside the folder.
    """
    path = folder / INDEX
    if (folder / WEIGHTS).is_file() or not path.is_file():
        return {WEIGHTS}
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors index: {error!r}") from None
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path} names the file {file!r}, which is not in the checkpoint's own folder")
    return files


def _check_names(
    folder: Path,
    stored: dict[str, tuple[int, ...]],
    own: dict[str, tuple[int, ...]],
    *,
    needs_target_weights: bool,
    config: DSparkConfig,
) -> None:
    shared = dict.fromkeys(FROM_TARGET, (config.vocab_size, config.hidden_size))
    if config.draft_vocab_size is not None:
        own = {**own, OFFSETS: (config.draft_vocab_size,)}
    expected = {**own, **shared}
    required = expected if needs_target_weights else own
    problems = []
    if missing := sorted(set(required) - set(stored)):
        problems.append(f"missing {', '.join(missing)}")
        if needs_target_weights and set(missing) <= set(FROM_TARGET):
            problems.append("which come from the target: pass target=model")
    if unexpected := sorted(set(stored) - set(expected)):
        problems.append(f"unexpected {', '.join(unexpected)}")
    for key in sorted(set(stored) & set(expected)):
        if stored[key] != expected[key]:
            problems.append(f"{key} has shape {list(stored[key])}, the configuration asks for {list(expected[key])}")
    if problems:
        raise ValueError(f"{folder} does not fit its configuration: {'; '.join(problems)}")


def _check_copy(key: str, stored: torch.Tensor, target: PreTrainedModel, folder: Path) -> None:
    module = target.get_input_embeddings() if key == "embed_tokens.weight" else target.get_output_embeddings()
    weight = module.weight.detach().cpu()
    if not torch.equal(stored.to(weight.dtype), weight):
        far = (stored.float() - weight.float()).abs().max().item()
        raise ValueError(
            f"{folder}: the stored {key} is not the target's (largest difference {far:.3g}): "
            f"the drafter was made for other weights than {getattr(target, 'name_or_path', '') or 'this target'}"
        )


def _holder(attribute: str, weight: torch.Tensor) -> nn.Module:
    if attribute == "embed_tokens":
        return nn.Embedding.from_pretrained(weight, freeze=True)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head
