"""Logits processors over a block: every position as transformers' own processors have it for that very prefix."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

from dspark_fast.engine.processors import STATELESS, Processors, RepetitionPenalty, check_processors, split

VOCABULARY = 31
WIDTH = 7  # of the prompt
PAD = 5  # a token that also occurs in the text
EOS = torch.tensor([2, 9])


class OnlyTheLast(LogitsProcessor):
    """Somebody's own: neighbours of the last token are likelier, and an even one forbids some."""

    stateless = True

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1:]
        columns = torch.arange(scores.shape[-1])
        scores = scores - (columns - last).abs() / 3
        return scores.masked_fill((columns % 3 == 1) & (last % 2 == 0), -math.inf)


class TableOfRows(LogitsProcessor):
    """Somebody's own that knows each row by its place."""

    stateless = True

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, input_ids, scores):
        return scores + self.rows[:, None] * torch.sin(input_ids.sum(1, keepdim=True).float())


def case(batch, drafts, *, new=(0, 3, 1, 6), padding=(2, 0, 5, 1), counts=None, failed=(), pad=PAD, tokens=VOCABULARY):
    """A round: rows of unequal padding and output, few tokens in them so that they repeat."""
    generator = torch.Generator().manual_seed(4)
    padding, new = torch.tensor(padding[:batch]), torch.tensor(new[:batch])
    ids = torch.randint(0, 12, (batch, WIDTH), generator=generator)
    columns = torch.arange(WIDTH)
    ids = torch.where(columns < padding[:, None], pad + columns % 2, ids)  # what stands in the padding is anybody's
    output = torch.randint(0, 12, (batch, 8), generator=generator)
    lengths = WIDTH - padding + new
    packed = torch.full((batch, WIDTH + 8), 30)  # behind a row's end stands what must not be read
    for row in range(batch):
        prompt = ids[row, padding[row] :]
        packed[row, : lengths[row]] = torch.cat([prompt, output[row, : new[row]]])
    proposed = torch.randint(0, 12, (batch, drafts), generator=generator)
    for row, slot in failed:
        proposed[row, slot] = -1
    counts = torch.full((batch,), drafts) if counts is None else torch.tensor(counts[:batch]).clamp(max=drafts)
    logits = torch.randn(batch, drafts + 1, tokens, generator=generator) * 4
    return SimpleNamespace(
        ids=ids, padding=padding, logits=logits, tokens=packed, lengths=lengths, drafts=proposed, counts=counts
    )


def plain(processors, at, *, temperature=1.0, before=lambda row: None):
    """transformers' processors on each explicit prefix, in a batch whose rows are all alike."""
    out = at.logits.clone()
    batch, positions, _ = out.shape
    for row in range(batch):
        before(row)
        for slot in range(int(at.counts[row]) + 1):
            if (at.drafts[row, :slot] < 0).any():
                break
            prefix = torch.cat(
                [
                    at.ids[row, : at.padding[row]],
                    at.tokens[row, : at.lengths[row]],
                    at.drafts[row, :slot],
                ]
            )
            scores = at.logits[row, slot].expand(batch, -1).clone()
            out[row, slot] = LogitsProcessorList(processors)(prefix.expand(batch, -1), scores)[row] * temperature
    return out


def ours(processors, at, **settings):
    logits, tokens, drafts = at.logits.clone(), at.tokens.clone(), at.drafts.clone()
    found = Processors(processors, at.ids, at.padding, **settings)(
        at.logits, at.tokens, at.lengths, at.drafts, at.counts
    )
    assert torch.equal(at.logits, logits) and torch.equal(at.tokens, tokens) and torch.equal(at.drafts, drafts)
    return found


