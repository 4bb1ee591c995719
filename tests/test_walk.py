"""Training as a user does it: the README's own commands, several processes under torchrun, and kills in between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspark_fast.training.responses import read_responses

pytestmark = pytest.mark.slow

README = Path(__file__).parent.parent / "README.md"
SMALL = [
    "--tokens", 700, "--max-new-tokens", 14, "--layers", 1, "--block-size", 3, "--rank", 4, "--steps", 4,
    "--sequences", 2, "--anchors", 4, "--vocabulary", 50, "--per-domain", 1, "--save-every", 2, "--evaluate-every", 2,
    "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(make_target, characters, tmp_path_factory):
    """The folder of a small Qwen3 with random weights and a chat template."""
    folder = tmp_path_factory.mktemp("walk") / "target"
    model = characters.target(make_target)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    model.save_pretrained(folder)
    characters.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Short prompts, read first: the package's own have hundreds of characters, which are tokens here."""
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Q{n}"}) + "\n" for n in range(900)))
    return path


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_whole(out, steps=4):
    """All that a run leaves, each response and each step once, nothing half written."""
    assert [row["step"] for row in metrics_of(out)] == list(range(1, steps + 1))
    ids = [response.id for response in read_responses(out / "responses.jsonl")]
    assert ids and len(ids) == len(set(ids))
    assert {path.name for path in (out / "draft").iterdir()} >= {"README.md", "config.json", "model.safetensors"}
    assert not list(out.glob("responses.part-*")) and not list(out.glob(".*"))


# --- the README's walk ------------------------------------------------------------------------------------------------


def blocks_of_readme():
    """The commands of the section on training, block by block."""
    section = README.read_text(encoding="utf-8").partition("## Train a drafter\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [[shlex.split(line, comments=True) for line in block.splitlines()] for block in blocks]


def test_the_walk_of_the_readme(target, questions, tmp_path, monkeypatch, capfd):
    pytest.importorskip("typer")
    from dspark_fast.cli import main, session

    (pip, train, generate), measure = blocks_of_readme()
    assert pip[:3] == ["pip", "install", "-e"] and re.fullmatch(r"\.\[[a-z,]+\]", pip[3]) and len(pip) == 4
    evaluate = next(words for words in measure if "YOUR-MODEL" in words)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "quiet", lambda: None)

    def run(words, *sizes):
        assert words[0] == "dspark-fast"
        words = [str(target) if word == "YOUR-MODEL" else word for word in words[1:]]
        with pytest.raises(SystemExit) as ended:
            main([*words, *map(str, sizes)])
        said = capfd.readouterr()
        assert not ended.value.code, said.err
        return said.out

    run(train, *SMALL, "--prompts", questions)
    out = tmp_path / train[train.index("--out") + 1]
    assert_whole(out)
    card = (out / "draft" / "README.md").read_text()
    assert "Initialised from: the target's last layers." in card and "Trained on: " in card
    assert json.loads((out / "draft" / "config.json").read_text())["block_size"] == 3
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401

        assert (out / "draft" / "training.png").read_bytes().startswith(b"\x89PNG")
        assert "![training curves](training.png)" in card

    # in 16 bits a near-tie may fall either way, and random weights have many
    sizes = ["--max-new-tokens", 12, "--dtype", "fp32", "--device", "cpu"]
    assert re.search(r"the same \d+ tokens?\b", run(generate, *sizes, "--repeats", 1))
    few = questions.read_text().splitlines(keepends=True)[:6]
    (tmp_path / evaluate[evaluate.index("--prompts") + 1]).write_text("".join(few))
    table = run(evaluate, *sizes)
    assert len(re.findall(r"^mine +6 +\d+ +\d\.\d\d", table, re.MULTILINE)) == 2 and "predicted" in table


# --- processes of their own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A folder for PATH that holds ``dspark-fast``, as an installation has it."""
    pytest.importorskip("typer")
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "dspark-fast"
    code = "import sys; from dspark_fast.cli import main; sys.exit(main())"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    script.chmod(0o755)
    return folder


@pytest.fixture
def start(program, target, questions, tmp_path):
    """Start ``dspark-fast train`` in a process of its own; under torchrun with ``processes``."""

    def run(*arguments, out=tmp_path / "out", processes=1, **options):
        path = f"{program}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words = ["dspark-fast", "train", "--model", target, "--out", out, "--prompts", questions, *SMALL, *arguments]
        if processes > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
            words = [*torchrun, "--no-python", *words]
        return subprocess.Popen([*map(str, words)], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, **options)

    run.out = tmp_path / "out"
    return run


def end_of(process, seconds=300):
    """Its status and what it said; one that does not end is an error of ours."""
    try:
        _, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return SimpleNamespace(status=process.returncode, said=said)


def test_two_processes(start):
    """Cached, live from the same responses, and refused: both processes end, and the first one alone writes."""
    ended = end_of(start("--taps", "0,1", processes=2))
    assert ended.status == 0, ended.said
    assert_whole(start.out)
    card = (start.out / "draft" / "README.md").read_text()
    assert "torchrun --nproc-per-node 2 --no-python dspark-fast " in card and "of 2 workers x 1 x 2 sequences" in card
    assert ended.said.count("The drafter is in ") == 1

    live = start.out.with_name("live")
    live.mkdir()
    for name in ("responses.jsonl", "run.json"):
        shutil.copy(start.out / name, live)
    ended = end_of(start("--taps", "0,1", "--live", out=live, processes=2))
    assert ended.status == 0, ended.said
    assert_whole(live)
    assert not (live / "features").exists()

    run = json.loads((live / "run.json").read_text())
    (live / "run.json").write_text(json.dumps({**run, "weights": "another"}))
    began = time.monotonic()
    ended = end_of(start("--taps", "0,1", "--live", out=live, processes=2))
    # torchrun sees the first one's status and ends the second one, which waits for it
    assert ended.status != 0 and "holds answers with weights another" in ended.said
    assert len(re.findall("^Error: ", ended.said, re.MULTILINE)) == 1  # torchrun's own report has more of them inside
    assert time.monotonic() - began < 200


def test_killed_twice(start):
    """SIGKILL while features are written and while it trains; the third run finishes, and each step is there once."""

    def killed_when(there):
        process = start("--steps", 200, "--save-every", 40, "--evaluate-every", 50, stdout=subprocess.DEVNULL)
        while not there() and process.poll() is None:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert end_of(process).status == -signal.SIGKILL

    killed_when((start.out / "features" / "train" / "samples.idx").exists)
    assert not (start.out / "checkpoint.safetensors").exists()
    killed_when((start.out / "checkpoint.safetensors").exists)
    assert not (start.out / "draft").exists()
    ended = end_of(start("--steps", 200, "--save-every", 40, "--evaluate-every", 50))
    assert ended.status == 0, ended.said
    assert_whole(start.out, steps=200)
    assert torch.isfinite(torch.tensor([row["loss"] for row in metrics_of(start.out)])).all()
