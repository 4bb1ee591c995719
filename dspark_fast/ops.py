"""The door to the ops: arguments are checked once, numbers become tensors, and one of the two rooms is called.

Each function has the signature of its reference and ``backend`` besides: ``"kernel"``, ``"reference"`` or None, which
leaves the choice to :mod:`dspark_fast.backend`. Nothing here reads a tensor's values, so nothing waits for a GPU (but a
parameter handed over as a tensor on another device is copied, which does).
"""

from __future__ import annotations

import math

import torch

from dspark_fast.backend import choose, multiplies_float8
from dspark_fast.reference import DraftLoss, MarkovWalk
from dspark_fast.reference.markov import HEADS, NORM_GROUP
from dspark_fast.reference.verify import MODES
from dspark_fast.registered import call

Scalar = float | int | torch.Tensor

SEEDS = {"at_least": -(2**63), "at_most": 2**63 - 1}
LONGEST_BLOCK = 16  # queries that the attention kernel takes: it reads K and V once for all of them
WIDEST_HEAD = 256
LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def markov_walk(
    base_logits: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    anchor: torch.Tensor,
    *,
    temperature: Scalar,
    seed: Scalar,
    position: Scalar,
    head: str = "vanilla",
    head_weight: torch.Tensor | None = None,
    head_bias: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    candidates: int = 0,
    keep_logits: bool = True,
    logits_dtype: torch.dtype = torch.float32,
    coupled: bool = False,
    w2_norms: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
    backend: str | None = None,
) -> MarkovWalk:
    """Walk the Markov head over a block; see :func:`dspark_fast.reference.markov_walk`.

    Raises:
        ValueError: for an unknown head or dtype, a number out of its range, or shapes that do not fit each other,
            naming what was given and what is accepted.
    """
    batch, block, vocab = _shape("base_logits", base_logits, "B, T, V")
    _expect("anchor", anchor, (batch,))
    if (w1 is None) != (w2 is None):
        raise ValueError("w1 and w2 come together: one is None")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}: accepted are {', '.join(HEADS)}")
    if candidates < 0:
        raise ValueError(f"candidates is {candidates}: accepted are 0 (all) and above")
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype is {logits_dtype}: accepted are {', '.join(map(str, LOGITS_DTYPES))}")
    if w2_norms is not None:
        if w2 is None or keep_logits or candidates or vocabulary is not None:
            raise ValueError(
                "w2_norms needs w2, keep_logits=False, candidates=0 and no vocabulary: not all logits are computed"
            )
        _expect("w2_norms", w2_norms, (-(-vocab // NORM_GROUP),))
    if w1 is not None and w2 is not None:
        if w2.dtype.itemsize == 1 and w2.dtype != torch.float8_e4m3fn:
            raise ValueError(f"w2 is {w2.dtype}: of the 8-bit dtypes float8_e4m3fn alone is accepted")
        rank = w1.shape[-1]
        _expect("w1", w1, (vocab if vocabulary is None else w1.shape[0], rank))
        _expect("w2", w2, (vocab, rank))
        if head != "vanilla":
            if hidden is None or head_weight is None:
                raise ValueError(f"head is {head!r}, which needs hidden and head_weight")
            width, gated = hidden.shape[-1], head == "gated"
            _expect("hidden", hidden, (batch, block, width))
            _expect("head_weight", head_weight, (rank, width + rank) if gated else (3 * rank, 2 * rank + width))
            if head_bias is not None:
                _expect("head_bias", head_bias, (rank if gated else 3 * rank,))
    if vocabulary is not None:
        _expect("vocabulary", vocabulary, (vocab,))
        if vocabulary.dtype != torch.int64:
            raise ValueError(f"vocabulary is {vocabulary.dtype}: accepted is torch.int64")
    weights = {"w1": w1, "w2": w2, "head_weight": head_weight, "head_bias": head_bias, "w2_norms": w2_norms}
    weights["vocabulary"] = vocabulary
    _on_one_device(base_logits=base_logits, **weights, hidden=hidden, anchor=anchor)
    beyond = None
    if w2 is not None and w2.dtype.itemsize == 1 and not multiplies_float8(w2.device):
        beyond = f"w2 is {w2.dtype}, which this GPU does not read"
    tokens, logits, row_max, log_sum = call(
        "markov_walk",
        choose(backend, base_logits, beyond=beyond),
        _rows(base_logits),
        _rows(w1),
        _rows(w2),
        anchor.contiguous(),
        temperature=per_row(temperature, base_logits, torch.float32, "temperature", at_least=0),
        seed=per_row(seed, base_logits, torch.int64, "seed", **SEEDS),
        position=per_row(position, base_logits, torch.int64, "position"),
        head=head,
        head_weight=_rows(head_weight),
        head_bias=_rows(head_bias),
        hidden=_rows(hidden),
        candidates=candidates,
        keep_logits=keep_logits,
        logits_dtype=logits_dtype,
        coupled=coupled,
        w2_norms=None if w2_norms is None else w2_norms.contiguous(),
        vocabulary=None if vocabulary is None else vocabulary.contiguous(),
    )
    return MarkovWalk(tokens, logits if keep_logits else None, row_max, log_sum)


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_lengths: torch.Tensor,
    *,
    temperature: Scalar,
    seed: Scalar,
    position: Scalar,
    mode: str = "rejection",
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
    draft_row_max: torch.Tensor | None = None,
    draft_log_sum: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept, resample or add the bonus token; see :func:`dspark_fast.reference.verify`.

    Raises:
        ValueError: for an unknown mode, a number out of its range, or shapes that do not fit each other, naming what
            was given and what is accepted.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: accepted are {', '.join(MODES)}")
    batch, slots, vocab = _shape("target_logits", target_logits, "B, T+1, V")
    _expect("draft_tokens", draft_tokens, (batch, slots - 1))
    _expect("draft_lengths", draft_lengths, (batch,))
    if mode == "rejection" and slots > 1:
        if draft_logits is None:
            raise ValueError("draft_logits is None: rejection needs the logits that the drafts were drawn from")
        _expect("draft_logits", draft_logits, (batch, slots - 1, vocab))
        if (draft_row_max is None) != (draft_log_sum is None):
            raise ValueError("draft_row_max and draft_log_sum come together: one is None")
        if draft_row_max is not None and draft_log_sum is not None:
            _expect("draft_row_max", draft_row_max, (batch, slots - 1))
            _expect("draft_log_sum", draft_log_sum, (batch, slots - 1))
    drafts = {"draft_tokens": draft_tokens, "draft_logits": draft_logits, "draft_lengths": draft_lengths}
    statistics = {"draft_row_max": draft_row_max, "draft_log_sum": draft_log_sum}
    _on_one_device(target_logits=target_logits, **drafts, **statistics)
    return call(
        "verify",
        choose(backend, target_logits),
        _rows(target_logits),
        _rows(draft_tokens),
        _rows(draft_logits),
        draft_lengths.contiguous(),
        temperature=per_row(temperature, target_logits, torch.float32, "temperature", at_least=0),
        seed=per_row(seed, target_logits, torch.int64, "seed", **SEEDS),
        position=per_row(position, target_logits, torch.int64, "position"),
        mode=mode,
        **_cuts(target_logits, top_k, top_p, min_p),
        draft_row_max=None if draft_row_max is None else draft_row_max.contiguous(),
        draft_log_sum=None if draft_log_sum is None else draft_log_sum.contiguous(),
    )


def cut_logits(
    logits: torch.Tensor,
    temperature: Scalar,
    top_k: Scalar = 0,
    top_p: Scalar = 1.0,
    min_p: Scalar = 0.0,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Divide by the temperature and cut; see :func:`dspark_fast.reference.cut_logits`. The result is a new tensor.

    Raises:
        ValueError: for a number out of its range, or a shape that does not fit.
    """
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits has shape {list(logits.shape)}: expected [B, V] or [B, T, V]")
    temperature = per_row(temperature, logits, torch.float32, "temperature", at_least=0)
    cuts = _cuts(logits, top_k, top_p, min_p)
    return call("cut_logits", choose(backend, logits), logits, temperature, *cuts.values())


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Block queries against each row's own cache; see :func:`dspark_fast.reference.block_attention`.

    Blocks of more than 16 queries and heads wider than 256 always go to the reference, which is SDPA.

    Raises:
        ValueError: if the shapes do not fit each other, or a number is out of its range.
    """
    batch, block, heads, width = _shape("q", q, "B, T, Hq, D")
    _, capacity, kv_heads, _ = _shape("k_cache", k_cache, "B, C, Hkv, D")
    _expect("k_cache", k_cache, (batch, capacity, kv_heads, width))
    value_width = _shape("v_cache", v_cache, "B, C, Hkv, Dv")[-1]
    _expect("v_cache", v_cache, (batch, capacity, kv_heads, value_width))
    _expect("lengths", lengths, (batch,))
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k_cache {kv_heads}: the first must be a multiple")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: accepted are None and 1 or more")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: accepted are None and numbers above 0")
    _on_one_device(q=q, k_cache=k_cache, v_cache=v_cache, lengths=lengths)
    beyond = None
    if block > LONGEST_BLOCK:
        beyond = f"q has {block} queries: the kernel takes {LONGEST_BLOCK}"
    elif max(width, value_width) > WIDEST_HEAD:
        beyond = f"a head is {max(width, value_width)} wide: the kernel takes {WIDEST_HEAD}"
    elif not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype not in LOGITS_DTYPES:
        given = ", ".join(str(one.dtype) for one in (q, k_cache, v_cache))
        beyond = f"q, k_cache and v_cache are {given}: the kernel takes one dtype, of 16 or 32 bits"
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    return call(
        "block_attention",
        choose(backend, q, beyond=beyond),
        _rows(q),
        _rows(k_cache),
        _rows(v_cache),
        lengths,
        **options,
    )


def store_context_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor,
    *,
    eps: float,
    backend: str | None = None,
) -> None:
    """Norm, turn and store new context rows; see :func:`dspark_fast.reference.store_context_kv`.

    Raises:
        ValueError: if the shapes do not fit each other, or a cache's last axis is not contiguous.
    """
    batch, rows, heads, width = _shape("k", k, "B, N, Hkv, D")
    value_width = _shape("v", v, "B, N, Hkv, Dv")[-1]
    _expect("v", v, (batch, rows, heads, value_width))
    _expect("k_norm_weight", k_norm_weight, (width,))
    _expect("cos", cos, (batch, rows, width))
    _expect("sin", sin, (batch, rows, width))
    if width % 2:
        raise ValueError(f"k has heads of {width}: rotary position embedding needs an even width")
    capacity = _shape("k_cache", k_cache, "B, C, Hkv, D")[1]
    for name, cache, wide in (("k_cache", k_cache, width), ("v_cache", v_cache, value_width)):
        _expect(name, cache, (batch, capacity, heads, wide))
        if cache.numel() and cache.stride(-1) != 1:  # it is written in place, so a contiguous copy would not do
            raise ValueError(f"{name} has strides {list(cache.stride())}: the last must be 1")
    _expect("offsets", offsets, (batch,))
    _expect("counts", counts, (batch,))
    _on_one_device(k=k, v=v, k_norm_weight=k_norm_weight, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache)
    _on_one_device(k=k, offsets=offsets, counts=counts)
    tensors = (_rows(k), _rows(v), k_norm_weight.contiguous(), _rows(cos), _rows(sin), k_cache, v_cache)
    call("store_context_kv", choose(backend, k), *tensors, offsets.contiguous(), counts.contiguous(), eps=eps)


def draft_loss(
    hidden: torch.Tensor,
    target_hidden: torch.Tensor | None,
    labels: torch.Tensor,
    ce_weights: torch.Tensor,
    tv_weights: torch.Tensor,
    head: torch.Tensor,
    *,
    feature: torch.Tensor | None = None,
    w2: torch.Tensor | None = None,
    log_total: torch.Tensor | None = None,
    target_tokens: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> DraftLoss:
    """The training loss over N rows without their logits; see :func:`dspark_fast.reference.draft_loss`.

    ``loss`` is differentiable, once, for hidden, feature and w2. Its gradients are computed together with it where grad
    mode is on and one of the three requires grad, and not at all otherwise.

    Raises:
        ValueError: for shapes or dtypes that do not fit, for none or both of target_hidden and target_tokens, and for
            a head or target_hidden that requires grad: they are frozen, and their gradient is not computed.
    """
    rows, width = _shape("hidden", hidden, "N, H")
    vocab = _shape("head", head, "V, H")[0]
    _expect("head", head, (vocab, width))
    if not vocab:
        raise ValueError("head has shape [0, H]: expected at least one token")
    for name, tensor in (("labels", labels), ("ce_weights", ce_weights), ("tv_weights", tv_weights)):
        _expect(name, tensor, (rows,))
    _expect_dtype("labels", labels, torch.int64)
    if (target_hidden is None) == (target_tokens is None):
        given = "neither" if target_hidden is None else "both"
        raise ValueError(f"exactly one of target_hidden and target_tokens is the target's distribution: {given} given")
    if (target_tokens is None) != (target_probs is None):
        raise ValueError("target_tokens and target_probs come together: one is None")
    if target_hidden is not None:
        _expect("target_hidden", target_hidden, (rows, width))
    if target_tokens is not None and target_probs is not None:
        _expect("target_probs", target_probs, tuple(_shape("target_tokens", target_tokens, "N, K")))
        _expect("target_tokens", target_tokens, (rows, target_tokens.shape[1]))
        _expect_dtype("target_tokens", target_tokens, torch.int64)
    if log_total is not None:
        _expect("log_total", log_total, (rows,))
    if (feature is None) != (w2 is None):
        raise ValueError("feature and w2 come together: one is None")
    if feature is not None and w2 is not None:
        rank = _shape("feature", feature, "N, R")[1]
        _expect("feature", feature, (rows, rank))
        _expect("w2", w2, (vocab, rank))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}: accepted are None and numbers above 0")
    for name, tensor in (("hidden", hidden), ("head", head), ("feature", feature), ("w2", w2)):
        if tensor is not None and tensor.dtype not in LOGITS_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}: accepted are {', '.join(map(str, LOGITS_DTYPES))}")
    _on_one_device(hidden=hidden, target_hidden=target_hidden, labels=labels, ce_weights=ce_weights, head=head, w2=w2)
    _on_one_device(hidden=hidden, tv_weights=tv_weights, feature=feature, log_total=log_total)
    _on_one_device(hidden=hidden, target_tokens=target_tokens, target_probs=target_probs)
    gradients = False
    if torch.is_grad_enabled():
        for name, tensor in (("head", head), ("target_hidden", target_hidden)):
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} requires grad: it is frozen here, so detach it")
        gradients = any(one is not None and one.requires_grad for one in (hidden, feature, w2))
    loss, surprise, distance, *_ = call(
        "draft_loss",
        choose(backend, hidden),
        _rows(hidden),
        _rows(target_hidden),
        labels.contiguous(),
        ce_weights.detach().float().contiguous(),
        tv_weights.detach().float().contiguous(),
        _rows(head),
        _rows(feature),
        _rows(w2),
        None if log_total is None else log_total.detach().float().contiguous(),
        _rows(target_tokens),
        None if target_probs is None else _rows(target_probs.detach().float()),
        softcap=None if softcap is None else float(softcap),
        gradients=gradients,
    )
    return DraftLoss(loss, surprise, distance)


