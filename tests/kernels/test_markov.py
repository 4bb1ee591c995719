"""The Markov walk against its reference: tokens, kept logits and what they say of q, with NaN around every input."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.kernels import launch, markov_walk
from dspark_fast.reference.markov import markov_walk as reference
from dspark_fast.reference.sampling import DRAFT, exponentials

pytestmark = pytest.mark.usefixtures("guarded")

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
WIDTH = 24  # of the hidden states
TEMPERATURES = (0.8, 0.0, 1.3, 1e-3, 100.0)


def problem(head, batch, block, vocab, rank, dtype, *, bias=True, temperatures=TEMPERATURES):
    """Random inputs; e(x) and W2 such that the bias is as large as the base logits."""
    given = {"base_logits": torch.randn(batch, block, vocab) * 2, "w1": None, "w2": None}
    if rank:
        given["w1"], given["w2"] = (torch.randn(vocab, rank) / rank**0.25).to(dtype), torch.randn(vocab, rank)
        given["w2"] = (given["w2"] / rank**0.25).to(dtype)
    given["anchor"] = torch.randint(vocab, (batch,))
    given["temperature"] = torch.tensor(temperatures).repeat(batch)[:batch]
    given["seed"], given["position"] = torch.arange(batch) * 2**40 - 5, torch.arange(batch) * 1000 + 9
    if head != "vanilla":
        rows, columns = (rank, WIDTH + rank) if head == "gated" else (3 * rank, 2 * rank + WIDTH)
        given |= {"head": head, "head_weight": (torch.randn(rows, columns) / columns**0.5).to(dtype)}
        given |= {"head_bias": torch.randn(rows).to(dtype) if bias else None}
        given |= {"hidden": torch.randn(batch, block, WIDTH).to(dtype)}
    return given


PER_ROW = ("base_logits", "anchor", "temperature", "seed", "position", "hidden")


def take(given, rows):
    return {name: value[rows] if name in PER_ROW else value for name, value in given.items()}


@pytest.fixture
def walk(embedded, device):
    """The kernel on slices of NaN, its results on the CPU."""

    def run(given, axis=1, **options):
        axes = {"base_logits": axis, "w1": -1, "w2": -1, "hidden": -1, "head_weight": -1}
        moved = {name: embedded(given[name], a) for name, a in axes.items() if name in given}
        for name in given.keys() - moved.keys():
            moved[name] = given[name].to(device) if isinstance(given[name], torch.Tensor) else given[name]
        result = markov_walk(**moved, **options)
        return type(result)(*(None if x is None else x.cpu() for x in result))

    return run


def check(result, given, near_ties, *, at_least=0.0, **options):
    """Against the reference, and against itself: its tokens are drawn from its own logits, which are q.

    at_least: the share of logits that have the reference's very bits.
    """
    expected = reference(**given, **options)
    batch, block, vocab = given["base_logits"].shape
    dtype, kept = (
        torch.float32 if given["w2"] is None else given["w2"].dtype,
        options.get("logits_dtype", torch.float32),
    )
    bias = torch.where(expected.logits > -INF, expected.logits.float() - given["base_logits"], 0.0)
    bias = bias.abs().nan_to_num(0.0, 0.0).clamp(max=100)
    dot_ulp = torch.finfo(dtype).eps * float(bias.max())
    assert result.logits.dtype == kept and result.row_max.dtype == result.log_sum.dtype == torch.float32
    assert torch.equal(result.row_max, result.logits.float().amax(-1))
    equal = total = 0
    for row in range(batch):
        temperature = float(given["temperature"][row])
        divisor = temperature or 1.0
        position = given["position"][row]
        noise = (given["seed"][row], position + 1 + torch.arange(block), position * (not options.get("coupled")))
        log_e = exponentials(*noise, DRAFT, vocab).log() * (temperature > 0)
        for slot in range(block):
            own, theirs = result.logits[row, slot].float(), expected.logits[row, slot].float()
            # What was kept is what the reference keeps, up to the order of a sum and the rounding that follows it.
            assert torch.equal(own == -INF, theirs == -INF)
            some = theirs > -INF
            ulp = dot_ulp + torch.finfo(kept).eps * theirs[some].abs()
            steps = 16 if dtype == kept == torch.float32 else 2
            assert ((own - theirs)[some].abs() <= steps * ulp).all()
            equal, total = equal + int((own == theirs).sum()), total + vocab
            # The token is the winner of the race that the kept logits run, and it is the reference's.
            token, keys = int(result.tokens[row, slot]), own / divisor - log_e[slot]
            rounding = EPS * max(1.0, float(keys.max().abs())) if temperature > 0 else 1e-45
            near_ties.same(token, int(keys.argmax()), lambda k=keys, u=rounding: [(*k.topk(2).values, u)])
            keys = theirs / divisor - log_e[slot]
            ulp = dot_ulp / divisor + rounding
            same = near_ties.same(
                token, int(expected.tokens[row, slot]), lambda k=keys, u=ulp: [(*k.topk(2).values, u)]
            )
            scaled = (own - result.row_max[row, slot]) / divisor
            if temperature > 0:
                assert float((scaled - result.log_sum[row, slot]).double().exp().sum()) == pytest.approx(1, abs=1e-5)
            else:
                assert result.log_sum[row, slot] == 0
            if not same:
                break  # from here on they walk different tokens
    assert equal >= at_least * total, f"{equal} of {total} logits have the reference's bits"


# head, B, T, V, R, launch parameters
WALKS = [
    pytest.param("vanilla", 1, 1, 1, 8, {}, id="V1-R8"),
    pytest.param("vanilla", 3, 5, 2, 8, {}, id="V2-R8"),
    pytest.param("vanilla", 3, 7, 63, 24, {"BV": 16, "PARTS": 3}, id="V63-T7-R24-in-4-tiles"),
    pytest.param("vanilla", 1, 16, 311, 100, {"BV": 512}, id="V311-T16-R100"),
    pytest.param("vanilla", 17, 2, 311, 8, {"BV": 128, "PARTS": 2}, id="V311-B17"),
    pytest.param("vanilla", 2, 2, 311, 256, {"BV": 512}, id="V311-R256"),
    pytest.param(None, 5, 5, 311, 0, {"BV": 128, "PARTS": 2}, id="V311-rank-0"),
    pytest.param("gated", 5, 5, 63, 64, {}, id="gated-V63-R64"),
    pytest.param("gated", 1, 2, 311, 256, {"BV": 512}, id="gated-V311-R256"),
    pytest.param("rnn", 3, 5, 100, 24, {"BV": 32, "PARTS": 3}, id="rnn-V100-R24-in-4-tiles"),
    pytest.param("rnn", 1, 7, 2, 100, {}, id="rnn-V2-T7-R100"),
    pytest.param("rnn", 17, 2, 63, 8, {}, id="rnn-V63-B17-R8"),
]


@pytest.mark.parametrize("head, batch, block, vocab, rank, step", WALKS)
def test_as_the_reference(head, batch, block, vocab, rank, step, tiles, dtype, walk, near_ties):
    tiles("narrow", markov_step=step)
    given = problem(head or "vanilla", batch, block, vocab, rank, dtype, bias=vocab != 311)
    result = walk(given, logits_dtype=dtype)
    at_least = 1.0 if not rank else 0.0 if dtype == torch.float32 else 0.99
    check(result, given, near_ties, logits_dtype=dtype, at_least=at_least)


@pytest.mark.parametrize(
    "vocab, temperature, weights",
    [
        pytest.param(49152, 0.8, torch.float16, id="V49152"),
        pytest.param(151936, 0.0, torch.float32, id="V151936-greedy"),
        pytest.param(151936, 0.8, torch.float16, id="V151936"),
    ],
)
def test_large_vocabularies(vocab, temperature, weights, tiles, walk, near_ties):
    tiles("wide")
    given = problem("vanilla", 1, 1, vocab, 8, weights, temperatures=(temperature,))
    check(walk(given), given, near_ties)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_fp16_weights_and_fp32_logits(head, walk, tiles, near_ties):
    """As the released drafters run: the product ends in the weights' dtype, the base logits do not."""
    tiles(markov_step={"BV": 128})
    given = problem(head, 3, 3, 100, 24, torch.float16)
    check(walk(given), given, near_ties, at_least=0.95)


