"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .decode import WORKSPACE_BYTES, State, capped, distinct, empty_state, softmax_weights, softmax_with_sink
from .merge import saturated

Array = Any
KEY_SUB_BLOCK = 32
QUERY_SUB_BLOCK = 16


def _padded(x: Array, size: int) -> Array:
    """``[..., L, D]`` with zero rows at its end, cut ``[..., ceil(L / size), size, D]``."""
    missing = -x.shape[-2] % size
    x = mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _sub_means(x: Array, block: int, size: int) -> Array:
    """Means of ``size`` rows of each block, ``[B, H, L, D] -> [B, H, ceil(L / block), ceil(block / size), D]``.

    The last of a block goes over what is left; a block that ends early repeats its last mean.
    """
    length = x.shape[2]
    x = _padded(_padded(x.astype(mx.float32), block), size)  # [B, H, N, t, size, D]
    count, parts = x.shape[2:4]
    left = mx.minimum(length - mx.arange(count) * block, block)[:, None] - mx.arange(parts) * size  # [N, t]
    means = x.sum(-2) / mx.clip(left, 1, size)[..., None]
    last = mx.minimum(mx.arange(parts), mx.maximum((left > 0).sum(1, keepdims=True) - 1, 0))  # [N, t]
    return mx.take_along_axis(means, last[None, None, :, :, None], axis=3)


def select_key_blocks(
    q: Array, k: Array, block_size: int, prefill_block: int, top_k: int, prefill_window: int, sm_scale: float
) -> Array:
    """Key blocks of every query block, ``[B, Hkv, ceil(Sq / prefill_block), W]`` int32, ascending, -1 where unused."""
    batch, heads, length, dim = q.shape
    heads_kv, keys = k.shape[1:3]
    group = heads // heads_kv
    count, query_blocks = -(-keys // block_size), -(-length // prefill_block)
    # room for top_k, or for the first block and every block that a window and a query block can touch
    width = min(count, max(top_k, 2 + (prefill_window + prefill_block + block_size - 2) // block_size))
    if batch == 0 or length == 0 or keys == 0:
        return mx.full((batch, heads_kv, query_blocks, width), -1, dtype=mx.int32)
    starts = mx.arange(query_blocks) * prefill_block + keys - length
    ends = mx.minimum(starts + prefill_block - 1, keys - 1)  # last visible key of each query block
    key_means = _sub_means(k, block_size, KEY_SUB_BLOCK)  # [B, Hkv, N, s, D]
    widest = key_means.shape[3]
    key_means = key_means.reshape(batch, heads_kv, count * widest, dim)
    stops = mx.minimum(mx.arange(1, widest + 1) * KEY_SUB_BLOCK, block_size) + mx.arange(count)[:, None] * block_size
    query_means = _sub_means(q, prefill_block, QUERY_SUB_BLOCK)  # [B, Hq, n, t, D]
    score = []
    for index in range(query_blocks):
        rows = -(-min(prefill_block, length - index * prefill_block) // QUERY_SUB_BLOCK)
        means = query_means[:, :, index, :rows].reshape(batch, heads_kv, group * rows, dim)
        logits = means @ key_means.swapaxes(2, 3) * sm_scale
        logits = logits.reshape(batch, heads_kv, group * rows, count, widest)
        # a sub-block that reaches beyond the last query would let later keys decide
        best = mx.where(stops <= ends[index] + 1, logits, -mx.inf).max(-1)
        score.append(softmax_weights(mx.where(mx.isnan(best), -mx.inf, best), (3,))[0].mean(2))
    scores = mx.stack(score, axis=2)  # [B, Hkv, n, N]
    slots = mx.arange(count)
    candidate = slots * block_size <= ends[:, None]
    near = (slots + 1) * block_size > (starts - prefill_window)[:, None]
    pinned = candidate & (near | (slots == 0))
    room = mx.maximum(pinned.sum(-1, keepdims=True), top_k)  # pinned blocks are never dropped
    key = mx.where(pinned, mx.inf, mx.where(candidate, scores, -1.0))
    order = mx.argsort(-key, axis=-1).astype(mx.int32)[..., :width]
    usable = (order * block_size <= ends[:, None]) & (mx.arange(width) < room)
    chosen = mx.sort(mx.where(usable, order, count), axis=-1)
    return mx.where(chosen < count, chosen, -1)


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    block_indices: Array,
    block_size: int,
    prefill_block: int,
    softcap: float | None,
    sink: Array | None,
    sm_scale: float,
) -> State:
    """Each query block attends its key blocks, causally, bottom-right aligned."""
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[-1]
    group = heads // heads_kv
    query_blocks, width = block_indices.shape[2:]
    if batch == 0 or length == 0 or keys == 0 or width == 0:
        return empty_state(q, dim_v, sink)
    blocks = -(-keys // block_size)
    block_indices = distinct(block_indices, blocks)
    # [B, Hkv, n, G * s, D]
    grouped = _padded(q.astype(mx.float32), prefill_block).reshape(batch, heads_kv, group, -1, prefill_block, dim)
    grouped = grouped.swapaxes(2, 3).reshape(batch, heads_kv, query_blocks, -1, dim)
    k = _padded(k, block_size).reshape(-1, block_size, dim)  # [B * Hkv * N, S, D]
    v = _padded(v, block_size).reshape(-1, block_size, dim_v)
    first_block = (mx.arange(batch * heads_kv) * blocks).reshape(batch, heads_kv, 1, 1)
    per_block = 4 * batch * heads_kv * width * block_size * (2 * group * prefill_block + dim + dim_v)
    step = max(1, WORKSPACE_BYTES // per_block)
    outs, lses = [], []
    for i in range(0, query_blocks, step):
        chosen = block_indices[:, :, i : i + step]  # [B, Hkv, n, W]
        shape = (*chosen.shape[:3], width * block_size)
        place = first_block + mx.maximum(chosen, 0)
        part_k = mx.take(k, place, axis=0).astype(mx.float32).reshape(*shape, dim)
        part_v = mx.take(v, place, axis=0).astype(mx.float32).reshape(*shape, dim_v)
        logits = capped(grouped[:, :, i : i + step] @ part_k.swapaxes(3, 4) * sm_scale, softcap)
        logits = logits.reshape(*shape[:3], group, prefill_block, shape[3])
        position = mx.arange(i * prefill_block, (i + chosen.shape[2]) * prefill_block) + keys - length
        position = position.reshape(1, 1, -1, 1, prefill_block, 1)
        slot = (chosen[..., None] * block_size + mx.arange(block_size)).reshape(shape)
        used = mx.repeat(chosen >= 0, block_size, axis=3) & (slot < keys)
        seen = used[:, :, :, None, None] & (slot[:, :, :, None, None] <= position)
        part_v = mx.where(used[..., None], part_v, 0.0)  # unused slots point at a block that was not selected
        weight, lse = softmax_with_sink(
            mx.where(seen, logits, -mx.inf), None if sink is None else sink.reshape(heads_kv, 1, group, 1, 1)
        )
        out = weight.reshape(*shape[:3], -1, shape[3]) @ part_v
        outs.append(out.reshape(*shape[:3], group, prefill_block, dim_v))
        lses.append(lse)
    # [B, Hkv, n, G, s, Dv] -> [B, Hq, Sq, Dv]
    out = mx.concatenate(outs, axis=2).swapaxes(2, 3).reshape(batch, heads, -1, dim_v)[:, :, :length]
    lse = mx.concatenate(lses, axis=2).swapaxes(2, 3).reshape(batch, heads, -1)[:, :, :length]
    return saturated(out, q.dtype), lse
