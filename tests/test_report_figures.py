"""What the report's figures show, read back from matplotlib; and that the report in this repository is of its JSON."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dspark_fast.pairs import draft_name
from dspark_fast.report import ALL, making
from dspark_fast.report.memory import Memory, Peak
from dspark_fast.report.speed import Speed
from dspark_fast.report.style import BAD, COLOURS, DSPARK, GOOD, NAMES, OFF

COMMITTED = Path(__file__).parents[1] / "bench" / "results" / "cpu" / "report"
KINDS = {kind.name: kind for kind in ALL}
CAPTION = "median of 9 pairs of runs; whiskers: least and most; autoregressive drafter: "

pytestmark = pytest.mark.skipif(not COMMITTED.is_dir(), reason="the committed report is of a checkout")


@pytest.fixture(scope="module")
def report():
    pytest.importorskip("matplotlib")
    return json.loads((COMMITTED / "report.json").read_text(encoding="utf-8"))


@pytest.fixture
def drawn(report):
    """``drawn(name)``: the data of a measurement as stored, the measurement, its figure and the figure's panels."""

    def draw(name):
        data = report["measurements"][name]["found"]
        one = KINDS[name].from_dict(data)
        assert json.loads(json.dumps(one.to_dict())) == data
        figure = one.draw()
        return data, figure, figure.axes

    return draw


def bars(container):
    """Heights; all stand on zero."""
    assert all(bar.get_y() == 0 for bar in container)
    return [bar.get_height() for bar in container]


def whiskers(container):
    """From and to, by place; nothing for a container that has none."""
    (lines,) = container.lines[2]
    return [tuple(end[1] for end in segment) for segment in lines.get_segments()]


def lines(axis):
    """Values of the curves by what the legend calls them."""
    named = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    return {name: values for name, values in named.items() if not name.startswith("_")}


def ticks(axis):
    return [label.get_text() for label in axis.get_xticklabels()]


def written(axis):
    """What is written into a panel, with the point that it belongs to."""
    return [(text.get_text(), text.xy) for text in axis.texts]


def keys(owner):
    return [text.get_text() for text in owner.get_texts()]


def colour(artist):
    from matplotlib.colors import to_hex

    face = artist.get_facecolor() if hasattr(artist, "get_facecolor") else artist.get_color()
    return to_hex(face)


# --- one test for each figure -----------------------------------------------------------------------------------------


def test_figure_of_speed(drawn):
    data, figure, (left, right) = drawn("speed")
    ways = ["plain", "undrafted", "autoregressive", "dspark"]
    panels = ((left, data["speedup"], 1), (right, data["prefill_seconds"], 1000))
    for axis, spreads, scale in panels:
        shown, ends = axis.containers
        assert bars(shown) == pytest.approx([scale * spreads[way]["median"] for way in ways])
        least_most = [scale * spreads[way][end] for way in ways for end in ("least", "most")]
        assert [one for pair in whiskers(ends) for one in pair] == pytest.approx(least_most)
        assert [colour(bar) for bar in shown] == [COLOURS[way] for way in ways]
        assert ticks(axis) == [NAMES[way].replace(" ", "\n", 1) for way in ways]
        tops = [scale * spreads[way]["most"] for way in ways]
        assert [place for _, (_, place) in written(axis)] == pytest.approx(tops)
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > max(tops)
    speedups, speeds = data["speedup"], data["tokens_per_second"]
    assert [text for text, _ in written(left)] == [
        f"{speedups[way]['median']:.2f}x\n{speeds[way]['median']:.1f} tokens/s" for way in ways
    ]
    assert [text for text, _ in written(right)] == [
        f"{1000 * data['prefill_seconds'][w]['median']:.0f} ms" for w in ways
    ]
    assert figure.get_supxlabel() == f"{CAPTION}{data['small']}, untrained"
    assert (left.get_ylabel(), right.get_ylabel()) == ("speed over plain decoding", "milliseconds")


