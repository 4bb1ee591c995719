"""All that generate() takes besides a prompt, through both doors, against what transformers does with it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.logits_process import ClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import ConfidenceCriteria, MaxTimeCriteria

import dspark_fast
from dspark_fast import loop, stats
from dspark_fast.drafters import DSparkDrafter, Noise
from dspark_fast.outputs import Outputs
from dspark_fast.packing import pack
from dspark_fast.round import Sampling
from dspark_fast.state import RUN, TAKEN, Limits
from dspark_fast.stopping import Stopping, stop_string_criterion
from dspark_fast.target import RaggedTarget

NEW = 20
LENGTHS = (9, 6, 1, 8)
DOORS = ["ours", "transformers"]
# What decoding() takes; the rest goes to model.generate in either case.
OURS = ("verification", "seed", "log_probs", "stop_strings", "tokenizer", "streamer", "off_switch")


def through(door, model, draft, ids, **settings):
    """generate(), or model.generate with decoding(); the result and its stats."""
    if door == "ours":
        out = dspark_fast.generate(model, draft, ids, **settings)
        return out, out.stats
    custom = dspark_fast.decoding(draft, **{name: settings.pop(name) for name in OURS if name in settings})
    out = model.generate(ids, custom_generate=custom, **settings)
    assert out.stats is custom.stats
    return out, out.stats


@pytest.fixture(scope="module")
def said(make_target, make_draft, prompts):
    """A target, its drafter, a left-padded batch, and the continuations that it has of itself."""
    model, batch = make_target(), prompts(LENGTHS)
    ids, mask = batch.input_ids, batch.attention_mask
    truth = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    new = truth[:, ids.shape[1] :].tolist()
    return SimpleNamespace(model=model, draft=make_draft(model), ids=ids, mask=mask, truth=truth, new=new)


@torch.no_grad()
def plainly(model, sequences):
    """Logits of each row read alone, in one pass and without padding, put where the padded row has them."""
    logits = torch.zeros(*sequences.shape, model.config.vocab_size)
    for row, length in enumerate(LENGTHS):
        logits[row, max(LENGTHS) - length :] = model(sequences[row, None, max(LENGTHS) - length :]).logits[0]
    return logits


class Nudge(LogitsProcessor):
    """Somebody's own: after an even token it likes odd ones, and the more so the longer the row."""

    stateless = True

    def __init__(self, strength=1.0):
        self.strength = strength

    def __call__(self, input_ids, scores):
        odd = torch.arange(scores.shape[1]) % 2 == 1
        likes = (input_ids[:, -1:] % 2 == 0) * input_ids.shape[1] / 8 * self.strength
        return scores + likes * odd


# By name: settings, as a function of what the target says without them.
PROCESSORS = {
    "repetition-penalty": lambda new: {"repetition_penalty": 1.8},
    "no-repeat-ngram": lambda new: {"no_repeat_ngram_size": 1},
    "least-length": lambda new: {"min_new_tokens": 9, "eos_token_id": new[0][2]},
    "bad-words": lambda new: {"bad_words_ids": [[new[0][1]], new[1][2:4]]},
    "suppressed": lambda new: {"suppress_tokens": [new[0][0], new[3][4]]},
    "suppressed-at-first": lambda new: {"begin_suppress_tokens": [new[0][0], new[1][0]]},
    "bias": lambda new: {"sequence_bias": {(new[0][3],): -9.0, tuple(new[1][4:6]): -9.0}},
    "decay": lambda new: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": 7},
    "forced-end": lambda new: {"forced_eos_token_id": 7, "eos_token_id": 7},
    "like-the-prompt": lambda new: {"encoder_repetition_penalty": 2.0},
    "allowed": lambda new: {"prefix_allowed_tokens_fn": lambda row, ids: range(row, 97, 2 + int(ids[-1]) % 2)},
    "own": lambda new: {"logits_processor": [Nudge()]},
    "several": lambda new: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "logits_processor": [Nudge()],
        "min_new_tokens": 5,
        "eos_token_id": [new[0][2], new[1][2]],
    },
}


