"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from dkv.config import sampled_queries, selection_width

from .decode import WORKSPACE_BYTES, State, capped, distinct, empty_state, softmax_weights, softmax_with_sink
from .merge import rounded

Array = Any
SCORED_QUERIES = 256  # per head, in one product
SCORED_NUMBERS = 8 << 20  # logits of one product


def select_key_blocks(
    q: Array,
    k: Array,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    sm_scale: float,
    stride: int,
    ratio: float,
    mass: float,
) -> Array:
    """Key blocks of every query block, ``[B, Hkv, ceil(Sq / prefill_block), W]`` int32, ascending, -1 where unused."""
    batch, heads_kv, keys = k.shape[:3]
    length, count = q.shape[2], -(-keys // block_size)
    if batch == 0 or length == 0 or keys == 0:
        width = selection_width(count, block_size, prefill_block, top_k, prefill_window, ratio)
        return mx.full((batch, heads_kv, -(-length // prefill_block), width), -1, dtype=mx.int32)
    scores = sampled_scores(q, k, block_size, prefill_block, stride, sm_scale)
    share = block_shares(scores, length, prefill_block, stride)
    return choose_blocks(share, keys, length, block_size, prefill_block, top_k, prefill_window, ratio, mass)


def sampled_scores(q: Array, k: Array, block_size: int, prefill_block: int, stride: int, sm_scale: float) -> Array:
    """Log of the mass of every key block for the sampled queries, ``[B, Hkv, G, M, N]``; -inf where none is visible."""
    batch, heads, length, dim = q.shape
    heads_kv, keys = k.shape[1:3]
    count = -(-keys // block_size)
    places = sampled_queries(length, prefill_block, stride)
    rows = mx.take(q, mx.array(places), axis=2).astype(mx.float32) * sm_scale
    rows = rows.reshape(batch, heads_kv, -1, len(places), dim)
    step = max(1, SCORED_NUMBERS // (batch * heads * min(len(places), SCORED_QUERIES) * block_size)) * block_size
    scores = []
    for low in range(0, len(places), SCORED_QUERIES):
        part = rows[:, :, :, low : low + SCORED_QUERIES]
        position = mx.array(places[low : low + SCORED_QUERIES])[:, None] + keys - length
        reach = places[low : low + SCORED_QUERIES][-1] + keys - length + 1  # no key beyond the last query
        found = [
            _tile_scores(part, k[:, :, start : start + step], position - start, block_size)
            for start in range(0, min(keys, reach), step)
        ]
        unseen = count - sum(tile.shape[-1] for tile in found)
        scores.append(mx.concatenate([*found, mx.full((*part.shape[:4], unseen), -mx.inf)], axis=-1))
    return mx.concatenate(scores, axis=3)


def _tile_scores(q: Array, k: Array, position: Array, block_size: int) -> Array:
    """Log of the sum of exponentials of each block of a tile of keys, ``[B, Hkv, G, m, blocks]``."""
    batch, heads_kv, group, rows, dim = q.shape
    logits = q.reshape(batch, heads_kv, group * rows, dim) @ k.astype(mx.float32).swapaxes(2, 3)
    logits = logits.reshape(batch, heads_kv, group, rows, -1)
    logits = mx.where(mx.arange(k.shape[2]) <= position, logits, -mx.inf)
    logits = mx.pad(logits, [(0, 0)] * 4 + [(0, -k.shape[2] % block_size)], constant_values=-mx.inf)
    logits = logits.reshape(batch, heads_kv, group, rows, -1, block_size)
    peak = logits.max(-1)
    peak = mx.where(peak == -mx.inf, 0.0, peak)
    return mx.log(mx.exp(logits - peak[..., None]).sum(-1)) + peak


def block_shares(scores: Array, length: int, prefill_block: int, stride: int) -> Array:
    """Mean share of the attention of a query block's sampled queries that each key block has, ``[B, Hkv, n, N]``."""
    share = softmax_weights(mx.where(mx.isnan(scores), -mx.inf, scores), (4,))[0].mean(2)  # [B, Hkv, M, N]
    per, whole = -(-prefill_block // stride), -(-length // prefill_block) - 1  # only the last query block has fewer
    first, last = share[:, :, : per * whole], share[:, :, per * whole :]
    first = first.reshape(*first.shape[:2], whole, per, first.shape[3]).mean(3)
    return mx.concatenate([first, last.mean(2, keepdims=True)], axis=2)


def choose_blocks(
    share: Array,
    keys: int,
    length: int,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    ratio: float,
    mass: float,
) -> Array:
    """The first block, the window's, and the best others by ``share [B, Hkv, n, N]``; as ``select_key_blocks``."""
    query_blocks, count = share.shape[2:]
    width = selection_width(count, block_size, prefill_block, top_k, prefill_window, ratio)
    firsts = [block * prefill_block + keys - length for block in range(query_blocks)]
    seen = [max(0, min(first + prefill_block - 1, keys - 1) // block_size + 1) for first in firsts]
    limit = [min(top_k, math.ceil(ratio * visible)) for visible in seen]  # in Python's float64
    slots, visible = mx.arange(count), mx.array(seen)[:, None]
    candidate = slots < visible
    near = (slots + 1) * block_size > mx.array(firsts)[:, None] - prefill_window
    pinned = candidate & (near | (slots == 0))
    mandatory = pinned.sum(-1, keepdims=True)
    room = mx.maximum(mandatory, mx.array(limit)[:, None])  # pinned blocks are never dropped
    key = mx.where(pinned, mx.inf, mx.where(candidate, share, -1.0))
    order = mx.argsort(-key, axis=-1).astype(mx.int32)[..., :width]
    rank = mx.arange(width)
    usable = (order < visible) & (rank < room)
    if mass < 1:
        share = mx.where(candidate & (slots > 0), share, 0.0)  # the first block takes what a head has no use for
        before = mx.cumsum(mx.take_along_axis(share, order, axis=-1), axis=-1, inclusive=False)
        usable &= (before < mass * share.sum(-1, keepdims=True)) | (rank < mandatory)
    chosen = mx.sort(mx.where(usable, order, count), axis=-1)
    return mx.where(chosen < count, chosen, -1)


def _padded(x: Array, size: int) -> Array:
    """``[..., L, D]`` with zero rows at its end, cut ``[..., ceil(L / size), size, D]``."""
    missing = -x.shape[-2] % size
    x = mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


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
    return rounded(out, q.dtype), lse
