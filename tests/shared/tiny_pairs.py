"""Tiny random targets, and drafters that are joined to them."""

from __future__ import annotations

import pytest
import torch

VOCABULARY = 97


@pytest.fixture(scope="session")
def make_target():
    """``make_target(family, **config)``: a random target, varied in what it says; one instance per set of arguments.

    6 layers, hidden size 64, 97 tokens, no stop token; ``fresh=True`` gives one of the caller's own.
    """
    import transformers

    made = {}
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,  # the usual 0.02 gives a model that repeats one token
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def make(family="Qwen3", *, fresh=False, **changes):
        key = (family, str(sorted(changes.items())))
        if fresh or key not in made:
            torch.manual_seed(0)
            heads = {"head_dim": 16} if family in ("Qwen3", "Gemma") else {}
            config = getattr(transformers, f"{family}Config")(**{**small, **heads, **changes})
            model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
            if fresh:
                return model
            made[key] = model
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_draft():
    """``make_draft(model, **config)``: a random drafter of 2 layers, joined to ``model``."""
    from dspark_fast import DSparkConfig, DSparkDraft

    def make(model, **changes):
        torch.manual_seed(1)
        small = {"num_hidden_layers": 2, "block_size": 5, "markov_rank": 8, "initializer_range": 0.25}
        config = DSparkConfig.from_target(model.config, **{**small, **changes})
        return DSparkDraft(config).tie_to(model).eval()

    return make


@pytest.fixture(scope="session")
def tiny(make_target, make_draft):
    """A target of 5 tokens and a drafter that agrees with it now and then."""
    model = make_target(
        vocab_size=5,
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    draft = make_draft(
        model, num_hidden_layers=1, block_size=3, markov_rank=4, target_layer_ids=[0, 1], initializer_range=0.3
    )
    with torch.no_grad():  # trust the slots behind tokens 0, 3 and 4 alone: the cut then hangs on what was drafted
        known = torch.cat([draft.markov_head.markov_w1.weight, torch.ones(5, 1)], 1)
        trust = torch.linalg.solve(known, torch.tensor([3.0, -3.0, -3.0, 3.0, 3.0]))
        draft.confidence_head.proj.weight[0] = torch.cat([torch.zeros(32), trust[:4]])
        draft.confidence_head.proj.bias[0] = trust[4]
    return model, draft


@pytest.fixture(scope="session")
def line(make_target):
    """A target, one prompt and 24 tokens of its continuation, of which the first 8 are all different."""
    model = make_target()
    for seed in range(50):
        ids = torch.randint(1, 97, (1, 6), generator=torch.Generator().manual_seed(seed))
        truth = model.generate(ids, max_new_tokens=24, do_sample=False)
        if len(set(truth[0, 6:14].tolist())) == 8:
            return model, ids, truth
    raise AssertionError("no prompt gives 8 different tokens")
