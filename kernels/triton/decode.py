"""Attention over compressed blocks and over exact rows, without rebuilding K or V.

One kernel does all of a decode: a program takes some rows of queries of one kv head and one share of what they attend,
either some slots of ``block_indices`` or a stretch of the recency window. The shares are merged in a second launch. How
the work is cut follows from one sequence's shapes alone, so a result does not depend on what else is in the batch.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkv.types import RESIDUAL_GROUP, CompressedBlocks

from ._launch import INTERPRETED, dot_dtype, launch, power_of_two
from ._rows import (
    NONE,
    capped,
    code_queries,
    device,
    dot,
    is_kept,
    key_codes,
    load_codes,
    load_columns,
    load_ordered,
    load_u,
    load_vector,
    max_of,
    min_of,
    rank_queries,
    rounded,
    softmax_step,
    softmax_step_one,
    sum_of,
    value_codes,
)
from .merge import merge_parts

GROUP = tl.constexpr(RESIDUAL_GROUP)
SPLIT_ROWS = 256  # rows that a program attends at least, where there are as many
MOST_SPLITS = 32  # of the slots, and of the window


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a call is cut into programs.

    Attributes
    ----------
    block_m : int
        Rows of queries of a program.
    tile : int
        Rows that it attends at a time; divides a scale group.
    slots : int
        Slots of ``block_indices`` of a split.
    slot_splits : int
    window_rows : int
        Rows of the window of a split.
    window_splits : int
    num_warps, num_stages : int
    """

    block_m: int
    tile: int
    slots: int
    slot_splits: int
    window_rows: int
    window_splits: int
    num_warps: int
    num_stages: int

    @property
    def splits(self) -> int:
        return self.slot_splits + self.window_splits


