"""A language model as the drafter: the target's tokens, or its law, whatever it says; and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch

import dspark_fast
from dspark_fast import AutoregressiveDrafter, first_layers
from dspark_fast.drafters import Noise
from dspark_fast.engine.target import RaggedTarget
from dspark_fast.reference import markov_walk
from dspark_fast.reference.sampling import exponentials

FAMILIES = {"Llama": {}, "Qwen3": {}, "Mistral": {"sliding_window": 5}}
BATCHES = {"alone": (7,), "padded": (9, 1, 4), "one-token": (1,)}
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}


@pytest.fixture(scope="session")
def drafters(make_target):
    """``drafters(model)``: a smaller model, one that often agrees with the target, and its own first layers."""

    def make(model, family="Llama"):
        torch.manual_seed(5)
        near = copy.deepcopy(model)
        with torch.no_grad():
            for weight in near.parameters():
                weight.add_(0.04 * weight.std() * torch.randn_like(weight))
        return {"small": make_target(family, **SMALL), "near": near, "layers": first_layers(model, 3)}

    return make


# --- greedy ---


@pytest.mark.floor
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_the_target_says(family, lengths, make_target, drafters, prompts):
    model, batch = make_target(family, **FAMILIES[family]), prompts(lengths)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 16, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    accepted = {}
    for name, draft in drafters(model, family).items():
        out = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        assert torch.equal(out, truth)
        assert out.stats.block_size == 5 and out.stats.memory["drafter"] > 0
        accepted[name] = out.stats.acceptance_length
    assert 1.5 < accepted["near"] < 6, "both acceptance and rejection should take place"


@pytest.mark.parametrize("block_size", [1, 2, 7])
def test_block_sizes(block_size, make_target, drafters, prompts):
    model, batch = make_target(), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 20, "do_sample": False}
    draft = AutoregressiveDrafter(drafters(model)["near"], block_size=block_size)
    out = dspark_fast.generate(model, draft, batch.input_ids, **settings)
    assert torch.equal(out, model.generate(batch.input_ids, **settings))
    assert out.stats.block_size == block_size and 0 < out.stats.accepted[0] < out.stats.proposed[0]


@pytest.mark.floor
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "verification": "coupled"}, {"do_sample": True}], ids=lambda one: str(len(one))
)
def test_the_target_accepts_all_of_itself(sampling, block_size, make_target, prompts):
    """Its cache then never misses a token, holds one too many or stands at a wrong position."""
    model, batch = make_target(), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 21, "do_sample": False, "seed": 3, "top_k": 0}
    for draft in (copy.deepcopy(model), first_layers(model, 6)):
        draft = AutoregressiveDrafter(draft, block_size=block_size)
        out = dspark_fast.generate(model, draft, batch.input_ids, **{**settings, **sampling})
        assert {length for row in out.stats.acceptance_lengths for length in row} == {block_size + 1}
        assert out.stats.accepted == out.stats.proposed


@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_drafts_are_its_own_continuations(family, make_target, drafters, prompts):
    """Each block is what the drafter, without a cache, says greedily of the tokens committed so far."""
    model, batch = make_target(family, **FAMILIES[family]), prompts()
    draft, blocks = drafters(model, family)["near"], 0

    class Watched(AutoregressiveDrafter):
        def propose(self, anchor, position, noise):
            nonlocal blocks
            proposal = super().propose(anchor, position, noise)
            for row, (end, drafts) in enumerate(zip(position.tolist(), proposal.tokens.tolist())):
                text = self.context.tokens[row : row + 1, : end + 1]
                assert int(text[0, end]) == int(anchor[row])
                said = draft.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=5, do_sample=False)
                assert drafts == said[0, end + 1 :].tolist()
                blocks += 1
            return proposal

    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 14, "do_sample": False}
    out = dspark_fast.generate(model, Watched(draft), batch.input_ids, **settings)
    assert torch.equal(out, model.generate(batch.input_ids, **settings)) and blocks > 10


@pytest.mark.floor
def test_stop_tokens(make_target, drafters, prompts):
    model, batch = make_target(), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    settings["eos_token_id"] = list(range(3, 97, 9))
    truth = model.generate(batch.input_ids, **settings)
    for draft in drafters(model).values():
        out = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        assert torch.equal(out, truth)
        assert len(set(out.stats.new_tokens)) > 2 and max(out.stats.new_tokens) > 8


@pytest.mark.parametrize("new", [1, 2, 6, 7])
def test_length_limit_cuts_a_run(new, make_target, prompts):
    model, ids = make_target(), prompts((6,)).input_ids
    out = dspark_fast.generate(model, first_layers(model, 6), ids, max_new_tokens=new, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=new, do_sample=False))
    assert out.stats.new_tokens == [new]


def test_prompts_in_chunks_and_a_cache_that_grows(make_target, drafters, prompts, monkeypatch):
    monkeypatch.setattr("dspark_fast.engine.target.PREFILL_CHUNK", 4)
    monkeypatch.setattr("dspark_fast.engine.capacity._SMALLEST", 16)
    model, batch = make_target(), prompts((11, 3, 6))
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 40, "do_sample": False}
    truth = model.generate(batch.input_ids, **settings)
    for draft, right in ((drafters(model)["near"], False), (copy.deepcopy(model), True)):
        out = dspark_fast.generate(model, draft, batch.input_ids, **settings)
        assert torch.equal(out, truth) and out.stats.capacity > 32
        assert (out.stats.accepted == out.stats.proposed) == right


def test_what_was_decoded_without_it_is_read_later(make_target, prompts, monkeypatch):
    """Speculation is off for a while; the drafter then reads what it has missed, however much, and goes on."""
    model, batch = make_target(), prompts((9, 2))

    class Pauses:
        pauses = steps = 0
        note = forget = lambda self, *args: None

        def drafts(self):
            self.steps += 1
            return self.steps % 13 < 3

    monkeypatch.setattr("dspark_fast.generation.Switch", Pauses)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 60, "do_sample": False, "off_switch": True}
    truth = dspark_fast.generate(model, None, batch.input_ids, **settings)
    out = dspark_fast.generate(model, copy.deepcopy(model), batch.input_ids, **settings)
    assert torch.equal(out, truth)
    assert out.stats.plain_steps >= 20 and out.stats.proposed[0] > 6 and out.stats.accepted == out.stats.proposed


def test_a_target_behind_its_own_cache(make_target, drafters, prompts, monkeypatch):
    model, ids = make_target(), prompts((6,)).input_ids
    monkeypatch.setattr("dspark_fast.generation.choose_target", lambda *args, **kwargs: "own")
    truth = model.generate(ids, max_new_tokens=20, do_sample=False)
    for draft in drafters(model).values():
        assert torch.equal(dspark_fast.generate(model, draft, ids, max_new_tokens=20, do_sample=False), truth)


# --- past_key_values ---


@pytest.mark.parametrize("end", [0, 3], ids=["goes-on", "parts"])
def test_a_chat_goes_on_from_what_the_drafter_has_read(end, make_target, prompts, monkeypatch):
    model, batch = make_target(), prompts((9, 6))
    draft, mask, read = copy.deepcopy(model), batch.attention_mask, []
    settings = {"do_sample": False, "return_dict_in_generate": True}
    # The last round of 13 tokens is accepted whole: its last draft has not been read.
    first = dspark_fast.generate(model, draft, batch.input_ids, attention_mask=mask, max_new_tokens=13, **settings)
    more = torch.randint(1, 97, (2, 4))
    ids = torch.cat([first.sequences[:, : first.sequences.shape[1] - end], more], dim=1)
    mask = torch.cat([mask, torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1)
    truth = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    prefill = RaggedTarget.prefill

    def watched(self, tokens, counts, on_features):
        if self.model is draft:
            read.append(counts.tolist())
        return prefill(self, tokens, counts, on_features)

    monkeypatch.setattr(RaggedTarget, "prefill", watched)
    kept = first.past_key_values
    copied = copy.deepcopy(kept)
    assert copied.context.draft is draft and copied.context.tokens is not kept.context.tokens
    for past in (kept, kept, copied):  # a call leaves it as it was
        read.clear()
        second = dspark_fast.generate(
            model, draft, ids, attention_mask=mask, past_key_values=past, max_new_tokens=12, **settings
        )
        assert torch.equal(second.sequences, truth)
        assert second.stats.accepted == second.stats.proposed and second.stats.absent == [0, 0]
        assert max(read[0]) <= 4 + 2, "only what is new, and at most two tokens that it had not read"
    # Another drafter knows nothing of it, and drafts from what comes after.
    other = dspark_fast.generate(
        model, first_layers(model, 6), ids, attention_mask=mask, past_key_values=past, max_new_tokens=12, **settings
    )
    assert torch.equal(other.sequences, truth) and other.stats.absent == other.stats.reused != [0, 0]


# --- sampling ---


def sampled(model, row, seed, new, temperature):
    """Plain Gumbel-max sampling of one row without a cache."""
    row = list(row)
    for _ in range(new):
        with torch.no_grad():
            scores = model(torch.tensor([row])).logits[0, -1] / temperature
        place = torch.tensor(len(row))
        row.append(int((scores - exponentials(torch.tensor(seed), place, 0 * place, 0, len(scores)).log()).argmax()))
    return row


@pytest.mark.floor
def test_coupled_is_plain_sampling_whatever_the_drafter(make_target, drafters, prompts, unpadded):
    model, batch, seeds = make_target(), prompts((5, 1, 7)), [11, -(2**63), 2**63 - 1]
    mask = batch.attention_mask
    rows = [sampled(model, row, seed, 14, 0.8) for row, seed in zip(unpadded(batch.input_ids, mask), seeds)]
    settings = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": True, "temperature": 0.8, "top_k": 0}
    for draft in drafters(model).values():
        out = dspark_fast.generate(model, draft, batch.input_ids, verification="coupled", seed=seeds, **settings)
        assert unpadded(out, mask) == rows


@pytest.mark.parametrize("mode", ["greedy", "rejection", "coupled"])
def test_the_noise_is_that_of_a_block(mode, make_target):
    """Drafts and their q are those of the reference's walk over the same logits, at the same counters."""
    model, tokens = make_target("Llama", **SMALL), torch.randint(1, 97, (2, 6))
    temperature = torch.tensor([0.0, 0.0] if mode == "greedy" else [0.7, 0.0])
    noise, position = Noise(mode, temperature, torch.tensor([4, -9])), torch.tensor([5, 3])
    drafter = AutoregressiveDrafter(model, block_size=4)
    drafter.begin(2, 16, tokens.device)
    anchor = tokens.gather(1, position[:, None])[:, 0]
    with torch.no_grad():
        drafter.commit(tokens, None, torch.zeros(2, dtype=torch.long), position)
        assert torch.equal(drafter.context.cache.lengths, position), "the prompt is read when it comes"
        proposal = drafter.propose(anchor, position, noise)
        logits = []
        for row, end in enumerate(position.tolist()):
            text = torch.cat([tokens[row, : end + 1], proposal.tokens[row]])
            logits.append(model(text[None]).logits[0, end:-1])
        options = {"temperature": temperature, "seed": noise.seed, "position": position, "coupled": mode == "coupled"}
        walk = markov_walk(torch.stack(logits), None, None, anchor, **options)
    assert torch.equal(proposal.tokens, walk.tokens) and proposal.lengths.tolist() == [4, 4]
    assert (proposal.logits is None) == (mode != "rejection")
    if mode == "rejection":
        assert proposal.logits.dtype == torch.float32
        for name in ("logits", "row_max", "log_sum"):
            torch.testing.assert_close(getattr(proposal, name), getattr(walk, name), rtol=1e-4, atol=1e-4)