@pytest.mark.floor
@pytest.mark.parametrize("settings", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_when_greedy(settings, said, scripted, unpadded):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False, **settings(said.new)}
    truth = said.model.generate(said.ids, **settings)
    assert not torch.equal(truth, said.truth), "the settings say nothing here"
    guess = scripted(unpadded(truth, said.mask), right=0.6)
    for door, draft in (("ours", guess), ("transformers", said.draft)):
        out, stats = through(door, said.model, draft, said.ids, **settings)
        assert torch.equal(out, truth)
    assert stats.rounds > 3


CUTS = {
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.03},
    "eta": {"eta_cutoff": 0.3},
    "normalised": {"renormalize_logits": True, "temperature": 1.4, "top_k": 5},
    "all": {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "temperature": 1.2, "top_k": 30},
    "penalty": {"repetition_penalty": 1.5, "temperature": 1.2, "top_p": 0.8},
    "own": {"logits_processor": [Nudge()], "min_p": 0.05},
}


@pytest.mark.floor
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_processors_when_coupled(cuts, said, scripted, unpadded, processors_of):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": True, "top_k": 0, **cuts}
    ours = {"verification": "coupled", "seed": 5}
    truth, _ = through("ours", said.model, None, said.ids, **ours, **settings)
    plain, _ = through("ours", said.model, None, said.ids, **ours, **{**settings, **dict.fromkeys(cuts), "top_k": 0})
    if cuts != CUTS["normalised"]:
        assert not torch.equal(truth, plain), "the cuts say nothing here"
    guess = scripted(unpadded(truth, said.mask), right=0.6)
    for door, draft in (("ours", guess), ("transformers", said.draft)):
        out, stats = through(door, said.model, draft, said.ids, **ours, **settings)
        assert torch.equal(out, truth) and stats.mode == "coupled"
    # No token that transformers' own processors forbid.
    processors = processors_of(said.model, said.ids, **settings)
    logits = plainly(said.model, truth)
    for at in range(9, 9 + NEW):
        scores = processors(truth[:, :at], logits[:, at - 1].clone())
        assert (scores.gather(1, truth[:, at, None]) > -torch.inf).all()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"repetition_penalty": 1.6}, id="repetition-penalty"),
        pytest.param({"logits_processor": [Nudge(3.0)], "epsilon_cutoff": 0.02}, id="own"),
    ],
)
def test_rejection_keeps_the_law_with_processors(settings, tiny, processors_of, law, g_test):
    model, draft = tiny
    rows, depth, ids = 2000, 3, torch.tensor([[1, 3, 2, 4]])
    settings = {"do_sample": True, "max_new_tokens": depth, "top_k": 0, "temperature": 2.0, **settings}
    out, stats = through("ours", model, draft, ids, num_return_sequences=rows, seed=20, **settings)
    counts = {}
    for row in out[:, 4:].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert 0.15 < stats.accepted[0] / stats.proposed[0] < 0.9
    truth = law(model, ids, processors_of(model, ids, **settings), depth)
    assert g_test(counts, truth, rows) > 1e-6
    without = {**settings, **dict.fromkeys(("repetition_penalty", "logits_processor"))}
    assert g_test(counts, law(model, ids, processors_of(model, ids, **without), depth), rows) < 1e-6


# --- where a row stops ---


@pytest.fixture(scope="module")
def text(characters, make_target, prompts, make_draft):
    """A target of characters with no stop token, a left-padded batch, and what it goes on with."""
    tokenizer = characters.tokenizer
    model = make_target(fresh=True, vocab_size=len(tokenizer) + 4, initializer_range=0.35)
    # letters alone, so that what is said is text too
    suppress = [token for token in range(model.config.vocab_size) if not 5 <= token < len(tokenizer)]
    generator = torch.Generator().manual_seed(7)
    width = max(LENGTHS)
    mask = (torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.where(mask.bool(), torch.randint(40, 70, (4, width), generator=generator), 3)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": 3,
        "suppress_tokens": suppress,
    }
    truth = model.generate(ids, **settings)
    lines = [tokenizer.decode(row[width:]) for row in truth]
    assert min(len(set(line)) for line in lines) > 5
    return SimpleNamespace(
        model=model,
        draft=make_draft(model),
        tokenizer=tokenizer,
        ids=ids,
        mask=mask,
        width=width,
        settings=settings,
        truth=truth,
        lines=lines,
        prompts=[tokenizer.decode(row[width - length :]) for row, length in zip(ids, LENGTHS)],
    )


