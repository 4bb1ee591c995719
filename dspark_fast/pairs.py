"""Known pairs of target and drafter, loaded by the target's name."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark_fast.targets import TargetError, find_target, load_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_fast.draft import DSparkDraft

__all__ = ["PAIRS", "Pair", "best_dtype", "best_device", "load"]


@dataclass(frozen=True)
class Pair:
    """A target and the drafter that was trained for it.

    Attributes:
        draft: a name on the hub; or, if ``shipped``, a folder of ``dspark_fast.drafts``.
        shipped: the drafter comes with this package.
    """

    draft: str
    shipped: bool = False


#: drafter of each known target
PAIRS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Pair("SmolLM2-135M-Instruct", shipped=True),
    "Qwen/Qwen3-4B": Pair("deepseek-ai/dspark_qwen3_4b_block7"),
    "Qwen/Qwen3-8B": Pair("deepseek-ai/dspark_qwen3_8b_block7"),
    "Qwen/Qwen3-14B": Pair("deepseek-ai/dspark_qwen3_14b_block7"),
}


def load(
    name: str,
    *,
    draft: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    offline: bool = False,
) -> tuple[PreTrainedModel, DSparkDraft, PreTrainedTokenizerBase]:
    """Load a target, its drafter and its tokenizer, ready for :func:`dspark_fast.generate`.

    Args:
        name: the target: a known name (:data:`PAIRS`), or with ``draft`` any folder or hub name.
        draft: the drafter's folder or hub name; the known one if left out.
        dtype: of both models; ``"auto"`` is the checkpoint's; None is :func:`best_dtype` of the device.
        device: None is :func:`best_device`.
        progress: say where weights come from, and show progress bars, on standard error.
        offline: use no network.

    Raises:
        ValueError: an unknown target without ``draft``; a folder or device that is not there; a drafter that cannot
            belong to the target.
        TargetError: the target or the drafter cannot be had or loaded; the message says why.
    """
    device = chosen_device(device)
    for what, given in (("target", name), ("drafter", draft)):
        if given is not None and str(given).startswith(("/", ".", "~")) and not Path(given).expanduser().is_dir():
            raise ValueError(f"the {what} is {str(given)!r}, and there is no such folder")
    folder = draft_folder(name, draft, progress=progress, offline=offline)  # first: it is the smaller of the two
    model, tokenizer = load_target(
        name, best_dtype(device) if dtype is None else dtype, device, progress=progress, offline=offline
    )
    from dspark_fast.draft import DSparkDraft

    try:
        return model, DSparkDraft.from_pretrained(folder, target=model), tokenizer
    except OSError as error:
        raise TargetError(f"the drafter in {folder} cannot be loaded: {error}") from error


def draft_name(model: str, draft: str | os.PathLike[str] | None = None) -> str:
    """What to call the drafter of ``load(model, draft=draft)``, in results too: as given, else the known one.

    One in a folder is named with eight digits of its weights' hash: another may be trained into the same place.
    """
    folder, name = Path(str(draft)), str(draft)
    if draft is None and model in PAIRS:
        pair = PAIRS[model]
        folder = _shipped(pair) if pair.shipped else Path(pair.draft)
        name = f"dspark_fast/drafts/{pair.draft}" if pair.shipped else pair.draft
    digest = weights_digest(folder.expanduser())
    return name if digest is None else f"{name} ({digest})"


def weights_digest(folder: Path) -> str | None:
    """Eight hexadecimal digits of all weights in a folder; None if there are none."""
    files, found = sorted(folder.glob("*.safetensors")), hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while part := file.read(2**24):  # a drafter may have gigabytes
                found.update(part)
    return found.hexdigest()[:8] if files else None


def _shipped(pair: Pair) -> Path:
    return Path(str(resources.files("dspark_fast.drafts") / pair.draft))


def best_device() -> torch.device:
    """CUDA where there is a device, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def best_dtype(device: torch.device | str) -> torch.dtype | str:
    """The dtype to load a target in when none is asked for.

    Decoding a few tokens at a time is bound by reading the weights, and bf16 halves them. On a CPU it pays only where
    there are instructions that multiply bf16 (AVX512-BF16 or AMX-BF16 on x86, the BF16 extension on ARM) and a oneDNN
    that uses them; elsewhere torch converts every weight to fp32 each time it is read, which is slower than fp32
    weights, so there it is fp32. This is read from the CPU's own flags, nothing is timed. On any other device: the
    checkpoint's.

    Returns:
        ``torch.bfloat16``, ``torch.float32``, or ``"auto"`` for the checkpoint's.
    """
    if torch.device(device).type != "cpu":
        return "auto"
    able = getattr(torch.cpu, "get_capabilities", dict)()
    native = any(able.get(flag, False) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native and torch.backends.mkldnn.is_available() else torch.float32


def chosen_device(device: torch.device | str | None) -> torch.device:
    """A device by its name, :func:`best_device` without one.

    Raises:
        ValueError: there is no such device.
    """
    if device is None:
        return best_device()
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}: accepted are 'cpu', 'cuda', 'cuda:1' and the like") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {str(device)!r}, but torch finds {torch.cuda.device_count()} CUDA devices here")
    return device


def draft_folder(name: str, draft: str | os.PathLike[str] | None, *, progress: bool, offline: bool) -> Path:
    """The drafter's folder, downloaded if need be."""
    if draft is None:
        pair = PAIRS.get(name)
        if pair is None:
            raise ValueError(
                f"no drafter is known for {name}: give one (draft=, on the command line --draft), or take a target "
                f"that has one: {', '.join(PAIRS)}"
            )
        if pair.shipped:
            folder = _shipped(pair)
            if not (folder / "config.json").is_file():
                raise TargetError(f"this installation lacks the drafter that ships with it, {folder}: install it again")
            return folder
        draft = pair.draft
    if Path(draft).expanduser().is_dir():
        return Path(draft).expanduser()
    try:
        return find_target(str(draft), progress=progress, offline=offline).path
    except TargetError as error:
        # The hub's cache holds a target only with its tokenizer, which a drafter need not have.
        if (cached := _cached(str(draft))) is not None:
            return cached
        raise TargetError(f"the drafter cannot be had: {error}") from error


def _cached(name: str) -> Path | None:
    """A drafter's folder in the hub's local cache, if its configuration and all its weights are there; no network."""
    from huggingface_hub import try_to_load_from_cache

    from dspark_fast.checkpoint import indexed_files

    try:
        config = try_to_load_from_cache(name, "config.json")
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        files = indexed_files(folder)
    except (OSError, ValueError):  # no name that the hub allows, or a broken index
        return None
    return folder if all((folder / file).is_file() for file in files) else None
