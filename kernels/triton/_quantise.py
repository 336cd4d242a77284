"""Codes of residual rows: ranges and order of their channels, the best clip of each, and packed bytes."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkv import types
from dkv.types import CLIPS, RESIDUAL_GROUP, code_bytes

from ._cast import widened
from ._launch import launch, power_of_two
from ._wide import (
    differences,
    exact_power,
    head_of,
    packed_widths,
    rounded_half,
    runs_of,
    unit_exponent,
    whole,
    width_of,
)

WORKSPACE_BYTES = 256 << 20  # codes before they are packed
TILE = 8192  # numbers of a tile
HALF_TOP = tl.constexpr(types.HALF_TOP)
MOST_CLIPS = 8  # a power of two

Segments = tuple[tuple[int, int], ...]  # (channels, bits) of each run of equally wide channels


@triton.jit
def _group_rows(
    x, kept, block, n, head, channel, slot, known, N, S, R, stride_b, stride_h, stride_t, stride_d,
    ANCHORED: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Kept rows ``slot [G, 1]`` of some channels ``[1, C]``, less their anchor where they have one."""
    seen = known & (slot < R)
    if CHOSEN:
        row = tl.load(kept + n * R + slot, mask=seen, other=0).to(tl.int64)
    else:
        row = slot + 1
    anchor = head_of(x, block, head, N, S, stride_b, stride_h, stride_t) + channel * stride_d
    if ANCHORED:
        return differences(anchor + row * stride_t, anchor, seen, known)
    else:
        return widened(tl.load(anchor + row * stride_t, mask=seen, other=0.0)).to(tl.float64)