def tiling(rows: int, head_dim: int, head_dim_v: int, block_size: int, width: int, window: int) -> Tiling:
    """Cut ``rows`` of queries of one kv head over ``width`` slots and ``window`` exact rows.

    There is a split of the window without rows where nothing else is attended, so that every call has a state.
    """
    dim = power_of_two(max(head_dim, head_dim_v), 16)
    block_m = min(power_of_two(rows, 16), 32 if dim > 128 else 64)
    slots = max(1, SPLIT_ROWS // max(block_size, 1), -(-width // MOST_SPLITS))
    tiles = -(-rows // block_m)
    window_rows = max(SPLIT_ROWS, 64 * -(-window * tiles // (64 * MOST_SPLITS)))
    slot_splits, window_splits = -(-width // slots), -(-window // window_rows)
    if slot_splits + window_splits == 0:
        window_splits = 1
    longest = max(min(slots * block_size, block_size) if width else 0, min(window, window_rows))
    tile = min(power_of_two(longest, 16), RESIDUAL_GROUP if INTERPRETED else 32 if dim > 64 else 64)
    num_warps = 8 if block_m * dim > 2048 else 4
    return Tiling(block_m, tile, slots, slot_splits, window_rows, window_splits, num_warps, 2)


def workspace_size(
    q: Tensor, blocks: CompressedBlocks, block_indices: Tensor, k_window: Tensor | None, sink: Tensor | None = None
) -> int:
    """Float32 numbers of workspace that :func:`decode_attention` fills; 0 where one program sees all of a row."""
    splits = _tiling(q, blocks, block_indices, k_window, blocks.head_dim_v, sink).splits
    return _numbers(q, blocks.head_dim_v, splits)


def lowrank_attention(
    q: Tensor, blocks: CompressedBlocks, block_indices: Tensor, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Anchors and non-residual rows of the selected blocks, scored and summed in the rank space."""
    return _attention(q, blocks, block_indices, None, None, sm_scale=sm_scale, softcap=softcap, residual=False)


def residual_attention(
    q: Tensor, blocks: CompressedBlocks, block_indices: Tensor, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The stored residual rows of the selected blocks."""
    return _attention(q, blocks, block_indices, None, None, sm_scale=sm_scale, softcap=softcap, lowrank=False)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    seq_lens: Tensor | None,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Dense rows; bottom-right causal inside ``seq_lens``."""
    return _attention(
        q, None, None, k, v, seq_lens=seq_lens, window=window, softcap=softcap, sink=sink, sm_scale=sm_scale,
        causal=causal,
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    k_window: Tensor | None,
    v_window: Tensor | None,
    block_indices: Tensor,
    seq_lens: Tensor | None,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
    *,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Low-rank, residual and window parts in one launch, and their merge in another.

    Parameters
    ----------
    q : Tensor [B, Hq, Sq, D]
    blocks : CompressedBlocks
    k_window, v_window : Tensor [B, Hkv, Sw, D or Dv], optional
    block_indices : Tensor [B, Hkv, W]
    seq_lens : Tensor [B], optional
    window : int, optional
    softcap : float, optional
    sink : Tensor [Hq], optional
    sm_scale : float
    workspace : Tensor [numbers], float32, optional
        Holds the partial states, at least :func:`workspace_size` numbers; whatever it holds before is not read.
        Allocated where None.

    Returns
    -------
    ``out [B, Hq, Sq, Dv]`` in q's dtype and ``lse [B, Hq, Sq]`` float32.

    Raises
    ------
    ValueError
        When the workspace is too small, not contiguous, of another dtype or on another device.
    """
    return _attention(
        q, blocks, block_indices, k_window, v_window, seq_lens=seq_lens, window=window, softcap=softcap, sink=sink,
        sm_scale=sm_scale, workspace=workspace,
    )  # fmt: skip


def _tiling(
    q: Tensor,
    blocks: CompressedBlocks | None,
    block_indices: Tensor | None,
    k: Tensor | None,
    head_dim_v: int,
    sink: Tensor | None,
) -> Tiling:
    heads = blocks.num_kv_heads if blocks is not None else k.shape[1]
    rows = q.shape[1] // heads * q.shape[2]
    width = block_indices.shape[2] if blocks is not None and blocks.num_blocks else 0
    block_size = blocks.block_size if blocks is not None else 1
    keys = 0 if k is None else k.shape[2]
    return tiling(rows, q.shape[3], head_dim_v, block_size, width, max(keys, int(sink is not None)))


def _numbers(q: Tensor, head_dim_v: int, splits: int) -> int:
    return 0 if splits == 1 else splits * q.shape[0] * q.shape[1] * q.shape[2] * (head_dim_v + 1)


def _workspace(workspace: Tensor | None, q: Tensor, size: int) -> Tensor:
    if workspace is None:
        return torch.empty(size, dtype=torch.float32, device=q.device)
    if workspace.dtype != torch.float32:
        raise ValueError(f"workspace must be float32, got {workspace.dtype}")
    if workspace.device != q.device or not workspace.is_contiguous():
        raise ValueError(f"workspace must be contiguous on {q.device}, got strides {workspace.stride()} on "
                         f"{workspace.device}")  # fmt: skip
    if workspace.numel() < size:
        raise ValueError(f"workspace must hold {size} numbers, got {workspace.numel()}")
    return workspace.view(-1)[:size]


def _attention(
    q: Tensor,
    blocks: CompressedBlocks | None,
    block_indices: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    *,
    sm_scale: float,
    seq_lens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    causal: bool = True,
    lowrank: bool = True,
    residual: bool = True,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = q.shape
    dim_v = blocks.head_dim_v if blocks is not None else v.shape[3]
    plan = _tiling(q, blocks, block_indices, k, dim_v, sink)
    size = _numbers(q, dim_v, plan.splits)
    if plan.splits > 1 or workspace is not None:
        workspace = _workspace(workspace, q, size)
    shape = batch, heads, length
    if plan.splits == 1:
        out = torch.empty(*shape, dim_v, dtype=q.dtype, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        edge = size // (dim_v + 1) * dim_v
        out = workspace[:edge].view(plan.splits, *shape, dim_v)
        lse = workspace[edge:].view(plan.splits, *shape)
    keys = 0 if k is None else k.shape[2]
    heads_kv = blocks.num_kv_heads if blocks is not None else k.shape[1]
    rows = heads // heads_kv * length
    grid = (batch * heads_kv, -(-rows // plan.block_m), plan.splits)
    options = {
        "DIM": dim, "DIM_V": dim_v, "WIDTH": power_of_two(dim, 16), "WIDTH_V": power_of_two(dim_v, 16),
        "HEADS": heads_kv, "GROUP_SIZE": heads // heads_kv, "SLOTS": plan.slots, "WINDOW_ROWS": plan.window_rows,
        "BLOCK_M": plan.block_m, "TILE": plan.tile, "SOFTCAP": softcap is not None, "CAUSAL": causal,
        "WINDOWED": window is not None, "WINDOW_DOT": tl.float32 if keys == 0 else dot_dtype(k, v),
    }  # fmt: skip
    parts, formats = _block_arguments(blocks, block_indices if plan.slot_splits else None, lowrank, residual)
    none = (0, 0, 0, 0)
    launch(
        *(_attend, grid, q, *q.stride(), out, lse, batch, length, plan.slot_splits, *parts),
        *(k if keys else None, *(k.stride() if keys else none)),
        *(v if keys else None, *(v.stride() if keys else none)),
        *(seq_lens, sink, keys, window or 0, sm_scale, softcap or 1.0),
        **options, **formats, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    return (out, lse) if plan.splits == 1 else merge_parts(out, lse, q.dtype)


_PARTS = (
    "anchor_k", "anchor_v", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "basis_v", "basis_v_scale", "v_gain",
    "residual_indices", "residual_k", "residual_k_scale", "residual_k_min", "residual_k_unit", "residual_k_order",
    "residual_v", "residual_v_scale", "residual_v_min", "residual_v_unit",
)  # fmt: skip


def _block_arguments(
    blocks: CompressedBlocks | None, block_indices: Tensor | None, lowrank: bool, residual: bool
) -> tuple[list, dict]:
    """The kernel's arguments from the indices to the parts, and its constants of the format."""
    if blocks is None or block_indices is None:
        names = ("RANK", "RANKS", "KEPT", "KEPTS", "K_BITS", "K_PLANES", "K_VECTOR", "K_BYTES", "V_BITS", "V_PLANES")
        formats = dict.fromkeys((*names, "V_VECTOR", "V_BYTES", "SLOTS_WIDTH", "BLOCK_SIZE"), 0)
        formats |= dict.fromkeys(("LOWRANK", "RESIDUAL", "EVERY", "CODED", "BLOCKS"), False)
        return [None, 0, 0, None, *[None] * len(_PARTS)], formats | {
            "ROWS_DOT": tl.float32, "FACTORS_DOT": tl.float32
        }  # fmt: skip
    fmt = blocks.format
    parts = {name: None if part is None else part.contiguous() for name, part in blocks.parts()}
    keys, values = key_codes(blocks), value_codes(blocks)
    rows_dot = dot_dtype(blocks.anchor_k, blocks.anchor_v)
    floats = blocks.u.is_floating_point()
    factors_dot = dot_dtype(blocks.anchor_k, blocks.anchor_v, blocks.u) if floats else rows_dot
    width = block_indices.shape[2]
    formats = {
        "BLOCK_SIZE": blocks.block_size, "SLOTS_WIDTH": power_of_two(width, 16),
        "RANK": blocks.rank, "RANKS": power_of_two(blocks.rank, 16) if blocks.rank else 0,
        "KEPT": blocks.num_residuals, "KEPTS": power_of_two(blocks.num_residuals, 16),
        "K_BITS": keys.bits, "K_PLANES": keys.planes, "K_VECTOR": keys.vector, "K_BYTES": keys.row_bytes,
        "V_BITS": values.bits, "V_PLANES": values.planes, "V_VECTOR": values.vector, "V_BYTES": values.row_bytes,
        "LOWRANK": lowrank, "RESIDUAL": residual and blocks.num_residuals > 0, "EVERY": fmt.keeps_every_row,
        "CODED": not fmt.exact_rows, "BLOCKS": True, "ROWS_DOT": rows_dot, "FACTORS_DOT": factors_dot,
    }  # fmt: skip
    arguments = [block_indices.contiguous(), width, blocks.num_blocks, blocks.block_counts]
    arguments += [parts.get(name) for name in _PARTS]
    return arguments, formats


@device
def _lowrank_rows(
    peak, total, acc, q, anchor, anchor_v, place, head, u, u_scale, u_unit, basis_k, basis_k_scale, basis_v,
    basis_v_scale, v_gain, positions, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, KEPT: tl.constexpr, KEPTS: tl.constexpr, BLOCK_M: tl.constexpr,
    TILE: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Join the rows of a block that are no residuals, the anchor first among them."""
    SCALED: tl.constexpr = u_scale is not None
    unit = tl.load(u_unit + place)
    mass = tl.full([BLOCK_M], 0, tl.float32)
    if RANK:
        query = rank_queries(
            q, basis_k + head * (RANK * DIM), basis_k_scale if basis_k_scale is None else basis_k_scale + place * RANK,
            unit, DIM, WIDTH, RANK, RANKS, SCALED, DOT,
        )  # fmt: skip
        sums = tl.full([BLOCK_M, RANKS], 0, tl.float32)
    for first in range(0, BLOCK_SIZE, TILE):
        rows = first + tl.arange(0, TILE)
        live = rows < BLOCK_SIZE
        if KEPT:
            live = live & (is_kept(rows, positions + place * KEPT, KEPT, KEPTS) == 0)
        logits = tl.broadcast_to(anchor[:, None], [BLOCK_M, TILE])
        if RANK:
            factors = load_u(u + place * (BLOCK_SIZE * RANK), rows, live, RANK, RANKS)
            products = dot(query, tl.trans(factors), DOT)
            if SCALED:
                step = tl.load(u_scale + place * BLOCK_SIZE + rows, mask=live, other=0.0).to(tl.float32)
                products *= step[None, :]
            logits += products
        logits = tl.where(live[None, :], capped(logits, softcap, SOFTCAP), NONE)
        peak, total, keep, weight = softmax_step(peak, total, logits)
        acc *= keep[:, None]
        mass = mass * keep + sum_of(weight, 1)
        if RANK:
            if SCALED:
                weight *= step[None, :]
            sums = sums * keep[:, None] + dot(weight, factors, DOT)
    acc += mass[:, None] * anchor_v[None, :]
    if RANK:
        rank, column = tl.arange(0, RANKS), tl.arange(0, WIDTH_V)
        gain = unit / tl.load(v_gain + place)
        if SCALED:
            sums *= tl.load(basis_v_scale + place * RANK + rank, mask=rank < RANK, other=0.0)[None, :]
        inside = (rank < RANK)[:, None] & (column < DIM_V)[None, :]
        basis = tl.load(basis_v + head * (RANK * DIM_V) + rank[:, None] * DIM_V + column[None, :], mask=inside, other=0)
        acc += dot(sums * gain, basis, DOT)
    return peak, total, acc


@device
def _coded_rows(
    peak, total, acc, q, anchor, head, residual_k, k_scale, k_min, k_unit, residual_v, v_scale, v_min, v_unit,
    softcap,
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
        query, constant = code_queries(q, k_scale + group * DIM, k_min + group * DIM, unit, DIM, WIDTH)
        logits = tl.broadcast_to((anchor + constant)[:, None], [q.shape[0], TILE])
        if K_PLANES:
            codes = load_codes(
                residual_k + head * (KEPT * K_BYTES), rows, live,
                DIM, WIDTH, K_BITS, K_PLANES, K_VECTOR, K_BYTES,
            )  # fmt: skip
            logits += dot(query, tl.trans(codes), DOT)
        logits = tl.where(live[None, :], capped(logits, softcap, SOFTCAP), NONE)
        peak, total, keep, weight = softmax_step(peak, total, logits)
        low = load_vector(v_min + group * DIM_V, True, DIM_V, WIDTH_V) * unit_v
        acc = acc * keep[:, None] + sum_of(weight, 1)[:, None] * low[None, :]
        if V_PLANES:
            step = load_vector(v_scale + group * DIM_V, True, DIM_V, WIDTH_V) * unit_v
            codes = load_codes(
                residual_v + head * (KEPT * V_BYTES), rows, live,
                DIM_V, WIDTH_V, V_BITS, V_PLANES, V_VECTOR, V_BYTES,
            )  # fmt: skip
            acc += dot(weight, codes, DOT) * step[None, :]
    return peak, total, acc


@device
def _plain_rows(
    peak, total, acc, q, first, stop, earliest, latest, k, k_row, k_column, v, v_row, v_column, softcap,
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
    keys = load_columns(k + wide * k_row, live, k_column, DIM, WIDTH)
    logits = tl.where(seen, capped(dot(q, tl.trans(keys), DOT), softcap, SOFTCAP), NONE)
    peak, total, keep, weight = softmax_step(peak, total, logits)
    values = load_columns(v + wide * v_row, live, v_column, DIM_V, WIDTH_V)
    return peak, total, acc * keep[:, None] + dot(weight, values, DOT)


@triton.jit
def _attend(
    q, q_batch, q_head, q_row, q_column, out, lse, batch, length, slot_splits,
    block_indices, width, num_blocks, block_counts,
    anchor_k, anchor_v, u, u_scale, u_unit, basis_k, basis_k_scale, basis_v, basis_v_scale, v_gain,
    positions, residual_k, k_scale, k_min, k_unit, k_order, residual_v, v_scale, v_min, v_unit,
    k_window, k_batch, k_head, k_row, k_column, v_window, v_batch, v_head, v_row, v_column,
    seq_lens, sink, keys, window, sm_scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, SLOTS: tl.constexpr, WINDOW_ROWS: tl.constexpr,
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
    query = load_columns(start, alive, q_column, DIM, WIDTH) * sm_scale

    peak = tl.full([BLOCK_M], NONE, tl.float32)
    total = tl.full([BLOCK_M], 0, tl.float32)
    acc = tl.full([BLOCK_M, WIDTH_V], 0, tl.float32)
    if split < slot_splits:
        if BLOCKS:
            slots = tl.arange(0, SLOTS_WIDTH)
            chosen = block_indices + (sequence * HEADS + head) * width
            every = tl.load(chosen + slots, mask=slots < width, other=-1).to(tl.int32)
            count = num_blocks
            if block_counts is not None:
                count = tl.minimum(tl.load(block_counts + sequence).to(tl.int32), num_blocks)
            for slot in range(split * SLOTS, tl.minimum(split * SLOTS + SLOTS, width)):
                block = tl.load(chosen + slot).to(tl.int32)
                again = sum_of(((every == block) & (slots < slot)).to(tl.int32), 0)
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
                            peak, total, keep, weight = softmax_step_one(peak, total, logit)
                            acc = acc * keep[:, None] + weight[:, None] * value[None, :]
                        else:
                            peak, total, acc = _lowrank_rows(
                                peak, total, acc, query, anchor, value, place, here, u, u_scale, u_unit, basis_k,
                                basis_k_scale, basis_v, basis_v_scale, v_gain, positions, softcap,
                                DIM, DIM_V, WIDTH, WIDTH_V, BLOCK_SIZE, RANK, RANKS, KEPT, KEPTS, BLOCK_M, TILE,
                                SOFTCAP, FACTORS_DOT,
                            )  # fmt: skip
                    if RESIDUAL and CODED:
                        ordered = query
                        if k_order is not None:
                            ordered = load_ordered(start, alive, q_column, k_order + here * DIM, DIM, WIDTH) * sm_scale
                        peak, total, acc = _coded_rows(
                            peak, total, acc, ordered, anchor, here, residual_k, k_scale, k_min, k_unit,
                            residual_v, v_scale, v_min, v_unit, softcap,
                            DIM, DIM_V, WIDTH, WIDTH_V, KEPT, K_BITS, K_PLANES, K_VECTOR, K_BYTES,
                            V_BITS, V_PLANES, V_VECTOR, V_BYTES, TILE, SOFTCAP, ROWS_DOT,
                        )  # fmt: skip
                    if RESIDUAL and not CODED:
                        for first in range(0, KEPT, TILE):
                            peak, total, acc = _plain_rows(
                                peak, total, acc, query, first, KEPT, row, row,
                                residual_k + here * (KEPT * DIM), DIM, 1, residual_v + here * (KEPT * DIM_V), DIM_V, 1,
                                softcap, DIM, DIM_V, WIDTH, WIDTH_V, TILE, False, SOFTCAP, ROWS_DOT,
                            )  # fmt: skip
    else:
        first_row = (split - slot_splits) * WINDOW_ROWS
        end = tl.full([], 0, tl.int32) + keys
        if seq_lens is not None:
            end = tl.load(seq_lens + sequence).to(tl.int32)
        position = end - length + index
        latest = end - 1 + tl.full([BLOCK_M], 0, tl.int32)
        if CAUSAL:
            latest = tl.minimum(position, latest)
        earliest = tl.full([BLOCK_M], 0, tl.int32)
        if WINDOWED:
            earliest = tl.maximum(position - window + 1, earliest)
        stop = tl.minimum(max_of(tl.where(alive, latest, -1), 0) + 1, first_row + WINDOW_ROWS)
        begin = tl.maximum(min_of(tl.where(alive, earliest, end), 0), first_row)
        if k_window is not None:
            keys_here = k_window + sequence * k_batch + head * k_head
            values_here = v_window + sequence * v_batch + head * v_head
            for first in range(begin // TILE * TILE, stop, TILE):
                peak, total, acc = _plain_rows(
                    peak, total, acc, query, first, stop, earliest, latest,
                    keys_here, k_row, k_column, values_here, v_row, v_column, softcap,
                    DIM, DIM_V, WIDTH, WIDTH_V, TILE, True, SOFTCAP, WINDOW_DOT,
                )  # fmt: skip
        if sink is not None:
            extra = tl.load(sink + query_head, mask=alive, other=NONE).to(tl.float32)
            extra = tl.where(split == slot_splits, extra, NONE)  # joins once
            peak, total, keep, _ = softmax_step_one(peak, total, extra)
            acc *= keep[:, None]

    place = ((split.to(tl.int64) * batch + sequence) * (HEADS * GROUP_SIZE) + query_head) * length + index
    column = tl.arange(0, WIDTH_V)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    inside = alive[:, None] & (column < DIM_V)[None, :]
    tl.store(out + place[:, None] * DIM_V + column[None, :], rounded(acc, out.dtype.element_ty), mask=inside)
    base = tl.where(peak == NONE, 0.0, peak)
    tl.store(lse + place, tl.where(total == 0, NONE, base + tl.log(tl.where(total == 0, 1.0, total))), mask=alive)
