"""What a training run shows of itself: the plot of its metrics and the model card."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

from dspark_fast.training.acceptance import Acceptance
from dspark_fast.training.card import write_card
from dspark_fast.training.plot import plot_training
from dspark_fast.training.recipe import Recipe
from dspark_fast.training.trainer import TrainSettings

# --- the plot ---------------------------------------------------------------------------------------------------------


def metrics(path, *, steps=40, held_out=True, calibration=True, stopped=False, confidence=0.5):
    """Made-up metrics of a run; the acceptance of slot j ends at 0.5 - j / 10."""
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 1.0, "cross_entropy": 3 / step, "total_variation": 1.5, "confidence": confidence}
        row |= {"tau": 1 + step / steps, "accept": [(0.5 - slot / 10) * step / steps for slot in range(3)]}
        if held_out and step % 10 == 0:
            row["held_out"] = {key: value for key, value in row.items() if key != "step"}
            if calibration:
                bins = [[0, 0, 0]] * 8 + [[30, 0.8, 0.7], [10, 0.9, 0.5]]
                row["held_out"] |= {"calibration": [bins] * 3, "ece": [0.175, 0.2, 0.3]}
        rows.append(row)
    rows[3]["tau"] = None  # a batch without full blocks
    if stopped:
        rows[-1]["stopped"] = "no better held-out tau since step 20"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def figure(monkeypatch):
    """Draws, and gives the figure."""
    module = pytest.importorskip("matplotlib.figure")
    drawn = []
    true = module.Figure.savefig

    def watching(self, path, **options):
        drawn.append(self)
        return true(self, path, **options)

    monkeypatch.setattr(module.Figure, "savefig", watching)

    def draw(path):
        plot_training(path, path.with_suffix(".png"))
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return drawn[-1]

    return draw


def words(axis):
    legend = axis.get_legend()
    return [text.get_text() for text in [*axis.texts, *(legend.get_texts() if legend else [])]]


def test_plot(figure, tmp_path):
    import matplotlib

    backend = matplotlib.get_backend()
    found = figure(metrics(tmp_path / "metrics", stopped=True))
    assert matplotlib.get_backend() == backend
    losses, tau, positions, calibration = found.axes
    assert words(losses) == ["cross-entropy (nats)", "L1 distance (0 to 2)", "BCE (nats)", "held out"]
    assert words(tau) == ["training text", "held out", "best held out: 2.00 at step 40"]
    assert words(positions) == ["slot 1: 0.50", "slot 2: 0.40", "slot 3: 0.30"]
    assert words(calibration) == ["slot 1: 0.175", "slot 2: 0.200", "slot 3: 0.300"]
    curve = calibration.lines[1]
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([0.8, 0.9], [0.7, 0.5])
    assert found.get_suptitle() == "stopped at step 40: no better held-out tau since step 20"
    assert "held-out" in positions.get_title()
    shades = [sum(line.get_color()[:3]) for line in calibration.lines[1:]]
    assert shades == sorted(shades)


def test_plot_of_older_metrics(figure, tmp_path):
    found = figure(metrics(tmp_path / "old", calibration=False, confidence=0.0))
    assert words(found.axes[3]) == ["no data"] and found.get_suptitle() == ""
    assert "BCE (nats)" not in words(found.axes[0])
    found = figure(metrics(tmp_path / "nothing", held_out=False))
    assert "training text" in found.axes[2].get_title() and len(words(found.axes[2])) == 3
    assert words(found.axes[1]) == ["training text"]
    figure(metrics(tmp_path / "one", steps=4))
    (tmp_path / "empty").write_text("")
    plot_training(tmp_path / "empty", tmp_path / "empty.png")
    assert not (tmp_path / "empty.png").exists()


def test_labels_do_not_overlap(figure, tmp_path):
    """Seven curves that end in nearly one place."""
    from matplotlib.text import Text

    rows = []
    for step in (1, 2):
        row = {"step": step, "cross_entropy": 3.0, "total_variation": 1.5, "confidence": 0.5, "tau": 1.5}
        row["accept"] = [step * (0.2 - slot / 1000) for slot in range(7)]
        rows.append({**row, "held_out": row})
    (tmp_path / "metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figure(tmp_path / "metrics")
    boxes = [Text.get_window_extent(label) for label in found.axes[2].texts]  # without its line to the curve
    assert len(boxes) == 7
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1 - 1


# --- the card ---------------------------------------------------------------------------------------------------------

SETTINGS = TrainSettings(
    steps=40, learning_rate=3e-3, warm_up=0.34, sequences=2, anchors=6, vocabulary=40, save_every=3, evaluate_every=2
)


@pytest.fixture
def card(make_target, make_draft, tmp_path):
    """The card of a saved drafter, by changes to the settings and to the arguments."""
    draft = make_draft(make_target())
    folder = tmp_path / "draft"
    draft.save_pretrained(folder)

    def write(stopped=False, plot=False, settings=None, best=None, begins="the target's last layers", **arguments):
        if plot:
            (folder / "training.png").write_bytes(b"\x89PNG")
        if best is not None:
            save_file({"weight.a": torch.zeros(1)}, tmp_path / "best.safetensors", metadata={"step": str(best)})
        acceptance = [
            Acceptance("math", 3, 2.345, [0.61, 0.52, 0.43, 0.34, 0.25], 20),
            *(Acceptance(domain, 3, 2.0, [0.5] * 5, 20) for domain in ("code", "chat", "list", "short")),
            Acceptance("mean", 15, 2.069, [], 100),
            Acceptance("all", 15, 3.21, [0.71, 0.72, 0.73, 0.74, float("nan")], 100),
        ]
        write_card(
            folder,
            target="someone/some-model",
            config=draft.config,
            recipe=Recipe(tokens=123_456, seed=77, train=replace(SETTINGS, **(settings or {}))),
            command="dspark-fast train --model 'some model'",
            metrics=metrics(tmp_path / "metrics.jsonl", stopped=stopped),
            acceptance=acceptance,
            answer_tokens=98_765,
            measure_command="dspark-fast eval --model 'some model' --draft out/draft",
            begins=begins,
            **arguments,
        )
        return (folder / "README.md").read_text()

    write.draft = draft
    write.folder = folder
    return write


def test_card(card):
    text = card(trained_on="An hour on one core.", plot=True)
    own = [p for name, p in card.draft.named_parameters() if not name.startswith(("embed_tokens", "lm_head"))]
    size = (card.folder / "model.safetensors").stat().st_size / 1e6
    for part in (
        "# DSpark drafter for someone/some-model\n",
        "dspark-fast train --model 'some model'\n",
        f"| parameters | {sum(p.numel() for p in own):,} (all trained), {size:.1f} MB |",
        "98,765 answer tokens (asked for: 123,456",
        "seed 77)",
        "\n40 steps of 2 sequences x 6 anchor blocks",
        "peak learning rate 0.003\n(Markov weights 8 times that), warm-up 34%",
        "| math | 3 | 2.35 | 0.61 | 0.52 | 0.43 | 0.34 | 0.25 |",
        "| mean | 15 | 2.07 |  |  |  |  |  |",
        "| all | 15 | 3.21 | 0.71 | 0.72 | 0.73 | 0.74 | - |",
        "| vanilla, rank 8 |",
        "over the 40 most frequent of 97 tokens",
        "\nInitialised from: the target's last layers.\n",
        "\nAn hour on one core.\n",
        "\n![training curves](training.png)\n",
        "```\ndspark-fast eval --model 'some model' --draft out/draft\n```",
    ):
        assert part in text, part
    rows = [line for line in text.splitlines() if line.startswith(("| prompts", "|---|---|---|", "| m", "| all"))]
    assert len(rows) == 5 and len({row.count("|") for row in rows}) == 1
    assert "Stopped" not in text and "largest probabilities" not in text


def test_card_of_another_run(card):
    text = card(best=20, workers=3, begins="the drafter some/one", settings={"patience": 2})
    assert "40 steps of 3 workers x 1 x 2 sequences x 6" in text
    assert "\nThe weights are those of step 20, which had the best held-out acceptance length.\n" in text
    assert "\nInitialised from: the drafter some/one.\n" in text
    text = card(stopped=True, settings={"steps": 90, "vocabulary": 0, "top_tokens": 64, "accumulate": 4})
    assert "40 of 90 steps of 4 x 2 sequences" in text
    assert "Stopped early: no better held-out tau since step 20." in text
    assert "loss: of the target the 64 largest probabilities, the rest" in text and "most frequent" not in text
    assert "training.png" not in text and "those of step" not in text  # kept, but not taken without patience
    assert "none, it runs over the whole vocabulary" in card(settings={"vocabulary": 0})
    heads = sum(
        p.numel() for name, p in card.draft.named_parameters() if name.startswith(("markov_head.", "confidence_head."))
    )
    assert f"({heads:,} of them trained)" in card(settings={"heads_only": True})
    (card.folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        card()