@triton.jit(do_not_specialize=["columns", "first"])
def _row_ranges(
    x, kept, weight, low, high, mean, importance, columns, first, N, H, S, R, D, Q,
    stride_b, stride_h, stride_t, stride_d, weight_stride_h, weight_stride_d,
    ANCHORED: tl.constexpr, CHOSEN: tl.constexpr, ORDERED: tl.constexpr, WEIGHTED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Least, largest and mean number of channels by group ``[n, H, Q, D]``, their importance ``[n, H, D]``."""
    column = (tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    index = tl.arange(0, BLOCK_G).to(tl.int64)[:, None]
    known = column < columns
    pair, channel = column // D, column % D
    lost = tl.zeros((1, BLOCK_C), tl.float64)
    for group in range(Q):
        slot = group * GROUP + index
        rows = _group_rows(
            x, kept, first + pair // H, pair // H, pair % H, channel, slot, known, N, S, R,
            stride_b, stride_h, stride_t, stride_d, ANCHORED, CHOSEN,
        )  # fmt: skip
        seen = known & (slot < R)
        least = tl.min(tl.where(seen, rows, float("inf")), 0)[None, :]
        most = tl.max(tl.where(seen, rows, float("-inf")), 0)[None, :]
        at = (pair * Q + group) * D + channel
        tl.store(low + at, least, mask=known)
        tl.store(high + at, most, mask=known)
        tl.store(mean + at, tl.sum(rows, 0)[None, :] / tl.minimum(R - group * GROUP, GROUP), mask=known)
        spread = tl.where(known, most - least, 0.0)
        lost += spread * spread
    if ORDERED:
        if WEIGHTED:
            at = pair % H * weight_stride_h + channel * weight_stride_d
            lost *= tl.load(weight + at, mask=known, other=0.0).to(tl.float64)
        tl.store(importance + column, lost, mask=known)


@triton.jit
def _channel_order(importance, order, D, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr):
    """Channels of a head by descending importance, ``[n, H, D]``."""
    pair = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    mine = tl.load(importance + pair * D + channel, mask=channel < D, other=-1.0)
    place = tl.zeros((BLOCK_D,), tl.int32)
    for start in range(0, D, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        theirs = tl.load(importance + pair * D + other, mask=other < D, other=-1.0)[None, :]
        before = (theirs > mine[:, None]) | ((theirs == mine[:, None]) & (other[None, :] < channel[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order + pair * D + place, channel.to(tl.uint8), mask=channel < D)


@triton.jit(do_not_specialize=["pairs", "widths"])
def _row_units(
    low, high, order, unit, pairs, widths, D, Q, ORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Unit of each head, ``[n, H]``."""
    pair = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    place = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    seen = (pair < pairs) & (place < D)
    channel = place
    if ORDERED:
        channel = tl.load(order + pair * D + place, mask=seen, other=0).to(tl.int64)
    levels = tl.maximum((1 << width_of(tl.minimum(place, D - 1), widths, D)) - 1, 1)
    reach = tl.zeros((BLOCK_N, BLOCK_D), tl.float64)
    for group in range(Q):
        at = (pair * Q + group) * D + channel
        least = tl.load(low + at, mask=seen, other=0.0)
        most = tl.load(high + at, mask=seen, other=0.0)
        reach = tl.maximum(reach, tl.maximum(tl.abs(least), tl.abs(most)))
        reach = tl.maximum(reach, (most - least) / levels)
    exponent = unit_exponent(tl.max(reach, 1)[:, None], HALF_TOP)
    tl.store(unit + pair, exact_power(exponent).to(tl.float32), mask=pair < pairs)


@triton.jit(do_not_specialize=["columns", "first", "widths"])
def _code_rows(
    x, kept, order, low, high, mean, unit, clips, codes, scale, minimum, columns, first, widths, N, H, S, R, D, Q,
    stride_b, stride_h, stride_t, stride_d,
    ANCHORED: tl.constexpr, CHOSEN: tl.constexpr, ORDERED: tl.constexpr, TRIALS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Codes ``[n, H, R, D]`` in stored order, float16 steps and minima ``[n, H, Q, D]``."""
    column = (tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    group = tl.program_id(1).to(tl.int64)
    known = column < columns
    pair, place = column // D, column % D
    channel = place
    if ORDERED:
        channel = tl.load(order + column, mask=known, other=0).to(tl.int64)
    slot = group * GROUP + tl.arange(0, BLOCK_G).to(tl.int64)[:, None]
    seen = known & (slot < R)
    shrink = 1.0 / tl.load(unit + pair, mask=known, other=1.0).to(tl.float64)
    rows = shrink * _group_rows(
        x, kept, first + pair // H, pair // H, pair % H, channel, slot, known, N, S, R,
        stride_b, stride_h, stride_t, stride_d, ANCHORED, CHOSEN,
    )  # fmt: skip
    at = (pair * Q + group) * D + channel
    least = tl.load(low + at, mask=known, other=0.0) * shrink
    most = tl.load(high + at, mask=known, other=0.0) * shrink
    bits = width_of(place, widths, D)
    levels = tl.maximum((1 << bits) - 1, 1).to(tl.float64)
    # what each trial would store, [T, C]
    trial = tl.arange(0, BLOCK_T)[:, None]
    part = tl.load(clips + bits.to(tl.int64) * BLOCK_T + trial)
    trial_scale = rounded_half(part * (most - least) / levels)
    trial_low = rounded_half((least + most) / 2 - part * (most - least) / 2)
    chosen = tl.zeros((1, BLOCK_C), tl.int32)
    if TRIALS > 1:
        best = tl.full((1, BLOCK_C), float("inf"), tl.float64)
        for index in range(TRIALS):
            step = tl.sum(tl.where(trial == index, trial_scale, 0.0), 0)[None, :]
            base = tl.sum(tl.where(trial == index, trial_low, 0.0), 0)[None, :]
            code = (rows - base) / tl.where(step > 0, step, float("inf"))
            code = whole(tl.minimum(tl.maximum(code, 0.0), levels))
            error = tl.where(seen, code * step + base - rows, 0.0)
            error = tl.sum(error * error, 0)[None, :]
            chosen = tl.where(error < best, index, chosen)
            best = tl.minimum(error, best)
    step = tl.sum(tl.where(trial == chosen, trial_scale, 0.0), 0)[None, :]
    base = tl.sum(tl.where(trial == chosen, trial_low, 0.0), 0)[None, :]
    average = tl.load(mean + at, mask=known, other=0.0) * shrink
    step = tl.where(bits > 0, step, 0.0)
    base = tl.where(bits > 0, base, rounded_half(average))
    code = (rows - base) / tl.where(step > 0, step, float("inf"))
    code = whole(tl.minimum(tl.maximum(code, 0.0), levels))
    tl.store(codes + (pair * R + slot) * D + place, code.to(tl.int32).to(tl.uint8), mask=seen)
    at = (pair * Q + group) * D + place
    tl.store(scale + at, step.to(tl.float32).to(tl.float16), mask=known)
    tl.store(minimum + at, base.to(tl.float32).to(tl.float16), mask=known)


@triton.jit(do_not_specialize=["lines", "widths"])
def _pack(
    codes, packed, lines, widths, D, BYTES, LANES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Y: tl.constexpr
):  # fmt: skip
    """Bytes ``[lines, BYTES]`` of codes ``[lines, D]``."""
    line = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    byte = tl.arange(0, BLOCK_Y)[None, :]
    run_bits, run_start, run_size, run_byte, run_length = runs_of(widths, D)
    mine = (byte >= run_byte) & (byte < run_byte + run_length)  # [16, Y]
    bits = tl.sum(tl.where(mine, run_bits, 0), 0)[None, :]
    start = tl.sum(tl.where(mine, run_start, 0), 0)[None, :]
    size = tl.sum(tl.where(mine, run_size, 0), 0)[None, :]
    left = byte - tl.sum(tl.where(mine, run_byte, 0), 0)[None, :]
    part, lowest, place, stride = tl.zeros_like(bits) + 8, tl.zeros_like(bits), left, tl.zeros_like(bits)
    for fold in tl.static_range(4):
        width = 8 >> fold
        length = tl.where((bits & width) != 0, (size * width + 7) // 8, 0)
        inside = (left >= 0) & (left < length)
        part = tl.where(inside, width, part)
        lowest = tl.where(inside, bits & (width - 1), lowest)
        place = tl.where(inside, left, place)
        stride = tl.where(inside, length, stride)
        left -= length
    total = tl.zeros((BLOCK_R, BLOCK_Y), tl.int32)
    for lane in range(LANES):
        channel = place + lane * stride.to(tl.int64)
        used = (line < lines) & (lane * part < 8) & (channel < size)
        code = tl.load(codes + line * D + start + channel, mask=used, other=0).to(tl.int32)
        field = (code >> lowest) & ((1 << part) - 1)
        total |= tl.where(used, field << tl.minimum(lane * part, 7), 0)
    tl.store(packed + line * BYTES + byte, total.to(tl.uint8), mask=(line < lines) & (byte < BYTES))


@functools.cache
def _clips(device: torch.device) -> Tensor:
    """``[bits, trial]``; 1 beyond a width's own list, a range that is the first already."""
    table = [(clips + (1.0,) * MOST_CLIPS)[:MOST_CLIPS] for clips in CLIPS]
    return torch.tensor(table, dtype=torch.float64, device=device)


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


def tiles(num_residuals: int, columns: int) -> dict[str, int]:
    """Rows of a group and channels, of any heads, that are coded by one program."""
    rows = power_of_two(min(num_residuals, RESIDUAL_GROUP), 16)
    return {"BLOCK_G": rows, "BLOCK_C": min(power_of_two(columns, 16), TILE // rows)}


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
    pairs, columns, packed_bits = n * heads, n * heads * dim, packed_widths(widths)
    block, padded = tiles(num_residuals, columns), power_of_two(dim, 16)
    programs, options = -(-columns // block["BLOCK_C"]), {"num_warps": 8, "num_stages": 1}
    where, given = x if kept is None else kept, x if weight is None else weight
    ordering, shape = x if order is None else order, (count, heads, size, num_residuals, dim, groups)
    launch(
        _row_ranges, (programs,), x, where, given, low, high, mean, importance, columns, first, *shape, *x.stride(),
        *given.stride()[-2:], **chosen, WEIGHTED=weight is not None, **block, **options,
    )  # fmt: skip
    if order is not None:
        launch(_channel_order, (pairs,), importance, order, dim, BLOCK_D=padded, BLOCK_J=min(padded, 32), **options)
    if not num_residuals:
        return
    several = min(power_of_two(pairs), TILE // padded)
    launch(
        _row_units, (-(-pairs // several),), low, high, ordering, unit, pairs, packed_bits, dim, groups,
        ORDERED=order is not None, BLOCK_N=several, BLOCK_D=padded, **options,
    )  # fmt: skip
    launch(
        _code_rows, (programs, groups), x, where, ordering, low, high, mean, unit, _clips(x.device), codes, scale,
        minimum, columns, first, packed_bits, *shape, *x.stride(), **chosen,
        TRIALS=max(len(CLIPS[width]) for width in bits), **block, BLOCK_T=MOST_CLIPS, **options,
    )  # fmt: skip
    length, lines = packed.shape[-1], pairs * num_residuals
    if length and not plain:
        padded = power_of_two(length, 16)
        narrowest = min(width & -width for width in bits if width)
        launch(
            _pack, (-(-lines // (TILE // padded)),), codes, packed, lines, packed_bits, dim, length,
            LANES=8 // narrowest, BLOCK_R=TILE // padded, BLOCK_Y=padded, **options,
        )  # fmt: skip
