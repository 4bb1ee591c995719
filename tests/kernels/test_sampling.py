"""Row statistics and cuts against torch and the reference, in memory that is NaN wherever they have no business."""

from __future__ import annotations

import math

import pytest
import torch

from dspark_fast.kernels import cut_logits, launch
from dspark_fast.kernels.sampling import cut_rows
from dspark_fast.kernels.statistics import GROUP, new_groups, row_statistics
from dspark_fast.reference.sampling import DRAFT, exponentials
from dspark_fast.reference.sampling import cut_logits as reference

pytestmark = pytest.mark.usefixtures("guarded")

INF, NAN = float("inf"), float("nan")
EPS = torch.finfo(torch.float32).eps
SUM = 3e-6  # relative error of a sum of exponentials


def rows_of_logits(batch, slots, vocab, dtype, *, ties=False, spread=3.0):
    logits = torch.randn(batch, slots, vocab) * spread
    if ties:
        logits = logits.round()
    logits[torch.rand(logits.shape) < 0.1] = -INF
    logits[..., vocab // 2] = 0.0  # no row of -inf alone
    return logits.to(dtype)


# B, S, V, tiles
STATISTICS = [
    pytest.param(3, 2, 1, "default", id="V1"),
    pytest.param(1, 6, 2, "default", id="V2"),
    pytest.param(3, 8, 63, "narrow", id="V63"),
    pytest.param(17, 2, 311, "narrow", id="V311-in-5-tiles-B17"),
    pytest.param(1, 17, 311, "default", id="V311-S17"),
    pytest.param(2, 2, 49152, "wide", id="V49152"),
    pytest.param(1, 1, 151936, "wide", id="V151936"),
]


@pytest.mark.parametrize("batch, slots, vocab, shape", STATISTICS)
def test_row_statistics(batch, slots, vocab, shape, tiles, dtype, device, embedded):
    tiles(shape)
    logits = rows_of_logits(batch, slots, vocab, dtype, ties=batch == 3)
    temperature = torch.tensor([0.7, 0.0, 1.0, 100.0]).repeat(5)[:batch]
    lengths = torch.arange(batch).flip(0) % (slots + 1) - 1  # -1: a finished row
    lengths[0] = slots - 1
    told = torch.arange(slots) <= lengths[:, None]
    poisoned = logits.masked_fill(~told[..., None], NAN)
    view = embedded(poisoned, 2 if batch == 3 else 1)
    groups = new_groups(view)
    options = {"temperature": temperature.to(device), "lengths": lengths.to(device), "group_best": groups}
    best, token, total = (x.cpu() for x in row_statistics(view, **options))
    assert best[~told].isnan().all() and total[~told].isnan().all(), "a row past the length was written"
    assert (token[~told] == torch.iinfo(torch.int32).max // 2).all()

    logits = logits.float()
    assert torch.equal(best.amax(-1)[told], logits.amax(-1)[told])
    greedy = told & (temperature == 0)[:, None]
    first = torch.where(best == best.amax(-1, keepdim=True), token, 2**31 - 1).amin(-1)
    assert torch.equal(first[greedy].long(), logits.argmax(-1)[greedy])
    for row, slot in (told & ~greedy).nonzero().tolist():
        t = temperature[row].double()
        tops = best[row, slot].double()
        merged = (total[row, slot].double() * ((tops - tops.max()) / t).exp()).sum()
        exact = ((logits[row, slot].double() - tops.max()) / t).exp().sum()
        assert float(merged) == pytest.approx(float(exact), rel=SUM)
    groups = groups.cpu().flatten(2)
    padded = torch.full((batch, slots, groups.shape[-1] * GROUP.value), -INF)
    padded[..., :vocab] = logits
    assert torch.equal(groups[told], padded.unflatten(-1, (-1, GROUP.value)).amax(-1)[told])


@pytest.mark.parametrize("broken", [pytest.param(NAN, id="nan"), pytest.param(INF, id="+inf")])
def test_a_broken_tile_says_so(broken, tiles, device):
    tiles("narrow")
    logits = rows_of_logits(2, 3, 311, torch.float32)
    whole = row_statistics(logits.to(device), temperature=torch.tensor([1.0, 0.0], device=device))
    logits[:, 1, 100] = broken
    best, _, total = row_statistics(logits.to(device), temperature=torch.tensor([1.0, 0.0], device=device))
    width = launch.parameters("row_statistics", device)["BV"]
    assert (best[:, 1, 100 // width] == INF).all()
    best[:, 1, 100 // width] = whole[0][:, 1, 100 // width]
    assert torch.equal(best, whole[0])
    assert torch.equal(total[0, [0, 2]], whole[2][0, [0, 2]])


@pytest.mark.parametrize(
    "vocab, shape",
    [pytest.param(63, "default", id="V63"), pytest.param(311, "narrow", id="V311-in-5-tiles")],
)
def test_the_coupled_race(vocab, shape, tiles, dtype, device, near_ties):
    tiles(shape)
    logits = rows_of_logits(3, 3, vocab, dtype)
    temperature, seed = torch.tensor([0.7, 0.0, 1e-3]), torch.tensor([5, -7, 2**40])
    position = torch.tensor([0, 30, 2**31])
    floor = torch.full((3, 3), -1.0)
    noise = exponentials(seed[:, None], position[:, None] + 1 + torch.arange(3), torch.tensor(0), DRAFT, vocab)
    common = {"temperature": temperature.to(device), "seed": seed.to(device), "position": position.to(device)}
    for cut in (None, floor):
        given = None if cut is None else cut.to(device)
        groups = new_groups(logits.to(device))
        options = common | {"floor": given, "sums": False, "group_best": groups}
        best, token = (x.cpu() for x in row_statistics(logits.to(device), **options)[:2])
        token = torch.where(best == best.amax(-1, keepdim=True), token, 2**31 - 1).amin(-1)
        scaled = logits.float() / temperature.masked_fill(temperature == 0, 1.0)[:, None, None]
        if cut is not None:
            scaled[[0, 2]] = scaled[[0, 2]].masked_fill(scaled[[0, 2]] < -1.0, -INF)
        keys = torch.where(temperature[:, None, None] == 0, scaled, scaled - noise.log())
        torch.testing.assert_close(best.amax(-1), keys.amax(-1), rtol=1e-6, atol=2e-6)
        assert torch.equal(groups.cpu().flatten(2).amax(-1), best.amax(-1))
        for row in range(3):
            for slot in range(3):
                top = keys[row, slot].topk(2).values
                ulp = EPS * max(1.0, float(top.abs().max())) if temperature[row] > 0 else 1e-45
                expected = int(keys[row, slot].argmax())
                near_ties.same(int(token[row, slot]), expected, lambda top=top, ulp=ulp: [(*top, ulp)])


def cut(logits, temperature, cuts, device):
    given = {name: torch.as_tensor(v, device=device).expand(len(logits)).contiguous() for name, v in cuts.items()}
    return cut_logits(logits.to(device), temperature.to(device), **given).cpu()


def check_cut(actual, logits, temperature, cuts, near_ties):
    """The same tokens with the same bits; each token that differs stands at the edge of top-p or min-p, or fails."""
    expected = reference(logits, temperature, **cuts)
    kept, wanted = actual > -INF, expected > -INF
    assert torch.equal(actual[kept & wanted], expected[kept & wanted])
    top_p, min_p = (torch.as_tensor(cuts.get(name, 0.0)).expand(len(logits)) for name in ("top_p", "min_p"))
    for row in range(len(logits)):
        for slot in range(logits.shape[1]):
            differing = (kept[row, slot] != wanted[row, slot]).nonzero().flatten().tolist()
            assert len(differing) < 10, f"{len(differing)} tokens differ"
            near_ties.same(True, True, None)
            for token in differing:
                scaled = (logits[row, slot].float() / temperature[row]).double()
                weight = (scaled - scaled.max()).exp()
                above = weight[scaled > scaled[token]].sum() / weight.sum()
                edges = [(above, top_p[row], EPS), (weight[token], min_p[row], EPS * weight[token])]
                near_ties.same(kept[row, slot, token], wanted[row, slot, token], lambda edges=edges: edges)


# V, S, tiles, spread of the logits, ties, and by row: temperature, cuts
CUTS = [
    pytest.param(1, 1, "default", 3, False, [0.7, 1.0], {"top_k": [1, 5], "top_p": [0.0, 0.5], "min_p": 1.0}, id="V1"),
    pytest.param(2, 2, "default", 3, False, [0.7, 1.0], {"top_k": [1, 2], "top_p": [0.9, 0.3]}, id="V2"),
    pytest.param(63, 2, "default", 3, False, [0.7, 0.0, 2.0], {"top_k": [5, 5, 62]}, id="top-k"),
    pytest.param(63, 1, "default", 3, False, [1.0, 0.5, 1.0], {"top_k": [63, 0, 2**40]}, id="top-k-not-below-V"),
    pytest.param(311, 1, "narrow", 3, False, [0.7, 1.0], {"top_k": [9, 200]}, id="top-k-above-the-number-of-groups"),
    pytest.param(311, 1, "narrow", 3, True, [1.0, 1.0, 1.7], {"top_k": [1, 20, 110]}, id="top-k-ties"),
    pytest.param(311, 1, "narrow", 3, False, [0.7, 1.0, 1.7], {"top_p": [0.8, 0.95, 0.3]}, id="top-p"),
    pytest.param(311, 1, "default", 3, True, [1.0, 1.0, 1.7], {"top_p": [0.7, 0.95, 0.3]}, id="top-p-ties"),
    pytest.param(63, 1, "default", 3, False, [1.0] * 4, {"top_p": [0.0, 1e-30, 0.99999994, 1.0]}, id="top-p-extremes"),
    pytest.param(311, 1, "narrow", 3, False, [0.7, 1.0, 100.0], {"min_p": [0.05, 0.7, 0.99]}, id="min-p"),
    pytest.param(311, 1, "default", 1, True, [1.0, 0.0, 0.5], {"min_p": 1.0}, id="min-p-1-and-greedy-with-a-tied-top"),
    pytest.param(311, 1, "default", 3, True, [0.9, 1.3], {"top_k": [50, 30], "top_p": [0.7, 0.9]}, id="k-and-p"),
    pytest.param(311, 1, "narrow", 3, False, [0.9, 1.3], {"top_p": [0.7, 0.99], "min_p": [0.2, 1e-3]}, id="p-and-min"),
    pytest.param(
        311, 1, "narrow", 3, False, [0.9, 0.0, 1.3, 1.0, 1e-3],
        {"top_k": [50, 3, 0, 0, 7], "top_p": [0.8, 0.1, 1.0, 0.9, 0.5], "min_p": [0.02, 0.5, 0.0, 0.3, 0.1]},
        id="all-three-and-neutral-and-greedy-rows",
    ),
    pytest.param(5000, 1, "wide", 0, True, [1.0, 1.0], {"top_k": [50, 0], "top_p": [0.9, 0.5]}, id="all-equal"),
    pytest.param(49152, 1, "wide", 0.1, False, [1.0], {"top_p": 0.9}, id="flat-V49152-larger-than-the-list"),
    pytest.param(49152, 1, "wide", 0.1, False, [1.0], {"min_p": 0.5}, id="flat-V49152-min-p"),
    pytest.param(49152, 1, "wide", 3, False, [0.8], {"top_k": 50, "top_p": 0.95, "min_p": 0.01}, id="V49152"),
    pytest.param(151936, 1, "wide", 3, False, [0.8], {"top_k": 20, "top_p": 0.9}, id="V151936"),
]  # fmt: skip


@pytest.mark.parametrize("vocab, slots, shape, spread, ties, temperature, cuts", CUTS)
def test_cut_logits(vocab, slots, shape, spread, ties, temperature, cuts, tiles, device, near_ties):
    tiles(shape)
    logits = rows_of_logits(len(temperature), slots, vocab, torch.float32, ties=ties, spread=spread)
    temperature = torch.tensor(temperature)
    cuts = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in cuts.items()}
    actual = cut(logits, temperature, cuts, device)
    assert actual.shape == logits.shape and actual.dtype == torch.float32
    check_cut(actual, logits, temperature, cuts, near_ties)
    if slots == 1:
        assert torch.equal(cut(logits[:, 0], temperature, cuts, device), actual[:, 0])


def test_cut_logits_of_other_dtypes(dtype, tiles, device, near_ties):
    """Half precision has ties of its own, and signed zeros are one value."""
    tiles("narrow")
    logits = rows_of_logits(3, 1, 311, dtype)
    logits[2] = torch.tensor([0.0, -0.0, -1.0]).repeat(104)[:311]
    temperature, cuts = torch.tensor([0.7, 1.0, 1.0]), {"top_k": torch.tensor([40, 9, 5]), "top_p": 0.9}
    check_cut(cut(logits, temperature, cuts, device), logits, temperature, cuts, near_ties)


@pytest.mark.parametrize(
    "vocab, shape, spread, cuts",
    [
        pytest.param(311, "narrow", 3, {"top_k": 9}, id="top-k"),
        pytest.param(311, "narrow", 3, {"top_p": 0.9}, id="top-p"),
        pytest.param(311, "default", 3, {"top_p": 0.9, "min_p": 0.05}, id="top-p-min-p"),
        pytest.param(311, "default", 3, {"top_k": 50, "top_p": 0.5, "min_p": 0.05}, id="all-three"),
        pytest.param(49152, "wide", 0.1, {"top_p": 0.9}, id="top-p-larger-than-the-list"),
        pytest.param(49152, "wide", 0.1, {"min_p": 0.5}, id="min-p-larger-than-the-list"),
        pytest.param(5000, "wide", 0, {"top_k": 5}, id="list-overflow"),
    ],
)
def test_the_sum_of_what_is_kept(vocab, shape, spread, cuts, tiles, device, embedded):
    """What verification divides by. Rows past the length are NaN, rows without a cut keep their whole sum."""
    tiles(shape)
    logits = rows_of_logits(2, 2, vocab, torch.float32, spread=spread)
    temperature, lengths = torch.tensor([0.7, 1.0]), torch.tensor([0, 1])
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = {name: torch.tensor([v, neutral[name]]) for name, v in cuts.items()}
    expected = reference(logits, temperature, **rows).double()
    poisoned = logits.clone()
    poisoned[0, 1] = NAN
    view = embedded(poisoned, 1)
    common = {"temperature": temperature.to(device), "lengths": lengths.to(device)}
    groups = new_groups(view)
    best, _, total = row_statistics(view, **common, group_best=groups)
    given = {name: v.to(device) for name, v in rows.items()}
    floor, kept = (x.cpu() for x in cut_rows(view, best, total, groups, **common, **given))
    exact = (expected - expected.amax(-1, keepdim=True)).exp().sum(-1)
    for row, slot in ((0, 0), (1, 0), (1, 1)):
        assert float(kept[row, slot]) == pytest.approx(float(exact[row, slot]), rel=SUM)
    assert floor[0, 0] > -INF and (floor[1] == -INF).all()
    assert floor[0, 1].isnan() and kept[0, 1].isnan()


def test_values_that_a_division_makes_equal(device):
    """1.75 and the value below it are one value after a division by 1.7: both are kept, and both are in the sum."""
    below = torch.nextafter(torch.tensor(1.75), torch.tensor(0.0))
    logits = torch.full((1, 1, 128), -1.0)
    logits[..., 5], logits[..., 70] = 1.75, below
    temperature = next(
        t for t in (1 + torch.rand(1) for _ in range(10000)) if float(torch.tensor(1.75) / t) == float(below / t)
    )
    groups = new_groups(logits.to(device))
    best, _, total = row_statistics(logits.to(device), temperature=temperature.to(device), group_best=groups)
    top_k = torch.tensor([1], device=device)
    floor, kept = cut_rows(logits.to(device), best, total, groups, temperature=temperature.to(device), top_k=top_k)
    assert (logits[0, 0] / temperature >= floor.cpu()[0, 0]).sum() == 2
    assert float(kept) == 2.0


@pytest.mark.parametrize("cuts", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids="-".join)
@pytest.mark.parametrize("broken", [NAN, INF, -INF], ids=str)
def test_a_broken_row_stays_broken_and_alone(broken, cuts, tiles, device):
    tiles("narrow")
    logits = rows_of_logits(3, 1, 100, torch.float32)
    temperature = torch.tensor([0.8, 1.1, 1.0])
    whole = cut(logits, temperature, cuts, device)
    logits[1, 0, slice(None) if broken == -INF else 40] = broken
    actual = cut(logits, temperature, cuts, device)
    assert torch.equal(actual[[0, 2]], whole[[0, 2]])
    assert not math.isfinite(actual[1].max())


@pytest.mark.parametrize("batch", [pytest.param(17, id="B17"), pytest.param(33, id="B33")])
def test_a_row_has_the_same_bits_in_any_batch(batch, tiles, dtype, device):
    """The last two rows, alone and together with others, most of which are finished: they cost nothing here."""
    tiles("narrow")
    logits = rows_of_logits(batch, 1, 130, dtype)
    temperature, top_p = torch.rand(batch) + 0.5, torch.ones(batch)
    top_p[-1] = 0.9
    lengths = torch.full((batch,), -1)
    lengths[[0, 3, -2, -1]] = 0

    def results(rows):
        moved, t, lives, p = (x[rows].to(device) for x in (logits, temperature, lengths, top_p))
        groups = new_groups(moved)
        common = {"temperature": t, "lengths": lives}
        best, token, total = row_statistics(moved, **common, group_best=groups)
        cuts = {"top_k": torch.full_like(lives, 20), "top_p": p}
        tensors = (best, token, total, groups, *cut_rows(moved, best, total, groups, **common, **cuts))
        return [torch.nan_to_num(x[-2:].float(), nan=-7.0) for x in tensors]

    together = results(list(range(batch)))
    for index in (1, 0):
        alone = results([batch - 2 + index])
        assert all(torch.equal(a[-1:], b[index : index + 1]) for a, b in zip(alone, together))


@pytest.mark.gpu
def test_100_repeats_have_the_same_bits(dtype, device):
    logits = rows_of_logits(17, 2, 49152, dtype).to(device)
    temperature = torch.linspace(0, 2, 17, device=device)
    cuts = {"top_k": torch.full((17,), 50, device=device), "top_p": torch.full((17,), 0.9, device=device)}
    first = cut_logits(logits, temperature, **cuts)
    for _ in range(99):
        assert torch.equal(cut_logits(logits, temperature, **cuts), first)
