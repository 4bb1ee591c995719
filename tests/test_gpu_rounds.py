"""On a GPU: rounds as CUDA graphs give the tokens of rounds without, and nothing in them waits for the host."""

from __future__ import annotations

import pytest
import torch

import dspark_fast
from dspark_fast.engine import graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WAYS = {
    "greedy": {"do_sample": False},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "coupled": {"do_sample": True, "temperature": 0.8, "verification": "coupled", "seed": 5},
    "rejection": {"do_sample": True, "temperature": 0.8, "seed": 5},
    "rejection with cuts": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5},
}


@pytest.fixture
def pair(make_target, make_draft, prompts):
    model = make_target(fresh=True).to("cuda")
    batch = prompts((9, 6, 1, 8))
    graphs.clear_graphs()
    yield model, make_draft(model).to("cuda"), batch.input_ids.to("cuda"), batch.attention_mask.to("cuda")
    graphs.clear_graphs()


@pytest.mark.parametrize("way", WAYS)
def test_graph_and_eager_give_the_same_tokens(way, pair):
    model, draft, ids, mask = pair
    settings = {"attention_mask": mask, "max_new_tokens": 40, "off_switch": False, **WAYS[way]}
    eager = dspark_fast.generate(model, draft, ids, use_graph=False, **settings)
    for _ in range(2):  # recorded, then met again
        graph = dspark_fast.generate(model, draft, ids, use_graph=True, **settings)
        assert graph.stats.graph and not eager.stats.graph
        assert torch.equal(graph, eager)
        assert graph.stats.acceptance_lengths == eager.stats.acceptance_lengths
    if way == "greedy":
        truth = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert torch.equal(graph, truth)


def test_another_prompt_and_other_settings_on_the_same_graph(pair):
    model, draft, ids, mask = pair
    for seed, temperature in ((1, 0.7), (2, 1.1), (1, 0.7)):
        settings = {"do_sample": True, "seed": seed, "temperature": temperature, "max_new_tokens": 30}
        settings |= {"attention_mask": mask, "verification": "coupled", "off_switch": False}
        graph = dspark_fast.generate(model, draft, ids.roll(seed, 1) * mask, use_graph=True, **settings)
        eager = dspark_fast.generate(model, draft, ids.roll(seed, 1) * mask, use_graph=False, **settings)
        assert torch.equal(graph, eager)
    assert len(graphs._kept) == 1


def test_a_replayed_round_does_not_wait(pair, monkeypatch):
    model, draft, ids, mask = pair
    run = graphs.Workspace.run

    def watched(self, rounds, *, drafting):
        replays = drafting in self.replays
        torch.cuda.set_sync_debug_mode("error" if replays else "default")
        try:
            run(self, rounds, drafting=drafting)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(graphs.Workspace, "run", watched)
    settings = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "off_switch": False}
    assert dspark_fast.generate(model, draft, ids, use_graph=True, **settings).stats.rounds > 3


def test_the_off_switch_with_graphs(pair):
    model, draft, ids, mask = pair
    settings = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False}
    on = dspark_fast.generate(model, draft, ids, use_graph=True, off_switch=True, **settings)
    assert on.stats.plain_steps > 0
    assert torch.equal(on, dspark_fast.generate(model, draft, ids, use_graph=False, off_switch=False, **settings))


def test_past_key_values_with_graphs(pair):
    model, draft, ids, mask = pair
    settings = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "off_switch": False}
    first = dspark_fast.generate(model, draft, ids, attention_mask=mask, use_graph=True, **settings)
    longer = torch.cat([first.sequences, ids[:, -3:]], dim=1)
    mask = torch.nn.functional.pad(mask, (0, longer.shape[1] - mask.shape[1]), value=1)
    truth = model.generate(longer, attention_mask=mask, do_sample=False, max_new_tokens=12)
    for past in (None, first.past_key_values):
        out = dspark_fast.generate(
            model, draft, longer, attention_mask=mask, past_key_values=past, use_graph=True, **settings
        )
        assert torch.equal(out.sequences, truth)
