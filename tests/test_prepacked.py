"""Linear layers on packed weights: the same products, nothing left behind, and never those of other weights."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dspark_fast
from dspark_fast.engine import prepacked as module
from dspark_fast.engine.prepacked import prepackable, prepacked, weights_of

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU does not multiply bf16",
)


def layer(inputs=36, outputs=20, bias=True, dtype=torch.bfloat16):
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def error(found, truth):
    return ((found.float() - truth).square().mean() / truth.square().mean()).sqrt().item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(36, 20), (1, 1), (7, 3), (64, 97), (576, 192)])
@pytest.mark.parametrize("shape", [(1,), (6,), (3, 5), (0,), (2, 300)])
@torch.no_grad()
def test_products(shape, inputs, outputs, bias):
    one = layer(inputs, outputs, bias)
    x = torch.randn(*shape, inputs, dtype=torch.bfloat16)
    truth = torch.nn.functional.linear(x.float(), one.weight.float(), None if one.bias is None else one.bias.float())
    with prepacked([one]):
        found = one(x)
    assert found.shape == truth.shape and found.dtype == torch.bfloat16
    if truth.numel():
        assert error(found, truth) < 4e-3  # bf16 rounds to 2e-3


@torch.no_grad()
def test_rows_that_lie_apart():
    one, x = layer(), torch.randn(36, 6, dtype=torch.bfloat16).T
    with prepacked([one]):
        found = one(x), one(x[::2])
    assert all(error(one(part), other.float()) < 4e-3 for part, other in zip((x, x[::2]), found))


@torch.no_grad()
def test_what_has_another_dtype_runs_plainly():
    one = layer(dtype=torch.float32)
    assert prepackable([one]) == []
    one = layer()
    with prepacked([one]), pytest.raises(RuntimeError, match="dtype"):
        one(torch.randn(2, 36))


def test_which_layers():
    class Theirs(nn.Linear):
        pass

    class Quantised(torch.Tensor):
        pass

    own = layer()
    own.forward = lambda x: x
    sparse = layer(40, 20)
    sparse.weight.data = torch.randn(20, 80, dtype=torch.bfloat16)[:, ::2]
    other = layer()
    other.weight = nn.Parameter(Quantised(torch.randn(20, 36, dtype=torch.bfloat16)), requires_grad=False)
    model = nn.ModuleList([layer(), layer(dtype=torch.float32), Theirs(4, 4).bfloat16(), own, sparse, other])
    assert prepackable([model, model]) == [model[0]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prepackable([model]) == []
    tied = layer(bias=False)
    tied.weight = model[0].weight
    assert weights_of([model[0], tied]) == 36 * 20 * 2


@torch.no_grad()
def test_all_is_as_before():
    one, x = layer(), torch.randn(3, 36, dtype=torch.bfloat16)
    before = dict(vars(one))
    plain = one(x)
    with pytest.raises(KeyboardInterrupt), prepacked([one, layer()]):
        raise KeyboardInterrupt
    assert dict(vars(one)) == before and torch.equal(one(x), plain) and not module._running


CHANGES = {
    "an optimiser's step": lambda weight: weight.mul_(1.5),
    "past autograd": lambda weight: weight.data.mul_(1.5),
    "one value past autograd": lambda weight: weight.data[3, 5].add_(2.0),
    "a power of two of the last row": lambda weight: weight.data[-1, 7].mul_(16),
    "one sign": lambda weight: weight.data[1, 3].neg_(),
    "rows that change places": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "heads that change places": lambda weight: weight.data.copy_(weight.data.roll(16, 1)),
    "numpy": lambda weight: weight.data.view(torch.int16).numpy().__setitem__((3, 5), 123),
    "another tensor": lambda weight: setattr(weight, "data", torch.randn_like(weight)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_weights_that_change_are_packed_anew(change):
    one, x = layer(64, 32), torch.randn(3, 64, dtype=torch.bfloat16)
    with prepacked([one]):
        before = one(x)
    change(one.weight)
    with prepacked([one]):
        after = one(x)
    truth = one(x).float()
    assert error(after, truth) < 4e-3 and (before.float() - truth).abs().max() > 2 * (after.float() - truth).abs().max()


@torch.no_grad()
def test_weights_that_lie_anywhere():
    flat, wide = nn.ModuleList([layer(3, 3, bias=False), layer(8, 4)]), layer(8, 1)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(flat.parameters()).detach(), flat.parameters())
    assert flat[1].weight.storage_offset() % 4
    wide.weight.data = torch.randn(1, 9, dtype=torch.bfloat16)[:, :8]
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    for one in (flat[1], wide):
        assert prepackable([one]) == [one]
        with prepacked([one]):
            found = one(x)
        assert error(found, one(x).float()) < 4e-3
    assert prepackable([nn.Linear(8, 0).bfloat16(), nn.Linear(0, 8).bfloat16()]) == []


def test_another_thread_may_train():
    one, x = layer(), torch.randn(3, 36, dtype=torch.bfloat16, requires_grad=True)
    with prepacked([one]):
        one(x).sum().backward()
    assert x.grad is not None and one.weight.grad is not None


@torch.no_grad()
def test_a_call_inside_a_call():
    one, x = layer(), torch.randn(3, 36, dtype=torch.bfloat16)
    with prepacked([one]):
        with prepacked([layer()]):
            pass
        assert one.weight.data_ptr() in {address for address, _ in module._running}
        found = one(x)
    assert error(found, one(x).float()) < 4e-3 and not module._running


@torch.no_grad()
def test_what_an_interrupt_left_is_ours():
    one, x = layer(), torch.randn(3, 36, dtype=torch.bfloat16)
    inside = prepacked([one])
    inside.__enter__()  # and never out
    assert prepackable([one]) == [one]
    one.weight.mul_(1.5)
    with prepacked([one]):
        assert error(one(x), torch.nn.functional.linear(x, one.weight, one.bias).float()) < 4e-3
    assert "forward" not in vars(one)
    del inside
    module._running.clear()


@torch.no_grad()
def test_weights_that_are_cast_give_their_memory_back():
    one = layer()
    torch.__future__.set_swap_module_params_on_conversion(True)  # which refuses weights with weak references to them
    try:
        with prepacked([one]):
            packs = len(module._packs)
        one.to(torch.float32)
        with prepacked([]):
            assert len(module._packs) == packs - 1
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_where_nothing_can_be_packed(monkeypatch):
    with torch.backends.mkldnn.flags(enabled=False):
        assert prepackable([layer()]) == []
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # another torch
    assert prepackable([layer()]) == []


@torch.no_grad()
def test_they_are_packed_once_and_gone_with_the_layer(monkeypatch):
    made, make = [], module.torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(module, "_reorder", lambda weight: (made.append(1), make(weight))[1])
    one = layer()
    tied = layer(bias=False)
    tied.weight = one.weight
    for _ in range(3):
        with prepacked([one, tied]):
            pass
    assert len(made) == 1
    packs, forwards = len(module._packs), len(module._forwards)
    del one, tied
    gc.collect()
    assert len(module._packs) == packs - 1 and len(module._forwards) == forwards - 2


# --- in generate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target(fresh=True).to(torch.bfloat16)
    return model, make_draft(model).to(torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_generate(compiled, pair, prompts):
    model, draft = pair
    batch = prompts((7, 2, 5))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "do_sample": False, "off_switch": False}
    plain = dspark_fast.generate(model, draft, batch.input_ids, pack_weights=False, **settings)
    out = dspark_fast.generate(model, draft, batch.input_ids, compile_target=compiled, **settings)
    assert torch.equal(out, plain)  # so few terms that their sums round alike
    assert out.stats.memory["packed"] == weights_of(prepackable([model, draft])) and "packed" not in plain.stats.memory
    assert not any("forward" in vars(one) for one in (*model.modules(), *draft.modules()))


def test_when(pair, prompts, monkeypatch, make_target):
    model, draft = pair
    ids = prompts((4,)).input_ids

    def bytes_of(**options):
        out = dspark_fast.generate(model, draft, ids, max_new_tokens=2, do_sample=False, **options)
        return out.stats.memory.get("packed", 0)

    size = bytes_of()
    assert size and not bytes_of(pack_weights=False)
    monkeypatch.setattr(module, "UNASKED", size - 1)
    assert not bytes_of() and bytes_of(pack_weights=True) == size
    with pytest.raises(ValueError, match="pack_weights is True, but there are no linear layers in bf16 on a CPU"):
        dspark_fast.generate(make_target(), None, ids, max_new_tokens=2, pack_weights=True)
