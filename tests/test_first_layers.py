"""The target's first layers as its drafter: shared weights, nothing else in common."""

from __future__ import annotations

import pytest
import torch

import dspark_fast
from dspark_fast import first_layers

FAMILIES = {"Llama": {}, "Qwen3": {}, "Mistral": {"sliding_window": 5}}
BATCHES = {"alone": (7,), "padded": (9, 1, 4), "one-token": (1,)}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}


@pytest.mark.floor
@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_share_every_weight_and_nothing_else(family, make_target):
    model, ids = make_target(family, **FAMILIES[family]), torch.randint(1, 97, (2, 9))
    draft, depth = first_layers(model, 2), model.config.num_hidden_layers
    weights = {id(weight) for weight in model.parameters()}
    assert all(id(weight) in weights for weight in draft.parameters())
    assert not {id(module) for module in draft.modules()} & {id(module) for module in model.modules()}
    assert draft.config is not model.config and draft.config.num_hidden_layers == 2 < depth == len(model.model.layers)
    assert len(getattr(draft.config, "layer_types", None) or "ab") == 2
    seen = []
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        # What the target itself has behind its second layer, under its norm and head.
        model(ids)
        inner = seen.pop()
        inner = inner[0] if isinstance(inner, tuple) else inner
        torch.testing.assert_close(draft(ids).logits, model.lm_head(model.model.norm(inner)))
    assert not seen, "a hook of the target heard the drafter"
    handle.remove()
    said = draft.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True)
    assert torch.equal(said, draft.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))


def test_first_layers_of_a_target_with_hooks_and_of_its_own_copy(make_target, prompts):
    model, ids, calls = make_target(fresh=True), prompts((5,)).input_ids, []
    truth = model.generate(ids, max_new_tokens=8, do_sample=False)
    handle = model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    twice = first_layers(first_layers(model, 4), 2)
    twice(ids)
    assert not calls and len(twice.model.layers) == 2
    assert torch.equal(dspark_fast.generate(model, twice, ids, max_new_tokens=8, do_sample=False), truth) and calls
    handle.remove()


def test_a_drafter_made_of_the_targets_own_modules(make_target, prompts):
    model, batch = make_target(fresh=True), prompts((7, 3))
    draft = make_target(fresh=True, num_hidden_layers=3)
    draft.model.layers, draft.model.norm = model.model.layers[:3], model.model.norm
    draft.model.embed_tokens, draft.lm_head = model.model.embed_tokens, model.lm_head
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 16, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    lengths = []
    for one in (draft, first_layers(model, 3)):
        out = dspark_fast.generate(model, one, batch.input_ids, **settings)
        assert torch.equal(out, truth)
        lengths.append(out.stats.acceptance_lengths)
    assert lengths[0] == lengths[1]


def test_first_layers_follow_the_targets_weights(make_target, prompts):
    model, ids = make_target(fresh=True), prompts((5,)).input_ids
    draft = first_layers(model, 6)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    out = dspark_fast.generate(model, draft, ids, max_new_tokens=13, do_sample=False)
    assert out.stats.accepted == out.stats.proposed


@pytest.mark.parametrize("layers", [0, -1, 7])
def test_first_layers_out_of_range(layers, make_target):
    with pytest.raises(ValueError, match=f"layers is {layers}: accepted is 1 to 6"):
        first_layers(make_target(), layers)