def ends(truth, width, criterion):
    """New tokens of each row up to where a criterion, shown the row alone, says stop; all of them if it never does."""
    counts = []
    for row in truth:
        stops = (at for at in range(width + 1, len(row) + 1) if bool(criterion(row[None, :at], None)))
        counts.append(next(stops, len(row)) - width)
    return counts


def stopped(truth, width, counts, pad):
    """Rows cut after ``counts`` new tokens and padded from there on."""
    cut = truth[:, : width + max(counts)].clone()
    for row, count in zip(cut, counts):
        row[width + count :] = pad
    return cut


STRINGS = {
    "one": lambda text: text.lines[0][4:7],
    "several": lambda text: [text.lines[0][7:9], text.lines[1][2:6], text.lines[2][10]],
    "from-the-prompt": lambda text: [text.prompts[0][-2:] + text.lines[0][:2], text.lines[3][5:8]],
    "in-the-prompt-alone": lambda text: [text.prompts[0][2:5]],
    "the-first-token": lambda text: [line[0] for line in text.lines],
}


@pytest.mark.floor
@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
def test_stop_strings(strings, text, scripted, unpadded):
    strings = strings(text)
    criterion = StopStringCriteria(text.tokenizer, strings)
    counts = ends(text.truth, text.width, criterion)
    given = {"stop_strings": strings, "tokenizer": text.tokenizer}
    theirs = text.model.generate(text.ids, **given, **text.settings)
    assert theirs.shape[1] == text.width + max(counts)  # transformers stops when all rows have, the ragged ones go on
    expected = stopped(text.truth, text.width, counts, 3)
    guess = scripted(unpadded(text.truth, text.mask), right=0.6)
    for door, draft in (("ours", guess), ("transformers", guess), ("ours", text.draft), ("transformers", None)):
        out, stats = through(door, text.model, draft, text.ids, **given, **text.settings)
        assert torch.equal(out, expected)
        assert stats.new_tokens == counts


def test_the_stop_strings_differ_in_where_rows_end(text):
    """Or the test before this one says little."""
    found = {
        name: ends(text.truth, text.width, StopStringCriteria(text.tokenizer, make(text)))
        for name, make in STRINGS.items()
    }
    assert found["one"][0] == 7 and len(set(found["several"])) > 2
    assert found["from-the-prompt"][0] <= 2 and found["from-the-prompt"][3] <= 8
    assert found["in-the-prompt-alone"][0] == NEW
    assert found["the-first-token"] == [1] * 4


def test_stop_strings_of_a_config(text, scripted, unpadded):
    """transformers has no tokenizer for a callable, so it refuses them; the caller's config stays as it is."""
    strings = STRINGS["several"](text)
    settings = {name: value for name, value in text.settings.items() if name != "attention_mask"}
    config = GenerationConfig(stop_strings=strings, **settings)
    given = {"attention_mask": text.mask, "tokenizer": text.tokenizer, "generation_config": config}
    theirs = text.model.generate(text.ids, **given)
    counts = ends(text.truth, text.width, StopStringCriteria(text.tokenizer, strings))
    out, _ = through("ours", text.model, text.draft, text.ids, **given)
    assert torch.equal(out, stopped(theirs, text.width, counts, 3))
    assert config.stop_strings == strings
    # One that is given goes before the config's, as in transformers.
    other = STRINGS["one"](text)
    counts = ends(text.truth, text.width, StopStringCriteria(text.tokenizer, other))
    out, _ = through("ours", text.model, text.draft, text.ids, stop_strings=other, **given)
    assert torch.equal(out, stopped(text.truth, text.width, counts, 3))
    with pytest.raises(ValueError, match=r"stop_strings is .*tokenizer"):
        through("ours", text.model, text.draft, text.ids, **{**given, "tokenizer": None})


