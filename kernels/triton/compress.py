"""Compress blocks of K and V, and rebuild them."""

from __future__ import annotations

import torch
from torch import Tensor

from dkv.types import EIGHTHS, RESIDUAL_GROUP, BlockFormat, CompressedBlocks

from ._launch import launch, power_of_two
from ._lowrank import (
    _block_sums,
    _joint_rows,
    _lowrank_errors,
    _row_sums,
    _select_rows,
    _store_basis,
    _store_u,
    eigenvectors,
    product,
)
from ._quantise import code_rows
from ._rebuild import lowrank_rows, residual_rows
from ._wide import packed_widths

WORKSPACE_BYTES = 256 << 20  # blocks factored together; the result of a block does not depend on it
TILE = 8192  # numbers of a tile

Parts = dict[str, Tensor]


def compress_blocks(
    k: Tensor,
    v: Tensor,
    fmt: BlockFormat,
    keep: str,
    token_weight: Tensor | None,
    channel_weight: Tensor | None = None,
) -> CompressedBlocks:
    """k ``[B, H, N * S, D]``, v ``[B, H, N * S, Dv]``, token_weight ``[B, N * S]``, channel_weight ``[H, D]``."""
    k, v = k.detach(), v.detach()
    batch, heads, tokens, dim = k.shape
    size, dim_v = fmt.block_size, v.shape[3]
    count = tokens // size
    blocks_k, blocks_v = (x.unflatten(2, (count, size)) for x in (k, v))
    parts = {"anchor_k": _owned(blocks_k[:, :, :, 0]), "anchor_v": _owned(blocks_v[:, :, :, 0])}
    if fmt.minmax:
        parts["k_min"], parts["k_max"] = _owned(blocks_k.amin(3)), _owned(blocks_k.amax(3))
    factors = _empty_factors(k, fmt, batch * count, dim_v)
    _fill_factors(k, v, fmt, keep, token_weight, factors)
    kept = factors.get("residual_indices")
    if fmt.exact_rows:
        for name, rows in (("residual_k", blocks_k), ("residual_v", blocks_v)):
            if kept is None:
                parts[name] = _owned(rows[:, :, :, 1:])
            else:
                where = kept.view(batch, 1, count, fmt.num_residuals, 1).long()
                parts[name] = _owned(rows.gather(3, where.expand(-1, heads, -1, -1, rows.shape[4])))
    else:
        shape = {"block_size": size, "num_residuals": fmt.num_residuals}
        widths, segments = _key_widths(fmt), fmt.key_segments(dim)
        coded = code_rows(
            k, kept, widths, segments, channel_weight, **shape, anchored=True, ordered=fmt.orders_channels
        )
        factors.update(_named("residual_k", coded))
        widths, segments = _value_widths(fmt), fmt.value_segments(dim_v)
        coded = code_rows(v, kept, widths, segments, None, **shape, anchored=False, ordered=False)
        factors.update(_named("residual_v", coded))
    parts.update({name: part.unflatten(0, (batch, count)) for name, part in factors.items()})
    return CompressedBlocks(format=fmt, **parts)


def _owned(rows: Tensor) -> Tensor:
    """``[B, H, N, ...]`` as ``[B, N, H, ...]``, in memory of its own."""
    return rows.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _named(name: str, coded: tuple[Tensor | None, ...]) -> Parts:
    names = (name, f"{name}_scale", f"{name}_min", f"{name}_unit", f"{name}_order")
    return {key: part for key, part in zip(names, coded, strict=True) if part is not None}


def _key_widths(fmt: BlockFormat) -> tuple[int, ...]:
    return fmt.key_bits or (fmt.residual_bits,) * EIGHTHS


def _value_widths(fmt: BlockFormat) -> tuple[int, ...]:
    return (fmt.residual_bits if fmt.value_bits is None else fmt.value_bits,) * EIGHTHS


def _empty_factors(k: Tensor, fmt: BlockFormat, total: int, dim_v: int) -> Parts:
    """The low-rank parts and the positions of the kept rows, ``[B * N, ...]``."""
    heads, dim = k.shape[1], k.shape[3]
    rank = fmt.stored_rank(heads, dim, dim_v)
    half = torch.bfloat16 if k.dtype is torch.bfloat16 else torch.float16
    factor = {8: torch.int8, 16: half, 32: torch.float32}[fmt.factor_bits]
    parts = {
        "u": k.new_empty(total, fmt.block_size, rank, dtype=factor),
        "u_unit": k.new_ones(total, dtype=torch.float32),
        "basis_k": k.new_empty(total, heads, rank, dim, dtype=factor),
    }
    if not fmt.keeps_every_row:
        parts["basis_v"] = k.new_empty(total, heads, rank, dim_v, dtype=factor)
        parts["v_gain"] = k.new_empty(total, dtype=torch.float32)
        parts["residual_indices"] = k.new_empty(total, fmt.num_residuals, dtype=torch.uint8)
    if fmt.factor_bits == 8:
        if rank:
            parts["u_scale"] = k.new_empty(total, fmt.block_size, dtype=torch.float16)
        for name in ("basis_k", "basis_v"):
            if name in parts:
                parts[f"{name}_scale"] = k.new_empty(total, rank, dtype=torch.float32)
    return parts