def test_coupled_noise(walk, near_ties):
    given = problem("vanilla", 5, 3, 63, 8, torch.float32)
    result = walk(given, coupled=True)
    check(result, given, near_ties, coupled=True)
    assert not torch.equal(result.tokens, walk(given).tokens)


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_logits_need_not_be_kept(head, walk, dtype):
    """The same bits otherwise; and a slice along V, whose slots are not V apart, changes nothing either."""
    given = problem(head, 3, 2, 63, 8, dtype)
    kept, dropped = walk(given, axis=2, logits_dtype=dtype), walk(given, keep_logits=False, logits_dtype=dtype)
    assert dropped.logits is None and kept.logits is not None
    for name in ("tokens", "row_max", "log_sum"):
        assert torch.equal(getattr(kept, name), getattr(dropped, name))


@pytest.mark.parametrize("candidates", [1, 7, 62, 63, 200], ids="of-{}".format)
def test_candidates(candidates, tiles, walk, dtype, near_ties):
    """Base logits with ties, so that a whole tie stands at the edge."""
    tiles("narrow")
    given = problem("vanilla", 3, 2, 63, 8, torch.float32)
    given["base_logits"] = given["base_logits"].round().to(dtype)
    result = walk(given, axis=candidates % 2 + 1, candidates=candidates)
    check(result, given, near_ties, candidates=candidates)
    base = given["base_logits"]
    edge = base.sort(-1, descending=True).values[..., min(candidates, 63) - 1, None]
    assert torch.equal(result.logits > -INF, base >= edge)


