"""``dspark-fast report``: the page that needs nothing else, going on after an interruption, and bad input."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dspark_fast.cli import report as report_module
from dspark_fast.cli.app import app
from dspark_fast.report import ALL, heads, making, memory, memory_worker, speed
from dspark_fast.report.measurement import Strip
from dspark_fast.report.page import _strip, command, headline, page
from dspark_fast.report.store import Store
from dspark_fast.report.style import canvas, key_above
from dspark_fast.report.subject import Equality, Subject
from dspark_fast.training.plot import _legend_above

NAMES = [kind.name for kind in ALL]
QUICK = ["--max-new-tokens", "16", "--per-domain", "1"]


@pytest.fixture(scope="module")
def pair(make_target, make_draft, characters, tmp_path_factory):
    """Options that name a saved pair, whose target never stops."""
    folder = tmp_path_factory.mktemp("pair")
    model = characters.target(make_target)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "target")
    characters.tokenizer.save_pretrained(folder / "target")
    make_draft(model, num_hidden_layers=1).save_pretrained(folder / "draft")
    (folder / "mine.jsonl").write_text(
        '{"turns": ["1 < 2 & 3?"], "domain": "sums"}\n{"turns": ["<b>Hi</b>", "And?"], "domain": "talk"}\n'
    )
    return SimplePair(folder)


class SimplePair:
    def __init__(self, folder):
        self.folder = folder
        self.models = ["--model", str(folder / "target"), "--draft", str(folder / "draft")]
        self.models += ["--dtype", "fp32", "--device", "cpu", *QUICK]
        self.options = [*self.models, "--prompts", str(folder / "mine.jsonl")]


def hasten(monkeypatch):
    """Little training and few repeats; memory is weighed in this process; the other tests go on hearing remarks."""
    monkeypatch.setattr(report_module, "quiet", lambda: None)
    monkeypatch.setattr(heads, "ANSWERS", 2)
    monkeypatch.setattr(heads, "STEPS", 2)
    monkeypatch.setattr(heads, "EVALUATE_EVERY", 1)
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(memory, "_measured", memory_worker.main)


@pytest.fixture(autouse=True)
def hastened(monkeypatch):
    hasten(monkeypatch)


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refused(result, text, code=2):
    assert result.exit_code == code, result.output
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert text in flat
    assert "Traceback" not in flat


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory):
    """A whole report, made once."""
    patch = pytest.MonkeyPatch()
    out = tmp_path_factory.mktemp("whole") / "report"
    hasten(patch)
    try:
        result = run(*pair.options, "--out", out)
    finally:
        patch.undo()
    assert result.exit_code == 0, result.output
    return out, result


@pytest.fixture
def copied(whole, tmp_path):
    """A report folder of one's own."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_bytes((whole[0] / "report.json").read_bytes())
    return tmp_path / "report"


