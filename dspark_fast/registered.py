"""The ops as PyTorch knows them, ``torch.ops.dspark_fast.*``: schemas, fake implementations, mutated arguments.

So ``torch.compile`` sees one opaque node for each, whichever room runs it, and a graph that writes a cache says so.
Tensors only (torch.library has no unions): :mod:`dspark_fast.ops` is the door that turns numbers into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dspark_fast import reference

_SCHEMAS = {
    "markov_walk": "(Tensor base_logits, Tensor? w1, Tensor? w2, Tensor anchor, *, Tensor temperature, Tensor seed, "
    "Tensor position, str head, Tensor? head_weight, Tensor? head_bias, Tensor? hidden, int candidates, "
    "bool keep_logits, ScalarType logits_dtype, bool coupled, Tensor? w2_norms, Tensor? vocabulary, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "verify": "(Tensor target_logits, Tensor draft_tokens, Tensor? draft_logits, Tensor draft_lengths, *, "
    "Tensor temperature, Tensor seed, Tensor position, str mode, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? draft_row_max, Tensor? draft_log_sum, str backend) -> (Tensor, Tensor)",
    "cut_logits": "(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, *, str backend) "
    "-> Tensor",
    "block_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, *, float scale, bool causal, "
    "int? window, float? softcap, str backend) -> Tensor",
    "store_context_kv": "(Tensor k, Tensor v, Tensor k_norm_weight, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor offsets, Tensor counts, *, float eps, str backend) -> ()",
    # Tensors are not keyword-only here: torch.library differentiates no op that has such.
    "draft_loss": "(Tensor hidden, Tensor? target_hidden, Tensor labels, Tensor ce_weights, Tensor tv_weights, "
    "Tensor head, Tensor? feature, Tensor? w2, Tensor? log_total, Tensor? target_tokens, Tensor? target_probs, *, "
    "float? softcap, bool gradients, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
}

_library = torch.library.Library("dspark_fast", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)


def _room(backend: str) -> ModuleType:
    if backend == "reference":
        return reference
    from dspark_fast import kernels  # only now: Triton need not be there

    return kernels


def _given(**options: Any) -> dict[str, Any]:
    """The options that are not None: the rooms' own defaults are neutral."""
    return {name: value for name, value in options.items() if value is not None}


def _markov_walk(
    base_logits: Tensor, w1: Tensor | None, w2: Tensor | None, anchor: Tensor, *, backend: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    walk = _room(backend).markov_walk(base_logits, w1, w2, anchor, **options)
    # An op has no optional result: logits that are not kept are an empty tensor here, and None again at the door.
    logits = base_logits.new_empty(0, dtype=options["logits_dtype"]) if walk.logits is None else walk.logits
    return walk.tokens, logits, walk.row_max, walk.log_sum


def _markov_walk_fake(
    base_logits: Tensor, w1: Tensor | None, w2: Tensor | None, anchor: Tensor, *, backend: str, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, block, _ = base_logits.shape
    shape = base_logits.shape if options["keep_logits"] else (0,)
    return (
        base_logits.new_empty(batch, block, dtype=torch.int64),
        base_logits.new_empty(shape, dtype=options["logits_dtype"]),
        base_logits.new_empty(batch, block, dtype=torch.float32),
        base_logits.new_empty(batch, block, dtype=torch.float32),
    )


def _verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lengths: Tensor,
    *,
    backend: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return _room(backend).verify(target_logits, draft_tokens, draft_logits, draft_lengths, **_given(**options))


def _verify_fake(target_logits: Tensor, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    batch = target_logits.shape[0]
    return target_logits.new_empty(batch, dtype=torch.int64), target_logits.new_empty(batch, dtype=torch.int64)


def _cut_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    backend: str,
) -> Tensor:
    out = _room(backend).cut_logits(logits, temperature, **_given(top_k=top_k, top_p=top_p, min_p=min_p))
    return out.clone() if out is logits else out  # the reference hands back what it need not change


def _cut_logits_fake(logits: Tensor, *tensors: Tensor | None, **options: Any) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


def _block_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, backend: str, **o: Any) -> Tensor:
    return _room(backend).block_attention(q, k_cache, v_cache, lengths, **o).contiguous()  # as its fake says


def _block_attention_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v_cache.shape[-1])


def _store_context_kv(*tensors: Tensor, backend: str, eps: float) -> None:
    _room(backend).store_context_kv(*tensors, eps=eps)


def _store_context_kv_fake(*tensors: Tensor, backend: str, eps: float) -> None:
    return None


def _draft_loss(
    *tensors: Tensor | None, softcap: float | None, gradients: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    names = ("feature", "w2", "log_total", "target_tokens", "target_probs")
    options = dict(zip(names, tensors[6:]), softcap=softcap, gradients=gradients)
    loss, found = _room(backend).draft_loss_gradients(*tensors[:6], **options)
    none = tensors[0].new_empty(0)
    return *loss, *(none.clone() if one is None else one for one in found or (None, None, None))


def _draft_loss_fake(
    hidden: Tensor, *tensors: Tensor | None, softcap: float | None, gradients: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = [hidden.new_empty(shape, dtype=torch.float32) for shape in ((), hidden.shape[:1], hidden.shape[:1])]
    feature, w2 = tensors[5:7]
    wanted = (hidden, feature, w2) if gradients else (None, None, None)
    return *rows, *(hidden.new_empty(0) if one is None else one.new_empty(one.shape) for one in wanted)


def _draft_loss_keeps(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.gradients = keyword_only_inputs["gradients"]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[3:])


def _draft_loss_backward(ctx: Any, of_loss: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    if not ctx.gradients:
        raise RuntimeError("draft_loss ran with gradients=False: backward needs what it computes with True")
    found: list[Tensor | None] = [None] * 11
    if of_loss is not None:
        for place, one in zip((0, 6, 7), ctx.saved_tensors):
            if ctx.needs_input_grad[place]:  # in fp32: a loss scale of 2^16 is inf in fp16, 1/3 is 0.2 % off in bf16
                found[place] = (one.float() * of_loss).to(one.dtype)
    return tuple(found)


def call(name: str, backend: str, *tensors: Tensor | None, **options: Any) -> Any:
    """Run an op in the room called ``backend`` (``"kernel"`` or ``"reference"``)."""
    differentiated = options.get("gradients", False)
    if backend == "reference" and not differentiated and not torch.compiler.is_compiling():
        return _IMPLEMENTATIONS[name](*tensors, **options, backend=backend)  # the dispatcher costs a CPU call 20 us
    return getattr(torch.ops.dspark_fast, name)(*tensors, **options, backend=backend)


def _on_its_device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, wherever the tensors are."""

    @functools.wraps(implementation)
    def guarded(first: Tensor, *tensors: Tensor | None, **options: Any) -> Any:
        with torch.cuda.device_of(first):
            return implementation(first, *tensors, **options)

    return guarded


_IMPLEMENTATIONS = {name: globals()[f"_{name}"] for name in _SCHEMAS}
for _name, _implementation in _IMPLEMENTATIONS.items():
    _library.impl(_name, _on_its_device(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"dspark_fast::{_name}", globals()[f"_{_name}_fake"], lib=_library)
torch.library.register_autograd(
    "dspark_fast::draft_loss", _draft_loss_backward, setup_context=_draft_loss_keeps, lib=_library
)
