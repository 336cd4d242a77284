"""Attention over compressed blocks and over exact rows, without rebuilding K or V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dkv.types import RESIDUAL_GROUP, CompressedBlocks

from ._storage import Selected, group_count, unpack
from .merge import merge_states, rounded

Array = Any
State = tuple[Array, Array]
HEADROOM = 256.0  # what a value is added up from may be larger than the value, and than float32 holds
STRETCH = 512  # numbers that are summed one by one
WORKSPACE_BYTES = 64 << 20  # logits and decoded codes held at one time; more selected blocks are taken in pieces


def grouped_queries(q: Array, num_kv_heads: int) -> Array:
    """``[B, Hq, Sq, D] -> [B, Hkv, G * Sq, D]`` in float32."""
    batch, heads, length, dim = q.shape
    return q.astype(mx.float32).reshape(batch, num_kv_heads, heads // num_kv_heads * length, dim)


def capped(logits: Array, softcap: float | None) -> Array:
    return logits if softcap is None else softcap * mx.tanh(logits / softcap)


def softmax_weights(logits: Array, axes: tuple[int, ...]) -> State:
    """Normalised weights over ``axes`` and their lse; an all -inf row gives zero weights and lse -inf."""
    peak = logits.max(axes, keepdims=True)
    safe_peak = mx.where(peak == -mx.inf, 0.0, peak)
    weight = mx.exp(logits - safe_peak)
    total = _total(weight, axes)
    lse = mx.where(peak == -mx.inf, -mx.inf, safe_peak + mx.log(total))
    return weight / mx.where(total == 0, 1.0, total), lse.squeeze(axes)


def _total(weight: Array, axes: tuple[int, ...]) -> Array:
    """Sums over ``axes`` that are kept; of a long last axis stretch by stretch, as a CPU adds one number at a time."""
    length = weight.shape[-1] // STRETCH * STRETCH
    if axes != (-1,) or length == 0:
        return weight.sum(axes, keepdims=True)
    stretches = weight[..., :length].reshape(*weight.shape[:-1], -1, STRETCH).sum(-1)
    return stretches.sum(-1, keepdims=True) + weight[..., length:].sum(-1, keepdims=True)


def softmax_with_sink(logits: Array, sink: Array | None) -> State:
    """Weights over the last axis and their lse; ``sink``, which broadcasts to ``[..., 1]``, joins the denominator."""
    if sink is None:
        return softmax_weights(logits, (-1,))
    extra = mx.broadcast_to(sink.astype(mx.float32), (*logits.shape[:-1], 1))
    weight, lse = softmax_weights(mx.concatenate([logits, extra], axis=-1), (-1,))
    return weight[..., :-1], lse


def empty_state(q: Array, dim_v: int, sink: Array | None) -> State:
    """State of ``q [B, Hq, Sq, D]`` over no rows."""
    lse = mx.full(q.shape[:3], -mx.inf)
    if sink is not None:
        lse = mx.broadcast_to(sink.astype(mx.float32).reshape(1, -1, 1), lse.shape)
    return mx.zeros((*q.shape[:3], dim_v), dtype=q.dtype), lse


def lowrank_attention(
    q: Array, blocks: CompressedBlocks, block_indices: Array, sm_scale: float, softcap: float | None
) -> State:
    """Anchors and non-residual rows of the selected blocks, scored and summed in the rank space."""
    return _over_pieces(_lowrank_piece, q, blocks, block_indices, sm_scale, softcap)


def residual_attention(
    q: Array, blocks: CompressedBlocks, block_indices: Array, sm_scale: float, softcap: float | None
) -> State:
    """The stored residual rows of the selected blocks."""
    if blocks.num_residuals == 0:
        return empty_state(q, blocks.head_dim_v, None)
    return _over_pieces(_residual_piece, q, blocks, block_indices, sm_scale, softcap)


def _over_pieces(
    piece: Callable[..., State],
    q: Array,
    blocks: CompressedBlocks,
    block_indices: Array,
    sm_scale: float,
    softcap: float | None,
) -> State:
    grouped = grouped_queries(q, blocks.num_kv_heads)
    batch, heads, rows, _ = grouped.shape
    width = block_indices.shape[2]
    if width == 0 or blocks.num_blocks == 0 or grouped.size == 0:
        return empty_state(q, blocks.head_dim_v, None)
    block_indices = distinct_slots(block_indices, blocks)
    per_block = 4 * batch * heads * blocks.block_size * (2 * rows + blocks.head_dim + blocks.head_dim_v)
    step = max(1, WORKSPACE_BYTES // per_block)
    states = [
        piece(grouped, blocks, Selected(blocks, block_indices[:, :, i : i + step]), sm_scale, softcap)
        for i in range(0, width, step)
    ]
    out, lse = states[0] if len(states) == 1 else merge_states([s[0] for s in states], [s[1] for s in states])
    return rounded(out.reshape(*q.shape[:3], out.shape[-1]), q.dtype), lse.reshape(q.shape[:3])


def distinct_slots(block_indices: Array, blocks: CompressedBlocks) -> Array:
    """Indices as a set: ascending, with -1 for repeats and for what names no valid block."""
    counts = blocks.block_counts
    return distinct(block_indices, blocks.num_blocks if counts is None else counts.reshape(-1, 1, 1))


def distinct(indices: Array, limit: int | Array) -> Array:
    """Indices along the last axis as a set, int32: ascending, -1 for repeats and for what is not below ``limit``."""
    order = mx.sort(mx.where((indices >= limit) | (indices < 0), -1, indices).astype(mx.int32), axis=-1)
    repeated = mx.concatenate([mx.zeros((*order.shape[:-1], 1), dtype=mx.bool_), order[..., 1:] == order[..., :-1]], -1)
    return mx.where(repeated, -1, order)


def rank_queries(q: Array, blocks: CompressedBlocks, chosen: Selected) -> Array:
    """Queries in each block's rank space, ``[B, H, W, M, r]``."""
    query = q[:, :, None] @ chosen.per_head("basis_k", q.dtype).swapaxes(3, 4)
    return query if blocks.basis_k_scale is None else query * chosen.shared("basis_k_scale", q.dtype)[..., None, :]


