"""What a drafter of two layers would have to be worth: computed on made-up costs, and what the file says of it."""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dspark_fast import analysis

ROOT = Path(__file__).parent.parent
ACCEPTANCE = [0.6, 0.5, 0.5, 0.4, 0.4]


@pytest.fixture
def bench(monkeypatch):
    """The module ``bench/two_layer_drafter.py``."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield importlib.import_module("two_layer_drafter")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


@pytest.fixture
def text(bench):
    """What is said of its figures."""
    return importlib.import_module("claims_two_layer")


@pytest.fixture
def results(bench):
    return importlib.import_module("claims").Results(ROOT / "bench" / "results")


@pytest.fixture
def costs(bench):
    """``costs(whole, small, dspark)``: of one draft by two layers, and of DSpark's block; all in plain steps."""

    def make(whole, small, dspark=0.3, passes=lambda drafts: 1 + drafts / 50):
        def near(cost):
            return bench.spread([0.9 * cost, cost, 1.2 * cost])

        return {
            "block_size": 5,
            "block": {bench.WHOLE: near(5 * whole), bench.SMALL: near(5 * small), bench.DSPARK: near(dspark)},
            "passes": {str(drafts): near(passes(drafts)) for drafts in range(1, 8)},
        }

    return make


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.6])
def test_at_the_alpha_that_breaks_even_the_speedup_is_one(bench, cost):
    passes = {drafts: 1 + drafts / 50 for drafts in range(1, 8)}
    alpha = bench.needed(1.0, cost, passes)
    assert bench.best(alpha, cost, passes)[1] == pytest.approx(1, abs=1e-3)
    assert bench.best(alpha - 2 / bench.STEPS, cost, passes)[1] < 1
    if cost == 0.6:  # one draft is then the best, and has to pay for itself and its place in the pass
        assert alpha == pytest.approx(0.6 + 0.02, abs=1e-3)


def test_a_draft_that_costs_nothing_pays_at_any_alpha(bench):
    passes = dict.fromkeys(range(1, 8), 1.0)
    assert bench.needed(1.0, 0.0, passes) == 0.0
    for alpha in (0.1, 0.5, 0.9):
        assert bench.best(alpha, 0.0, passes) == (7, pytest.approx(analysis.expected_tokens(alpha, 7)))


def test_a_draft_that_costs_more_than_its_token_is_never_worth_it(bench, costs):
    passes = dict.fromkeys(range(1, 8), 1.0)
    assert bench.needed(1.0, 1.01, passes) is None
    assert bench.best(0.999, 1.01, passes)[1] < 1
    found = bench.answers(costs(1.01, 0.2), ACCEPTANCE)["two_layers"][bench.WHOLE]
    assert found["breaks_even"] is None and found["matches"] is None


def test_the_best_number_of_drafts_is_the_models_where_every_pass_costs_the_same(bench):
    passes = dict.fromkeys(range(1, 8), 1.1)
    for alpha in (0.3, 0.6, 0.9, ACCEPTANCE):
        for cost in (0.02, 0.1, 0.25):
            drafts, speedup = bench.best(alpha, cost, passes)
            most = len(alpha) if isinstance(alpha, list) else 7
            known = analysis.best_drafts(alpha, cost, 1.1, most)
            assert speedup == pytest.approx(analysis.speedup(alpha, drafts, cost, 1.1))
            assert drafts == known or (known == 0 and speedup < 1)


