"""Where a row stops: stop strings and criteria through both doors, against transformers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria

from dspark_fast.drafters import DSparkDrafter, Noise
from dspark_fast.engine import loop
from dspark_fast.engine.packing import pack
from dspark_fast.engine.round import Sampling
from dspark_fast.engine.state import Limits
from dspark_fast.engine.stopping import Stopping, stop_string_criterion

NEW = 20
LENGTHS = (9, 6, 1, 8)
DOORS = ["ours", "transformers"]


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
def test_stop_strings(strings, text, scripted, unpadded, through):
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


def test_stop_strings_of_a_config(text, scripted, unpadded, through):
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


def test_a_chat_goes_on_behind_a_stop_string(text, through):
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
def test_a_criterion_of_somebodys_own(door, said, scripted, unpadded, through):
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
def test_time_that_is_up(door, said, through):
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False}
    over = MaxTimeCriteria(1.0, initial_timestamp=time.time() - 2)
    theirs = said.model.generate(said.ids, stopping_criteria=[over], **settings)
    assert theirs.shape[1] == 10
    out, _ = through(door, said.model, said.draft, said.ids, stopping_criteria=[over], **settings)
    assert torch.equal(out, theirs)
    out, _ = through(door, said.model, said.draft, said.ids, max_time=1e6, **settings)
    assert torch.equal(out, said.truth)


@pytest.mark.parametrize("door", DOORS)
def test_a_streamer_with_everything_else(door, text, streamer, scripted, through):
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


def test_scores_end_where_a_criterion_stops(said, scripted, unpadded, through):
    mine = After([said.new[0][6], said.new[2][3]], 9 + 15)
    settings = {"attention_mask": said.mask, "max_new_tokens": NEW, "do_sample": False, "stopping_criteria": [mine]}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "log_probs": True}
    guess = scripted(unpadded(said.truth, said.mask), right=0.9)
    out, stats = through("ours", said.model, guess, said.ids, **settings)
    assert len(out.scores) == out.log_probs.shape[1] == out.sequences.shape[1] - 9 == 15
    for row, count in enumerate(stats.new_tokens):
        assert all(bool(score[row].any()) == (at < count) for at, score in enumerate(out.scores))
