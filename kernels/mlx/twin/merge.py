"""Merge attention states by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

Array = Any


def saturated(x: Array, dtype: Any) -> Array:
    """``x`` in ``dtype``; what lies beyond its range becomes its largest number, as in the reference."""
    if x.dtype == dtype:
        return x
    limit = mx.finfo(dtype).max
    return mx.where(mx.isnan(x), x, mx.clip(x, -limit, limit)).astype(dtype)


def rounded(x: Array, dtype: Any) -> Array:
    """As :func:`saturated`, but an infinity, which overflowed or came in, stays one."""
    return x if x.dtype == dtype else mx.where(mx.isinf(x), x.astype(dtype), saturated(x, dtype))


def merge_states(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """outs ``[..., Dv]``, lses ``[...]`` (natural log). An lse of -inf or +inf marks an empty state."""
    lse = mx.stack([part.astype(mx.float32) for part in lses])
    lse = mx.where(lse == mx.inf, -mx.inf, lse)
    peak = lse.max(0)
    safe_peak = mx.where(peak == -mx.inf, 0.0, peak)
    weight = mx.exp(lse - safe_peak)  # exp(-inf) is exactly 0
    total = weight.sum(0)
    share = weight / mx.where(total == 0, 1.0, total)
    out = mx.zeros(outs[0].shape)
    for index, part in enumerate(outs):
        # select, do not multiply: an empty state's output may hold anything
        each = share[index][..., None]
        out = out + mx.where(each == 0, 0.0, each * part.astype(mx.float32))
    return rounded(out, outs[0].dtype), mx.where(peak == -mx.inf, -mx.inf, safe_peak + mx.log(total))