def _fill_factors(k: Tensor, v: Tensor, fmt: BlockFormat, keep: str, weight: Tensor | None, parts: Parts) -> None:
    """Factor all blocks and choose their rows, some blocks at a time."""
    total, size, rank = parts["u"].shape
    if fmt.keeps_every_row and not rank:
        return
    width = k.shape[1] * (k.shape[3] + (0 if fmt.keeps_every_row else v.shape[3]))
    side = min(size, width)
    per_block = 8 * (3 * k.shape[1] * size + ((size + rank) * width + 3 * side * side if rank else 0))
    step = max(1, WORKSPACE_BYTES // per_block)
    for first in range(0, total, step):
        some = {name: part[first : first + step] for name, part in parts.items()}
        _fill_some(k, v, fmt, keep, weight, some, first, width)


def _fill_some(
    k: Tensor, v: Tensor, fmt: BlockFormat, keep: str, weight: Tensor | None, parts: Parts, first: int, width: int
) -> None:
    """Factors and kept rows of the blocks that lie from ``first`` on."""
    n, size, rank = parts["u"].shape
    heads, dim, dim_v = k.shape[1], k.shape[3], v.shape[3]
    values = not fmt.keeps_every_row
    chosen = values and fmt.num_residuals > 0
    flags = {"VALUES": values, "COSINE": chosen and keep == "distinct"}
    options = {"num_warps": 8, "num_stages": 1}
    rows, most = power_of_two(size, 16), power_of_two(max(dim, dim_v), 16)
    wide = {"dtype": torch.float64}
    squares_k, squares_v, cosine = (k.new_empty(n, heads, size, **wide) for _ in range(3))
    square, score = (k.new_empty(n, size, **wide) for _ in range(2))
    gain = parts.get("v_gain", square)
    shape, strides = (k.shape[2] // size, heads, size, dim, dim_v), (*k.stride(), *v.stride())
    channels = min(most, TILE // rows)
    tile = {"BLOCK_N": _several(n * heads, rows * channels), "BLOCK_S": rows, "BLOCK_D": channels}
    launch(
        _row_sums, (-(-n * heads // tile["BLOCK_N"]),), k, v, squares_k, squares_v, cosine, n * heads, first, *shape,
        *strides, **flags, **tile, **options,
    )  # fmt: skip
    tile = {"BLOCK_N": _several(n, rows), "BLOCK_S": rows}
    launch(
        _block_sums, (-(-n // tile["BLOCK_N"]),), squares_k, squares_v, cosine, square, score, gain, n, heads, size,
        **flags, **tile, **options,
    )  # fmt: skip
    if keep == "error":
        score = square
    if rank:
        joint = k.new_empty(n, size, width, **wide)
        tile = {"BLOCK_S": _several(n * size, min(most, 64)), "BLOCK_D": min(most, 64)}
        launch(
            _joint_rows, (-(-n * size // tile["BLOCK_S"]), heads), k, v, square, gain, joint, n * size, first, *shape,
            width, *strides, VALUES=values, **tile, **options,
        )  # fmt: skip
        left, projected, length = _factored(joint, rank)
        coded, ranks = {"CODED": fmt.factor_bits == 8}, power_of_two(rank, 16)
        tile = {"BLOCK_R": _several(n * rank, 2 * most), "BLOCK_D": most}
        launch(
            _store_basis, (-(-n * rank // tile["BLOCK_R"]),), projected, length, parts["basis_k"],
            parts.get("basis_v", projected), parts.get("basis_k_scale", length), parts.get("basis_v_scale", length),
            n * rank, heads, dim, dim_v, width, rank, VALUES=values, **coded, **tile, **options,
        )  # fmt: skip
        some = min(rows, TILE // ranks)
        tile = {"BLOCK_N": _several(n, some * ranks), "BLOCK_S": some, "BLOCK_R": ranks}
        launch(
            _store_u, (-(-n // tile["BLOCK_N"]),), left, square, length, parts["u"], parts.get("u_scale", length),
            parts["u_unit"], n, size, rank, **coded, **tile, **options,
        )  # fmt: skip
        if chosen and keep == "error":
            score = torch.empty_like(square)
            tile = {"BLOCK_S": min(rows, 32), "BLOCK_W": 16 if ranks > 64 else 32, "BLOCK_R": ranks}
            launch(
                _lowrank_errors, (n, -(-size // tile["BLOCK_S"])), joint, left, projected, square, score, size, width,
                rank, **tile, **options,
            )  # fmt: skip
    if chosen:
        given = score if weight is None else weight
        tile = {"BLOCK_N": _several(n, rows * min(rows, 32)), "BLOCK_S": rows, "BLOCK_J": min(rows, 32)}
        launch(
            _select_rows, (-(-n // tile["BLOCK_N"]),), score, given, parts["residual_indices"], n, first, shape[0],
            size, fmt.num_residuals, *given.stride(), WEIGHTED=weight is not None, **tile, **options,
        )  # fmt: skip


def _several(count: int, each: int) -> int:
    """How many of ``count`` things of ``each`` numbers one program takes."""
    return min(power_of_two(count), max(1, TILE // each))


def _factored(joint: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """``left [n, S, r]`` and ``projected [n, r, W]``, whose rows still have the lengths ``[n, r]`` to be filled in.

    ``left @ projected`` is the best product for ``joint [n, S, W]``.
    """
    n, size, width = joint.shape
    length = joint.new_empty(n, rank)
    if width < size:
        vectors = eigenvectors(product(joint.mT, joint, symmetric=True), rank)
        return product(joint, vectors), vectors.mT.contiguous(), length
    vectors = eigenvectors(product(joint, joint.mT, symmetric=True), rank)
    return vectors, product(vectors.mT, joint), length


def reconstruct_blocks(blocks: CompressedBlocks) -> tuple[Tensor, Tensor]:
    """Rebuild ``k [B, H, N * S, D]`` and ``v [B, H, N * S, Dv]`` in the cache's dtype; for inspection.

    Blocks beyond ``block_counts`` come back as zeros.
    """
    blocks = blocks.map(lambda part: part.detach().contiguous())
    fmt = blocks.format
    return (
        _rebuilt(blocks, blocks.anchor_k, "k", _key_widths(fmt), None, blocks.residual_k_order),
        _rebuilt(blocks, blocks.anchor_v, "v", _value_widths(fmt), blocks.v_gain, None),
    )


def _rebuilt(
    blocks: CompressedBlocks,
    anchor: Tensor,
    which: str,
    widths: tuple[int, ...],
    gain: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    """Keys or values of all blocks."""
    batch, count, heads, dim = anchor.shape
    size, kept, rank = blocks.block_size, blocks.num_residuals, blocks.rank
    basis, basis_scale = (getattr(blocks, f"basis_{which}{part}") for part in ("", "_scale"))
    packed, scale, minimum, unit = (
        getattr(blocks, f"residual_{which}{part}") for part in ("", "_scale", "_min", "_unit")
    )
    out = anchor.new_empty(batch, heads, count * size, dim)
    counts, positions = blocks.block_counts, blocks.residual_indices
    ragged, strides, options = {"RAGGED": counts is not None}, out.stride()[:3], {"num_warps": 8, "num_stages": 1}
    tile = {"BLOCK_S": min(power_of_two(size, 16), 64), "BLOCK_D": min(power_of_two(heads * dim, 16), 128)}
    launch(
        lowrank_rows, (batch * count, -(-size // tile["BLOCK_S"]), -(-heads * dim // tile["BLOCK_D"])), anchor,
        blocks.u, _or(blocks.u_scale, anchor), blocks.u_unit, _or(basis, anchor), _or(basis_scale, anchor),
        _or(gain, anchor), _or(counts, anchor), out, count, heads, size, dim, rank, *strides,
        CODED=basis_scale is not None, GAINED=gain is not None, FACTORED=basis is not None and rank > 0, **ragged,
        **tile, BLOCK_R=min(power_of_two(rank, 16), 32), **options,
    )  # fmt: skip
    columns, rows = batch * count * heads * dim, min(power_of_two(kept, 16), 64)
    tile = {"BLOCK_S": rows, "BLOCK_C": _several(columns, rows)}
    launch(
        residual_rows, (-(-columns // tile["BLOCK_C"]), -(-kept // rows)), anchor, packed,
        _or(scale, anchor), _or(minimum, anchor), _or(unit, anchor), _or(order, anchor), _or(positions, anchor),
        _or(counts, anchor), out, columns, packed_widths(widths), count, heads, size, kept, dim,
        0 if scale is None else scale.shape[3], packed.shape[4], *strides, CODED=scale is not None,
        ANCHORED=which == "k", ORDERED=order is not None, CHOSEN=positions is not None, **ragged,
        GROUP=RESIDUAL_GROUP, **tile, **options,
    )  # fmt: skip
    return out


def _or(part: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel is handed where it reads nothing."""
    return other if part is None else part
