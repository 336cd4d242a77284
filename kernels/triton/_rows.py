"""What the kernels share: queries, the running softmax, and logits of stored rows.

Codes are multiplied as they are stored. A code of place ``s`` of the stored order is put together from its parts, whole
fields of some bytes; a row's logit is then the anchor's, a constant of its scale group, and one product of the codes
with queries that carry the scales. No row is decoded.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import triton.language as tl

from dkv.types import CompressedBlocks, code_bytes, code_parts

from ._cast import widened
from ._dots import DEPTH, columns_of, device, dot, max_of, sum_of

CODED = tl.constexpr(64)  # columns of a float32 dot with codes that are held at a time
HALF_WIDE = tl.constexpr(128)  # columns of a dot of 16 bits that are held at a time
NONE = tl.constexpr(-math.inf)  # the logit of a row that is not there
SHRINK = tl.constexpr(2.0**-16)  # of weights: so many rows of the largest numbers are summed before the division
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
def softmax_step(peak, total, logits, UNIT: tl.constexpr = 1.0):
    """Join ``logits [M, R]``, -inf where masked, to a running softmax.

    Returns the new ``peak`` and ``total [M]``, what the sums so far are multiplied by ``[M]``, and the weights
    ``[M, R]``, in units of ``UNIT`` as their total is.
    """
    new = tl.maximum(peak, max_of(logits, 1))
    base = tl.where(new == NONE, 0.0, new)
    weight = tl.exp(logits - base[:, None]) * UNIT
    keep = tl.exp(peak - base)
    return new, total * keep + sum_of(weight, 1), keep, weight


@device
def softmax_step_one(peak, total, logit, UNIT: tl.constexpr = 1.0):
    """As :func:`softmax_step` with one logit a row, ``[M]``."""
    new = tl.maximum(peak, logit)
    base = tl.where(new == NONE, 0.0, new)
    weight = tl.exp(logit - base) * UNIT
    keep = tl.exp(peak - base)
    return new, total * keep + weight, keep, weight


@device
def load_columns(start, live, stride, order, first, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Columns ``first ...`` of rows at the pointers ``start [M]``, ``[M, WIDTH]`` float32, zero beyond them.

    Column ``s`` is the channel at ``order + s``, the stored order, where that is given.
    """
    column = first + tl.arange(0, WIDTH)
    channel = column.to(tl.int64)
    if order is not None:
        channel = tl.load(order + column, mask=column < DIM, other=0).to(tl.int64)
    keep = live[:, None] & (column < DIM)[None, :]
    return widened(tl.load(start[:, None] + channel[None, :] * stride, mask=keep, other=0.0))


