"""What training begins with: anchors and labels, many blocks in one pass, the drafter's first weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from dspark_fast.reference import draft_block
from dspark_fast.training.blocks import block_labels, run_blocks, sample_anchors
from dspark_fast.training.initialise import initialise_from_target
from dspark_fast.training.recipe import Recipe, fresh_draft

VOCABULARY = 97
BLOCK = 5


def assert_close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# --- anchors and labels -----------------------------------------------------------------------------------------------


def test_anchors_are_distinct_allowed_and_ascending():
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    allowed = [{p for p in range(39) if row[p] and row[p + 1]} for row in mask]
    for count in (1, 5, 12):
        anchors, valid = sample_anchors(mask, count, torch.Generator().manual_seed(6))
        assert anchors.shape == valid.shape == (6, count)
        for row, keep, may in zip(anchors.tolist(), valid, allowed):
            assert bool(keep.all()) == (len(may) >= count)
            assert set(row[: int(keep.sum())]) <= may
            kept = row[: int(keep.sum())]
            assert kept == sorted(set(kept))
    again, _ = sample_anchors(mask, 12, torch.Generator().manual_seed(6))
    assert torch.equal(anchors, again)
    assert not torch.equal(anchors, sample_anchors(mask, 12, torch.Generator().manual_seed(7))[0])


def test_every_allowed_anchor_is_as_likely():
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1]])
    generator = torch.Generator().manual_seed(8)
    counts = torch.zeros(9)
    for _ in range(500):
        anchors, valid = sample_anchors(mask, 2, generator)
        assert valid.all()
        counts[anchors[0]] += 1
    assert counts.nonzero()[:, 0].tolist() == [1, 2, 5, 6, 7]
    assert counts[counts > 0].min() > 150  # 200 expected, standard deviation 11


def test_too_few_anchors_are_filled_up_with_invalid_ones_at_0():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]])
    anchors, valid = sample_anchors(mask, 4, torch.Generator())
    assert anchors.tolist() == [[1, 5, 0, 0], [0, 0, 0, 0], [6, 0, 0, 0]]
    assert valid.tolist() == [[True, True, False, False], [False] * 4, [True, False, False, False]]
    anchors, valid = sample_anchors(mask, 100, torch.Generator())  # more than there are positions
    assert anchors.shape[1] <= 100 and valid.sum(1).tolist() == [2, 0, 1]
    anchors, valid = sample_anchors(torch.ones(1, 1), 3)
    assert not valid.any()


def test_labels_against_a_loop():
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    mask = torch.rand(3, 20, generator=generator) < 0.75
    anchors = torch.arange(20).expand(3, -1)
    valid = torch.rand(3, 20, generator=generator) < 0.9
    labels, previous, counted = block_labels(ids, mask, anchors, valid, BLOCK)
    for row in range(3):
        for p in range(20):
            going = bool(valid[row, p])
            for slot in range(BLOCK):
                going = going and p + 1 + slot < 20 and bool(mask[row, p + 1 + slot])
                assert bool(counted[row, p, slot]) == going
                if going:
                    assert labels[row, p, slot] == ids[row, p + 1 + slot]
                    assert previous[row, p, slot] == ids[row, p + slot]


# --- packed blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@torch.no_grad()
def test_packed_blocks_are_the_blocks_of_generation(make_target, make_draft, batch_of, family):
    model = make_target(family)
    draft = make_draft(model)
    batch = batch_of(model, draft)
    anchors = torch.tensor([[1, 2, 9, 22], [1, 16, 8, 0]])  # the last positions too, and no order needed
    valid = torch.tensor([[True, True, True, True], [True, True, True, False]])
    hidden = run_blocks(draft, batch.input_ids, batch.features, anchors, valid)
    assert hidden.shape == (2, 4, BLOCK, 64)
    assert hidden.isfinite().all()
    for row in range(2):
        for index in range(4):
            if valid[row, index]:
                p = int(anchors[row, index])
                alone = draft_block(draft, batch.features[row : row + 1, :p], batch.input_ids[row : row + 1, p])
                assert_close(hidden[row, index], alone.hidden[0])


@torch.no_grad()
def test_what_a_block_may_not_see_has_no_influence(make_target, make_draft, batch_of):
    """Not the padding, nothing from the anchor on, no other block, and an invalid block not even its anchor."""
    model = make_target()
    draft = make_draft(model)
    batch = batch_of(model, draft)
    hidden = run_blocks(draft, batch.input_ids, batch.features, batch.anchors, batch.valid)

    wider = F.pad(batch.features, (0, 0, 0, 9), value=3.0)
    wider[1, 17:] = -5.0
    ids = F.pad(batch.input_ids, (0, 9), value=5)
    assert_close(run_blocks(draft, ids, wider, batch.anchors, batch.valid), hidden)

    first = batch.anchors.clone(), batch.features.clone(), batch.input_ids.clone()
    first[0][:, 1:] = torch.tensor([[19, 8, 3], [2, 13, 6]])
    first[1][0, 6:], first[1][1, 4:] = 7.0, 7.0
    first[2][0, 7:], first[2][1, 5:] = 7, 7
    others = run_blocks(draft, first[2], first[1], first[0], torch.ones_like(batch.valid))
    assert_close(others[:, 0], hidden[:, 0])

    ids = batch.input_ids.clone()
    ids[1, 0] = 33
    assert_close(run_blocks(draft, ids, batch.features * 2, batch.anchors, batch.valid)[1, 3], hidden[1, 3])


# --- the two ways to attend, and compiled -----------------------------------------------------------------------------


def inputs_of(draft, length, count, *, rows=2, seed=11):
    """Random arguments of ``run_blocks``: some anchors invalid, one on the first position, one on the last."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(length, (rows, count), generator=generator)
    valid = torch.rand(rows, count, generator=generator) < 0.8
    anchors[0, 0], anchors[-1, -1] = 0, length - 1
    valid[0, 0] = valid[-1, -1] = True
    valid[-1, 0] = False
    features = torch.randn(rows, length, draft.fc.in_features, generator=generator)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator), features, anchors, valid


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "count"), [(23, 4), (1, 1), (131, 53)], ids=str)
@torch.no_grad()
def test_flex_attention_is_the_split_one(make_target, make_draft, length, count, kv_heads):
    """131 and 265 keys and queries are more than two of its tiles each."""
    draft = make_draft(make_target(), num_key_value_heads=kv_heads)
    inputs = inputs_of(draft, length, count)
    assert_close(run_blocks(draft, *inputs, flex=True), run_blocks(draft, *inputs, flex=False))