def test_candidates_of_two_groups_of_rows(tiles, walk, near_ties):
    """17 rows: a tile of W2 is read for the candidates of all, but each row has only its own."""
    tiles("narrow", markov_step={"BV": 32, "PARTS": 2})
    given = problem("vanilla", 17, 1, 100, 8, torch.float32)
    given["base_logits"][:16] -= 100 * (torch.arange(100) < 50)  # only the second group wants the first tiles
    check(walk(given, candidates=3), given, near_ties, candidates=3)


@pytest.mark.parametrize("candidates", [0, 70], ids=["all", "candidates"])
def test_ties_go_to_the_lowest_id(candidates, tiles, walk):
    """Slot by slot: within a tile, in two tiles of a program, in different programs, in all of these."""
    tiles("narrow", markov_step={"BV": 16, "PARTS": 3})
    slots = [(33, 34), (37, 90, 130), (50, 40), (199, 140, 60, 47), (16, 15), (199, 198)]
    base = torch.zeros(1, len(slots), 200)
    for slot, best in enumerate(slots):
        base[0, slot, list(best)] = 1.0
    given = problem("vanilla", 1, len(slots), 200, 8, torch.float32, temperatures=(0.0,)) | {"base_logits": base}
    given["w2"].zero_()
    result = walk(given, candidates=candidates)
    assert result.tokens.tolist() == [[min(best) for best in slots]]


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_the_next_slot_sees_the_lowest_of_a_tie(head, tiles, walk, near_ties):
    """The anchor has no bias, so two tokens of different programs tie first; the second slot depends on which it is."""
    tiles("narrow", markov_step={"BV": 16, "PARTS": 3})
    given = problem(head, 2, 2, 100, 8, torch.float32, temperatures=(0.0,))
    given["w1"][given["anchor"]] = 0.0
    given["base_logits"][:, 0] = -(torch.arange(100.0) - 45).abs()  # 40 and 50 are in the last and the first program
    given["base_logits"][:, 0, 41:50] = -9.0
    result = walk(given)
    check(result, given, near_ties)
    assert result.tokens[:, 0].tolist() == [40, 40]