@torch.no_grad()
def test_stop_strings_read_one_round_late(text, on_a_cpu):
    """The device has gone on past the string before the host has seen it."""
    ids, lengths = pack(text.ids, text.mask)
    truth = text.model.generate(text.ids, **{**text.settings, "suppress_tokens": None})
    strings = [text.tokenizer.decode(row[text.width + 3 + at : text.width + 5 + at]) for at, row in enumerate(truth)]
    strings = [string for string in strings if len(string) == 2]
    counts = ends(truth, text.width, StopStringCriteria(text.tokenizer, strings))
    assert len(set(counts)) > 1 and min(counts) < NEW - 8
    noise = Noise("greedy", torch.zeros(4), torch.zeros(4, dtype=torch.long))

    def decode(graph, strings):
        criteria = [stop_string_criterion(strings, text.tokenizer)] if strings else []
        plan = loop.Plan(
            Sampling(noise),
            Limits(NEW, torch.tensor([], dtype=torch.long)),
            stopping=Stopping(criteria, text.ids, NEW) if criteria else None,
            on_commit=heard.append,
            graph=graph,
            keep=True,
        )
        return loop.decode(text.model, DSparkDrafter(text.draft), ids, lengths, plan)

    everything = [row[text.width :].tolist() for row in truth]
    for wanted, graph in ((strings, False), (strings, True), (None, True), (strings, True)):
        heard: list[list[list[int]]] = []
        out = decode(graph, wanted)
        cut = counts if wanted else [NEW] * 4
        assert out.rows == [row[:count] for row, count in zip(everything, cut)]
        assert [[token for rows in heard for token in rows[at]] for at in range(4)] == out.rows
        assert out.stats.new_tokens == cut
        assert out.past.cache.lengths.tolist() == [length + count - 1 for length, count in zip(LENGTHS, cut)]
    assert len(on_a_cpu) == 1


def test_a_chat_goes_on_behind_a_stop_string(text):
    """What the device wrote past it is not part of the past."""
    given = {"stop_strings": STRINGS["several"](text), "tokenizer": text.tokenizer, "return_dict_in_generate": True}
    first, stats = through(
        "ours", text.model, text.draft, text.ids[:1], **given, **{**text.settings, "attention_mask": None}
    )
    more = torch.cat([first.sequences, torch.tensor([[44, 45, 46]])], dim=1)
    settings = {**text.settings, "attention_mask": None}
    truth = text.model.generate(more, **settings)
    out, stats = through("ours", text.model, text.draft, more, past_key_values=first.past_key_values, **settings)
    assert torch.equal(out, truth) and stats.reused == [first.sequences.shape[1] - 1]


class After(StoppingCriteria):
    """Somebody's own: a row stops after some tokens, or once it is long."""

    def __init__(self, tokens, length):
        self.tokens, self.length = torch.tensor(tokens), length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens) | (input_ids.shape[1] >= self.length)


@pytest.mark.floor
@pytest.mark.parametrize("door", DOORS)
def test_a_criterion_of_somebodys_own(door, said, scripted, unpadded):
    mine = After([said.new[0][6], said.new[2][3]], 9 + 15)
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [mine]}
    counts = ends(said.truth, 9, mine)
    assert len(set(counts)) > 2 and max(counts) == 15
    theirs = said.model.generate(said.ids, **settings)
    assert torch.equal(theirs, said.truth[:, : 9 + 15])
    for draft in (scripted(unpadded(said.truth, said.mask), right=0.6), said.draft, None):
        out, stats = through(door, said.model, draft, said.ids, **settings)
        assert torch.equal(out, stopped(theirs, 9, counts, 0)) and stats.new_tokens == counts
        # The device has learnt of it: no round has gone on with the row.
        known = getattr(draft, "known", LENGTHS)
        assert all(length <= at + count + 5 for length, at, count in zip(known, LENGTHS, counts))


@pytest.mark.floor
@pytest.mark.parametrize("door", DOORS)
def test_time_that_is_up(door, said):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False}
    over = MaxTimeCriteria(1.0, initial_timestamp=time.time() - 2)
    theirs = said.model.generate(said.ids, stopping_criteria=[over], **settings)
    assert theirs.shape[1] == 10
    out, _ = through(door, said.model, said.draft, said.ids, stopping_criteria=[over], **settings)
    assert torch.equal(out, theirs)
    out, _ = through(door, said.model, said.draft, said.ids, max_time=1e6, **settings)
    assert torch.equal(out, said.truth)