LAWS = {"warm": {"temperature": 2.0}, "hot": {"temperature": 3.0}, "top-k": {"top_k": 3, "temperature": 2.0}}


@pytest.mark.parametrize("settings", LAWS.values(), ids=LAWS)
def test_rejection_keeps_the_targets_law(settings, tiny, make_target, processors_of, law, g_test):
    model, rows, depth = tiny[0], 4000, 4
    small = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    draft = AutoregressiveDrafter(make_target("Llama", vocab_size=5, initializer_range=0.4, **small), block_size=2)
    ids = torch.tensor([[1, 3, 2, 4]])
    settings = {"do_sample": True, "max_new_tokens": depth, "top_k": 0, **settings}
    out = dspark_fast.generate(model, draft, ids, num_return_sequences=rows, seed=20, **settings)
    counts: dict[tuple[int, ...], int] = {}
    for row in out[:, 4:].tolist():
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    # Both acceptance and resampling took place, and some rows went through a second round.
    proposed, accepted = out.stats.proposed, out.stats.accepted
    assert 0.15 < accepted[0] / proposed[0] < 0.9 and accepted[1] > 100
    assert sum(len(row) > 1 for row in out.stats.acceptance_lengths) > 1000
    assert g_test(counts, law(model, ids, processors_of(model, ids, **settings), depth), rows) > 1e-6


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_row_is_the_same_alone_and_in_any_batch(verification, make_target, drafters, prompts, unpadded):
    model, batch = make_target(), prompts()
    draft, seeds = drafters(model)["near"], [7, 8, 9, 7, -1]
    settings = {"do_sample": True, "max_new_tokens": 14, "verification": verification}
    mask = batch.attention_mask
    out = dspark_fast.generate(model, draft, batch.input_ids, attention_mask=mask, seed=seeds, **settings)
    for row, prompt in enumerate(unpadded(batch.input_ids, mask)):
        alone = dspark_fast.generate(model, draft, torch.tensor([prompt]), seed=[seeds[row]], **settings)
        assert alone[0].tolist() == unpadded(out, mask)[row]


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True}, {"do_sample": True, "verification": "coupled"}], ids=str
)
def test_rows_leave_the_batch(sampling, make_target, drafters, prompts, monkeypatch):
    model, batch = make_target(), prompts((3, 9, 1, 5, 12, 7, 2, 4))
    draft, widths = drafters(model)["near"], []
    propose = AutoregressiveDrafter.propose

    def watched(self, anchor, position, noise):
        widths.append(len(anchor))
        return propose(self, anchor, position, noise)

    monkeypatch.setattr(AutoregressiveDrafter, "propose", watched)
    settings = {"max_new_tokens": 40, "eos_token_id": list(range(3, 97, 9)), "pad_token_id": 0, **sampling}
    ids, mask, seeds = batch.input_ids, batch.attention_mask, list(range(100, 108))
    out = dspark_fast.generate(model, draft, ids, attention_mask=mask, seed=seeds, **settings)
    assert len(set(out.stats.new_tokens)) > 3 and widths[0] == 8 and min(widths) < 4
    for row, count in enumerate(out.stats.new_tokens):
        alone = dspark_fast.generate(model, draft, ids[row : row + 1, mask[row].bool()], seed=[seeds[row]], **settings)
        assert out[row, 12 : 12 + count].tolist() == alone[0, -count:].tolist()