@pytest.mark.parametrize(
    "head, candidates",
    [
        pytest.param("vanilla", 0, id="all"),
        pytest.param("rnn", 0, id="rnn"),
        pytest.param("vanilla", 9, id="candidates"),
    ],
)
def test_a_broken_slot_ends_its_row_alone(head, candidates, tiles, walk):
    tiles("narrow")
    given = problem(head, 7, 2, 100, 8, torch.float32, temperatures=(0.7, 0.0))
    whole = walk(given, candidates=candidates)
    broken = {1: (NAN, 1, 99), 2: (INF, 0, 3), 3: (-INF, 0, slice(None)), 4: (INF, 1, 40), 5: (NAN, 0, 35)}
    for row, (value, slot, where) in broken.items():
        given["base_logits"][row, slot, where] = value
    result = walk(given, candidates=candidates)
    for row, (_, slot, _) in broken.items():
        assert result.tokens[row, slot:].eq(-1).all()
        for one, other in zip(result, whole):
            assert torch.equal(one[row, :slot], other[row, :slot])
    for one, other in zip(result, whole):
        assert torch.equal(one[[0, 6]], other[[0, 6]])


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_extreme_logits(logits_dtype, tiles, walk, near_ties):
    """-inf of which whole tiles are full, values at both ends; in fp16 what overflows downwards is -inf."""
    tiles("narrow")
    given = problem("vanilla", 5, 2, 100, 8, torch.float32)
    base = given["base_logits"]
    base[torch.rand(base.shape) < 0.3] = -INF
    base[0, :, :64] = -INF
    base[1, :, 64:] = -INF
    base[2, :, 7] = 3e4
    base[3, :, ::2] = -1e30
    base[4] += 5e4
    check(walk(given, logits_dtype=logits_dtype), given, near_ties, logits_dtype=logits_dtype)


def test_fp16_overflow_fails_the_row(walk):
    given = problem("vanilla", 2, 1, 63, 8, torch.float32)
    given["base_logits"][0, 0, 5] = 1e5
    assert walk(given, logits_dtype=torch.float16).tokens[:, 0].eq(-1).tolist() == [True, False]


def summed_exactly(given):
    """The same problem such that no order of summation matters: multiples of 1/8, or a single term.

    The interpreter's products are OpenBLAS's, whose order depends on the row's index in its tile; a GPU's does not.
    """
    for name in ("w1", "hidden", "head_weight", "head_bias"):
        if given.get(name) is not None:
            given[name] = (given[name].float() * 8).round().div(8).to(given[name].dtype)
    for weight in (
        given["w2"],
        given["head_weight"][:, : given["w1"].shape[1]] if given.get("head") == "rnn" else None,
    ):
        if weight is not None:  # what is multiplied with a feature or a state, which are no multiples
            weight *= torch.arange(weight.shape[1]) == torch.arange(weight.shape[0])[:, None] % weight.shape[1]


