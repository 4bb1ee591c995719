"""The report's measurements: each number against a hand computation, an invariant, or a second way to get it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from report_subjects import NEW_TOKENS, again, prompts, quietly

from dspark_fast import generate
from dspark_fast.evaluation import Counts, evaluate
from dspark_fast.report import confidence as confidence_module
from dspark_fast.report import heads as heads_module
from dspark_fast.report import memory_worker
from dspark_fast.report import subject as subject_module
from dspark_fast.report.confidence import Along, Confidence
from dspark_fast.report.domains import Domains
from dspark_fast.report.heads import Heads
from dspark_fast.report.measurement import NotMeasurable
from dspark_fast.report.memory import Memory, Peak
from dspark_fast.report.positions import Positions
from dspark_fast.report.recording import Block, RecordingDrafter
from dspark_fast.report.subject import Equality, NotLossless, Subject, small_drafter
from dspark_fast.report.sweep import THRESHOLDS, Sweep, positions_per_token


@pytest.fixture(scope="module")
def subject(make_subject):
    return make_subject()


@pytest.fixture(scope="module")
def model(subject):
    return subject.model


@pytest.fixture(scope="module")
def draft(subject):
    return subject.draft


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_pair_in_16_bits_is_held_to_fp32(subject, monkeypatch, spoilt):
    """On copies: the pair itself stays as it is."""
    told = SimpleNamespace(near_tie=True, sentence=lambda: "they part")
    monkeypatch.setattr(subject_module, "first_difference", lambda *arguments: told)
    short = replace(subject, model=copy.deepcopy(subject.model).bfloat16(), small=None, max_new_tokens=6, _known={})
    short.draft = copy.deepcopy(subject.draft).bfloat16()
    short.draft.tie_to(short.model)
    if spoilt:
        monkeypatch.setattr(Subject, "plainly", lambda self, index: [1, 2, 3])
        with pytest.raises(NotLossless, match="they part"):
            Domains.measure(short, quietly)
        return
    found = again(Domains.measure(short, quietly))
    assert found.exact.answers == found.exact.identical == 2 and found.equality.answers == 4
    assert "in fp32, where no near-tie excuses a difference, 2 of 2 answers" in found.sentences()[-1]
    assert short.model.dtype == short.draft.dtype == short.draft.lm_head.weight.dtype == torch.bfloat16
    monkeypatch.setattr(subject_module, "MOST_FP32", 1000)
    assert subject_module.in_fp32(short) is None


# --- what was drafted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_recorded_blocks_are_the_answer(subject, threshold):
    answers = subject.dspark(quietly, confidence_threshold=threshold)
    stops, ended_on_a_draft, mixed = {2, subject.tokenizer.convert_tokens_to_ids("e")}, 0, 0
    counts = Counts.none(5)
    for tokens, blocks in zip(answers.tokens, answers.blocks):
        said = tokens[:1]
        for block in blocks:
            assert block.anchor == said[-1]
            said += block.drafts[: block.accepted]
            if block.following is None:
                ended_on_a_draft += said[-1] in stops
            else:
                said.append(block.following)
            mixed += 0 < block.accepted < block.proposed
            trusted = next((k for k, c in enumerate(block.confidence) if c < threshold), len(block.drafts))
            assert block.proposed <= trusted
            assert block.proposed == trusted or block.following is None
            proposed, accepted = ([int(k < n) for k in range(5)] for n in (block.proposed, block.accepted))
            committed = block.accepted + (said[-1] not in stops or block.following is not None)
            counts += Counts(0, 1, committed, tuple(proposed), tuple(accepted))
        assert said[: len(tokens)] == tokens
    assert ended_on_a_draft or threshold
    assert mixed
    assert replace(counts, prompts=4) == answers.evaluation.pooled


def test_recorded_confidence_is_the_heads(subject, draft):
    """Against the head's own weights, on states that a hook on the drafter's last norm has seen."""
    states = []
    handle = draft.norm.register_forward_hook(lambda module, arguments, output: states.append(output))
    try:
        recorder = RecordingDrafter(draft)
        output = generate(subject.model, recorder, subject.ids(0), max_new_tokens=9, off_switch=False)
    finally:
        handle.remove()
    blocks = recorder.blocks(output[0, subject.ids(0).shape[1] :].tolist(), output.stats)
    head, table = draft.confidence_head.proj, draft.markov_head.markov_w1.weight
    for block, hidden in zip(blocks, states, strict=True):
        before = [block.anchor, *block.drafts[:-1]]
        for slot, token in enumerate(before):
            logit = head.weight[0] @ torch.cat([hidden[0, slot], table[token]]) + head.bias[0]
            assert block.confidence[slot] == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)


def test_a_recorder_takes_one_row(subject, draft, prompts):
    with pytest.raises(ValueError, match="given 5 rows"):
        generate(subject.model, RecordingDrafter(draft), **vars(prompts()), max_new_tokens=3)
    assert not hasattr(RecordingDrafter(draft), "capturable")


# --- equality ---------------------------------------------------------------------------------------------------------


def test_other_tokens_are_refused(subject):
    plain = [list(row) for row in subject.plain(quietly)]
    plain[1][2] += 1
    spoilt = replace(subject, _known={"plain": plain})
    with pytest.raises(
        NotLossless, match=r"DSpark, prompt 'maths-1' of the domain 'maths'.*first 2 tokens are the same"
    ):
        spoilt.dspark(quietly)


@pytest.mark.parametrize(("dtype", "near_tie"), [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_rounding_excuses_16_bits_alone(subject, monkeypatch, dtype, near_tie):
    told = SimpleNamespace(near_tie=near_tie, sentence=lambda: "they part")
    monkeypatch.setattr(subject_module, "first_difference", lambda *arguments: told)
    other = replace(
        subject, model=SimpleNamespace(dtype=getattr(torch, dtype), device="cpu", config=subject.model.config)
    )
    if dtype == "bfloat16" and near_tie:
        found = other.equality(0, [1], [2], "DSpark")
        assert (found.answers, found.identical) == (1, 0) and found.near_ties[0].endswith("they part")
    else:
        with pytest.raises(NotLossless, match="they part"):
            other.equality(0, [1], [2], "DSpark")


def test_equalities_add_up():
    one, two = Equality({"a": (2, 1)}, ("x",)), Equality({"a": (1, 1), "b": (3, 2)}, ("y",))
    assert one + two == Equality({"a": (3, 2), "b": (3, 2)}, ("x", "y"))
    assert one | one == one
    assert (one | two).parts == {"a": (1, 1), "b": (3, 2)}
    assert (one + two).sentence().startswith("4 of 6 answers have the tokens of plain decoding; the other 2 part")
    assert Equality({"a": (2, 2)}).sentence() == "All 2 answers have the tokens of plain decoding."


# --- the measurements -------------------------------------------------------------------------------------------------


def test_domains(subject, draft):
    found = again(Domains.measure(subject, quietly))
    for way, drafter in (("dspark", draft), ("autoregressive", subject.small)):
        result = evaluate(
            subject.model, drafter, subject.tokenizer, prompts(), max_new_tokens=NEW_TOKENS, batch_size=1, temperature=0
        )
        assert found.ways[way].domains == result.domains
        assert found.ways[way].mean_tau == result.mean_tau
    assert found.equality.answers == found.equality.identical == 8
    assert f"{found.ways['dspark'].mean_tau:.2f}" in found.sentences()[0]
    assert found.exact == Equality()
    alone = Domains.measure(replace(subject, small=None, _known={}), quietly)
    assert list(alone.ways) == ["dspark"] and len(again(alone).sentences()) == 1
    alone.draw()


def test_positions(subject, draft):
    found = again(Positions.measure(subject, quietly))
    for counts, use_markov in ((found.on, True), (found.off, False)):
        result = evaluate(
            subject.model,
            draft,
            subject.tokenizer,
            prompts(),
            max_new_tokens=NEW_TOKENS,
            batch_size=1,
            use_markov=use_markov,
        )
        assert counts == result.pooled
    assert found.on.tau > found.off.tau and "the head is worth +" in found.sentences()[0]
    off, on = found.first
    assert on.drafts != off.drafts and on.anchor == off.anchor
    index = next(i for i, one in enumerate(prompts()) if one.messages[-1]["content"] == found.question)
    said = [subject.text(token) for token in subject.plain(quietly)[index]]
    for strip in found.first:
        assert [strip.anchor, *strip.drafts[: strip.accepted], strip.following] == said[: strip.accepted + 2]
    found.draw()


def test_sweep(subject):
    found = again(Sweep.measure(subject, quietly))
    whole = found.counts[0]
    ended = [blocks[-1] for blocks in subject.dspark(quietly).blocks if blocks and blocks[-1].following is None]
    behind_a_stop = sum(5 - block.proposed for block in ended)
    assert sum(whole.proposed) == 5 * whole.rounds - behind_a_stop
    for threshold, counts in zip(THRESHOLDS, found.counts):
        blocks = [b for blocks in subject.dspark(quietly, confidence_threshold=threshold).blocks for b in blocks]
        assert counts.proposals == pytest.approx(sum(b.proposed for b in blocks) / len(blocks))
        verified = sum(b.proposed + 1 for b in blocks)
        assert positions_per_token(counts) == pytest.approx(verified / counts.committed)
        assert positions_per_token(counts) == pytest.approx((counts.proposals + 1) / counts.tau)
        assert positions_per_token(counts) >= 1 - 1 / counts.tau  # a round that ends on a draft has no bonus
    assert found.counts[-1].proposals < whole.proposals
    found.draw()


def test_confidence_by_hand():
    blocks = [
        Block(0, (1, 2, 3), (0.9, 0.5, 0.4), 3, 3, 9),
        Block(0, (1, 2, 3), (0.8, 0.6, 0.2), 3, 1, 9),
        Block(0, (1, 2, 3), (0.1, 0.7, 0.3), 3, 0, 9),
        Block(0, (1, 2, 3), (1.0, 0.9, 0.6), 2, 2, None),  # ended on its second draft
    ]
    along = Along.of(blocks, 3)
    assert along.reached == (4, 3, 1) and along.proposed == (4, 4, 3)
    assert along.said == pytest.approx((2.8 / 4, 2.0 / 3, 0.4))
    assert along.accepted == pytest.approx((3 / 4, 2 / 3, 1.0))
    products = (0.45 + 0.48 + 0.07 + 0.9) / 4, (0.18 + 0.096 + 0.021) / 3
    assert along.product == pytest.approx((2.8 / 4, *products))
    assert along.survived == pytest.approx((3 / 4, 2 / 4, 1 / 3))
    assert math.isnan(Along.of(blocks[2:3], 3).accepted[1])


def test_confidence(subject):
    found = again(Confidence.measure(subject, quietly))
    pooled = subject.dspark(quietly).evaluation.pooled
    assert found.along.survived == pytest.approx(pooled.survival) and found.rounds == pooled.rounds
    assert found.along.proposed == pooled.proposed
    c = found.example_confidence
    assert found.product == pytest.approx((c[0], c[0] * c[1], c[0] * c[1] * c[2], *found.product[3:]))
    assert all(a >= b for a, b in pairwise(found.product))
    assert 1 < found.example.accepted < 5
    found.draw()


def test_confidence_says_which_way_it_errs(subject):
    found = Confidence.measure(subject, quietly)
    for said, verdict in ((0.9, "promises too much"), (0.1, "promises too little"), (0.5, "is right")):
        along = Along((10, 5), (said, said), (0.5, 0.5), (10, 10), (said, said**2), (0.5, 0.25))
        assert verdict in replace(found, along=along).sentences()[0]
    assert confidence_module._short("a" * 40) == '"' + "a" * 13 + '…"'


def test_training(subject, make_draft, monkeypatch):
    monkeypatch.setattr(heads_module, "ANSWERS", 3)
    monkeypatch.setattr(heads_module, "STEPS", 4)
    monkeypatch.setattr(heads_module, "EVALUATE_EVERY", 2)
    given = make_draft(subject.model, num_hidden_layers=1)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    head = subject.model.get_output_embeddings().weight
    head.requires_grad_(True)
    one = replace(subject, draft=given, max_new_tokens=15, _known={})
    one.model.generation_config.eos_token_id, stops = None, one.model.generation_config.eos_token_id
    try:
        found = again(Heads.measure(one, quietly))
    finally:
        one.model.generation_config.eos_token_id = stops
    assert found.steps == 4 and all(len(values) == 4 for values in found.curves.values())
    assert set(found.curves) == {"loss", "cross_entropy", "total_variation", "confidence"}
    assert [look["step"] for look in found.held_out] == [0, 2, 4] and found.held_out[0] != found.held_out[-1]
    assert found.taus["before"] == found.taus["off"]  # W2 is zero before, and the body does not learn
    assert found.taus["given"] == one.dspark(quietly).evaluation.pooled.tau
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert head.requires_grad  # the target is as it was
    found.draw()


@pytest.mark.parametrize(("kind", "extra"), [("gated", "gate_proj"), ("rnn", "joint_proj")])
def test_fresh_heads_of_every_kind(subject, make_draft, kind, extra):
    given = make_draft(subject.model, markov_head_type=kind)
    fresh = heads_module._fresh(given, 0).markov_head
    for name in (extra, "markov_w1", "markov_w2"):
        assert not torch.equal(getattr(fresh, name).weight, getattr(given.markov_head, name).weight)
    assert not getattr(fresh, extra).bias.any() and not fresh.markov_w2.weight.any()


def test_fresh_heads_of_a_restricted_drafter(subject, draft):
    from dspark_fast.vocabulary import restricted

    narrow = restricted(draft, torch.arange(4, 90, 2))
    fresh = heads_module._fresh(narrow, 0)
    assert fresh.vocabulary is None and fresh.lm_head is draft.lm_head
    assert not fresh.markov_head.markov_w2.weight.any() and fresh.markov_head.markov_w1.weight.any()
    assert torch.equal(fresh.fc.weight, draft.fc.weight)
    like = heads_module._like(fresh, narrow)
    assert torch.equal(like.vocabulary, narrow.vocabulary) and like.fc.weight is not fresh.fc.weight


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (Positions, {"markov_rank": 0, "confidence_head_with_markov": False}, "no Markov head to switch off"),
        (Heads, {"markov_rank": 0, "confidence_head_with_markov": False}, "no Markov head to train"),
        (Sweep, {"enable_confidence_head": False}, "no confidence head to cut blocks by"),
        (Confidence, {"enable_confidence_head": False}, "no confidence head"),
    ],
)
def test_what_a_drafter_lacks_cannot_be_measured(subject, make_draft, kind, change, why):
    with pytest.raises(NotMeasurable, match=why):
        kind.measure(replace(subject, draft=make_draft(subject.model, **change), _known={}), quietly)


def test_small_drafter(model):
    drafter, name = small_drafter(model, None, None, None)
    assert name == "the target's first 2 of 4 layers" and drafter.block_size == 5
    assert small_drafter(model, None, None, 3)[1] == "the target's first 3 of 4 layers"
    with pytest.raises(ValueError, match="layers is 9: accepted is 1 to 4"):
        small_drafter(model, None, None, 9)
    with pytest.raises(ValueError, match="the drafter is the target itself"):
        small_drafter(model, model, "itself", None)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighed(subject):
    """What the worker finds of each way, in this process."""

    def load(settings, ways):
        parts = {"autoregressive": {"draft": None}, "dspark": {"small": None}, "plain": {"draft": None, "small": None}}
        return replace(subject, _known={}, **parts[next(iter(ways))])

    patch = pytest.MonkeyPatch()
    patch.setattr("dspark_fast.report.making.load_subject", load)
    try:
        yield {way: memory_worker.main(way, {"model": "any"}) for way in ("plain", "autoregressive", "dspark")}
    finally:
        patch.undo()


def test_memory_is_of_tensors_counted_once(subject, weighed):
    size = sum(parameter.nbytes for parameter in subject.model.parameters())
    size += sum(buffer.nbytes for buffer in {id(b): b for b in subject.model.buffers()}.values())
    own = sum(tensor.nbytes for tensor in (*subject.draft.parameters(), *subject.draft.buffers()))
    assert all(one["target"] == size for one in weighed.values())
    assert [one["drafter"] for one in weighed.values()] == [0, 0, own]  # first layers are the target's own
    heads, dim, layers = 2, subject.model.config.head_dim, 4
    read = weighed["plain"]["tokens"] - 1  # the last token is never read
    assert weighed["plain"]["target_cache"] == 2 * layers * heads * dim * 4 * read
    stats = generate(subject.model, subject.draft, subject.ids(0), max_new_tokens=NEW_TOKENS, off_switch=False).stats
    assert weighed["dspark"]["drafter_cache"] == stats.memory["drafter"] > 0
    assert weighed["autoregressive"]["drafter_cache"] > 0 == weighed["plain"]["drafter_cache"]
    assert all(one["peak"] >= one["libraries"] > 1e6 for one in weighed.values())


def test_memory(monkeypatch, weighed):
    from dspark_fast.report import memory as memory_module

    monkeypatch.setattr(memory_module, "_measured", lambda way, settings: dict(weighed[way]))
    found = again(Memory.measure(SimpleNamespace(to_dict=dict), quietly))
    assert [peak.way for peak in found.peaks] == ["plain", "autoregressive", "dspark"] and found.small == "3 layers"
    found.draw()
    peaks = (
        Peak("plain", 200_000_000, 0, 1, 0, 0, 300_000_000, 9),
        Peak("dspark", 200_000_000, 40_000_000, 1, 0, 0, 360_000_000, 9),
    )
    said = Memory("cuda:0", "none", peaks).sentences()
    assert "adds 40 MB to the target's 200 MB" in said[0] and "(+20 %)." in said[1]


def test_a_worker_that_fails_is_told(monkeypatch):
    from dspark_fast.report import memory as memory_module

    monkeypatch.setattr(memory_module.sys, "executable", "/bin/false")
    with pytest.raises(NotMeasurable, match="the process that weighs plain decoding failed: it ended with status 1"):
        memory_module._measured("plain", {})
