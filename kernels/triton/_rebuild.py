"""The rows that blocks stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from ._cast import saturated, widened
from ._wide import runs_of, width_of


@triton.jit
def lowrank_rows(
    anchor, u, u_scale, u_unit, basis, basis_scale, gain, counts, out, N, H, S, D, RANK,
    out_stride_b, out_stride_h, out_stride_t,
    CODED: tl.constexpr, GAINED: tl.constexpr, FACTORED: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``a + u basis`` of all rows, the anchor itself as row 0, zeros in blocks beyond the counts."""
    block = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
    column = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    known = column < H * D
    first = tl.load(anchor + block * H * D + column, mask=known, other=0.0)
    x = tl.broadcast_to(widened(first).to(tl.float64), (BLOCK_S, BLOCK_D))
    if FACTORED:
        unit = tl.load(u_unit + block).to(tl.float64)
        if GAINED:
            unit /= tl.load(gain + block).to(tl.float64)
        for start in range(0, RANK, BLOCK_R):
            rank = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
            seen = (row < S) & (rank < RANK)[None, :]
            left = unit * widened(tl.load(u + (block * S + row) * RANK + rank[None, :], mask=seen, other=0))
            at = ((block * H + column // D) * RANK + rank[:, None]) * D + column % D
            right = widened(tl.load(basis + at, mask=(rank < RANK)[:, None] & known, other=0)).to(tl.float64)
            if CODED:
                left *= tl.load(u_scale + block * S + row, mask=row < S, other=0.0).to(tl.float64)
                step = tl.load(basis_scale + block * RANK + rank, mask=rank < RANK, other=0.0)
                right *= step.to(tl.float64)[:, None]
            x += tl.dot(left, right, input_precision="ieee", out_dtype=tl.float64)
    stored = tl.where(row == 0, first, saturated(x, out.dtype.element_ty))
    if RAGGED:
        valid = block % N < tl.load(counts + block // N)
        stored = tl.where(valid, stored, 0.0).to(out.dtype.element_ty)
    at = out + (block // N) * out_stride_b + column // D * out_stride_h + (block % N * S + row) * out_stride_t
    tl.store(at + column % D, stored, mask=(row < S) & known)


@triton.jit
def _stored_codes(packed, line, place, seen, widths, D, BYTES):
    """Codes of the channels at some places ``[1, C]`` of the stored order, in rows ``line [G, C]``; float64."""
    run_bits, run_start, run_size, run_byte, _ = runs_of(widths, D)
    bits = width_of(place, widths, D)
    mine = run_bits == bits  # [16, C]
    channel = place.to(tl.int32) - tl.sum(tl.where(mine, run_start, 0), 0)[None, :]
    size = tl.sum(tl.where(mine, run_size, 0), 0)[None, :]
    offset = tl.sum(tl.where(mine, run_byte, 0), 0)[None, :]
    code = tl.zeros(seen.shape, tl.int32)
    for fold in tl.static_range(4):
        width = 8 >> fold
        has = (bits & width) != 0
        length = tl.where(has, (size * width + 7) // 8, 1)
        found = tl.load(packed + line * BYTES + offset + channel % length, mask=seen & has, other=0).to(tl.int32)
        field = (found >> tl.where(has, width * (channel // length), 0)) & ((1 << width) - 1)
        code = tl.where(has, (code << width) | field, code)
        offset += tl.where(has, length, 0)
    return code.to(tl.float64)


@triton.jit(do_not_specialize=["columns", "widths"])
def residual_rows(
    anchor, packed, scale, minimum, unit, order, positions, counts, out, columns, widths, N, H, S, R, D, Q, BYTES,
    out_stride_b, out_stride_h, out_stride_t,
    CODED: tl.constexpr, ANCHORED: tl.constexpr, ORDERED: tl.constexpr, CHOSEN: tl.constexpr, RAGGED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Residual rows to their positions."""
    column = (tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    slot = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
    known = column < columns
    pair, place = column // D, column % D
    block = pair // H
    if RAGGED:
        known &= block % N < tl.load(counts + block // N, mask=known, other=0)
    seen = known & (slot < R)
    line = pair * R + slot
    channel = place
    if CODED:
        if ORDERED:
            channel = tl.load(order + column, mask=known, other=0).to(tl.int64)
        code = _stored_codes(packed, line, place, seen, widths, D, BYTES)
        at = (pair * Q + slot // GROUP) * D + place
        step = tl.load(scale + at, mask=seen, other=0.0).to(tl.float64)
        low = tl.load(minimum + at, mask=seen, other=0.0).to(tl.float64)
        x = tl.load(unit + pair, mask=known, other=0.0).to(tl.float64) * (low + step * code)
        if ANCHORED:
            x += widened(tl.load(anchor + pair * D + channel, mask=known, other=0.0)).to(tl.float64)
        stored = saturated(x, out.dtype.element_ty)
    else:
        stored = tl.load(packed + line * D + place, mask=seen, other=0.0)
    if CHOSEN:
        row = tl.load(positions + block * R + slot, mask=seen, other=0).to(tl.int64)
    else:
        row = slot + 1
    at = (block // N) * out_stride_b + pair % H * out_stride_h + (block % N * S + row) * out_stride_t + channel
    tl.store(out + at, stored, mask=seen)
