"""The DSpark drafter: a few Qwen3 blocks whose attention reads the target's own hidden states."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark_fast.config import DSparkConfig
from dspark_fast.reference.confidence import confidence_logits
from dspark_fast.reference.layers import rms_norm, rotate

# attend(layer, q, k, v): q [B,T,Hq,D] normed and turned, k and v [B,T,Hkv,D] as projected -> [B,T,Hq,D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm, ``reference.layers.rms_norm`` with a weight of its own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class DraftAttention(nn.Module):
    """Projections of one layer's attention. Where its keys come from is the caller's affair: see ``Attend``."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, N, H]`` -> K and V ``[B, N, Hkv, D]``, before the key norm and RoPE; the same for context and block."""
        return self._heads(self.k_proj(x)), self._heads(self.v_proj(x))

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[B, T, H]`` -> ``[B, T, Hq, D]``, normed and turned by the angles ``[B, T, D]``."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)


class DraftMLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm block of the drafter."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MarkovHead(nn.Module):
    """Weights of the low-rank bias of the previous token (DSpark paper, section 3); the maths is the op ``markov``."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.markov_head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)


class ConfidenceHead(nn.Module):
    """Weights of the confidence head (DSpark paper, Eq. 7)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_head_with_markov else 0)
        self.proj = nn.Linear(width, 1)


