"""The rows that blocks stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from ._rows import rounded
from ._wide import run_of, width_of


@triton.jit
def lowrank_rows(
    anchor, u, u_scale, u_unit, basis, basis_scale, gain, counts, out, N, H, S, D, RANK,
    out_stride_b, out_stride_h, out_stride_t,
    CODED: tl.constexpr, GAINED: tl.constexpr, FACTORED: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``a + u basis`` of all rows, the anchor itself as row 0, zeros in blocks beyond the counts."""
    program = tl.program_id(0).to(tl.int64)
    block, head = program // H, program % H
    row = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    channel = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    known = channel < D
    first = tl.load(anchor + program * D + channel, mask=known, other=0.0)
    x = tl.broadcast_to(first.to(tl.float64)[None, :], (BLOCK_S, BLOCK_D))
    if FACTORED:
        rank = tl.arange(0, BLOCK_R).to(tl.int64)
        seen = (row < S)[:, None] & (rank < RANK)[None, :]
        left = tl.load(u + (block * S + row)[:, None] * RANK + rank[None, :], mask=seen, other=0).to(tl.float64)
        at = (program * RANK + rank)[:, None] * D + channel[None, :]
        right = tl.load(basis + at, mask=(rank < RANK)[:, None] & known[None, :], other=0).to(tl.float64)
        if CODED:
            left *= tl.load(u_scale + block * S + row, mask=row < S, other=0.0).to(tl.float64)[:, None]
            step = tl.load(basis_scale + block * RANK + rank, mask=rank < RANK, other=0.0)
            right *= step.to(tl.float64)[:, None]
        left *= tl.load(u_unit + block).to(tl.float64)
        if GAINED:
            right /= tl.load(gain + block).to(tl.float64)
        x += tl.dot(left, right, input_precision="ieee", out_dtype=tl.float64)
    stored = tl.where((row == 0)[:, None], first[None, :], rounded(x, out.dtype.element_ty))
    if RAGGED:
        valid = block % N < tl.load(counts + block // N)
        stored = tl.where(valid, stored, 0.0).to(out.dtype.element_ty)
    at = out + (block // N) * out_stride_b + head * out_stride_h + (block % N * S + row)[:, None] * out_stride_t
    tl.store(at + channel[None, :], stored, mask=(row < S)[:, None] & known[None, :])


@triton.jit
def _stored_codes(packed, byte_row, place, seen, widths, D):
    """Codes of the channels at some places of the stored order, float64."""
    bits = width_of(place, widths, D)
    start = tl.zeros_like(bits)
    size = tl.zeros_like(bits)
    offset = tl.zeros_like(bits)
    total = 0
    for descent in tl.static_range(8):
        run_start, run_size = run_of(8 - descent, widths, D)
        mine = bits == 8 - descent
        start = tl.where(mine, run_start, start)
        size = tl.where(mine, run_size, size)
        offset = tl.where(mine, total, offset)
        for fold in tl.static_range(4):
            if (8 - descent) & (8 >> fold):
                total += (run_size * (8 >> fold) + 7) // 8
    code = tl.zeros(seen.shape, tl.int32)
    for fold in tl.static_range(4):
        width: tl.constexpr = 8 >> fold
        has = (bits & width) != 0
        length = tl.where(has, (size * width + 7) // 8, 1)
        channel = place.to(tl.int32) - start
        byte = offset + channel % length
        found = tl.load(packed + byte_row[:, None] + byte[None, :], mask=seen & has[None, :], other=0).to(tl.int32)
        field = (found >> tl.where(has, width * (channel // length), 0)[None, :]) & ((1 << width) - 1)
        code = tl.where(has[None, :], (code << width) | field, code)
        offset += tl.where(has, length, 0)
    return code.to(tl.float64)


@triton.jit(do_not_specialize=["widths"])
def residual_rows(
    anchor, packed, scale, minimum, unit, order, positions, counts, out, widths, N, H, S, R, D, Q, BYTES,
    out_stride_b, out_stride_h, out_stride_t,
    CODED: tl.constexpr, ANCHORED: tl.constexpr, ORDERED: tl.constexpr, CHOSEN: tl.constexpr, RAGGED: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Residual rows to their positions."""
    program = tl.program_id(0).to(tl.int64)
    block, head = program // H, program % H
    slot = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    place = (tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    known = place < D
    there = slot < R
    if RAGGED:
        there &= block % N < tl.load(counts + block // N)
    seen = there[:, None] & known[None, :]
    channel = place
    if CODED:
        if ORDERED:
            channel = tl.load(order + program * D + place, mask=known, other=0).to(tl.int64)
        code = _stored_codes(packed, (program * R + slot) * BYTES, place, seen, widths, D)
        at = (program * Q + slot // GROUP)[:, None] * D + place[None, :]
        step = tl.load(scale + at, mask=seen, other=0.0).to(tl.float64)
        low = tl.load(minimum + at, mask=seen, other=0.0).to(tl.float64)
        x = tl.load(unit + program).to(tl.float64) * (low + step * code)
        if ANCHORED:
            x += tl.load(anchor + program * D + channel, mask=known, other=0.0).to(tl.float64)[None, :]
        stored = rounded(x, out.dtype.element_ty)
    else:
        stored = tl.load(packed + (program * R + slot)[:, None] * D + place[None, :], mask=seen, other=0.0)
    if CHOSEN:
        row = tl.load(positions + block * R + slot, mask=there, other=0).to(tl.int64)
    else:
        row = slot + 1
    at = out + (block // N) * out_stride_b + head * out_stride_h + (block % N * S + row)[:, None] * out_stride_t
    tl.store(at + channel[None, :], stored, mask=seen)
