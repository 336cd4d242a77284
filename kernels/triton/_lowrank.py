"""Low-rank factors of blocks and the rows kept beside them, in float64: small singular values survive the squaring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._cast import saturated, widened
from ._launch import launch, power_of_two
from ._wide import differences, exact_power, head_of, long, rounded_half, signed_codes, unit_exponent

NORM_FLOOR = tl.constexpr(1e-5)
ENERGY_FLOOR = tl.constexpr(1e-12)
GAIN_MAX = tl.constexpr(1e4)


@triton.jit(do_not_specialize=["pairs", "first"])
def _row_sums(
    k, v, squares_k, squares_v, cosine, pairs, first, N, H, S, D, DV,
    k_stride_b, k_stride_h, k_stride_t, k_stride_d, v_stride_b, v_stride_h, v_stride_t, v_stride_d,
    VALUES: tl.constexpr, COSINE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Squares of the differences of a head's rows, and the cosine of its values with their mean; ``[n, H, S]``."""
    pair = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    row = tl.arange(0, BLOCK_S).to(tl.int64)[None, :, None]
    column = tl.arange(0, BLOCK_D).to(tl.int64)[None, None, :]
    block, head = first + pair // H, pair % H
    there = (pair < pairs) & (row < S)
    rows = head_of(k, block, head, N, S, k_stride_b, k_stride_h, k_stride_t)
    total = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
    for start in range(0, D, BLOCK_D):
        channel = start + column
        anchor = rows + channel * k_stride_d
        x = differences(anchor + row * k_stride_t, anchor, there & (channel < D), (pair < pairs) & (channel < D))
        total += tl.sum(x * x, 2)
    tl.store(squares_k + pair * S + row, total[:, :, None], mask=there)
    if VALUES:
        rows = head_of(v, block, head, N, S, v_stride_b, v_stride_h, v_stride_t)
        total = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
        square = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
        product = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
        mean_square = tl.zeros((BLOCK_N,), tl.float64)
        for start in range(0, DV, BLOCK_D):
            channel = start + column
            anchor = rows + channel * v_stride_d
            seen, known = there & (channel < DV), (pair < pairs) & (channel < DV)
            x = differences(anchor + row * v_stride_t, anchor, seen, known)
            total += tl.sum(x * x, 2)
            if COSINE:
                x = widened(tl.load(anchor + row * v_stride_t, mask=seen, other=0.0)).to(tl.float64)
                mean = tl.sum(x, 1) / S
                square += tl.sum(x * x, 2)
                product += tl.sum(x * mean[:, None, :], 2)
                mean_square += tl.sum(mean * mean, 1)
        tl.store(squares_v + pair * S + row, total[:, :, None], mask=there)
        if COSINE:
            length = tl.sqrt(square) * tl.sqrt(mean_square)[:, None]
            found = tl.where(length > 0, product / tl.where(length > 0, length, 1.0), 0.0)
            tl.store(cosine + pair * S + row, found[:, :, None], mask=there)


