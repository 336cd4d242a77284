"""Products in float32, and rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from ._launch import INTERPRETED

ON_CPU = tl.constexpr(INTERPRETED)
DEPTH = tl.constexpr(64 if INTERPRETED else 16)  # of a dot of float32 outside of matrix units: threads hold all of it


def _light(made: Any) -> Any:
    """A jitted function that kernels call; the interpreter would patch the whole language again at each call."""
    return made.rewrite() if hasattr(made, "rewrite") else made


def device(fn: Callable[..., Any]) -> Any:
    """``triton.jit`` for functions that only kernels call."""
    return _light(triton.jit(fn))


sum_of, max_of, min_of = _light(tl.sum), _light(tl.max), _light(tl.min)


@device
def _halves(x):
    """Columns ``[M, K / 2]`` of ``x [M, K]``, twice."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), [0, 2, 1]))


@device
def _wide_dot(a, b):
    """``a [M, K]`` times ``b [K, N]`` in float32, some ``K`` at a time."""
    if a.shape[1] <= DEPTH:
        return tl.dot(a, b, input_precision="ieee")
    else:
        left, right = _halves(a), _halves(tl.trans(b))
        return _wide_dot(left[0], tl.trans(right[0])) + _wide_dot(left[1], tl.trans(right[1]))


@device
def _nearest(x):
    """Float32 ``x`` in bfloat16, to nearest even."""
    if ON_CPU:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@device
def _code_dot(a, b):
    """``a [M, K]`` float32, as three numbers of 8 bits, times codes ``b [K, N]``."""
    high = _nearest(a)
    rest = a - high.to(tl.float32)
    middle = _nearest(rest)
    low = _nearest(rest - middle.to(tl.float32))
    if ON_CPU:  # the interpreter does not multiply bfloat16
        b = b.to(tl.float32)
        return tl.dot(high.to(tl.float32), b, tl.dot(middle.to(tl.float32), b, tl.dot(low.to(tl.float32), b)))
    else:
        b = b.to(tl.bfloat16)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))


@device
def dot(a, b, DOT: tl.constexpr):
    """``a [M, K]`` float32 times ``b [K, N]``, which is exact in ``DOT``; float32.

    In 16 bits ``a`` goes in as two numbers, so that its rounding stays near float32's; where ``DOT`` is float32 and
    ``b`` are codes, which bfloat16 holds, as three, which are all of it.
    """
    if tl.float32 == DOT:
        if not b.dtype.is_int():
            return _wide_dot(a, b.to(tl.float32))
        return _code_dot(a, b)
    else:
        b = b.to(DOT)
        if tl.float16 == DOT:
            top = max_of(tl.abs(a), 1).to(tl.int32, bitcast=True) >> 23  # exponents, biased by 127
            top = tl.minimum(tl.maximum(top, 1), 253)
            a = a * ((254 - top) << 23).to(tl.float32, bitcast=True)[:, None]
            high = a.to(DOT)
            both = tl.dot(high, b) + tl.dot((a - high.to(tl.float32)).to(DOT), b)
            return both * (top << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            high = a.to(DOT)
            return tl.dot((a - high.to(tl.float32)).to(DOT), b, tl.dot(high, b))


@device
def rounded(x, DTYPE: tl.constexpr):
    """Float32 ``x`` in ``DTYPE``, to nearest even; a finite number beyond its range becomes its largest number."""
    if tl.bfloat16 == DTYPE or tl.float16 == DTYPE:
        MOST: tl.constexpr = 65504.0 if tl.float16 == DTYPE else 3.3895313892515355e38
        near = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
        x = tl.where(tl.abs(x) == float("inf"), x, near)
    return _nearest(x) if tl.bfloat16 == DTYPE else x.to(DTYPE)


@device
def columns_of(a, first, COUNT: tl.constexpr):
    """Columns ``first ...`` of ``a [M, K]``, ``[M, COUNT]``."""
    column = first + tl.arange(0, COUNT)
    return tl.gather(a, tl.broadcast_to(column[None, :], [a.shape[0], COUNT]), 1)


@device
def dot_rows(a, start, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr):
    """``a [M, K]`` times a stored ``[ROWS, DIM]``, ``[M, WIDTH]``."""
    column = tl.arange(0, WIDTH)
    if tl.float32 == DOT and a.shape[1] > DEPTH:
        result = tl.full([a.shape[0], WIDTH], 0, tl.float32)
        for first in range(0, ROWS, DEPTH):
            row = first + tl.arange(0, DEPTH)
            inside = (row < ROWS)[:, None] & (column < DIM)[None, :]
            some = columns_of(a, first, DEPTH)
            result += dot(some, tl.load(start + row[:, None] * DIM + column[None, :], mask=inside, other=0), DOT)
        return result
    else:
        row = tl.arange(0, a.shape[1])
        inside = (row < ROWS)[:, None] & (column < DIM)[None, :]
        return dot(a, tl.load(start + row[:, None] * DIM + column[None, :], mask=inside, other=0), DOT)
