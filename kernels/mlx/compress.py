"""Compress blocks of K and V, and rebuild them.

Kernels do what goes row by row: differences, the value gain, norms, the choice of residual rows and their codes, with
48 bits where float64 decides elsewhere. The singular vectors come from the CPU stream, in float64.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import NamedTuple

import mlx.core as mx

from dkv.types import CLIPS, BlockFormat, CompressedBlocks, code_bytes

from ._format import WIDTHS, at_least, code_runs
from ._metal import absent, float_bits, integers, kernel, padded
from .twin import compress as twin
from .twin._storage import Segments, group_count, two_to
from .twin.compress import reconstruct_blocks, stored_factors, truncated_svd

__all__ = ["compress_blocks", "reconstruct_blocks"]  # rebuilding is for inspection, and runs as the twin does

THREADS = 128  # of a threadgroup, as ``wide.metal`` has it
MOST_THREADS = 256  # of one in which a thread has a channel or a token
WORKSPACE_BYTES = 128 << 20  # blocks factored together, in float64


class Shape(NamedTuple):
    """Of keys ``[batch, heads, num_blocks * size, dim]``; values have ``dim_v`` channels."""

    batch: int
    heads: int
    num_blocks: int
    size: int
    dim: int
    dim_v: int

    @property
    def total(self) -> int:
        return self.batch * self.num_blocks


def compress_blocks(
    k: mx.array,
    v: mx.array,
    fmt: BlockFormat,
    keep: str,
    token_weight: mx.array | None,
    channel_weight: mx.array | None = None,
) -> CompressedBlocks:
    """k ``[B, H, N * S, D]``, v ``[B, H, N * S, Dv]``, token_weight ``[B, N * S]``, channel_weight ``[H, D]``."""
    batch, heads, tokens, dim = k.shape
    shape = Shape(batch, heads, tokens // fmt.block_size, fmt.block_size, dim, v.shape[3])
    if shape.total == 0:
        return twin.compress_blocks(k, v, fmt, keep, token_weight, channel_weight)
    gain = None if fmt.keeps_every_row else _value_gain(k, v, shape)
    error = keep == "error" and not fmt.keeps_every_row
    parts, places = _factors(k, v, gain, fmt, shape, token_weight, error)
    positions = None  # [B, N, R]
    if gain is not None:
        apart = places if places is not None else _distinctness(v, shape)
        positions = _kept_rows(apart, None if error else token_weight, fmt.num_residuals, shape)
        parts |= {"residual_indices": positions, "v_gain": gain}
    for name, x in (("k", k), ("v", v)):
        rows = x.reshape(batch, heads, shape.num_blocks, shape.size, x.shape[3]).swapaxes(1, 2)  # [B, N, H, S, D]
        parts[f"anchor_{name}"] = rows[..., 0, :]
        if fmt.exact_rows:
            parts[f"residual_{name}"] = _exact_rows(rows, positions)
        if fmt.minmax and name == "k":
            parts |= {"k_min": rows.min(3), "k_max": rows.max(3)}
    if not fmt.exact_rows:
        order = None
        if fmt.orders_channels:
            order = parts["residual_k_order"] = _channel_order(k, positions, channel_weight, fmt.num_residuals, shape)
        parts |= _coded_rows("residual_k", k, positions, order, fmt.key_segments(dim), fmt.num_residuals, shape)
        parts |= _coded_rows(
            "residual_v", v, positions, None, fmt.value_segments(shape.dim_v), fmt.num_residuals, shape
        )
    return CompressedBlocks(format=fmt, **parts)


def _value_gain(k: mx.array, v: mx.array, shape: Shape) -> mx.array:
    """``[B, N]``."""
    run = kernel("gain", ("k", "v", "params"), ("gain",), "gain.metal", ("wide.metal", "joint.metal"))
    (gain,) = run(
        inputs=[padded(k), padded(v), integers(shape.heads, shape.num_blocks, shape.size, shape.dim, shape.dim_v)],
        grid=(shape.total * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(shape.batch, shape.num_blocks)],
        output_dtypes=[mx.float32],
    )
    return gain


def _unit_rows(
    k: mx.array, v: mx.array, gain: mx.array | None, shape: Shape
) -> tuple[mx.array, mx.array, mx.array]:
    """Joint rows over their norms ``[B * N, S, W]``, and the norms ``norm * 2**exponent [B * N, S]``."""
    dim_v = 0 if gain is None else shape.dim_v
    run = kernel(
        "unit_rows",
        ("k", "v", "gain", "params"),
        ("unit", "norms", "exponents"),
        "unit_rows.metal",
        ("wide.metal", "joint.metal"),
    )
    rows = (shape.total, shape.size)
    unit, norms, exponents = run(
        inputs=[
            padded(k),
            padded(v),
            absent(mx.float32) if gain is None else padded(gain),
            integers(shape.heads, shape.num_blocks, shape.size, shape.dim, dim_v),
        ],
        grid=(shape.total * THREADS, shape.size, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*rows, shape.heads * (shape.dim + dim_v)), rows, rows],
        output_dtypes=[mx.float32, mx.float32, mx.int32],
    )
    return unit, norms, exponents


def _factors(
    k: mx.array,
    v: mx.array,
    gain: mx.array | None,
    fmt: BlockFormat,
    shape: Shape,
    token_weight: mx.array | None,
    error: bool,
) -> tuple[dict[str, mx.array], mx.array | None]:
    """The stored factors and, where ``error`` asks for it, a number of each row that grows with what they miss of it.

    That is ``[B * N, 1, S]``, the place of the row by its keep-score: float32 holds no squares of numbers far apart.
    """
    rank = fmt.stored_rank(shape.heads, shape.dim, shape.dim_v)
    unit, norms, exponents = _unit_rows(k, v, gain, shape)
    step = max(1, WORKSPACE_BYTES // (8 * shape.size * (4 * unit.shape[2] + 3 * shape.size)))
    pieces, missed = [], []
    with mx.stream(mx.cpu):
        for i in range(0, shape.total, step):
            piece = slice(i, i + step)
            wide = unit[piece].astype(mx.float64)
            norm = (norms[piece].astype(mx.float64) * two_to(exponents[piece].astype(mx.int64)))[..., None]
            u, basis = truncated_svd(wide, norm, rank)
            pieces.append(stored_factors(u, basis, fmt, (len(u), shape.size, shape.heads, shape.dim), k.dtype))
            if error:
                squares = mx.square(norm * wide - u @ basis).sum(-1)
                if token_weight is not None:
                    squares = squares * token_weight.reshape(shape.total, shape.size)[piece].astype(mx.float64)
                place = mx.argsort(mx.argsort(-squares, axis=-1), axis=-1)
                missed.append((shape.size - place).astype(mx.float32)[:, None])
            mx.eval(list(pieces[-1].values()), missed[-1:])
        parts = {name: mx.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        parts = {name: part.reshape(shape.batch, shape.num_blocks, *part.shape[1:]) for name, part in parts.items()}
        return parts, mx.concatenate(missed) if error else None


def _distinctness(v: mx.array, shape: Shape) -> mx.array:
    """One minus the cosine of each value and the block's mean, ``[B * N, H, S]``."""
    run = kernel("distinct", ("v", "params"), ("apart",), "distinct.metal", ("wide.metal",))
    (apart,) = run(
        inputs=[padded(v), integers(shape.heads, shape.num_blocks, shape.size, shape.dim_v)],
        template=[("WIDTH", at_least(WIDTHS, shape.dim_v, "head dims"))],
        grid=(shape.total * shape.heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(shape.total, shape.heads, shape.size)],
        output_dtypes=[mx.float32],
    )
    return apart