@triton.jit(do_not_specialize=["blocks"])
def _block_sums(
    squares_k, squares_v, cosine, square, score, gain, blocks, H, S,
    VALUES: tl.constexpr, COSINE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Value gain ``[n]``, squares of the joint rows and scores ``[n, S]``."""
    block = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    row = tl.arange(0, BLOCK_S).to(tl.int64)[None, :]
    there = (block < blocks) & (row < S)
    joint = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
    values = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
    distinct = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
    for head in range(H):
        at = (block * H + head) * S + row
        joint += tl.load(squares_k + at, mask=there, other=0.0)
        if VALUES:
            values += tl.load(squares_v + at, mask=there, other=0.0)
        if COSINE:
            distinct += 1.0 - tl.load(cosine + at, mask=there, other=0.0)
    if VALUES:
        energy_k, energy_v = tl.sum(joint, 1)[:, None], tl.sum(values, 1)[:, None]
        defined = (energy_k >= ENERGY_FLOOR) & (energy_v >= ENERGY_FLOOR)
        ratio = tl.sqrt(energy_k / tl.where(defined, energy_v, 1.0))
        factor = tl.where(defined, tl.minimum(tl.maximum(ratio, 1.0), GAIN_MAX), 1.0).to(tl.float32)
        tl.store(gain + block, factor, mask=block < blocks)
        factor = factor.to(tl.float64)
        joint += factor * factor * values
    tl.store(square + block * S + row, joint, mask=there)
    if COSINE:
        tl.store(score + block * S + row, distinct / H, mask=there)


@triton.jit(do_not_specialize=["lines", "first"])
def _joint_rows(
    k, v, square, gain, joint, lines, first, N, H, S, D, DV, W,
    k_stride_b, k_stride_h, k_stride_t, k_stride_d, v_stride_b, v_stride_h, v_stride_t, v_stride_d,
    VALUES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head's part of the joint rows ``[n, S, W]``, of norm 1."""
    line = (tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S))[:, None]
    column = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    head = tl.program_id(1).to(tl.int64)
    n, row, there = line // S, line % S, line < lines
    H = long(H)
    norm = tl.maximum(tl.sqrt(tl.load(square + line, mask=there, other=0.0)), NORM_FLOOR)
    anchor = head_of(k, first + n, head, N, S, k_stride_b, k_stride_h, k_stride_t)
    for start in range(0, D, BLOCK_D):
        channel = start + column
        seen = there & (channel < D)
        at = anchor + channel * k_stride_d
        x = differences(at + row * k_stride_t, at, seen, seen) / norm
        tl.store(joint + line * W + head * D + channel, x, mask=seen)
    if VALUES:
        factor = tl.load(gain + n, mask=there, other=1.0).to(tl.float64)
        anchor = head_of(v, first + n, head, N, S, v_stride_b, v_stride_h, v_stride_t)
        for start in range(0, DV, BLOCK_D):
            channel = start + column
            seen = there & (channel < DV)
            at = anchor + channel * v_stride_d
            x = factor * differences(at + row * v_stride_t, at, seen, seen) / norm
            tl.store(joint + line * W + H * D + head * DV + channel, x, mask=seen)


@triton.jit
def _product(
    a, b, out, M, L, K, a_stride_n, a_stride_m, a_stride_k, b_stride_n, b_stride_k, b_stride_l,
    SYMMETRIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``a [n, M, K] @ b [n, K, L]``; unlike a library's, its sums do not depend on ``n``."""
    if SYMMETRIC and tl.program_id(2) > tl.program_id(1):
        return
    n = tl.program_id(0).to(tl.int64)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_L), tl.float64)
    for start in range(0, K, BLOCK_K):
        inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        left = a + n * a_stride_n + m[:, None] * a_stride_m + inner[None, :] * a_stride_k
        right = b + n * b_stride_n + inner[:, None] * b_stride_k + column[None, :] * b_stride_l
        x = tl.load(left, mask=(m < M)[:, None] & (inner < K)[None, :], other=0.0)
        y = tl.load(right, mask=(inner < K)[:, None] & (column < L)[None, :], other=0.0)
        total += tl.dot(x, y, input_precision="ieee", out_dtype=tl.float64)
    seen = (m < M)[:, None] & (column < L)[None, :]
    tl.store(out + (n * M + m)[:, None] * L + column[None, :], total, mask=seen)
    if SYMMETRIC:
        tl.store(out + (n * M + column)[None, :] * L + m[:, None], total, mask=seen)


