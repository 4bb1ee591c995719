"""What an op accepts, one function for each kind of argument; what does not fit is named, with what would.

Python values and a tensor's dtype, shape, layout and device are looked at, never what a tensor holds: nothing waits for
a GPU, a capture is left alone, and ``torch.compile`` keeps guards of it alone. Every check raises ValueError.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any, NamedTuple

import torch

Scalar = float | int | torch.Tensor

LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what the kernels read
FLOATS = (*LOGITS_DTYPES, torch.float64)
FLOAT8 = (*FLOATS, torch.float8_e4m3fn)
IDS = (torch.int64,)
COUNTS = (torch.int64, torch.int32)
INTEGERS = (*COUNTS, torch.int16, torch.int8, torch.uint8, torch.uint64)
REALS = (*FLOATS, *INTEGERS)


class Range(NamedTuple):
    """The numbers that an argument may be: integers alone, or any real ones."""

    kind: type
    least: float
    most: float
    accepted: str
    infinite: bool = False


_LARGEST = torch.finfo(torch.float32).max
_TINY = torch.finfo(torch.float32).tiny  # less may be flushed to 0, by which softcap would divide
_INT64 = (-(2**63), 2**63 - 1)
NUMBERS = {
    "temperature": Range(float, 0, _LARGEST, f"0 and above, to {_LARGEST:.2g} or inf", infinite=True),
    "seed": Range(int, *_INT64, "integers of 64 bits, -2^63 to 2^63 - 1"),
    "position": Range(int, *_INT64, "integers of 64 bits"),
    "top_k": Range(int, 0, _INT64[1], "integers of 0 and above, to 2^63 - 1"),
    "top_p": Range(float, 0, 1, "0 to 1"),
    "min_p": Range(float, 0, 1, "0 to 1"),
    "candidates": Range(int, 0, _INT64[1], "0 (all) and integers above, to 2^63 - 1"),
    "window": Range(int, 1, _INT64[1], "None and integers of 1 and above, to 2^63 - 1"),
    "softcap": Range(float, _TINY, _LARGEST, f"None and numbers above 0, {_TINY:.2g} to {_LARGEST:.2g}"),
    "scale": Range(float, -_LARGEST, _LARGEST, "finite numbers of fp32"),
    "eps": Range(float, 0, _LARGEST, f"0 and above, to {_LARGEST:.2g}"),
}


def number(name: str, value: Any) -> Any:
    """The Python int or float that ``value`` is, which is in the range that NUMBERS has for ``name``."""
    kind, least, most, accepted, infinite = NUMBERS[name]
    fits = type(value) is kind
    if not fits:  # an integer where any number may stand, or one of numpy's
        wanted = numbers.Integral if kind is int else numbers.Real
        fits = isinstance(value, wanted) and not isinstance(value, bool)
    if not fits or not (least <= value <= most or (infinite and value == math.inf)):  # NaN is refused too
        raise ValueError(f"{name} is {reprlib.repr(value)}: accepted are {accepted}")
    return value if type(value) is kind else kind(value)


def per_row(value: Scalar, like: torch.Tensor, name: str) -> torch.Tensor:
    """A number of NUMBERS, or a tensor of one or B of them, as a contiguous ``[B]`` tensor.

    It is int64 or fp32, on the device of ``like``, whose first axis is B. A tensor's values are not looked at.
    """
    whole = NUMBERS[name].kind is int
    dtype, rows = torch.int64 if whole else torch.float32, like.shape[0]
    if not isinstance(value, torch.Tensor):
        return torch.full((rows,), number(name, value), dtype=dtype, device=like.device)
    accepted = INTEGERS if whole else REALS
    if dense(name, value, accepted).numel() == 1:
        value = value.reshape(1).expand(rows)
    else:
        dense(name, value, accepted, rows)
    return value.to(like.device, dtype).contiguous()


def one_of(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Raise for what is not among ``accepted``, which are all of one class."""
    if not isinstance(value, type(accepted[0])) or value not in accepted:
        raise ValueError(f"{name} is {reprlib.repr(value)}: accepted are {', '.join(map(str, accepted))}")


def dense(name: str, given: Any, dtypes: tuple[torch.dtype, ...], *axes: int | str) -> torch.Size:
    """The shape of a dense tensor of one of ``dtypes``; an axis given by name is as long as it likes.

    Without axes any shape will do.
    """
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} is {reprlib.repr(given)}: accepted is a dense tensor{_written(axes)}")
    if given.layout != torch.strided:
        raise ValueError(f"{name} is {given.layout}: accepted is a dense tensor{_written(axes)}")
    shape = given.shape
    if axes and not _fits(shape, axes):
        raise ValueError(f"{name} has shape {list(shape)}: expected{_written(axes)}")
    if given.dtype not in dtypes:
        accepted = f"accepted {'is' if len(dtypes) == 1 else 'are'} {', '.join(map(str, dtypes))}"
        raise ValueError(f"{name} is {given.dtype}: {accepted}")
    return shape


def dense_or_none(name: str, given: Any, dtypes: tuple[torch.dtype, ...], *axes: int | str) -> None:
    """As :func:`dense`, or nothing."""
    if given is not None:
        dense(name, given, dtypes, *axes)


def logits_of(name: str, given: Any, *axes: int | str) -> torch.Size:
    """As :func:`dense`, of floating point, with a vocabulary on the last axis."""
    shape = dense(name, given, FLOATS, *axes)
    if shape and not shape[-1]:
        raise ValueError(f"{name} has shape {list(shape)}: expected at least one token")
    return shape


def alike(what: str, **tensors: torch.Tensor | None) -> None:
    """Raise for tensors that differ in ``what``, ``"device"`` or ``"dtype"``."""
    found = [getattr(one, what) for one in tensors.values() if one is not None]
    if any([one != found[0] for one in found]):
        named = (f"{name} is {_place(what)}{getattr(one, what)}" for name, one in tensors.items() if one is not None)
        raise ValueError(f"{', '.join(named)}: expected one {what}")


def _fits(shape: torch.Size, axes: tuple[int | str, ...]) -> bool:
    if len(shape) != len(axes):
        return False
    # Names first: a size that is a symbol would leave its comparison in a compiled graph.
    return all([isinstance(wanted, str) or found == wanted for found, wanted in zip(shape, axes)])


def _place(what: str) -> str:
    return "on " if what == "device" else ""


def _written(axes: tuple[int | str, ...]) -> str:
    return f" [{', '.join(map(str, axes))}]" if axes else ""