def test_figure_of_domains(drawn):
    data, figure, (axis,) = drawn("domains")
    domains = ["maths", "code", "chat"]
    shown = {one.get_label(): one for one in axis.containers if not one.get_label().startswith("_")}
    assert list(shown) == ["autoregressive drafter, 5 drafts a round", "DSpark, 5 drafts a round"]
    texts, spans = [], [whiskers(one) for one in axis.containers if one.get_label().startswith("_")]
    for (way, one), container in zip(data["ways"].items(), shown.values(), strict=True):
        taus = [one["domains"][domain]["tau"] for domain in domains] + [one["mean_tau"]]
        assert bars(container) == pytest.approx(taus)
        assert {colour(bar) for bar in container} == {COLOURS[way]}
        middles = [bar.get_x() + bar.get_width() / 2 for bar in container]
        assert [round(middle) for middle in middles] == [0, 1, 2, 3]  # over the name of its domain
        intervals = [one["domains"][domain]["tau_interval_95"] for domain in domains]
        assert [list(spans.pop(0)[0]) for _ in domains] == [pytest.approx(interval) for interval in intervals]
        tops = [high for _, high in intervals] + [one["mean_tau"]]
        texts += [(f"{tau:.2f}", pytest.approx((x, top))) for x, tau, top in zip(middles, taus, tops)]
    assert spans == [] and written(axis) == texts
    assert ticks(axis) == ["maths\n4 prompts", "code\n4 prompts", "chat\n4 prompts", "mean"]
    assert keys(figure.legends[0]) == [*shown, "plain decoding: 1"]
    assert lines(axis)["plain decoding: 1"] == [1, 1]


def test_figure_of_positions(drawn):
    data, figure, (axis,) = drawn("positions")
    shown = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    hollow = {(*line.get_xdata(), *line.get_ydata()) for line in axis.lines if line.get_label().startswith("_")}
    expected, thin = [], set()
    for key, color in (("on", DSPARK), ("off", OFF)):
        counts = data[key]
        line = shown.pop(f"Markov head {key}, tau {counts['tau']:.2f}")
        reached = [counts["proposed"][0], *counts["accepted"][:-1]]
        points = list(zip(range(1, len(reached) + 1), counts["conditional"], reached))
        assert list(line.get_xdata()) == [slot for slot, _, _ in points] and colour(line) == color
        through = [share if n >= 30 else math.nan for _, share, n in points]
        assert list(line.get_ydata()) == pytest.approx(through, nan_ok=True)
        expected += [(f"{share:.2f}\nn {n:,}", (slot, share)) for slot, share, n in points if share is not None]
        thin |= {(slot, share) for slot, share, n in points if share is not None and n < 30}
    assert shown == {} and written(axis) == expected
    assert hollow == thin
    assert axis.get_ylim() == (0, 1.1) and axis.get_ylabel() == "accepted, given that all before were"
    assert len(figure.legends[0].get_texts()) == 2


def test_figure_of_confidence(drawn):
    data, _, (left, right) = drawn("confidence")
    along, example = data["along"], data["example"]
    assert lines(left) == {
        "confidence $c_k$": along["said"],
        "accepted, given those before": along["accepted"],
        "running product of $c$": along["product"],
        "accepted with all before": along["survived"],
    }
    slots = list(range(1, len(along["said"]) + 1))
    assert all(list(line.get_xdata()) == slots for line in left.lines[:4])
    assert left.get_title() == f"means over {data['rounds']} blocks" and keys(left.get_legend()) == list(lines(left))
    (container,) = right.containers
    c, hits = data["example_confidence"], example["accepted"]
    assert bars(container) == c
    assert [colour(bar) for bar in container] == [GOOD] * hits + [BAD] * (len(c) - hits)
    assert lines(right) == {"running product": pytest.approx([math.prod(c[: k + 1]) for k in range(len(c))])}
    assert ticks(right) == [f'"{text}"' for text in example["drafts"]]
    assert right.get_title() == f'one block, after "{example["anchor"]}"'
    assert keys(right.get_legend()) == ["$c_k$, accepted", "$c_k$, rejected", "running product"]