def test_answers_of_made_up_costs(bench, costs):
    found = bench.answers(costs(0.25, 0.15), ACCEPTANCE)
    tokens = analysis.expected_tokens(ACCEPTANCE, 5)
    assert found["dspark"]["drafts"] == 5
    assert found["dspark"]["speedup"] == pytest.approx(tokens / (0.3 + 1.1), abs=1e-4)
    assert found["dspark"]["least"] == pytest.approx(tokens / (0.3 + 1.1) / 1.2, abs=1e-4)
    assert found["dspark"]["most"] == pytest.approx(tokens / (0.3 + 1.1) / 0.9, abs=1e-4)
    for cost, one in zip((0.25, 0.15), found["two_layers"].values()):
        passes = {drafts: 1 + drafts / 50 for drafts in range(1, 8)}
        assert one["draft"] == pytest.approx(cost)
        assert bench.best(one["matches"], cost, passes)[1] == pytest.approx(found["dspark"]["speedup"], abs=1e-3)
        at = one["at_its_acceptance"]
        known = analysis.speedup(ACCEPTANCE, at["drafts"], cost, passes[at["drafts"]])
        assert at["speedup"] == pytest.approx(known, abs=1e-4)
        assert 0 < one["breaks_even"] < one["matches"] < 1
    assert found["behind_in"] == 3


def test_repeats_are_counted_one_by_one(bench, costs):
    """What one repeat says of all drafters is compared with nothing of another."""
    made = costs(0.25, 0.15)
    made["block"][bench.SMALL]["repeats"][1] = 0.01
    found = bench.answers(made, ACCEPTANCE)
    assert found["behind_in"] == 2
    speedups = found["two_layers"][bench.SMALL]["at_its_acceptance"]["repeats"]
    assert speedups[1] == max(speedups) > found["dspark"]["most"] > speedups[0]


@pytest.mark.parametrize(
    ("whole", "small", "dspark", "said"),
    [
        (0.25, 0.15, 0.3, "only if it were right more often"),
        (0.25, 0.01, 0.3, "so one is worth training"),
        (0.9, 0.8, 0.3, "only if it were right more often"),
        (0.9, 0.8, 9.0, "neither pays here"),  # ahead of a drafter that loses, and behind none at all
    ],
)
def test_the_sentence_follows_the_figures(bench, text, costs, whole, small, dspark, said):
    made = {"answers": bench.answers(costs(whole, small, dspark), ACCEPTANCE), "head_tokens": 8192, "repeats": 3}
    made["acceptance"] = {"by_position": ACCEPTANCE}
    assert said in text.sentence(made)
    assert "0.40 to 0.60 by position" in text.sentence(made)
    found = [made["answers"]["dspark"]]
    found += [one["at_its_acceptance"] for one in made["answers"]["two_layers"].values()]
    figures = re.search(r"decode (\S+) \((\S+)\) times as fast as no drafter, it (\S+) times", text.sentence(made))
    assert [figures[3], figures[1], figures[2]] == [f"{one['speedup']:.2f}" for one in found]


def test_acceptance_is_the_mean_over_the_domains_that_tau_is_of(bench):
    domains = {
        "one": {"survival": [0.8, 0.4]},
        "two": {"survival": [0.4, 0.2]},
        "left out": {"survival": [1.0, 1.0]},
    }
    rows = [{"temperature": 1.0}, {"temperature": 0.0, "mean_of": ["one", "two"], "domains": domains}]
    assert bench.acceptance_of({"results": rows}) == pytest.approx([0.6, 0.5])


def test_what_is_timed_is_the_same_round_again_and_again(bench, make_target, make_draft, monkeypatch):
    monkeypatch.setattr(bench, "CONTEXT", 12)
    model = make_target()
    draft = make_draft(model, draft_vocab_size=40)
    ids = torch.randint(1, 97, (1, 20))
    drafted, read = {}, {}

    def watched(owner, name, keep):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: keep(inner(*args, **options), *args))

    def proposed(found, drafter, *_):
        head = drafter.draft.get_output_embeddings().out_features if drafter.draft is not draft else None
        drafted.setdefault(head, []).append(found.tokens)
        return found

    def verified(found, target, tokens, end):
        read.setdefault(tokens.shape[1], []).append(found[0])
        return found

    for owner in (bench.AutoregressiveDrafter, bench.DSparkDrafter):
        watched(owner, "propose", proposed)
    watched(importlib.import_module("dspark_fast.engine.target").RaggedTarget, "verify", verified)
    found = bench.measured(model, draft, ids, repeats=1, turns=2)
    assert found["block_size"] == 5 and set(found["passes"]) == {str(drafts) for drafts in bench.DRAFTS}
    assert set(found["block"]) == {bench.DSPARK, bench.WHOLE, bench.SMALL}

    assert set(drafted) == {None, 97, 40} and set(read) >= set(range(1, 9))
    for blocks in drafted.values():
        assert len(blocks) == 5 and all(torch.equal(one, blocks[0]) for one in blocks)
    plain = model(ids).logits
    two = bench.first_layers(model, 2).generate(ids[:, :13], max_new_tokens=5, do_sample=False)
    assert torch.equal(drafted[97][0], two[:, 13:])
    torch.testing.assert_close(read[8][-1], plain[:, 12:20])
    torch.testing.assert_close(read[1][0], plain[:, 12:13])


