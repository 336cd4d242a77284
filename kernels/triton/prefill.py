"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkv.config import selection_width

from ._dots import device, max_of, rounded, sum_of
from ._launch import INTERPRETED, dot_dtype, launch, power_of_two
from ._rows import NONE, SHRINK, capped, softmax_step
from ._sample import block_shares, choose_blocks, sampled_scores


class PrefillConfig(NamedTuple):
    """Tiles of queries and keys of one program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def config(rows: int, keys: int, width: int, wide: bool) -> PrefillConfig:
    """``rows`` queries of a block over at most ``keys``, heads of up to ``width`` channels; ``wide`` in float32."""
    most, longest = (256, 256) if INTERPRETED else (64, 32) if wide else (128, 64 if width <= 128 else 32)
    tile = min(most, power_of_two(rows, 16))
    return PrefillConfig(tile, min(longest, power_of_two(keys, 16)), 8 if tile * width >= 8192 or wide else 4, 2)


@device
def _reach(block, queries, keys, PREFILL: tl.constexpr, SIZE: tl.constexpr):
    """Position of a query block's first query and how many key blocks its queries can see."""
    first = block * PREFILL + keys - queries
    last = tl.minimum(first + PREFILL, keys) - 1
    return first, last, tl.where(last < 0, 0, tl.maximum(last, 0) // SIZE + 1)


@triton.jit
def _distinct_kernel(
    indices,  # [B, Hkv, n, W], ascending
    lists,
    used,
    query_blocks,
    width,
    queries,
    keys,
    PREFILL: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each index that names a block the queries can see, once and close together, and how many there are."""
    problem = tl.program_id(0).to(tl.int64)
    _, _, count = _reach((problem % query_blocks).to(tl.int32), queries, keys, PREFILL, SIZE)
    found = tl.full([], 0, tl.int64)
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        at = indices + problem * width + place
        one = tl.load(at, mask=place < width, other=-1)
        before = tl.load(at - 1, mask=(place > 0) & (place < width), other=-1)
        kept = ((one >= 0) & (one < count) & (one != before)).to(tl.int32)
        rank = found + tl.cumsum(kept, axis=0) - kept
        tl.store(lists + problem * width + rank, one.to(tl.int32), mask=kept > 0)
        found += sum_of(kept, axis=0)
    tl.store(used + problem, found)


@triton.jit
def _attend_kernel(
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hkv, Sk, D]
    v,  # [B, Hkv, Sk, Dv]
    sink,  # [Hq] or None
    lists,  # [B, Hkv, n, W]
    used,  # [B, Hkv, n]
    out,  # [B, Hq, Sq, Dv]
    lse,  # [B, Hq, Sq]
    queries,
    keys,
    query_blocks,
    width,
    sm_scale,
    softcap,
    q_b,
    q_h,
    q_s,
    q_d,
    k_b,
    k_h,
    k_s,
    k_d,
    v_b,
    v_h,
    v_s,
    v_d,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PREFILL: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Rows are the queries of a block, one head after another; its key blocks are walked as one run of keys."""
    TILES: tl.constexpr = (GROUP * PREFILL + ROWS - 1) // ROWS
    # keeps small weights off float16's subnormal numbers, and sums of large values finite
    UNIT: tl.constexpr = 16384.0 if tl.float16 == DOT else SHRINK
    which = tl.program_id(1).to(tl.int64)
    batch, head_kv = which // HEADS_KV, which % HEADS_KV
    block = query_blocks - 1 - tl.program_id(0) // TILES  # late blocks have most to do
    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    query, head = block * PREFILL + row % PREFILL, head_kv * GROUP + row // PREFILL
    live = (row // PREFILL < GROUP) & (query < queries)
    position = query + keys - queries
    last = max_of(tl.where(live, position, -1), axis=0)

    column, column_v = tl.arange(0, WIDTH).to(tl.int64), tl.arange(0, WIDTH_V).to(tl.int64)
    at = batch * q_b + head * q_h + query.to(tl.int64) * q_s
    rows = tl.load(q + at[:, None] + (column * q_d)[None, :], mask=live[:, None] & (column < DIM)[None, :], other=0.0)
    if tl.float32 == DOT:
        rows = rows.to(tl.float32)
    k_base = k + batch * k_b + head_kv * k_h
    v_base = v + batch * v_b + head_kv * v_h

    peak, total = tl.full([ROWS], NONE, tl.float32), tl.full([ROWS], 0.0, tl.float32)
    if sink is not None:
        peak = tl.load(sink + head, mask=live, other=NONE).to(tl.float32)
        total = tl.where(peak == NONE, 0.0, 1.0)
    sums = tl.full([ROWS, WIDTH_V], 0.0, tl.float32)
    chosen = lists + (which * query_blocks + block) * width
    count = tl.load(used + which * query_blocks + block) * SIZE
    for start in range(0, count, KEYS):
        lane = start + tl.arange(0, KEYS)
        if SIZE % KEYS == 0:
            key = tl.load(chosen + start // SIZE) * SIZE + lane % SIZE
            inside = key <= last
        else:
            key = tl.load(chosen + lane // SIZE, mask=lane < count, other=0) * SIZE + lane % SIZE
            inside = (lane < count) & (key <= last)
        wide = key.to(tl.int64)
        keys_t = tl.load(
            k_base + (wide * k_s)[None, :] + (column * k_d)[:, None],
            mask=inside[None, :] & (column < DIM)[:, None],
            other=0.0,
        )
        if tl.float32 == DOT:
            logits = tl.dot(rows, keys_t.to(tl.float32), input_precision="ieee") * sm_scale
        else:
            logits = tl.dot(rows, keys_t) * sm_scale
        logits = capped(logits, softcap, SOFTCAP)
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        peak, total, keep, weight = softmax_step(peak, total, tl.where(seen, logits, NONE))
        values = tl.load(
            v_base + (wide * v_s)[:, None] + (column_v * v_d)[None, :],
            mask=inside[:, None] & (column_v < DIM_V)[None, :],
            other=0.0,
        )
        sums = sums * keep[:, None]
        if tl.float32 == DOT:
            sums = tl.dot(weight * UNIT, values.to(tl.float32), sums, input_precision="ieee")
        else:  # weights go in as two numbers, so that their rounding stays near float32's
            weight = weight * UNIT
            high = weight.to(DOT)
            sums = tl.dot((weight - high.to(tl.float32)).to(DOT), values, tl.dot(high, values, sums))
    empty = total == 0
    result = sums / tl.where(empty, 1.0, total * UNIT)[:, None]
    place = (batch * (HEADS_KV * GROUP) + head) * queries + query
    tl.store(lse + place, tl.where(empty, NONE, peak + tl.log(tl.where(empty, 1.0, total))), mask=live)
    tl.store(
        out + place[:, None] * DIM_V + column_v[None, :],
        rounded(result, out.dtype.element_ty),
        mask=live[:, None] & (column_v < DIM_V)[None, :],
    )


def select_key_blocks(
    q: Tensor,
    k: Tensor,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    sm_scale: float,
    stride: int,
    ratio: float,
    mass: float,
) -> Tensor:
    """Key blocks of every query block, ``[B, Hkv, ceil(Sq / prefill_block), W]`` int32, ascending, -1 where unused."""
    keys, length = k.shape[2], q.shape[2]
    if q.shape[0] == 0 or length == 0 or keys == 0:
        width = selection_width(-(-keys // block_size), block_size, prefill_block, top_k, prefill_window, ratio)
        size = (q.shape[0], k.shape[1], -(-length // prefill_block), width)
        return torch.full(size, -1, dtype=torch.int32, device=q.device)
    scores = sampled_scores(q, k, block_size, prefill_block, stride, sm_scale, keys - length, 0)
    share = block_shares(scores, length, prefill_block, stride)
    return choose_blocks(share, keys, length, block_size, prefill_block, top_k, prefill_window, ratio, mass)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    prefill_block: int,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Each query block attends its key blocks, causally, bottom-right aligned."""
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[3]
    query_blocks, width = block_indices.shape[2:]
    if batch == 0 or length == 0 or keys == 0 or width == 0:
        lse = torch.full((batch, heads, length), -torch.inf, device=q.device)
        if sink is not None:
            lse = sink.float().view(1, -1, 1).expand_as(lse).clone()
        return q.new_zeros(batch, heads, length, dim_v), lse
    group, lists = heads // heads_kv, block_indices.sort(dim=3).values.contiguous()  # sorting keeps a layout
    used = torch.empty(batch, heads_kv, query_blocks, dtype=torch.int32, device=q.device)
    distinct = torch.empty(lists.shape, dtype=torch.int32, device=q.device)
    launch(
        _distinct_kernel,
        (used.numel(),),
        lists,
        distinct,
        used,
        query_blocks,
        width,
        length,
        keys,
        PREFILL=prefill_block,
        SIZE=block_size,
        TILE=min(256, power_of_two(width)),
        num_warps=1,
        num_stages=1,
    )
    out = torch.empty(batch, heads, length, dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    width_k, width_v = power_of_two(dim, 16), power_of_two(dim_v, 16)
    multiplied = dot_dtype(q, k, v)
    tiles = config(group * prefill_block, block_size * width, max(width_k, width_v), multiplied == tl.float32)
    launch(
        _attend_kernel,
        (triton.cdiv(group * prefill_block, tiles.rows) * query_blocks, batch * heads_kv),
        q,
        k,
        v,
        None if sink is None else sink.contiguous(),
        distinct,
        used,
        out,
        lse,
        length,
        keys,
        query_blocks,
        width,
        sm_scale,
        1.0 if softcap is None else softcap,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        HEADS_KV=heads_kv,
        GROUP=group,
        PREFILL=prefill_block,
        SIZE=block_size,
        DIM=dim,
        WIDTH=width_k,
        DIM_V=dim_v,
        WIDTH_V=width_v,
        SOFTCAP=softcap is not None,
        DOT=multiplied,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out, lse