KINDS = {
    "no-repeat-ngram": lambda at: [theirs.NoRepeatNGramLogitsProcessor(2)],
    "min-length": lambda at: [theirs.MinLengthLogitsProcessor(WIDTH + 4, EOS)],
    "min-new-tokens": lambda at: [theirs.MinNewTokensLengthLogitsProcessor(WIDTH, 4, EOS)],
    "sequence-bias": lambda at: [
        theirs.SequenceBiasLogitsProcessor([[[3], 2.0], *([[a, a + 1], -3.0] for a in range(1, 12))])
    ],
    "bad-words": lambda at: [theirs.NoBadWordsLogitsProcessor([[4], *([a, 7] for a in range(6))])],
    "suppress": lambda at: [theirs.SuppressTokensLogitsProcessor([1, 8])],
    "suppress-at-begin": lambda at: [theirs.SuppressTokensAtBeginLogitsProcessor([1, 8], WIDTH)],
    "forced-eos": lambda at: [theirs.ForcedEOSTokenLogitsProcessor(WIDTH + 2, EOS)],
    "decay": lambda at: [theirs.ExponentialDecayLengthPenalty((1, 1.3), EOS, WIDTH)],
    "encoder-ngram": lambda at: [theirs.EncoderNoRepeatNGramLogitsProcessor(1, at.ids)],
    "encoder-repetition": lambda at: [theirs.EncoderRepetitionPenaltyLogitsProcessor(1.7, at.ids)],
    "watermark": lambda at: [theirs.WatermarkLogitsProcessor(VOCABULARY, "cpu")],
    "own": lambda at: [OnlyTheLast()],
    "own-table": lambda at: [TableOfRows(torch.arange(1.0, len(at.ids) + 1))],
    "top-h": lambda at: [theirs.TemperatureLogitsWarper(0.7), theirs.TopHLogitsWarper(0.4)],
    "typical": lambda at: [theirs.TopKLogitsWarper(12), theirs.TypicalLogitsWarper(0.6)],
    "epsilon": lambda at: [theirs.TemperatureLogitsWarper(0.7), theirs.EpsilonLogitsWarper(0.02)],
    "eta": lambda at: [theirs.TopPLogitsWarper(0.9), theirs.EtaLogitsWarper(0.03)],
    "normalised": lambda at: [theirs.MinPLogitsWarper(0.05), theirs.LogitNormalization()],
    "around-a-penalty": lambda at: [
        OnlyTheLast(),
        theirs.RepetitionPenaltyLogitsProcessor(1.4, 3),
        theirs.NoRepeatNGramLogitsProcessor(2),
    ],
}


def known_here(kind, at):
    try:
        return KINDS[kind](at)
    except AttributeError as error:  # not in the oldest supported version
        pytest.skip(str(error))


@pytest.mark.floor
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("batch", [1, 4])
def test_each_position_has_the_scores_of_its_prefix(kind, drafts, batch):
    at = case(batch, drafts, counts=(5, 3, -1, 2), failed=[(0, 3)] if drafts else ())
    found = ours(known_here(kind, at), at)
    expected = plain(known_here(kind, at), at)
    if "own" in kind or kind == "around-a-penalty":  # what an impossible draft leads to is left as it is
        reached = possible(expected, at)
        assert not drafts or reached[:, 1:].any()
        expected = torch.where(reached[..., None], expected, found)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert not drafts or not torch.equal(expected, at.logits)  # or equality would say nothing


def possible(scores, at):
    """``[B, T + 1]``: up to the first draft that its scores forbid."""
    if not at.drafts.shape[1]:
        return torch.ones(scores.shape[:2], dtype=torch.bool)
    chances = scores[:, :-1].gather(2, at.drafts.clamp(min=0)[..., None])[..., 0] > -math.inf
    return torch.cat([torch.ones_like(chances[:, :1]), chances.cumprod(1).bool()], dim=1)


# transformers takes a length per row since 5.23, where it ignores the padding.
IGNORED = {"all-seen": None, "one-length": 4, "beyond-the-prompt": WIDTH + 2, "by-row": "padding", "none-seen": 99}


@pytest.mark.floor
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_in_one_go(ignored, drafts, batch, penalty):
    at = case(batch, drafts, counts=(5, 3, -1, 2), failed=[(0, 3)] if drafts else ())
    at.logits[0, :, :3] = torch.tensor([math.inf, -math.inf, -0.0])
    ignored = at.padding if IGNORED[ignored] == "padding" else IGNORED[ignored]
    try:
        processors = [theirs.RepetitionPenaltyLogitsProcessor(penalty, ignored)]
    except ValueError as error:
        pytest.skip(str(error))
    assert torch.equal(ours(processors, at), plain(processors, at))
    assert Processors(processors, at.ids, at.padding).on_device


@pytest.mark.floor
def test_padding_is_seen_where_transformers_sees_it():
    """The pad token stands nowhere but in the padding."""
    at = case(4, 3, pad=20)
    for ignored, seen in ((None, True), (at.padding, False)):
        try:
            processor = theirs.RepetitionPenaltyLogitsProcessor(2.0, ignored)
        except ValueError:
            continue
        changed = ours([processor], at)[..., 20] != at.logits[..., 20]
        assert changed.all(1).tolist() == [seen, False, seen, seen]
        assert changed.any(1).tolist() == changed.all(1).tolist()


