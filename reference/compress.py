"""Blocks of keys and values to an anchor, a low-rank part and residual rows, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkv.reference.storage import (
    block_layout,
    channel_order,
    lowrank_factors,
    narrow,
    residual_positions,
    residual_rows,
    store_factors,
    store_rows,
    valid_blocks,
    widen,
)

NORM_FLOOR = 1e-5
ENERGY_FLOOR = 1e-12
MAX_GAIN = 1e4
PARTS = (
    *("anchor_k", "anchor_v", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "basis_v", "basis_v_scale"),
    *("v_gain", "residual_indices", "residual_k", "residual_k_scale", "residual_k_min", "residual_k_unit"),
    *("residual_k_order", "residual_v", "residual_v_scale", "residual_v_min", "residual_v_unit"),
    *("k_min", "k_max", "block_counts"),
)


def compress_blocks(
    k: np.ndarray,
    v: np.ndarray,
    fmt: Any,
    keep: str = "distinct",
    token_weight: np.ndarray | None = None,
    channel_weight: np.ndarray | None = None,
) -> dict[str, np.ndarray | None]:
    """Compress every block of ``fmt.block_size`` tokens on its own.

    Anchor, joint low-rank difference and residual tokens are Differential-KV's, paper sections 3 and 4. The keep-score
    "distinct" and the compact format are this package's.

    Parameters
    ----------
    k : array [B, H, N * S, D], float
        Keys as the model caches them, after the rotary embedding.
    v : array [B, H, N * S, Dv], float
    fmt : BlockFormat
    keep : {"distinct", "error"}
    token_weight : array [B, N * S], optional
        Multiplies the keep-score.
    channel_weight : array [H, D], optional
        Multiplies the importance of each channel of a key.

    Returns
    -------
    dict
        The fields of ``CompressedBlocks`` without ``format``.

    Raises
    ------
    ValueError
        When a block holds a NaN or an infinity, or when its factorisation fails. It names batch row and block.
    """
    B, H, num_tokens, D = k.shape
    Dv, S = v.shape[3], fmt.block_size
    N = num_tokens // S
    layout = block_layout(fmt, H, D, Dv, k.dtype, v.dtype)
    importance = np.ones((H, D)) if channel_weight is None else widen(channel_weight)
    stored = {name: np.zeros((B, N, *shape), dtype) for name, (shape, dtype) in layout.items()}
    for b in range(B):
        for n in range(N):
            rows = slice(n * S, (n + 1) * S)
            weight = np.ones(S) if token_weight is None else widen(token_weight[b, rows])
            try:
                block = _compress_block(k[b, :, rows], v[b, :, rows], fmt, keep, weight, importance)
            except (ValueError, np.linalg.LinAlgError) as error:
                raise ValueError(f"batch row {b}, block {n}: {error}") from error
            for name, part in block.items():
                stored[name][b, n] = part.astype(stored[name].dtype)
    return {name: stored.get(name) for name in PARTS}


def _compress_block(
    k: np.ndarray, v: np.ndarray, fmt: Any, keep: str, weight: np.ndarray, channel_weight: np.ndarray
) -> dict[str, np.ndarray]:
    """``k [H, S, D]`` and ``v [H, S, Dv]`` of one block to its parts."""
    H, S, D = k.shape
    exact_k, exact_v = k, v
    k, v = widen(k), widen(v)
    if not (np.isfinite(k).all() and np.isfinite(v).all()):
        raise ValueError("non-finite keys or values")
    dk, dv = k - k[:, :1], v - v[:, :1]
    rank = fmt.stored_rank(H, D, v.shape[2])

    gain, rows = 1.0, _by_token(dk)  # [S, H * D]
    if not fmt.keeps_every_row:
        gain = value_gain(dk, dv)
        rows = np.concatenate([rows, gain * _by_token(dv)], axis=1)  # [S, H * (D + Dv)]
    norm = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), NORM_FLOOR)
    u, basis = truncated_svd(rows / norm, rank)
    u = u * norm
    u[0] = 0.0
    basis_k = basis[:, : H * D].reshape(rank, H, D).swapaxes(0, 1)
    basis_v = None if fmt.keeps_every_row else basis[:, H * D :].reshape(rank, H, v.shape[2]).swapaxes(0, 1)

    if fmt.keeps_every_row:
        indices = np.arange(1, S)
    else:
        score = np.square(rows - u @ basis).sum(axis=1) if keep == "error" else distinctness(v)
        indices = kept_rows(score * weight, fmt.num_residuals)

    parts = {"anchor_k": exact_k[:, 0], "anchor_v": exact_v[:, 0]}
    if not fmt.keeps_every_row:
        parts["residual_indices"] = indices
    parts |= store_factors(u, basis_k, basis_v, fmt.factor_bits)
    if not fmt.keeps_every_row:
        parts["v_gain"] = np.asarray(gain)
    if fmt.exact_rows:
        parts |= {"residual_k": exact_k[:, indices], "residual_v": exact_v[:, indices]}
    else:
        rows = dk[:, indices]
        if fmt.orders_channels:
            order = parts["residual_k_order"] = channel_order(rows, channel_weight)  # [H, D]
            rows = np.take_along_axis(rows, order[:, None], axis=2)
        parts |= store_rows(rows, fmt.key_segments(D), "residual_k")
        parts |= store_rows(v[:, indices], fmt.value_segments(v.shape[2]), "residual_v")
    if fmt.minmax:
        parts |= {"k_min": k.min(axis=1), "k_max": k.max(axis=1)}
    return parts


def _by_token(x: np.ndarray) -> np.ndarray:
    """``[H, S, D]`` to ``[S, H * D]``."""
    return x.swapaxes(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


def value_gain(dk: np.ndarray, dv: np.ndarray) -> float:
    """Factor on the value differences that lets neither half of the joint row drown the other."""
    energy_k, energy_v = float(np.square(dk).sum()), float(np.square(dv).sum())
    if min(energy_k, energy_v) < ENERGY_FLOOR:
        return 1.0
    return float(np.float32(np.clip(np.sqrt(energy_k / energy_v), 1.0, MAX_GAIN)))


def truncated_svd(x: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """``u [S, rank]`` and orthonormal ``basis [rank, W]`` of the best rank-``rank`` product for ``x [S, W]``."""
    try:
        left, sizes, right = np.linalg.svd(x, full_matrices=False)
    except np.linalg.LinAlgError:
        squares, left = np.linalg.eigh(x @ x.T)
        sizes = np.sqrt(np.maximum(squares, 0.0))
        right = np.divide(left.T @ x, sizes[:, None], out=np.zeros((len(x), x.shape[1])), where=sizes[:, None] > 0)
    order = np.argsort(-sizes, kind="stable")[:rank]
    return left[:, order] * sizes[order], right[order]


def distinctness(v: np.ndarray) -> np.ndarray:
    """Mean over heads of one minus the cosine of each row of ``v [H, S, Dv]`` and the block's mean row."""
    mean = v.mean(axis=1, keepdims=True)
    product = np.linalg.norm(v, axis=2) * np.linalg.norm(mean, axis=2)  # [H, S]
    cosine = np.divide((v * mean).sum(axis=2), product, out=np.zeros_like(product), where=product > 0)
    return (1.0 - cosine).mean(axis=0)


