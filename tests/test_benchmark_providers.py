"""Each provider decodes with what its label says, and predictions have their costs from calls made for that."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspark_fast import benchmark, first_layers, generation
from dspark_fast.autoregressive import AutoregressiveDrafter
from dspark_fast.backend import VARIABLE
from dspark_fast.benchmark import ours, runner
from dspark_fast.benchmark.calls import Call, Rounds
from dspark_fast.benchmark.notebook import Decoded
from dspark_fast.benchmark.ways import WAYS
from dspark_fast.benchmark.workload import Case
from dspark_fast.evaluation import Prompt
from dspark_fast.stats import Stats

NEW = 7
ASSISTANT_DRAFTS, LOOKUP_DRAFTS, BLOCK = 4, 9, 6  # none is a default, or another's
SETTINGS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ONE, TWO = Case("chat", ((5, 6, 7),)), Case("mixed", ((5, 6, 7), (8,)))

# By name: the label; who is called; what drafts; options beyond SETTINGS.
ASKED = {
    "generate": ("transformers, generate", "transformers", None, {}),
    "static": (
        "transformers, static+compile",
        "transformers",
        None,
        {"cache_implementation": "static", "compile_config": {"dynamic": False, "on every device": True}},
    ),
    "assisted": ("transformers, assisted", "transformers", "assistant", {}),
    "lookup": ("transformers, prompt lookup", "transformers", None, {"prompt_lookup_num_tokens": LOOKUP_DRAFTS}),
    "notebook": ("notebook's loop", "notebook", "draft", {"cached": True}),
    "no-cache": ("notebook's loop, no cache", "notebook", "draft", {"cached": False}),
    "ours": ("dspark-fast", "dspark-fast", "draft", {}),
    "always": ("dspark-fast, always drafting", "dspark-fast", "draft", {"off_switch": False}),
    "compiled": ("dspark-fast, compiled target", "dspark-fast", "draft", {"compile_target": True}),
    "no-drafter": ("dspark-fast, no drafter", "dspark-fast", None, {}),
    "unpacked": ("dspark-fast, weights unpacked", "dspark-fast", "draft", {"pack_weights": False}),
    "no-graph": ("dspark-fast, without graphs", "dspark-fast", "draft", {"use_graph": False}),
    "reference": ("dspark-fast, reference ops", "dspark-fast", "draft", {"use_graph": False}),
    "autoregressive": ("dspark-fast, small LM drafts", "dspark-fast", "small LM", {"off_switch": False}),
}
OF_OURS = [name for name, (_, door, *_) in ASKED.items() if door == "dspark-fast"]


@pytest.fixture(scope="module")
def pair(make_target, make_draft):
    model = make_target(fresh=True)
    draft = make_draft(model, block_size=BLOCK)
    return benchmark.Pair(model, draft, "a draft", first_layers(model, 2), "2 layers", ASSISTANT_DRAFTS, LOOKUP_DRAFTS)


def _answer(input_ids, streamer):
    """The prompt and ``NEW`` tokens, handed over one by one where somebody listens."""
    new = torch.arange(NEW).expand(len(input_ids), NEW)
    for tokens in (input_ids, *new.unbind(1)) if streamer is not None else ():
        streamer.put(tokens)
    return torch.cat([input_ids, new], 1)


@pytest.fixture
def asked(pair, monkeypatch):
    """Calls that arrive at ``model.generate``, at ours and at the notebook's loop, none of which decodes anything.

    ``asked.fails``: an error that all of them raise.
    """
    found = SimpleNamespace(calls=[], fails=None)
    assistant = pair.assistant.generation_config

    def arrived(door, model, drafter, options, **inputs):
        assert model is pair.model
        ahead = assistant.num_assistant_tokens, assistant.num_assistant_tokens_schedule
        seen = {"backend": os.environ.get(VARIABLE), "ahead": ahead, **inputs}
        found.calls.append(SimpleNamespace(door=door, drafter=drafter, options=options, **seen))
        if found.fails is not None:
            raise found.fails

    def of_transformers(input_ids, *, streamer=None, assistant_model=None, **options):
        if "compile_config" in options:
            config = options["compile_config"]
            options["compile_config"] = {"dynamic": config.dynamic, "on every device": config._compile_all_devices}
        arrived("transformers", pair.model, assistant_model, options, input_ids=input_ids, streamer=streamer)
        return _answer(input_ids, streamer)

    signature = inspect.signature(generation.generate)

    def of_ours(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs")  # whatever it does not know itself
        model, drafter, ids, streamer = (given.pop(name, None) for name in ("model", "draft", "input_ids", "streamer"))
        arrived("dspark-fast", model, drafter, given, input_ids=ids, streamer=streamer)
        output = _answer(ids, streamer)
        output.stats = Stats(len(ids), "greedy", [0] * len(ids), BLOCK)
        output.stats.seconds.prefill, output.stats.seconds.compilation = 1e-9, 2e-9
        return output

    def of_the_notebook(model, draft, ids, new_tokens, **options):
        arrived("notebook", model, draft, {**options, "max_new_tokens": new_tokens}, input_ids=ids, streamer=None)
        return Decoded(_answer(ids, None)[:, ids.shape[1] :], 3, 0.5, 0.25, 0.125, 0.0625, [2, 0, BLOCK])

    monkeypatch.setattr(pair.model, "generate", of_transformers)
    monkeypatch.setattr(generation, "generate", of_ours)
    monkeypatch.setattr(ours, "by_reference", of_the_notebook)
    return found


def test_every_provider_is_asked_below():
    assert list(ASKED) == list(WAYS)
    assert [way.label for way in WAYS.values()] == [label for label, *_ in ASKED.values()]
    assert [name for name, way in WAYS.items() if way.ours] == OF_OURS
    assert [name for name, way in WAYS.items() if way.compiles] == ["static", "compiled"]
    assert [name for name, way in WAYS.items() if way.extra] == ["no-cache"]


@pytest.mark.parametrize("name", WAYS)
def test_a_provider_is_what_its_label_says(name, pair, asked):
    """One call to whom it names, with its drafter and its options, and no others."""
    _, door, drafter, options = ASKED[name]
    call = WAYS[name].call(pair, ONE, NEW)
    (seen,) = asked.calls
    assert seen.door == door
    if drafter == "small LM":
        assert type(seen.drafter) is AutoregressiveDrafter
        assert (seen.drafter.draft, seen.drafter.block_size) == (pair.assistant, ASSISTANT_DRAFTS)
    else:
        assert seen.drafter is (None if drafter is None else getattr(pair, drafter))
    if door == "notebook":
        assert seen.options == {"max_new_tokens": NEW, **options}
    else:
        assert seen.options.pop("attention_mask").tolist() == [[1, 1, 1]]
        assert seen.options == {**SETTINGS, **options}
    assert seen.input_ids.tolist() == [[5, 6, 7]]
    assert call.tokens.tolist() == [list(range(NEW))] and call.counted == NEW - 1
    assert (call.rounds is None) == (name in ("generate", "static"))  # which do not speculate


@pytest.mark.parametrize("name", ["generate", "static", *OF_OURS])
def test_several_rows_are_padded_and_masked(name, pair, asked):
    """Ours get no streamer then, for rows go on at their own pace; their own clock says when the first token came."""
    call = WAYS[name].call(pair, TWO, NEW)
    (seen,) = asked.calls
    assert seen.input_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert seen.options["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (seen.streamer is None) == WAYS[name].ours
    assert call.tokens.shape == (2, NEW) and call.counted == NEW - 1
    if WAYS[name].ours:
        assert call.first == 1e-9 and call.compiling == 2e-9
        assert call.after == pytest.approx(call.seconds - 3e-9, abs=1e-12)


@pytest.mark.parametrize("fails", [None, RuntimeError("as told")])
@pytest.mark.parametrize("before", [None, "kernel"])
@pytest.mark.parametrize("name", WAYS)
def test_the_reference_ops_run_for_that_provider_alone(name, before, fails, pair, asked, monkeypatch):
    """The variable says so inside its call, and whatever it said before that afterwards, through errors too."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    _call(name, pair, asked, fails)
    assert [seen.backend for seen in asked.calls] == ["reference" if name == "reference" else before]
    assert os.environ.get(VARIABLE) == before


