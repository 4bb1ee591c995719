"""The noise inside a kernel: Philox4x32-10 words, acceptance uniforms and Exp(1) variables, the twins of `reference`.

A number depends on (seed, position, anchor, stream, token) and on nothing else, so it is the same in any tiling, batch
or launch order, and bit for bit the reference's. The generator is Triton's own ``tl.philox``; four tokens share a call.
"""

from __future__ import annotations

import triton
import triton.language as tl

DRAFT = tl.constexpr(0)  # drafted tokens; coupled mode uses it for the target too
ACCEPT = tl.constexpr(1)  # acceptance uniforms
TARGET = tl.constexpr(2)  # resampled, bonus and first tokens, plain steps

_LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)  # the largest fp32 below 1


@triton.jit
def accept_uniform(seed, position, anchor):
    """The uniform in [0, 1) that judges the drafted token at ``position``: fp32, the shape of the arguments."""
    word, _, _, _ = tl.philox(seed, (position * 0).to(tl.int32), position.to(tl.int32), anchor.to(tl.int32), ACCEPT)
    return tl.minimum(word.to(tl.float32) * 2.0**-32, _LARGEST_UNIFORM)


@triton.jit
def exponentials(seed, position, anchor, STREAM: tl.constexpr, first, ROWS: tl.constexpr, N: tl.constexpr):
    """Exp(1) noise of tokens ``first`` .. ``first + N - 1``, a multiple of 4 to start at: fp32 [ROWS, N].

    seed, position, anchor: [ROWS, 1], int64.
    """
    groups = (first // 4 + tl.arange(0, N // 4))[None, :]
    w0, w1, w2, w3 = tl.philox(seed, groups, position.to(tl.int32), anchor.to(tl.int32), STREAM)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, N // 4, 2, 2], token by token when laid flat
    return _to_exponential(tl.reshape(words, [ROWS, N]))


@triton.jit
def exponentials_at(seed, position, anchor, STREAM: tl.constexpr, tokens):
    """The same noise at chosen tokens [1, N], int32: fp32 [ROWS, N]. Four times the work for each of them."""
    w0, w1, w2, w3 = tl.philox(seed, tokens // 4, position.to(tl.int32), anchor.to(tl.int32), STREAM)
    lane = tokens % 4
    return _to_exponential(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def _to_exponential(word):
    """e = -log1p(-u) of u = (word + 1/2) 2^-32 held below 1; see the reference for why the small end is the fine one.

    There is no log1p without libdevice, which the interpreter lacks. Below 1/16 seven terms of its series are exact to
    fp32; above, 1 - u is off by 3e-8 at most, which is 5e-7 of e.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))