def u_row_scale(blocks: CompressedBlocks, chosen: Selected, dtype: Any) -> Array:
    """What multiplies the stored rows of ``u``, ``[B, H, W, S or 1]``."""
    unit = chosen.shared("u_unit", dtype)[..., None]
    return unit if blocks.u_scale is None else unit * chosen.shared("u_scale", dtype)


def residual_mask(blocks: CompressedBlocks, chosen: Selected) -> Array:
    """True at the positions of residual rows, ``[B, H or 1, W, S]``."""
    positions = mx.arange(blocks.block_size)
    if blocks.residual_indices is None:
        return mx.broadcast_to(positions > 0, (*chosen.valid.shape, blocks.block_size))
    where = chosen.shared("residual_indices", mx.int32)  # 0 in unused slots
    mask = mx.zeros((*where.shape[:3], blocks.block_size), dtype=mx.bool_)
    if where.size:
        mask = mx.put_along_axis(mask, where, mx.array(True), axis=3)
    return mask & (positions > 0)


def _lowrank_piece(
    q: Array, blocks: CompressedBlocks, chosen: Selected, sm_scale: float, softcap: float | None
) -> State:
    dtype = q.dtype
    # [B, H, W, M]
    anchor = (q @ chosen.per_head("anchor_k", dtype).swapaxes(2, 3)).swapaxes(2, 3) * sm_scale
    anchor_v = chosen.per_head("anchor_v", dtype)  # [B, H, W, Dv]
    if blocks.format.keeps_every_row:
        logits = mx.where(chosen.valid[..., None], capped(anchor, softcap), -mx.inf).swapaxes(2, 3)
        weight, lse = softmax_weights(logits, (3,))
        return weight @ anchor_v, lse
    u, row_scale = chosen.shared("u", dtype), u_row_scale(blocks, chosen, dtype)[..., None, :]
    query = rank_queries(q, blocks, chosen) * sm_scale
    logits = capped((query @ u.swapaxes(3, 4)) * row_scale + anchor[..., None], softcap)  # [B, H, W, M, S]
    hidden = residual_mask(blocks, chosen) | ~chosen.valid[..., None]
    weight, lse = softmax_weights(mx.where(hidden[..., None, :], -mx.inf, logits), (2, 4))
    rank_space = (weight * (row_scale / HEADROOM)) @ u  # [B, H, W, M, r]
    if blocks.basis_v_scale is not None:
        rank_space = rank_space * chosen.shared("basis_v_scale", dtype)[..., None, :]
    gain = chosen.shared("v_gain", dtype)[..., None, None]
    rank_space = rank_space / mx.where(gain > 0, gain, 1.0)
    out = (rank_space @ chosen.per_head("basis_v", dtype)).sum(2)
    return (out + (weight.sum(-1) / HEADROOM).swapaxes(2, 3) @ anchor_v) * HEADROOM, lse


