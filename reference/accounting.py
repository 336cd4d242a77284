"""Bytes of a block, by formula."""

from __future__ import annotations

from typing import Any

from dkv.reference.storage import RESIDUAL_GROUP, code_bytes


def block_nbytes(fmt: Any, num_kv_heads: int, head_dim: int, head_dim_v: int, cache_itemsize: int) -> dict[str, int]:
    """Bytes of every stored part of one block, by the name of the part; parts that are not stored are left out.

    Parameters
    ----------
    fmt : BlockFormat
    num_kv_heads, head_dim, head_dim_v : int
    cache_itemsize : int
        Bytes of one number of the cache's dtype.
    """
    H, D, Dv, S, R = num_kv_heads, head_dim, head_dim_v, fmt.block_size, fmt.num_residuals
    r, Q = fmt.stored_rank(H, D, Dv), -(-R // RESIDUAL_GROUP)
    factor, low_rank_v, codes = fmt.factor_bits // 8, not fmt.keeps_every_row, not fmt.exact_rows
    parts = {
        "anchor_k": H * D * cache_itemsize,
        "anchor_v": H * Dv * cache_itemsize,
        "u": S * r * factor,
        "u_scale": S * 2 * (factor == 1) * (r > 0),
        "u_unit": 4,
        "basis_k": H * r * D * factor,
        "basis_k_scale": r * 4 * (factor == 1),
        "basis_v": H * r * Dv * factor * low_rank_v,
        "basis_v_scale": r * 4 * (factor == 1) * low_rank_v,
        "v_gain": 4 * low_rank_v,
        "residual_indices": R * low_rank_v,
        "residual_k": H * R * (code_bytes(fmt.key_segments(D)) if codes else D * cache_itemsize),
        "residual_v": H * R * (code_bytes(fmt.value_segments(Dv)) if codes else Dv * cache_itemsize),
        "residual_k_scale": H * Q * D * 2 * codes,
        "residual_k_min": H * Q * D * 2 * codes,
        "residual_k_unit": H * 4 * codes,
        "residual_k_order": H * D * fmt.orders_channels,
        "residual_v_scale": H * Q * Dv * 2 * codes,
        "residual_v_min": H * Q * Dv * 2 * codes,
        "residual_v_unit": H * 4 * codes,
        "k_min": H * D * cache_itemsize * fmt.minmax,
        "k_max": H * D * cache_itemsize * fmt.minmax,
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def published_nbytes(blocks: Any) -> int:
    """Bytes of the same blocks in the published layout (Differential-KV, paper section 4).

    It holds ``u`` without the anchor's row, both bases, both anchors, ``k_min``, ``k_max`` and two float32 numbers per
    block, and the exact residual rows; no positions. Meant for blocks of ``DKVConfig.paper``.
    """
    num_blocks = blocks.u.shape[0] * blocks.u.shape[1]
    arrays = (blocks.basis_k, blocks.basis_v, blocks.anchor_k, blocks.anchor_v, blocks.residual_k, blocks.residual_v)
    stored = blocks.u[:, :, 1:].nbytes + sum(array.nbytes for array in arrays)
    return stored + 2 * blocks.anchor_k.nbytes + 2 * 4 * num_blocks