def stored(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


class Page(HTMLParser):
    """What a page loads, links to and holds."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.sources, self.open = [], set(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids.add(given.get("id"))
        self.links += [given["href"]] if "href" in given else []
        self.sources += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# --- the page ---------------------------------------------------------------------------------------------------------


def test_everything_is_written(whole):
    out, result = whole
    files = ["report.json", *(f"{name}.png" for name in NAMES), "report.html"]
    assert result.stdout.split() == [str(out / name) for name in files]
    assert {path.name for path in out.iterdir()} == set(files)
    report = stored(out)
    assert list(report["measurements"]) == ["memory", *NAMES[:-1]] and report["omitted"] == {}
    assert report["pair"]["dtype"] == "float32" and report["prompts"] == {"sums": 1, "talk": 1}
    for one in report["measurements"].values():
        assert one["machine"]["torch"] == torch.__version__ and one["seconds"] >= 0
        equality = one["found"].get("equality")
        assert equality is None or all(identical == answers for answers, identical in equality["parts"].values())


def test_the_page_needs_nothing_else(whole):
    text = (whole[0] / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert len(page.sources) == len(NAMES) and all(one.startswith("data:image/png;base64,") for one in page.sources)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links) and len(page.links) == len(NAMES)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style and "@media print" in style and 'name="viewport"' in text


def test_the_page_says_what_was_measured(whole):
    out, _ = whole
    text = (out / "report.html").read_text(encoding="utf-8")
    found = {name: stored(out)["measurements"][name]["found"] for name in NAMES}
    said = re.search("<h1>(.*?)</h1>", text)[1]
    speedup, tau = found["speed"]["speedup"]["dspark"]["median"], found["domains"]["ways"]["dspark"]["mean_tau"]
    trusted = not speed.Speed.from_dict(found["speed"]).disturbed  # which a tiny model on a busy machine may well be
    assert (f"decodes {speedup:.2f} " in said) == trusted
    assert f"commits {tau:.2f} tokens a round, with the same tokens" in said
    for row in found["sweep"]["rows"]:
        assert f"<td>{row['tau']:.2f}</td><td>{row['positions_per_token']:.2f}</td>" in text
    assert "<b>Hi" not in text and "1 &lt; 2 &amp; 3?" in text  # what people and models say is no markup
    assert stored(out)["measurements"]["speed"]["machine"]["device"] in text


def test_what_a_model_drafts_is_no_markup():
    text = _strip(Strip("on", "<i>", ("<b>", "\n", "&"), 1, None))
    assert "<span class='tok anchor'>&lt;i&gt;</span><span class='tok ok'>&lt;b&gt;</span>" in text
    assert (
        "<span class='tok no'>\\n</span><span class='tok no'>&amp;</span></div>" in text and "1 of 3 accepted" in text
    )


def test_the_command_that_makes_it_again():
    settings = making.ReportSettings("a/b c", per_domain=2)
    assert command(settings.to_dict()) == (
        "dspark-fast report --model 'a/b c' --dtype auto --per-domain 2 --max-new-tokens 64 --seed 0"
    )


@pytest.mark.parametrize("given", ["mine.jsonl", "some where/mine.jsonl", "../mine.jsonl", "/else/where/mine.jsonl"])
def test_it_has_paths_as_they_were_given(given):
    words = shlex.split(command(making.ReportSettings("m", draft="./d", prompts=given).to_dict()))
    assert words[words.index("--prompts") + 1] == given and words[words.index("--draft") + 1] == "./d"


def test_it_names_no_folder_of_this_machine_for_what_ships():
    inside = Path(making.__file__).parents[1]
    settings = making.ReportSettings(
        "m", draft=str(inside / "drafts" / "SmolLM2-135M-Instruct"), prompts=str(inside / "prompts" / "maths.jsonl")
    )
    said = command(settings.to_dict())
    assert "--draft dspark_fast/drafts/SmolLM2-135M-Instruct " in said
    assert "--prompts dspark_fast/prompts/maths.jsonl " in said and str(inside) not in said


def test_the_page_has_that_command(pair, whole):
    """With the whole path of the prompts, which the file of the report calls by their name and content alone."""
    text = (whole[0] / "report.html").read_text(encoding="utf-8")
    words = shlex.split(unescape(re.search("<pre>(.*?)</pre>", text)[1]))
    options = list(map(str, pair.options))
    assert words[:2] == ["dspark-fast", "report"]
    for name in ("--model", "--draft", "--prompts", "--max-new-tokens"):
        assert words[words.index(name) + 1] == options[options.index(name) + 1]
    assert stored(whole[0])["settings"]["prompts"].startswith("mine.jsonl ")


@pytest.mark.parametrize("most", [14.0, 16.0])
def test_a_speed_that_is_not_trusted_is_no_headline(whole, most):
    """Plain decoding from 10 to 14 tokens per second is as it may be, to 16 it is not; the section says both."""
    runs = [
        speed.Run("a", repeat, way, 0.1, 10 / tokens, 11)
        for repeat, plainly in enumerate((10.0, most))
        for way, tokens in (("plain", plainly), ("dspark", 3 * plainly))
    ]
    domains = making.Domains.from_dict(stored(whole[0])["measurements"]["domains"]["found"])
    found = {"speed": speed.Speed("none", tuple(runs), Equality()), "domains": domains}
    trusted = most < 15
    assert ("3.00 times as fast" in headline(stored(whole[0]), found)) == trusted
    assert f"commits {domains.ways['dspark'].mean_tau:.2f} tokens a round" in headline(stored(whole[0]), found)
    text = page(stored(whole[0]), found, {name: b"" for name in found}, {})
    head, _, sections = text.partition("<nav>")
    assert ("3.00x" in head) == ("3.00 times" in head) == trusted
    assert ("do not trust these speeds" in sections) == (not trusted)


def test_the_tile_of_memory_has_the_weights_packed_for_a_cpu(whole):
    """They are most of what the process grows by. On a GPU there are none."""

    def tile(device, packed):
        plain = memory.Peak("plain", 200_000_000, 0, 1, 0, 0, 815_000_000, 9)
        ours = memory.Peak("dspark", 200_000_000, 38_000_000, 1, 2_000_000, 0, 1_136_000_000, 9, packed)
        found = {"memory": memory.Memory(device, "none", (plain, ours))}
        return re.findall("<b>(.*?)</b><span>(.*?)</span>", page(stored(whole[0]), found, {"memory": b""}, {}))

    assert tile("cpu", 293_000_000) == [
        ("+321 MB", "at the peak of memory; kept: 293 MB packed weights, 40 MB drafter and cache")
    ]
    assert tile("cuda:0", 0) == [("+321 MB", "at the peak of memory; kept: 40 MB drafter and cache")]


# --- going on ---------------------------------------------------------------------------------------------------------


def test_what_is_there_is_drawn_again_and_not_measured(pair, copied, monkeypatch):
    monkeypatch.setattr(making, "load_subject", None)  # no model is loaded
    before = (copied / "report.json").read_bytes()
    result = run(*pair.options, "--out", copied, "--only", "sweep")
    assert result.exit_code == 0, result.output
    assert "sweep: measured before with the same settings; drawn again" in result.stderr
    assert {path.name for path in copied.iterdir()} == {"report.json", "sweep.png"}
    assert (copied / "report.json").read_bytes() == before


def test_an_interrupted_report_goes_on(pair, tmp_path, monkeypatch):
    out = tmp_path / "report"

    def interrupted(subject, progress):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(making.Confidence, "measure", interrupted)
        assert run(*pair.options, "--out", out, "--only", "positions", "--only", "confidence").exit_code != 0
    assert list(stored(out)["measurements"]) == ["positions"] and (out / "positions.png").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(making.Positions, "measure", interrupted)  # would tell
        result = run(*pair.options, "--out", out, "--only", "positions", "--only", "confidence")
    assert result.exit_code == 0, result.output
    assert "positions: kept from an earlier run of the same settings\n" in result.stderr
    assert re.search(r"confidence: measured in \d+ s", result.stderr)
    assert sorted(stored(out)["measurements"]) == ["confidence", "positions"]


def test_again_measures_anew(pair, copied):
    report = stored(copied)
    report["measurements"]["positions"]["found"]["question"] = "something else"
    (copied / "report.json").write_text(json.dumps(report))
    result = run(*pair.options, "--out", copied, "--only", "positions", "--again")
    assert result.exit_code == 0, result.output
    assert stored(copied)["measurements"]["positions"]["found"]["question"] == "1 < 2 & 3?"
    assert list(stored(copied)["measurements"]) == list(report["measurements"])


def test_other_settings_are_refused(pair, copied, tmp_path):
    before = (copied / "report.json").read_bytes()
    refused(
        run(*pair.options, "--out", copied, "--max-new-tokens", "17"),
        "other settings (max_new_tokens was 16 and is 17)",
    )
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Another"}\n')  # the same name, and other prompts
    result = run(*pair.models, "--out", copied, "--prompts", tmp_path / "mine.jsonl")
    refused(result, "other settings (prompts was 'mine.jsonl ")
    refused(
        run(*pair.options, "--out", copied, "--max-new-tokens", "17", "--again", "--only", "positions"),
        "other settings (max_new_tokens was 16 and is 17)",
    )
    assert (copied / "report.json").read_bytes() == before


def test_all_of_it_again_may_have_other_settings(copied):
    """A drafter that was trained further is another one: nothing of its report is to be kept."""
    settings = {**stored(copied)["settings"], "drafter": "another"}
    with pytest.raises(ValueError, match="other settings"):
        Store(copied, settings)
    store = Store(copied, settings, anew=True)
    assert store.names == [] and store.data["settings"] == settings
    kept = Store(copied, stored(copied)["settings"], anew=True)
    assert kept.names == list(stored(copied)["measurements"])


def test_another_machine_is_refused(pair, copied, monkeypatch):
    true = making.describe
    monkeypatch.setattr(making, "describe", lambda device: {**true(device), "device": "an abacus"})
    report = stored(copied)
    del report["measurements"]["sweep"]
    (copied / "report.json").write_text(json.dumps(report))
    result = run(*pair.options, "--out", copied)
    refused(result, "was measured elsewhere (device")
    assert "an abacus here" in " ".join(result.stderr.split())
    assert run(*pair.options, "--out", copied, "--only", "domains").exit_code == 0  # drawing is no measuring


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 0}'])
def test_a_file_that_is_no_report(pair, tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    refused(run(*pair.options, "--out", tmp_path), "report.json is no report of this version")
    assert (tmp_path / "report.json").read_text() == text


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_tokens_that_differ_end_it(pair, tmp_path, monkeypatch):
    true = Subject.plainly
    monkeypatch.setattr(Subject, "plainly", lambda self, index: true(self, index)[::-1])
    refused(
        run(*pair.options, "--out", tmp_path / "report", "--only", "domains"),
        "Error: not the tokens of plain decoding, so nothing is reported",
        code=1,
    )
    assert not (tmp_path / "report").exists()


def test_a_drafter_without_a_confidence_head(pair, make_target, make_draft, characters, tmp_path, monkeypatch):
    model = characters.target(make_target)
    make_draft(model, num_hidden_layers=1, enable_confidence_head=False).save_pretrained(tmp_path / "draft")
    options = [*pair.options, "--draft", tmp_path / "draft", "--out", tmp_path / "report"]
    refused(run(*options, "--only", "sweep"), "Error: the drafter has no confidence head to cut blocks by")
    kept = (making.Domains, making.Sweep)
    monkeypatch.setattr(making, "ALL", kept)
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "sweep: left out, the drafter has no confidence head" in result.stderr
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Left out: the drafter has no confidence head to cut blocks by." in text
    assert stored(tmp_path / "report")["omitted"].keys() == {"sweep"}


def test_a_smaller_model_by_name(pair, make_target, tmp_path):
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    make_target(fresh=True, vocab_size=104, **changes).save_pretrained(tmp_path / "small")
    shutil.copytree(pair.folder / "target", tmp_path / "other")
    for file in (tmp_path / "small").iterdir():
        shutil.copy(file, tmp_path / "other")  # with the target's tokenizer
    options = [*pair.options, "--autoregressive", tmp_path / "other", "--only", "domains"]
    result = run(*options, "--out", tmp_path / "report")
    assert result.exit_code == 0, result.output
    assert stored(tmp_path / "report")["pair"]["small"] == str(tmp_path / "other")
    assert (
        str(tmp_path / "other")
        in making.Domains.from_dict(stored(tmp_path / "report")["measurements"]["domains"]["found"]).sentences()[1]
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--only", "nonsense"], "'nonsense': accepted are speed, domains, positions"),
        (["--prompts", "/no/such/file"], "no such file: /no/such/file"),
        (["--per-domain", "0"], "Invalid value for '--per-domain'"),
        (["--max-new-tokens", "1"], "Invalid value for '--max-new-tokens'"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--device", "tpuu"], "Error: device is 'tpuu'"),
        (["--draft", "/no/such/folder"], "Error: the drafter is '/no/such/folder', and there is no such folder"),
        (["--layers", "99"], "Error: layers is 99: accepted is 1 to 4"),
        (["--layers", "2", "--autoregressive", "x"], "it cannot go with --autoregressive"),
        (["--max-new-tokens", "5000"], "more than the context of the target, 4096"),
    ],
)
def test_bad_input(pair, tmp_path, options, text):
    refused(run(*pair.options, "--out", tmp_path / "report", "--only", "domains", *options), text)
    assert not (tmp_path / "report").exists()


def test_more_bad_input(pair, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused(run(*pair.options, "--out", tmp_path / "file"), "is a file: accepted is a folder")
    refused(run(*pair.models, "--out", tmp_path / "report", "--prompts", tmp_path / "file"), "no prompt stands in it")
    for settings in ({"layers": 0}, {"dtype": "int8"}, {"seed": -1}, {"layers": 1, "autoregressive": "x"}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}"):
            making.ReportSettings("m", **settings)
    with pytest.raises(ValueError, match="only is 'x': accepted are speed"):
        making.run(making.ReportSettings("m"), tmp_path / "report", ["x"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(run(*pair.options, "--out", tmp_path / "report"), 'pip install "dspark-fast[plots]"')


def test_the_names_are_those_of_the_measurements():
    assert list(report_module.NAMES) == NAMES


# --- how figures look -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["on top inside", "above"])
def test_no_legend_covers_a_curve(place):
    """That of the report's panels, and that of a training run's picture, of four curves that fill the panel."""
    figure, (axis,) = canvas(width=5, height=4.2)
    for name in ("one curve", "another curve", "a third", "the last one"):
        axis.plot([0, 1, 2], [1.0, 0.0, 1.0], "o-", label=name)
    axis.set_title("of four")
    key_above(axis, 1.0, ncols=2) if place == "on top inside" else _legend_above(axis)
    figure.draw_without_rendering()
    highest, legend = axis.transData.transform((0, 1.0))[1], axis.get_legend().get_window_extent()
    assert legend.y0 > highest
    assert legend.y1 < axis.title.get_window_extent().y0
    assert max(axis.get_yticks()) <= 1.001 or place == "above"