@pytest.mark.parametrize("door", DOORS)
def test_a_streamer_with_everything_else(door, text, streamer, scripted):
    """What was thrown away behind a stop string is not told."""
    settings = {**text.settings, "repetition_penalty": 1.2, "attention_mask": None}
    ids = text.ids[:1]
    longer = text.model.generate(ids, **settings)
    given = {"stop_strings": text.tokenizer.decode(longer[0, 9 + 7 : 9 + 9]), "tokenizer": text.tokenizer}
    theirs, ours = streamer(), streamer()
    text.model.generate(ids, streamer=theirs, **given, **settings)
    assert 4 <= len(theirs.heard) <= 1 + 9 + 1
    guess = scripted([longer[0].tolist()], right=0.8)
    through(door, text.model, guess, ids, streamer=ours, **given, **settings)
    assert ours.heard == theirs.heard


# --- what comes back besides the tokens ---


@pytest.mark.floor
@pytest.mark.parametrize("door", DOORS)
def test_scores_and_logits_are_those_of_transformers(door, said, scripted, unpadded):
    stop = said.new[1][5]
    settings = {
        "attention_mask": said.mask,
        "max_new_tokens": NEW,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "suppress_tokens": [3, 4],
        "eos_token_id": stop,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    theirs = said.model.generate(said.ids, **settings)
    guess = scripted(unpadded(theirs.sequences, said.mask), right=0.6)
    for draft in (guess, said.draft, None):
        ours, stats = through(door, said.model, draft, said.ids, **settings)
        assert torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            our, their = getattr(ours, name), getattr(theirs, name)
            assert len(our) == len(their) and {one.dtype for one in our} == {torch.float32}
            for row, count in enumerate(stats.new_tokens):
                for at in range(len(our)):
                    if at < count:
                        torch.testing.assert_close(our[at][row], their[at][row], rtol=1e-4, atol=1e-4)
                    else:
                        assert not our[at][row].any()
        assert (ours.scores[0] == -torch.inf).sum() == 8 and torch.stack(ours.logits).isfinite().all()
        for normalised in (False, True):
            mine, other = (
                said.model.compute_transition_scores(one.sequences, one.scores, normalize_logits=normalised)
                for one in (ours, theirs)
            )
            for row, count in enumerate(stats.new_tokens):
                torch.testing.assert_close(mine[row, :count], other[row, :count], rtol=1e-4, atol=1e-4)
    assert len(set(stats.new_tokens)) > 1


@pytest.mark.floor
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "cuts",
    [
        {"top_k": 7, "temperature": 1.3},
        {"top_p": 0.7, "repetition_penalty": 1.4},
        {"typical_p": 0.8, "temperature": 0.7},
    ],
    ids=["top-k", "top-p", "typical"],
)
def test_scores_when_sampling(cuts, verification, said, processors_of):
    """transformers draws otherwise: its processors and its model are asked about our rows."""
    settings = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, **cuts}
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked |= {"attention_mask": said.mask, "verification": verification, "seed": 2}
    out, _ = through("ours", said.model, said.draft, said.ids, **asked, **settings)
    processors = processors_of(said.model, said.ids, attention_mask=said.mask, **settings)
    logits = plainly(said.model, out.sequences)
    for at in range(8):
        own = logits[:, 8 + at]
        torch.testing.assert_close(out.logits[at], own, rtol=1e-4, atol=1e-4)
        expected = processors(out.sequences[:, : 9 + at], own.clone())
        assert torch.equal(out.scores[at] == -torch.inf, expected == -torch.inf)
        torch.testing.assert_close(out.scores[at], expected, rtol=1e-4, atol=1e-4)
    scores = said.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert scores.isfinite().all() and (scores <= 0).all()


