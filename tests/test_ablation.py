"""The ablation: a finished variant is kept, an interrupted one goes on, table and figure come from the JSON alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark_fast.training import trainer
from dspark_fast.training.features import write_features
from dspark_fast.training.prompts import make_prompt
from dspark_fast.training.responses import Response

BENCH = Path(__file__).parent.parent / "bench"
NAMES = ("baseline", "depth-1")


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        spec = importlib.util.spec_from_file_location("ablation", BENCH / "ablation.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "ablation", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def tiny(bench, make_target, characters, tmp_path_factory):
    """Features of a random target, two variants of its size, and ``train(name, work)``."""
    model = make_target(fresh=True)
    generator = torch.Generator().manual_seed(1)
    run = tmp_path_factory.mktemp("run")
    for part, count in (("train", 6), ("held-out", 2)):
        rows = [torch.randint(1, 97, (30 + n,), generator=generator).tolist() for n in range(count)]
        responses = [Response(f"{part}{n}", "chat", row, 6, True, part != "train") for n, row in enumerate(rows)]
        write_features(model, responses, run / "features" / part, [1, 2, 3], top_tokens=8)
    base = bench.Choices(taps=(1, 3), rank=4, block=4, vocabulary=40)
    variants = {"baseline": base, "depth-1": replace(base, depth=1, taps=(1, 2, 3), top_tokens=8)}
    settings = bench.Settings(responses=6, steps=2, sequences=2, anchors=4, per_domain=2, max_new_tokens=6)
    prompts = [make_prompt(domain, ({"role": "user", "content": domain},)) for domain in ("chat", "math")]

    def train(name, work, settings=settings):
        return bench.train_variant(model, characters.tokenizer, prompts, name, variants[name], run, work, settings)

    train.model, train.variants, train.settings = model, variants, settings
    return train


def test_every_answer_is_a_variant_and_changes_one_thing(bench):
    answers = {name for question in sys.modules["ablation_variants"].QUESTIONS.values() for name in question.values()}
    assert answers == {name for name in bench.VARIANTS if not name.startswith("baseline-")}
    base = bench.VARIANTS["baseline"]
    for name, choices in bench.VARIANTS.items():
        changed = [key for key, value in vars(choices).items() if value != getattr(base, key)]
        assert len(changed) == (0 if name == "baseline" else 2 if name.startswith("loss-") else 1), name
    assert all("baseline" in question.values() for question in sys.modules["ablation_variants"].QUESTIONS.values())


def test_block_sizes_have_as_many_slots(bench):
    slots = [block * bench.Settings().anchors_of(block) for block in (4, 7, 10)]
    assert max(slots) - min(slots) <= 4


def test_an_interrupted_variant_goes_on_to_the_same_weights(tiny, tmp_path, monkeypatch):
    whole = tiny("baseline", tmp_path / "whole")
    update, seen = trainer.Trainer._update, []

    def stop(self, batches):
        seen.append(self.step)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return update(self, batches)

    monkeypatch.setattr(trainer.Trainer, "_update", stop)
    real = trainer.TrainSettings
    monkeypatch.setattr(sys.modules["ablation"], "TrainSettings", lambda **kw: real(**{**kw, "save_every": 1}))
    with pytest.raises(KeyboardInterrupt):
        tiny("baseline", tmp_path / "cut")
    again = tiny("baseline", tmp_path / "cut")
    assert seen == [0, 1, 1]
    assert again["tau"] == whole["tau"]
    assert again["teacher_forced"] == whole["teacher_forced"]
    assert sorted(path.name for path in (tmp_path / "cut" / "baseline").iterdir()) == ["metrics.jsonl", "result.json"]
    # finished: nothing is trained, and other settings are refused
    assert tiny("baseline", tmp_path / "cut") == again
    assert len(seen) == 3
    with pytest.raises(SystemExit, match="other settings"):
        tiny("baseline", tmp_path / "cut", replace(tiny.settings, steps=3))
    with pytest.raises(SystemExit, match="6 responses, --responses is 7"):
        tiny("depth-1", tmp_path / "cut", replace(tiny.settings, responses=7))


def test_table_and_figure(bench, tiny, tmp_path, monkeypatch):
    for name in NAMES:
        tiny(name, tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    times = bench.time_shapes(tiny.model, ids, tiny.variants, repeats=1, new_tokens=4)
    assert len(times["rounds_ms"]) == 2
    (tmp_path / "ablation_times.json").write_text(json.dumps(times))
    result = bench.join("someone/Tiny", tmp_path, tiny.variants)
    for row in result["rows"]:
        # the random prompts are of two domains, and the mean is over five
        assert row["tau"]["mean"] is None
        row["tau"]["mean"] = 1.5
    assert set(result["rows"][0]["ms"]) == {"draft", "verify", "bookkeeping"}
    (tmp_path / "ablation.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--plot", "--out", str(tmp_path)])
    bench.main()
    assert (tmp_path / "ablation.png").stat().st_size > 1000
    text = sys.modules["ablation_report"].section(result)
    assert "| layers: 1 | 1.50 | +0.00 |" in text
    marked = sys.modules["ablation_report"].with_section("# Benches\n", text)
    assert sys.modules["ablation_report"].with_section(marked, text) == marked


def test_the_committed_figure_shows_its_json(bench, monkeypatch):
    """Acceptance length and predicted speedup of each answer, and the number in a box that no line runs through."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **settings: drawn.append(self))
    result = json.loads((BENCH / "results" / "cpu" / "ablation.json").read_text(encoding="utf-8"))
    sys.modules["ablation_report"].plot(result, Path("ablation.png"))
    rows = {row["name"]: row for row in result["rows"]}
    panels = iter(drawn[0].findobj(lambda artist: hasattr(artist, "get_subplotspec") and hasattr(artist, "lines")))
    for question, answers in sys.modules["ablation_variants"].QUESTIONS.items():
        upper, lower, chosen = next(panels), next(panels), [rows[name] for name in answers.values()]
        means, speedups = [row["tau"]["mean"] for row in chosen], [row["predicted_speedup"] for row in chosen]
        assert upper.get_title() == question and list(upper.lines[-1].get_ydata()) == means
        assert [text.get_text() for text in upper.texts] == [f"{mean:.2f}" for mean in means]
        assert [bar.get_height() for bar in lower.patches] == speedups
        assert [text.get_text() for text in lower.texts] == [f"{speedup:.2f}×" for speedup in speedups]
        assert [label.get_text() for label in lower.get_xticklabels()] == list(answers)
        (level,) = lower.lines
        for text in lower.texts:
            assert text.get_bbox_patch().get_facecolor() == (1, 1, 1, 1) and text.get_zorder() > level.get_zorder()
    assert next(panels, None) is None


