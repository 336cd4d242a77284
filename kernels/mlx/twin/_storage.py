"""Storage codes shared by the ops: units, coded rows, int8 factors, and the gather of selected blocks.

Coding is done in float64, which MLX has on the CPU stream alone: callers of what takes float64 choose that stream.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dkv.types import CLIPS, HALF_TOP, RESIDUAL_GROUP, CompressedBlocks, code_parts

Array = Any

Segments = tuple[tuple[int, int], ...]  # (channels, bits) of each run of equally wide channels


def _exponent(x: Array) -> Array:
    """Floor of the binary logarithm of ``|x|``, float64, as int64; far below any other where ``x`` is zero."""
    return ((x.view(mx.uint64) >> 52) & 0x7FF).astype(mx.int64) - 1023


def two_to(exponent: Array) -> Array:
    """``2**exponent`` in float64, built from its bits."""
    return ((exponent + 1023) << 52).view(mx.float64)


def power_of_two_above(x: Array, shift: int = 0) -> Array:
    """Smallest power of two at or above float64 ``x``, divided by ``2**shift``; 1 where ``x`` is zero. Float32."""
    fraction = x.view(mx.uint64) & mx.array(2**52 - 1, dtype=mx.uint64)
    exponent = _exponent(x) + (fraction != 0) - shift
    return mx.where(x > 0, two_to(mx.clip(exponent, -126, 127)), 1.0).astype(mx.float32)


def quantise_signed(x: Array, scale: Array) -> Array:
    """Int8 codes of float64 ``x / scale``, zero where the scale is zero."""
    scale = scale.astype(mx.float64)
    ratio = mx.where(scale > 0, x / mx.where(scale > 0, scale, 1.0), 0.0)
    return mx.clip(mx.round(ratio), -127, 127).astype(mx.int8)


def rounded_half(x: Array) -> Array:
    """Float64 ``x`` rounded once to float16 numbers, as float64."""
    quantum = two_to(mx.maximum(_exponent(x) - 10, -24))
    return mx.round(x / quantum) * quantum


def quantise_rows(
    x: Array, segments: Segments, importance: Array | None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """Codes of rows ``x [n, H, R, D]``, float64; see the law, "Stored residual rows".

    Parameters
    ----------
    segments : runs of equally wide channels, in stored order.
    importance : array [H, D], float64, optional
        Factor of each channel's squared spread; the stored order is the channels' own where None.

    Returns
    -------
    packed codes uint8 ``[n, H, R, bytes]``, scale and min float16 ``[n, H, Q, D]``, unit float32 ``[n, H]`` and the
    stored order ``[n, H, D]`` or None.
    """
    count, heads, kept, dim = x.shape
    order = None
    if importance is not None:
        lost = mx.zeros((count, heads, dim), dtype=mx.float64)
        for rows in row_groups(x):
            lost = lost + mx.square(rows.max(2) - rows.min(2))
        order = mx.argsort(-importance * lost, axis=2)
        x = mx.take_along_axis(x, order[:, :, None], axis=3)
    if kept == 0 or count == 0:
        none = mx.zeros((count, heads, group_count(kept), dim), dtype=mx.float16)
        packed = pack(mx.zeros(x.shape, dtype=mx.uint8), segments)
        return packed, none, none, mx.ones((count, heads)), order
    groups = row_groups(x)
    low = mx.stack([rows.min(2) for rows in groups], axis=2)  # [n, H, Q, D]
    high = mx.stack([rows.max(2) for rows in groups], axis=2)
    levels = mx.array([max(2**bits - 1, 1) for size, bits in segments for _ in range(size)])
    reach = mx.maximum(mx.maximum(mx.abs(low), mx.abs(high)), (high - low) / levels)
    unit = power_of_two_above(reach.max((2, 3)), HALF_TOP)
    wide_unit = unit.astype(mx.float64)[:, :, None, None]
    low, high = low / wide_unit, high / wide_unit
    found: tuple[list[Array], list[Array], list[Array]] = [], [], []  # codes, scales and minima
    for index, rows in enumerate(row_groups(x / wide_unit)):
        coded, start = [], 0
        for size, bits in segments:
            run = slice(start, start + size)
            start += size
            coded.append(_clipped_codes(rows[..., run], low[:, :, index, run], high[:, :, index, run], bits))
        for stored, parts in zip(found, zip(*coded), strict=True):
            stored.append(mx.concatenate(list(parts), axis=-1))
    packed = pack(mx.concatenate(found[0], axis=2), segments)
    scale16, low16 = (mx.stack(part, axis=2).astype(mx.float16) for part in found[1:])
    return packed, scale16, low16, unit, order


def row_groups(x: Array) -> list[Array]:
    """Rows ``[n, H, R, D]`` in groups that share their scales."""
    return [x[:, :, start : start + RESIDUAL_GROUP] for start in range(0, x.shape[2], RESIDUAL_GROUP)]


def _clipped_codes(x: Array, low: Array, high: Array, bits: int) -> tuple[Array, Array, Array]:
    """Codes, scale and minimum of a group ``x [n, H, rows, C]`` by the clip factor of the least squared error."""
    if bits == 0:
        mean = x.sum(2) / x.shape[2]  # mx.mean multiplies by a rounded 1 / n
        return mx.zeros(x.shape, dtype=mx.uint8), mx.zeros_like(low), rounded_half(mean)
    levels = 2**bits - 1
    middle, spread = (low + high) / 2, high - low
    best: tuple[Array, Array, Array] | None = None
    for factor in CLIPS[bits]:
        low16 = rounded_half(middle - factor * spread / 2)
        scale16 = rounded_half(factor * spread / levels)
        if len(CLIPS[bits]) == 1:
            return _codes(x, scale16, low16, levels).astype(mx.uint8), scale16, low16
        decoded = low16[:, :, None] + scale16[:, :, None] * _codes(x, scale16, low16, levels)
        error = mx.square(decoded - x).sum(2)
        if best is not None:
            better = error < best[0]
            error, scale16, low16 = (
                mx.where(better, new, old) for new, old in zip((error, scale16, low16), best, strict=True)
            )
        best = error, scale16, low16
    assert best is not None
    _, scale16, low16 = best
    return _codes(x, scale16, low16, levels).astype(mx.uint8), scale16, low16


def _codes(x: Array, scale: Array, low: Array, levels: int) -> Array:
    """Codes as float64; 0 where the scale is 0."""
    divisor = mx.where(scale > 0, scale, mx.inf)[:, :, None]
    return mx.clip(mx.round((x - low[:, :, None]) / divisor), 0, levels)


def pack(codes: Array, segments: Segments) -> Array:
    """Codes ``[..., D]`` as bytes ``[..., bytes]``; see the law, "Packing"."""
    fields, start = [codes[..., :0]], 0
    for size, bits in segments:
        run, left = codes[..., start : start + size], bits
        start += size
        for width in code_parts(bits):
            left -= width
            lanes, length = 8 // width, -(-size * width // 8)
            field = (run >> left) & (2**width - 1)
            field = mx.pad(field, [(0, 0)] * (codes.ndim - 1) + [(0, lanes * length - size)])
            packed = field[..., :length]
            for lane in range(1, lanes):
                packed = packed | (field[..., lane * length : (lane + 1) * length] << (width * lane))
            fields.append(packed)
    return mx.concatenate(fields, axis=-1)


def unpack(packed: Array, segments: Segments) -> Array:
    """The inverse of :func:`pack`."""
    runs, start = [packed[..., :0]], 0
    for size, bits in segments:
        run = mx.zeros((*packed.shape[:-1], size), dtype=mx.uint8)
        for width in code_parts(bits):
            lanes, length = 8 // width, -(-size * width // 8)
            field = packed[..., start : start + length]
            start += length
            lane = [(field >> (width * index)) & (2**width - 1) for index in range(lanes)]
            run = (run << width) | mx.concatenate(lane, axis=-1)[..., :size]
        runs.append(run)
    return mx.concatenate(runs, axis=-1)


def group_count(num_residuals: int) -> int:
    return -(-num_residuals // RESIDUAL_GROUP)


def by_row(part: Array, num_residuals: int) -> Array:
    """What each group of rows has ``[..., Q, C]``, repeated for its rows ``[..., R, C]``."""
    return mx.repeat(part, RESIDUAL_GROUP, axis=-2)[..., :num_residuals, :]


class Selected:
    """The parts of the selected blocks, laid out ``[B, H, W, ...]``; parts of unused slots read as zero.

    ``block_indices`` of None takes every block.
    """

    def __init__(self, blocks: CompressedBlocks, block_indices: Array | None) -> None:
        self.blocks = blocks
        batch, count, heads = blocks.anchor_k.shape[:3]
        if block_indices is None:
            slots = mx.arange(count)
            valid = mx.ones((batch, 1, count), dtype=mx.bool_)
            if blocks.block_counts is not None:
                valid = slots < blocks.block_counts.reshape(-1, 1, 1)
            self.index = None
            self.valid = mx.broadcast_to(valid, (batch, heads, count))
        else:
            self.index = mx.maximum(block_indices, 0)
            self.valid = block_indices >= 0
            row = mx.arange(batch).reshape(-1, 1, 1) * count + self.index
            head = mx.arange(heads).reshape(1, -1, 1)
            self._shared_place = row  # in a part's leading axes, flattened
            self._head_place = row * heads + head

    def per_head(self, name: str, dtype: Any = None) -> Array:
        """A part ``[B, N, H, ...]`` as ``[B, H, W, ...]``."""
        part = getattr(self.blocks, name)
        if self.index is None:
            part = part.swapaxes(1, 2)
        else:
            part = mx.take(part.flatten(0, 2), self._head_place, axis=0)
        return self._masked(part, dtype)

    def shared(self, name: str, dtype: Any = None) -> Array:
        """A part ``[B, N, ...]`` that all heads share, as ``[B, H or 1, W, ...]``."""
        part = getattr(self.blocks, name)
        if self.index is None:
            part = part[:, None]
        else:
            part = mx.take(part.flatten(0, 1), self._shared_place, axis=0)
        return self._masked(part, dtype)

    def _masked(self, part: Array, dtype: Any) -> Array:
        if dtype is not None:
            part = part.astype(dtype)
        if self.index is None and self.blocks.block_counts is None:
            return part
        valid = self.valid[:, : part.shape[1]]
        return mx.where(valid.reshape(*valid.shape, *([1] * (part.ndim - 3))), part, mx.zeros((), dtype=part.dtype))
