"""Merge attention states by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ._metal import integers, kernel, padded


def merge_states(outs: Sequence[mx.array], lses: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
    """outs ``[..., Dv]``, lses ``[...]`` (natural log). An lse of -inf or +inf marks an empty state."""
    dtype = outs[0].dtype
    same = all(part.dtype == dtype for part in outs)
    stacked = mx.stack([part if same else part.astype(mx.float32) for part in outs])
    return merge_parts(stacked, mx.stack([part.astype(mx.float32) for part in lses]), dtype)


def merge_parts(outs: mx.array, lses: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Merge states that lie together, ``outs [n, ..., Dv]`` and ``lses [n, ...]`` float32; out in ``dtype``."""
    parts, *shape, columns = outs.shape
    rows = lses.size // parts
    if rows == 0 or columns == 0:
        return mx.zeros((*shape, columns), dtype), mx.full(shape, -mx.inf, mx.float32)
    run = kernel("merge", ("outs", "lses", "sizes"), ("out", "lse"), "merge.metal", ("numbers.metal",))
    out, lse = run(
        inputs=[padded(outs), padded(lses), integers(parts, rows, columns)],
        template=[("T", dtype)],
        grid=(columns, rows, 1),
        threadgroup=(32, 8, 1),
        output_shapes=[(*shape, columns), tuple(shape)],
        output_dtypes=[dtype, mx.float32],
    )
    return out, lse
