"""What cannot be done is refused: a ValueError that names it, before the target or the drafter has run."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, StaticCache, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria, EosTokenCriteria, MaxLengthCriteria

import dspark_fast
from dspark_fast import DSparkConfig, DSparkDraft
from dspark_fast.engine.requests import read_request

IDS = torch.tensor([[5, 17, 40, 3], [9, 8, 7, 6]])
ONES = torch.ones_like(IDS)


@pytest.fixture
def idle(make_target, make_draft):
    """A target and its drafter, neither of which may run."""
    model = make_target(fresh=True)
    draft = make_draft(model)

    def run(module, args):
        raise AssertionError(f"{type(module).__name__} was run")

    handles = [module.register_forward_pre_hook(run) for part in (model, draft) for module in part.modules()]
    yield model, draft
    for handle in handles:
        handle.remove()


class MyProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class MyStatelessProcessor(MyProcessor):
    stateless = True


class MyCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def mask_of(*rows):
    return {"attention_mask": torch.tensor(rows)}


REFUSED = {
    "beams": ({"num_beams": 2}, r"num_beams is 2"),
    "guidance": ({"guidance_scale": 1.5}, r"guidance_scale is 1\.5"),
    "guidance-by-hand": (
        {"logits_processor": [ClassifierFreeGuidanceLogitsProcessor(1.5)]},
        r"classifier-free guidance",
    ),
    "constraints": ({"constraints": [object()]}, r"constraints is .*constrained beam search"),
    "forced-words": ({"force_words_ids": [[4]]}, r"force_words_ids is .*constrained beam search"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha is 0\.6.*contrastive search"),
    "dola": ({"dola_layers": "low"}, r"dola_layers is 'low'.*DoLa"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens is 3.*prompt lookup"),
    "early-exit": ({"assistant_early_exit": 2}, r"assistant_early_exit is 2.*assisted decoding"),
    "prefill-in-chunks": ({"prefill_chunk_size": 2}, r"prefill_chunk_size is 2"),
    "without-a-cache": ({"use_cache": False}, r"use_cache is False"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, r"output_attentions"),
    "hidden-states": ({"output_hidden_states": True, "return_dict_in_generate": True}, r"output_hidden_states"),
    "own-processor": ({"logits_processor": [MyProcessor()]}, r"MyProcessor.*stateless = True"),
    "synth-id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)},
        r"SynthIDTextWatermarkLogitsProcessor remembers",
    ),
    "scores-of-each-step": ({"stopping_criteria": [ConfidenceCriteria(0.5)]}, r"ConfidenceCriteria"),
    "stop-strings-without-tokenizer": ({"stop_strings": "."}, r"stop_strings"),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 4, 64)}, r"inputs_embeds"),
    "no-new-tokens": ({"max_new_tokens": 0}, r"max_new_tokens.*\b0\b|0 .*max_new_tokens|greater than 0"),
    "right-padded": (mask_of([1, 1, 1, 1], [1, 1, 1, 0]), r"attention_mask of row 1 is not left-padded"),
    "hole": (mask_of([1, 0, 1, 1], [1, 1, 1, 1]), r"attention_mask of row 0 is not left-padded"),
    "empty-row": (mask_of([1, 1, 1, 1], [0, 0, 0, 0]), r"row 1 of input_ids is empty"),
    "long-mask": (mask_of([0, 1, 1, 1, 1], [1, 1, 1, 1, 1]), r"attention_mask has shape \[2, 5\], input_ids \[2, 4\]"),
    "custom-generate": ({"custom_generate": "org/name"}, r"custom_generate"),
    "unknown-verification": ({"verification": "fast"}, r"verification is 'fast'.*'rejection', 'coupled'"),
    "threshold-below": ({"confidence_threshold": -0.1}, r"confidence_threshold is -0\.1.*0 to 1"),
    "threshold-above": ({"confidence_threshold": 1.5}, r"confidence_threshold is 1\.5.*0 to 1"),
    "threshold-nan": ({"confidence_threshold": float("nan")}, r"confidence_threshold is nan"),
    "few-seeds": ({"do_sample": True, "seed": [1]}, r"seed has 1 values for 2 rows"),
    "many-seeds": ({"do_sample": True, "seed": torch.arange(3)}, r"seed has 3 values for 2 rows"),
    "nested-seeds": ({"do_sample": True, "seed": [[1, 2], [3, 4]]}, r"seed (has|holds)"),
    "one-seed-as-tensor": ({"do_sample": True, "seed": torch.tensor(1)}, r"seed has"),
    "wide-seed": ({"do_sample": True, "seed": 2**64}, rf"seed is {2**64}"),
    "wide-seed-in-a-list": ({"do_sample": True, "seed": [1, 2**64]}, rf"seed holds {2**64}"),
    "fractional-seed": ({"do_sample": True, "seed": [1, 2.5]}, r"seed holds 2\.5"),
    "two-sources-of-seed": ({"seed": 1, "generator": torch.Generator()}, r"seed and generator"),
    "streamer-with-a-batch": ({"streamer": object()}, r"streamer takes one row, the batch has 2"),
    "assistant": ({"assistant_model": "SELF"}, r"assistant_model"),
    "own-positions": ({"position_ids": torch.tensor([[3, 4, 5, 6]] * 2)}, r"position_ids"),
}


@pytest.mark.floor
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_setting_is_refused(settings, message, idle, streamer):
    model, draft = idle
    settings = {"max_new_tokens": 5, "attention_mask": ONES, "do_sample": False, **settings}
    if "streamer" in settings:
        settings["streamer"] = streamer()
    if settings.get("assistant_model") == "SELF":
        settings["assistant_model"] = model
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, draft, IDS, **settings)


# A user's own instance of a criterion that the device does must not be mistaken for the one that the settings make.
BY_HAND = {
    "length": ([MaxLengthCriteria(6)], r"MaxLengthCriteria has max_length 6.*give max_length"),
    "stop-token": ([EosTokenCriteria(3)], r"EosTokenCriteria has eos_token_id 3.*give eos_token_id"),
}


@pytest.mark.parametrize(("criteria", "message"), BY_HAND.values(), ids=BY_HAND)
def test_known_criterion_made_by_hand_is_refused(criteria, message, idle):
    model, draft = idle
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5, do_sample=True, stopping_criteria=criteria)


@pytest.fixture
def requested(idle):
    """``requested(**settings)``: what is read of the arguments that transformers prepares for them."""
    model, _ = idle

    def ask(**settings):
        def read(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **kwargs):
            return read_request(model, input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

        return model.generate(IDS, custom_generate=read, **{"max_new_tokens": 5, "do_sample": False, **settings})

    return ask


def names(items):
    return [type(item).__name__ for item in items]


RUN_BEFORE = {
    "nothing": ({}, []),
    "repetition-penalty": ({"repetition_penalty": 1.2}, ["RepetitionPenaltyLogitsProcessor"]),
    "no-repeat-ngram": ({"no_repeat_ngram_size": 2}, ["NoRepeatNGramLogitsProcessor"]),
    "least-length": (
        {"min_new_tokens": 3, "eos_token_id": 1},
        ["MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"],
    ),
    "bad-words": ({"bad_words_ids": [[4]]}, ["NoBadWordsLogitsProcessor"]),
    "own": ({"logits_processor": [MyStatelessProcessor()]}, ["MyStatelessProcessor"]),
    "allowed-tokens": (
        {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
        ["PrefixConstrainedLogitsProcessor"],
    ),
    "warper-by-hand": ({"logits_processor": [TopKLogitsWarper(3)]}, ["TopKLogitsWarper"]),
    "two": (
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        ["RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"],
    ),
}


@pytest.mark.floor
@pytest.mark.parametrize(("settings", "expected"), RUN_BEFORE.values(), ids=RUN_BEFORE)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_processors_are_carried_in_order(settings, expected, sampled, requested):
    request = requested(do_sample=sampled, temperature=0.7 if sampled else None, **settings)
    assert names(request.processors) == expected
    assert not request.takes_cuts


# What transformers' generate does itself when it samples: warpers, which the op does as long as nothing follows them.
CUTS = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
OWN_WARPERS = ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"]


@pytest.mark.floor
def test_cuts_are_left_to_the_op(requested):
    request = requested(**CUTS, repetition_penalty=1.2)
    assert names(request.processors) == ["RepetitionPenaltyLogitsProcessor"]
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.7, 9, 0.8, 0.1)


@pytest.mark.floor
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param({"typical_p": 0.5}, "TypicalLogitsWarper", id="typical"),
        pytest.param({"epsilon_cutoff": 0.1}, "EpsilonLogitsWarper", id="epsilon"),
        pytest.param({"eta_cutoff": 0.1}, "EtaLogitsWarper", id="eta"),
        pytest.param({"renormalize_logits": True}, "LogitNormalization", id="normalised"),
    ],
)
def test_cuts_go_to_the_processors_if_one_follows_them(settings, name, requested):
    request = requested(**CUTS, **settings)
    assert names(request.processors) == [*OWN_WARPERS, name]
    assert request.takes_cuts
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.7, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    "warper",
    [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.5), MinPLogitsWarper(0.5)],
    ids=lambda warper: type(warper).__name__,
)
def test_warper_made_by_hand_runs_before_those_of_the_settings(warper, requested):
    request = requested(**CUTS, logits_processor=[warper])
    assert request.processors == [warper]
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.7, 9, 0.8, 0.1)


@pytest.mark.floor
def test_criteria_are_carried(requested):
    mine = MyCriterion()
    request = requested(stopping_criteria=[mine], max_time=10.0, eos_token_id=1)
    assert names(request.criteria) == ["MaxTimeCriteria", "MyCriterion"]
    assert request.criteria[1] is mine
    assert requested(eos_token_id=1).criteria == []


@pytest.mark.floor
@pytest.mark.parametrize("kind", ["scores", "logits"])
def test_scores_and_logits_are_asked_for_with_a_dictionary(kind, requested):
    asked = [
        requested(**{f"output_{kind}": True}, return_dict_in_generate=return_dict) for return_dict in (True, False)
    ]
    assert [(request.output_scores, request.output_logits) for request in asked] == [
        (kind == "scores", kind == "logits"),
        (False, False),
    ]


@pytest.mark.floor
@pytest.mark.parametrize("tokens", [0, 2])
def test_cache_of_the_caller_is_carried(tokens, idle, requested):
    """An empty one too: the caller expects to find it full."""
    cache = DynamicCache(config=idle[0].config)
    if tokens:
        for layer in range(idle[0].config.num_hidden_layers):
            cache.update(torch.zeros(2, 2, tokens, 16), torch.zeros(2, 2, tokens, 16), layer)
    assert requested(past_key_values=cache).past is cache
    assert requested().past is None


def test_cache_of_another_kind_is_refused(idle, requested):
    cache = StaticCache(config=idle[0].config, max_cache_len=16)
    with pytest.raises(ValueError, match=r"past_key_values is a StaticCache: accepted are a DynamicCache"):
        requested(past_key_values=cache)


def test_embeddings_alone_are_refused(idle):
    def read(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **kwargs):
        return read_request(model, input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

    with pytest.raises(ValueError, match=r"inputs_embeds is given"):
        idle[0].generate(inputs_embeds=torch.zeros(2, 4, 64), custom_generate=read, max_new_tokens=5)


INPUTS = {
    "id-too-large": (torch.tensor([[1, 97]]), r"input_ids holds 1 to 97.*0 to 96"),
    "id-negative": (torch.tensor([[-1, 4]]), r"input_ids holds -1 to 4.*0 to 96"),
    "empty": (torch.zeros(1, 0, dtype=torch.long), r"input_ids has shape \[1, 0\]"),
    "no-rows": (torch.zeros(0, 3, dtype=torch.long), r"input_ids has shape \[0, 3\]"),
}


@pytest.mark.parametrize(("ids", "message"), INPUTS.values(), ids=INPUTS)
def test_prompt_is_refused(ids, message, idle):
    model, draft = idle
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, draft, ids, max_new_tokens=5, attention_mask=torch.ones_like(ids))


def test_prompt_that_fills_the_length_limit_is_refused(idle):
    model, draft = idle
    with pytest.raises(ValueError, match=r"max_length|Input length"):
        dspark_fast.generate(model, draft, IDS, max_length=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"cache_implementation": "static"}, r"cache_implementation is 'static'", id="static-cache"),
        pytest.param({"token_type_ids": torch.ones(2, 4, dtype=torch.long)}, r"token_type_ids", id="another-input"),
    ],
)
def test_what_would_be_dropped_is_refused(settings, message, idle):
    model, draft = idle
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, draft, IDS, attention_mask=ONES, max_new_tokens=4, **settings)


OTHER_TARGETS = {
    "hidden-size": ({"hidden_size": 32}, r"hidden_size is 32.*hidden_size 64"),
    "vocabulary": ({"vocab_size": 96}, r"vocab_size is 96.*vocab_size 97"),
    "depth": ({"num_hidden_layers": 5}, r"num_target_layers is 5.*num_hidden_layers 6"),
}


@pytest.mark.parametrize(("changes", "message"), OTHER_TARGETS.values(), ids=OTHER_TARGETS)
def test_drafter_of_another_target_is_refused(changes, message, idle, make_target, make_draft):
    model, _ = idle
    other = make_draft(make_target(**changes))
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, other, IDS, max_new_tokens=5)
    with pytest.raises(ValueError, match=message):
        DSparkDraft(other.config).tie_to(model)


def test_drafter_of_another_family_is_refused(idle, make_target, make_draft):
    model, _ = idle
    with pytest.raises(ValueError, match=r"target_model_type is 'llama'.*'qwen3'"):
        dspark_fast.generate(model, make_draft(make_target("Llama")), IDS, max_new_tokens=5)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        pytest.param([1, 5], r"target_layer_ids is \[1, 5\], but layer 5 is the last", id="last-layer"),
        pytest.param([1, 9], r"target_layer_ids is \[1, 9\], but layer 9 does not exist", id="no-such-layer"),
    ],
)
def test_taps_outside_the_target_are_refused(taps, message, idle):
    model, _ = idle
    # Without num_target_layers the drafter's own configuration cannot know.
    draft = DSparkDraft(DSparkConfig.from_target(model.config, target_layer_ids=taps, num_target_layers=None))
    with pytest.raises(ValueError, match=message):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5)


def test_drafter_without_a_target_is_refused(idle):
    model, _ = idle
    draft = DSparkDraft(DSparkConfig.from_target(model.config))
    with pytest.raises(ValueError, match=r"has no embed_tokens yet.*tie_to"):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5)


def test_something_that_is_no_drafter_is_refused(idle):
    model, _ = idle
    with pytest.raises((ValueError, TypeError), match=r"draft"):
        dspark_fast.generate(model, "path/to/drafter", IDS, max_new_tokens=5)


def test_threshold_without_a_confidence_head_is_refused(idle, make_draft):
    model, _ = idle
    draft = make_draft(model, enable_confidence_head=False)
    with pytest.raises(ValueError, match=r"confidence_threshold is 0\.5.*no confidence head"):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5, confidence_threshold=0.5)


@pytest.mark.parametrize("option", [{"use_markov": False}, {"confidence_threshold": 0.5}], ids=["markov", "threshold"])
def test_settings_of_a_drafter_need_one(option, idle):
    model, _ = idle
    with pytest.raises(ValueError, match=next(iter(option))):
        dspark_fast.generate(model, None, IDS, max_new_tokens=5, **option)


@pytest.mark.floor
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("Bloom", {"n_layer": 3, "n_head": 2}, id="bloom"),
        pytest.param("Mpt", {"n_layers": 3, "n_heads": 2, "d_model": 32}, id="mpt"),
        pytest.param("GPTJ", {"n_layer": 3, "n_head": 2, "n_embd": 32, "rotary_dim": 8}, id="gptj"),
    ],
)
def test_model_that_passes_the_attention_interface_by_is_refused(family, settings):
    import transformers

    config = getattr(transformers, f"{family}Config")(vocab_size=97, hidden_size=32, eos_token_id=None, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    before = model.config._attn_implementation
    runs = []
    model.register_forward_pre_hook(lambda module, args: runs.append(1))
    with pytest.raises(ValueError, match=f"{family}ForCausalLM"):
        dspark_fast.generate(model, None, IDS, max_new_tokens=5, use_cache=True)  # Mpt's own default is False
    assert not runs
    assert model.config._attn_implementation == before


def test_max_length_bounds_what_max_new_tokens_may_need(idle):
    model, draft = idle
    width = IDS.shape[1]
    with pytest.raises(ValueError, match=f"max_length is {width + 4}.*accepted is max_new_tokens of 4 or less"):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5, max_length=width + 4)


def test_gradient_checkpointing_is_refused(make_target):
    model = make_target(fresh=True).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient checkpointing.*eval"):
        dspark_fast.generate(model, None, IDS, max_new_tokens=5)


def test_sampling_several_sequences_greedily_is_refused(idle):
    model, draft = idle
    with pytest.raises(ValueError, match="num_return_sequences"):
        dspark_fast.generate(model, draft, IDS, max_new_tokens=5, do_sample=False, num_return_sequences=2)