# --- a drafter that fails ---


def test_a_broken_drafter_costs_speed_alone(make_target, prompts):
    model, batch = make_target(), prompts()
    draft = copy.deepcopy(model)
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 12}
    with torch.no_grad():
        draft.lm_head.weight[5] = float("nan")
    for sampling in ({"do_sample": False}, {"do_sample": True, "verification": "coupled", "seed": 1}):
        truth = dspark_fast.generate(model, None, batch.input_ids, **settings, **sampling)
        out = dspark_fast.generate(model, draft, batch.input_ids, **settings, **sampling)
        assert torch.equal(out, truth) and sum(out.stats.accepted) == 0
    dspark_fast.generate(model, draft, batch.input_ids, do_sample=True, **settings)


# --- refusals, and what is left behind ---


def test_refusals(make_target, prompts):
    from transformers import GPT2Config, T5Config, T5ForConditionalGeneration

    model, ids = make_target(), prompts((5,)).input_ids
    small = make_target("Llama", fresh=True, **SMALL)

    def refused(draft, match, error=ValueError, **options):
        with pytest.raises(error, match=match):
            dspark_fast.generate(model, draft, ids, max_new_tokens=4, **options)

    refused(make_target("Llama", vocab_size=101, **SMALL), "vocab_size is 101, the target's is 97")
    refused(model, "the target itself")
    refused(AutoregressiveDrafter(model), "the target itself")
    refused(small.train(), "training mode")
    refused(small.eval().to("meta"), "on meta, the target on cpu")
    t5 = T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    refused(T5ForConditionalGeneration(t5).eval(), "T5ForConditionalGeneration is an encoder-decoder")
    refused(make_target("Llama", **SMALL), "settings of a DSparkDraft", confidence_threshold=0.5)
    refused(make_target("Llama", **SMALL), "only a GPU has CUDA graphs", use_graph=True)
    refused(GPT2Config(), "a causal model", error=TypeError)
    with pytest.raises(ValueError, match="block_size is 0"):
        AutoregressiveDrafter(model, block_size=0)


