"""Attention over compressed blocks and over exact rows, without rebuilding K or V.

One kernel does all of a decode: a threadgroup takes some rows of queries of one kv head and one share of what they
attend, either some slots of ``block_indices`` or a stretch of the recency window. A second launch merges the shares.
How the work is cut follows from shapes alone, and what lengths and indices say is read on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from dkv.types import CompressedBlocks

from ._format import RANKS, WIDTHS, at_least, key_layout, query_rows, value_layout
from ._metal import absent, float_bits, integers, kernel, padded
from .merge import merge_parts

THREADS = 128  # of a threadgroup
SPLIT_ROWS = 256  # rows that a threadgroup attends at least, where there are as many
MOST_SPLITS = 32  # of the slots, and of the window

PARTS = (
    "anchor_k", "anchor_v", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "basis_v", "basis_v_scale", "v_gain",
    "residual_indices", "residual_k", "residual_k_scale", "residual_k_min", "residual_k_unit", "residual_k_order",
    "residual_v", "residual_v_scale", "residual_v_min", "residual_v_unit",
)  # fmt: skip
INPUTS = (
    "q", "block_indices", "block_counts",
    "anchor_k", "anchor_v", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "basis_v", "basis_v_scale", "v_gain",
    "positions", "residual_k", "k_scale", "k_low", "k_unit", "k_order", "residual_v", "v_scale", "v_low", "v_unit",
    "k_window", "v_window", "seq_lens", "sink", "params",
)  # fmt: skip


# The kernel's numbers, in its order; the tables of the runs of keys and of values follow.
PARAMETERS = (
    "heads", "rows", "length", "dim", "dim_v", "blocks", "block_size", "rank", "kept", "slot_count", "slot_splits",
    "slots", "keys", "window", "window_rows", "counted", "ragged", "sinks", "causal", "lowrank", "residual", "every",
    "scaled", "coded_rows", "ordered", "key_bytes", "key_runs", "value_bytes", "value_runs", "sm_scale", "softcap",
)  # fmt: skip


class Splits(NamedTuple):
    """How the rows of one kv head are cut: slots of a split, their splits, window rows of a split, their splits."""

    slots: int
    slot_splits: int
    window_rows: int
    window_splits: int


def splits(block_size: int, width: int, window: int) -> Splits:
    """Cut ``width`` slots and ``window`` exact rows; at least one split, so that every call has a state."""
    slots = max(1, SPLIT_ROWS // block_size, -(-width // MOST_SPLITS))
    window_rows = max(SPLIT_ROWS, THREADS * -(-window // (THREADS * MOST_SPLITS)))
    slot_splits, window_splits = -(-width // slots), -(-window // window_rows)
    if slot_splits + window_splits == 0:
        window_splits = 1
    return Splits(slots, slot_splits, window_rows, window_splits)


def lowrank_attention(
    q: mx.array, blocks: CompressedBlocks, block_indices: mx.array, sm_scale: float, softcap: float | None
) -> tuple[mx.array, mx.array]:
    """Anchors and non-residual rows of the selected blocks, scored and summed in the rank space."""
    return _attention(q, blocks, block_indices, None, None, sm_scale=sm_scale, softcap=softcap, residual=False)


def residual_attention(
    q: mx.array, blocks: CompressedBlocks, block_indices: mx.array, sm_scale: float, softcap: float | None
) -> tuple[mx.array, mx.array]:
    """The stored residual rows of the selected blocks."""
    return _attention(q, blocks, block_indices, None, None, sm_scale=sm_scale, softcap=softcap, lowrank=False)


def exact_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    causal: bool,
    seq_lens: mx.array | None,
    window: int | None,
    softcap: float | None,
    sink: mx.array | None,
    sm_scale: float,
) -> tuple[mx.array, mx.array]:
    """Dense rows; bottom-right causal inside ``seq_lens``."""
    return _attention(
        q, None, None, k, v, seq_lens=seq_lens, window=window, softcap=softcap, sink=sink, sm_scale=sm_scale,
        causal=causal,
    )  # fmt: skip


def decode_attention(
    q: mx.array,
    blocks: CompressedBlocks,
    k_window: mx.array | None,
    v_window: mx.array | None,
    block_indices: mx.array,
    seq_lens: mx.array | None,
    window: int | None,
    softcap: float | None,
    sink: mx.array | None,
    sm_scale: float,
) -> tuple[mx.array, mx.array]:
    """Low-rank, residual and window parts in one launch, and their merge in another."""
    return _attention(
        q, blocks, block_indices, k_window, v_window, seq_lens=seq_lens, window=window, softcap=softcap, sink=sink,
        sm_scale=sm_scale,
    )  # fmt: skip


def _attention(
    q: mx.array,
    blocks: CompressedBlocks | None,
    block_indices: mx.array | None,
    k: mx.array | None,
    v: mx.array | None,
    *,
    sm_scale: float,
    seq_lens: mx.array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: mx.array | None = None,
    causal: bool = True,
    lowrank: bool = True,
    residual: bool = True,
) -> tuple[mx.array, mx.array]:
    batch, query_heads, length, dim = q.shape
    heads, dim_v = (blocks.num_kv_heads, blocks.head_dim_v) if blocks is not None else (k.shape[1], v.shape[3])
    rows = query_heads // heads * length
    if batch * rows == 0:
        return mx.zeros((batch, query_heads, length, dim_v), q.dtype), mx.zeros((batch, query_heads, length))
    width = 0 if blocks is None or blocks.num_blocks == 0 else block_indices.shape[2]
    keys = 0 if k is None else k.shape[2]
    cut = splits(1 if blocks is None else blocks.block_size, width, max(keys, int(sink is not None)))
    counts = None if blocks is None else blocks.block_counts
    own = {"q": q, "block_indices": block_indices if width else None, "block_counts": counts if width else None}
    own |= {"k_window": k if keys else None, "v_window": v if keys else None, "seq_lens": seq_lens, "sink": sink}
    sizes = {"heads": heads, "rows": rows, "length": length, "dim": dim, "dim_v": dim_v, "slot_count": width}
    sizes |= {"slot_splits": cut.slot_splits, "slots": cut.slots, "keys": keys, "window": window or 0}
    sizes |= {"window_rows": cut.window_rows, "counted": own["block_counts"] is not None, "causal": causal}
    sizes |= {"ragged": seq_lens is not None, "sinks": sink is not None, "sm_scale": float_bits(sm_scale)}
    sizes |= {"softcap": float_bits(softcap or 0.0)}
    params, rank = _parameters(sizes, blocks if width else None, lowrank, residual)
    tile = query_rows(rows)
    count = cut.slot_splits + cut.window_splits
    arguments = _arguments(own, blocks if width else None, blocks.anchor_k.dtype if blocks is not None else k.dtype)
    run = kernel("decode", INPUTS, ("out", "lse"), "decode.metal", ("rows.metal", "attend.metal"))
    outs, lses = run(
        inputs=[*arguments, integers(*params)],
        template=[
            ("ROWS", tile),
            ("WIDTH", at_least(WIDTHS, max(dim, dim_v), "head dims")),
            ("RANKS", at_least(RANKS, rank, "ranks")),
        ],
        grid=(batch * heads * THREADS, -(-rows // tile), count),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(count, batch, query_heads, length, dim_v), (count, batch, query_heads, length)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return merge_parts(outs, lses, q.dtype)


def _parameters(
    sizes: dict[str, int], blocks: CompressedBlocks | None, lowrank: bool, residual: bool
) -> tuple[list[int], int]:
    """The kernel's numbers and tables, and the rank that it has to hold."""
    if blocks is None:
        return [int(sizes.get(name, 0)) for name in PARAMETERS], 0
    fmt = blocks.format
    (key_bytes, key_runs), (value_bytes, value_runs) = key_layout(blocks), value_layout(blocks)
    sizes = sizes | {
        "blocks": blocks.num_blocks, "block_size": blocks.block_size, "rank": blocks.rank, "kept": fmt.num_residuals,
        "lowrank": lowrank, "residual": residual and fmt.num_residuals > 0, "every": fmt.keeps_every_row,
        "scaled": blocks.basis_k_scale is not None, "coded_rows": not fmt.exact_rows, "ordered": fmt.orders_channels,
        "key_bytes": key_bytes, "key_runs": len(key_runs) // 6, "value_bytes": value_bytes,
        "value_runs": len(value_runs) // 6,
    }  # fmt: skip
    rank = 0 if fmt.keeps_every_row or not lowrank else blocks.rank
    return [*(int(sizes[name]) for name in PARAMETERS), *key_runs, *value_runs], rank