@device
def load_vector(start, live, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """``DIM`` numbers as float32 ``[WIDTH]``, zero beyond."""
    column = tl.arange(0, WIDTH)
    return widened(tl.load(start + column, mask=(column < DIM) & live, other=0.0))


@device
def _equal_part(row, place, keep, DIM: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr):
    """The part of ``PART`` bits of codes of ``BITS`` bits, in its place within the code."""
    BYTES: tl.constexpr = (DIM * PART + 7) // 8
    WIDER: tl.constexpr = BITS & (16 - 2 * PART)
    FIRST: tl.constexpr = (
        ((WIDER >> 3) & 1) * DIM + ((WIDER >> 2) & 1) * ((DIM + 1) // 2) + ((WIDER >> 1) & 1) * ((DIM + 3) // 4)
    )
    field = tl.load(row + (FIRST + place % BYTES)[None, :], mask=keep, other=0).to(tl.int32)
    field = (field >> ((PART * (place // BYTES)) & 7)[None, :]) & ((1 << PART) - 1)
    return field << (BITS & (PART - 1))


@device
def _mixed_part(place, byte, shift, mask, left, plane: tl.constexpr, RUN: tl.constexpr):
    """What those of ``place`` in a run of channels take from a plane; ``RUN`` is an entry of :func:`code_layout`."""
    START: tl.constexpr = RUN & 511
    COUNT: tl.constexpr = (RUN >> 9) & 511
    FIRST: tl.constexpr = (RUN >> 18) & 511
    SIZE: tl.constexpr = (RUN >> 27) & 511
    PART: tl.constexpr = (RUN >> 36) & 15
    LEFT: tl.constexpr = (RUN >> 40) & 7
    if plane == (RUN >> 43) & 3:
        inside = (place >= START) & (place < START + COUNT)
        channel = place - START
        byte = tl.where(inside, FIRST + channel % SIZE, byte)
        shift = tl.where(inside, (PART * (channel // SIZE)) & 7, shift)
        mask = tl.where(inside, (1 << PART) - 1, mask)
        left = tl.where(inside, LEFT, left)
    return byte, shift, mask, left


@device
def load_codes(
    start, rows, live, first, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr,
    VECTOR: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Codes ``[R, WIDTH]`` int32 of places ``first ...`` of ``rows [R]`` in stored order, zero beyond them."""
    place = first + tl.arange(0, WIDTH)
    row = start + rows.to(tl.int64)[:, None] * ROW_BYTES
    keep = live[:, None] & (place < DIM)[None, :]
    codes = tl.full([rows.shape[0], WIDTH], 0, tl.int32)
    if BITS <= 8:
        if BITS & 8:
            codes |= _equal_part(row, place, keep, DIM, BITS, 8)
        if BITS & 4:
            codes |= _equal_part(row, place, keep, DIM, BITS, 4)
        if BITS & 2:
            codes |= _equal_part(row, place, keep, DIM, BITS, 2)
        if BITS & 1:
            codes |= _equal_part(row, place, keep, DIM, BITS, 1)
    else:
        for plane in tl.static_range(PLANES):
            byte = place % VECTOR
            shift = tl.full([WIDTH], 0, tl.int32)
            mask = tl.full([WIDTH], 0, tl.int32)
            left = tl.full([WIDTH], 0, tl.int32)
            for run in tl.static_range((BITS >> 4) & 63):
                byte, shift, mask, left = _mixed_part(place, byte, shift, mask, left, plane, BITS >> (48 * run + 16))
            byte = tl.max_contiguous(tl.multiple_of(byte, VECTOR), VECTOR)
            field = tl.load(row + byte[None, :], mask=keep, other=0).to(tl.int32)
            codes |= ((field << 8) >> (8 + shift - left)[None, :]) & (mask << left)[None, :]
    return codes


@device
def plain_logits(
    q, start, alive, stride, scale, keys, live, k_stride, DIM: tl.constexpr, WIDTH: tl.constexpr, DOT: tl.constexpr
):
    """Logits ``[M, R]`` of plain rows at the pointers ``keys [R]``.

    ``q [M, WIDTH]`` are the queries at the pointers ``start [M]`` times ``scale``. Where they are too wide for
    registers, some columns are loaded again at a time.
    """
    PIECE: tl.constexpr = DEPTH if tl.float32 == DOT else HALF_WIDE
    if WIDTH <= PIECE:
        return dot(q, tl.trans(load_columns(keys, live, k_stride, None, 0, DIM, WIDTH)), DOT)
    else:
        logits = tl.full([start.shape[0], keys.shape[0]], 0, tl.float32)
        for first in range(0, DIM, PIECE):
            some = load_columns(start, alive, stride, None, first, DIM, PIECE) * scale
            logits += dot(some, tl.trans(load_columns(keys, live, k_stride, None, first, DIM, PIECE)), DOT)
        return logits


@device
def coded_logits(
    q, start, alive, stride, order, scale, codes_start, rows, live, k_scale, k_min, unit,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, VECTOR: tl.constexpr,
    ROW_BYTES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Logits ``[M, R]``, less the anchor's, of ``rows [R]`` of one scale group.

    ``q [M, WIDTH]`` is in stored order; ``k_scale`` and ``k_min`` point to the group's float16 numbers. Else as
    :func:`plain_logits`.
    """
    PIECE: tl.constexpr = CODED if tl.float32 == DOT else HALF_WIDE
    if WIDTH <= PIECE:
        return _coded_part(
            q, codes_start, rows, live, k_scale, k_min, unit, 0, DIM, WIDTH, BITS, PLANES, VECTOR, ROW_BYTES, DOT
        )
    else:
        logits = tl.full([start.shape[0], rows.shape[0]], 0, tl.float32)
        for first in range(0, DIM, PIECE):
            some = load_columns(start, alive, stride, order, first, DIM, PIECE) * scale
            logits += _coded_part(
                some, codes_start, rows, live, k_scale, k_min, unit, first, DIM, PIECE, BITS, PLANES, VECTOR,
                ROW_BYTES, DOT,
            )  # fmt: skip
        return logits


@device
def _coded_part(
    q, codes_start, rows, live, k_scale, k_min, unit, first, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, PLANES: tl.constexpr, VECTOR: tl.constexpr, ROW_BYTES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What columns ``first ...`` add: the product with codes of queries that carry the scales, and a constant."""
    column = first + tl.arange(0, WIDTH)
    bias = tl.load(k_min + column, mask=column < DIM, other=0.0).to(tl.float32)
    logits = tl.broadcast_to(sum_of(q * bias[None, :], 1)[:, None], [q.shape[0], rows.shape[0]])
    if PLANES:
        step = tl.load(k_scale + column, mask=column < DIM, other=0.0).to(tl.float32)
        codes = load_codes(codes_start, rows, live, first, DIM, WIDTH, BITS, PLANES, VECTOR, ROW_BYTES)
        logits += dot(q * step[None, :], tl.trans(codes), DOT)
    return logits * unit


@device
def rank_queries(
    q, start, alive, stride, scale, basis, basis_scale, unit, DIM: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Queries in the rank space of a block, ``[M, RANKS]``; ``basis`` points to ``[RANK, DIM]``.

    Else as :func:`plain_logits`.
    """
    PIECE: tl.constexpr = DEPTH if tl.float32 == DOT else HALF_WIDE
    rank = tl.arange(0, RANKS)
    if WIDTH <= PIECE:
        result = dot(q, tl.trans(_basis_columns(basis, 0, DIM, WIDTH, RANK, RANKS)), DOT)
    else:
        result = tl.full([start.shape[0], RANKS], 0, tl.float32)
        for first in range(0, DIM, PIECE):
            some = load_columns(start, alive, stride, None, first, DIM, PIECE) * scale
            result += dot(some, tl.trans(_basis_columns(basis, first, DIM, PIECE, RANK, RANKS)), DOT)
    if basis_scale is not None:
        result *= tl.load(basis_scale + rank, mask=rank < RANK, other=0.0)[None, :]
    return result * unit


@device
def _basis_columns(
    basis, first, DIM: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr
):
    """Columns ``first ...`` of a stored basis, ``[RANKS, WIDTH]`` in its own dtype."""
    rank, column = tl.arange(0, RANKS), first + tl.arange(0, WIDTH)
    inside = (rank < RANK)[:, None] & (column < DIM)[None, :]
    return tl.load(basis + rank[:, None] * DIM + column[None, :], mask=inside, other=0)


@device
def _factors(u, rows, live, first, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Ranks ``first ...`` of ``rows [R]`` of a block's ``u``, ``[R, RANKS]`` in their own dtype."""
    rank = first + tl.arange(0, RANKS)
    inside = live[:, None] & (rank < RANK)[None, :]
    return tl.load(u + rows[:, None] * RANK + rank[None, :], mask=inside, other=0)


@device
def lowrank_logits(
    ranked, anchor, u, u_scale, rows, live, RANK: tl.constexpr, RANKS: tl.constexpr, DOT: tl.constexpr
):
    """Logits ``[M, R]`` of low-rank ``rows [R]`` of a block, their factors ``[R, RANKS]`` and steps ``[R]``.

    ``ranked [M, RANKS]`` are the queries in its rank space, ``anchor [M]`` the anchor's logits.
    """
    factors = _factors(u, rows, live, 0, RANK, RANKS)
    if tl.float32 == DOT and RANKS > DEPTH:
        products = tl.full([ranked.shape[0], rows.shape[0]], 0, tl.float32)
        for first in range(0, RANK, DEPTH):
            some = columns_of(ranked, first, DEPTH)
            products += dot(some, tl.trans(_factors(u, rows, live, first, RANK, DEPTH)), DOT)
    else:
        products = dot(ranked, tl.trans(factors), DOT)
    step = tl.full([rows.shape[0]], 1, tl.float32)
    if u_scale is not None:
        step = tl.load(u_scale + rows, mask=live, other=0.0).to(tl.float32)
        products *= step[None, :]
    return anchor[:, None] + products, factors, step


@device
def is_kept(rows, positions, COUNT: tl.constexpr, COUNTS: tl.constexpr):
    """Which of ``rows [R]`` are among the ``COUNT`` residual positions of a block."""
    place = tl.arange(0, COUNTS)
    kept = tl.load(positions + place, mask=place < COUNT, other=0).to(tl.int32)
    same = (rows[:, None] == kept[None, :]) & (place < COUNT)[None, :]
    return sum_of(same.to(tl.int32), 1) > 0
