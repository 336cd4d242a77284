"""What the kernels share: products in float32, rounding, the running softmax, and logits of stored rows.

Codes are multiplied as they are stored. A code of place ``s`` of the stored order is put together from its parts, whole
fields of some bytes; a row's logit is then the anchor's, a constant of its scale group, and one product of the codes
with queries that carry the scales. No row is decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dkv.types import CompressedBlocks, code_bytes, code_parts

from ._launch import INTERPRETED

ON_CPU = tl.constexpr(INTERPRETED)
NONE = tl.constexpr(-math.inf)  # the logit of a row that is not there
DEPTH = tl.constexpr(16)  # of a dot of float32 outside of matrix units, whose threads hold whole rows and columns
LOADED = tl.constexpr(32)  # rows or columns of a basis that are held at a time in float32
WIDEST_LOAD = 16  # bytes that one thread takes at a time


class Codes(NamedTuple):
    """Where the codes of a row lie.

    Attributes
    ----------
    bits : int
        Width of all codes where they are equally wide. Else, above 8, the parts of all runs of channels, 48 bits each.
    planes : int
        Most parts of a code; 0 where nothing is coded.
    vector : int
        Places that lie in as many consecutive bytes.
    row_bytes : int
        Bytes of a row.
    """

    bits: int
    planes: int
    vector: int
    row_bytes: int


@functools.lru_cache(maxsize=256)
def code_layout(segments: tuple[tuple[int, int], ...]) -> Codes:
    """Layout of rows of codes of ``(channels, bits)``; see the law, "Packing"."""
    planes = max((len(code_parts(bits)) for _, bits in segments), default=0)
    row_bytes = code_bytes(segments)
    steps = [count for count, _ in segments]
    steps += [-(-count * part // 8) for count, bits in segments for part in code_parts(bits)]
    vector = math.gcd(WIDEST_LOAD, *steps)
    runs, start, byte = [], 0, 0
    for count, bits in segments:
        left = bits
        for plane, part in enumerate(code_parts(bits)):
            left -= part
            size = -(-count * part // 8)
            runs.append(start | count << 9 | byte << 18 | size << 27 | part << 36 | left << 40 | plane << 43)
            byte += size
        start += count
    layout = sum(run << (48 * index + 16) for index, run in enumerate(runs)) | len(runs) << 4 | 15
    return Codes(segments[0][1] if len(segments) == 1 else layout, planes, vector, row_bytes)


def key_codes(blocks: CompressedBlocks) -> Codes:
    """Layout of the coded keys."""
    return code_layout(blocks.format.key_segments(blocks.head_dim))


def value_codes(blocks: CompressedBlocks) -> Codes:
    """Layout of the coded values."""
    return code_layout(blocks.format.value_segments(blocks.head_dim_v))


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
    if ON_CPU or a.shape[1] <= DEPTH:
        return tl.dot(a, b, input_precision="ieee")
    else:
        left, right = _halves(a), _halves(tl.trans(b))
        return _wide_dot(left[0], tl.trans(right[0])) + _wide_dot(left[1], tl.trans(right[1]))


@device
def _code_dot(a, b):
    """``a [M, K]`` float32, as three numbers of 8 bits, times ``b [K, N]`` bfloat16."""
    high = a.to(tl.bfloat16)
    rest = a - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))


@device
def dot(a, b, DOT: tl.constexpr):
    """``a [M, K]`` float32 times ``b [K, N]``, which is exact in ``DOT``; float32.

    In 16 bits ``a`` goes in as two numbers, so that its rounding stays near float32's; where ``DOT`` is float32 and
    ``b`` are codes, which bfloat16 holds, as three, which are all of it.
    """
    if tl.float32 == DOT:
        if ON_CPU or not b.dtype.is_int():
            return _wide_dot(a, b.to(tl.float32))
        return _code_dot(a, b.to(tl.bfloat16))
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
    """Float32 ``x`` in ``DTYPE``, to nearest even; what lies beyond its range becomes its largest number."""
    if tl.bfloat16 == DTYPE or tl.float16 == DTYPE:
        MOST: tl.constexpr = 65504.0 if tl.float16 == DTYPE else 3.3895313892515355e38
        x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if ON_CPU and tl.bfloat16 == DTYPE:  # the interpreter cuts bits off
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@device
def dot_columns(
    a, start, FIRST: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr, DIM: tl.constexpr, DOT: tl.constexpr
):
    """``a [M, K]`` times columns ``FIRST ...`` of a stored ``[ROWS, DIM]`` that is turned, ``[M, HEIGHT]``."""
    if tl.float32 == DOT and a.shape[1] > LOADED and not ON_CPU:
        HALF: tl.constexpr = a.shape[1] // 2
        one, two = _halves(a)
        result = dot_columns(one, start, FIRST, ROWS, HEIGHT, DIM, DOT)
        return result + dot_columns(two, start, FIRST + HALF, ROWS, HEIGHT, DIM, DOT)
    else:
        row, column = tl.arange(0, HEIGHT), FIRST + tl.arange(0, a.shape[1])
        inside = (row < ROWS)[:, None] & (column < DIM)[None, :]
        b = tl.load(start + row[:, None] * DIM + column[None, :], mask=inside, other=0)
        return dot(a, tl.trans(b), DOT)


@device
def dot_rows(
    a, start, FIRST: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr
):
    """``a [M, K]`` times rows ``FIRST ...`` of a stored ``[ROWS, DIM]``, ``[M, WIDTH]``."""
    if tl.float32 == DOT and a.shape[1] > LOADED and not ON_CPU:
        HALF: tl.constexpr = a.shape[1] // 2
        one, two = _halves(a)
        result = dot_rows(one, start, FIRST, ROWS, DIM, WIDTH, DOT)
        return result + dot_rows(two, start, FIRST + HALF, ROWS, DIM, WIDTH, DOT)
    else:
        row, column = FIRST + tl.arange(0, a.shape[1]), tl.arange(0, WIDTH)
        inside = (row < ROWS)[:, None] & (column < DIM)[None, :]
        return dot(a, tl.load(start + row[:, None] * DIM + column[None, :], mask=inside, other=0), DOT)


@device
def capped(logits, softcap, SOFTCAP: tl.constexpr):
    """``softcap * tanh(logits / softcap)`` where ``SOFTCAP``."""
    if SOFTCAP:
        x = logits / softcap
        square = x * x
        small = 1 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488)))
        decay = tl.exp(-2 * tl.abs(x))
        large = (1 - decay) / (1 + decay)
        logits = softcap * tl.where(square < 0.0625, x * small, tl.where(x < 0, -large, large))
    return logits


@device
def softmax_step(peak, total, logits):
    """Join ``logits [M, R]``, -inf where masked, to a running softmax.

    Returns the new ``peak`` and ``total [M]``, what the sums so far are multiplied by ``[M]``, and the weights
    ``[M, R]``.
    """
    new = tl.maximum(peak, max_of(logits, 1))
    base = tl.where(new == NONE, 0.0, new)
    weight = tl.exp(logits - base[:, None])
    keep = tl.exp(peak - base)
    return new, total * keep + sum_of(weight, 1), keep, weight


@device
def softmax_step_one(peak, total, logit):
    """As :func:`softmax_step` with one logit a row, ``[M]``."""
    new = tl.maximum(peak, logit)
    base = tl.where(new == NONE, 0.0, new)
    weight = tl.exp(logit - base)
    keep = tl.exp(peak - base)
    return new, total * keep + weight, keep, weight


@device
def load_columns(start, live, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows at the pointers ``start [M]``, ``[M, WIDTH]`` in float32, zero beyond ``live`` and ``DIM``."""
    column = tl.arange(0, WIDTH)
    keep = live[:, None] & (column < DIM)[None, :]
    return tl.load(start[:, None] + column[None, :] * stride, mask=keep, other=0.0).to(tl.float32)


