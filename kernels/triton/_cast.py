"""Casts of stored numbers that the interpreter gets right as well."""

from __future__ import annotations

import triton
import triton.language as tl

from ._launch import INTERPRETED

ON_CPU = tl.constexpr(INTERPRETED)


@triton.jit
def widened(x):
    """Loaded numbers in float32."""
    if ON_CPU and x.dtype == tl.bfloat16:  # its cast loses subnormal numbers
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def saturated(x, dtype: tl.constexpr):
    """Float32 or wider ``x`` in ``dtype``, to nearest; what lies beyond its range becomes its largest number."""
    if dtype == tl.float16:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float32).to(dtype)
    elif dtype == tl.float32:
        return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38).to(dtype)
    else:
        x = tl.minimum(tl.maximum(x, -3.3895313892515355e38), 3.3895313892515355e38).to(tl.float32)
        if ON_CPU:  # its cast cuts the low bits off
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return bits.to(tl.uint16).to(dtype, bitcast=True)
        else:
            return x.to(dtype)