def test_the_small_head_is_the_rows_of_the_tokens_that_are_drafted(bench, make_target, make_draft):
    model = make_target()
    draft = make_draft(model, draft_vocab_size=40)
    small, ids = bench.with_small_head(model, draft), torch.randint(1, 97, (1, 9))
    whole = bench.first_layers(model, 2)(ids).logits
    torch.testing.assert_close(small(ids).logits, whole[..., draft.vocabulary])
    assert model(ids).logits.shape[-1] == 97, "the target has lost its own head"
    assert bench.share_of_weights(model, small) < bench.share_of_weights(model, bench.first_layers(model, 2)) < 0.5


def test_the_committed_file_says_what_its_figures_say(bench, text, results):
    result = results.two_layer_drafter
    taken = result["acceptance"]
    acceptance = bench.acceptance_of(getattr(results, taken["file"].removesuffix(".json")))
    assert taken["by_position"] == acceptance, "eval.json is newer: python bench/two_layer_drafter.py"
    assert result["answers"] == json.loads(json.dumps(bench.answers(result["costs"], acceptance)))
    assert result["sentence"] == text.sentence(result)


def test_every_number_of_the_page_is_the_files(bench, text, results):
    """Another file gives another page, and the words alone have no figure in them."""
    page = text.page(results)
    assert results.two_layer_drafter["sentence"] in " ".join(page.split())
    result = results.two_layer_drafter = copy.deepcopy(results.two_layer_drafter)
    result["costs"]["block"] = {name: _scaled(one) for name, one in result["costs"]["block"].items()}
    result["costs"]["passes"] = {name: _scaled(one) for name, one in result["costs"]["passes"].items()}
    result["answers"] = bench.answers(result["costs"], result["acceptance"]["by_position"])
    new = text.page(results)
    rows = [[line for line in one.splitlines() if line.startswith("| ")] for one in (page, new)]
    assert [a == b for a, b in zip(*rows, strict=True)] == [True, False, False, False]
    said = [" ".join(one.split()) for one in (page, new)]
    assert result["sentence"] not in said[1] and text.sentence(result) in said[1]
    costs = [re.search(r"of the target (.*?) over 2, .*? over 8 tokens", one)[1] for one in said]
    assert float(costs[1]) == pytest.approx(1.37 * float(costs[0]), abs=0.02)


def _scaled(cost):
    scaled = {what: 1.37 * value for what, value in cost.items() if what != "repeats"}
    return {**scaled, "repeats": [1.37 * value for value in cost["repeats"]]}


def test_a_page_of_a_disturbed_machine_or_another_drafter_is_refused(text, results):
    from trust import Untrusted

    kept = results.two_layer_drafter
    results.two_layer_drafter = changed = copy.deepcopy(kept)
    changed["costs"]["passes"]["3"]["most"] = 9.0
    with pytest.raises(Untrusted, match=r"1 of 10 speedups in two_layer_drafter\.json vary"):
        text.page(results)
    results.two_layer_drafter = {**kept, "draft": "another"}
    with pytest.raises(Untrusted, match="is of another"):
        text.page(results)
