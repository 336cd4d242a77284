"""Score every compressed block and select the most relevant ones, without waiting for the device."""

from __future__ import annotations

import mlx.core as mx

from dkv.types import CompressedBlocks

from ._format import RANKS, WIDTHS, at_least, key_layout, query_rows
from ._metal import absent, float_bits, integers, kernel, padded

THREADS = 128  # of a threadgroup that scores
SELECT_THREADS = 256  # of one that selects

PARTS = (
    "block_counts", "anchor_k", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "residual_indices", "residual_k",
    "residual_k_scale", "residual_k_min", "residual_k_unit", "residual_k_order",
)  # fmt: skip
INPUTS = (
    "q", "block_counts", "anchor_k", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "positions", "residual_k",
    "k_scale", "k_low", "k_unit", "k_order", "params",
)  # fmt: skip
# The numbers of the scoring kernel, in its order; the table of the runs of keys follows.
PARAMETERS = (
    "heads", "rows", "dim", "blocks", "block_size", "rank", "kept", "counted", "lowrank", "stored", "largest", "scaled",
    "coded_rows", "ordered", "key_bytes", "key_runs", "sm_scale",
)  # fmt: skip


def route_blocks(
    q: mx.array,
    blocks: CompressedBlocks,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float,
    sink_blocks: int,
    recent_blocks: int,
) -> mx.array:
    """Block indices ``[B, Hkv, min(top_k, N)]`` int32, ascending, -1 where unused."""
    batch, query_heads, length, _ = q.shape
    heads, total = blocks.num_kv_heads, blocks.num_blocks
    if batch * total == 0:
        return mx.zeros((batch, heads, min(top_k, total)), mx.int32)
    pins = top_k, sink_blocks, recent_blocks
    if length == 0:
        return select_blocks(mx.zeros((batch, heads, total)), blocks.block_counts, *pins)
    scores = route_scores(q, blocks, router, sm_scale)
    if share == "all":
        scores = scores.reshape(batch, 1, query_heads * length, total)
        chosen = select_scores(scores, blocks.block_counts, 1, heads, *pins)
    else:
        scores = scores.reshape(batch * heads, query_heads // heads, length, total)
        chosen = select_scores(scores, blocks.block_counts, heads, 1, *pins)
    return chosen.reshape(batch, heads, min(top_k, total))


def route_scores(q: mx.array, blocks: CompressedBlocks, router: str, sm_scale: float) -> mx.array:
    """Scores ``[B, Hkv, G * Sq, N]`` of every block, -inf beyond ``block_counts``."""
    batch, query_heads, length, dim = q.shape
    heads, total, fmt = blocks.num_kv_heads, blocks.num_blocks, blocks.format
    rows = query_heads // heads * length
    tile = query_rows(rows)
    shape = (batch, heads, rows, total)
    counted = blocks.block_counts is not None
    counts = blocks.block_counts if counted else absent(mx.int32)
    if router == "minmax":
        run = kernel(
            "route_minmax", ("q", "block_counts", "k_min", "k_max", "sizes"), ("scores",), "route_minmax.metal"
        )
        (scores,) = run(
            inputs=[
                *(padded(q), counts, padded(blocks.k_min), padded(blocks.k_max)),
                integers(heads, rows, dim, total, int(counted), float_bits(sm_scale)),
            ],
            template=[("ROWS", tile)],
            grid=(32, total, batch * heads * -(-rows // tile)),
            threadgroup=(32, 4, 1),
            output_shapes=[shape],
            output_dtypes=[mx.float32],
        )
        return scores
    lowrank = router == "lowrank" or (router == "keys" and not fmt.keeps_every_row)
    key_bytes, key_runs = key_layout(blocks)
    numbers = {
        "heads": heads, "rows": rows, "dim": dim, "blocks": total, "block_size": blocks.block_size,
        "rank": blocks.rank, "kept": fmt.num_residuals, "counted": counted, "lowrank": lowrank,
        "stored": fmt.num_residuals > 0 and not (lowrank and fmt.keeps_every_row), "largest": router == "residual",
        "scaled": blocks.basis_k_scale is not None, "coded_rows": not fmt.exact_rows, "ordered": fmt.orders_channels,
        "key_bytes": key_bytes, "key_runs": len(key_runs) // 6, "sm_scale": float_bits(sm_scale),
    }  # fmt: skip
    run = kernel("route_scores", INPUTS, ("scores",), "route_scores.metal", ("rows.metal", "score.metal"))
    (scores,) = run(
        inputs=[padded(q), *_arguments(blocks), integers(*(int(numbers[name]) for name in PARAMETERS), *key_runs)],
        template=[
            ("ROWS", tile),
            ("WIDTH", at_least(WIDTHS, dim, "head dims")),
            ("RANKS", at_least(RANKS, blocks.rank if lowrank else 0, "ranks")),
        ],
        grid=(batch * total * THREADS, heads, -(-rows // tile)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
    )
    return scores


def _arguments(blocks: CompressedBlocks) -> list[mx.array]:
    """The parts that are read; each has the dtype it would have, be it there or not."""
    kinds = {"block_counts": mx.int32, "residual_indices": mx.uint8, "residual_k_order": mx.uint8}
    kinds |= dict.fromkeys(("u_scale", "residual_k_scale", "residual_k_min"), mx.float16)
    kinds |= dict.fromkeys(("basis_k_scale", "residual_k_unit"), mx.float32)
    found = []
    for name in PARTS:
        part = getattr(blocks, name)
        if part is None or part.size == 0:
            part = absent(kinds[name] if part is None else part.dtype)
        found.append(part if name == "block_counts" else padded(part))  # keeps its size from call to call
    return found


def select_scores(
    scores: mx.array,
    counts: mx.array | None,
    per_sequence: int,
    repeat: int,
    top_k: int,
    sink_blocks: int,
    recent_blocks: int,
) -> mx.array:
    """The blocks that hold most of the softmax of ``scores [P, maxed, meaned, N]``, ``[P, repeat, chosen]`` int32.

    The largest share of the ``maxed`` rows counts, its mean over the ``meaned``. Problem ``p`` has
    ``counts[p // per_sequence]`` blocks; all ``N`` where None.
    """
    problems, maxed, meaned, total = scores.shape
    rows = problems * maxed * meaned
    sizes = total, maxed, meaned, per_sequence, repeat, top_k, sink_blocks, recent_blocks
    scores, counted = padded(scores), counts is not None
    run = kernel("route_rows", ("scores", "block_counts", "sizes"), ("stats",), "route_rows.metal", ("shares.metal",))
    (stats,) = run(
        inputs=[
            scores,
            counts if counted else absent(mx.int32),
            integers(rows, total, int(counted), per_sequence * maxed * meaned),
        ],
        grid=(32, rows, 1),
        threadgroup=(32, 4, 1),
        output_shapes=[(rows, 2)],
        output_dtypes=[mx.float32],
    )
    return _select(scores, padded(stats), counts, problems, sizes)


def select_blocks(
    score: mx.array, counts: mx.array | None, top_k: int, sink_blocks: int, recent_blocks: int
) -> mx.array:
    """Sink and recent blocks, then the highest of ``score [B, H, N]``: ``[B, H, min(top_k, N)]`` int32, then -1."""
    batch, heads, total = score.shape
    if score.size == 0:
        return mx.zeros((batch, heads, min(top_k, total)), mx.int32)
    sizes = total, 0, 0, heads, 1, top_k, sink_blocks, recent_blocks
    chosen = _select(padded(score.astype(mx.float32)), absent(mx.float32), counts, batch * heads, sizes)
    return chosen.reshape(batch, heads, min(top_k, total))


def _select(
    scores: mx.array, stats: mx.array, counts: mx.array | None, problems: int, sizes: tuple[int, ...]
) -> mx.array:
    """``sizes`` are the kernel's up to ``recent``; ``maxed`` of 0 says that the scores are the shares."""
    total, repeat, top_k = sizes[0], sizes[4], sizes[5]
    chosen, counted = min(top_k, total), counts is not None
    run = kernel(
        "route_select", ("scores", "stats", "block_counts", "sizes"), ("chosen", "shares"), "route_select.metal",
        ("shares.metal",),
    )  # fmt: skip
    out, _ = run(
        inputs=[
            scores, stats, counts if counted else absent(mx.int32), integers(*sizes, chosen, int(counted)),
        ],
        grid=(problems * SELECT_THREADS, 1, 1),
        threadgroup=(SELECT_THREADS, 1, 1),
        output_shapes=[(problems, repeat, chosen), (problems, total)],
        output_dtypes=[mx.int32, mx.float32],
    )  # fmt: skip
    return out
