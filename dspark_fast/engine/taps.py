"""Reading the target's hidden states: forward hooks on the tapped layers alone, gone again whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class Taps:
    """What the tapped layers of the target's last forward pass gave."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = list(layer_ids)
        self._outputs: dict[int, torch.Tensor] = {}

    def catch(self, layer: int, output: Any) -> None:
        """Keep one layer's output (a tensor, or a tuple that begins with it)."""
        self._outputs[layer] = output[0] if isinstance(output, tuple) else output

    def take(self) -> torch.Tensor:
        """Features ``[B, T, m*H]`` of the forward pass just made, in ascending layer order.

        Raises:
            RuntimeError: naming the tapped layers that did not run (a compiled forward skips hooks set later).
        """
        silent = [layer for layer in self.layer_ids if layer not in self._outputs]
        if silent:
            raise RuntimeError(f"tapped layers {silent} of {self.layer_ids} gave nothing in the target's forward pass")
        parts = [self._outputs[layer] for layer in self.layer_ids]
        device = parts[0].device  # a target that is spread over several GPUs
        features = torch.cat([part.to(device) for part in parts], dim=-1)
        self._outputs.clear()
        return features


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The target's list of decoder layers.

    Raises:
        ValueError: if the decoder has no such list.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {depth} decoder layers to tap")


@contextmanager
def tapped(model: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[Taps]:
    """Tap layers of ``model`` for the time of a ``with`` block.

    A tap is a layer's raw output, after the residual and before the final norm: ``hidden_states[id + 1]`` of
    transformers. -1 is what enters layer 0, the embedding output. ``output_hidden_states=True`` is never used: it keeps
    all layers and installs permanent hooks.
    """
    layers = decoder_layers(model)
    taps = Taps(layer_ids)
    handles = []
    try:
        for layer in taps.layer_ids:
            if layer == -1:
                handles.append(
                    layers[0].register_forward_pre_hook(
                        lambda _, args, kwargs: taps.catch(-1, args[0] if args else kwargs["hidden_states"]),
                        with_kwargs=True,
                    )
                )
            else:
                handles.append(
                    layers[layer].register_forward_hook(lambda _, __, output, layer=layer: taps.catch(layer, output))
                )
        yield taps
    finally:
        for handle in handles:
            handle.remove()
