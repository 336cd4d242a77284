"""Float64 in kernels: differences that neither overflow nor cancel, powers of two, one rounding to float16."""

from __future__ import annotations

import triton
import triton.language as tl

from dkv.types import EIGHTHS

EIGHTH_COUNT = tl.constexpr(EIGHTHS)


@triton.jit
def head_of(x, block, head, N, S, stride_b, stride_h, stride_t):
    """Where the first row of a block's head lies in ``x [B, H, N * S, dim]``."""
    return x + (block // N) * stride_b + head * stride_h + (block % N) * S * stride_t


@triton.jit
def wide_rows(head, row, channel, seen, stride_t, stride_d):
    """Rows of a head, 0 where not seen."""
    at = row[:, None] * stride_t + channel[None, :] * stride_d
    return tl.load(head + at, mask=seen, other=0.0).to(tl.float64)


@triton.jit
def differences(head, row, channel, seen, known, stride_t, stride_d):
    """Rows of a head less its first, 0 where not seen."""
    anchor = tl.load(head + channel * stride_d, mask=known, other=0.0).to(tl.float64)
    return tl.where(seen, wide_rows(head, row, channel, seen, stride_t, stride_d) - anchor[None, :], 0.0)


@triton.jit
def whole(x):
    """The nearest whole number, halves to even; for ``abs(x) < 2**51``."""
    return (x + 6755399441055744.0) - 6755399441055744.0


@triton.jit
def exact_power(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def unit_exponent(x, SHIFT: tl.constexpr):
    """Exponent of the smallest power of two at or above ``x >= 0``, less ``SHIFT``, of a normal float32; 0 where 0."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023 + ((bits & 0xFFFFFFFFFFFFF) != 0).to(tl.int64) - SHIFT
    return tl.where(x > 0, tl.minimum(tl.maximum(exponent, -126), 127), 0)


@triton.jit
def rounded_half(x):
    """Float64 ``x`` rounded once to float16 numbers; a cast may round twice, to float32 first."""
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    quantum = tl.maximum(exponent - 10, -24)
    return whole(x * exact_power(-quantum)) * exact_power(quantum)


@triton.jit
def signed_codes(x, scale):
    """Codes -127..127 of ``x / scale``, 0 where the scale is 0."""
    code = tl.where(scale > 0, x / tl.where(scale > 0, scale, 1.0), 0.0)
    return tl.minimum(tl.maximum(whole(code), -127.0), 127.0)


def packed_widths(widths: tuple[int, ...]) -> int:
    """Bits of each eighth of the channels, four bits an eighth: kernels take them without being compiled anew."""
    return sum(width << 4 * eighth for eighth, width in enumerate(widths))


@triton.jit
def width_of(place, widths, D):
    """Bits of the channel at a place of the stored order."""
    eighth = tl.minimum((8 * (place + 1) + D - 1) // D - 1, 7)  # places beyond D too
    return ((widths.to(tl.int64) >> (4 * eighth.to(tl.int64))) & 15).to(tl.int32)


@triton.jit
def run_of(BITS: tl.constexpr, widths, D):
    """First place and length of the run of channels of ``BITS``."""
    eighth = tl.arange(0, EIGHTH_COUNT).to(tl.int64)
    bits = (widths.to(tl.int64) >> (4 * eighth)) & 15
    size = (eighth + 1) * D // EIGHTH_COUNT - eighth * D // EIGHTH_COUNT
    start = tl.sum(tl.where(bits > BITS, size, 0), 0)
    return start.to(tl.int32), tl.sum(tl.where(bits == BITS, size, 0), 0).to(tl.int32)