@device
def load_ordered(start, live, stride, order, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """As :func:`load_columns`, column ``s`` from the channel at ``order + s``, the stored order."""
    column = tl.arange(0, WIDTH)
    channel = tl.load(order + column, mask=column < DIM, other=0).to(tl.int64)
    keep = live[:, None] & (column < DIM)[None, :]
    return tl.load(start[:, None] + channel[None, :] * stride, mask=keep, other=0.0).to(tl.float32)


@device
def load_vector(start, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """``DIM`` numbers as float32 ``[WIDTH]``, zero beyond."""
    column = tl.arange(0, WIDTH)
    return tl.load(start + column, mask=(column < DIM) & live, other=0.0).to(tl.float32)


@device
def _equal_part(row, keep, DIM: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """The part of ``PART`` bits of codes of ``BITS`` bits, in its place within the code."""
    BYTES: tl.constexpr = (DIM * PART + 7) // 8
    WIDER: tl.constexpr = BITS & (16 - 2 * PART)
    FIRST: tl.constexpr = (
        ((WIDER >> 3) & 1) * DIM + ((WIDER >> 2) & 1) * ((DIM + 1) // 2) + ((WIDER >> 1) & 1) * ((DIM + 3) // 4)
    )
    place = tl.arange(0, WIDTH)
    field = tl.load(row + (FIRST + place % BYTES)[None, :], mask=keep, other=0).to(tl.int32)
    field = (field >> ((PART * (place // BYTES)) & 7)[None, :]) & ((1 << PART) - 1)
    return field << (BITS & (PART - 1))


@device
def _mixed_part(byte, shift, mask, left, plane: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr):
    """What the places of a run of channels take from a plane; ``RUN`` is an entry of :func:`code_layout`."""
    START: tl.constexpr = RUN & 511
    COUNT: tl.constexpr = (RUN >> 9) & 511
    FIRST: tl.constexpr = (RUN >> 18) & 511
    SIZE: tl.constexpr = (RUN >> 27) & 511
    PART: tl.constexpr = (RUN >> 36) & 15
    LEFT: tl.constexpr = (RUN >> 40) & 7
    if plane == (RUN >> 43) & 3:
        place = tl.arange(0, WIDTH)
        inside = (place >= START) & (place < START + COUNT)
        channel = place - START
        byte = tl.where(inside, FIRST + channel % SIZE, byte)
        shift = tl.where(inside, (PART * (channel // SIZE)) & 7, shift)
        mask = tl.where(inside, (1 << PART) - 1, mask)
        left = tl.where(inside, LEFT, left)
    return byte, shift, mask, left


@device
def load_codes(
    start,
    rows,
    live,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    VECTOR: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Codes ``[R, WIDTH]`` int32 of ``rows [R]`` from ``start``, in stored order; zero beyond ``live`` and ``DIM``."""
    place = tl.arange(0, WIDTH)
    row = start + rows.to(tl.int64)[:, None] * ROW_BYTES
    keep = live[:, None] & (place < DIM)[None, :]
    codes = tl.full([rows.shape[0], WIDTH], 0, tl.int32)
    if BITS <= 8:
        if BITS & 8:
            codes |= _equal_part(row, keep, DIM, BITS, 8, WIDTH)
        if BITS & 4:
            codes |= _equal_part(row, keep, DIM, BITS, 4, WIDTH)
        if BITS & 2:
            codes |= _equal_part(row, keep, DIM, BITS, 2, WIDTH)
        if BITS & 1:
            codes |= _equal_part(row, keep, DIM, BITS, 1, WIDTH)
    else:
        for plane in tl.static_range(PLANES):
            byte = place % VECTOR
            shift = tl.full([WIDTH], 0, tl.int32)
            mask = tl.full([WIDTH], 0, tl.int32)
            left = tl.full([WIDTH], 0, tl.int32)
            for run in tl.static_range((BITS >> 4) & 63):
                byte, shift, mask, left = _mixed_part(byte, shift, mask, left, plane, BITS >> (48 * run + 16), WIDTH)
            byte = tl.max_contiguous(tl.multiple_of(byte, VECTOR), VECTOR)
            field = tl.load(row + byte[None, :], mask=keep, other=0).to(tl.int32)
            codes |= ((field << 8) >> (8 + shift - left)[None, :]) & (mask << left)[None, :]
    return codes


@device
def code_queries(q, scale, low, unit, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Queries ``[M, WIDTH]`` that meet the codes of one scale group, and the constant ``[M]`` of its rows' logits.

    ``q [M, WIDTH]`` is in stored order and carries the logit scale; ``scale`` and ``low`` point to the group's
    float16 numbers. The logit of a row is the anchor's, the constant and the product of the queries with its codes.
    """
    column = tl.arange(0, WIDTH)
    step = tl.load(scale + column, mask=column < DIM, other=0.0).to(tl.float32) * unit
    bias = tl.load(low + column, mask=column < DIM, other=0.0).to(tl.float32) * unit
    return q * step[None, :], sum_of(q * bias[None, :], 1)


@device
def rank_queries(
    q,
    basis,
    basis_scale,
    unit,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SCALED: tl.constexpr,
    DOT: tl.constexpr,
):
    """``q [M, WIDTH]`` in the rank space of a block, ``[M, RANKS]``; ``basis`` points to ``[RANK, DIM]``."""
    rank = tl.arange(0, RANKS)
    result = dot_columns(q, basis, 0, RANK, RANKS, DIM, DOT) * unit
    if SCALED:
        result *= tl.load(basis_scale + rank, mask=rank < RANK, other=0.0)[None, :]
    return result


@device
def load_u(u, rows, live, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Stored rows of ``u``, ``[R, RANKS]`` in their own dtype."""
    rank = tl.arange(0, RANKS)
    inside = live[:, None] & (rank < RANK)[None, :]
    return tl.load(u + rows[:, None] * RANK + rank[None, :], mask=inside, other=0)


@device
def is_kept(rows, positions, COUNT: tl.constexpr, COUNTS: tl.constexpr):
    """Which of ``rows [R]`` are among the ``COUNT`` residual positions of a block."""
    place = tl.arange(0, COUNTS)
    kept = tl.load(positions + place, mask=place < COUNT, other=0).to(tl.int32)
    same = (rows[:, None] == kept[None, :]) & (place < COUNT)[None, :]
    return sum_of(same.to(tl.int32), 1) > 0
