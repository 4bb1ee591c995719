"""Linear layers on weights laid out for a CPU's matrix products, for the time of a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

#: Bytes of weights that are packed unasked: as many again are taken, for as long as the model lives.
UNASKED = 2 * 2**30

_State = tuple[Hashable, ...]
_Place = tuple[int, torch.Size]  # address and shape
# No weak references to weights themselves: torch.utils.swap_tensors, as in Module.to, refuses such.
_packs: WeakValueDictionary[_State, torch.Tensor] = WeakValueDictionary()
_forwards: WeakKeyDictionary[nn.Linear, tuple[_State, Callable]] = WeakKeyDictionary()
_running: dict[_Place, torch.Tensor] = {}  # packed weights of the running calls, by the plain ones' places


def to_pack(models: Iterable[nn.Module], pack_weights: bool | None) -> list[nn.Linear]:
    """The layers of these models that a call runs on packed weights.

    Args:
        models: all that the call runs.
        pack_weights: whether it is to. None: if they are at most :data:`UNASKED`.

    Raises:
        ValueError: if it is to and no layer can.
    """
    if pack_weights is False:
        return []
    layers = prepackable(models)
    if pack_weights and not layers:
        raise ValueError(
            "pack_weights is True, but there are no linear layers in bf16 on a CPU that multiplies it, outside of "
            "autocast"
        )
    return layers if pack_weights or weights_of(layers) <= UNASKED else []


def prepackable(models: Iterable[nn.Module]) -> list[nn.Linear]:
    """The layers of these models that :func:`prepacked` would run otherwise.

    bf16 alone, and plain ``nn.Linear`` of plain weights alone: quantised layers and adapters are others, and a weight
    may be a tensor of a class of its own. fp32, in which tokens are compared, stays as it is.
    """
    if not supported() or torch.is_autocast_enabled("cpu"):
        return []
    layers = {
        module: None
        for model in models
        for module in model.modules()
        if type(module) is nn.Linear
        and _fits(module.weight)
        and ("forward" not in vars(module) or _ours(module))  # somebody else's stays
    }
    return list(layers)


def _fits(weight: torch.Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return plain and weight.is_contiguous() and weight.numel() > 0


def supported() -> bool:
    """Whether this CPU and this torch can: the three operators are private, and another torch may lack one."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(ops, name) for name in needed):
        return False
    return ops._is_mkldnn_bf16_supported()


def _ours(layer: nn.Linear) -> bool:
    """Whether a call of another thread has put this forward there, or an interrupt during the clean-up left it."""
    return layer in _forwards and vars(layer)["forward"] is _forwards[layer][1]


def weights_of(layers: Iterable[nn.Linear]) -> int:
    """Bytes of the layers' weights, each counted once."""
    return sum({_place(layer.weight): layer.weight.nbytes for layer in layers}.values())


@contextmanager
def prepacked(layers: list[nn.Linear]) -> Iterator[None]:
    """Run these layers on packed weights inside a ``with`` block; they are as before afterwards.

    oneDNN multiplies a few rows by plain weights far below the rate at which a core copies them, and by weights in its
    own blocks at more of it: SmolLM2 decodes 1.5 times as fast without any drafter (bench/results/cpu/engine.json, the
    prompts' ``no_drafter``). The products are the same but for the order of their sums.

    Packed weights are kept for the next call, and made anew if a weight has changed meanwhile; those of weights that
    were cast, moved or quantised are given back by the next call, whatever it packs.

    Args:
        layers: of :func:`prepackable`.
    """
    for gone in [layer for layer in _forwards if not _fits(layer.weight)]:
        del _forwards[gone]
    before = dict(_running)  # a streamer may generate too
    try:
        for layer in layers:
            layer.forward = _forward(layer)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
        _running.clear()
        _running.update(before)


def _forward(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same function for the same weights: a compiled pass has it in its guards."""
    plain = layer.weight
    state, weight = _pack(plain)
    _running[_place(plain)] = weight
    known = _forwards.get(layer)
    if known is None or known[0] != (*state, id(layer.bias)):
        known = (*state, id(layer.bias)), _product(plain, weight, layer.bias)
        _forwards[layer] = known
    return known[1]


def _place(weight: torch.Tensor) -> _Place:
    return weight.data_ptr(), weight.shape


def _pack(plain: torch.Tensor) -> tuple[_State, torch.Tensor]:
    version = None if plain.is_inference() else plain._version
    state = (*_place(plain), version, _contents(plain.detach()))
    weight = _packs.get(state)
    if weight is None:
        weight = _packs[state] = _reorder(plain.detach())
    return state, weight


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _contents(weight: torch.Tensor) -> int:
    """Changes with the values: what was written past autograd (``.data``) raises no version.

    Sums of each row's words modulo 2**64, times odd factors of their columns: a word that changes alone in its row is
    always seen, words that change places but by chance. What it cannot see are pairs of signs in a word's last place.
    """
    aligned = not (weight.shape[1] % 4 or weight.storage_offset() % 4 or weight.stride(0) % 4)
    wide = weight.view(torch.int64) if aligned else weight.view(torch.int16).long()
    return hash((wide @ _odd(wide.shape[1])).numpy().tobytes())


@cache
def _odd(count: int) -> torch.Tensor:
    """int64 ``[count]``, always the same."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu") * 2 + 1


def _product(plain: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable:
    direct = torch.ops.mkldnn._linear_pointwise

    def forward(x: torch.Tensor) -> torch.Tensor:
        # Another thread may train: the packed product has no gradient.
        if x.dtype != torch.bfloat16 or not x.numel() or torch.is_grad_enabled():
            return F.linear(x, plain, bias)
        if torch.compiler.is_compiling():  # a packed weight is no tensor that can be traced
            return torch.ops.dspark_fast.packed_linear(x, plain, bias)
        return direct(x, weight, bias, "none", [], "")

    return forward


def _by_address(x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, _running[_place(plain)], bias, "none", [], "")


def _shape(x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(plain))


_library = torch.library.Library("dspark_fast", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _by_address, "CPU")
_library.impl("packed_linear", _shape, "Meta")
