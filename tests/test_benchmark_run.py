"""Providers side by side: equal before they are timed, in turn, and none silently missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from dspark_fast import benchmark, first_layers, generation
from dspark_fast.benchmark import runner, theirs
from dspark_fast.benchmark.verdict import ahead, disturbed, sentences
from dspark_fast.benchmark.ways import NO_DRAFTER, WAYS, chosen
from dspark_fast.benchmark.workload import cases_of, read_sets

NEW = 8
# The first two compile, which takes as long as all the rest; the third is there on some CPUs alone.
WITHOUT = ("static", "compiled", "unpacked")
SPECULATING = {"assisted", "lookup", "notebook", "no-cache", "ours", "always", "autoregressive"}


@pytest.fixture(scope="module")
def pair(make_target, make_draft, characters):
    model = make_target(fresh=True, vocab_size=len(characters.tokenizer), max_position_embeddings=512)
    return benchmark.Pair(model, make_draft(model), "a draft", first_layers(model, 2), "2 layers", 3, 3), (
        characters.tokenizer
    )


@pytest.fixture
def files(tmp_path):
    for name, texts in (("maths", ("1+1?", "2*3 is what, and why?")), ("chat", ("Hello you!", "Why?"))):
        lines = [json.dumps({"turns": [text, "and then?"]}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tuple(sorted(tmp_path.glob("*.jsonl")))


@pytest.fixture
def measure(pair, files):
    def work(progress=lambda what: None, load=None, **changes):
        settings = {"model": "tiny", "prompts": files, "max_new_tokens": NEW, "repeats": 2, "without": WITHOUT}
        load = load or (lambda exact: pair)
        return benchmark.run(benchmark.Settings(**{**settings, **changes}), load, exact_only=True, progress=progress)

    return work


@pytest.mark.floor
def test_a_whole_run(measure, pair):
    report = measure(also=("no-cache",), batches=(1, 3), max_new_tokens=6)
    assert json.loads(json.dumps(report)) == report
    rows = {(row["batch"], row["set"], row["provider"]): row for row in report["rows"]}
    expected = {"generate", "no-drafter", *SPECULATING}
    assert {name for batch, of, name in rows if batch == 1 and of == "all"} == expected
    assert {name for batch, of, name in rows if batch == 1 and of == "chat"} == expected
    assert {(of, name) for batch, of, name in rows if batch == 3} == {
        ("all", name) for name in ("generate", "ours", "always", "no-drafter", "autoregressive")
    }
    missing = {(one["provider"], one["batch"]) for one in report["left_out"]}
    assert missing == {(name, None) for name in WITHOUT} | {("no-graph", 1), ("reference", 1)} | {
        (name, 3) for name in ("assisted", "lookup", "notebook", "no-cache", "no-graph", "reference")
    }
    assert all(one["why"] for one in report["left_out"])
    for (batch, of, name), row in rows.items():
        assert row["prompts"] == (batch if batch > 1 else 4 if of == "all" else 2)
        assert row["speedup"]["least"] <= row["speedup"]["median"] <= row["speedup"]["most"]
        assert row["first_token_ms"]["least"] > 0 and row["tokens_per_second"]["least"] > 0
        assert row["call_seconds"]["median"] > 1e-3 * row["first_token_ms"]["median"]
        if name in SPECULATING:
            assert row["acceptance_length"] >= 1 and row["predicted_speedup"] > 0
            distance = row["speedup"]["median"] / row["predicted_speedup"]
            assert (row["why"] is None) == (abs(distance - 1) <= 0.15)
        if of == "all":
            assert row["same_tokens"] == {"same": row["prompts"], "near_ties": 0, "unexplained": []}
    assert rows[1, "all", "generate"]["speedup"]["median"] == 1.0
    assert report["verdict"] == sentences(report["rows"])
    assert [*dict.fromkeys(said.partition(":")[0] for said in report["verdict"])] == ["Batch 1", "Batch 3"]
    assert report["machine"]["transformers"] and report["dtype"] == "float32"
    assert pair[0].model.generation_config.prompt_lookup_num_tokens is None
    assert not pair[0].model._forward_hooks and not pair[0].assistant._forward_hooks


def test_in_turn(measure):
    """In every case of every repeat another provider begins; those behind it follow in order."""
    said = []
    measure(progress=said.append, providers=("generate", "ours", "always"), without=(), per_set=1, repeats=3)
    timed = [line.rsplit(": ", 1)[1] for line in said if line.startswith("timing")]
    ways = [WAYS[name].label for name in ("generate", "ours", "always")]
    turns = [ways[turn % 3 :] + ways[: turn % 3] for turn in range(6)]
    assert timed == [label for turn in turns for label in turn]
    kinds = [line.split()[0].rstrip(",") for line in said]
    assert kinds == sorted(kinds, key=["checking", "warming", "calibrating", "timing"].index)


def test_a_difference_of_ours_is_no_report(measure, monkeypatch):
    true = generation.generate

    def wrong(model, draft, input_ids, **given):
        output = true(model, draft, input_ids, **given)
        output[0, -2] = 5 + (output[0, -2] == 5).long()
        return output

    monkeypatch.setattr(generation, "generate", wrong)
    with pytest.raises(benchmark.Unequal, match=f"dspark-fast: its fp32 tokens differ .* after {NEW - 2} of {NEW}"):
        measure()


def test_a_difference_of_theirs_leaves_it_out(measure, monkeypatch):
    def wrong(pair, case, new_tokens):
        call = theirs.plain(pair, case, new_tokens)
        call.tokens[0, 3] += 1
        return call

    monkeypatch.setitem(WAYS, "lookup", replace(WAYS["lookup"], call=wrong))
    report = measure(providers=("generate", "lookup", "ours"), without=(), repeats=1)
    (one,) = (one for one in report["left_out"] if one["provider"] == "lookup")
    assert one["why"] == f"its fp32 tokens differ from those of generate after 3 of {NEW}"
    assert not [row for row in report["rows"] if row["provider"] == "lookup"]


def test_what_fails_is_left_out_with_its_reason(measure, monkeypatch):
    def broken(pair, case, new_tokens):
        raise RuntimeError("no compiler was found\nwhatever else")

    monkeypatch.setitem(WAYS, "static", replace(WAYS["static"], call=broken))
    report = measure(providers=("generate", "static"), without=())
    (one,) = (one for one in report["left_out"] if one["provider"] == "static")
    assert one == {
        "provider": "static",
        "batch": 1,
        "context": None,
        "why": "failed: RuntimeError: no compiler was found",
    }
    assert report["verdict"] == ["Batch 1: none of ours was run."]


def test_static_is_compiled_and_timed_apart(measure, monkeypatch):
    compiled = []

    def compiler(graph, inputs, **options):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(theirs, "CompileConfig", partial(theirs.CompileConfig, backend=compiler))
    report = measure(providers=("generate", "static"), without=(), per_set=1, repeats=1)
    (row,) = (row for row in report["rows"] if (row["provider"], row["set"]) == ("static", "all"))
    assert compiled and row["compile_seconds"] >= 0 and row["same_tokens"]["same"] == 2
    torch._dynamo.reset()


def test_what_differs_in_16_bits_is_judged(pair, measure):
    """Loaded twice: fp32 to compare, bf16 to time; there the speculating ways may fall to the other side of a tie."""
    asked = []

    def load(exact):
        asked.append(exact)
        return pair

    report = benchmark.run(
        benchmark.Settings("tiny", max_new_tokens=4, repeats=1, per_set=1, providers=("generate", "ours")), load
    )
    assert asked == [True, False]
    assert report["settings"]["prompts"] == "shipped"
    assert {row["set"] for row in report["rows"]} == {"all", "maths", "code", "chat"}
    cases = cases_of(pair[1], read_sets(()), batch=1, per_set=1, context=None)
    calls = {name: [[theirs.plain(pair[0], case, 4) for case in cases]] for name in ("generate", "ours")}
    calls["ours"][0][1].tokens[0, 2] += 1
    judged = runner.judge(pair[0], pair[1], cases, calls, "ours")
    assert judged["same"] == len(cases) - 1 and judged["near_ties"] == 0
    assert "a difference that rounding does not explain" in judged["unexplained"][0]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_call_adds_up(pair, files, batch):
    """Time until the first token and after it, and the tokens that came in each."""
    for case in cases_of(pair[1], read_sets(files), batch=batch, per_set=1, context=None)[:1]:
        for way in chosen(also=["no-cache"], without=WITHOUT)[0]:
            if way.why_not(pair[0], batch) is not None:
                continue
            call = way.call(pair[0], case, NEW)
            assert call.tokens.shape == (batch, NEW) and call.tokens.device.type == "cpu", way.name
            assert call.first > 0 and call.after > 0 and call.compiling == 0, way.name
            assert call.first + call.after == pytest.approx(call.seconds, abs=1e-3), way.name
            # transformers' speculation hands over its first round as one.
            fewest = NEW - 4 if way.name in ("assisted", "lookup") else NEW - 1
            assert fewest <= call.counted <= NEW - 1, way.name
            if call.rounds is not None:
                assert call.rounds.together + call.rounds.plain <= call.after + 1e-3, way.name
                assert call.rounds.committed + batch * call.rounds.plain_steps >= call.counted * batch, way.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_way_of_ours_on_a_gpu(make_target, make_draft, characters, files):
    model = make_target(fresh=True, vocab_size=len(characters.tokenizer), max_position_embeddings=512).to("cuda")
    pair = benchmark.Pair(model, make_draft(model).to("cuda"), "a draft", first_layers(model, 2), "2 layers", 3, 3)
    names = ("generate", "ours", "always", "no-graph", "reference", "autoregressive")
    settings = benchmark.Settings("tiny", files, max_new_tokens=NEW, repeats=1, batches=(1, 3), providers=names)
    report = benchmark.run(settings, lambda exact: (pair, characters.tokenizer), exact_only=True)
    assert {(row["batch"], row["provider"]) for row in report["rows"]} == {(b, name) for b in (1, 3) for name in names}
    assert {one["why"] for one in report["left_out"]} == {"not among --providers"}


# --- what is decoded --------------------------------------------------------------------------------------------------


def test_cases(pair, files):
    sets = read_sets(files)
    one = cases_of(pair[1], sets, batch=1, per_set=1, context=None)
    assert [case.set for case in one] == ["chat", "maths"] and all(len(case.rows) == 1 for case in one)
    assert pair[1].decode(one[0].rows[0]).endswith("Hello you!<|end|>\n<|start|>assistant\n>")
    (three,) = cases_of(pair[1], sets, batch=3, per_set=1, context=None)
    assert three.set == "mixed" and [len(row) for row in three.rows] == [
        len(case.rows[0]) for case in (one[0], one[1], cases_of(pair[1], sets, batch=1, per_set=2, context=None)[1])
    ]
    batch = three.inputs(torch.device("cpu"))
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in three.rows]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
    long = cases_of(pair[1], sets, batch=1, per_set=2, context=150)
    assert {case.width for case in long} == {150} and long[0].rows[0][-20:] == one[0].rows[0][-20:]


def test_refusals(pair, measure, files):
    with pytest.raises(ValueError, match="batch is 5, but there are 4 prompts"):
        measure(batches=(5,))
    with pytest.raises(ValueError, match="context is 10, but the prompt 'chat-1' alone has"):
        measure(contexts=(10,))
    with pytest.raises(ValueError, match="500 new ones is more than the context of tiny, 512"):
        measure(max_new_tokens=500)
    with pytest.raises(ValueError, match="max_new_tokens is 1: accepted is 2 or more"):
        measure(max_new_tokens=1)
    with pytest.raises(ValueError, match="repeats is 0"):
        measure(repeats=0)


def test_who_is_asked():
    ways, absent = chosen()
    assert "no-cache" in absent and len(ways) + len(absent) == len(WAYS)
    assert [way.name for way in chosen(also=["no-cache"], without=["static"])[0]] == [
        name for name in WAYS if name != "static"
    ]
    assert [way.name for way in chosen(["ours", "generate"])[0]] == ["generate", "ours"]
    with pytest.raises(ValueError, match="the provider is 'our': accepted are generate, "):
        chosen(["our"])
    with pytest.raises(ValueError, match="generate is left out"):
        chosen(["ours"])


# --- who is ahead -----------------------------------------------------------------------------------------------------


def _row(provider, of, speedup, ours, plain=(10.0, 12.0)):
    return {
        "batch": 1,
        "context": None,
        "set": of,
        "provider": provider,
        "label": provider,
        "ours": ours,
        "speedup": {"median": speedup},
        "tokens_per_second": {"least": plain[0], "most": plain[1]},
    }


def _rows(plain=(10.0, 12.0), **speedups):
    """Rows of made-up ways over all prompts and two sets; those whose name begins with "our" are ours."""
    speedups = {"generate": (1.0, 1.0, 1.0), **speedups}
    sets = ("all", "maths", "chat")
    return [
        _row(name, of, one, name.startswith("our"), plain)
        for name, ones in speedups.items()
        for of, one in zip(sets, ones)
    ]


def test_who_is_ahead_is_said_by_set_and_of_each_of_ours():
    rows = _rows(ours=(1.5, 1.8, 1.1), our_best=(2.0, 2.3, 1.4), static=(1.2, 1.2, 1.15), loop=(1.4, 1.4, 1.3))
    assert {of: [row["provider"] for row in found] for of, found in ahead(rows, "ours").items()} == {
        "chat": ["loop", "static"]
    }
    assert sentences(rows) == [
        "Batch 1: our_best (2.00) is ahead of every other provider, 1.43 times loop, and ahead in every set (maths, "
        "chat).",
        "Batch 1: ours is behind in chat (1.10): loop (1.30) and static (1.15).",
    ]


def test_ours_without_a_drafter_is_one_of_the_others():
    rows = _rows(ours=(1.5, 1.9, 1.2), alone=(1.4, 1.3, 1.5), static=(1.1, 1.2, 1.0))
    for row in rows:
        if row["provider"] == "alone":
            row.update(ours=True, provider=NO_DRAFTER)
    assert sentences(rows) == [
        "Batch 1: ours (1.50) is ahead of every other provider, 1.07 times alone.",
        "Batch 1: ours is behind in chat (1.20): alone (1.50).",
    ]
    for row in rows:
        row["speedup"]["median"] += row["provider"] == NO_DRAFTER
    assert sentences(rows)[0] == "Batch 1: alone (2.40) is ahead of all of ours, 1.60 times ours."


def test_nobody_ahead_is_nothing_to_say():
    rows = _rows(ours=(1.5, 1.8, 1.1), static=(1.2, 1.2, 1.1))  # as fast as is not behind
    assert sentences(rows) == [
        "Batch 1: ours (1.50) is ahead of every other provider, 1.25 times static, and ahead in every set (maths, "
        "chat)."
    ]


def test_a_set_that_the_best_of_ours_loses():
    said = sentences(_rows(ours=(1.5, 1.9, 0.9), other=(1.2, 1.0, 1.4)))
    assert said == [
        "Batch 1: ours (1.50) is ahead of every other provider, 1.25 times other.",
        "Batch 1: ours is behind in chat (0.90): other (1.40) and generate (1.00).",
    ]


def test_others_ahead_over_all():
    rows = _rows(ours=(0.9, 1.2, 0.8), a=(1.5, 1.1, 1.6), b=(1.4, 1.1, 1.3), c=(1.3, 1.1, 1.2))
    assert sentences(rows) == [
        "Batch 1: a (1.50) is ahead of all of ours, 1.67 times ours.",
        "Batch 1: ours is behind over all prompts (0.90): a (1.50), b (1.40) and 2 more; in chat (0.80): a (1.60), b "
        "(1.30) and 2 more.",
    ]
    everywhere = sentences(_rows(ours=(0.9, 0.9, 0.8), a=(1.5, 1.1, 1.6)))[1]
    assert everywhere == (
        "Batch 1: ours is behind in every set (maths, chat) and over all prompts (0.90): a (1.50) and generate (1.00)."
    )


def test_a_machine_that_was_not_left_alone_gives_no_lead():
    """What others are ahead in is said all the same."""
    ways = {"ours": (1.5, 1.9, 0.9), "other": (1.2, 1.0, 1.4)}
    rows = _rows(plain=(10.0, 15.1), **ways)
    assert disturbed(rows) == (10.0, 15.1) and disturbed(_rows(plain=(10.0, 15.0), **ways)) is None
    first, second = sentences(rows)
    assert first.startswith("Batch 1: generate alone ran at 10.0 to 15.1 tokens/s") and "do not trust" in first
    assert second == "Batch 1: ours is behind in chat (0.90): other (1.40) and generate (1.00)."


def test_of_several_rows_together_there_are_no_sets():
    rows = [row for row in _rows(ours=(1.5, 0, 0), our_other=(1.2, 0, 0), a=(1.3, 0, 0)) if row["set"] == "all"]
    assert sentences(rows) == [
        "Batch 1: ours (1.50) is ahead of every other provider, 1.15 times a.",
        "Batch 1: our_other is behind over all prompts (1.20): a (1.30).",
    ]
