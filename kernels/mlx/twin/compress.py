"""Compress blocks of K and V, and rebuild them.

All of it runs on the CPU stream, in float64: MLX factors matrices there alone, and codes are then those of the
reference. A block closes once in 256 tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dkv.types import BlockFormat, CompressedBlocks

from ._storage import Segments, by_row, power_of_two_above, quantise_rows, quantise_signed, rounded_half, unpack
from .merge import saturated

Array = Any
WORKSPACE_BYTES = 128 << 20  # blocks compressed together; the result of a block does not depend on it
ROW_NORM_FLOOR = 1e-5
ENERGY_FLOOR = 1e-12
GAIN_MAX = 1e4


def compress_blocks(
    k: Array,
    v: Array,
    fmt: BlockFormat,
    keep: str,
    token_weight: Array | None,
    channel_weight: Array | None = None,
) -> CompressedBlocks:
    """k ``[B, H, N * S, D]``, v ``[B, H, N * S, Dv]``, token_weight ``[B, N * S]``, channel_weight ``[H, D]``."""
    batch, heads, tokens, dim = k.shape
    dim_v, size = v.shape[3], fmt.block_size
    count = tokens // size
    with mx.stream(mx.cpu):
        # [B, H, N * S, D] -> [B * N, S, H, D]: blocks are independent
        rows_k = k.reshape(batch, heads, count, size, dim).transpose(0, 2, 3, 1, 4).flatten(0, 1)
        rows_v = v.reshape(batch, heads, count, size, dim_v).transpose(0, 2, 3, 1, 4).flatten(0, 1)
        weight = None if token_weight is None else token_weight.reshape(batch * count, size)
        step = max(1, WORKSPACE_BYTES // (8 * size * (6 * heads * (dim + dim_v) + 3 * size)))
        pieces = []
        for i in range(0, max(1, batch * count), step):
            piece = slice(i, i + step)
            part = None if weight is None else weight[piece]
            pieces.append(_compress(rows_k[piece], rows_v[piece], fmt, keep, part, channel_weight))
            mx.eval(list(pieces[-1].values()))
        parts = {name: mx.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        return CompressedBlocks(
            format=fmt, **{name: part.reshape(batch, count, *part.shape[1:]) for name, part in parts.items()}
        )


def _compress(
    k: Array, v: Array, fmt: BlockFormat, keep: str, token_weight: Array | None, channel_weight: Array | None
) -> dict[str, Array]:
    """k ``[n, S, H, D]``, v ``[n, S, H, Dv]``."""
    count, size, heads, dim = k.shape
    dim_v = v.shape[3]
    parts: dict[str, Array] = {"anchor_k": k[:, 0], "anchor_v": v[:, 0]}

    wide_k, wide_v = k.astype(mx.float64), v.astype(mx.float64)
    joint, gain = (wide_k - wide_k[:, :1]).reshape(count, size, heads * dim), None
    if not fmt.keeps_every_row:
        dv = (wide_v - wide_v[:, :1]).reshape(count, size, heads * dim_v)
        gain = _value_gain(joint, dv)
        joint = mx.concatenate([joint, dv * gain[:, None, None]], axis=-1)
    norm = mx.maximum(mx.sqrt(mx.square(joint).sum(-1, keepdims=True)), ROW_NORM_FLOOR)
    u, basis = truncated_svd(joint / norm, norm, fmt.stored_rank(heads, dim, dim_v))
    kept = _residual_rows(joint, u, basis, wide_v, fmt, keep, token_weight)  # [n, R]
    parts |= stored_factors(u, basis, fmt, k.shape, k.dtype)
    if gain is not None:
        parts["residual_indices"] = kept.astype(mx.uint8)
        parts["v_gain"] = gain.astype(mx.float32)

    rows = mx.broadcast_to(kept[:, :, None, None], (*kept.shape, heads, 1))
    if fmt.exact_rows:
        parts["residual_k"] = mx.take_along_axis(k, rows, axis=1).swapaxes(1, 2)  # [n, H, R, D]
        parts["residual_v"] = mx.take_along_axis(v, rows, axis=1).swapaxes(1, 2)
    else:
        importance = None
        if fmt.orders_channels:
            importance = mx.ones((heads, dim)) if channel_weight is None else channel_weight
            importance = importance.astype(mx.float64)
        coded_k = mx.take_along_axis(wide_k, rows, axis=1) - wide_k[:, :1]
        coded_v = mx.take_along_axis(wide_v, rows, axis=1)
        parts |= _store_rows("residual_k", coded_k.swapaxes(1, 2), fmt.key_segments(dim), importance)
        parts |= _store_rows("residual_v", coded_v.swapaxes(1, 2), fmt.value_segments(dim_v), None)
    if fmt.minmax:
        parts["k_min"], parts["k_max"] = k.min(1), k.max(1)
    return parts


def _value_gain(dk: Array, dv: Array) -> Array:
    energy_k, energy_v = mx.square(dk).sum((1, 2)), mx.square(dv).sum((1, 2))
    defined = (energy_k >= ENERGY_FLOOR) & (energy_v >= ENERGY_FLOOR)
    ratio = mx.clip(mx.sqrt(energy_k / mx.where(defined, energy_v, 1.0)), 1.0, GAIN_MAX)
    return mx.where(defined, ratio, 1.0)


def truncated_svd(unit: Array, norm: Array, rank: int) -> tuple[Array, Array]:
    """u ``[n, S, r]`` and orthonormal basis ``[n, r, C]`` of the rows ``unit [n, S, C]`` times ``norm [n, S, 1]``.

    The singular values are those of ``unit``. All float64, on the CPU stream.
    """
    count, size, width = unit.shape
    if rank == 0 or count == 0:
        return mx.zeros((count, size, rank), dtype=mx.float64), mx.zeros((count, rank, width), dtype=mx.float64)
    # the Gram matrix of the shorter side, in float64: small singular values survive the squaring
    gram = unit.swapaxes(1, 2) @ unit if width < size else unit @ unit.swapaxes(1, 2)
    vectors = _eigenvectors(gram)[..., ::-1][..., :rank]
    if width < size:
        u, basis = norm * (unit @ vectors), vectors.swapaxes(1, 2)
    else:
        projected = vectors.swapaxes(1, 2) @ unit  # [n, r, C], rows of length sigma
        sigma = mx.sqrt(mx.square(projected).sum(-1, keepdims=True))
        basis = mx.where(sigma > 0, projected / mx.where(sigma > 0, sigma, 1.0), 0.0)
        u = norm * vectors * sigma.swapaxes(1, 2)
    return mx.where(mx.arange(size)[:, None] == 0, 0.0, u), basis


def _eigenvectors(gram: Array) -> Array:
    """Eigenvectors ``[n, s, s]`` by ascending eigenvalue."""
    try:
        values, vectors = mx.linalg.eigh(gram)
        mx.eval(values, vectors)
    except RuntimeError:  # it did not converge
        vectors, values, _ = mx.linalg.svd(gram)
        mx.eval(values, vectors)
    order = mx.argsort(values, axis=-1)
    return mx.take_along_axis(vectors, order[:, None], axis=-1)


def stored_factors(
    u: Array, basis: Array, fmt: BlockFormat, shape: tuple[int, ...], cache: Any
) -> dict[str, Array]:
    """The parts that hold u ``[n, S, r]`` and basis ``[n, r, H * D or H * (D + Dv)]``.

    ``shape`` is ``[n, S, H, D]``, that of the keys, and ``cache`` their dtype.
    """
    (count, _, heads, dim), rank = shape, u.shape[2]
    factor = _factor_dtype(fmt, cache)
    unit = power_of_two_above(_largest(u, (1, 2)) if u.size else mx.zeros((count,), dtype=mx.float64))
    parts, u = {"u_unit": unit}, u / unit.astype(mx.float64)[:, None, None]
    if factor == mx.int8 and rank:
        scale = rounded_half(_largest(u, (2,)) / 127)
        parts |= {"u": quantise_signed(u, scale[..., None]), "u_scale": scale.astype(mx.float16)}
    else:
        parts["u"] = u.astype(factor)
    halves = {"basis_k": basis[..., : heads * dim], "basis_v": basis[..., heads * dim :]}
    for name, half in halves.items():
        if name == "basis_k" or not fmt.keeps_every_row:
            # [n, r, H * D] -> [n, H, r, D]
            parts |= _store_basis(name, half.reshape(count, rank, heads, half.shape[2] // heads).swapaxes(1, 2), factor)
    return parts


def _residual_rows(
    joint: Array, u: Array, basis: Array, v: Array, fmt: BlockFormat, keep: str, token_weight: Array | None
) -> Array:
    """Positions of the kept rows ``[n, R]``."""
    count, size = joint.shape[:2]
    if fmt.keeps_every_row:
        return mx.broadcast_to(mx.arange(1, size), (count, size - 1))
    if keep == "error":
        score = mx.square(joint - u @ basis).sum(-1)
    else:
        mean = v.mean(1, keepdims=True)  # v [n, S, H, Dv]
        length = mx.sqrt(mx.square(v).sum(-1)) * mx.sqrt(mx.square(mean).sum(-1))
        cosine = mx.where(length > 0, (v * mean).sum(-1) / mx.where(length > 0, length, 1.0), 0.0)
        score = (1 - cosine).mean(-1)
    if token_weight is not None:
        score = score * token_weight.astype(mx.float64)
    order = mx.argsort(-score[:, 1:], axis=1).astype(mx.int32) + 1
    return mx.sort(order[:, : fmt.num_residuals], axis=1)


def _factor_dtype(fmt: BlockFormat, cache: Any) -> Any:
    if fmt.factor_bits == 8:
        return mx.int8
    if fmt.factor_bits == 32:
        return mx.float32
    return mx.bfloat16 if cache == mx.bfloat16 else mx.float16


def _largest(x: Array, axes: tuple[int, ...]) -> Array:
    """Largest magnitude over ``axes``; an empty array where there is none to compare."""
    if x.size == 0:
        return mx.zeros([length for axis, length in enumerate(x.shape) if axis not in axes], dtype=x.dtype)
    return mx.abs(x).max(axes)


def _store_basis(name: str, basis: Array, factor: Any) -> dict[str, Array]:
    """basis ``[n, H, r, D]``; one scale per basis row."""
    if factor != mx.int8:
        return {name: basis.astype(factor)}
    scale = (_largest(basis, (1, 3)) / 127).astype(mx.float32)  # [n, r]
    return {name: quantise_signed(basis, scale[:, None, :, None]), f"{name}_scale": scale}


def _store_rows(name: str, rows: Array, segments: Segments, importance: Array | None) -> dict[str, Array]:
    """rows ``[n, H, R, D]``, float64, as coded parts."""
    packed, scale, low, unit, order = quantise_rows(rows, segments, importance)
    stored = {name: packed, f"{name}_scale": scale, f"{name}_min": low, f"{name}_unit": unit}
    return stored if order is None else stored | {f"{name}_order": order.astype(mx.uint8)}


def reconstruct_blocks(blocks: CompressedBlocks) -> tuple[Array, Array]:
    """Rebuild ``k [B, H, N * S, D]`` and ``v [B, H, N * S, Dv]`` in the cache's dtype; for inspection.

    Blocks beyond ``block_counts`` come back as zeros.
    """
    with mx.stream(mx.cpu):
        u = _wide(blocks.u) * _wide(blocks.u_unit)[..., None, None]  # [B, N, S, r]
        if blocks.u_scale is not None:
            u = u * _wide(blocks.u_scale)[..., None]
        u = u[:, :, None]
        k = _wide(blocks.anchor_k)[:, :, :, None] + u @ _basis(blocks.basis_k, blocks.basis_k_scale)
        v = _wide(blocks.anchor_v)[:, :, :, None]
        if blocks.basis_v is None:
            v = mx.broadcast_to(v, (*k.shape[:4], v.shape[4]))
        else:
            gain = _wide(blocks.v_gain)[..., None, None, None]
            v = v + (u @ _basis(blocks.basis_v, blocks.basis_v_scale)) / gain
        rows_k, rows_v = residual_rows(blocks)
        return _placed(blocks, k, rows_k, blocks.anchor_k), _placed(blocks, v, rows_v, blocks.anchor_v)


def _placed(blocks: CompressedBlocks, x: Array, rows: Array, anchor: Array) -> Array:
    """Low-rank rows ``x [B, N, H, S, C]`` with anchor and residual rows at their places, ``[B, H, N * S, C]``."""
    batch, count, heads, size, dim = x.shape
    x, rows = saturated(x, anchor.dtype), saturated(rows, anchor.dtype)
    beyond = None if blocks.block_counts is None else mx.arange(count) >= blocks.block_counts[:, None]  # [B, N]
    if blocks.residual_indices is None:
        x = mx.concatenate([anchor[:, :, :, None], rows], axis=3)
    else:
        x = mx.concatenate([anchor[:, :, :, None], x[:, :, :, 1:]], axis=3)
        where = blocks.residual_indices.astype(mx.int32)
        if beyond is not None:  # what lies there may hold positions that no block has
            where = mx.where(beyond[..., None], 0, where)
        if rows.size:
            x = mx.put_along_axis(x, mx.broadcast_to(where[:, :, None, :, None], rows.shape), rows, axis=3)
    if beyond is not None:
        x = mx.where(beyond[:, :, None, None, None], mx.zeros((), dtype=x.dtype), x)
    return x.swapaxes(1, 2).reshape(batch, heads, count * size, dim)


def _wide(x: Array) -> Array:
    return x.astype(mx.float64)


def _basis(basis: Array, scale: Array | None) -> Array:
    return _wide(basis) if scale is None else _wide(basis) * _wide(scale)[:, :, None, :, None]


def residual_rows(blocks: CompressedBlocks) -> tuple[Array, Array]:
    """Stored residual rows as numbers, ``[B, N, H, R, D]`` and ``[B, N, H, R, Dv]``, float64, on the CPU stream."""
    fmt = blocks.format
    if fmt.exact_rows:
        return _wide(blocks.residual_k), _wide(blocks.residual_v)
    k = _decoded(blocks, "residual_k", fmt.key_segments(blocks.head_dim))
    v = _decoded(blocks, "residual_v", fmt.value_segments(blocks.head_dim_v))
    if fmt.orders_channels and k.size:
        order = blocks.residual_k_order.astype(mx.int32)
        if blocks.block_counts is not None:  # what lies beyond may hold places that no key has
            beyond = mx.arange(blocks.num_blocks) >= blocks.block_counts[:, None]
            order = mx.where(beyond[:, :, None, None], 0, order)
        order = mx.broadcast_to(order[:, :, :, None], k.shape)
        k = mx.put_along_axis(mx.zeros_like(k), order, k, axis=4)
    return _wide(blocks.anchor_k)[:, :, :, None] + k, v


def _decoded(blocks: CompressedBlocks, name: str, segments: Segments) -> Array:
    """Coded rows as numbers ``[B, N, H, R, C]``, channels in stored order."""
    kept = blocks.num_residuals
    scale, low = (by_row(_wide(getattr(blocks, f"{name}_{part}")), kept) for part in ("scale", "min"))
    unit = _wide(getattr(blocks, f"{name}_unit"))[..., None, None]
    return unit * (low + scale * _wide(unpack(getattr(blocks, name), segments)))
