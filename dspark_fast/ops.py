"""The door to the ops: arguments are checked once, numbers become tensors, and one of the two rooms is called.

Each function has the signature of its reference and ``backend`` besides: ``"kernel"``, ``"reference"`` or None, which
leaves the choice to :mod:`dspark_fast.backend`. Nothing here reads a tensor's values, so nothing waits for a GPU (but a
parameter handed over as a tensor on another device is copied, which does).

What the tensors hold is therefore the caller's: ids of the vocabulary, lengths that fit the caches, temperatures of 0
or more. With others a result means nothing, and on a GPU memory may be read or written that is not the op's.
"""

from __future__ import annotations

import torch

from dspark_fast.backend import choose, multiplies_float8
from dspark_fast.checks import (
    COUNTS,
    FLOAT8,
    FLOATS,
    IDS,
    LOGITS_DTYPES,
    Scalar,
    alike,
    dense,
    dense_or_none,
    logits_of,
    number,
    one_of,
    per_row,
)
from dspark_fast.reference import DraftLoss, MarkovWalk
from dspark_fast.reference.markov import HEADS, NORM_GROUP
from dspark_fast.reference.verify import MODES
from dspark_fast.registered import call

LONGEST_BLOCK = 16  # queries that the attention kernel takes: it reads K and V once for all of them
WIDEST_HEAD = 256
FLAGS = (True, False)


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
    batch, block, vocab = logits_of("base_logits", base_logits, "B", "T", "V")
    dense("anchor", anchor, COUNTS, batch)
    if (w1 is None) != (w2 is None):
        raise ValueError("w1 and w2 come together: one is None")
    one_of("head", head, HEADS)
    one_of("keep_logits", keep_logits, FLAGS)
    one_of("coupled", coupled, FLAGS)
    one_of("logits_dtype", logits_dtype, LOGITS_DTYPES)
    candidates = number("candidates", candidates)
    if w2_norms is not None:
        if w2 is None or keep_logits or candidates or vocabulary is not None:
            raise ValueError(
                "w2_norms needs w2, keep_logits=False, candidates=0 and no vocabulary: not all logits are computed"
            )
        dense("w2_norms", w2_norms, FLOATS, -(-vocab // NORM_GROUP))
    dense_or_none("hidden", hidden, FLOATS, batch, block, "H")
    dense_or_none("head_weight", head_weight, FLOATS)
    dense_or_none("head_bias", head_bias, FLOATS)
    dense_or_none("vocabulary", vocabulary, IDS, vocab)
    if w1 is not None and w2 is not None:
        rank = dense("w1", w1, FLOATS, "V" if vocabulary is not None else vocab, "R")[1]
        dense("w2", w2, FLOAT8, vocab, rank)
        if head != "vanilla":
            if hidden is None or head_weight is None:
                raise ValueError(f"head is {head!r}, which needs hidden and head_weight")
            width, gated = hidden.shape[-1], head == "gated"
            weighs = (rank, width + rank) if gated else (3 * rank, 2 * rank + width)
            dense("head_weight", head_weight, FLOATS, *weighs)
            dense_or_none("head_bias", head_bias, FLOATS, rank if gated else 3 * rank)
    weights = {"w1": w1, "w2": w2, "head_weight": head_weight, "head_bias": head_bias, "w2_norms": w2_norms}
    weights["vocabulary"] = vocabulary
    alike("device", base_logits=base_logits, **weights, hidden=hidden, anchor=anchor)
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
        temperature=per_row(temperature, base_logits, "temperature"),
        seed=per_row(seed, base_logits, "seed"),
        position=per_row(position, base_logits, "position"),
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
    one_of("mode", mode, MODES)
    batch, slots, vocab = logits_of("target_logits", target_logits, "B", "T+1", "V")
    if not slots:
        raise ValueError(f"target_logits has shape {list(target_logits.shape)}: expected T+1 of 1 or more")
    dense("draft_tokens", draft_tokens, IDS, batch, slots - 1)
    dense("draft_lengths", draft_lengths, COUNTS, batch)
    q, statistics = (), ()  # not looked at but in rejection mode
    if mode == "rejection" and slots > 1:
        if draft_logits is None:
            raise ValueError("draft_logits is None: rejection needs the logits that the drafts were drawn from")
        if (draft_row_max is None) != (draft_log_sum is None):
            raise ValueError("draft_row_max and draft_log_sum come together: one is None")
        q, statistics = (batch, slots - 1, vocab), (batch, slots - 1)
    dense_or_none("draft_logits", draft_logits, FLOATS, *q)
    dense_or_none("draft_row_max", draft_row_max, FLOATS, *statistics)
    dense_or_none("draft_log_sum", draft_log_sum, FLOATS, *statistics)
    drafts = {"draft_tokens": draft_tokens, "draft_logits": draft_logits, "draft_lengths": draft_lengths}
    sums = {"draft_row_max": draft_row_max, "draft_log_sum": draft_log_sum}
    alike("device", target_logits=target_logits, **drafts, **sums)
    return call(
        "verify",
        choose(backend, target_logits),
        _rows(target_logits),
        _rows(draft_tokens),
        _rows(draft_logits),
        draft_lengths.contiguous(),
        temperature=per_row(temperature, target_logits, "temperature"),
        seed=per_row(seed, target_logits, "seed"),
        position=per_row(position, target_logits, "position"),
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
    logits_of("logits", logits)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits has shape {list(logits.shape)}: expected [B, V] or [B, T, V]")
    temperature = per_row(temperature, logits, "temperature")
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
    batch, block, heads, width = dense("q", q, FLOATS, "B", "T", "Hq", "D")
    _, capacity, kv_heads, _ = dense("k_cache", k_cache, FLOATS, batch, "C", "Hkv", width)
    value_width = dense("v_cache", v_cache, FLOATS, batch, capacity, kv_heads, "Dv")[-1]
    dense("lengths", lengths, COUNTS, batch)
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k_cache {kv_heads}: the first must be a multiple")
    alike("dtype", q=q, k_cache=k_cache, v_cache=v_cache)
    alike("device", q=q, k_cache=k_cache, v_cache=v_cache, lengths=lengths)
    one_of("causal", causal, FLAGS)
    options = {"scale": number("scale", scale), "causal": causal}
    options["window"] = None if window is None else number("window", window)
    options["softcap"] = None if softcap is None else number("softcap", softcap)
    beyond = None
    if block > LONGEST_BLOCK:
        beyond = f"q has {block} queries: the kernel takes {LONGEST_BLOCK}"
    elif max(width, value_width) > WIDEST_HEAD:
        beyond = f"a head is {max(width, value_width)} wide: the kernel takes {WIDEST_HEAD}"
    elif q.dtype not in LOGITS_DTYPES:
        beyond = f"q, k_cache and v_cache are {q.dtype}: the kernel takes 16 or 32 bits"
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
    batch, rows, heads, width = dense("k", k, FLOATS, "B", "N", "Hkv", "D")
    value_width = dense("v", v, FLOATS, batch, rows, heads, "Dv")[-1]
    dense("k_norm_weight", k_norm_weight, FLOATS, width)
    dense("cos", cos, FLOATS, batch, rows, width)
    dense("sin", sin, FLOATS, batch, rows, width)
    if width % 2:
        raise ValueError(f"k has heads of {width}: rotary position embedding needs an even width")
    capacity = dense("k_cache", k_cache, FLOATS, batch, "C", heads, width)[1]
    dense("v_cache", v_cache, FLOATS, batch, capacity, heads, value_width)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.numel() and cache.stride(-1) != 1:  # it is written in place, so a contiguous copy would not do
            raise ValueError(f"{name} has strides {list(cache.stride())}: the last must be 1")
    dense("offsets", offsets, COUNTS, batch)
    dense("counts", counts, COUNTS, batch)
    eps = number("eps", eps)
    new = {"k": k, "v": v, "k_norm_weight": k_norm_weight, "cos": cos, "sin": sin}
    alike("device", **new, k_cache=k_cache, v_cache=v_cache, offsets=offsets, counts=counts)
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
    rows, width = dense("hidden", hidden, LOGITS_DTYPES, "N", "H")
    vocab = dense("head", head, LOGITS_DTYPES, "V", width)[0]
    if not vocab:
        raise ValueError("head has shape [0, H]: expected at least one token")
    dense("labels", labels, IDS, rows)
    dense("ce_weights", ce_weights, FLOATS, rows)
    dense("tv_weights", tv_weights, FLOATS, rows)
    if (target_hidden is None) == (target_tokens is None):
        given = "neither" if target_hidden is None else "both"
        raise ValueError(f"exactly one of target_hidden and target_tokens is the target's distribution: {given} given")
    if (target_tokens is None) != (target_probs is None):
        raise ValueError("target_tokens and target_probs come together: one is None")
    dense_or_none("target_hidden", target_hidden, LOGITS_DTYPES, rows, width)
    if target_tokens is not None:
        listed = dense("target_tokens", target_tokens, IDS, rows, "K")
        dense("target_probs", target_probs, FLOATS, *listed)
    dense_or_none("log_total", log_total, FLOATS, rows)
    if (feature is None) != (w2 is None):
        raise ValueError("feature and w2 come together: one is None")
    if feature is not None:
        rank = dense("feature", feature, LOGITS_DTYPES, rows, "R")[1]
        dense("w2", w2, LOGITS_DTYPES, vocab, rank)
    softcap = None if softcap is None else number("softcap", softcap)
    sums = {"labels": labels, "ce_weights": ce_weights, "tv_weights": tv_weights, "log_total": log_total}
    targets = {"target_hidden": target_hidden, "target_tokens": target_tokens, "target_probs": target_probs}
    alike("device", hidden=hidden, head=head, **sums, **targets, feature=feature, w2=w2)
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
        softcap=softcap,
        gradients=gradients,
    )
    return DraftLoss(loss, surprise, distance)


def _cuts(logits: torch.Tensor, top_k: Scalar, top_p: Scalar, min_p: Scalar) -> dict[str, torch.Tensor | None]:
    """The cuts as ``[B]`` tensors; None for one that is given as its neutral number: it costs the kernels nothing."""
    cuts: dict[str, torch.Tensor | None] = {}
    for name, value, neutral in (("top_k", top_k, 0), ("top_p", top_p, 1), ("min_p", min_p, 0)):
        alone = not isinstance(value, torch.Tensor) and number(name, value) == neutral
        cuts[name] = None if alone else per_row(value, logits, name)
    return cuts


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor with its last axis contiguous, as the kernels read it; a copy only where it is not."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