@triton.jit(do_not_specialize=["lines"])
def _store_basis(
    projected, length, basis_k, basis_v, scale_k, scale_v, lines, H, D, DV, W, RANK,
    VALUES: tl.constexpr, CODED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Bases ``[n, H, r, dim]`` of rows ``projected [n, r, W]``, and the lengths of these rows."""
    line = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    channel = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    H, D, DV = long(H), long(D), long(DV)
    there = line < lines
    rows = projected + line * W + channel
    seen_k, seen_v = there & (channel < D), there & (channel < DV)
    square = tl.zeros((BLOCK_R, BLOCK_D), tl.float64)
    peak_k = tl.zeros((BLOCK_R, BLOCK_D), tl.float64)
    peak_v = tl.zeros((BLOCK_R, BLOCK_D), tl.float64)
    for head in range(H):
        x = tl.load(rows + head * D, mask=seen_k, other=0.0)
        square += x * x
        peak_k = tl.maximum(peak_k, tl.abs(x))
        if VALUES:
            x = tl.load(rows + H * D + head * DV, mask=seen_v, other=0.0)
            square += x * x
            peak_v = tl.maximum(peak_v, tl.abs(x))
    size = tl.sqrt(tl.sum(square, 1))[:, None]
    tl.store(length + line, size, mask=there)
    size = tl.where(size > 0, size, 1.0)
    step_k = (tl.max(peak_k, 1)[:, None] / size / 127).to(tl.float32)
    step_v = (tl.max(peak_v, 1)[:, None] / size / 127).to(tl.float32)
    if CODED:
        tl.store(scale_k + line, step_k, mask=there)
        if VALUES:
            tl.store(scale_v + line, step_v, mask=there)
    for head in range(H):
        at = (line // RANK * H + head) * RANK + line % RANK
        x = tl.load(rows + head * D, mask=seen_k, other=0.0) / size
        if CODED:
            stored = signed_codes(x, step_k.to(tl.float64))
        else:
            stored = saturated(x, basis_k.dtype.element_ty)
        tl.store(basis_k + at * D + channel, stored, mask=seen_k)
        if VALUES:
            x = tl.load(rows + H * D + head * DV, mask=seen_v, other=0.0) / size
            if CODED:
                stored = signed_codes(x, step_v.to(tl.float64))
            else:
                stored = saturated(x, basis_v.dtype.element_ty)
            tl.store(basis_v + at * DV + channel, stored, mask=seen_v)


@triton.jit
def _coefficients(left, square, length, n, row, column, seen, S, RANK):
    """``u`` of some rows: left vectors times singular values and row norms; 0 for the anchor."""
    x = tl.load(left + (n * S + row) * RANK + column, mask=seen, other=0.0)
    norm = tl.sqrt(tl.load(square + n * S + row + 0 * column, mask=seen, other=0.0))
    size = tl.load(length + n * RANK + column + 0 * row, mask=seen, other=0.0)
    return tl.where(seen & (row > 0), tl.maximum(norm, NORM_FLOOR) * x * size, 0.0)


@triton.jit(do_not_specialize=["blocks"])
def _store_u(
    left, square, length, u, u_scale, u_unit, blocks, S, RANK,
    CODED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """``u [n, S, r]`` in its unit."""
    n = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    column = tl.arange(0, BLOCK_R).to(tl.int64)[None, None, :]
    largest = tl.zeros((BLOCK_N, BLOCK_S), tl.float64)
    for start in range(0, S, BLOCK_S):
        row = (start + tl.arange(0, BLOCK_S)).to(tl.int64)[None, :, None]
        seen = (n < blocks) & (row < S) & (column < RANK)
        x = _coefficients(left, square, length, n, row, column, seen, S, RANK)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 2))
    exponent = unit_exponent(tl.max(largest, 1), 0)[:, None, None]
    tl.store(u_unit + n, exact_power(exponent).to(tl.float32), mask=n < blocks)
    shrink = exact_power(-exponent)
    for start in range(0, S, BLOCK_S):
        row = (start + tl.arange(0, BLOCK_S)).to(tl.int64)[None, :, None]
        seen = (n < blocks) & (row < S) & (column < RANK)
        x = _coefficients(left, square, length, n, row, column, seen, S, RANK) * shrink
        if CODED:
            scale = rounded_half(tl.max(tl.abs(x), 2) / 127)[:, :, None]
            tl.store(u_scale + n * S + row, scale.to(tl.float32).to(tl.float16), mask=(n < blocks) & (row < S))
            stored = signed_codes(x, scale)
        else:
            stored = saturated(x, u.dtype.element_ty)
        tl.store(u + (n * S + row) * RANK + column, stored, mask=seen)


@triton.jit
def _lowrank_errors(
    joint, left, projected, square, score, S, W, RANK,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Squared error of each joint row before its factors are stored, ``[n, S]``."""
    n = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    rank = tl.arange(0, BLOCK_R).to(tl.int64)
    seen = (row < S)[:, None] & (rank < RANK)[None, :]
    u = tl.load(left + (n * S + row)[:, None] * RANK + rank[None, :], mask=seen, other=0.0)
    total = tl.zeros((BLOCK_S,), tl.float64)
    for start in range(0, W, BLOCK_W):
        channel = (start + tl.arange(0, BLOCK_W)).to(tl.int64)
        at = (n * RANK + rank)[:, None] * W + channel[None, :]
        basis = tl.load(projected + at, mask=(rank < RANK)[:, None] & (channel < W)[None, :], other=0.0)
        at = (n * S + row)[:, None] * W + channel[None, :]
        x = tl.load(joint + at, mask=(row < S)[:, None] & (channel < W)[None, :], other=0.0)
        x -= tl.dot(u, basis, input_precision="ieee", out_dtype=tl.float64)
        total += tl.sum(x * x, 1)
    norm = tl.maximum(tl.sqrt(tl.load(square + n * S + row, mask=row < S, other=0.0)), NORM_FLOOR)
    tl.store(score + n * S + row, norm * norm * total, mask=row < S)


@triton.jit
def _keep_score(score, weight, n, first, row, seen, N, S, stride_b, stride_t, WEIGHTED: tl.constexpr):
    """Score of some rows; -inf for what is no candidate."""
    x = tl.load(score + n * S + row, mask=seen, other=0.0)
    if WEIGHTED:
        block = first + n
        at = (block // N) * stride_b + ((block % N) * S + row) * stride_t
        x *= tl.load(weight + at, mask=seen, other=0.0).to(tl.float64)
    return tl.where(seen, x, float("-inf"))


@triton.jit(do_not_specialize=["blocks", "first"])
def _select_rows(
    score, weight, kept, blocks, first, N, S, R, stride_b, stride_t,
    WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Positions of the ``R`` highest scores, ascending, ``[n, R]``."""
    n = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None, None]
    row = tl.arange(0, BLOCK_S).to(tl.int64)[None, :, None]
    candidate = (n < blocks) & (row > 0) & (row < S)
    mine = _keep_score(score, weight, n, first, row, candidate, N, S, stride_b, stride_t, WEIGHTED)
    place = tl.zeros((BLOCK_N, BLOCK_S), tl.int32)
    for start in range(0, S, BLOCK_J):
        other = (start + tl.arange(0, BLOCK_J)).to(tl.int64)[None, None, :]
        seen = (n < blocks) & (other > 0) & (other < S)
        theirs = _keep_score(score, weight, n, first, other, seen, N, S, stride_b, stride_t, WEIGHTED)
        before = (theirs > mine) | ((theirs == mine) & (other < row))
        place += tl.sum(before.to(tl.int32), 2)
    keeps = candidate & (place[:, :, None] < R)
    at = tl.cumsum(keeps.to(tl.int32), 1) - 1
    tl.store(kept + n * R + at, tl.broadcast_to(row, at.shape).to(tl.uint8), mask=keeps)


def eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Those of the ``rank`` largest eigenvalues of ``gram [n, M, M]``, ``[n, M, rank]``."""
    count = len(gram)
    if count == 1:  # libraries solve one matrix by another path than several, and a block's bits would show it
        gram = gram.expand(2, -1, -1)
    try:
        values, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:
        vectors, values, _ = torch.linalg.svd(gram)
    best = values.argsort(dim=-1, stable=True)[:count, -rank:].flip(-1)
    return vectors[:count].gather(-1, best[:, None, :].expand(-1, gram.shape[1], -1)).contiguous()


def product(a: Tensor, b: Tensor, *, symmetric: bool = False) -> Tensor:
    """``a [n, M, K] @ b [n, K, L]``, float64; of a symmetric product one half is computed."""
    (n, rows, inner), columns = a.shape, b.shape[2]
    out = a.new_empty(n, rows, columns)
    tile = {"BLOCK_M": min(64, power_of_two(rows, 16)), "BLOCK_L": min(64, power_of_two(columns, 16))}
    grid = (n, -(-rows // tile["BLOCK_M"]), -(-columns // tile["BLOCK_L"]))
    tile["BLOCK_K"] = min(power_of_two(inner, 16), 2048 // max(tile.values()))
    launch(
        _product, grid, a, b, out, rows, columns, inner, *a.stride(), *b.stride(), SYMMETRIC=symmetric, **tile,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out
