"""Training runs in processes of their own, for test_workers.py: `training_runs.py killed|two FOLDER`, JSON on stdout.

One interpreter imports torch; every run is a fork of it. It never runs a backward pass itself, whose threads no fork
would have.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from dspark_fast.draft import DSparkDraft
from dspark_fast.training.features import Batches, Sequences
from dspark_fast.training.trainer import Trainer, TrainSettings
from dspark_fast.training.workers import Workers

GOLDEN = Path(__file__).parent / "data" / "golden" / "qwen3_vanilla"
SETTINGS = TrainSettings(
    steps=12, learning_rate=3e-3, sequences=2, anchors=4, vocabulary=100, save_every=4, evaluate_every=4
)


class Noise:
    """A source of random states, the same in every process."""

    def __init__(self, draft, lengths, seed):
        self.lengths, self.seed = lengths, seed
        self.taps, self.hidden = draft.fc.in_features, draft.config.hidden_size
        self.vocabulary = draft.config.vocab_size

    def _sample(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = self.lengths[index]
        ids = torch.randint(self.vocabulary, (length,), generator=generator)
        features = torch.randn(length, self.taps, generator=generator)
        return ids, features, torch.randn(length, self.hidden, generator=generator)

    def batch(self, indices):
        rows, width = [self._sample(index) for index in indices], max(self.lengths[index] for index in indices)
        ids, features, last = (
            torch.stack([torch.cat([one, one.new_zeros(width - len(one), *one.shape[1:])]) for one in column])
            for column in zip(*rows)
        )
        lengths = torch.tensor([self.lengths[index] for index in indices])
        mask = (torch.arange(width) >= 3) & (torch.arange(width) < lengths[:, None])
        return Sequences(ids, mask, features, last, log_total=torch.full(ids.shape, 6.0))

    def own_tokens(self, index):
        return self._sample(index)[0][3:]

    def identity(self):
        return f"noise {self.seed} {self.lengths}"


def train(folder, settings, *, workers=None, on_step=lambda metrics: None, evaluated=None):
    """Train a small drafter; its final weights go to ``weights-<rank>``, what it was told to ``told-<rank>.json``."""
    draft = DSparkDraft.from_pretrained(GOLDEN)
    sources = (Noise(draft, [12, 15, 9, 20, 14, 17, 11, 13], 1), Noise(draft, [13, 16], 2))
    told = []

    def hear(metrics):
        told.append({key: value for key, value in metrics.items() if key != "blocks_per_second"})
        on_step(metrics)

    one = Trainer(draft, *(Batches(source, 2) for source in sources), folder, settings, hear, workers)
    if evaluated is not None:
        one.evaluate = lambda: evaluated(one)
    one.run()
    rank = one.workers.rank
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, f"{folder}/weights-{rank}")
    Path(f"{folder}/told-{rank}.json").write_text(json.dumps(told))


def fork(function):
    """Run it in a child process; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.alarm(200)  # two that wait for each other would outlive the test
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(*pids):
    """Until all are over; an error in one of them is ours."""
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"a run ended with status {status}")


# --- killed at random moments -----------------------------------------------------------------------------------------


def killed(folder):
    """One run to the end, and one that is killed ten times; how many steps each kill cost."""
    settings = replace(SETTINGS, steps=48, save_every=2, evaluate_every=3, patience=100)
    start = time.perf_counter()
    wait(fork(lambda: train(folder / "whole", settings)))
    each = (time.perf_counter() - start) / settings.steps
    choose = random.Random(15)
    lost, strays = [], []
    for limit in sorted(choose.sample(range(1, settings.steps - 5), 10)):
        lost.append(kill_at(folder / "killed", settings, limit, choose.uniform(0, 2 * each)))
        strays += [path.name for path in (folder / "killed").glob(".*")]
    wait(fork(lambda: train(folder / "killed", settings)))
    return {"lost": lost, "strays": strays}


def kill_at(folder, settings, limit, delay):
    """SIGKILL some time after the line of step ``limit``; the steps between the last line and the checkpoint."""
    read, write = os.pipe()

    def on_step(metrics):
        os.write(write, metrics["step"].to_bytes(4, "big"))
        if metrics["step"] >= limit + 5:
            time.sleep(600)  # the killer is late: no run may end before it comes

    pid = fork(lambda: train(folder, settings, on_step=on_step))
    os.close(write)
    while (step := os.read(read, 4)) and int.from_bytes(step, "big") < limit:
        pass
    assert step, "the run ended before its kill"
    os.close(read)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(json.loads(line)["step"] for line in lines if line.endswith("\n"))
    checkpoint = folder / "checkpoint.safetensors"
    return last - (step_of(checkpoint) if checkpoint.is_file() else 0)


def step_of(path):
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


# --- two processes ----------------------------------------------------------------------------------------------------


def two(folder):
    """The same steps by one process and by two; and two that take up what one began."""
    one = replace(SETTINGS, accumulate=2)
    wait(fork(lambda: train(folder / "one", one)))
    together(folder, "two", SETTINGS, apart=True)

    def interrupt(metrics):
        if metrics["step"] == 6:
            raise KeyboardInterrupt

    def begin():
        try:
            train(folder / "resumed", one, on_step=interrupt)
        except KeyboardInterrupt:
            os._exit(0)

    wait(fork(begin))
    begun = step_of(folder / "resumed" / "checkpoint.safetensors")
    together(folder, "resumed", SETTINGS)
    # the second worker would go on for ever: the first one's evaluation counts
    stop = replace(SETTINGS, steps=30, evaluate_every=2, patience=2)
    taus = {0: lambda step: {4: 3.0}.get(step, 1.5), 1: float}
    together(folder, "stopped", stop, evaluated=lambda one: {"tau": taus[one.workers.rank](one.step)})
    return {"begun": begun}


def together(folder, name, settings, *, apart=False, evaluated=None):
    """Two workers; ``apart`` gives the second one a folder of its own, to see what it writes."""
    meeting = folder / f"meeting-{name}"

    def work(rank):
        os.environ["WORLD_SIZE"] = "2"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        workers = Workers.from_environment("cpu")
        to = folder / (f"{name}-{rank}" if apart else name)
        train(to, settings, workers=workers, evaluated=evaluated)
        workers.leave()

    wait(*(fork(lambda rank=rank: work(rank)) for rank in range(2)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[2])
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    json.dump({"killed": killed, "two": two}[sys.argv[1]](root), sys.stdout)
