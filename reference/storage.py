"""How the numbers of a block are stored and read back."""

from __future__ import annotations

from typing import Any

import numpy as np

RESIDUAL_GROUP = 128  # kept rows that share one scale per channel
ROW_UNIT_SHIFT = 14  # row scales and minima reach at most 2**14 in their unit, far from the end of float16
CLIPS = {  # bits -> how much of a group's range its codes may span
    1: (1, 0.75, 0.6, 0.5, 0.42, 0.35, 0.3),
    2: (1, 0.85, 0.75, 0.65, 0.55, 0.47),
    3: (1, 0.9, 0.8, 0.7, 0.6),
    4: (1, 0.94, 0.87, 0.8, 0.72),
    5: (1, 0.95, 0.9),
    **{bits: (1,) for bits in (6, 7, 8)},
}

Layout = dict[str, tuple[tuple[int, ...], Any]]
Segments = tuple[tuple[int, int], ...]  # channels and bits of each run of equally wide channels


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
        if r:
            layout["u_scale"] = ((S,), np.float16)
        layout |= {"basis_k_scale": ((r,), np.float32)}
        if not fmt.keeps_every_row:
            layout["basis_v_scale"] = ((r,), np.float32)
    if not fmt.keeps_every_row:
        layout["residual_indices"] = ((R,), np.uint8)
    if fmt.exact_rows:
        layout |= {"residual_k": ((H, R, D), k_dtype), "residual_v": ((H, R, Dv), v_dtype)}
    else:
        Q = -(-R // RESIDUAL_GROUP)
        for name, dim, segments in (("k", D, fmt.key_segments(D)), ("v", Dv, fmt.value_segments(Dv))):
            layout |= {f"residual_{name}": ((H, R, code_bytes(segments)), np.uint8)}
            layout |= {f"residual_{name}_{part}": ((H, Q, dim), np.float16) for part in ("scale", "min")}
            layout |= {f"residual_{name}_unit": ((H,), np.float32)}
        if fmt.orders_channels:
            layout |= {"residual_k_order": ((H, D), np.uint8)}
    if fmt.minmax:
        layout |= {"k_min": ((H, D), k_dtype), "k_max": ((H, D), k_dtype)}
    return layout


def code_parts(bits: int) -> list[int]:
    """Widths 8, 4, 2, 1 that add up to ``bits``, the widest first."""
    return [part for part in (8, 4, 2, 1) if bits & part]


def code_bytes(segments: Segments) -> int:
    """Bytes of one row of codes."""
    return sum(-(-count * part // 8) for count, bits in segments for part in code_parts(bits))


def pack_codes(codes: np.ndarray, segments: Segments) -> np.ndarray:
    """Codes ``[..., D]`` to bytes ``[..., code_bytes]``; see README, "Packing"."""
    packed, start = [np.zeros((*codes.shape[:-1], 0), np.uint8)], 0
    for count, bits in segments:
        run, left = codes[..., start : start + count], bits
        for part in code_parts(bits):
            left -= part
            fields, size = 8 // part, -(-count * part // 8)
            padded = np.zeros((*codes.shape[:-1], fields * size), np.uint8)
            padded[..., :count] = (run >> left) & (2**part - 1)
            places = part * np.arange(fields, dtype=np.uint8)[:, None]
            packed.append((padded.reshape(*codes.shape[:-1], fields, size) << places).sum(axis=-2, dtype=np.uint8))
        start += count
    return np.concatenate(packed, axis=-1)


def unpack_codes(packed: np.ndarray, segments: Segments) -> np.ndarray:
    """The inverse of :func:`pack_codes`."""
    codes, start = [np.zeros((*packed.shape[:-1], 0), np.uint8)], 0
    for count, bits in segments:
        run = np.zeros((*packed.shape[:-1], count), np.uint8)
        for part in code_parts(bits):
            fields, size = 8 // part, -(-count * part // 8)
            places = part * np.arange(fields, dtype=np.uint8)[:, None]
            found = (packed[..., None, start : start + size] >> places) & np.uint8(2**part - 1)
            run = (run << part) | found.reshape(*packed.shape[:-1], fields * size)[..., :count]
            start += size
        codes.append(run)
    return np.concatenate(codes, axis=-1)


def store_factors(u: np.ndarray, basis_k: np.ndarray, basis_v: np.ndarray | None, bits: int) -> dict[str, np.ndarray]:
    """Parts that hold ``u [S, r]``, ``basis_k [H, r, D]`` and ``basis_v [H, r, Dv]``; see README, "Stored factors"."""
    unit = power_of_two(np.max(np.abs(u), initial=0.0))
    parts = {"u": u / unit, "u_unit": unit, "basis_k": basis_k}
    if basis_v is not None:
        parts["basis_v"] = basis_v
    if bits == 8:
        scale = (np.max(np.abs(u), axis=1, initial=0.0) / unit / 127).astype(np.float16)  # [S]
        parts |= {"u": codes_of(u / unit, scale[:, None])} | ({"u_scale": scale} if u.shape[1] else {})
        for name in ("basis_k", "basis_v"):
            if name in parts:
                scale = (np.max(np.abs(parts[name]), axis=(0, 2), initial=0.0) / 127).astype(np.float32)  # [r]
                parts |= {name: codes_of(parts[name], scale[:, None]), f"{name}_scale": scale}
    return parts


def codes_of(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Symmetric codes -127..127; 0 where the scale is 0."""
    scale = widen(scale)
    return np.clip(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)), -127, 127)


def channel_order(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Channels ``[H, D]`` of rows ``x [H, R, D]`` by descending importance, ties to the lowest channel."""
    return np.argsort(-channel_importance(x, weight), axis=1, kind="stable")


def channel_importance(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Squared ranges of rows ``x [H, R, D]``, summed over groups, times ``weight [H, D]``."""
    ranges = [np.square(group.max(axis=1) - group.min(axis=1)) for group in row_groups(x)]
    return weight * sum(ranges, np.zeros_like(weight))


def row_groups(x: np.ndarray) -> list[np.ndarray]:
    """Rows ``[H, R, D]`` in groups that share their scales."""
    return [x[:, start : start + RESIDUAL_GROUP] for start in range(0, x.shape[1], RESIDUAL_GROUP)]


def store_rows(x: np.ndarray, segments: Segments, name: str) -> dict[str, np.ndarray]:
    """Codes of rows ``x [H, R, D]`` in stored order, with a scale per channel and group; see README, "Scales"."""
    H, R, D = x.shape
    Q = -(-R // RESIDUAL_GROUP)
    codes, step, low = np.zeros((H, R, D), np.uint8), np.zeros((H, Q, D)), np.zeros((H, Q, D))
    levels = np.repeat([max(2**bits - 1, 1) for _, bits in segments], [count for count, _ in segments])  # [D]
    largest = np.zeros(H)
    for group in row_groups(x):
        lo, hi = group.min(axis=1), group.max(axis=1)  # [H, D]
        reach = np.maximum(np.maximum(abs(lo), abs(hi)), (hi - lo) / levels)
        largest = np.maximum(largest, reach.max(axis=1))
    unit = power_of_two(largest, ROW_UNIT_SHIFT)  # [H]
    for q, group in enumerate(row_groups(x / unit[:, None, None])):
        rows, start = slice(q * RESIDUAL_GROUP, (q + 1) * RESIDUAL_GROUP), 0
        for count, bits in segments:
            run = slice(start, start + count)
            codes[:, rows, run], step[:, q, run], low[:, q, run] = code_group(group[:, :, run], bits)
            start += count
    return {name: pack_codes(codes, segments), f"{name}_scale": step, f"{name}_min": low, f"{name}_unit": unit}


def code_group(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[H, n, D]``, float16 steps and minima ``[H, D]`` of one group of rows: of all ranges the best one."""
    lo, hi, levels = x.min(axis=1), x.max(axis=1), 2**bits - 1
    if bits == 0:
        return np.zeros_like(x), np.zeros_like(lo), x.mean(axis=1).astype(np.float16)
    codes, step, low = np.zeros_like(x), np.zeros_like(lo), np.zeros_like(lo)
    least = np.full_like(lo, np.inf)
    for clip in CLIPS[bits]:
        low_f = widen(((lo + hi) / 2 - clip * (hi - lo) / 2).astype(np.float16))[:, None]
        step_f = widen((clip * (hi - lo) / levels).astype(np.float16))[:, None]
        codes_f = np.divide(x - low_f, step_f, out=np.zeros_like(x), where=step_f != 0)
        codes_f = np.clip(np.rint(codes_f), 0, levels)
        error = np.square(low_f + step_f * codes_f - x).sum(axis=1)  # [H, D]
        better = error < least
        least = np.where(better, error, least)
        codes = np.where(better[:, None], codes_f, codes)
        step, low = np.where(better, step_f[:, 0], step), np.where(better, low_f[:, 0], low)
    return codes, step, low


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
    """Decoded residual rows ``k [B, N, H, R, D]`` and ``v [B, N, H, R, Dv]``, float64, channels in their own order."""
    if blocks.format.exact_rows:
        return widen(blocks.residual_k), widen(blocks.residual_v)
    fmt, D, Dv = blocks.format, blocks.anchor_k.shape[-1], blocks.anchor_v.shape[-1]
    k, v = decoded(blocks, "residual_k", fmt.key_segments(D)), decoded(blocks, "residual_v", fmt.value_segments(Dv))
    if fmt.orders_channels:
        place = np.argsort(blocks.residual_k_order, axis=-1)  # of each channel
        k = np.take_along_axis(k, place[..., None, :], axis=-1)
    return widen(blocks.anchor_k)[..., None, :] + k, v


def decoded(blocks: Any, name: str, segments: Segments) -> np.ndarray:
    """Coded rows ``[B, N, H, R, D]`` in stored order."""
    packed, scale, low, unit = (getattr(blocks, name + part) for part in ("", "_scale", "_min", "_unit"))
    codes = widen(unpack_codes(packed, segments))
    low, scale = (np.repeat(widen(x), RESIDUAL_GROUP, axis=-2)[..., : codes.shape[-2], :] for x in (low, scale))
    return widen(unit)[..., None, None] * (low + scale * codes)


def residual_positions(blocks: Any) -> np.ndarray:
    """Positions of the residual rows, int64 ``[B, N, R]``; 0 in blocks beyond ``block_counts``."""
    stored = blocks.residual_indices
    positions = np.arange(1, blocks.format.block_size) if stored is None else stored
    return np.where(valid_blocks(blocks)[..., None], positions, 0).astype(np.int64)


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
