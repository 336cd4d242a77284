"""Attention over compressed blocks and over exact rows, without rebuilding K or V.

One kernel does all of a decode: a program takes some rows of queries of one kv head and one share of what they attend,
either some slots of ``block_indices`` or a stretch of the recency window. The shares are merged in a second launch. How
the work is cut follows from one sequence's shapes alone, so a result does not depend on what else is in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dkv.types import RESIDUAL_GROUP, CompressedBlocks

from ._attend import attend
from ._launch import INTERPRETED, MOST_REGISTERS, dot_dtype, launch, power_of_two
from ._rows import key_codes, value_codes
from .merge import merge_parts

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
    maxnreg : int, optional
        Registers of a thread, where the assembler would rather spill than use them.
    """

    block_m: int
    tile: int
    slots: int
    slot_splits: int
    window_rows: int
    window_splits: int
    num_warps: int
    num_stages: int
    maxnreg: int | None

    @property
    def splits(self) -> int:
        return self.slot_splits + self.window_splits


def tiling(
    rows: int, head_dim: int, head_dim_v: int, block_size: int, rank: int, width: int, window: int, wide: bool,
    uneven: bool,
) -> Tiling:  # fmt: skip
    """Cut ``rows`` of queries of one kv head over ``width`` slots and ``window`` exact rows.

    ``rank`` is that of rows which are attended, 0 where all are residuals; ``wide`` where numbers are multiplied in
    float32, ``uneven`` where the channels of keys have several widths. Where nothing
    else is attended there is a split of the window without rows, so that every call has a state.
    """
    dim = power_of_two(max(head_dim, head_dim_v), 16)
    most = 16 if wide else max(16, (2048 if rank else 4096) // max(dim, power_of_two(rank)))
    block_m = min(power_of_two(rows, 16), most, 64)
    slots = max(1, SPLIT_ROWS // max(block_size, 1), -(-width // MOST_SPLITS))
    tiles = -(-rows // block_m)
    window_rows = max(SPLIT_ROWS, 64 * -(-window * tiles // (64 * MOST_SPLITS)))
    slot_splits, window_splits = -(-width // slots), -(-window // window_rows)
    if slot_splits + window_splits == 0:
        window_splits = 1
    longest = max(block_size if width else 0, min(window, window_rows))
    large = wide or rank > 64 or block_m * dim > 2048
    tile = min(power_of_two(longest, 16), RESIDUAL_GROUP if INTERPRETED else 16 if large else 32)
    held = block_m * max(dim, 2 * power_of_two(rank))
    heavy = wide or held > 2048 or (held == 2048 and (rank > 0 or uneven))
    num_stages = 1 if dim > 128 or wide else 2
    maxnreg = MOST_REGISTERS if dim > 128 or wide else None
    return Tiling(
        block_m, tile, slots, slot_splits, window_rows, window_splits, 8 if heavy else 4, num_stages, maxnreg
    )


def workspace_size(
    q: Tensor,
    blocks: CompressedBlocks,
    block_indices: Tensor,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    sink: Tensor | None = None,
) -> int:
    """Float32 numbers of workspace that :func:`decode_attention` fills; 0 where one program sees all of a row."""
    splits = _tiling(q, blocks, block_indices, k_window, v_window, sink).splits
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
    block_indices: Any,
    k: Any,
    v: Any,
    sink: Tensor | None,
) -> Tiling:
    dim_v = blocks.head_dim_v if blocks is not None else v.shape[3]
    heads = blocks.num_kv_heads if blocks is not None else k.shape[1]
    rows = q.shape[1] // heads * q.shape[2]
    width = block_indices.shape[2] if blocks is not None and blocks.num_blocks else 0
    block_size = blocks.block_size if blocks is not None else 1
    rank = 0 if blocks is None or blocks.format.keeps_every_row else blocks.rank
    keys = 0 if k is None else k.shape[2]
    rows_dot, factors_dot, window_dot = _dots(blocks, k, v)
    wide = tl.float32 in (rows_dot, window_dot, factors_dot if rank else rows_dot)
    uneven = blocks is not None and blocks.format.orders_channels
    return tiling(rows, q.shape[3], dim_v, block_size, rank, width, max(keys, int(sink is not None)), wide, uneven)


def _dots(blocks: CompressedBlocks | None, k: Any, v: Any) -> list[tl.dtype]:
    """What multiplies stored rows, factors and rows of the window."""
    rows = factors = dot_dtype() if blocks is None else dot_dtype(blocks.anchor_k, blocks.anchor_v)
    if blocks is not None and blocks.u.is_floating_point():
        factors = dot_dtype(blocks.anchor_k, blocks.anchor_v, blocks.u)
    return [rows, factors, dot_dtype() if k is None else dot_dtype(k, v)]


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
    block_indices: Any,
    k: Any,
    v: Any,
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
    plan = _tiling(q, blocks, block_indices, k, v, sink)
    size = _numbers(q, dim_v, plan.splits)
    room = _workspace(workspace, q, size)
    shape = batch, heads, length
    if plan.splits == 1:
        out = torch.empty(*shape, dim_v, dtype=q.dtype, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        edge = size // (dim_v + 1) * dim_v
        out = room[:edge].view(plan.splits, *shape, dim_v)
        lse = room[edge:].view(plan.splits, *shape)
    keys = 0 if k is None else k.shape[2]
    heads_kv = blocks.num_kv_heads if blocks is not None else k.shape[1]
    rows = heads // heads_kv * length
    grid = (batch * heads_kv, -(-rows // plan.block_m), plan.splits)
    rows_dot, factors_dot, window_dot = _dots(blocks, k, v)
    options: dict[str, Any] = {
        "DIM": dim, "DIM_V": dim_v, "WIDTH": power_of_two(dim, 16), "WIDTH_V": power_of_two(dim_v, 16),
        "HEADS": heads_kv, "GROUP_SIZE": heads // heads_kv,
        "BLOCK_M": plan.block_m, "TILE": plan.tile, "SOFTCAP": softcap is not None, "CAUSAL": causal,
        "WINDOWED": window is not None, "ROWS_DOT": rows_dot, "FACTORS_DOT": factors_dot, "WINDOW_DOT": window_dot,
    }  # fmt: skip
    parts, formats = _block_arguments(blocks, block_indices if plan.slot_splits else None, lowrank, residual)
    none = (0, 0, 0, 0)
    launch(
        attend,
        grid,
        *(q, *q.stride(), out, lse, batch, length, plan.slot_splits, plan.slots, *parts),
        *(k if keys else None, *(k.stride() if keys else none)),
        *(v if keys else None, *(v.stride() if keys else none)),
        *(_contiguous(seq_lens), _contiguous(sink), keys, window or 0, plan.window_rows, sm_scale, softcap or 1.0),
        **options, **formats, num_warps=plan.num_warps, num_stages=plan.num_stages, maxnreg=plan.maxnreg,
    )  # fmt: skip
    return (out, lse) if plan.splits == 1 else merge_parts(out, lse, q.dtype)


def _contiguous(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.contiguous()


_PARTS = (
    "anchor_k", "anchor_v", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "basis_v", "basis_v_scale", "v_gain",
    "residual_indices", "residual_k", "residual_k_scale", "residual_k_min", "residual_k_unit", "residual_k_order",
    "residual_v", "residual_v_scale", "residual_v_min", "residual_v_unit",
)  # fmt: skip


def _block_arguments(
    blocks: CompressedBlocks | None, block_indices: Tensor | None, lowrank: bool, residual: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The kernel's arguments from the indices to the parts, and its constants of the format."""
    if blocks is None or block_indices is None:
        names = ("RANK", "RANKS", "KEPT", "KEPTS", "K_BITS", "K_PLANES", "K_VECTOR", "K_BYTES", "V_BITS", "V_PLANES")
        formats = dict.fromkeys((*names, "V_VECTOR", "V_BYTES", "SLOTS_WIDTH", "BLOCK_SIZE"), 0)
        formats |= dict.fromkeys(("LOWRANK", "RESIDUAL", "EVERY", "CODED", "BLOCKS"), False)
        return [None, 0, 0, None, *[None] * len(_PARTS)], formats
    fmt = blocks.format
    keys, values = key_codes(blocks), value_codes(blocks)
    width = block_indices.shape[2]
    formats = {
        "BLOCK_SIZE": blocks.block_size, "SLOTS_WIDTH": power_of_two(width, 16),
        "RANK": blocks.rank, "RANKS": power_of_two(blocks.rank, 16) if blocks.rank else 0,
        "KEPT": blocks.num_residuals, "KEPTS": power_of_two(blocks.num_residuals, 16),
        "K_BITS": keys.bits, "K_PLANES": keys.planes, "K_VECTOR": keys.vector, "K_BYTES": keys.row_bytes,
        "V_BITS": values.bits, "V_PLANES": values.planes, "V_VECTOR": values.vector, "V_BYTES": values.row_bytes,
        "LOWRANK": lowrank, "RESIDUAL": residual and blocks.num_residuals > 0, "EVERY": fmt.keeps_every_row,
        "CODED": not fmt.exact_rows, "BLOCKS": True,
    }  # fmt: skip
    parts = [getattr(blocks, name) for name in ("block_counts", *_PARTS)]
    return [block_indices.contiguous(), width, blocks.num_blocks, *map(_contiguous, parts)], formats