@pytest.mark.parametrize("door", DOORS)
def test_log_probs_are_the_targets_own(door, said):
    stop = said.new[1][5]
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": True, "top_k": 5, "temperature": 0.5}
    settings |= {"repetition_penalty": 1.2, "return_dict_in_generate": True, "eos_token_id": stop, "seed": 4}
    out, stats = through(door, said.model, said.draft, said.ids, log_probs=True, **settings)
    assert out.log_probs.dtype == torch.float32 and out.log_probs.shape == (4, max(stats.new_tokens))
    assert out.scores is None and out.logits is None
    expected = plainly(said.model, out.sequences)[:, 8:-1].log_softmax(-1).gather(2, out.sequences[:, 9:, None])[..., 0]
    for count, given, true in zip(stats.new_tokens, out.log_probs, expected):
        torch.testing.assert_close(given[:count], true[:count], rtol=1e-4, atol=1e-4)
        assert not given[count:].any()
    plain, _ = through(door, said.model, said.draft, said.ids, **settings)
    assert plain.log_probs is None and torch.equal(plain.sequences, out.sequences)


def test_scores_end_where_a_criterion_stops(said, scripted, unpadded):
    mine = After([said.new[0][6], said.new[2][3]], 9 + 15)
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [mine]}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "log_probs": True}
    guess = scripted(unpadded(said.truth, said.mask), right=0.9)
    out, stats = through("ours", said.model, guess, said.ids, **settings)
    assert len(out.scores) == out.log_probs.shape[1] == out.sequences.shape[1] - 9 == 15
    for row, count in enumerate(stats.new_tokens):
        assert all(bool(score[row].any()) == (at < count) for at, score in enumerate(out.scores))


def test_what_is_kept_is_what_was_taken():
    """Not a view of the whole round, which would stay in memory with it."""
    outputs = Outputs(2, ["scores", "logits"])
    logits = torch.randn(2, 6, 40)
    report = torch.zeros(2, RUN + 6, dtype=torch.long)
    report[:, TAKEN] = torch.tensor([1, 2])
    outputs.keep(logits, logits, report, None)
    before = logits.clone()
    logits.fill_(9.0)
    found = outputs.stacked([1, 2])
    for name in ("scores", "logits"):
        assert torch.equal(found[name][0], before[:, 0]) and torch.equal(found[name][1][1], before[1, 1])
        kept = [one.untyped_storage().nbytes() for row in outputs._kept[name] for one in row]
        assert max(kept) <= 2 * 40 * 4


@pytest.mark.parametrize("door", DOORS)
def test_log_probs_need_a_dictionary(door, said):
    runs = []
    handle = said.model.register_forward_pre_hook(lambda module, args: runs.append(1))
    with pytest.raises(ValueError, match=r"log_probs is True.*return_dict_in_generate=True"):
        through(door, said.model, said.draft, said.ids, log_probs=True, max_new_tokens=4, do_sample=False)
    handle.remove()
    assert not runs


@pytest.mark.parametrize("part", ["prefill", "verify"])
def test_no_second_is_counted_twice(part, said, monkeypatch):
    """A pass of a tenth of a second, under a clock that stands still otherwise."""
    now = [0.0]
    work = getattr(RaggedTarget, part)

    def slow(*args):
        now[0] += 0.1
        return work(*args)

    monkeypatch.setattr(RaggedTarget, part, slow)
    for module in (loop, stats):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    out = dspark_fast.generate(said.model, said.draft, said.ids, max_new_tokens=6, do_sample=False)
    seconds = out.stats.seconds
    parts = {"prefill": 0.0, "verify": 0.0, "draft": 0.0, "bookkeeping": 0.0, "plain": 0.0, "graph": 0.0}
    parts[part] = 0.1 if part == "prefill" else 0.1 * out.stats.rounds
    assert vars(seconds) == pytest.approx(parts)


# --- the same row, wherever it stands ---


@pytest.mark.floor
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_four_return_sequences_each_come_again_from_their_seed(verification, said, unpadded):
    settings = {"do_sample": True, "max_new_tokens": 10, "verification": verification, "repetition_penalty": 1.2}
    settings |= {"temperature": 1.2, "top_k": 20}
    ids, mask = said.ids[:2], said.mask[:2]
    out, stats = through("ours", said.model, said.draft, ids, attention_mask=mask, num_return_sequences=4, **settings)
    assert out.shape == (8, 19) and len(set(stats.seeds)) == 8
    rows = unpadded(out, mask.repeat_interleave(4, 0))
    assert len({tuple(row) for row in rows}) == 8
    for row, seed in zip(rows, stats.seeds):
        again, _ = through("transformers", said.model, said.draft, torch.tensor([row[:-10]]), seed=[seed], **settings)
        assert again[0].tolist() == row