def _arguments(own: dict[str, Any], blocks: CompressedBlocks | None, cache: mx.Dtype) -> list[mx.array]:
    """The kernel's arrays but for ``params``; each has the dtype it would have, be it there or not."""
    factor = blocks.u.dtype if blocks is not None else mx.int8
    rows = blocks.residual_k.dtype if blocks is not None else mx.uint8
    kinds = {"u": factor, "basis_k": factor, "basis_v": factor, "residual_k": rows, "residual_v": rows}
    kinds |= {"block_indices": mx.int32, "block_counts": mx.int32, "seq_lens": mx.int32, "sink": mx.float32}
    kinds |= dict.fromkeys(("residual_indices", "residual_k_order"), mx.uint8)
    kinds |= dict.fromkeys(("u_unit", "basis_k_scale", "basis_v_scale", "v_gain"), mx.float32)
    kinds |= dict.fromkeys(("residual_k_unit", "residual_v_unit"), mx.float32)
    kinds |= {f"residual_{kind}_{part}": mx.float16 for kind in "kv" for part in ("scale", "min")}
    kinds["u_scale"] = mx.float16
    names = ("q", "block_indices", "block_counts", *PARTS, "k_window", "v_window", "seq_lens", "sink")
    found = []
    for name in names:
        part = own[name] if name in own else getattr(blocks, name, None)
        if part is None or part.size == 0:
            part = absent(kinds.get(name, cache))
        # those of one number a sequence or head keep their size from call to call
        found.append(part if name in ("block_counts", "seq_lens", "sink") else padded(part))
    return found