def test_figure_of_sweep(drawn):
    data, _, (left, right) = drawn("sweep")
    proposed, taus, costs = ([row[key] for row in data["rows"]] for key in ("proposals", "tau", "positions_per_token"))
    assert lines(left) == {"drafts verified": proposed, "tokens committed (tau)": taus}
    assert keys(left.get_legend()) == ["drafts verified", "tokens committed (tau)"]
    curve, plain = right.lines
    assert list(curve.get_ydata()) == pytest.approx(costs) and list(plain.get_ydata()) == [1, 1]
    assert written(left) == [
        (f"{value:.2f}", (k, value)) for values in (proposed, taus) for k, value in enumerate(values)
    ]
    numbers = [(f"{value:.2f}", pytest.approx((place, value))) for place, value in enumerate(costs)]
    assert written(right) == [("plain decoding", (3, 1)), *numbers]
    for axis in (left, right):
        assert ticks(axis) == [f"{row['threshold']:g}" for row in data["rows"]]
    assert right.get_ylabel() == "target positions per committed token"


def test_figure_of_training(drawn):
    data, _, (losses, accept, taus) = drawn("training")
    names = {
        "loss": "total",
        "cross_entropy": "cross-entropy, nats",
        "total_variation": "L1 distance, 0 to 2",
        "confidence": "confidence BCE, nats",
    }
    thin = [line for line in losses.lines if line.get_label().startswith("_")]
    bold = [line for line in losses.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in bold] == [names[name] for name in data["curves"]]
    for values, raw, smooth in zip(data["curves"].values(), thin, bold, strict=True):
        assert list(raw.get_ydata()) == values and list(raw.get_xdata()) == list(range(1, data["steps"] + 1))
        weights = [0.9 ** (len(values) - 1 - k) for k in range(len(values))]
        mean = sum(weight * value for weight, value in zip(weights, values)) / sum(weights)
        assert smooth.get_ydata()[0] == pytest.approx(values[0]) and smooth.get_ydata()[-1] == pytest.approx(mean)
        assert colour(raw) == colour(smooth)
    looks = data["held_out"]
    slots = range(len(looks[0]["accept"]))
    assert lines(accept) == {f"position {slot + 1}": [one["accept"][slot] for one in looks] for slot in slots}
    assert all(list(line.get_xdata()) == [one["step"] for one in looks] for line in accept.lines)
    (container,) = taus.containers
    values = [data["taus"][name] for name in ("off", "before", "after", "given")]
    assert bars(container) == values and [text for text, _ in written(taus)] == [f"{value:.2f}" for value in values]
    assert ticks(taus) == ["head\noff", "fresh\nhead", "trained\nhead", "head as\nloaded"]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_figure_of_memory(device):
    """By hand, so that every part is there and none is like another."""
    small = Peak("plain", 200_000_000, 0, 3_000_000, 0, 400_000_000, 700_000_000, 9)
    large = Peak("dspark", 200_000_000, 40_000_000, 5_000_000, 7_000_000, 410_000_000, 990_000_000, 9, 290_000_000)
    figure = Memory(device, "none", (small, large)).draw()
    (axis,) = figure.axes
    parts = {
        "target's weights": [200, 200],
        "drafter's own weights": [0, 40],
        "weights packed for the CPU": [0, 290],
        "target's keys and values": [3, 5],
        "drafter's keys and values": [0, 7],
    }
    parts |= {"interpreter and libraries": [400, 410]} if device == "cpu" else {}
    *stacked, peaks = axis.containers
    assert {one.get_label(): [bar.get_height() for bar in one] for one in stacked} == parts
    below = [0.0, 0.0]
    for one in stacked:  # each on top of those before it
        assert [bar.get_y() for bar in one] == pytest.approx(below)
        below = [bar.get_y() + bar.get_height() for bar in one]
    assert bars(peaks) == [700, 990] and written(axis) == [("700 MB", (0, 700)), ("990 MB", (1, 990))]
    what = "largest resident set of the process" if device == "cpu" else "most that torch had allocated"
    assert keys(figure.legends[0]) == [*parts, what] and ticks(axis) == ["plain (transformers)", "DSpark"]