def test_a_drafter_that_cannot_be_driven_in_batches_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(ValueError, match="BloomForCausalLM can be driven only behind a cache of its own"):
        AutoregressiveDrafter(bloom)


def left(model):
    hooks = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    attributes = [sorted(module.__dict__) for module in model.modules()]
    return hooks, model.config._attn_implementation, model.config.to_dict(), attributes, model.training


@pytest.mark.floor
@pytest.mark.parametrize("how", ["well", "streamer", "inside-the-drafter"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_nothing_is_left_behind(implementation, how, make_target, prompts, streamer):
    model, ids = make_target(fresh=True), prompts((6,)).input_ids
    for draft in (make_target("Llama", fresh=True, **SMALL), first_layers(model, 2)):
        draft.set_attn_implementation(implementation)
        settings = {"max_new_tokens": 12, "do_sample": False}
        said = model.generate(ids, **settings), draft.generate(ids, **settings)
        before, passes, handle = (left(model), left(draft)), [], None
        if how == "well":
            dspark_fast.generate(model, draft, ids, **settings)
        else:
            listener = streamer(fail_at=5) if how == "streamer" else None
            if how == "inside-the-drafter":

                def fail(module, args, output, draft=draft, passes=passes):
                    passes.append(draft.config._attn_implementation)
                    if len(passes) == 4:
                        raise RuntimeError("as told")

                handle = draft.model.layers[1].mlp.register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="as told"):
                dspark_fast.generate(model, draft, ids, streamer=listener, **settings)
            if handle is not None:
                handle.remove()
                assert passes[-1] != implementation, "it was switched, so there was something to undo"
        assert (left(model), left(draft)) == before
        assert torch.equal(model.generate(ids, **settings), said[0])
        assert torch.equal(draft.generate(ids, **settings), said[1])
        assert torch.equal(dspark_fast.generate(model, draft, ids, **settings), said[0])


def test_inside_transformers_generate_and_again(make_target, drafters, prompts):
    model, batch = make_target(), prompts()
    settings = {"attention_mask": batch.attention_mask, "max_new_tokens": 12, "do_sample": False}
    truth, custom = model.generate(batch.input_ids, **settings), dspark_fast.decoding(drafters(model)["near"])
    for _ in range(2):
        assert torch.equal(model.generate(batch.input_ids, custom_generate=custom, **settings), truth)
    lengths = custom.stats.acceptance_lengths
    assert torch.equal(model.generate(batch.input_ids[:2], custom_generate=custom, max_new_tokens=3), truth[:2, :12])
    assert lengths != custom.stats.acceptance_lengths


def test_a_drafter_of_fewer_positions_only_guesses_behind_them():
    """The target's table reaches further: the tokens are its own, whatever the drafter says past the end of its."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.25}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model, small = (GPT2LMHeadModel(GPT2Config(n_positions=size, **sizes, **ends)).eval() for size in (128, 24))
    ids = torch.arange(1, 31)[None]
    truth = model.generate(ids, max_new_tokens=20, do_sample=False)
    ours = dspark_fast.generate(model, small, ids, max_new_tokens=20, do_sample=False, off_switch=False)
    assert torch.equal(ours, truth)