@pytest.mark.parametrize("fails", [None, RuntimeError("as told")])
@pytest.mark.parametrize("name", WAYS)
def test_the_assistant_drafts_as_many_in_every_call_and_is_left_as_it_was(name, fails, pair, asked, monkeypatch):
    config = pair.assistant.generation_config
    monkeypatch.setattr(config, "num_assistant_tokens", 20)
    monkeypatch.setattr(config, "num_assistant_tokens_schedule", "heuristic")
    _call(name, pair, asked, fails)
    _call(name, pair, asked, fails)
    inside = (ASSISTANT_DRAFTS, "constant") if name == "assisted" else (20, "heuristic")
    assert [seen.ahead for seen in asked.calls] == [inside, inside]
    assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (20, "heuristic")


def _call(name, pair, asked, fails):
    asked.fails = fails
    if fails is None:
        WAYS[name].call(pair, ONE, NEW)
    else:
        with pytest.raises(RuntimeError, match="as told"):
            WAYS[name].call(pair, ONE, NEW)


@pytest.mark.parametrize("name", ["assisted", "autoregressive"])
def test_without_a_smaller_model_nothing_drafts_in_its_place(name, pair, asked):
    alone = replace(pair, assistant=None, why_no_assistant="none was to be had")
    with pytest.raises(ValueError, match="none was to be had"):
        WAYS[name].call(alone, ONE, NEW)
    assert not asked.calls


