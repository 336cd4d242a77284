"""Compress blocks of K and V, and rebuild them."""

from __future__ import annotations

import torch
from torch import Tensor

from dkv.types import BlockFormat, CompressedBlocks

from ._storage import Segments, power_of_two_above, quantise_rows, quantise_signed, unpack
from .merge import saturated

WORKSPACE_BYTES = 128 << 20  # blocks compressed together; the result of a block does not depend on it
ROW_BYTES = 2 << 20  # rows coded together, in float64: several passes go over them
ROW_NORM_FLOOR = 1e-5
ENERGY_FLOOR = 1e-12
GAIN_MAX = 1e4


def compress_blocks(
    k: Tensor,
    v: Tensor,
    fmt: BlockFormat,
    keep: str,
    token_weight: Tensor | None,
    channel_weight: Tensor | None = None,
) -> CompressedBlocks:
    """k ``[B, H, N * S, D]``, v ``[B, H, N * S, Dv]``, token_weight ``[B, N * S]``, channel_weight ``[H, D]``."""
    batch, heads, tokens, _ = k.shape
    size = fmt.block_size
    count = tokens // size
    # [B, H, N * S, D] -> [B * N, S, H, D]: blocks are independent
    rows_k = k.unflatten(2, (count, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    rows_v = v.unflatten(2, (count, size)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    weight = None if token_weight is None else token_weight.reshape(batch * count, size)
    per_block = 8 * size * (3 * heads * (k.shape[3] + v.shape[3]) + 3 * size)
    step = max(1, WORKSPACE_BYTES // per_block)
    pieces = [
        _compress(
            rows_k[i : i + step],
            rows_v[i : i + step],
            fmt,
            keep,
            None if weight is None else weight[i : i + step],
            channel_weight,
        )
        for i in range(0, max(1, batch * count), step)
    ]
    parts = {
        name: None if value is None else torch.cat([piece[name] for piece in pieces]).unflatten(0, (batch, count))
        for name, value in pieces[0].items()
    }
    return CompressedBlocks(format=fmt, **parts)


def _compress(
    k: Tensor, v: Tensor, fmt: BlockFormat, keep: str, token_weight: Tensor | None, channel_weight: Tensor | None
) -> dict[str, Tensor | None]:
    count, size, heads, dim = k.shape
    dim_v = v.shape[3]
    rank = fmt.stored_rank(heads, dim, dim_v)
    parts: dict[str, Tensor | None] = {"anchor_k": k[:, 0].clone(), "anchor_v": v[:, 0].clone()}

    dk = (k.double() - k[:, :1].double()).flatten(2)  # [n, S, H * D]
    if fmt.keeps_every_row:
        joint, gain = dk, None
    else:
        dv = (v.double() - v[:, :1].double()).flatten(2)
        gain = _value_gain(dk, dv)
        joint = torch.cat([dk, dv * gain[:, None, None]], dim=-1)
    u, basis = _truncated_svd(joint, rank)
    kept = _residual_rows(joint, u, basis, v, fmt, keep, token_weight)  # [n, R]
    if not fmt.keeps_every_row:
        parts["residual_indices"] = kept.to(torch.uint8)

    factor = _factor_dtype(fmt, k.dtype)
    unit = power_of_two_above(u.abs().amax((1, 2)) if rank else u.new_zeros(count))
    parts["u_unit"] = unit
    u = u / unit.double()[:, None, None]
    # [n, r, H * D] -> [n, H, r, D]
    basis_k = basis[..., : heads * dim].unflatten(2, (heads, dim)).transpose(1, 2)
    if factor is torch.int8:
        scale = (u.abs().amax(-1) / 127).half() if rank else u.new_zeros(count, size).half()
        parts["u_scale"] = scale if rank else None
        parts["u"] = quantise_signed(u, scale[..., None])
    else:
        parts["u"] = u.to(factor)
    parts["basis_k"], parts["basis_k_scale"] = _store_basis(basis_k, factor)
    if gain is not None:
        basis_v = basis[..., heads * dim :].unflatten(2, (heads, dim_v)).transpose(1, 2)
        parts["basis_v"], parts["basis_v_scale"] = _store_basis(basis_v, factor)
        parts["v_gain"] = gain.float()

    block = torch.arange(count, device=k.device)[:, None]
    rows_k, rows_v = k[block, kept].transpose(1, 2), v[block, kept].transpose(1, 2)  # [n, H, R, D]
    if fmt.exact_rows:
        parts.update(residual_k=rows_k.contiguous(), residual_v=rows_v.contiguous())
    else:
        importance = None
        if fmt.orders_channels:
            importance = k.new_ones(heads, dim) if channel_weight is None else channel_weight
        parts.update(_store_rows("residual_k", rows_k, k[:, 0], fmt.key_segments(dim), importance))
        parts.update(_store_rows("residual_v", rows_v, None, fmt.value_segments(dim_v), None))
    if fmt.minmax:
        parts["k_min"], parts["k_max"] = k.amin(1), k.amax(1)
    return parts


def _value_gain(dk: Tensor, dv: Tensor) -> Tensor:
    energy_k, energy_v = dk.square().sum((1, 2)), dv.square().sum((1, 2))
    defined = (energy_k >= ENERGY_FLOOR) & (energy_v >= ENERGY_FLOOR)
    ratio = (energy_k / torch.where(defined, energy_v, 1.0)).sqrt().clamp(1.0, GAIN_MAX)
    return torch.where(defined, ratio, 1.0)


def _truncated_svd(rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """u ``[n, S, r]`` and orthonormal basis ``[n, r, C]`` of row-normalised ``rows [n, S, C]``, norms folded into u."""
    if rank == 0:
        return rows[..., :0], rows[:, :0]
    norm = rows.square().sum(-1, keepdim=True).sqrt().clamp(min=ROW_NORM_FLOOR)
    unit = rows / norm
    narrow = unit.shape[2] < unit.shape[1]
    gram = unit.mT @ unit if narrow else unit @ unit.mT  # float64: small singular values survive the squaring
    vectors = _eigenvectors(gram)[..., -rank:].flip(-1)
    if narrow:
        return norm * (unit @ vectors), vectors.mT.contiguous()
    projected = vectors.mT @ unit  # [n, r, C], rows of length sigma
    sigma = projected.square().sum(-1, keepdim=True).sqrt()
    basis = torch.where(sigma > 0, projected / torch.where(sigma > 0, sigma, 1.0), 0.0)
    return norm * vectors * sigma.mT, basis


def _eigenvectors(gram: Tensor) -> Tensor:
    """Eigenvectors by ascending eigenvalue."""
    try:
        values, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:
        vectors, values, _ = torch.linalg.svd(gram)
    order = values.argsort(dim=-1, stable=True)
    return vectors.gather(-1, order[..., None, :].expand_as(vectors))


def _residual_rows(
    joint: Tensor, u: Tensor, basis: Tensor, v: Tensor, fmt: BlockFormat, keep: str, token_weight: Tensor | None
) -> Tensor:
    count, size = joint.shape[:2]
    if fmt.keeps_every_row:
        return torch.arange(1, size, device=joint.device).expand(count, size - 1)
    if keep == "error":
        score = (joint - u @ basis).square().sum(-1)
    else:
        rows = v.double()  # [n, S, H, Dv]
        mean = rows.mean(1, keepdim=True)
        length = rows.square().sum(-1).sqrt() * mean.square().sum(-1).sqrt()
        cosine = torch.where(length > 0, (rows * mean).sum(-1) / torch.where(length > 0, length, 1.0), 0.0)
        score = (1 - cosine).mean(-1)
    if token_weight is not None:
        score = score * token_weight.double()
    order = score[:, 1:].sort(dim=1, descending=True, stable=True).indices + 1
    return order[:, : fmt.num_residuals].sort(dim=1).values


def _factor_dtype(fmt: BlockFormat, cache: torch.dtype) -> torch.dtype:
    if fmt.factor_bits == 8:
        return torch.int8
    if fmt.factor_bits == 32:
        return torch.float32
    return torch.bfloat16 if cache is torch.bfloat16 else torch.float16


def _store_basis(basis: Tensor, factor: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """basis ``[n, H, r, D]``; one scale per basis row."""
    if factor is not torch.int8:
        return basis.to(factor).contiguous(), None
    scale = (basis.abs().amax((1, 3)) / 127).float()  # [n, r]
    return quantise_signed(basis, scale[:, None, :, None]).contiguous(), scale


def _store_rows(
    name: str, rows: Tensor, anchor: Tensor | None, segments: Segments, importance: Tensor | None
) -> dict[str, Tensor | None]:
    """rows ``[n, H, R, D]`` as coded parts, less their anchor ``[n, H, D]`` where one is given."""
    rows, anchor = rows.detach(), None if anchor is None else anchor.detach()  # codes have no gradient
    step = max(1, ROW_BYTES // max(1, 8 * rows[:1].numel()))
    pieces = []
    for i in range(0, max(1, len(rows)), step):
        x = rows[i : i + step].mT.to(torch.float64, memory_format=torch.contiguous_format)
        if anchor is not None:
            x -= anchor[i : i + step, :, :, None].double()
        pieces.append(quantise_rows(x, segments, None if importance is None else importance.double()))
    names = (name, f"{name}_scale", f"{name}_min", f"{name}_unit", f"{name}_order")
    parts = dict(zip(names, zip(*pieces, strict=True), strict=True))
    stored = {key: torch.cat(part) for key, part in parts.items() if part[0] is not None}
    if importance is not None:
        stored[f"{name}_order"] = stored[f"{name}_order"].to(torch.uint8)
    return stored


def reconstruct_blocks(blocks: CompressedBlocks, wide: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rebuild ``k [B, H, N * S, D]`` and ``v [B, H, N * S, Dv]`` in the cache's dtype, computed in ``wide``.

    Blocks beyond ``block_counts`` come back as zeros.
    """
    size = blocks.block_size
    k, v = (x.to(wide)[:, :, :, None].repeat(1, 1, 1, size, 1) for x in (blocks.anchor_k, blocks.anchor_v))
    if not blocks.format.keeps_every_row:
        u = blocks.u.to(wide) * blocks.u_unit.to(wide)[:, :, None, None]  # [B, N, S, r]
        if blocks.u_scale is not None:
            u = u * blocks.u_scale.to(wide)[..., None]
        k += u[:, :, None] @ _basis(blocks.basis_k, blocks.basis_k_scale, wide)
        if blocks.basis_v is not None and blocks.v_gain is not None:
            low = u[:, :, None] @ _basis(blocks.basis_v, blocks.basis_v_scale, wide)
            v += low / blocks.v_gain.to(wide)[..., None, None, None]
    dtype = blocks.anchor_k.dtype
    k, v = saturated(k, dtype), saturated(v, blocks.anchor_v.dtype)
    k[:, :, :, 0], v[:, :, :, 0] = blocks.anchor_k, blocks.anchor_v
    rows_k, rows_v = residual_rows(blocks, wide)
    where = _positions(blocks)
    if blocks.block_counts is not None:
        beyond = torch.arange(blocks.num_blocks, device=k.device) >= blocks.block_counts[:, None]  # [B, N]
        where = where.masked_fill(beyond[:, :, None], 0)
    where = where[:, :, None, :, None]
    k.scatter_(3, where.expand_as(rows_k), saturated(rows_k, dtype))
    v.scatter_(3, where.expand_as(rows_v), saturated(rows_v, blocks.anchor_v.dtype))
    if blocks.block_counts is not None:
        k, v = (x.masked_fill(beyond[:, :, None, None, None], 0) for x in (k, v))
    # [B, N, H, S, D] -> [B, H, N * S, D]
    return k.transpose(1, 2).flatten(2, 3), v.transpose(1, 2).flatten(2, 3)


def _positions(blocks: CompressedBlocks) -> Tensor:
    """Positions of the residual rows, ``[B, N, R]``."""
    if blocks.residual_indices is not None:
        return blocks.residual_indices.long()
    every = torch.arange(1, blocks.block_size, device=blocks.anchor_k.device)
    return every.expand(blocks.batch_size, blocks.num_blocks, -1)


def _basis(basis: Tensor, scale: Tensor | None, wide: torch.dtype) -> Tensor:
    return basis.to(wide) if scale is None else basis.to(wide) * scale.to(wide)[:, :, None, :, None]


def residual_rows(blocks: CompressedBlocks, wide: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Stored residual rows as numbers in ``wide``, ``[B, N, H, R, D]`` and ``[B, N, H, R, Dv]``."""
    fmt = blocks.format
    if fmt.exact_rows:
        return blocks.residual_k.to(wide), blocks.residual_v.to(wide)
    k = _decoded(blocks, "residual_k", fmt.key_segments(blocks.head_dim), wide)
    v = _decoded(blocks, "residual_v", fmt.value_segments(blocks.head_dim_v), wide)
    if fmt.orders_channels:
        order = blocks.residual_k_order.long()
        if blocks.block_counts is not None:  # what lies beyond may hold places that no key has
            beyond = torch.arange(blocks.num_blocks, device=k.device) >= blocks.block_counts[:, None]
            order = order.masked_fill(beyond[:, :, None, None], 0)
        k = torch.zeros_like(k).scatter_(4, order[..., None, :].expand_as(k), k)
    return blocks.anchor_k.to(wide)[:, :, :, None] + k, v


def _decoded(blocks: CompressedBlocks, name: str, segments: Segments, wide: torch.dtype) -> Tensor:
    """Coded rows as numbers ``[B, N, H, R, D]``, channels in stored order."""
    scale, low, unit = (getattr(blocks, f"{name}_{part}").to(wide) for part in ("scale", "min", "unit"))
    codes = unpack(getattr(blocks, name), segments, wide)  # [B, N, H, Q, S, C]
    codes = torch.nn.functional.pad(codes, (0, scale.shape[-1] - codes.shape[-1]))
    rows = unit[..., None, None, None] * (low[..., None, :] + scale[..., None, :] * codes)
    return rows.flatten(3, 4)[..., : blocks.num_residuals, :]
