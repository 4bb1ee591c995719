"""Verification against its reference, with poison past each draft's length and in the rows of finished requests."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.kernels import verify
from dspark_fast.reference.markov import markov_walk
from dspark_fast.reference.sampling import DRAFT, TARGET, accept_uniform, cut_logits, exponentials, softmax_statistics
from dspark_fast.reference.verify import MODES
from dspark_fast.reference.verify import verify as reference

pytestmark = pytest.mark.usefixtures("guarded")

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
TEMPERATURES = (0.8, 0.0, 1.3, 1.0)


def problem(batch, block, vocab, mode, dtype=torch.float32, *, lengths=None, temperatures=TEMPERATURES, spread=2.0):
    """A target and a draft that often agree, tokens drawn from the draft; a tenth of the target is -inf."""
    target = torch.randn(batch, block + 1, vocab) * spread
    draft = (target[:, :-1] + torch.randn(batch, block, vocab) / 2).to(dtype)
    target[torch.rand(target.shape) < 0.1] = -INF
    target[..., vocab // 2] = 0.0
    given = {"target_logits": target.to(dtype)}
    common = {"temperature": torch.tensor(temperatures).repeat(batch)[:batch]}
    common |= {"seed": torch.arange(batch) * 2**40 - 5, "position": torch.arange(batch) * 1000 + 9}
    anchor = torch.zeros(batch, dtype=torch.int64)
    walk = markov_walk(draft, None, None, anchor, **common, coupled=mode == "coupled", logits_dtype=dtype)
    given |= {"draft_tokens": walk.tokens, "draft_logits": walk.logits if mode == "rejection" else None}
    if lengths is None:
        lengths = block - torch.arange(batch) % (block + 1)
    return given | {"draft_lengths": torch.as_tensor(lengths)} | common | {"mode": mode}


def with_statistics(given):
    row_max, log_sum = softmax_statistics(given["draft_logits"], given["temperature"][:, None])
    return given | {"draft_row_max": row_max, "draft_log_sum": log_sum}


TENSORS = ("target_logits", "draft_tokens", "draft_logits", "draft_row_max", "draft_log_sum")


def poisoned(given):
    """A copy, with NaN and ids that index nothing wherever ``draft_lengths`` says that there is nothing."""
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    lengths = given["draft_lengths"][:, None]
    for name in TENSORS:
        if given.get(name) is not None:
            there = torch.arange(given[name].shape[1]) < lengths + (name == "target_logits")
            given[name][~there] = NAN if name != "draft_tokens" else 10**9
    return given


@pytest.fixture
def judge(embedded, device):
    def run(given, axis=1, **cuts):
        moved = poisoned(given)
        for name in TENSORS:
            moved[name] = embedded(moved.get(name), axis if "logits" in name else 1)
        moved |= {name: torch.as_tensor(v).expand(len(given["seed"])).contiguous() for name, v in cuts.items()}
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in moved.items()}
        accepted, following = verify(**moved)
        assert accepted.dtype == following.dtype == torch.int64
        return list(zip(accepted.tolist(), following.tolist()))

    return run


def decisions(given, row, cuts):
    """(key, other key, ulp) of all that decides a row, in float64 but for the noise; greedy rows leave no room."""
    temperature, seed, position = (given[name][row] for name in ("temperature", "seed", "position"))
    length, tokens, coupled = int(given["draft_lengths"][row]), given["draft_tokens"][row], given["mode"] == "coupled"
    cuts = {name: torch.as_tensor(v).expand(len(given["seed"]))[row] for name, v in cuts.items()}
    for slot in range(length + 1 if temperature > 0 and given["mode"] != "greedy" else 0):
        scaled = cut_logits(given["target_logits"][row, slot][None], temperature, **cuts)[0].double()
        place = (seed, position + 1 + slot)
        p = scaled.softmax(-1)
        if coupled:
            keys = scaled - exponentials(*place, position * 0, DRAFT, len(p)).double().log()
            yield *keys.topk(2).values, EPS * keys.max().abs().clamp(min=1)
            continue
        q, own = torch.zeros_like(p), 1.0
        if slot < length and tokens[slot] >= 0:
            q = (given["draft_logits"][row, slot].double() / temperature).softmax(-1)
            own = accept_uniform(*place, position).double() * q[tokens[slot]]
            yield own, p[tokens[slot]], EPS * p[tokens[slot]]
        noise = exponentials(*place, position, TARGET, len(p)).double()
        keys = (p - q).clamp(min=0) / noise
        two = keys.topk(2)
        yield *two.values, EPS * ((p + q) / noise)[two.indices].max()


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_decisions_tell_a_tie_from_a_win(mode, near_ties):
    """The rule that excuses near-ties sees one that is planted: the logits cancel the noise of two tokens."""
    given = problem(1, 0, 2, mode, temperatures=(1.0,))
    place = (given["seed"][0], given["position"][0] + 1, given["position"][0] * (mode == "rejection"))
    given["target_logits"][0, 0] = exponentials(*place, TARGET if mode == "rejection" else DRAFT, 2).log()
    for lead, near in ((0.0, True), (1e-3, False)):
        given["target_logits"][0, 0, 1] += lead
        [(best, other, ulp)] = decisions(given, 0, {})
        assert (best - other <= near_ties.ULPS * ulp) == near


def check(actual, given, near_ties, **cuts):
    expected = list(zip(*(x.tolist() for x in reference(**given, **cuts))))
    for row, (one, other) in enumerate(zip(actual, expected)):
        near_ties.same(one, other, lambda row=row: decisions(given, row, cuts))
    return expected


# B, T, V, tiles
SHAPES = [
    pytest.param(3, 0, 63, "default", id="T0"),
    pytest.param(3, 1, 1, "default", id="V1-T1"),
    pytest.param(3, 5, 2, "default", id="V2-T5"),
    pytest.param(8, 7, 63, "default", id="V63-T7"),
    pytest.param(1, 16, 311, "default", id="V311-T16"),
    pytest.param(17, 2, 100, "narrow", id="V100-in-2-tiles-B17"),
    pytest.param(4, 5, 311, "narrow", id="V311-in-5-tiles"),
    pytest.param(2, 1, 49152, "wide", id="V49152"),
    pytest.param(1, 1, 151936, "wide", id="V151936"),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch, block, vocab, shape", SHAPES)
def test_as_the_reference(batch, block, vocab, shape, mode, tiles, dtype, judge, near_ties):
    tiles(shape)
    given = problem(batch, block, vocab, mode, dtype)
    check(judge(given), given, near_ties)
    if mode == "rejection" and block:
        check(judge(with_statistics(given), axis=2), given, near_ties)


@pytest.mark.parametrize("mode", MODES)
def test_finished_rows_failed_drafts_and_integers_of_32_bits(mode, judge, near_ties):
    """A drafted -1 in the first, a middle and the last slot; 0 to 4 drafts; finished rows first, between and last."""
    lengths = torch.tensor([-1, 4, 3, 4, 0, -1, 4, 2, 4, -3], dtype=torch.int32)
    given = problem(10, 4, 63, mode, lengths=lengths, temperatures=(1.0, 0.0))
    whole = judge(given)
    for row, slot in ((1, 0), (2, 1), (3, 3), (6, 1), (7, 1), (8, 2)):
        given["draft_tokens"][row, slot] = -1
    given["temperature"][0] = 1.0
    actual = judge(given)
    check(actual, given, near_ties)
    assert [actual[row] for row in (0, 5, 9)] == [(0, 0)] * 3 and actual[4] == whole[4]
    assert actual != whole


@pytest.mark.parametrize("mode", MODES)
def test_all_kept(mode, tiles, judge):
    """p = q exactly: every draft is kept, to the end of its block; greedy rows among the others."""
    tiles("narrow")
    given = problem(6, 5, 150, mode, lengths=[5, 5, 4, 1, 5, 2])
    draft = torch.randn(6, 6, 150)
    given |= {"target_logits": draft, "draft_logits": draft[:, :5] if mode == "rejection" else None}
    common = {name: given[name] for name in ("temperature", "seed", "position")}
    if mode == "greedy":
        common["temperature"] = torch.zeros(6)
    anchor = torch.zeros(6, dtype=torch.int64)
    given["draft_tokens"] = markov_walk(draft[:, :5], None, None, anchor, **common, coupled=mode == "coupled").tokens
    actual = judge(given)
    assert [accepted for accepted, _ in actual] == [5, 5, 4, 1, 5, 2]
    assert actual == list(zip(*(x.tolist() for x in reference(**given))))


def test_residuals(tiles, judge, near_ties):
    """Disjoint p and q, a draft that is sure of its token, one that is sure of another, and one that is flat."""
    tiles("narrow")
    given = problem(32, 1, 150, "rejection", lengths=[1] * 32, temperatures=(1.0, 0.6, 1.5))
    kind, ids = torch.arange(32)[:, None] % 4, torch.arange(150)
    target, draft, tokens = given["target_logits"], given["draft_logits"], given["draft_tokens"]
    target[:, 0] = torch.where((kind == 0) & (ids < 75), -INF, target[:, 0])
    draft[:, 0] = torch.where((kind == 0) & (ids >= 75), -INF, draft[:, 0])
    draft[:, 0] = torch.where((kind == 1) & (ids != 7), -INF, draft[:, 0])
    draft[:, 0] = torch.where((kind == 2) & (ids != 99), draft[:, 0] - 50, draft[:, 0])
    draft[:, 0] = torch.where(kind == 3, 0.0, draft[:, 0])
    common = {name: given[name] for name in ("temperature", "seed", "position")}
    tokens[:] = markov_walk(draft, None, None, torch.zeros(32).long(), **common).tokens
    expected = check(judge(given), given, near_ties)
    assert all(expected[row][0] == 0 and expected[row][1] >= 75 for row in range(0, 32, 4))
    assert {accepted for accepted, _ in expected} == {0, 1}


def test_an_empty_residual_falls_back_to_p(tiles, judge, near_ties):
    """q just above p everywhere, from a log_sum that is too small; the draft is refused for it where p is 0."""
    tiles("narrow")
    given = problem(20, 2, 150, "rejection", lengths=[2] * 20, temperatures=(1.0, 0.6))
    target = given["target_logits"]
    target[:, :2, ::2] = -INF
    given["draft_logits"] = target[:, :2].clone()
    given = with_statistics(given)
    given["draft_log_sum"] -= 1e-3
    # A token of p = 0: the strict test refuses it whatever u is, and q = 0 too, so the residual of all is empty.
    given["draft_tokens"][::2, 0] = 0
    given["draft_tokens"][1::2, 1] = 0
    expected = check(judge(given), given, near_ties)
    assert {accepted for accepted, _ in expected} == {0, 1}
    assert all(token % 2 for _, token in expected)


BROKEN = [pytest.param(NAN, 0, id="nan"), pytest.param(INF, 140, id="+inf"), pytest.param(-INF, None, id="all -inf")]


@pytest.mark.parametrize("cuts", [{}, {"top_k": 20}], ids=["whole", "top-k"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value, where", BROKEN)
def test_a_broken_target_row_gives_minus_one(value, where, mode, cuts, tiles, judge):
    """The drafts agree for certain up to it; rows 1 and 2 need it, in others it lies past the length or a rejection."""
    tiles("narrow")
    target = torch.full((5, 3, 150), -30.0)
    target[..., 77] = 30.0
    given = problem(5, 2, 150, mode, lengths=[2, 2, 1, 0, 2], temperatures=(1.0, 0.7, 0.0, 1.3))
    given["draft_logits"] = target[:, :2].clone() if mode == "rejection" else None
    given["draft_tokens"] = torch.full((5, 2), 77)
    given["draft_tokens"][4, 0] = 3
    if mode == "rejection":
        given["draft_logits"][4, 0, 3] = 90.0
    target[1:, 1, slice(None) if where is None else where] = value
    given["target_logits"] = target
    actual = judge(given, **cuts)
    assert actual[:4] == [(2, 77), (1, -1), (1, -1), (0, 77)]
    assert actual[4][0] == 0 and actual[4][1] >= 0
    assert actual == list(zip(*(x.tolist() for x in reference(**given, **cuts))))


@pytest.mark.parametrize("mode", MODES)
def test_minus_one_never_equals_minus_one(mode, judge):
    """A drafter that failed before a target row that is broken: nothing is kept, at any temperature."""
    given = problem(3, 1, 63, mode, lengths=[1, 1, 1], temperatures=(0.0, 1.0))
    given["target_logits"][:2] = NAN
    given["draft_tokens"][:] = -1
    actual = judge(given)
    assert actual[:2] == [(0, -1)] * 2 and actual[2][0] == 0 and actual[2][1] >= 0


@pytest.mark.parametrize("mode", MODES)
def test_an_id_that_is_no_token(mode, judge, near_ties):
    """Nothing is read past the vocabulary; greedy and coupled rows refuse it."""
    given = problem(6, 2, 63, mode, lengths=[2] * 6)
    given["draft_tokens"][:, 0] = torch.tensor([63, 66, 10**9] * 2)
    actual = judge(given)
    check(actual, given, near_ties)
    assert mode == "rejection" or all(accepted == 0 for accepted, _ in actual)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_ties_go_to_the_lowest_id(mode, tiles, judge):
    """Within a tile and in two tiles; the lower token is kept as a draft, the higher is not."""
    tiles("narrow")
    given = problem(3, 2, 150, mode, lengths=[2, 2, 2], temperatures=(0.0,))
    given["target_logits"].zero_()
    for slot, pair in enumerate([(70, 140), (33, 34), (3, 149)]):
        given["target_logits"][:, slot, list(pair)] = 1.0
    given["draft_tokens"][:] = torch.tensor([[70, 33], [140, 33], [70, 34]])
    assert judge(given) == [(2, 3), (0, 70), (1, 33)]


def test_a_broken_draft_row_that_a_resample_needs(judge):
    given = problem(3, 2, 63, "rejection", lengths=[2, 2, 0], temperatures=(1.0,))
    given["draft_logits"][:, 0, 5] = NAN
    assert judge(given) == list(zip(*(x.tolist() for x in reference(**given))))
    assert judge(given)[0] == (0, -1)


# V, T, tiles, cuts by row of 4 rows (0.8, greedy, 1.3, 1.0), in rejection and coupled mode
CUTS = [
    pytest.param(63, 2, "default", {"top_k": [3, 3, 62, 63]}, id="top-k"),
    pytest.param(150, 1, "narrow", {"top_k": [100, 2, 0, 1]}, id="top-k-neutral-and-many"),
    pytest.param(63, 1, "default", {"top_p": [0.8, 0.5, 0.3, 1.0]}, id="top-p"),
    pytest.param(63, 1, "default", {"top_p": [0.0, 0.5, 1e-20, 0.95]}, id="top-p-tiny"),
    pytest.param(150, 1, "narrow", {"min_p": [0.05, 0.5, 0.4, 0.0]}, id="min-p"),
    pytest.param(
        150, 1, "narrow", {"top_k": [50, 9, 0, 0], "top_p": [0.8, 0.1, 0.9, 1.0], "min_p": [0.02, 0.3, 0.1, 0.0]},
        id="all-three-neutral-and-greedy",
    ),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("vocab, block, shape, cuts", CUTS)
def test_cuts(vocab, block, shape, cuts, mode, tiles, judge, near_ties):
    tiles(shape)
    given = problem(4, block, vocab, mode, lengths=[block] * 3 + [0])
    cuts = {name: torch.tensor(v) for name, v in cuts.items()}
    check(judge(given, **cuts), given, near_ties, **cuts)


@pytest.mark.parametrize(
    "vocab, spread, cuts",
    [
        pytest.param(49152, 0.1, {"top_p": 0.9}, id="nucleus-larger-than-the-list"),
        pytest.param(5000, 0.0, {"top_k": 50, "top_p": 0.9}, id="list-overflow-of-ties"),
        pytest.param(151936, 2.0, {"top_k": 50, "top_p": 0.95}, id="V151936"),
    ],
)
def test_cuts_of_large_vocabularies(vocab, spread, cuts, tiles, judge, near_ties):
    tiles("wide")
    given = problem(1, 1, vocab, "rejection", lengths=[1], spread=spread)
    check(judge(given, **cuts), given, near_ties, **cuts)


def test_cuts_do_nothing_in_greedy_mode(judge):
    given = problem(4, 2, 63, "greedy")
    assert judge(given, top_k=1, top_p=0.1) == judge(given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [{}, {"min_p": 0.1}], ids=["whole", "min-p"])
def test_a_row_has_the_same_result_in_any_batch(mode, cuts, judge, dtype):
    given = problem(33, 1, 63, mode, dtype, lengths=[1 if row in (3, 16, 32) else -1 for row in range(33)])
    batch = judge(given, **cuts)
    for rows in ([3], [16], [32], [*range(16, 33)]):
        some = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        assert judge(some, **cuts) == [batch[row] for row in rows]


def test_no_rows(device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    tensors = (
        torch.zeros(0, 3, 5, device=device),
        none[:, None].expand(0, 2),
        torch.zeros(0, 2, 5, device=device),
        none,
    )
    accepted, following = verify(*tensors, temperature=none.float(), seed=none, position=none)
    assert accepted.shape == following.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}], ids=["whole", "cut"])
def test_100_repeats_have_the_same_result(mode, cuts, judge, dtype):
    given = problem(17, 7, 49152, mode, dtype)
    first = judge(given, **cuts)
    for _ in range(99):
        assert judge(given, **cuts) == first