@pytest.mark.parametrize("name", ["notebook", "no-cache"])
def test_what_the_notebooks_loop_says_of_its_rounds(name, pair, asked):
    """Three rounds, which accepted 2 drafts, none and a whole block."""
    rounds = WAYS[name].call(pair, ONE, NEW).rounds
    assert (rounds.rounds, rounds.row_rounds, rounds.committed) == (3, 3, 2 + BLOCK + 3)
    assert rounds.proposed == [3] * BLOCK and rounds.accepted == [2, 2, 1, 1, 1, 1]
    assert (rounds.drafting, rounds.verifying, rounds.together) == (0.125, 0.0625, 0.1875)


def test_what_ours_say_of_their_rounds():
    """A graph is one figure; plain steps in it cannot be told apart."""
    stats = Stats(2, "greedy", [0, 0], 3)
    for row, lengths in enumerate(([3, 1], [2])):
        for length in lengths:
            stats.count(row, length, 3, length - 1)
    stats.rounds, stats.plain_steps = 2, 4
    stats.seconds.draft, stats.seconds.verify, stats.seconds.plain = 0.25, 0.5, 0.125
    expected = Rounds(2, 3, 6, [3, 3, 3], [2, 1, 0], 0.25, 0.5, 0.75, 4, 0.125)
    assert ours.rounds_of(stats) == expected
    stats.seconds.graph = 2.0
    assert ours.rounds_of(stats) == replace(expected, drafting=None, verifying=None, together=0.0)
    stats.plain_steps = 0
    assert ours.rounds_of(stats) == replace(expected, drafting=None, verifying=None, together=2.0, plain_steps=0)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def _unable(pair, batch):
    return {name for name, way in WAYS.items() if way.why_not(pair, batch) is not None}


def test_who_is_left_out_where(pair, monkeypatch):
    """By rows, by device, and by whether there is a smaller model."""
    monkeypatch.setattr(ours, "supported", lambda: True)
    on_a_cpu = {"no-graph", "reference"}
    one_row = {"assisted", "lookup", "notebook", "no-cache"}
    assert _unable(pair, 1) == on_a_cpu
    assert "graphs" in WAYS["no-graph"].why_not(pair, 1) and "reference ops" in WAYS["reference"].why_not(pair, 1)
    assert _unable(pair, 2) == on_a_cpu | one_row
    assert _unable(replace(pair, assistant=None, why_no_assistant="none"), 1) == {*on_a_cpu, "autoregressive"}
    on_a_gpu = replace(pair, model=SimpleNamespace(device=torch.device("cuda")))
    assert _unable(on_a_gpu, 1) == {"unpacked"}
    monkeypatch.setattr(ours, "supported", lambda: False)
    assert _unable(pair, 1) == {*on_a_cpu, "unpacked"}


# --- what predictions are made from -----------------------------------------------------------------------------------