@torch.no_grad()
def test_the_mask_of_flex_attention(make_target, make_draft, monkeypatch):
    """By its definition, query by query; and the tiles that it visits leave out none that a query sees, but some."""
    from torch.nn.attention import flex_attention as flex

    masks = []

    def watched(q, k, v, *, block_mask, enable_gqa):
        masks.append(block_mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(flex, "flex_attention", watched)
    draft = make_draft(make_target())
    length, count = 131, 53
    inputs = inputs_of(draft, length, count)
    anchors, valid = inputs[2:]
    anchors[:, :30].clamp_(max=2)
    run_blocks(draft, *inputs, flex=True)
    assert len(masks) == len(draft.layers) and masks[0] is masks[1]
    queries = count * BLOCK
    expected = torch.zeros(2, queries, length + queries, dtype=torch.bool)
    for row in range(2):
        for query in range(queries):
            block = query // BLOCK
            if valid[row, block]:
                expected[row, query, : anchors[row, block]] = True
            own = length + block * BLOCK
            expected[row, query, own : own + BLOCK] = True
    b, q, k = (torch.arange(n) for n in expected.shape)
    zero = torch.zeros((), dtype=torch.long)
    sees = masks[0].mask_mod(b[:, None, None], zero, q[:, None], k)
    assert torch.equal(sees, expected)
    tiles = masks[0].to_dense()[:, 0].bool()
    high, wide = masks[0].BLOCK_SIZE
    visited = tiles.repeat_interleave(high, 1).repeat_interleave(wide, 2)[:, :queries, : length + queries]
    assert not (expected & ~visited).any()
    assert not tiles.all()


def gradients_of(run, draft, inputs, weight):
    draft.zero_grad()
    hidden = run(draft, *inputs)
    (hidden.float() * weight).sum().backward()
    grads = {name: p.grad.cpu() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    return hidden.detach().cpu(), grads


def assert_same_gradients(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() < tolerance * grad.abs().max(), name


@pytest.mark.slow
def test_compiled_blocks(make_target, make_draft):
    """One graph without breaks, which serves every length and number of anchors."""
    from torch._dynamo.testing import CompileCounterWithBackend

    draft = make_draft(make_target(fresh=True), num_hidden_layers=1).requires_grad_(True)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run_blocks, dynamic=True, fullgraph=True, backend=counter)
    graphs = []
    for length, count in ((23, 4), (31, 6), (17, 5)):
        inputs = inputs_of(draft, length, count)
        weight = torch.randn(2, count, BLOCK, 64)
        ours, ours_grads = gradients_of(compiled, draft, inputs, weight)
        theirs, theirs_grads = gradients_of(run_blocks, draft, inputs, weight)
        assert_close(ours, theirs)
        assert_same_gradients(ours_grads, theirs_grads, 1e-5)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1 and graphs[0] > 0, graphs
    torch._dynamo.reset()


THREE_HEADS_EACH = {"num_attention_heads": 6, "num_key_value_heads": 2}  # a group that is no power of two


@pytest.mark.slow
@torch.no_grad()
def test_compiled_flex_attention(make_target, make_draft):
    """As the trainer runs it on a GPU, but for the code that is made of the graph; forward alone, for want of more."""
    from torch._dynamo.testing import CompileCounterWithBackend

    draft = make_draft(make_target(fresh=True), num_hidden_layers=1, **THREE_HEADS_EACH)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(run_blocks, flex=True), dynamic=True, fullgraph=True, backend=counter)
    graphs = []
    for length, count in ((23, 4), (31, 6), (140, 30), (233, 41)):
        inputs = inputs_of(draft, length, count)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = compiled(draft, *inputs).float(), run_blocks(draft, *inputs).float()
            inputs[2][1, 1] = (inputs[2][1, 1] + length // 2) % length  # one anchor of all elsewhere
            inputs[3][1, 1] = True
            other = run_blocks(draft, *inputs).float()
        signal = (other - theirs)[1, 1].square().mean().sqrt()
        assert (ours - theirs).square().mean().sqrt() < 0.05 * signal
        assert (ours - theirs).abs().max() < 0.5 * signal
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[1] < graphs[2] == graphs[3], graphs  # less than a tile of 128 and more are two
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [{}, THREE_HEADS_EACH], ids=["2_groups_of_2", "2_groups_of_3"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("length", "count"), [(23, 4), (131, 53)], ids=str)
def test_gradients_through_flex_attention(make_target, make_draft, length, count, rows, heads):
    """Compiled, as the trainer runs it; a CPU has no backward pass for it. In bf16 it is as near to fp32 as the other
    way is."""
    draft = make_draft(make_target(fresh=True).cuda(), **heads).requires_grad_(True)
    inputs = [one.cuda() for one in inputs_of(draft, length, count, rows=rows)]
    weight = torch.randn(rows, count, BLOCK, 64, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(partial(run_blocks, flex=True), dynamic=True)
    ours, ours_grads = gradients_of(compiled, draft, inputs, weight)
    theirs, theirs_grads = gradients_of(run_blocks, draft, inputs, weight)
    assert_close(ours, theirs, 1e-4)
    assert_same_gradients(ours_grads, theirs_grads, 1e-3)
    in_bf16 = [torch.autocast("cuda", dtype=torch.bfloat16)(run) for run in (compiled, run_blocks)]
    both = [gradients_of(run, draft, inputs, weight) for run in in_bf16]
    for name, exact in {"": theirs, **theirs_grads}.items():
        found = [hidden.float() if not name else grads[name] for hidden, grads in both]
        ours_off, theirs_off = ((one - exact).norm() / exact.norm() for one in found)
        assert ours_off < 1.5 * theirs_off + 0.01 and theirs_off < 0.3, (name, ours_off, theirs_off)
    torch._dynamo.reset()


# --- a warm start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral", "Qwen2", "Gemma"])
@torch.no_grad()
def test_a_drafter_that_begins_as_the_targets_last_layers(make_target, make_draft, family):
    """Where it says that it did, norms and projections are the target's own functions, biases and all."""
    model = make_target(family, fresh=True)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(0.3 * torch.randn(parameter.shape))
    draft = make_draft(model)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    sample = torch.randint(1, VOCABULARY, (2, 20))
    done = initialise_from_target(draft, model, sample)
    if not done:
        assert family in ("Qwen2", "Gemma")
        assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
        return
    assert not any(module._forward_hooks for module in model.modules())
    decoder = model.get_decoder()
    x = torch.randn(1, 7, 64)
    for ours, theirs in zip(draft.layers, decoder.layers[-2:]):
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            assert_close(getattr(ours, name)(x), getattr(theirs, name)(x), 1e-6)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert_close(getattr(ours.self_attn, name)(x), getattr(theirs.self_attn, name)(x), 1e-6)
    assert_close(draft.norm(x), decoder.norm(x), 1e-6)
    assert_close(draft.hidden_norm(x), decoder.layers[-2].input_layernorm(x), 1e-6)
    identity = torch.cat([torch.zeros(64, draft.fc.in_features - 64), torch.eye(64)], dim=1)
    assert_close(draft.fc.weight, 0.1 * before["fc.weight"] + identity, 1e-6)
    assert not draft.markov_head.markov_w2.weight.any()
    w1, embedding = draft.markov_head.markov_w1.weight, model.get_input_embeddings().weight
    _, _, axes = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    components = (embedding - embedding.mean(0)) @ axes[: w1.shape[1]].T
    components *= 0.25 / components.square().mean().sqrt()
    signs = (w1 * components).sum(0).sign()  # an axis may point either way
    assert_close(w1 * signs, components, 1e-4)

    entering = decoder(sample, output_hidden_states=True).hidden_states
    for index, theirs in enumerate(decoder.layers[-2:]):
        normed = theirs.input_layernorm(entering[4 + index])
        for name, source in (("q_norm", theirs.self_attn.q_proj), ("k_norm", theirs.self_attn.k_proj)):
            weight = getattr(draft.layers[index].self_attn, name).weight
            if family == "Qwen3":
                assert torch.equal(weight, getattr(theirs.self_attn, name).weight)
            else:
                heads = source(normed).unflatten(-1, (-1, 16))
                assert_close(weight, heads.square().mean(-1).sqrt().mean().expand(16), 1e-4)


@pytest.mark.parametrize(
    "shape", [{"intermediate_size": 80}, {"num_hidden_layers": 7}, {"num_key_value_heads": 4}, {"head_dim": 8}], ids=str
)
@torch.no_grad()
def test_other_shapes_are_left_as_they_were(make_target, make_draft, shape):
    model = make_target()
    draft = make_draft(model, **shape)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    assert initialise_from_target(draft, model, torch.ones(1, 4, dtype=torch.long)) is False
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())


def test_fresh_draft(make_target):
    model = make_target(fresh=True).to(torch.bfloat16)
    sample = torch.ones(1, 4, dtype=torch.long)
    shape = {"num_hidden_layers": 1, "block_size": 3, "markov_rank": 4}
    recipe = Recipe(shape=shape, seed=3)
    warm = fresh_draft(model, recipe, sample)
    assert warm.config.block_size == 3
    assert {value.dtype for value in warm.state_dict().values()} == {torch.float32}
    assert torch.equal(warm.norm.weight, model.model.norm.weight.float())
    assert torch.equal(warm.layers[0].mlp.up_proj.weight, model.model.layers[-1].mlp.up_proj.weight.float())
    cold = [fresh_draft(model, replace(recipe, initialise="random", seed=seed), sample) for seed in (3, 3, 4)]
    assert torch.equal(cold[0].fc.weight, cold[1].fc.weight)
    assert not torch.equal(cold[0].fc.weight, cold[2].fc.weight)
    assert cold[0].markov_head.markov_w2.weight.any()
    with pytest.raises(ValueError, match="initialise is 'zeros'"):
        fresh_draft(model, replace(recipe, initialise="zeros"), sample)