def test_penalty_reads_nothing_on_the_host(monkeypatch):
    """What waits for the device breaks the capture of a CUDA graph."""
    at = case(4, 5)
    penalty = RepetitionPenalty(theirs.RepetitionPenaltyLogitsProcessor(1.3), at.ids, at.padding)

    class NoWait(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name
            assert not any(word in name for word in ("_local_scalar", "nonzero", "masked_select", "unique")), name
            indices = [item for arg in args if isinstance(arg, (list, tuple)) for item in arg if item is not None]
            assert not any(getattr(item, "dtype", None) == torch.bool for item in indices), name
            return function(*args, **(kwargs or {}))

    with NoWait():
        penalty(at.logits, at.tokens, at.lengths, at.drafts, at.counts)


@pytest.mark.floor
def test_penalty_of_another_call_fits_in():
    """In place, as the tensors of a captured graph are changed between calls."""
    cases = [case(4, 3), case(4, 3, padding=(1, 1, 5, 0), pad=20)]
    processors = [theirs.RepetitionPenaltyLogitsProcessor(1.3, ignored) for ignored in (None, 2)]
    first, second = (Processors([item], at.ids, at.padding) for item, at in zip(processors, cases))
    assert first.kind == second.kind
    before = [tensor.data_ptr() for tensor in vars(first._stages[0]).values() if isinstance(tensor, torch.Tensor)]
    assert len(before) == 3
    first.copy_(second)
    after = [tensor.data_ptr() for tensor in vars(first._stages[0]).values() if isinstance(tensor, torch.Tensor)]
    at = cases[1]
    assert torch.equal(first(at.logits, at.tokens, at.lengths, at.drafts, at.counts), plain([processors[1]], at))
    assert before == after
    assert cases[0].padding.tolist() == [2, 0, 5, 1]  # the caller's own
    others = (1.4, None), (1.3, 9)  # a penalty is baked in, and so is whether any padding counts
    for penalty, ignored in others:
        item = theirs.RepetitionPenaltyLogitsProcessor(penalty, ignored)
        assert Processors([item], at.ids, at.padding).kind != first.kind


def test_penalty_of_another_batch_is_refused():
    at = case(4, 0)
    processor = theirs.RepetitionPenaltyLogitsProcessor(1.3)
    processor.prompt_ignore_length = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="3 values for 4 rows"):
        Processors([processor], at.ids, at.padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_processors_work_in_single_precision(dtype):
    at = case(4, 3)
    at.logits = at.logits.to(dtype)
    processors = [theirs.RepetitionPenaltyLogitsProcessor(1.3), theirs.TemperatureLogitsWarper(0.3)]
    found = ours(processors, at)
    at.logits = at.logits.float()
    assert torch.equal(found, plain(processors, at))


def test_without_processors_logits_are_only_cast():
    at = case(2, 3)
    assert torch.equal(ours([], at), at.logits)
    assert Processors([], at.ids, at.padding).on_device
    assert not Processors([theirs.LogitNormalization()], at.ids, at.padding).on_device


def test_processors_that_took_the_temperature_give_it_back():
    at = case(4, 5, counts=(5, 3, -1, 2))
    processors = [theirs.TemperatureLogitsWarper(0.7), theirs.TypicalLogitsWarper(0.6)]
    found = ours(processors, at, temperature=0.7)
    assert torch.equal(found, plain(processors, at, temperature=0.7))
    # What the op makes of it is what transformers samples from.
    assert torch.allclose((found / 0.7)[0], plain(processors, at)[0])
    kept = Processors(processors, at.ids, at.padding, temperature=0.7)
    assert torch.equal(kept.scores(at.logits, at.tokens, at.lengths, at.drafts, at.counts), plain(processors, at))


@pytest.mark.floor
def test_function_of_allowed_tokens_is_told_the_row():
    """Rows of unequal length, each with a table of its own: what follows what, and never a prefix it cannot have."""
    at = case(4, 5, counts=(5, 3, -1, 2))
    asked = []

    def allowed(row, ids):
        asked.append((row, ids.tolist()))
        return [(int(ids[-1]) + row) % 12, 11 - row, *range(20, 25 + row)]

    for row in range(4):  # the first two drafts are allowed, the third is not
        at.drafts[row] = 20
        at.drafts[row, 2] = 29
    processors = [theirs.PrefixConstrainedLogitsProcessor(allowed, 1)]
    expected = plain(processors, at)
    asked.clear()
    found = ours(processors, at)
    reached = possible(expected, at)
    assert torch.equal(found[reached], expected[reached])
    assert torch.equal(found[~reached], at.logits[~reached])
    prefixes = [
        (row, [*at.ids[row, : at.padding[row]], *at.tokens[row, : at.lengths[row]], *at.drafts[row, :slot]])
        for row, most in ((0, 2), (1, 2), (3, 2))
        for slot in range(most + 1)
    ]
    assert sorted(asked) == sorted((row, [int(token) for token in ids]) for row, ids in prefixes)


def test_own_processor_is_shown_no_impossible_prefix():
    """It may raise for one, as plain decoding would never show it."""

    class NoTwelve(LogitsProcessor):
        stateless = True

        def __call__(self, input_ids, scores):
            assert not (input_ids == 12).any()
            return scores.index_fill(1, torch.tensor([12]), -math.inf)

    at = case(4, 5)
    at.drafts[1, 1] = 12
    found = ours([NoTwelve()], at)
    assert (found[1, :2, 12] == -math.inf).all() and torch.equal(found[1, 2:], at.logits[1, 2:])
    assert (found[[0, 2, 3], :, 12] == -math.inf).all()


def config_of(**settings):
    neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    return GenerationConfig(**{**neutral, **settings})


T, K, P, M = (
    theirs.TemperatureLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.MinPLogitsWarper,
)
N, L = theirs.NoRepeatNGramLogitsProcessor, theirs.LogitNormalization
ALL = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
# the list, the config, how many of the list are left to the verification op, and whether the cuts are taken from it
SPLITS = {
    "warpers-alone": ([T(0.7), K(9), P(0.8), M(0.1)], ALL, 4, False),
    "one-before": ([N(2), T(0.7), K(9)], {"temperature": 0.7, "top_k": 9}, 2, False),
    "none": ([], {}, 0, False),
    "none-but-processors": ([N(2), L()], {}, 0, False),
    "one-after": ([T(0.7), K(9), theirs.TypicalLogitsWarper(0.5)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "one-between": ([T(0.7), L(), K(9)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "made-by-hand": ([K(3)], {}, 0, False),
    "made-by-hand-before": ([K(3), T(0.7), K(9)], {"temperature": 0.7, "top_k": 9}, 2, False),
    "made-by-hand-alike": ([K(9), T(0.7), K(9)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "keeps-more": ([K(9, min_tokens_to_keep=2)], {"top_k": 9}, 0, False),
    "other-filter": ([P(0.8, filter_value=-5.0)], {"top_p": 0.8}, 0, False),
    "out-of-order": ([K(9), T(0.7)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "other-value": ([T(0.7), K(3)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "one-missing": ([T(0.7)], {"temperature": 0.7, "top_k": 9}, 0, True),
    "greedy": ([T(0.7)], {"temperature": 0.7, "do_sample": False}, 0, False),
}


@pytest.mark.parametrize(("items", "settings", "cuts", "taken"), SPLITS.values(), ids=SPLITS)
def test_warpers_are_left_to_the_op_unless_something_follows(items, settings, cuts, taken):
    found = split(items, config_of(**settings))
    assert [*found.before, *found.cuts] == items
    assert (len(found.cuts), found.takes_cuts) == (cuts, taken)


ALL_CLASSES = [
    name
    for name, item in vars(theirs).items()
    if isinstance(item, type) and issubclass(item, LogitsProcessor) and item is not LogitsProcessor
]


@pytest.mark.floor
@pytest.mark.parametrize("name", ALL_CLASSES)
def test_every_class_of_transformers_is_decided(name):
    item = object.__new__(getattr(theirs, name))
    if name in STATELESS:
        check_processors([item])
    else:
        with pytest.raises(ValueError, match=rf"the logits processor {name} (?!is not known)"):
            check_processors([item])


def test_guidance_is_refused_as_such():
    for name in ALL_CLASSES:
        if "Guidance" in name:
            with pytest.raises(ValueError, match="classifier-free guidance"):
                check_processors([object.__new__(getattr(theirs, name))])


def test_own_processor_must_say_that_it_is_stateless():
    class Mine(theirs.RepetitionPenaltyLogitsProcessor):
        pass

    mine = Mine(1.2)
    for value in (None, False, "yes"):
        mine.stateless = value
        with pytest.raises(ValueError, match=r"Mine.*stateless = True.*input_ids and scores alone"):
            check_processors([mine])
    mine.stateless = True
    check_processors([mine])
    check_processors(None)