def residual_logits(q: Array, blocks: CompressedBlocks, chosen: Selected, sm_scale: float) -> Array:
    """Scaled logits of the residual rows, ``[B, H, W, M, R]``, codes scored without decoding the rows."""
    dtype, fmt, kept = q.dtype, blocks.format, blocks.num_residuals
    q = q * sm_scale
    if fmt.exact_rows:
        return q[:, :, None] @ chosen.per_head("residual_k", dtype).swapaxes(3, 4)
    anchor = (q @ chosen.per_head("anchor_k", dtype).swapaxes(2, 3)).swapaxes(2, 3)  # [B, H, W, M]
    query = q[:, :, None]  # [B, H, W or 1, M, D], channels in stored order
    if fmt.orders_channels:
        order = chosen.per_head("residual_k_order", mx.int32)[..., None, :]
        query = mx.take_along_axis(query, order, axis=4)
    query = query * chosen.per_head("residual_k_unit", dtype)[..., None, None]  # what it scales may be out of range
    low, scale = chosen.per_head("residual_k_min", dtype), chosen.per_head("residual_k_scale", dtype)  # [B, H, W, Q, D]
    constant = query @ low.swapaxes(3, 4) + anchor[..., None]  # [B, H, W, M, Q]
    codes = unpack(chosen.per_head("residual_k"), fmt.key_segments(q.shape[-1]))  # [B, H, W, R, D]
    scores = []
    for group in range(group_count(kept)):
        rows = codes[..., group * RESIDUAL_GROUP : (group + 1) * RESIDUAL_GROUP, :].astype(dtype)
        scored = (query * scale[..., group : group + 1, :]) @ rows.swapaxes(3, 4)
        scores.append(scored + constant[..., group : group + 1])
    return mx.concatenate(scores, axis=-1)


def _residual_piece(
    q: Array, blocks: CompressedBlocks, chosen: Selected, sm_scale: float, softcap: float | None
) -> State:
    dtype, kept, fmt = q.dtype, blocks.num_residuals, blocks.format
    logits = capped(residual_logits(q, blocks, chosen, sm_scale), softcap)
    weight, lse = softmax_weights(mx.where(chosen.valid[..., None, None], logits, -mx.inf), (2, 4))
    if fmt.exact_rows:
        return (weight @ chosen.per_head("residual_v", dtype)).sum(2), lse
    unit = chosen.per_head("residual_v_unit", dtype)[..., None, None] / HEADROOM
    low = chosen.per_head("residual_v_min", dtype) * unit  # [B, H, W, Q, Dv]
    scale = chosen.per_head("residual_v_scale", dtype) * unit
    codes = unpack(chosen.per_head("residual_v"), fmt.value_segments(blocks.head_dim_v))  # [B, H, W, R, Dv]
    out = mx.zeros((*q.shape[:3], blocks.head_dim_v))
    for group in range(group_count(kept)):
        rows = slice(group * RESIDUAL_GROUP, (group + 1) * RESIDUAL_GROUP)
        part = weight[..., rows]
        coded = (part @ codes[..., rows, :].astype(dtype)) * scale[..., group : group + 1, :]
        out = out + (coded + part.sum(-1, keepdims=True) * low[..., group : group + 1, :]).sum(2)
    return out * HEADROOM, lse


