"""The kernel of decode attention: selected blocks and exact rows, a share of them in each program."""

from __future__ import annotations

import triton
import triton.language as tl

from dkv.types import RESIDUAL_GROUP

from ._dots import device, dot, dot_rows, max_of, min_of, rounded, sum_of
from ._rows import (
    NONE,
    SHRINK,
    capped,
    coded_logits,
    is_kept,
    load_codes,
    load_columns,
    load_vector,
    lowrank_logits,
    plain_logits,
    rank_queries,
    softmax_step,
    softmax_step_one,
)

GROUP = tl.constexpr(RESIDUAL_GROUP)


@device
def _lowrank_rows(
    peak, total, acc, q, start, alive, q_column, sm_scale, anchor, anchor_v, place, head, u, u_scale, u_unit,
    basis_k, basis_k_scale, basis_v, basis_v_scale, v_gain, positions, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, KEPT: tl.constexpr, KEPTS: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Join the rows of a block that are no residuals, the anchor first among them."""
    SCALED: tl.constexpr = u_scale is not None
    unit = tl.load(u_unit + place)
    mass = tl.full([BLOCK_M], 0, tl.float32)
    if RANK:
        ranked = rank_queries(
            q, start, alive, q_column, sm_scale, basis_k + head * (RANK * DIM),
            basis_k_scale if basis_k_scale is None else basis_k_scale + place * RANK, unit,
            DIM, WIDTH, RANK, RANKS, DOT,
        )  # fmt: skip
        sums = tl.full([BLOCK_M, RANKS], 0, tl.float32)
    for first in range(0, BLOCK_SIZE, TILE):
        rows = first + tl.arange(0, TILE)
        live = rows < BLOCK_SIZE
        if KEPT:
            live = live & (is_kept(rows, positions + place * KEPT, KEPT, KEPTS) == 0)
        if RANK:
            logits, factors, step = lowrank_logits(
                ranked, anchor, u + place * (BLOCK_SIZE * RANK),
                u_scale if u_scale is None else u_scale + place * BLOCK_SIZE, rows, live, RANK, RANKS, DOT,
            )  # fmt: skip
        else:
            logits = tl.broadcast_to(anchor[:, None], [BLOCK_M, TILE])
        logits = tl.where(live[None, :], capped(logits, softcap, SOFTCAP), NONE)
        peak, total, keep, weight = softmax_step(peak, total, logits, SHRINK)
        acc *= keep[:, None]
        mass = mass * keep + sum_of(weight, 1)
        if RANK:
            sums = sums * keep[:, None] + dot(weight * step[None, :], factors, DOT)
    acc += mass[:, None] * anchor_v[None, :]
    if RANK:
        rank = tl.arange(0, RANKS)
        gain = unit / tl.load(v_gain + place)
        if SCALED:
            sums *= tl.load(basis_v_scale + place * RANK + rank, mask=rank < RANK, other=0.0)[None, :]
        acc += dot_rows(sums * gain, basis_v + head * (RANK * DIM_V), RANK, DIM_V, WIDTH_V, DOT)
    return peak, total, acc


@device
def _coded_rows(
    peak, total, acc, q, start, alive, q_column, order, sm_scale, anchor, head, residual_k, k_scale, k_min, k_unit,
    residual_v, v_scale, v_min, v_unit, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, KEPT: tl.constexpr,
    K_BITS: tl.constexpr, K_PLANES: tl.constexpr, K_VECTOR: tl.constexpr, K_BYTES: tl.constexpr, V_BITS: tl.constexpr,
    V_PLANES: tl.constexpr, V_VECTOR: tl.constexpr, V_BYTES: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Join the coded residual rows of a block; ``q`` is in the stored order of its keys."""
    GROUPS: tl.constexpr = (KEPT + GROUP - 1) // GROUP
    unit, unit_v = tl.load(k_unit + head), tl.load(v_unit + head)
    for first in range(0, KEPT, TILE):
        rows = first + tl.arange(0, TILE)
        live = rows < KEPT
        group = head * GROUPS + first // GROUP
        logits = anchor[:, None] + coded_logits(
            q, start, alive, q_column, order, sm_scale, residual_k + head * (KEPT * K_BYTES), rows, live,
            k_scale + group * DIM, k_min + group * DIM, unit, DIM, WIDTH, K_BITS, K_PLANES, K_VECTOR, K_BYTES, DOT,
        )  # fmt: skip
        logits = tl.where(live[None, :], capped(logits, softcap, SOFTCAP), NONE)
        peak, total, keep, weight = softmax_step(peak, total, logits, SHRINK)
        low = load_vector(v_min + group * DIM_V, True, DIM_V, WIDTH_V) * unit_v
        acc = acc * keep[:, None] + sum_of(weight, 1)[:, None] * low[None, :]
        if V_PLANES:
            step = load_vector(v_scale + group * DIM_V, True, DIM_V, WIDTH_V) * unit_v
            codes = load_codes(
                residual_v + head * (KEPT * V_BYTES), rows, live, 0,
                DIM_V, WIDTH_V, V_BITS, V_PLANES, V_VECTOR, V_BYTES,
            )  # fmt: skip
            acc += dot(weight, codes, DOT) * step[None, :]
    return peak, total, acc


@device
def _plain_rows(
    peak, total, acc, q, start, alive, q_column, sm_scale, first, stop, earliest, latest,
    k, k_row, k_column, v, v_row, v_column, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, TILE: tl.constexpr,
    BOUNDED: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Join a tile of rows from ``first``, below ``stop`` and, where ``BOUNDED``, within ``earliest .. latest [M]``."""
    rows = first + tl.arange(0, TILE)
    seen = (rows < stop)[None, :]
    live = rows < stop
    if BOUNDED:
        seen = seen & (rows[None, :] <= latest[:, None]) & (rows[None, :] >= earliest[:, None])
        live = max_of(seen.to(tl.int32), 0) > 0
    wide = rows.to(tl.int64)
    logits = plain_logits(q, start, alive, q_column, sm_scale, k + wide * k_row, live, k_column, DIM, WIDTH, DOT)
    logits = tl.where(seen, capped(logits, softcap, SOFTCAP), NONE)
    peak, total, keep, weight = softmax_step(peak, total, logits, SHRINK)
    values = load_columns(v + wide * v_row, live, v_column, None, 0, DIM_V, WIDTH_V)
    return peak, total, acc * keep[:, None] + dot(weight, values, DOT)


@triton.jit(do_not_specialize=("batch", "slot_splits", "slots", "width", "num_blocks", "keys", "window", "window_rows"))
def attend(
    q, q_batch, q_head, q_row, q_column, out, lse, batch, length, slot_splits, slots,
    block_indices, width, num_blocks, block_counts,
    anchor_k, anchor_v, u, u_scale, u_unit, basis_k, basis_k_scale, basis_v, basis_v_scale, v_gain,
    positions, residual_k, k_scale, k_min, k_unit, k_order, residual_v, v_scale, v_min, v_unit,
    k_window, k_batch, k_head, k_row, k_column, v_window, v_batch, v_head, v_row, v_column,
    seq_lens, sink, keys, window, window_rows, sm_scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    WINDOW_DOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS_WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, KEPT: tl.constexpr, KEPTS: tl.constexpr, K_BITS: tl.constexpr, K_PLANES: tl.constexpr,
    K_VECTOR: tl.constexpr, K_BYTES: tl.constexpr, V_BITS: tl.constexpr, V_PLANES: tl.constexpr,
    V_VECTOR: tl.constexpr, V_BYTES: tl.constexpr, LOWRANK: tl.constexpr, RESIDUAL: tl.constexpr, EVERY: tl.constexpr,
    CODED: tl.constexpr, BLOCKS: tl.constexpr, ROWS_DOT: tl.constexpr, FACTORS_DOT: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # of the queries of a kv head, [G * Sq]
    alive = row < GROUP_SIZE * length
    query_head = head * GROUP_SIZE + row // length
    index = row % length
    start = q + sequence * q_batch + query_head * q_head + index.to(tl.int64) * q_row
    query = load_columns(start, alive, q_column, None, 0, DIM, WIDTH) * sm_scale

    peak = tl.full([BLOCK_M], NONE, tl.float32)
    total = tl.full([BLOCK_M], 0, tl.float32)
    acc = tl.full([BLOCK_M, WIDTH_V], 0, tl.float32)
    if split < slot_splits:
        if BLOCKS:
            others = tl.arange(0, SLOTS_WIDTH)
            chosen = block_indices + (sequence * HEADS + head) * width
            every = tl.load(chosen + others, mask=others < width, other=-1)
            count = num_blocks
            if block_counts is not None:
                count = tl.minimum(tl.load(block_counts + sequence).to(tl.int32), num_blocks)
            for slot in range(split * slots, tl.minimum(split * slots + slots, width)):
                block = tl.load(chosen + slot)  # int64 may hold what int32 would wrap
                again = sum_of(((every == block) & (others < slot)).to(tl.int32), 0)
                if (block >= 0) & (block < count) & (again == 0):
                    place = sequence * num_blocks + block
                    here = place * HEADS + head
                    anchor = tl.full([BLOCK_M], 0, tl.float32)
                    if LOWRANK or CODED:
                        anchor = sum_of(query * load_vector(anchor_k + here * DIM, True, DIM, WIDTH)[None, :], 1)
                    if LOWRANK:
                        value = load_vector(anchor_v + here * DIM_V, True, DIM_V, WIDTH_V)
                        if EVERY:
                            logit = capped(anchor, softcap, SOFTCAP)
                            peak, total, keep, weight = softmax_step_one(peak, total, logit, SHRINK)
                            acc = acc * keep[:, None] + weight[:, None] * value[None, :]
                        else:
                            peak, total, acc = _lowrank_rows(
                                peak, total, acc, query, start, alive, q_column, sm_scale, anchor, value, place,
                                here, u, u_scale, u_unit, basis_k, basis_k_scale, basis_v, basis_v_scale, v_gain,
                                positions, softcap,
                                DIM, DIM_V, WIDTH, WIDTH_V, BLOCK_SIZE, RANK, RANKS, KEPT, KEPTS, BLOCK_M, TILE,
                                SOFTCAP, FACTORS_DOT,
                            )  # fmt: skip
                    if RESIDUAL and CODED:
                        order = k_order if k_order is None else k_order + here * DIM
                        ordered = query
                        if order is not None:
                            ordered = load_columns(start, alive, q_column, order, 0, DIM, WIDTH) * sm_scale
                        peak, total, acc = _coded_rows(
                            peak, total, acc, ordered, start, alive, q_column, order, sm_scale, anchor, here,
                            residual_k, k_scale, k_min, k_unit,
                            residual_v, v_scale, v_min, v_unit, softcap,
                            DIM, DIM_V, WIDTH, WIDTH_V, KEPT, K_BITS, K_PLANES, K_VECTOR, K_BYTES,
                            V_BITS, V_PLANES, V_VECTOR, V_BYTES, TILE, SOFTCAP, ROWS_DOT,
                        )  # fmt: skip
                    if RESIDUAL and not CODED:
                        for first in range(0, KEPT, TILE):
                            peak, total, acc = _plain_rows(
                                peak, total, acc, query, start, alive, q_column, sm_scale, first, KEPT, row, row,
                                residual_k + here * (KEPT * DIM), DIM, 1, residual_v + here * (KEPT * DIM_V), DIM_V, 1,
                                softcap, DIM, DIM_V, WIDTH, WIDTH_V, TILE, False, SOFTCAP, ROWS_DOT,
                            )  # fmt: skip
    else:
        first_row = (split - slot_splits) * window_rows
        end = tl.full([], 0, tl.int32) + keys
        if seq_lens is not None:
            end = tl.load(seq_lens + sequence).to(tl.int32)
        position = end - length + index
        latest = end - 1 + tl.full([BLOCK_M], 0, tl.int32)
        if CAUSAL:
            latest = tl.minimum(position, latest)
        earliest = tl.full([BLOCK_M], 0, tl.int32) + first_row  # a tile may begin before
        if WINDOWED:
            earliest = tl.maximum(position - window + 1, earliest)
        stop = tl.minimum(max_of(tl.where(alive, latest, -1), 0) + 1, tl.minimum(first_row + window_rows, keys))
        begin = tl.maximum(min_of(tl.where(alive, earliest, end), 0), first_row)
        if k_window is not None:
            keys_here = k_window + sequence * k_batch + head * k_head
            values_here = v_window + sequence * v_batch + head * v_head
            for first in range(begin // TILE * TILE, stop, TILE):
                peak, total, acc = _plain_rows(
                    peak, total, acc, query, start, alive, q_column, sm_scale, first, stop, earliest, latest,
                    keys_here, k_row, k_column, values_here, v_row, v_column, softcap,
                    DIM, DIM_V, WIDTH, WIDTH_V, TILE, True, SOFTCAP, WINDOW_DOT,
                )  # fmt: skip
        if sink is not None:
            extra = tl.load(sink + query_head, mask=alive, other=NONE).to(tl.float32)
            extra = tl.where(split == slot_splits, extra, NONE)  # joins once
            peak, total, keep, _ = softmax_step_one(peak, total, extra, SHRINK)
            acc *= keep[:, None]

    place = ((split.to(tl.int64) * batch + sequence) * (HEADS * GROUP_SIZE) + query_head) * length + index
    column = tl.arange(0, WIDTH_V)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    inside = alive[:, None] & (column < DIM_V)[None, :]
    tl.store(out + place[:, None] * DIM_V + column[None, :], rounded(acc, out.dtype.element_ty), mask=inside)
    base = tl.where(peak == NONE, 0.0, peak)
    mass = tl.where(total == 0, 1.0, total / SHRINK)
    tl.store(lse + place, tl.where(total == 0, NONE, base + tl.log(mass)), mask=alive)