MODES = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "verification": "coupled", "temperature": 1.3, "top_k": 30},
    "rejection": {"do_sample": True, "verification": "rejection", "temperature": 1.3, "top_k": 30},
}


@pytest.mark.floor
@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_the_same_wherever_it_stands(mode, said, unpadded):
    """Alone; in another row; while its neighbours end one after another; and in a batch that they have left."""
    sampled = MODES[mode]["do_sample"]
    settings = {"max_new_tokens": 24, "repetition_penalty": 1.2, **MODES[mode]}
    seeds = [5, 6, 7, 8]

    def run(order, **more):
        given = {"attention_mask": said.mask[order], **({"seed": [seeds[row] for row in order]} if sampled else {})}
        out, stats = through("ours", said.model, said.draft, said.ids[order], **given, **settings, **more)
        return dict(zip(order, unpadded(out, said.mask[order]))), stats

    whole, _ = run([0, 1, 2, 3])
    # Tokens that some rows say early and others never, so that those leave.
    new = {row: line[LENGTHS[row] :] for row, line in whole.items()}
    stops = [new[0][4], new[2][8]]
    ending, stats = run([0, 1, 2, 3], eos_token_id=stops)
    counts = stats.new_tokens
    assert len(set(counts)) > 2
    for order in ([3, 1, 0, 2], [1, 3], [3, 0]):
        turned, _ = run(order)
        assert all(turned[row] == whole[row] for row in order)
    for row in range(4):
        alone, _ = run([row])
        assert alone[row] == whole[row]
        alone, stats = run([row], eos_token_id=stops)
        end = LENGTHS[row] + counts[row]
        assert stats.new_tokens == [counts[row]]
        assert alone[row] == ending[row][:end] == whole[row][:end]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_16_bit(mode, dtype, make_target, make_draft, prompts):
    model = make_target(fresh=True).to(dtype)
    draft, batch = make_draft(model).to(dtype), prompts(LENGTHS)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 8, "repetition_penalty": 1.2, **MODES[mode]}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "log_probs": True}
    out, stats = through("ours", model, draft, batch.input_ids, **settings)
    assert out.sequences.shape == (4, 17) and stats.new_tokens == [8] * 4
    assert {one.dtype for one in (*out.scores, *out.logits, out.log_probs)} == {torch.float32}
    assert torch.stack(out.logits).isfinite().all() and out.log_probs.isfinite().all()
    for at, scores in enumerate(out.scores):
        said = scores.gather(1, out.sequences[:, 9 + at, None])[:, 0]
        assert (said > -torch.inf).all()
        if mode == "greedy":
            assert torch.equal(said, scores.amax(1))


# --- what cannot be ---

# Through generate() these are in test_requests.py.
REFUSED = {
    "beams": ({"num_beams": 2}, r"num_beams is 2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha is 0\.6.*contrastive search"),
    "guidance": ({"guidance_scale": 1.5}, r"guidance_scale is 1\.5"),
    "guidance-by-hand": (
        {"logits_processor": [ClassifierFreeGuidanceLogitsProcessor(1.5)]},
        r"classifier-free guidance",
    ),
    "constraints": ({"constraints": [object()]}, r"constrained beam search"),
    "dola": ({"dola_layers": "low"}, r"dola_layers is 'low'"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens is 3"),
    "synth-id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)},
        r"SynthIDTextWatermarkLogitsProcessor remembers",
    ),
    "scores-of-each-step": ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, r"ConfidenceCriteria"),
    "hidden-states": ({"output_hidden_states": True, "return_dict_in_generate": True}, r"output_hidden_states"),
}


@pytest.mark.floor
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_through_transformers_door(settings, message, said):
    runs = []
    handles = [part.register_forward_pre_hook(lambda *_: runs.append(1)) for part in (said.model, said.draft)]
    with pytest.raises(ValueError, match=message):
        through("transformers", said.model, said.draft, said.ids, max_new_tokens=5, **{"do_sample": False, **settings})
    for handle in handles:
        handle.remove()
    assert not runs
