"""Ways to break a good pair on purpose: the doctor's tests and its bench plant each and ask whether it is named.

What a file can hold is planted in a copy of the checkpoint, and loaded as any other; what only code can do wrong is
planted in the loaded modules.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dspark_fast.checkpoint import OFFSETS, WEIGHTS
from dspark_fast.doctor.loading import Loaded, join
from dspark_fast.doctor.wiring import final_norm
from dspark_fast.engine.taps import tapped

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """A fault to plant.

    Attributes:
        name: which of the doctor's faults it is.
        config: new values of ``config.json``, from the old ones.
        weights: changes the tensors in place, given the target, the configuration (to be changed too) and them.
        modules: changes the loaded pair and returns its target.
    """

    name: str
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    weights: Callable[[Any, dict[str, Any], Tensors], None] | None = None
    modules: Callable[[Any, Any], Any] | None = None

    def plant(self, model: Any, tokenizer: Any, folder: Path, to: Path) -> Loaded:
        """Break a pair.

        Args:
            model, tokenizer: of the target, which stays as it is.
            folder: of the good drafter, unsharded.
            to: where its broken copy goes.

        Raises:
            PairRefused: if it cannot even be loaded.
        """
        to.mkdir(parents=True)
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if self.config is not None:
            data |= self.config(data)
        if self.weights is None:
            shutil.copy(folder / WEIGHTS, to / WEIGHTS)
        else:
            tensors = load_file(folder / WEIGHTS)
            self.weights(model, data, tensors)
            save_file({key: value.contiguous() for key, value in tensors.items()}, to / WEIGHTS)
        (to / "config.json").write_text(json.dumps(data), encoding="utf-8")
        loaded = join(model, tokenizer, to)
        if self.modules is None:
            return loaded
        target = self.modules(model, loaded.draft)
        return Loaded(target, loaded.draft, tokenizer, to, loaded.inventory, loaded.memory)


# --- in the checkpoint ------------------------------------------------------------------------------------------------


def _taps(step: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {"target_layer_ids": [tap + step for tap in config["target_layer_ids"]]}


def _theta(divisor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["rope_parameters"]
        return {"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] / divisor}}

    return changed


def _swap_markov(model: Any, config: dict[str, Any], tensors: Tensors) -> None:
    """Of a drafter of a part of the vocabulary the two have unlike shapes: it is made to draft all of it."""
    one, two = (f"markov_head.markov_{name}.weight" for name in ("w1", "w2"))
    if OFFSETS in tensors:
        rows = tensors.pop(OFFSETS)
        rows = rows + torch.arange(len(rows))
        tensors[two] = torch.zeros_like(tensors[one]).index_copy_(0, rows, tensors[two])
        del config["draft_vocab_size"]
    tensors[one], tensors[two] = tensors[two], tensors[one]


def _reorder_markov(model: Any, config: dict[str, Any], tensors: Tensors) -> None:
    """The hidden state last in a gated head, first in a recurrent one."""
    rank, hidden = config["markov_rank"], config["hidden_size"]
    if config["markov_head_type"] == "gated":
        key, widths = "markov_head.gate_proj.weight", (hidden, rank)
    else:
        key, widths = "markov_head.joint_proj.weight", (2 * rank, hidden)
    before, after = tensors[key].split(widths, dim=1)
    tensors[key] = torch.cat([after, before], dim=1)


@torch.no_grad()
def _fold_norm(model: Any, config: dict[str, Any], tensors: Tensors) -> None:
    """``fc`` as it would be for taps after the final norm, but for the size of each single token's state."""
    taps, weight = config["target_layer_ids"], final_norm(model).weight.float().cpu()
    ids = torch.arange(256, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    with tapped(model, taps) as caught:
        model.get_decoder()(input_ids=ids, use_cache=False)
        states = caught.take()[0, 1:].float().cpu()  # the first token's is unlike all others
    parts = []
    for state, part in zip(states.chunk(len(taps), -1), tensors["fc.weight"].float().chunk(len(taps), 1), strict=True):
        size = state.square().mean(-1).sqrt().mean()
        parts.append(part * size / torch.where(weight.abs() > 1e-3, weight, 1.0))
    tensors["fc.weight"] = torch.cat(parts, dim=1).to(tensors["fc.weight"].dtype)


def _other_embedding(model: Any, config: dict[str, Any], tensors: Tensors) -> None:
    """Copies as other engines expect them, each token's embedding that of the next."""
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().cpu().roll(1, dims=0).clone()
    tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().cpu().clone()


# --- in the code ------------------------------------------------------------------------------------------------------


def _late_slots(model: Any, draft: Any) -> Any:
    """Each slot says what the one before it should."""

    def late(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        blocks = output.unflatten(1, (-1, module.config.block_size))
        return blocks.roll(1, dims=2).flatten(1, 2)

    draft.register_forward_hook(late)
    return model


def _late_features(model: Any, draft: Any) -> Any:
    """Every token's features stand one token later."""
    draft.fc.register_forward_pre_hook(lambda module, args: (args[0].roll(1, dims=1),))
    return model


class Displaced(nn.Module):
    """Angles of a block that stands elsewhere; the context, which begins at 0, stands where it should."""

    def __init__(self, rotary: nn.Module, step: int) -> None:
        super().__init__()
        self.rotary, self.step = rotary, step

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        context = positions.shape[1] > 1 and not positions[:, 0].any()
        return self.rotary(x, positions if context else positions + self.step)


def _displaced_block(model: Any, draft: Any) -> Any:
    draft.rotary_emb = Displaced(draft.rotary_emb, -draft.config.block_size)
    return model


@torch.no_grad()
def _sibling(model: Any, draft: Any) -> Any:
    """A target that says the same with other weights: the channels of its hidden states in another order."""
    other = copy.deepcopy(model)
    hidden = other.config.get_text_config(decoder=True).hidden_size
    order = torch.randperm(hidden, generator=torch.Generator().manual_seed(0)).to(other.device)
    seen = set()
    for name, weight in other.named_parameters():
        kind = name.split(".")[-2]
        reads = kind in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        if weight.data_ptr() in seen:
            continue
        seen.add(weight.data_ptr())
        if reads:
            weight.copy_(weight[:, order].clone())
        elif kind in ("o_proj", "down_proj") or kind in ("input_layernorm", "post_attention_layernorm", "norm"):
            weight.copy_(weight[order].clone())
    draft.tie_to(other)
    return other


#: by what is wrong; those of the format of the prompts are no faults of the pair and not here
FAULTS = {
    "taps one layer too low": Fault("taps", config=_taps(-1)),
    "taps one layer too high": Fault("taps", config=_taps(1)),
    "made for taps after the final norm": Fault("tap norm", weights=_fold_norm),
    "RoPE base 100 times too small": Fault("rope base", config=_theta(100)),
    "block placed a block too early": Fault("rope offset", modules=_displaced_block),
    "token 0 as the mask": Fault("mask token", config=lambda config: {"mask_token_id": 0}),
    "W1 and W2 swapped": Fault("markov head", weights=_swap_markov),
    "Markov head's inputs in another order": Fault("markov head", weights=_reorder_markov),
    "slots one token late": Fault("anchor", modules=_late_slots),
    "features one token late": Fault("anchor", modules=_late_features),
    "another target of the same shape": Fault("target", modules=_sibling),
    "another embedding": Fault("embedding", weights=_other_embedding),
}


def planted(config: Any) -> dict[str, Fault]:
    """The faults that this drafter can have."""
    vanilla = not config.markov_rank or config.markov_head_type == "vanilla"
    left_out = {"Markov head's inputs in another order"} if vanilla else set()
    if not config.markov_rank:
        left_out.add("W1 and W2 swapped")
    return {name: fault for name, fault in FAULTS.items() if name not in left_out}
