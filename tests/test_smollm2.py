"""The shipped pair on its real target; needs the network once (`pytest -m network`), and a minute or two."""

from __future__ import annotations

import pytest
import torch

import dspark_fast
from dspark_fast.compare import compare

PROMPTS = {
    "maths": "A train travels 60 km in 45 minutes. What is its average speed in km/h?",
    "code": "Write a Python function that checks whether a string is a palindrome.",
    "chat": "Explain why the sky is blue to a ten-year-old.",
    "list": "List ten fruits and their colours.",
    "short": "What is the capital of France?",
}
pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def loaded():
    return dspark_fast.load("HuggingFaceTB/SmolLM2-135M-Instruct", dtype=torch.float32)


@pytest.mark.parametrize("batch", [4, 16])
def test_the_same_words_in_a_ragged_batch(batch, loaded):
    """Rows of unlike lengths, padded on the left, that end at unlike times."""
    model, draft, tokenizer = loaded
    tokenizer.padding_side = "left"
    prompts = [[{"role": "user", "content": prompt}] for prompt in [*PROMPTS.values()][::-1] * 4][:batch]
    for number, messages in enumerate(prompts):
        messages[0]["content"] += " Be brief." * (number // len(PROMPTS))
    ids = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    settings = {**ids, "max_new_tokens": 48, "do_sample": False}
    out = dspark_fast.generate(model, draft, **settings)
    assert torch.equal(out, model.generate(**settings))
    assert len(set(out.stats.new_tokens)) > 1 and out.stats.acceptance_length > 1.3


@pytest.fixture(scope="module")
def texts(loaded):
    """Two rows of unlike lengths, a text of 3,000 tokens, one of a single token; and what is said to each."""
    model, _, tokenizer = loaded
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    story = tokenizer(" ".join(PROMPTS.values()) * 50, return_tensors="pt")["input_ids"][:, :3000]
    assert story.shape[1] == 3000
    given = {
        "ragged": tokenizer([PROMPTS["maths"], PROMPTS["short"]], padding=True, return_tensors="pt"),
        "3000": {"input_ids": story, "attention_mask": torch.ones_like(story)},
        "one-token": {"input_ids": story[:, :1], "attention_mask": torch.ones_like(story[:, :1])},
    }
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    calls = {name: {**ids, **settings} for name, ids in given.items()}
    return {name: (call, model.generate(**call)) for name, call in calls.items()}


@pytest.mark.parametrize("name", ["ragged", "3000", "one-token"])
@pytest.mark.parametrize("right", [None, 1.0, 0.6, 0.0], ids=["trained", "right", "mixed", "wrong"])
def test_the_same_words_whatever_drafts(right, name, texts, loaded, scripted, unpadded):
    model, draft, _ = loaded
    call, truth = texts[name]
    if right is not None:
        draft = scripted(unpadded(truth, call["attention_mask"]), right=right, ragged=False)
    out = dspark_fast.generate(model, draft, off_switch=False, **call)
    assert torch.equal(out, truth)
    assert right != 1.0 or out.stats.accepted == out.stats.proposed
    assert right != 0.0 or not any(out.stats.accepted)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "coupled"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_same_words_in_fp32(prompt, temperature, loaded):
    model, draft, tokenizer = loaded
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = compare(
        model,
        draft,
        ids["input_ids"],
        tokenizer=tokenizer,
        max_new_tokens=48,
        temperature=temperature,
        seed=1,
        repeats=1,
    )
    assert found.identical, found.first_difference.sentence()
    assert found.acceptance_length > (1.0 if temperature else 1.3)  # 1.38 on the hardest of the five, 1.0 is no draft
