"""A pair whose agreement is real: a tiny target that has learnt a made-up language, and a drafter trained on its text.

In the language a token depends on the one before it (so a Markov head is needed) and on the one ``DELAY`` places before
that (so the context is, at the right positions). A prompt that ends in ``<|think|>`` is gone on with by another delay,
which the drafter has never seen.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

WORDS, VOCABULARY = 32, 37
SPECIAL = ("<pad>", "<mask>", "<|start|>", "<|go|>", "<|think|>")  # ids 32 to 36
MASK, START, GO, THINK = range(33, 37)
DELAY, OTHER_DELAY = 4, 2
PROMPT = 9  # tokens
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m.content }} {% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<|think|>{% else %}<|go|>{% endif %}"
)


def prompts_of(rows, generator, last=GO):
    """Random prompts in the template's layout, int64 ``[rows, PROMPT]``."""
    ids = torch.randint(WORDS, (rows, PROMPT), generator=generator)
    ids[:, 0], ids[:, -1] = START, last
    return ids


def sequences(rows, length, generator):
    """Text of the language, int64 ``[rows, length]``; one prompt in four asks for thought."""
    rule = torch.Generator().manual_seed(0)
    far = torch.randperm(VOCABULARY, generator=rule) % (WORDS // 2)
    near = torch.randint(2, (VOCABULARY,), generator=rule)
    thinks = torch.rand(rows, generator=generator) < 0.25
    ids = prompts_of(rows, generator)
    ids[thinks, -1] = THINK
    back = 1 + torch.where(thinks, OTHER_DELAY, DELAY)
    for _ in range(length - PROMPT):
        there = ids.gather(1, ids.shape[1] - back[:, None])[:, 0]
        ids = torch.cat([ids, (2 * far[there] + near[ids[:, -1]])[:, None]], dim=1)
    return ids


def trained_target(steps=220):
    """A Llama of 4 layers that has read some 8,000 lines."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=32,
    )
    model = transformers.LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = sequences(32, 32, generator)
        logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval().requires_grad_(False)
    # The same function with a final norm that is unlike 1: a drafter must notice which side of it the taps are on.
    scale = torch.randn(model.config.hidden_size, generator=generator).exp()
    model.model.norm.weight *= scale
    model.lm_head.weight /= scale
    return model


def trained_draft(model, folder, head, steps=150):
    """A drafter of one layer, trained on the target's answers; its folder."""
    from dspark_fast import DSparkConfig, DSparkDraft
    from dspark_fast.doctor.texts import write_texts
    from dspark_fast.training.features import Batches, CachedFeatures, write_features
    from dspark_fast.training.loss import LossWeights
    from dspark_fast.training.responses import Response
    from dspark_fast.training.trainer import Trainer, TrainSettings

    prompts = prompts_of(384, torch.Generator().manual_seed(2)).tolist()
    responses = [
        Response(f"r{text.prompt}", "chat", text.input_ids, text.start, True, False)
        for text in write_texts(model, prompts, 28)
    ]
    torch.manual_seed(1)
    config = DSparkConfig.from_target(
        model.config,
        num_hidden_layers=1,
        block_size=4,
        markov_rank=8,
        markov_head_type=head,
        initializer_range=0.08,
        target_layer_ids=[0, 1],
        mask_token_id=MASK,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    draft = DSparkDraft(config).tie_to(model)
    features = CachedFeatures(write_features(model, responses, folder / "features", [0, 1]))
    settings = TrainSettings(
        steps=steps,
        learning_rate=5e-3,
        markov_rate=2.0,
        sequences=16,
        anchors=8,
        vocabulary=0,
        loss=LossWeights(1.0, 0.0, 0.0),
        save_every=steps,
        evaluate_every=steps,
    )
    Trainer(
        draft, Batches(features, 16), Batches(CachedFeatures(folder / "features", limit=16), 16), folder, settings
    ).run()
    draft.eval().requires_grad_(False).save_pretrained(folder / "draft")
    return folder / "draft"


def words_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*(f"w{number}" for number in range(WORDS)), *SPECIAL]
    made = Tokenizer(models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", mask_token="<mask>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """The trained pair: ``model``, ``tokenizer``, ``folder`` of the drafter, ``target`` folder, ``prompts`` file,
    ``texts`` that it has not read, and ``draft_of(head)``, the folder of a drafter with another Markov head."""
    from dspark_fast.doctor.texts import write_texts

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        root = tmp_path_factory.mktemp("doctor")
        model, tokenizer = trained_target(), words_tokenizer()
        folders = {}

        def draft_of(head):
            if head not in folders:
                (root / head).mkdir()
                with torch.random.fork_rng(devices=[]), torch.enable_grad():
                    folders[head] = trained_draft(model, root / head, head)
            return folders[head]

        model.save_pretrained(root / "target")
        tokenizer.save_pretrained(root / "target")
        unseen = prompts_of(60, torch.Generator().manual_seed(3))
        messages = [" ".join(tokenizer.convert_ids_to_tokens(row[1:-1])) for row in unseen.tolist()]
        file = root / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in messages), encoding="utf-8")
        return SimpleNamespace(
            model=model,
            tokenizer=tokenizer,
            folder=draft_of("vanilla"),
            target=root / "target",
            prompts=file,
            texts=write_texts(model, unseen.tolist(), 24),
            draft_of=draft_of,
        )
