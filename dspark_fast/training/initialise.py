"""A fresh drafter that begins as the target's own last layers instead of as noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dspark_fast.draft import DSparkDraft
from dspark_fast.engine.taps import decoder_layers


@torch.no_grad()
def initialise_from_target(draft: DSparkDraft, model: Any, sample: torch.Tensor) -> bool:
    """Copy the target's last layers into the drafter and let ``fc`` pass the last tap through.

    With the identity on the last tap and the layers' own weights, the drafter's context K and V begin as almost those
    of the target's last layers, so that training starts from a model that already reads its context. q and k norms,
    which a Llama has not, get the mean RMS of its queries and keys, which leaves the scores' scale as it was.
    ``W1`` begins as the embedding's first principal components at an RMS of 0.25, so that tokens which are alike begin
    alike. In 200 steps it was the size that told (bench/results/cpu/training_tries.json): the later slots' acceptance
    was 5 % higher than with the authors' noise of 0.02, and noise of 0.25 did as well. ``W2`` begins at zero: rows
    that a reduced vocabulary never trains then add no noise at inference.

    Args:
        draft: fresh, joined to ``model``.
        model: the target; its layers must have Llama's names for their parts (Llama, Qwen2, Qwen3, Mistral, ...).
        sample: int64 ``[B, L]``, some text to measure the queries' and keys' scale on.

    Returns:
        Whether it was done; false (and nothing touched) if the target's layers have other parts or shapes.
    """
    if not fits_target(draft, model):
        return False
    layers = decoder_layers(model)[-len(draft.layers) :]
    scales = _query_key_scales(model, layers, sample)
    for ours, theirs, (q_scale, k_scale) in zip(draft.layers, layers, scales, strict=True):
        for name, module in ours.named_modules():
            source = _part(theirs, name)
            if isinstance(module, nn.Linear) and source is not None:
                module.weight.copy_(source.weight)
                if module.bias is not None:
                    module.bias.zero_() if source.bias is None else module.bias.copy_(source.bias)
        for name, scale in (("q_norm", q_scale), ("k_norm", k_scale)):
            norm = getattr(ours.self_attn, name)
            source = getattr(theirs.self_attn, name, None)
            norm.weight.copy_(source.weight) if source is not None else norm.weight.fill_(scale)
        ours.input_layernorm.weight.copy_(theirs.input_layernorm.weight)
        ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
    draft.norm.weight.copy_(model.get_decoder().norm.weight)
    draft.hidden_norm.weight.copy_(layers[0].input_layernorm.weight)
    hidden = draft.config.hidden_size
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, -hidden:].diagonal().add_(1.0)
    if draft.config.markov_rank:
        _principal_components(model.get_input_embeddings().weight, draft.markov_head.markov_w1.weight)
        draft.markov_head.markov_w2.weight.zero_()
    return True


@torch.no_grad()
def fits_target(draft: DSparkDraft, model: Any) -> bool:
    """Whether :func:`initialise_from_target` can be done: the target's last layers have the drafter's parts and shapes.

    Shapes are all that is read of the drafter, which may be on the device ``meta``.
    """
    layers = decoder_layers(model)[-len(draft.layers) :]
    return len(layers) == len(draft.layers) and all(map(_fits, draft.layers, layers))


def _principal_components(embedding: torch.Tensor, w1: torch.Tensor, rms: float = 0.25) -> None:
    """Fill ``w1`` ``[V, R]`` with the embedding on its R first principal axes; columns beyond them stay as they are."""
    rank = min(w1.shape[1], embedding.shape[1])
    mean = embedding.float().mean(0)
    # a part at a time: the whole of a large embedding in fp32 would be gigabytes
    gram = sum((part.float() - mean).T @ (part.float() - mean) for part in embedding.split(8192))
    axes = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, :rank]
    for part, out in zip(embedding.split(8192), w1.split(8192), strict=True):
        out[:, :rank] = (part.float() - mean) @ axes
    w1[:, :rank] *= rms / w1[:, :rank].square().mean().sqrt()


def _part(layer: nn.Module, name: str) -> Any:
    for step in name.split("."):
        layer = getattr(layer, step, None)
    return layer


def _fits(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether every projection of our layer has a counterpart of the same shape."""
    if not all(_multiplies(getattr(theirs, name, None)) for name in ("input_layernorm", "post_attention_layernorm")):
        return False
    for name, module in ours.named_modules():
        if isinstance(module, nn.Linear):
            source = _part(theirs, name)
            if getattr(source, "weight", None) is None or source.weight.shape != module.weight.shape:
                return False
            if getattr(source, "bias", None) is not None and module.bias is None:
                return False
    return True


def _multiplies(norm: Any) -> bool:
    """Whether a norm multiplies by its weight, as ours do; Gemma's multiplies by 1 + weight."""
    if getattr(norm, "weight", None) is None:
        return False
    return torch.allclose(norm(torch.ones_like(norm.weight)[None])[0], norm.weight, rtol=0.02, atol=0.02)


def _query_key_scales(model: Any, layers: nn.ModuleList, sample: torch.Tensor) -> list[tuple[float, float]]:
    """Mean RMS of each layer's query and key heads over some text."""
    seen: dict[tuple[int, str], float] = {}
    handles = []

    def measure(key: tuple[int, str], dim: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            heads = output.float().unflatten(-1, (-1, dim))
            seen[key] = heads.square().mean(-1).sqrt().mean().item()

        return hook

    try:
        for index, layer in enumerate(layers):
            for name in ("q_proj", "k_proj"):
                hook = measure((index, name), layer.self_attn.head_dim)
                handles.append(getattr(layer.self_attn, name).register_forward_hook(hook))
        model.get_decoder()(input_ids=sample.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [(seen[i, "q_proj"], seen[i, "k_proj"]) for i in range(len(layers))]