TOKENS = 12
STEP = {"checking": 5.0, "warming": 7.0, "calibrating": 0.01, "timing": 0.5}  # seconds of a plain step
ROUND = {"checking": 11.0, "warming": 13.0, "calibrating": 0.0002, "timing": 3.0}  # of a round, per prompt token


@pytest.fixture
def predicted(pair, monkeypatch, characters):
    """``predicted(texts, **settings)``: rows and calls of a run of stand-ins, whose seconds hang on what they are for.

    A round takes as long as the prompt; in the second of two calls twice as long as in the first, a step four times.
    """
    doing, calls = [""], []

    def decode(name):
        def call(pair, case, new_tokens):
            before = sum(one[:3] == (doing[0], name, case.width) for one in calls)
            calls.append((doing[0], name, case.width))
            seconds = STEP[doing[0]] * (1 + 3 * before) * (TOKENS - 1)
            tokens = torch.zeros(1, TOKENS, dtype=torch.long)
            if name == "generate":
                return Call(tokens, seconds + 1.0, 1.0, seconds, TOKENS - 1)
            drafting = verifying = ROUND[doing[0]] * case.width * (1 + before) * 4 / 2
            # Calibrating calls accept nothing: the acceptance has to be the timed ones'.
            committed, accepted = (4, [0]) if doing[0] == "calibrating" else (8, [4])
            rounds = Rounds(4, 4, committed, [4], accepted, drafting, verifying, drafting + verifying)
            return Call(tokens, seconds + 1.0, 1.0, drafting + verifying, TOKENS - 1, rounds)

        return call

    for name in ("generate", "ours"):
        monkeypatch.setitem(WAYS, name, replace(WAYS[name], call=decode(name)))
    prompts = [Prompt(f"chat-{n}", "chat", ({"role": "user", "content": "?" * n},)) for n in (3, 40, 17)]
    monkeypatch.setattr(runner, "read_sets", lambda files: {"chat": prompts})

    def work(**changes):
        settings = {"max_new_tokens": TOKENS, "providers": ("generate", "ours"), "per_set": 3, "repeats": 2}
        report = benchmark.run(
            benchmark.Settings("stand-ins", **{**settings, **changes}),
            lambda exact: (pair, characters.tokenizer),
            exact_only=True,
            progress=lambda what: doing.__setitem__(0, what.split()[0].rstrip(",")),
        )
        return report, calls

    return work


def test_costs_are_taken_from_calls_that_were_made_for_it(predicted):
    """What checking, warming up and the timed calls took says nothing; all calibrating calls count."""
    report, calls = predicted()
    (row,) = (row for row in report["rows"] if row["provider"] == "ours")
    widest = max(report["prompt_tokens"]["batch 1"])
    a_round, a_step = 0.0002 * widest * (1 + 2) / 2, 0.01 * (1 + 4) / 2
    assert row["acceptance_length"] == 2.0
    assert row["draft_cost"] == row["verify_cost"] == pytest.approx(a_round / a_step / 2)
    assert row["predicted_speedup"] == pytest.approx(2.0 / (a_round / a_step))
    assert row["speedup"]["median"] != pytest.approx(row["predicted_speedup"], rel=0.5)
    for name in ("generate", "ours"):
        asked = [width for doing, way, width in calls if (doing, way) == ("calibrating", name)]
        assert asked == [widest] * runner.FOR_COSTS
        timed = [width for doing, way, width in calls if (doing, way) == ("timing", name)]
        assert timed == report["prompt_tokens"]["batch 1"] * 2


def test_each_shape_has_costs_of_its_own(predicted):
    report, _ = predicted(contexts=(None, 128))
    short, long = (row for row in report["rows"] if row["provider"] == "ours")
    widest = max(report["prompt_tokens"]["batch 1"])
    assert (short["context"], long["context"]) == (None, 128)
    assert short["predicted_speedup"] / long["predicted_speedup"] == pytest.approx(128 / widest)


def test_nothing_is_predicted_for_what_does_not_speculate(predicted):
    (row,) = (row for row in predicted()[0]["rows"] if row["provider"] == "generate")
    assert row["predicted_speedup"] is row["draft_cost"] is row["why"] is None