def exact_attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    seq_lens: Array | None,
    window: int | None,
    softcap: float | None,
    sink: Array | None,
    sm_scale: float,
) -> State:
    """Dense rows; bottom-right causal inside ``seq_lens``."""
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads // heads_kv
    if keys == 0 or batch == 0 or length == 0:
        return empty_state(q, dim_v, sink)
    ends = mx.full((batch, 1), keys, dtype=mx.int32)
    if seq_lens is not None:
        ends = seq_lens.astype(mx.int32)[:, None]
    slots = mx.arange(keys)
    k, v = k.astype(mx.float32), v.astype(mx.float32)
    if seq_lens is not None or window is not None:  # rows that no query sees may hold NaN
        first = ends - length - window + 1 if window is not None else mx.zeros_like(ends)
        read = (slots < ends) & (slots >= first)
        v = mx.where(read[:, None, :, None], v, 0.0)
    step = max(1, WORKSPACE_BYTES // (8 * batch * heads * keys))
    outs, lses = [], []
    for start in range(0, length, step):
        part = q[:, :, start : start + step].astype(mx.float32).reshape(batch, heads_kv, -1, dim)
        logits = capped((part @ k.swapaxes(2, 3)) * sm_scale, softcap).reshape(batch, heads_kv, group, -1, keys)
        position = ends - length + mx.arange(start, min(start + step, length))  # [B, s]
        seen = (slots < ends)[:, None]  # [B, 1 or s, Sk]
        if causal:
            seen = seen & (slots <= position[..., None])
        if window is not None:
            seen = seen & (slots > position[..., None] - window)
        logits = mx.where(seen[:, None, None], logits, -mx.inf)
        weight, lse = softmax_with_sink(logits, None if sink is None else sink.reshape(heads_kv, group, 1, 1))
        out = weight.reshape(batch, heads_kv, -1, keys) @ v
        outs.append(out.reshape(batch, heads, -1, dim_v))
        lses.append(lse.reshape(batch, heads, -1))
    return rounded(mx.concatenate(outs, axis=2), q.dtype), mx.concatenate(lses, axis=2)


def decode_attention(
    q: Array,
    blocks: CompressedBlocks,
    k_window: Array | None,
    v_window: Array | None,
    block_indices: Array,
    seq_lens: Array | None,
    window: int | None,
    softcap: float | None,
    sink: Array | None,
    sm_scale: float,
) -> State:
    """Low-rank, residual and window parts, merged."""
    wide = q.astype(mx.float32)  # partial outputs stay wide until the merge
    if k_window is None or v_window is None:
        states = [empty_state(wide, blocks.head_dim_v, sink)]
    else:
        states = [exact_attention(wide, k_window, v_window, True, seq_lens, window, softcap, sink, sm_scale)]
    if blocks.num_blocks and block_indices.shape[2]:
        states.append(lowrank_attention(wide, blocks, block_indices, sm_scale, softcap))
        if blocks.num_residuals:
            states.append(residual_attention(wide, blocks, block_indices, sm_scale, softcap))
    out, lse = merge_states([s[0] for s in states], [s[1] for s in states])
    return rounded(out, q.dtype), lse