def test_the_stored_memory_is_what_is_drawn(drawn):
    data, _, (axis,) = drawn("memory")
    assert bars(axis.containers[-1]) == [peak["peak"] / 1e6 for peak in data["peaks"]]


def test_every_measurement_has_such_a_test(report):
    assert {name for name in globals() if name.startswith("test_figure_of_")} == {
        f"test_figure_of_{name}" for name in KINDS
    }
    assert set(report["measurements"]) == set(KINDS)


# --- what a figure's neighbour says -----------------------------------------------------------------------------------


def test_a_cut_of_the_target_is_called_untrained_and_another_model_is_not(report):
    """One measured drafter is no verdict on all that draft token by token."""
    found = Speed.from_dict(report["measurements"]["speed"]["found"])
    for one, which in ((found, "untrained drafter"), (replace(found, small="a/small-model"), "drafter")):
        (said,) = (text for text in one.sentences() if "autoregressive" in text)
        assert said.endswith(f": this {which} costs more than it gains; no other was measured.")
        caption = one.tables()[0].caption
        assert one.small in caption and one.draw().get_supxlabel().startswith(CAPTION + one.small)
        assert ("untrained" in caption) == (one is found) == ("untrained" in one.draw().get_supxlabel())
    alone = replace(found, runs=tuple(run for run in found.runs if run.way != "autoregressive"))
    assert "autoregressive" not in " ".join([*alone.sentences(), alone.tables()[0].caption])


def test_no_grid_line_runs_through_a_number(report):
    for name in ("positions", "sweep"):
        for axis in KINDS[name].from_dict(report["measurements"][name]["found"]).draw().axes:
            numbers = [text for text in axis.texts if text.get_text() != "plain decoding"]
            assert numbers and all(text.get_bbox_patch() is not None for text in numbers)


# --- the report in this repository ------------------------------------------------------------------------------------


def test_the_report_is_of_the_drafter_that_ships(report):
    shipped = draft_name(report["pair"]["model"])
    assert report["settings"]["drafter"] == report["pair"]["draft"] == shipped


@pytest.fixture(scope="module")
def redrawn(report, tmp_path_factory):
    """The page and figures drawn from ``report.json`` alone, with the command's own settings."""
    out = tmp_path_factory.mktemp("redrawn")
    shutil.copy(COMMITTED / "report.json", out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "_measure", None)  # would tell
        making.run(making.ReportSettings(report["settings"]["model"]), out)
    assert (out / "report.json").read_bytes() == (COMMITTED / "report.json").read_bytes()
    return out


IMAGE = re.compile('(?<=src="data:image/png;base64,)[^"]*')


def test_the_page_follows_from_its_json(redrawn):
    committed, again = ((folder / "report.html").read_text(encoding="utf-8") for folder in (COMMITTED, redrawn))
    assert IMAGE.sub("", committed) == IMAGE.sub("", again)


def test_the_page_has_the_figures_beside_it():
    text = (COMMITTED / "report.html").read_text(encoding="utf-8")
    inside = [base64.b64decode(one) for one in IMAGE.findall(text)]
    assert inside == [(COMMITTED / f"{name}.png").read_bytes() for name in KINDS]
    assert {path.name for path in COMMITTED.iterdir()} == {"report.json", "report.html", *(f"{n}.png" for n in KINDS)}


@pytest.mark.parametrize("name", KINDS)
def test_the_figures_follow_from_its_json(redrawn, name):
    """Pixel by pixel, where the same matplotlib draws: another one may set a letter elsewhere."""
    from matplotlib.image import imread
    from PIL import Image

    committed, again = COMMITTED / f"{name}.png", redrawn / f"{name}.png"
    if len({Image.open(path).info["Software"] for path in (committed, again)}) > 1:
        pytest.skip("drawn by another matplotlib")
    one, other = imread(committed), imread(again)
    assert one.shape == other.shape
    assert (abs(one - other).max(axis=2) > 0.05).mean() < 1e-5
