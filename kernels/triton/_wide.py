"""Float64 in kernels: differences that neither overflow nor cancel, powers of two, one rounding to float16."""

from __future__ import annotations

import triton
import triton.language as tl

from dkv.types import EIGHTHS

from ._cast import widened

EIGHTH_COUNT = tl.constexpr(EIGHTHS)


@triton.jit
def long(x):
    """A whole number in 64 bits, a constant too."""
    return tl.full([], 0, tl.int64) + x


@triton.jit
def head_of(x, block, head, N, S, stride_b, stride_h, stride_t):
    """Where the first row of a block's head lies in ``x [B, H, N * S, dim]``."""
    return x + (block // N) * stride_b + head * stride_h + (block % N) * S * stride_t


@triton.jit
def differences(rows, anchor, seen, known):
    """Numbers of rows less those of their anchor, 0 where not seen."""
    x = widened(tl.load(rows, mask=seen, other=0.0)).to(tl.float64)
    return tl.where(seen, x - widened(tl.load(anchor, mask=known, other=0.0)).to(tl.float64), 0.0)


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
    return whole(tl.minimum(tl.maximum(code, -127.0), 127.0)).to(tl.int32).to(tl.int8)


def packed_widths(widths: tuple[int, ...]) -> int:
    """Bits of each eighth of the channels, four bits an eighth: kernels take them without being compiled anew."""
    return sum(width << 4 * eighth for eighth, width in enumerate(widths))


@triton.jit
def width_of(place, widths, D):
    """Bits of the channel at a place of the stored order."""
    eighth = (8 * (place + 1) + D - 1) // D - 1
    return ((widths.to(tl.int64) >> (4 * eighth.to(tl.int64))) & 15).to(tl.int32)


@triton.jit
def runs_of(widths, D):
    """Of the run of each width: the width, its first place, channels, first byte and bytes; ``[16, 1]``."""
    bits = tl.arange(0, 16)[:, None]
    eighth = tl.arange(0, EIGHTH_COUNT)[None, :]
    size = (eighth + 1) * D // EIGHTH_COUNT - eighth * D // EIGHTH_COUNT
    width = ((widths.to(tl.int64) >> (4 * eighth.to(tl.int64))) & 15).to(tl.int32)
    count = tl.sum(tl.where(width == bits, size, 0), 1)[:, None]
    start = tl.sum(tl.where(width > bits, size, 0), 1)[:, None]
    length = tl.zeros_like(count)
    for fold in tl.static_range(4):
        part = 8 >> fold
        length += tl.where((bits & part) != 0, (count * part + 7) // 8, 0)
    return bits, start, count, tl.cumsum(length, 0, reverse=True) - length, length
