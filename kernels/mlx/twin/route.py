"""Score every compressed block and select the most relevant ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dkv.types import CompressedBlocks

from ._storage import Selected
from .decode import WORKSPACE_BYTES, grouped_queries, rank_queries, residual_logits, residual_mask, u_row_scale

Array = Any


def route_blocks(
    q: Array,
    blocks: CompressedBlocks,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float,
    sink_blocks: int,
    recent_blocks: int,
) -> Array:
    """Block indices ``[B, Hkv, min(top_k, N)]`` int32, ascending, -1 where unused."""
    (batch, query_heads, length, _), heads, total = q.shape, blocks.num_kv_heads, blocks.num_blocks
    if batch == 0 or total == 0:
        return mx.full((batch, heads, min(top_k, total)), -1, dtype=mx.int32)
    counts = blocks.block_counts
    if counts is None:
        counts = mx.full((batch,), total, dtype=mx.int32)
    if length == 0:
        mean = mx.zeros((batch, heads, total))
    else:
        scores = route_scores(q, blocks, router, sm_scale)  # [B, Hkv, M, N]
        mass = _softmax_over_blocks(scores, counts).reshape(batch, heads, query_heads // heads, length, total)
        if share == "all":
            mean = mx.broadcast_to(mass.mean((1, 2, 3))[:, None], (batch, heads, total))
        else:
            mean = mass.max(2).mean(2)
    return select_blocks(mean, counts, top_k, sink_blocks, recent_blocks)


def _softmax_over_blocks(scores: Array, counts: Array) -> Array:
    usable = (mx.arange(scores.shape[-1]) < counts.reshape(-1, 1, 1, 1)) & ~mx.isnan(scores)
    scores = mx.where(usable, scores, -mx.inf)
    peak = scores.max(-1, keepdims=True)
    peak = mx.where(peak == -mx.inf, 0.0, peak)
    weight = mx.where(scores == peak, 1.0, mx.exp(scores - peak))  # inf - inf would be NaN
    total = weight.sum(-1, keepdims=True)
    return weight / mx.where(total > 0, total, 1.0)


def select_blocks(score: Array, counts: Array, top_k: int, sink_blocks: int, recent_blocks: int) -> Array:
    """Sink and recent blocks, then the highest of ``score [B, Hkv, N]``, ties to the lowest index."""
    total = score.shape[-1]
    slots = mx.arange(total)
    counts = counts.reshape(-1, 1, 1)
    valid = slots < counts
    pinned = valid & ((slots < sink_blocks) | (slots >= counts - recent_blocks))
    key = mx.where(mx.isnan(score), -1.0, score)
    key = mx.clip(key, -1.0, mx.finfo(key.dtype).max)  # below the pinned ones, above what is not valid
    key = mx.where(pinned, mx.inf, mx.where(valid, key, -2.0))
    order = mx.argsort(-key, axis=-1).astype(mx.int32)[..., : min(top_k, total)]
    chosen = mx.sort(mx.where(order < counts, order, total), axis=-1)
    return mx.where(chosen < total, chosen, -1)


def route_scores(q: Array, blocks: CompressedBlocks, router: str, sm_scale: float) -> Array:
    """Scores ``[B, Hkv, G * Sq, N]`` of every block, taken in pieces that bound the workspace."""
    grouped = grouped_queries(q, blocks.num_kv_heads)
    batch, heads, rows, dim = grouped.shape
    if router == "keys" and not blocks.format.keeps_every_row:
        router = "lowrank"
    score = {"lowrank": _lowrank, "keys": _keys, "minmax": _minmax, "residual": _residual}[router]
    width = {
        "lowrank": blocks.block_size * (rows + dim),
        "keys": blocks.block_size * (rows + dim),
        "minmax": rows + dim,
        "residual": blocks.num_residuals * (rows + dim),
    }
    step = max(1, WORKSPACE_BYTES // max(1, 8 * batch * heads * width[router]))
    starts = range(0, blocks.num_blocks, step)
    return mx.concatenate([score(grouped, _slice_blocks(blocks, i, step), sm_scale) for i in starts], axis=-1)


def _slice_blocks(blocks: CompressedBlocks, start: int, count: int) -> CompressedBlocks:
    """``count`` blocks from ``start``; ``block_counts``, the one part of one axis, counts from there."""

    def cut(part: Array) -> Array:
        return mx.clip(part - start, 0, count) if part.ndim == 1 else part[:, start : start + count]

    return blocks.map(cut)


def _lse(logits: Array) -> Array:
    """Log-sum-exp over the last axis; a NaN stays one."""
    peak = logits.max(-1, keepdims=True)
    safe_peak = mx.where(mx.abs(peak) == mx.inf, 0.0, peak)
    return (safe_peak + mx.log(mx.exp(logits - safe_peak).sum(-1, keepdims=True))).squeeze(-1)


def _lowrank(q: Array, blocks: CompressedBlocks, sm_scale: float) -> Array:
    every = Selected(blocks, None)
    anchor = q @ every.per_head("anchor_k", q.dtype).swapaxes(2, 3)  # [B, H, M, N]
    query = rank_queries(q, blocks, every)  # [B, H, N, M, r]
    logits = query @ every.shared("u", q.dtype).swapaxes(3, 4) * u_row_scale(blocks, every, q.dtype)[..., None, :]
    logits = (logits + anchor.swapaxes(2, 3)[..., None]) * sm_scale  # [B, H, N, M, S]
    if blocks.format.keeps_every_row:
        return _lse(logits).swapaxes(2, 3)
    logits = mx.where(residual_mask(blocks, every)[..., None, :], -mx.inf, logits)
    if blocks.num_residuals:
        logits = mx.concatenate([logits, residual_logits(q, blocks, every, sm_scale)], axis=-1)
    return _lse(logits).swapaxes(2, 3)


def _keys(q: Array, blocks: CompressedBlocks, sm_scale: float) -> Array:
    """Blocks that keep every row: the anchor and the residual rows."""
    return _stored_rows(q, blocks, sm_scale, _lse)


def _residual(q: Array, blocks: CompressedBlocks, sm_scale: float) -> Array:
    return _stored_rows(q, blocks, sm_scale, lambda logits: logits.max(-1))


def _minmax(q: Array, blocks: CompressedBlocks, sm_scale: float) -> Array:
    every = Selected(blocks, None)
    low, high = every.per_head("k_min", q.dtype), every.per_head("k_max", q.dtype)  # [B, H, N, D]
    # max(q * low, q * high) is q+ * high + q- * low
    return (mx.maximum(q, 0) @ high.swapaxes(2, 3) + mx.minimum(q, 0) @ low.swapaxes(2, 3)) * sm_scale


def _stored_rows(q: Array, blocks: CompressedBlocks, sm_scale: float, over_rows: Callable[[Array], Array]) -> Array:
    """The anchor's logit joined with those of the residual rows, ``[B, H, M, N]``."""
    every = Selected(blocks, None)
    logits = (q @ every.per_head("anchor_k", q.dtype).swapaxes(2, 3)).swapaxes(2, 3)[..., None] * sm_scale
    if blocks.num_residuals:
        logits = mx.concatenate([logits, residual_logits(q, blocks, every, sm_scale)], axis=-1)  # [B, H, N, M, 1 + R]
    return over_rows(logits).swapaxes(2, 3)
