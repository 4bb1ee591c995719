"""Stopping criteria on runs of committed tokens: they stop where transformers' own, called token by token, stop."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria, MaxTimeCriteria

from dspark_fast.engine.stopping import Stopping, check_criteria, stop_string_criterion

PIECES = ("<pad>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .", "st", "op", "opera", "las", "topper", "to", "pped", "the")


@pytest.fixture(scope="module")
def tokenizer():
    """Tokens of one character and of several, so that a string begins and ends inside of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")


def ids(*pieces):
    return [PIECES.index(piece) for piece in pieces]


class Recording(StoppingCriteria):
    """Somebody's own: stops a row after a token of its choice, and keeps what it was shown."""

    def __init__(self, last=()):
        self.last = last
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None and input_ids.dtype == torch.long
        self.seen.append(input_ids.tolist())
        return torch.isin(input_ids[:, -1], torch.tensor(self.last, dtype=torch.long))


def theirs(criteria, prompt, tokens):
    """How many tokens transformers' own list of criteria lets stand, called as its loop does; None for all."""
    row = list(prompt)
    for count, token in enumerate(tokens, 1):
        row.append(token)
        if bool(StoppingCriteriaList(criteria)(torch.tensor([row]), None)):
            return count
    return None


STRINGS = {
    "one-token": (["a"], ["st", "op", "b"], 2),
    "overhang": (["las"], ["topper"], 1),
    "overhang-at-both-ends": (["a"], ["las", "topper", "b"], 2),
    "character-by-character": (["a"], [*"xstop."], 5),
    "begins-in-the-prompt": (["s", "t"], ["o", "pped"], 2),
    "begins-far-back": ([*"a s"], ["t", "o", "p"], 3),
    "in-the-prompt-already": ([*"stop"], ["a", "b"], None),
    "not-quite": (["s", "to"], ["a", "pped"], None),
    "two-in-a-run": (["a"], ["stop"[:1], "topper", "st", "op"], 2),
    "never": (["a"], ["the", " ", "the"], None),
}


@pytest.mark.floor
@pytest.mark.parametrize(("prompt", "output", "expected"), STRINGS.values(), ids=STRINGS)
@pytest.mark.parametrize("pads", [0, 3])
def test_stop_string_stops_where_it_does_in_transformers(prompt, output, expected, pads, tokenizer):
    prompt, output = ids(*["<pad>"] * pads, *prompt), ids(*output)
    criterion = stop_string_criterion("stop", tokenizer)
    assert theirs([criterion], prompt, output) == expected
    for size in (1, 2, 3, len(output)):  # in runs of any size
        stopping = Stopping([criterion], torch.tensor([prompt]), len(output))
        stood = None
        for start in range(0, len(output), size):
            found = stopping.first_stop(0, output[start : start + size])
            if found is not None:
                stood = start + found
                break
        assert stood == expected


@pytest.mark.floor
def test_random_rows_stop_as_in_transformers(tokenizer):
    """Rows of a batch, at their own pace, with several strings."""
    generator = torch.Generator().manual_seed(5)
    few = torch.tensor(ids("s", "t", "o", "p", "st", "op", "to", "pped", "topper", "las"))
    prompts = few[torch.randint(len(few), (6, 5), generator=generator)]
    output = few[torch.randint(len(few), (6, 40), generator=generator)].tolist()
    criteria = [stop_string_criterion(["stopp", "oooo", "pt"], tokenizer), Recording(ids("las"))]
    expected = [theirs(criteria, prompt, row) for prompt, row in zip(prompts.tolist(), output)]
    assert len(set(expected)) > 3

    stopping = Stopping(criteria, prompts, 40)
    at, ended = [0] * 6, [None] * 6
    while not all(ended):
        for row in range(6):
            if ended[row] is None:
                run = output[row][at[row] : at[row] + int(torch.randint(1, 6, (), generator=generator))]
                found = stopping.first_stop(row, run)
                at[row] += len(run) if found is None else found
                if found is not None or at[row] == 40:
                    ended[row] = (at[row] if found is not None else None,)
    assert [found for (found,) in ended] == expected


def test_a_criterion_is_shown_one_row_and_one_token_more_each_time():
    criterion = Recording(last=[9])
    stopping = Stopping([criterion], torch.tensor([[0, 0, 4], [5, 6, 7]]), 6)
    assert stopping.first_stop(1, [8, 3]) is None
    assert stopping.first_stop(0, []) is None
    assert stopping.first_stop(0, [2]) is None
    assert stopping.first_stop(1, [1, 9, 2, 9]) == 2
    assert criterion.seen == [
        [[5, 6, 7, 8]],
        [[5, 6, 7, 8, 3]],
        [[0, 0, 4, 2]],
        [[5, 6, 7, 8, 3, 1]],
        [[5, 6, 7, 8, 3, 1, 9]],
    ]


def test_tokens_that_do_not_stand_are_forgotten():
    """The loop may go on with the row, as for a criterion that a caller overrules."""
    criterion = Recording(last=[9])
    stopping = Stopping([criterion], torch.tensor([[5]]), 6)
    assert stopping.first_stop(0, [1, 9, 2]) == 2
    stopping.first_stop(0, [3])
    assert criterion.seen[-1] == [[5, 1, 9, 3]]


def test_every_criterion_is_asked():
    """One that counts its calls counts as in plain decoding."""
    first, second = Recording(last=[9]), Recording(last=[8])
    stopping = Stopping([first, second], torch.tensor([[5]]), 6)
    assert stopping.first_stop(0, [9]) == 1
    assert len(first.seen) == len(second.seen) == 1


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True])], ids=["bool", "scalar", "row"])
def test_answers_of_any_shape_count(answer):
    class Always(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return answer

    assert Stopping([Always()], torch.tensor([[5]]), 3).first_stop(0, [1, 2]) == 1


@pytest.mark.floor
def test_time_that_is_up_stops_at_the_next_token():
    over = Stopping([MaxTimeCriteria(1.0, time.time() - 2)], torch.tensor([[5]]), 3)
    assert over.first_stop(0, [1, 2]) == 1
    left = Stopping([MaxTimeCriteria(1e6)], torch.tensor([[5]]), 3)
    assert left.first_stop(0, [1, 2]) is None


def test_without_criteria_nothing_stops():
    assert Stopping([], torch.tensor([[5]]), 3).first_stop(0, [1, 2]) is None


@pytest.mark.parametrize("strings", ["", [], ["a", ""], [3], [None]], ids=repr)
def test_empty_stop_strings_are_refused(strings, tokenizer):
    with pytest.raises(ValueError, match=r"stop_strings is .*none empty"):
        stop_string_criterion(strings, tokenizer)


def test_stop_strings_need_a_tokenizer(tokenizer):
    with pytest.raises(ValueError, match=r"stop_strings is 'a'.*tokenizer"):
        stop_string_criterion("a", None)
    assert isinstance(stop_string_criterion(["a", "st"], tokenizer), StopStringCriteria)


def test_criterion_that_reads_the_scores_is_refused():
    with pytest.raises(ValueError, match=r"ConfidenceCriteria reads the scores"):
        check_criteria([Recording(), ConfidenceCriteria(0.5)])
    check_criteria([Recording(), MaxTimeCriteria(1.0)])
