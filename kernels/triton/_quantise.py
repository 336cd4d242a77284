"""Codes of residual rows: ranges and order of their channels, the best clip of each, and packed bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkv.types import RESIDUAL_GROUP, code_bytes

from ._launch import launch, power_of_two
from ._wide import (
    exact_power,
    head_of,
    packed_widths,
    rounded_half,
    run_of,
    unit_exponent,
    whole,
    wide_rows,
    width_of,
)

WORKSPACE_BYTES = 256 << 20  # codes before they are packed
TILE = 4096  # numbers of a tile
HALF_TOP = tl.constexpr(14)  # units put the largest stored number of a group near 2**14, well inside float16
# Parts of a group's range that its codes may cover, by their bits; where the tails are few, a finer step pays for them.
CLIPS = {
    1: (1.0, 0.75, 0.6, 0.5, 0.42, 0.35, 0.3),
    2: (1.0, 0.85, 0.75, 0.65, 0.55, 0.47),
    3: (1.0, 0.9, 0.8, 0.7, 0.6),
    4: (1.0, 0.94, 0.87, 0.8, 0.72),
    5: (1.0, 0.95, 0.9),
}
MOST_CLIPS = max(map(len, CLIPS.values()))
# [bits - 1][trial], 1 beyond a width's own list: a range that was tried before is never better
CLIP_TABLE = tuple(clips + (1.0,) * (MOST_CLIPS - len(clips)) for clips in CLIPS.values())

Segments = tuple[tuple[int, int], ...]  # (channels, bits) of each run of equally wide channels


@triton.jit
def _source(order, program, place, D, ORDERED: tl.constexpr):
    """The channel at each place of the stored order."""
    if ORDERED:
        return tl.load(order + program * D + place, mask=place < D, other=0).to(tl.int64)
    else:
        return place


@triton.jit
def _group_rows(x, kept, block, head, n, group, index, channel, known, N, S, R, stride_b, stride_h, stride_t, stride_d,
                ANCHORED: tl.constexpr, CHOSEN: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Some channels of a group's rows, less their anchor where they have one, and which are there."""
    slot = group * GROUP + index.to(tl.int64)
    used = (index < GROUP) & (slot < R)
    if CHOSEN:
        row = tl.load(kept + n * R + slot, mask=used, other=0).to(tl.int64)
    else:
        row = slot + 1
    seen = used[:, None] & known[None, :]
    rows = head_of(x, block, head, N, S, stride_b, stride_h, stride_t)
    found = wide_rows(rows, row, channel, seen, stride_t, stride_d)
    if ANCHORED:
        found -= tl.load(rows + channel * stride_d, mask=known, other=0.0).to(tl.float64)[None, :]
    return found, seen