def per_row(
    value: Scalar,
    like: torch.Tensor,
    dtype: torch.dtype,
    name: str,
    *,
    at_least: float = -math.inf,
    at_most: float = math.inf,
) -> torch.Tensor:
    """``value`` as a contiguous ``[B]`` tensor on the device of ``like``, whose first axis is B.

    Raises:
        ValueError: if it is a number out of range (a tensor's values are not looked at), or a tensor of another shape.
    """
    if not isinstance(value, torch.Tensor):
        _in_range(name, value, at_least, at_most)
        return torch.full((like.shape[0],), value, dtype=dtype, device=like.device)
    if value.numel() == 1:
        value = value.reshape(1).expand(like.shape[0])
    _expect(name, value, (like.shape[0],))
    return value.to(like.device, dtype).contiguous()


def _in_range(name: str, value: float, at_least: float, at_most: float) -> None:
    if not at_least <= value <= at_most:  # NaN is refused too
        most = f"to {at_most}" if at_most < math.inf else "and above"
        raise ValueError(f"{name} is {value}: accepted are {at_least} {most}")


def _on_one_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"{', '.join(f'{name} is on {device}' for name, device in devices.items())}: expected one device"
        )


def _cuts(logits: torch.Tensor, top_k: Scalar, top_p: Scalar, min_p: Scalar) -> dict[str, torch.Tensor | None]:
    """The cuts as ``[B]`` tensors; None for one that is given as its neutral number: it costs the kernels nothing."""

    def cut(name: str, value: Scalar, neutral: float, dtype: torch.dtype, most: float) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) and value == neutral:
            return None
        return per_row(value, logits, dtype, name, at_least=0, at_most=most)

    return {
        "top_k": cut("top_k", top_k, 0, torch.int64, math.inf),
        "top_p": cut("top_p", top_p, 1, torch.float32, 1),
        "min_p": cut("min_p", min_p, 0, torch.float32, 1),
    }


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with its last axis contiguous, as the kernels read it; a copy only where it is not."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _shape(name: str, tensor: torch.Tensor, axes: str) -> torch.Size:
    if tensor.dim() != len(axes.split(",")):
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected [{axes}]")
    return tensor.shape


def _expect_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}: expected {dtype}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {list(shape)}")
