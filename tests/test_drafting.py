"""What the drafter is told in generate(), and that it drafts from it what the stateless definition says."""

from __future__ import annotations

import pytest
import torch

import dspark_fast
from dspark_fast.drafters import DSparkDrafter, Proposal
from dspark_fast.reference import draft_block


def features_of(model, row, layer_ids):
    """Tapped outputs of a plain forward pass over one row, ``[S, m*H]``."""
    caught = {}

    def keep_input(module, args, kwargs):
        caught[-1] = args[0] if args else kwargs["hidden_states"]

    def keep_output(layer):
        def keep(module, args, output):
            caught[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    layers = model.model.layers
    handles = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    handles += [layers[layer].register_forward_hook(keep_output(layer)) for layer in layer_ids if layer >= 0]
    with torch.no_grad():
        model(torch.tensor([row]))
    for handle in handles:
        handle.remove()
    return torch.cat([caught[layer] for layer in layer_ids], -1)[0]


@pytest.mark.floor
@pytest.mark.parametrize("taps", [[1, 3, 4], [-1, 0, 2]], ids=["layers", "with-embedding"])
def test_taps_are_the_targets_states_at_committed_tokens(taps, make_target, prompts, scripted, unpadded):
    model, batch = make_target("Llama"), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 16, "do_sample": False}
    rows = unpadded(model.generate(batch.input_ids, **settings), batch.attention_mask)
    draft = scripted(rows, right=0.7, taps=taps)
    dspark_fast.generate(model, draft, batch.input_ids, **settings)
    for row, heard in zip(rows, draft.features):
        heard = torch.cat(heard)
        assert len(row) - 1 <= len(heard) + 1  # all but the last token, or more if the last run was cut
        torch.testing.assert_close(heard[: len(row)], features_of(model, row, taps)[: len(heard)], rtol=1e-4, atol=1e-4)


class Checked(DSparkDrafter):
    """Holds each block that it drafts against the stateless definition, and proposes what a scripted drafter says."""

    def __init__(self, draft, model, scripted, **options):
        super().__init__(draft, **options)
        self.features = [features_of(model, row, self.target_layer_ids) for row in scripted.rows]
        self.scripted = scripted
        self.scripted.block_size = self.block_size
        self.scripted.target_layer_ids = self.target_layer_ids
        self.checked = 0

    def begin(self, *args):
        super().begin(*args)
        self.scripted.begin(*args)

    def commit(self, *args):
        super().commit(*args)
        self.scripted.commit(*args)

    def propose(self, anchor, position, noise):
        ours = super().propose(anchor, position, noise)
        assert not isinstance(ours.logits, torch.Tensor) or ours.logits.isfinite().all()
        for row, at in enumerate(position.tolist()):
            block = draft_block(
                self.draft,
                self.features[row][None, :at],
                anchor[row : row + 1],
                float(noise.temperature[row]),
                seed=int(noise.seed[row]),
                coupled=noise.mode == "coupled",
            )
            assert ours.tokens[row].tolist() == block.tokens[0].tolist()
            if ours.logits is not None:
                torch.testing.assert_close(ours.logits[row], block.logits[0], rtol=1e-3, atol=1e-3)
            self.checked += 1
        told = self.scripted.propose(anchor, position, noise)
        return Proposal(told.tokens, told.lengths)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "rank-0", "vocabulary"])
def test_drafts_are_those_of_the_stateless_drafter(
    head, sampling, make_target, make_draft, prompts, scripted, unpadded
):
    model, batch = make_target("Qwen2"), prompts((4, 1, 6))
    options = {"markov_rank": 0, "enable_confidence_head": False} if head == "rank-0" else {"markov_head_type": head}
    options = {"draft_vocab_size": 60} if head == "vocabulary" else options
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 12, "do_sample": False, **sampling}
    truth = dspark_fast.generate(model, None, batch.input_ids, verification="coupled", seed=5, **settings)
    rows = unpadded(truth, batch.attention_mask)
    # The biases of a head start at zero: give them something to do.
    draft = make_draft(model, target_layer_ids=[-1, 1, 4], **options)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    checked = Checked(draft, model, scripted(rows, right=0.7))
    out = dspark_fast.generate(model, checked, batch.input_ids, verification="coupled", seed=5, **settings)
    assert torch.equal(out, truth)
    assert checked.checked >= 12


def test_without_the_markov_head(make_target, make_draft, line):
    """Greedy slots are then independent: each is the argmax of the drafter's base logits."""
    model, ids, truth = line
    draft = make_draft(model)
    features = features_of(model, truth[0].tolist(), draft.config.target_layer_ids)
    seen = []

    class Watched(DSparkDrafter):
        def propose(self, anchor, position, noise):
            proposal = super().propose(anchor, position, noise)
            block = draft_block(draft, features[None, : int(position)], anchor)
            seen.append((proposal.tokens.tolist(), block.base_logits.argmax(-1).tolist(), block.tokens.tolist()))
            return proposal

    settings = {"max_new_tokens": 10, "do_sample": False}
    out = dspark_fast.generate(model, Watched(draft, use_markov=False), ids, **settings)
    assert torch.equal(out, truth[:, :16])
    assert all(ours == independent for ours, independent, _ in seen)
    assert any(ours != walked for ours, _, walked in seen)
    assert torch.equal(dspark_fast.generate(model, draft, ids, use_markov=False, **settings), truth[:, :16])


def test_confidence_threshold(make_target, make_draft, line):
    model, ids, truth = line
    draft = make_draft(model)
    proposed = []
    for threshold in (0.0, 0.5, 1.0):
        out = dspark_fast.generate(
            model, draft, ids, confidence_threshold=threshold, max_new_tokens=24, do_sample=False
        )
        assert torch.equal(out, truth)
        proposed.append(sum(out.stats.proposed))
    assert proposed[0] > proposed[1] > proposed[2] == 0
    assert out.stats.rounds == 23 and set(out.stats.acceptance_lengths[0]) == {1}