class DSparkDraft(PreTrainedModel):
    """A DSpark drafter in the authors' layout, with its target's embedding and LM head.

    ``DSparkDraft(config)`` makes a fresh one, which :meth:`tie_to` then joins to its target.
    ``DSparkDraft.from_pretrained(name, target=model)`` reads a checkpoint. The target's embedding and head are held
    by reference and are no submodules, so ``draft.to(...)``, ``draft.parameters()`` and ``save_pretrained`` leave them
    alone. A drafter loaded without a target keeps its checkpoint's own copies as submodules.

    Attributes:
        vocabulary: int64 ``[D]``, ascending, the tokens that it can draft, column i of its logits being token
            ``vocabulary[i]``; None if it can draft all of them. See :mod:`dspark_fast.vocabulary`.

    Raises:
        ValueError: if the configuration cannot be a drafter's.
    """

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    _no_split_modules = ["DraftLayer"]  # noqa: RUF012

    def __init__(self, config: DSparkConfig) -> None:
        config.check()
        super().__init__(config)
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Module | None = None
        size = config.draft_vocab_size
        self.register_buffer("vocabulary", None if size is None else torch.arange(size), persistent=False)
        self.register_buffer("head_rows", None, persistent=False)  # [D, H], the LM head's rows of the vocabulary
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> DSparkDraft:
        """As ``nn.Module``, but ``.to(bfloat16)`` leaves the rotary frequencies in fp32.

        Rounded to bf16 they are off by 0.2 rad at position 2,000, and acceptance would fade with the context.
        """
        super()._apply(fn, *args, **kwargs)
        rotary = self._modules.get("rotary_emb")
        if rotary is not None and rotary.inv_freq.dtype != torch.float32:
            self.rotary_emb = Qwen3RotaryEmbedding(self.config).to(self.fc.weight.device)
        return self

    # --- joining a target -------------------------------------------------------------------------------------------

    def tie_to(self, model: PreTrainedModel) -> DSparkDraft:
        """Use ``model``'s embedding and LM head instead of copies; the drafter moves to the target's device.

        Raises:
            ValueError: if the drafter cannot belong to this target (hidden size, vocabulary, taps).
        """
        from dspark_fast.pairing import check_pair

        check_pair(self.config, model)
        self.share(model.get_input_embeddings(), model.get_output_embeddings())
        self.to(model.device).take_head_rows()
        return self

    def share(self, embed_tokens: nn.Module | None, lm_head: nn.Module | None) -> None:
        """Hold a target's embedding and head by reference."""
        for name, module in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            self._modules.pop(name, None)
            # Past nn.Module.__setattr__, which would register it: the target's weights are not ours to move or save.
            object.__setattr__(self, name, module)

    @torch.no_grad()
    def take_head_rows(self) -> None:
        """Copy the LM head's rows of the draft vocabulary: D/V of the head is read per round, for D H values of memory.

        A head that is no plain matrix (a quantised one) is run whole instead.
        """
        head = self.lm_head
        plain = type(head) is nn.Linear and head.weight.is_floating_point() and head.weight.dtype.itemsize > 1
        self.head_rows = head.weight[self.vocabulary] if plain and self.vocabulary is not None else None

    # --- the forward pass, in the pieces that inference and training put together ------------------------------------

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Tapped features ``[B, S, m*H]`` -> the injected context ``[B, S, H]`` that every layer reads."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def block_ids(self, anchor: torch.Tensor) -> torch.Tensor:
        """Anchor ``[B]`` -> ``[B, T]``: the anchor, then masks."""
        ids = anchor.new_full((anchor.shape[0], self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = anchor
        return ids

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the draft layers over blocks.

        Args:
            ids: int64 ``[B, T]``, see :meth:`block_ids`.
            positions: int64 ``[B, T]``, absolute.
            attend: gives each layer's attention its keys: the cache when generating, the packed sequence in training.

        Returns:
            ``[B, T, H]``, final-normed: what the LM head, the Markov head and the confidence head read.
        """
        hidden = self.tied("embed_tokens")(ids).to(self.fc.weight.dtype)
        cos, sin = self.rotary_emb(hidden, positions)
        for index, layer in enumerate(self.layers):
            normed = layer.input_layernorm(hidden)
            q = layer.self_attn.queries(normed, cos, sin)
            k, v = layer.self_attn.keys_values(normed)
            hidden = hidden + layer.self_attn.o_proj(attend(index, q, k, v).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits U of final-normed ``[..., H]``: ``[..., V]``, or ``[..., D]``, in the LM head's dtype."""
        head = self.tied("lm_head")
        if self.head_rows is not None:
            return F.linear(hidden.to(self.head_rows.dtype), self.head_rows)
        logits = head(hidden.to(head.weight.dtype))
        return logits if self.vocabulary is None else logits[..., self.vocabulary]

    def confidence(self, hidden: torch.Tensor, prev_tokens: torch.Tensor) -> torch.Tensor:
        """Confidence logits ``[..., T]`` from hidden ``[..., T, H]`` and each slot's previous token ``[..., T]``."""
        embedding = None
        if self.config.confidence_head_with_markov:
            embedding = F.embedding(prev_tokens, self.markov_head.markov_w1.weight)
        proj = self.confidence_head.proj
        return confidence_logits(hidden, proj.weight, proj.bias, embedding)

    def markov_weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """W1 ``[V, R]`` and W2 ``[V, R]``, or ``[D, R]``; None twice for a drafter without a Markov head."""
        if not self.config.markov_rank:
            return None, None
        return self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight

    def markov_options(self) -> dict[str, Any]:
        """The head's type and its extra weights, as the op ``markov`` names them."""
        if not self.config.markov_rank or self.config.markov_head_type == "vanilla":
            return {"head": "vanilla"}
        head = self.markov_head
        extra = head.gate_proj if self.config.markov_head_type == "gated" else head.joint_proj
        return {"head": self.config.markov_head_type, "head_weight": extra.weight, "head_bias": extra.bias}

    def tied(self, name: str) -> Any:
        """The target's ``embed_tokens`` or ``lm_head``.

        Raises:
            ValueError: for a fresh drafter that has not been joined to its target yet.
        """
        module = getattr(self, name)
        if module is None:
            raise ValueError(f"this drafter has no {name} yet: join it to its target with draft.tie_to(model)")
        return module

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        name: str | os.PathLike[str],
        *,
        target: PreTrainedModel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
    ) -> DSparkDraft:
        """Read a drafter in the authors' layout from a folder or the hub, sharded or not, safetensors only.

        Args:
            name: folder or hub name.
            target: alias this model's embedding and LM head; copies in the checkpoint are checked to be equal to
                them, and a checkpoint may leave them out. Without a target the checkpoint must have them.
            dtype: of the drafter's own weights; the target's if there is one, else the checkpoint's.
            device: the target's if there is one, else the CPU.
            revision: branch, tag or commit on the hub.

        Raises:
            ValueError: tensors missing, unexpected, wrongly shaped or different from the target's, by name; a
                configuration that is not a DSpark drafter's, or not this target's, with both values.
            OSError: no such folder or hub name.
        """
        from dspark_fast.checkpoint import load_draft

        return load_draft(cls, name, target=target, dtype=dtype, device=device, revision=revision)

    def save_pretrained(self, folder: str | os.PathLike[str], *, include_target_weights: bool = False) -> None:  # type: ignore[override]
        """Write ``config.json`` and ``model.safetensors`` in the authors' layout.

        Args:
            folder: made if it does not exist.
            include_target_weights: also write ``embed_tokens`` and ``lm_head``, which other engines expect; ours takes
                them from the target.
        """
        from dspark_fast.checkpoint import save_draft

        save_draft(self, Path(folder), include_target_weights=include_target_weights)
