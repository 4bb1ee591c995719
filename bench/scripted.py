"""For timing rounds: a pair in Qwen3-4B's shape that accepts as it is told, and a round's bytes.

No trained weights are at hand on every machine that has a GPU, and a round's time does not ask what the weights say: it
asks how many there are, and how many drafts are accepted. So target and drafter are random, all of their work is done,
and then the drafts are replaced by what the target is known to say next, right or wrong as a script has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dspark_fast import DSparkConfig, DSparkDraft
from dspark_fast.drafters import DSparkDrafter, Noise, Proposal
from dspark_fast.reference.philox import philox

QWEN3_4B = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: the released drafter's (5 layers and taps 1, 9, 17, 25, 33 follow from the target)
QWEN3_4B_DRAFT = {"block_size": 7, "markov_rank": 256, "mask_token_id": 151_669}
TINY = {
    **QWEN3_4B,
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
TINY_DRAFT = {"block_size": 7, "markov_rank": 16, "num_hidden_layers": 2}
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def random_pair(
    target: dict[str, Any], draft: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, DSparkDraft]:
    """A Qwen3 target and a DSpark drafter of random weights, made where they stay.

    The target says its last token again, and by far: its layers add little to the embedding, which is the head too.
    With weights that are all alike every eighth largest logit would have an equal in bf16, a pass over a block would
    then choose otherwise than a pass over one token, and from there on the script would be wrong.
    """
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**target), dtype=dtype).eval()
        drafter = DSparkDraft(DSparkConfig.from_target(model.config, **draft))
    drafter = drafter.to(dtype).eval()
    if device.type != "meta":
        generator = torch.Generator(device).manual_seed(0)
        embedding = model.get_input_embeddings().weight
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.02 if parameter is embedding else 0.002, generator=generator)
    return model, drafter.tie_to(model)


def shape_of(target: dict[str, Any], draft: dict[str, Any] | str) -> tuple[PreTrainedModel, DSparkDraft]:
    """The same without memory, to count bytes; a Llama target (SmolLM2) with the drafter in a folder."""
    meta = torch.device("meta")
    if isinstance(draft, dict):
        return random_pair(target, draft, meta, torch.bfloat16)
    from transformers import LlamaForCausalLM

    with meta:
        model = LlamaForCausalLM._from_config(LlamaConfig(**target), dtype=torch.bfloat16)
        drafter = DSparkDraft(DSparkConfig.from_pretrained(draft))
    return model, drafter.to(torch.bfloat16).tie_to(model)


# --- what a round must read -------------------------------------------------------------------------------------------


class Floor(NamedTuple):
    """Bytes that any implementation of a round must read, by part. Activations and logits are left out: they are small,
    and the L2 cache can hold them."""

    target: int  # weights; of an embedding table only what is the head too
    layers: int  # the drafter's
    head: int  # the LM head, once more for the drafter, or its rows of the drafter's vocabulary
    fc: int
    walk: int  # Markov W2, once for every slot of the block
    target_kv: int
    draft_kv: int

    @property
    def plain(self) -> int:
        """Of a step without a drafter."""
        return self.target + self.target_kv

    @property
    def round(self) -> int:
        return sum(self)


def kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * dtype.itemsize


def floor_of(model: PreTrainedModel, draft: DSparkDraft, batch: int, context: int) -> Floor:
    """For ``batch`` rows that have read ``context`` tokens each."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(one.nbytes for one in model.parameters())  # what is shared comes once
    return Floor(
        target=weights - (0 if embedding is head else embedding.nbytes),
        layers=sum(one.nbytes for one in draft.layers.parameters()),
        head=head.nbytes if draft.vocabulary is None else head[: len(draft.vocabulary)].nbytes,
        fc=draft.fc.weight.nbytes,
        walk=draft.config.block_size * draft.markov_weights()[1].nbytes,
        target_kv=batch * context * kv_bytes(model.config, model.dtype),
        draft_kv=batch * context * kv_bytes(draft.config, draft.dtype),
    )


def expected_tau(right: float, block: int) -> float:
    """Committed tokens of a round whose drafts are right with probability ``right`` each, the bonus included."""
    return sum(right**accepted for accepted in range(block + 1))


# --- drafts that are right as often as they are told to be ------------------------------------------------------------


def script(truth: torch.Tensor, start: int, block: int, vocabulary: int, right: float, seed: int = 0) -> torch.Tensor:
    """What to propose behind an anchor at position ``start + n``: int64 ``[B, N, T]``.

    Whether a draft is right is Philox of row, anchor and slot, so any two runs and any two ways agree about it.

    Args:
        truth: int64 ``[B, C]``, prompt and continuation.
        start: tokens of the prompt, which is where the first anchor stands.
    """
    device = truth.device
    anchors, slots = torch.arange(start, truth.shape[1], device=device)[:, None], torch.arange(block, device=device)
    rows = torch.arange(len(truth), device=device)[:, None, None]
    true = truth[:, (anchors + 1 + slots).clamp(max=truth.shape[1] - 1)]
    word = philox(slots, anchors, torch.zeros_like(slots), torch.zeros_like(slots), rows + seed)[0]
    return torch.where((word >> 8).double() * 2.0**-24 < right, true, (true + 1) % vocabulary)


class ScriptedDSpark(DSparkDrafter):
    """DSpark at full cost, whose drafts are then replaced by a script's: one gather, and nothing that asks the host.

    Args:
        draft: joined to its target.
        table: of :func:`script`; its place in memory is what a graph knows the script by.
        start: tokens of the prompts, which are all of one length.
    """

    def __init__(self, draft: DSparkDraft, table: torch.Tensor, start: int) -> None:
        super().__init__(draft)
        self._table, self._start = table, start

    def begin(self, batch: int, capacity: int, device: torch.device) -> None:
        super().begin(batch, capacity, device)
        self._rows = torch.arange(batch, device=device)

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        self._rows = self._rows[rows]

    @property
    def capturable(self) -> tuple[Hashable, ...]:
        return (*super().capturable, self._table.data_ptr(), self._start)

    def propose(self, anchor: torch.Tensor, position: torch.Tensor, noise: Noise) -> Proposal:
        if noise.mode != "greedy":
            raise ValueError(f"mode is {noise.mode!r}: a script has no distribution, so it is for greedy decoding")
        proposal = super().propose(anchor, position, noise)
        # A finished row stands at its end, one behind the table's last line.
        line = (position - self._start).clamp(0, self._table.shape[1] - 1)
        return dataclasses.replace(proposal, tokens=self._table[self._rows, line])
