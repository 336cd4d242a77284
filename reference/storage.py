"""How the numbers of a block are stored and read back."""

from __future__ import annotations

from typing import Any

import numpy as np

RESIDUAL_GROUP = 64  # kept rows that share one K scale per channel
ROW_UNIT_SHIFT = 14  # row scales and minima reach at most 2**14 in their unit, far from the end of float16

Layout = dict[str, tuple[tuple[int, ...], Any]]


def widen(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def narrow(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast to a float dtype; a finite number beyond its range becomes its largest finite number."""
    dtype = np.dtype(dtype)
    bfloat16 = dtype.name == "bfloat16"
    largest = float(np.array(0x7F7F, np.uint16).view(dtype)) if bfloat16 else float(np.finfo(dtype).max)
    return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)


def power_of_two(x: np.ndarray, shift: int = 0) -> np.ndarray:
    """The smallest power of two that is at least ``x``, divided by ``2**shift``; 1 where ``x`` is 0.

    Always a normal float32 number.
    """
    fraction, exponent = np.frexp(x)
    exponent = exponent - (fraction == 0.5) - shift
    return np.where(x == 0, 1.0, np.ldexp(1.0, np.clip(exponent, -126, 127)))


def block_layout(fmt: Any, num_kv_heads: int, head_dim: int, head_dim_v: int, k_dtype: Any, v_dtype: Any) -> Layout:
    """Shape and dtype of every stored part of one block."""
    H, D, Dv = num_kv_heads, head_dim, head_dim_v
    S, R, r = fmt.block_size, fmt.num_residuals, fmt.stored_rank(num_kv_heads, head_dim, head_dim_v)
    k_dtype, v_dtype = np.dtype(k_dtype), np.dtype(v_dtype)
    half_precision = k_dtype if k_dtype.name == "bfloat16" else np.dtype(np.float16)
    factor = {8: np.dtype(np.int8), 16: half_precision, 32: np.dtype(np.float32)}[fmt.factor_bits]
    layout: Layout = {"anchor_k": ((H, D), k_dtype), "anchor_v": ((H, Dv), v_dtype)}
    layout |= {"u": ((S, r), factor), "u_unit": ((), np.float32), "basis_k": ((H, r, D), factor)}
    if not fmt.keeps_every_row:
        layout |= {"basis_v": ((H, r, Dv), factor), "v_gain": ((), np.float32)}
    if fmt.factor_bits == 8:
        layout |= {"u_scale": ((S,), np.float16), "basis_k_scale": ((r,), np.float32)}
        if not fmt.keeps_every_row:
            layout["basis_v_scale"] = ((r,), np.float32)
    layout["residual_indices"] = ((R,), np.uint8)
    if fmt.residual_bits == 16:
        layout |= {"residual_k": ((H, R, D), k_dtype), "residual_v": ((H, R, Dv), v_dtype)}
    else:
        Q = -(-R // RESIDUAL_GROUP)
        layout["residual_k"] = ((H, R, code_bytes(D, fmt.residual_bits)), np.uint8)
        layout["residual_v"] = ((H, R, code_bytes(Dv, fmt.residual_bits)), np.uint8)
        for name in ("scale", "min"):
            layout |= {f"residual_k_{name}": ((H, Q, D), np.float16), f"residual_v_{name}": ((H, R), np.float16)}
        layout |= {"residual_k_unit": ((H,), np.float32), "residual_v_unit": ((H,), np.float32)}
    if fmt.minmax:
        layout |= {"k_min": ((H, D), k_dtype), "k_max": ((H, D), k_dtype)}
    return layout


def code_bytes(dim: int, bits: int) -> int:
    """Bytes of one row of ``dim`` codes."""
    return -(-dim // 2) if bits == 4 else dim


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 ``[..., D]`` to bytes ``[..., ceil(D / 2)]``: channel ``d`` low, channel ``ceil(D / 2) + d`` high."""
    half = -(-codes.shape[-1] // 2)
    padded = np.zeros((*codes.shape[:-1], 2 * half), np.uint8)
    padded[..., : codes.shape[-1]] = codes
    return padded[..., :half] | (padded[..., half:] << 4)


def unpack_nibbles(packed: np.ndarray, dim: int) -> np.ndarray:
    """The inverse of :func:`pack_nibbles`."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :dim]


def store_factors(u: np.ndarray, basis_k: np.ndarray, basis_v: np.ndarray | None, bits: int) -> dict[str, np.ndarray]:
    """Parts that hold ``u [S, r]``, ``basis_k [H, r, D]`` and ``basis_v [H, r, Dv]``; see README, "Stored factors"."""
    unit = power_of_two(np.max(np.abs(u), initial=0.0))
    parts = {"u": u / unit, "u_unit": unit, "basis_k": basis_k}
    if basis_v is not None:
        parts["basis_v"] = basis_v
    if bits == 8:
        scale = (np.max(np.abs(u), axis=1, initial=0.0) / unit / 127).astype(np.float16)  # [S]
        parts |= {"u": codes_of(u / unit, scale[:, None]), "u_scale": scale}
        for name in ("basis_k", "basis_v"):
            if name in parts:
                scale = (np.max(np.abs(parts[name]), axis=(0, 2), initial=0.0) / 127).astype(np.float32)  # [r]
                parts |= {name: codes_of(parts[name], scale[:, None]), f"{name}_scale": scale}
    return parts


def codes_of(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Symmetric codes -127..127; 0 where the scale is 0."""
    scale = widen(scale)
    return np.clip(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)), -127, 127)


def store_rows(x: np.ndarray, group: int | None, bits: int, name: str) -> dict[str, np.ndarray]:
    """Asymmetric codes of rows ``x [H, R, D]``: one scale per ``group`` rows and channel, or per row where None."""
    H, R, D = x.shape
    levels = 2**bits - 1
    if group is None:
        low, high = x.min(axis=2), x.max(axis=2)  # [H, R]
    else:
        parts = [x[:, start : start + group] for start in range(0, R, group)]
        low = np.stack([part.min(axis=1) for part in parts], axis=1) if parts else np.zeros((H, 0, D))  # [H, Q, D]
        high = np.stack([part.max(axis=1) for part in parts], axis=1) if parts else np.zeros((H, 0, D))
    step = (high - low) / levels
    largest = np.maximum(np.abs(low), step).reshape(H, -1).max(axis=1, initial=0.0)
    unit = power_of_two(largest, ROW_UNIT_SHIFT)  # [H]
    per_head = unit.reshape(H, *[1] * (low.ndim - 1))
    low16, step16 = (low / per_head).astype(np.float16), (step / per_head).astype(np.float16)
    low_row, step_row = spread_rows(low16, group, R), spread_rows(step16, group, R)  # [H, R, D or 1]
    offset = x / unit[:, None, None] - low_row
    codes = np.rint(np.divide(offset, step_row, out=np.zeros_like(x), where=step_row != 0))
    codes = np.clip(codes, 0, levels).astype(np.uint8)
    return {
        name: pack_nibbles(codes) if bits == 4 else codes,
        f"{name}_scale": step16,
        f"{name}_min": low16,
        f"{name}_unit": unit,
    }


def spread_rows(x: np.ndarray, group: int | None, num_rows: int) -> np.ndarray:
    """Scales ``[..., Q, D]`` or ``[..., R]`` as float64 ``[..., R, D or 1]``."""
    x = widen(x)
    return x[..., None] if group is None else np.repeat(x, group, axis=-2)[..., :num_rows, :]


def lowrank_factors(blocks: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """``u [B, N, S, r]``, ``basis_k [B, N, H, r, D]`` and ``basis_v [B, N, H, r, Dv]`` (gain divided out, or None)."""
    u = widen(blocks.u) * widen(blocks.u_unit)[..., None, None]
    if blocks.u_scale is not None:
        u = u * widen(blocks.u_scale)[..., None]
    basis_k = widen(blocks.basis_k)
    if blocks.basis_k_scale is not None:
        basis_k = basis_k * widen(blocks.basis_k_scale)[:, :, None, :, None]
    if blocks.basis_v is None:
        return u, basis_k, None
    basis_v = widen(blocks.basis_v) / widen(blocks.v_gain)[..., None, None, None]
    if blocks.basis_v_scale is not None:
        basis_v = basis_v * widen(blocks.basis_v_scale)[:, :, None, :, None]
    return u, basis_k, basis_v


def residual_rows(blocks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decoded residual rows ``k [B, N, H, R, D]`` and ``v [B, N, H, R, Dv]``, float64."""
    bits = blocks.format.residual_bits
    if bits == 16:
        return widen(blocks.residual_k), widen(blocks.residual_v)
    R, D, Dv = blocks.residual_indices.shape[-1], blocks.anchor_k.shape[-1], blocks.anchor_v.shape[-1]
    k = unpack_nibbles(blocks.residual_k, D) if bits == 4 else blocks.residual_k
    v = unpack_nibbles(blocks.residual_v, Dv) if bits == 4 else blocks.residual_v
    k = spread_rows(blocks.residual_k_min, RESIDUAL_GROUP, R) + spread_rows(
        blocks.residual_k_scale, RESIDUAL_GROUP, R
    ) * widen(k)
    v = spread_rows(blocks.residual_v_min, None, R) + spread_rows(blocks.residual_v_scale, None, R) * widen(v)
    k = widen(blocks.anchor_k)[..., None, :] + widen(blocks.residual_k_unit)[..., None, None] * k
    return k, widen(blocks.residual_v_unit)[..., None, None] * v


def residual_positions(blocks: Any) -> np.ndarray:
    """Positions of the residual rows, int64 ``[B, N, R]``; 0 in blocks beyond ``block_counts``."""
    return np.where(valid_blocks(blocks)[..., None], blocks.residual_indices, 0).astype(np.int64)


def is_residual(blocks: Any) -> np.ndarray:
    """Whether a row is a residual, bool ``[B, N, S]``."""
    mask = np.zeros((*blocks.anchor_k.shape[:2], blocks.format.block_size), bool)
    np.put_along_axis(mask, residual_positions(blocks), True, axis=2)
    return mask


def valid_blocks(blocks: Any) -> np.ndarray:
    """Whether a block holds tokens, bool ``[B, N]``."""
    B, N = blocks.anchor_k.shape[:2]
    if blocks.block_counts is None:
        return np.ones((B, N), bool)
    return np.arange(N) < np.asarray(blocks.block_counts)[:, None]