def test_the_predicted_speedup_and_the_noise(bench, tiny, tmp_path):
    tiny("baseline", tmp_path)
    path = tmp_path / "baseline" / "result.json"
    made = json.loads(path.read_text())
    for name, tau in (("baseline", 2.0), ("baseline-seed1", 2.2), ("depth-1", 2.1)):
        (tmp_path / name).mkdir(exist_ok=True)
        made |= {"name": name, "tau": {**made["tau"], "mean": tau}}
        (tmp_path / name / "result.json").write_text(json.dumps(made))
    parts = {"draft": {"median": 10.0}, "verify": {"median": 25.0}, "bookkeeping": {"median": 5.0}}
    times = {"plain_ms": {"median": 30.0}, "rounds_ms": {tiny.variants["baseline"].time_key(): parts}}
    (tmp_path / "ablation_times.json").write_text(json.dumps(times))
    result = bench.join("someone/Tiny", tmp_path, bench.VARIANTS)
    assert result["rows"][0]["predicted_speedup"] == 2.0 * 30 / 40
    assert result["noise"]["deviation"] == pytest.approx(0.1414, abs=1e-4)
    rows = {row["name"]: row for row in result["rows"]}
    assert sys.modules["ablation_report"].difference(rows["depth-1"], rows["baseline"], result["noise"]) == "(+0.10)"
    assert sys.modules["ablation_report"].difference(rows["depth-1"], rows["baseline"], {"difference": 0.05}) == "+0.10"