def _kept_rows(apart: mx.array, token_weight: mx.array | None, kept: int, shape: Shape) -> mx.array:
    """Positions of the rows of highest score, ``[B, N, R]``."""
    positions = (shape.batch, shape.num_blocks, kept)
    if kept == 0:
        return mx.zeros(positions, mx.uint8)
    run = kernel("select_rows", ("apart", "weight", "params"), ("positions",), "select_rows.metal", ("wide.metal",))
    weight = absent(mx.float32) if token_weight is None else padded(token_weight.astype(mx.float32))
    (found,) = run(
        inputs=[padded(apart), weight, integers(apart.shape[1], shape.size, kept, int(token_weight is not None))],
        grid=(shape.total * MOST_THREADS, 1, 1),
        threadgroup=(MOST_THREADS, 1, 1),
        output_shapes=[positions],
        output_dtypes=[mx.uint8],
    )
    return found


def _exact_rows(rows: mx.array, positions: mx.array | None) -> mx.array:
    """The kept rows of ``[B, N, H, S, D]``."""
    if positions is None:
        return rows[..., 1:, :]
    at = mx.broadcast_to(positions.astype(mx.int32)[:, :, None, :, None], (*rows.shape[:3], positions.shape[2], 1))
    return mx.take_along_axis(rows, at, axis=3)


