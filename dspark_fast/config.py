"""The drafter's configuration, in the authors' flat layout (``Qwen3DSparkModel`` on top of a Qwen3 configuration)."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURE = "Qwen3DSparkModel"
MARKOV_HEADS = ("vanilla", "gated", "rnn")

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
# What a key may be at all; what fits the others is checked later. A million is 50 times the widest layer there is.
_INTEGERS = {
    **dict.fromkeys(_SIZES, (1, 2**24)),
    "num_hidden_layers": (1, 1000),
    "max_position_embeddings": (1, 2**31 - 1),
    "block_size": (-(2**31), 2**31 - 1),
    "mask_token_id": (-(2**31), 2**31 - 1),
    "num_target_layers": (1, 100_000),
    "markov_rank": (-(2**31), 2**20),
    "draft_vocab_size": (-(2**31), 2**31 - 1),
    "num_anchors": (0, 2**31 - 1),
}


class DSparkConfig(Qwen3Config):
    """Configuration of a DSpark drafter.

    Everything of :class:`transformers.Qwen3Config` describes the *draft* layers. On top of it:

    Attributes:
        block_size: gamma, how many tokens a round drafts. The block's slots are ``[anchor, MASK x (gamma - 1)]``
            and slot j predicts the token at position ``anchor + j + 1``.
        mask_token_id: the id that fills the slots after the anchor.
        target_layer_ids: the tapped target layers, ascending; -1 is the embedding output.
        num_target_layers: depth of the target.
        markov_rank: R of the Markov head; 0 leaves the head out (the authors' DFlash layout).
        markov_head_type: ``vanilla``, ``gated`` or ``rnn``.
        enable_confidence_head: whether the checkpoint has one.
        confidence_head_with_markov: whether it also reads ``W1[previous token]``.
        draft_vocab_size: D, how many tokens the drafter can draft; None for all. See :mod:`dspark_fast.vocabulary`.
        num_anchors: anchors per training sequence.
        target_model_type: ``model_type`` of the target, which is ``qwen3`` here whatever the target is.

    Raises:
        ValueError: for values that no DSpark drafter can have, naming the key, its value and what is accepted.
    """

    model_type = "qwen3"

    block_size: int = 7
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None
    num_anchors: int = 512
    target_model_type: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_numbers()  # first: of 10^9 layers transformers would make a list
        super().__post_init__(**kwargs)
        self.architectures = self.architectures or [ARCHITECTURE]
        self.tie_word_embeddings = False

    def _check_numbers(self) -> None:
        for key, (least, most) in _INTEGERS.items():
            value = getattr(self, key)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most
            ):
                raise ValueError(f"{key} is {value!r}: accepted is an integer from {least} to {most}")
        for key in ("rms_norm_eps", "initializer_range", "attention_dropout"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{key} is {value!r}: accepted is a number of 0 or more")
        taps = self.target_layer_ids
        if taps is not None and not (isinstance(taps, (list, tuple)) and all(type(layer) is int for layer in taps)):
            raise ValueError(f"target_layer_ids is {taps!r}: accepted is a list of integers")

    def check(self) -> None:
        """Refuse what cannot be a drafter, before any weight is read."""
        architecture = (self.architectures or [None])[0]
        if architecture != ARCHITECTURE:
            raise ValueError(f"architectures is {self.architectures}: only [{ARCHITECTURE!r}] can be loaded so far")
        if not 1 <= self.block_size <= 16:
            raise ValueError(f"block_size is {self.block_size}: accepted are 1 to 16 drafted tokens per round")
        for key, least in (("hidden_size", 1), ("vocab_size", 1), ("num_hidden_layers", 1), ("markov_rank", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} is {getattr(self, key)}: accepted is {least} or more")
        if self.num_attention_heads < 1 or self.num_attention_heads % max(self.num_key_value_heads, 1):
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} with num_key_value_heads "
                f"{self.num_key_value_heads}: the first must be a multiple of the second"
            )
        if any(kind != "full_attention" for kind in self.layer_types or ()):
            raise ValueError(f"layer_types is {self.layer_types}: a drafter's layers are all 'full_attention'")
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}: accepted are {', '.join(MARKOV_HEADS)}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act!r}: accepted is an activation that transformers has")
        rope = (self.rope_parameters or {}).get("rope_type", "default")
        if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_parameters has the rope_type {rope!r}: accepted is one that transformers has")
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}: accepted is an id below {self.vocab_size}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}: accepted are 1 to vocab_size, which is {self.vocab_size}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "confidence_head_with_markov is True with markov_rank 0: accepted is False without the head"
            )
        taps = self.target_layer_ids
        if not taps or sorted(set(taps)) != list(taps) or taps[0] < -1:
            raise ValueError(f"target_layer_ids is {taps}: accepted are ascending layer indices, -1 the embedding")
        if self.num_target_layers is not None and taps[-1] >= self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids is {taps} for {self.num_target_layers} target layers: the last layer "
                f"({self.num_target_layers - 1}) cannot be tapped, nor can one beyond it"
            )

    def to_dict(self) -> dict[str, Any]:
        """The authors' keys: those of a head that is absent are left out, as their files do."""
        data = super().to_dict()
        if not self.markov_rank:
            data.pop("markov_head_type", None)
        if not self.enable_confidence_head:
            data.pop("confidence_head_with_markov", None)
        for key in ("target_model_type", "draft_vocab_size"):
            if data.get(key) is None:
                data.pop(key, None)
        return data

    @classmethod
    def from_target(cls, target: PreTrainedConfig, **overrides: Any) -> DSparkConfig:
        """A fresh drafter's configuration for any decoder-only target: Qwen3 blocks in the target's geometry.

        Args:
            target: the target model's ``config`` (a composite one gives its text part).
            **overrides: any key of this class. Defaults: 5 layers (fewer if the target has fewer), 5 taps spread from
                layer 1 to the third from last, ``mask_token_id`` the last id of the vocabulary.

        Raises:
            ValueError: if the result cannot be a drafter (see :meth:`check`).
        """
        target = target.get_text_config(decoder=True)
        depth = target.num_hidden_layers
        heads = target.num_attention_heads
        values: dict[str, Any] = {
            "hidden_size": target.hidden_size,
            "intermediate_size": _intermediate_size(target),
            "vocab_size": target.vocab_size,
            "num_hidden_layers": min(5, depth),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
            "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
            "hidden_act": "silu",
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta_of(target)},
            "dtype": target.dtype,
            "num_target_layers": depth,
            "target_layer_ids": default_taps(depth),
            "mask_token_id": target.vocab_size - 1,
            "target_model_type": target.model_type,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "pad_token_id": target.pad_token_id,
            "confidence_head_with_markov": overrides.get("markov_rank", cls.markov_rank) > 0,
        }
        config = cls(**{**values, **overrides})
        config.check()
        return config


def default_taps(depth: int, count: int = 5) -> list[int]:
    """``count`` layers spread evenly from layer 1 to the third from last, as the authors choose theirs.

    For 36 layers this gives their 1, 9, 17, 25, 33.
    """
    last = max(depth - 3, 0)
    first = min(1, last)
    return sorted({round(first + (last - first) * i / max(count - 1, 1)) for i in range(count)})


def _intermediate_size(target: PreTrainedConfig) -> int:
    """Width of the target's MLP, under whichever name its configuration has it; else four times the hidden size."""
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if value := getattr(target, name, None):
            return int(value)
    return 4 * target.hidden_size


def rope_theta_of(target: PreTrainedConfig) -> float:
    """The base of the target's (full-attention) rotary frequencies, 10,000 if it has none."""
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10_000.0)