@pytest.mark.parametrize(
    "head, rank",
    [
        pytest.param("vanilla", 24, id="vanilla"),
        pytest.param("gated", 8, id="gated"),
        pytest.param("rnn", 8, id="rnn"),
        pytest.param("vanilla", 0, id="rank-0"),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch(head, rank, tiles, walk, dtype, device):
    """Alone, at other indices of a batch of 17 (two tiles of 16 rows) and, for the vanilla head, of 33 (three)."""
    tiles("narrow")
    given = problem(head, 33, 2, 63, rank, dtype)
    if device.type == "cpu":
        summed_exactly(given)
    alone = {row: walk(take(given, [row]), logits_dtype=dtype) for row in (3, 16, 32)}
    order = [16, *range(5, 15), 32, *range(17, 21), 3]
    batches = {tuple(order): walk(take(given, order), logits_dtype=dtype)}
    if head == "vanilla":
        batches[tuple(range(33))] = walk(given, logits_dtype=dtype)
    for rows, together in batches.items():
        for row, single in alone.items():
            for one, other in zip(single, together):
                assert torch.equal(one[0], other[rows.index(row)])


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize(
    "head, candidates, temperatures",
    [
        pytest.param("vanilla", 0, TEMPERATURES, id="vanilla"),
        pytest.param("gated", 0, (0.8, 1.0), id="gated"),
        pytest.param("rnn", 0, (0.8, 1.0), id="rnn"),
        pytest.param("vanilla", 9, (0.8, 0.0), id="candidates"),
        pytest.param("vanilla", 0, (0.0,), id="greedy"),
    ],
)
def test_a_vocabulary(head, candidates, temperatures, coupled, tiles, walk):
    """A walk over some tokens is the whole one in which the others have -inf: same noise, same tokens, same q."""
    tiles("narrow", markov_step={"BV": 16, "PARTS": 3})
    given = problem(head, 5, 4, 200, 8, torch.float32, temperatures=temperatures)
    summed_exactly(given)
    vocabulary = torch.randperm(200)[:71].sort().values
    whole = given | {"base_logits": torch.full_like(given["base_logits"], -INF)}
    whole["base_logits"][..., vocabulary] = given["base_logits"][..., vocabulary]
    whole = walk(whole, candidates=candidates, coupled=coupled)
    given |= {"base_logits": given["base_logits"][..., vocabulary], "w2": given["w2"][vocabulary]}
    part = walk(given | {"vocabulary": vocabulary}, candidates=candidates, coupled=coupled)
    twin = reference(**given, vocabulary=vocabulary, candidates=candidates, coupled=coupled)
    assert torch.equal(part.tokens, whole.tokens) and torch.equal(part.tokens, twin.tokens)
    assert torch.equal(part.logits, whole.logits[..., vocabulary])
    assert torch.equal(part.row_max, whole.row_max)
    torch.testing.assert_close(part.log_sum, whole.log_sum)


def test_a_broken_slot_of_a_vocabulary_ends_its_row_alone(walk):
    given = problem("vanilla", 3, 3, 63, 8, torch.float32)
    vocabulary = torch.arange(0, 63, 3)
    given |= {"base_logits": given["base_logits"][..., vocabulary], "w2": given["w2"][vocabulary]}
    sound = walk(given | {"vocabulary": vocabulary})
    given["base_logits"][1, 1, 20] = NAN
    result = walk(given | {"vocabulary": vocabulary})
    assert result.tokens[1, 1:].eq(-1).all() and torch.equal(result.tokens[[0, 2]], sound.tokens[[0, 2]])


@pytest.mark.parametrize("batch, block", [pytest.param(0, 3, id="B0"), pytest.param(2, 0, id="T0")])
def test_nothing_to_draft(batch, block, device):
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    base = torch.zeros(batch, block, 5, device=device)
    result = markov_walk(base, None, None, zeros, temperature=zeros.float(), seed=zeros, position=zeros)
    assert result.tokens.shape == result.row_max.shape == (batch, block) and result.logits.shape == (batch, block, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_float8_w2(weights, walk, near_ties):
    """Multiplied in w1's dtype; the interpreter knows no float8."""
    assert not launch.interpreted()
    given = problem("vanilla", 5, 5, 311, 64, weights)
    given["w2"] = given["w2"].float().to(torch.float8_e4m3fn)
    result = walk(given | {"w2": given["w2"]})
    check(result, given | {"w2": given["w2"].to(weights)}, near_ties, at_least=0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_100_repeats_have_the_same_bits(head, walk, dtype):
    given = problem(head, 17, 5, 49152, 256, dtype)
    first = walk(given, candidates=64)
    for _ in range(99):
        assert all(torch.equal(a, b) for a, b in zip(walk(given, candidates=64), first))


def test_an_anchor_of_a_row_that_failed(walk):
    """-1, as a failed row gives it, is read as token 0, so that nothing lies out of bounds."""
    given = problem("vanilla", 3, 2, 63, 8, torch.float32)
    given["anchor"][1] = 0
    whole = walk(given)
    given["anchor"][1] = -1
    assert torch.equal(walk(given).tokens, whole.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [32, 64, 100, 256])
def test_dependent_launch(rank, dtype, walk, monkeypatch):
    """A step that is launched before the one before it has ended draws the same bits, a hundred times."""
    if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    given = problem("vanilla", 3, 7, 49_152, rank, dtype)
    plain = walk(given)
    parameters = launch.parameters
    monkeypatch.setattr(
        launch,
        "parameters",
        lambda name, device: parameters(name, device) | ({"PDL": 1} if name == "markov_step" else {}),
    )
    for _ in range(100):
        ahead = walk(given)
        assert torch.equal(ahead.tokens, plain.tokens) and torch.equal(ahead.logits, plain.logits)