def _channel_order(
    k: mx.array, positions: mx.array | None, channel_weight: mx.array | None, kept: int, shape: Shape
) -> mx.array:
    """Channels by descending importance, ``[B, N, H, D]``."""
    weight = mx.ones((shape.heads, shape.dim)) if channel_weight is None else channel_weight.astype(mx.float32)
    headers = ("wide.metal", "coded.metal")
    run = kernel("row_order", ("x", "positions", "weight", "params"), ("order",), "row_order.metal", headers)
    (order,) = run(
        inputs=[
            padded(k),
            _stored(positions),
            padded(weight),
            integers(shape.heads, shape.num_blocks, shape.size, shape.dim, kept, int(positions is None)),
        ],
        template=[("WIDTH", MOST_THREADS)],
        grid=(shape.total * shape.heads * MOST_THREADS, 1, 1),
        threadgroup=(MOST_THREADS, 1, 1),
        output_shapes=[(shape.batch, shape.num_blocks, shape.heads, shape.dim)],
        output_dtypes=[mx.uint8],
    )
    return order


def _stored(part: mx.array | None) -> mx.array:
    return absent(mx.uint8) if part is None or part.size == 0 else padded(part)


def _coded_rows(
    name: str,
    x: mx.array,
    positions: mx.array | None,
    order: mx.array | None,
    segments: Segments,
    kept: int,
    shape: Shape,
) -> dict[str, mx.array]:
    """Codes, scales, minima and units of the kept rows of ``x [B, H, N * S, C]``; keys less their anchor."""
    dim, row_bytes = x.shape[3], code_bytes(segments)
    heads = (shape.batch, shape.num_blocks, shape.heads)
    groups = (*heads, group_count(kept), dim)
    codes_shape = (*heads, kept, row_bytes)
    if kept == 0:
        none = mx.zeros(groups, mx.float16)
        stored = {name: mx.zeros(codes_shape, mx.uint8), f"{name}_scale": none, f"{name}_min": none}
        return stored | {f"{name}_unit": mx.ones(heads)}
    rows = [padded(x), _stored(positions), _stored(order)]
    numbers = [shape.heads, shape.num_blocks, shape.size, dim, kept]
    numbers += [int(positions is None), int(name == "residual_k"), int(order is not None)]
    run = kernel(
        "row_scales",
        ("x", "positions", "order", "clips", "params"),
        ("scale", "low", "unit"),
        "row_scales.metal",
        ("wide.metal", "coded.metal"),
    )
    table = [number for segment in segments for number in segment]
    scale, low, unit = run(
        inputs=[*rows, integers(*_clips()), integers(*numbers, len(segments), *table)],
        grid=(shape.total * shape.heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[groups, groups, heads],
        output_dtypes=[mx.float16, mx.float16, mx.float32],
    )
    codes = mx.zeros(codes_shape, mx.uint8)
    if row_bytes:
        run = kernel(
            "row_codes",
            ("x", "positions", "order", "scale", "low", "unit", "params"),
            ("codes",),
            "row_codes.metal",
            ("wide.metal", "coded.metal"),
        )
        (codes,) = run(
            inputs=[
                *rows,
                *(padded(part) for part in (scale, low, unit)),
                integers(*numbers, row_bytes, len(segments), *table, *code_runs(segments)),
            ],
            grid=(row_bytes, kept, shape.total * shape.heads),
            threadgroup=(32, 8, 1),
            output_shapes=[codes_shape],
            output_dtypes=[mx.uint8],
        )
    return {name: codes, f"{name}_scale": scale, f"{name}_min": low, f"{name}_unit": unit}


@functools.cache
def _clips() -> tuple[int, ...]:
    """For each width 0..8 where its list starts and how long it is; then the parts of a range, each in hundredths and
    what float64 makes of it beyond them.
    """
    header: list[int] = [0, 0]
    table: list[int] = []
    for bits in range(1, 9):
        header += [2 * 9 + len(table), len(CLIPS[bits])]
        for part in CLIPS[bits]:
            hundredths = round(100 * part)
            table += [hundredths, float_bits(float(Fraction(part) - Fraction(hundredths, 100)))]
    return (*header, *table)