@triton.jit(do_not_specialize=["first"])
def _row_ranges(
    x, kept, weight, low, high, mean, importance, first, N, H, S, R, D, Q,
    stride_b, stride_h, stride_t, stride_d, weight_stride_h, weight_stride_d,
    ANCHORED: tl.constexpr, CHOSEN: tl.constexpr, ORDERED: tl.constexpr, WEIGHTED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Least, largest and mean number of channels by group ``[n, H, Q, D]``, their importance ``[n, H, D]``."""
    program = tl.program_id(0).to(tl.int64)
    n, head = program // H, program % H
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    known = channel < D
    index = tl.arange(0, BLOCK_G)
    lost = tl.zeros((BLOCK_C,), tl.float64)
    for group in range(Q):
        rows, seen = _group_rows(x, kept, first + n, head, n, group, index, channel, known, N, S, R,
                                 stride_b, stride_h, stride_t, stride_d, ANCHORED, CHOSEN, GROUP)  # fmt: skip
        least = tl.min(tl.where(seen, rows, float("inf")), 0)
        most = tl.max(tl.where(seen, rows, float("-inf")), 0)
        at = (program * Q + group) * D + channel
        tl.store(low + at, least, mask=known)
        tl.store(high + at, most, mask=known)
        tl.store(mean + at, tl.sum(tl.where(seen, rows, 0.0), 0) / tl.minimum(R - group * GROUP, GROUP), mask=known)
        if ORDERED:
            spread = tl.where(known, most - least, 0.0)
            lost += spread * spread
    if ORDERED:
        if WEIGHTED:
            factor = tl.load(weight + head * weight_stride_h + channel * weight_stride_d, mask=known, other=0.0)
            lost *= factor.to(tl.float64)
        tl.store(importance + program * D + channel, lost, mask=known)


@triton.jit
def _channel_order(importance, order, D, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr):
    """Channels of a head by descending importance, ``[n, H, D]``."""
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    mine = tl.load(importance + program * D + channel, mask=channel < D, other=-1.0)
    place = tl.zeros((BLOCK_D,), tl.int32)
    for start in range(0, D, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        theirs = tl.load(importance + program * D + other, mask=other < D, other=-1.0)[None, :]
        before = (theirs > mine[:, None]) | ((theirs == mine[:, None]) & (other[None, :] < channel[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order + program * D + place, channel.to(tl.uint8), mask=channel < D)


@triton.jit
def _codes(x, scale, low, levels):
    """Codes as float64; 0 where the scale is 0."""
    divisor = tl.where(scale > 0, scale, float("inf"))
    code = (x - low[None, :]) / divisor[None, :]
    return whole(tl.minimum(tl.maximum(code, 0.0), levels[None, :]))


@triton.jit(do_not_specialize=["first", "widths"])
def _code_rows(
    x, kept, order, low, high, mean, codes, scale, minimum, unit, first, widths, N, H, S, R, D, Q,
    stride_b, stride_h, stride_t, stride_d,
    ANCHORED: tl.constexpr, CHOSEN: tl.constexpr, ORDERED: tl.constexpr, CLIPPED: tl.constexpr, TRIALS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Codes ``[n, H, R, D]`` in stored order, float16 steps and minima ``[n, H, Q, D]``, unit ``[n, H]``."""
    program = tl.program_id(0).to(tl.int64)
    group, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    place = tl.arange(0, BLOCK_D).to(tl.int64)
    channel = _source(order, program, place, D, ORDERED)
    levels = tl.maximum((1 << width_of(place, widths, D)) - 1, 1)
    reach = tl.zeros((BLOCK_D,), tl.float64)
    for other in range(Q):
        at = (program * Q + other) * D + channel
        least = tl.load(low + at, mask=place < D, other=0.0)
        most = tl.load(high + at, mask=place < D, other=0.0)
        reach = tl.maximum(reach, tl.maximum(tl.abs(least), tl.abs(most)))
        reach = tl.maximum(reach, (most - least) / levels)
    exponent = unit_exponent(tl.max(reach, 0), HALF_TOP)
    if (group == 0) & (tile == 0):
        tl.store(unit + program, exact_power(exponent).to(tl.float32))
    shrink = exact_power(-exponent)

    place = (tile * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    known = place < D
    channel = _source(order, program, place, D, ORDERED)
    index = tl.arange(0, BLOCK_G)
    rows, seen = _group_rows(x, kept, first + program // H, program % H, program // H, group, index, channel, known,
                             N, S, R, stride_b, stride_h, stride_t, stride_d, ANCHORED, CHOSEN, GROUP)  # fmt: skip
    rows *= shrink
    at = (program * Q + group) * D + channel
    least = tl.load(low + at, mask=known, other=0.0) * shrink
    most = tl.load(high + at, mask=known, other=0.0) * shrink
    middle, spread = (least + most) / 2, most - least
    bits = width_of(place, widths, D)
    levels = tl.maximum((1 << bits) - 1, 1).to(tl.float64)
    best_scale = rounded_half(spread / levels)
    best_low = rounded_half(middle - spread / 2)
    if TRIALS > 1:
        best = tl.full((BLOCK_C,), float("inf"), tl.float64)
        for trial in tl.static_range(TRIALS):
            factor = tl.full((BLOCK_C,), 1.0, tl.float64)
            for row in tl.static_range(len(CLIPPED)):
                factor = tl.where(bits == row + 1, CLIPPED[row][trial], factor)
            trial_low = rounded_half(middle - factor * spread / 2)
            trial_scale = rounded_half(factor * spread / levels)
            error = _codes(rows, trial_scale, trial_low, levels) * trial_scale[None, :] + trial_low[None, :] - rows
            error = tl.sum(tl.where(seen, error * error, 0.0), 0)
            better = error < best
            best = tl.where(better, error, best)
            best_scale = tl.where(better, trial_scale, best_scale)
            best_low = tl.where(better, trial_low, best_low)
    average = tl.load(mean + at, mask=known, other=0.0) * shrink
    best_scale = tl.where(bits > 0, best_scale, 0.0)
    best_low = tl.where(bits > 0, best_low, rounded_half(average))
    code = _codes(rows, best_scale, best_low, levels)
    slot = group * GROUP + index
    at = (program * R + slot)[:, None] * D + place[None, :]
    tl.store(codes + at, code.to(tl.int32).to(tl.uint8), mask=seen)
    at = (program * Q + group) * D + place
    tl.store(scale + at, best_scale.to(tl.float32).to(tl.float16), mask=known)
    tl.store(minimum + at, best_low.to(tl.float32).to(tl.float16), mask=known)


@triton.jit(do_not_specialize=["rows", "widths"])
def _pack(
    codes, packed, rows, widths, D, BYTES, LANES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr
):  # fmt: skip
    """Bytes ``[rows, BYTES]`` of codes ``[rows, D]``."""
    row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    byte = tl.arange(0, BLOCK_Y)
    # of the part that a byte belongs to: its width, its lowest bit in a code, and the run's channels
    part = tl.full((BLOCK_Y,), 8, tl.int32)
    lowest = tl.zeros((BLOCK_Y,), tl.int32)
    place = tl.zeros((BLOCK_Y,), tl.int32)
    stride = tl.zeros((BLOCK_Y,), tl.int32)
    stop = tl.zeros((BLOCK_Y,), tl.int32)
    offset = 0
    for descent in tl.static_range(8):
        start, size = run_of(8 - descent, widths, D)
        for fold in tl.static_range(4):
            width: tl.constexpr = 8 >> fold
            if (8 - descent) & width:
                length = (size * width + 7) // 8
                inside = (byte >= offset) & (byte < offset + length)
                part = tl.where(inside, width, part)
                lowest = tl.where(inside, (8 - descent) & (width - 1), lowest)
                place = tl.where(inside, start + byte - offset, place)
                stride = tl.where(inside, length, stride)
                stop = tl.where(inside, start + size, stop)
                offset += length
    total = tl.zeros((BLOCK_R, BLOCK_Y), tl.int32)
    for lane in range(LANES):
        channel = place + lane * stride
        used = (row < rows) & ((lane * part < 8) & (channel < stop))[None, :]
        code = tl.load(codes + row * D + channel[None, :], mask=used, other=0).to(tl.int32)
        field = (code >> lowest[None, :]) & ((1 << part) - 1)[None, :]
        total |= tl.where(used, field << (lane * part)[None, :], 0)
    tl.store(packed + row * BYTES + byte[None, :], total.to(tl.uint8), mask=(row < rows) & (byte < BYTES)[None, :])


def code_rows(
    x: Tensor,
    kept: Tensor | None,
    widths: tuple[int, ...],
    segments: Segments,
    weight: Tensor | None,
    *,
    block_size: int,
    num_residuals: int,
    anchored: bool,
    ordered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Coded rows of ``x [B, H, N * S, D]``; see the law, "Stored residual rows".

    Parameters
    ----------
    kept : Tensor [B * N, R] uint8, optional
        Positions of the rows; all but the first where None.
    widths : bits of each eighth of the channels, in stored order; ``segments`` are their runs.
    weight : Tensor [H, D], optional
        Factor of each channel's squared spread where the channels are ``ordered``.

    Returns
    -------
    packed codes uint8 ``[B * N, H, R, bytes]``, scale and min float16 ``[B * N, H, Q, D]``, unit float32 ``[B * N, H]``
    and the stored order uint8 ``[B * N, H, D]`` or None.
    """
    batch, heads, tokens, dim = x.shape
    count, groups, width = tokens // block_size, -(-num_residuals // RESIDUAL_GROUP), code_bytes(segments)
    total = batch * count
    packed = x.new_empty(total, heads, num_residuals, width, dtype=torch.uint8)
    scale, minimum = (x.new_empty(total, heads, groups, dim, dtype=torch.float16) for _ in range(2))
    unit = x.new_ones(total, heads, dtype=torch.float32)
    order = x.new_empty(total, heads, dim, dtype=torch.uint8) if ordered else None
    step = max(1, WORKSPACE_BYTES // max(1, heads * dim * (num_residuals + 32)))
    for first in range(0, total, step):
        done = slice(first, first + step)
        _code_blocks(
            x, None if kept is None else kept[done], weight, first, count, block_size, num_residuals, widths, segments,
            anchored, packed[done], scale[done], minimum[done], unit[done], None if order is None else order[done],
        )  # fmt: skip
    return packed, scale, minimum, unit, order


def tiles(num_residuals: int, dim: int) -> dict[str, int]:
    """Rows and channels that are coded by one program."""
    rows = power_of_two(min(num_residuals, RESIDUAL_GROUP), 16)
    return {"BLOCK_G": rows, "BLOCK_C": min(power_of_two(dim, 16), TILE // rows)}


def _code_blocks(
    x: Tensor,
    kept: Tensor | None,
    weight: Tensor | None,
    first: int,
    count: int,
    size: int,
    num_residuals: int,
    widths: tuple[int, ...],
    segments: Segments,
    anchored: bool,
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    unit: Tensor,
    order: Tensor | None,
) -> None:
    """Fill the parts of some blocks, the first of which is ``first``."""
    n, heads, groups, dim = scale.shape
    low, high, mean = (x.new_empty(n, heads, groups, dim, dtype=torch.float64) for _ in range(3))
    importance = x.new_empty(n, heads, dim, dtype=torch.float64) if order is not None else low
    bits = tuple(width for _, width in segments)
    plain = bits == (8,)  # a code is a byte
    codes = packed if plain else x.new_empty(n, heads, num_residuals, dim, dtype=torch.uint8)
    chosen = {"ANCHORED": anchored, "CHOSEN": kept is not None, "ORDERED": order is not None, "GROUP": RESIDUAL_GROUP}
    block = tiles(num_residuals, dim)
    channels, options = -(-dim // block["BLOCK_C"]), {"num_warps": 4, "num_stages": 1}
    where, given = x if kept is None else kept, x if weight is None else weight
    rows = (count, heads, size, num_residuals, dim, groups)
    launch(
        _row_ranges, (n * heads, channels), x, where, given, low, high, mean, importance, first, *rows, *x.stride(),
        *(given.stride()[-2:]), **chosen, WEIGHTED=weight is not None, **block, **options,
    )  # fmt: skip
    if order is not None:
        padded = power_of_two(dim, 16)
        launch(_channel_order, (n * heads,), importance, order, dim, BLOCK_D=padded, BLOCK_J=min(padded, 32), **options)
    launch(
        _code_rows, (n * heads, groups, channels), x, where, x if order is None else order, low, high, mean, codes,
        scale, minimum, unit, first, packed_widths(widths), *rows, *x.stride(), **chosen, CLIPPED=CLIP_TABLE,
        TRIALS=max(len(CLIPS.get(width, (1,))) for width in bits), **block, BLOCK_D=power_of_two(dim, 16), **options,
    )  # fmt: skip
    if not plain:
        length, lines = packed.shape[-1], n * heads * num_residuals
        padded = power_of_two(length, 16)
        narrowest = min((width & -width for width in bits if width), default=8)
        launch(
            _pack, (-(-lines // (TILE // padded)) if length else 0,), codes, packed, lines, packed_widths(widths), dim,
            length, LANES=8 // narrowest, BLOCK_R=TILE // padded, BLOCK_Y=padded, **options,
        )  # fmt: skip
