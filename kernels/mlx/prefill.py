"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

import mlx.core as mx

from ._format import WIDTHS, at_least, query_rows
from ._metal import absent, float_bits, integers, kernel, padded
from .twin.decode import empty_state
from .twin.prefill import select_key_blocks

__all__ = ["prefill_attention", "select_key_blocks"]  # the selection is matrix products and a sort

THREADS = 128  # of a threadgroup


def prefill_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    block_indices: mx.array,
    block_size: int,
    prefill_block: int,
    softcap: float | None,
    sink: mx.array | None,
    sm_scale: float,
) -> tuple[mx.array, mx.array]:
    """Each query block attends its key blocks, causally, bottom-right aligned."""
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[3]
    query_blocks, width = block_indices.shape[2:]
    if batch == 0 or length == 0 or keys == 0 or width == 0:
        return empty_state(q, dim_v, sink)
    prefill_block = min(prefill_block, length)
    rows = query_rows(prefill_block)
    run = kernel(
        "prefill",
        ("q", "k", "v", "block_indices", "sink", "params"),
        ("out", "lse"),
        "prefill.metal",
        ("numbers.metal", "rows.metal", "attend.metal"),
    )
    out, lse = run(
        inputs=[
            *(padded(part) for part in (q, k, v, block_indices)),
            absent(mx.float32) if sink is None else padded(sink),
            integers(
                heads,
                heads // heads_kv,
                length,
                keys,
                dim,
                dim_v,
                -(-keys // block_size),
                block_size,
                query_blocks,
                prefill_block,
                width,
                int(sink is not None),
                float_bits(sm_scale),
                float_bits(softcap or 0.0),
            ),
        ],
        template=[("T", q.dtype), ("ROWS", rows), ("WIDTH", at_least(WIDTHS, max(dim, dim_v), "head dims"))],
        grid=(batch * heads * THREADS, query_blocks * -(-prefill_block // rows), 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, heads, length, dim_v), (batch, heads, length)],
        output_dtypes=[q.dtype, mx.float32],
    )
    return out, lse