def kept_rows(score: np.ndarray, num_residuals: int) -> np.ndarray:
    """Ascending positions of the highest scores, the anchor left out, ties to the lowest position."""
    return np.sort(1 + np.argsort(-score[1:], kind="stable")[:num_residuals])


def reconstruct_blocks(blocks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rebuild the rows that a cache stands for.

    Returns
    -------
    k : array [B, H, N * S, D], cache dtype
    v : array [B, H, N * S, Dv], cache dtype
        Zeros in blocks beyond ``block_counts``.
    """
    anchor_k, anchor_v = widen(blocks.anchor_k)[:, :, :, None], widen(blocks.anchor_v)[:, :, :, None]
    u, basis_k, basis_v = lowrank_factors(blocks)
    k = anchor_k + u[:, :, None] @ basis_k  # [B, N, H, S, D]
    v = np.repeat(anchor_v, u.shape[2], axis=3) if basis_v is None else anchor_v + u[:, :, None] @ basis_v
    kept = residual_positions(blocks)[:, :, None, :, None]
    for rows, residual in zip((k, v), residual_rows(blocks), strict=True):
        np.put_along_axis(rows, np.broadcast_to(kept, residual.shape), residual, axis=3)
    valid = valid_blocks(blocks)[:, :, None, None, None]
    k, v = _joined(np.where(valid, k, 0.0)), _joined(np.where(valid, v, 0.0))
    return narrow(k, blocks.anchor_k.dtype), narrow(v, blocks.anchor_v.dtype)


def _joined(x: np.ndarray) -> np.ndarray:
    """``[B, N, H, S, D]`` to ``[B, H, N * S, D]``."""
    B, N, H, S, D = x.shape
    return x.transpose(0, 2, 1, 3, 4).reshape(B, H, N * S, D)
