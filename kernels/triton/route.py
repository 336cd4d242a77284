"""Score every compressed block and select the most relevant ones: one launch scores, the next selects."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkv.types import RESIDUAL_GROUP, CompressedBlocks

from ._dots import device, dot, max_of, sum_of
from ._launch import MOST_REGISTERS, dot_dtype, launch, power_of_two
from ._rows import (
    NONE,
    coded_logits,
    is_kept,
    key_codes,
    load_columns,
    load_vector,
    lowrank_logits,
    plain_logits,
    rank_queries,
    softmax_step,
)
from ._select import Pins, select_blocks, select_scores

GROUP = tl.constexpr(RESIDUAL_GROUP)
PROGRAMS = 512  # that keep a GPU busy; where there are more blocks, a program takes several heads of one


class RouteConfig(NamedTuple):
    """How the scores are cut into programs.

    Attributes
    ----------
    rows : int
        Rows of queries of a program.
    tile : int
        Rows of a block that it scores at a time; divides a scale group.
    heads : int
        kv heads of a program, which read the block's ``u`` once.
    blocks : int
        Blocks of a program of the router "minmax".
    num_warps, num_stages : int
    """

    rows: int
    tile: int
    heads: int
    blocks: int
    num_warps: int
    num_stages: int


def config(
    batch: int, total: int, heads: int, rows: int, block_size: int, head_dim: int, lowrank: bool, stored: bool,
    wide: bool,
) -> RouteConfig:  # fmt: skip
    """Tiles of ``rows`` queries of each of ``heads`` kv heads over ``total`` blocks of each of ``batch`` sequences.

    ``lowrank`` where rows of the rank space are read, ``stored`` where residual rows or bounds are, ``wide`` where
    float32 is multiplied.
    """
    width = power_of_two(head_dim, 16)
    tall = min(power_of_two(rows, 16), 16 if wide else 64 if width <= 128 else 16 if stored else 32)
    most = 128 if width <= 128 else 16 if wide else 32  # rows that registers hold of so many channels
    large = 32 if lowrank and stored else 64 if stored or wide or tall * width > 2048 else 128
    tile = min(power_of_two(block_size, 16), most, large)
    programs = max(1, batch * total * triton.cdiv(rows, tall))
    splits = min(heads, triton.cdiv(PROGRAMS, programs))
    warps = 8 if tall * width > 4096 or wide else 4
    return RouteConfig(tall, tile, triton.cdiv(heads, splits), min(64, most, power_of_two(total, 16)), warps, 2)


@device
def _query_rows(q, row, batch, head, length, q_b, q_h, q_s, GROUP_SIZE: tl.constexpr):
    """Pointers to the queries of a kv head, one query head after another."""
    which = (row // length).to(tl.int64) + head * GROUP_SIZE
    return q + batch * q_b + which * q_h + (row % length).to(tl.int64) * q_s


@device
def _join(peak, total, logits, LARGEST: tl.constexpr):
    """Join ``logits [M, R]`` to a running log-sum-exp or, where ``LARGEST``, a maximum whose ``total`` counts NaN."""
    if LARGEST:
        peak = tl.maximum(peak, max_of(logits, 1))
        return peak, total + sum_of((logits != logits).to(tl.float32), 1)
    else:
        peak, total, _, _ = softmax_step(peak, total, logits)
        return peak, total


@triton.jit
def _score_kernel(
    q,  # [B, Hq, Sq, D]
    scores,  # [B, H, M, N]
    counts,
    anchor_k,
    u,
    u_scale,
    u_unit,
    basis_k,
    basis_k_scale,
    positions,
    residual_k,
    k_scale,
    k_min,
    k_unit,
    k_order,
    blocks,
    length,
    sm_scale,
    q_b,
    q_h,
    q_s,
    q_d,
    HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPTS: tl.constexpr,
    K_BITS: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_VECTOR: tl.constexpr,
    K_BYTES: tl.constexpr,
    LOWRANK: tl.constexpr,
    STORED: tl.constexpr,
    LARGEST: tl.constexpr,
    CODED: tl.constexpr,
    FACTORS_DOT: tl.constexpr,
    ROWS_DOT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Low-rank rows that are not stored where ``LOWRANK``, else the anchor; and the stored rows where ``STORED``."""
    SPLITS: tl.constexpr = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    GROUPS: tl.constexpr = (KEPT + GROUP - 1) // GROUP
    place = (tl.program_id(0) // SPLITS).to(tl.int64)
    batch, block = place // blocks, place % blocks
    count = blocks if counts is None else tl.load(counts + batch)
    first_head = tl.program_id(0) % SPLITS * HEADS_TILE
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = GROUP_SIZE * length
    live = row < rows
    if block < count:
        for which in range(first_head, tl.minimum(first_head + HEADS_TILE, HEADS)):
            head = place * HEADS + which
            queries = _query_rows(q, row, batch, which, length, q_b, q_h, q_s, GROUP_SIZE)
            query = load_columns(queries, live, q_d, None, 0, DIM, WIDTH) * sm_scale
            anchor = sum_of(query * load_vector(anchor_k + head * DIM, True, DIM, WIDTH)[None, :], 1)
            if LOWRANK:
                peak, total = tl.full([ROWS], NONE, tl.float32), tl.full([ROWS], 0, tl.float32)
                if RANK:
                    ranked = rank_queries(
                        query, queries, live, q_d, sm_scale, basis_k + head * (RANK * DIM),
                        basis_k_scale if basis_k_scale is None else basis_k_scale + place * RANK,
                        tl.load(u_unit + place), DIM, WIDTH, RANK, RANKS, FACTORS_DOT,
                    )  # fmt: skip
                for first in range(0, BLOCK_SIZE, TILE):
                    at = first + tl.arange(0, TILE)
                    there = at < BLOCK_SIZE
                    if STORED:
                        there = there & (is_kept(at, positions + place * KEPT, KEPT, KEPTS) == 0)
                    logits = tl.broadcast_to(anchor[:, None], [ROWS, TILE])
                    if RANK:
                        logits, _, _ = lowrank_logits(
                            ranked, anchor, u + place * (BLOCK_SIZE * RANK),
                            u_scale if u_scale is None else u_scale + place * BLOCK_SIZE, at, there,
                            RANK, RANKS, FACTORS_DOT,
                        )  # fmt: skip
                    peak, total = _join(peak, total, tl.where(there[None, :], logits, NONE), LARGEST)
            else:
                peak, total = anchor, tl.full([ROWS], 0.0 if LARGEST else 1.0, tl.float32)
            if STORED:
                order = k_order if k_order is None else k_order + head * DIM
                if CODED and order is not None:
                    query = load_columns(queries, live, q_d, order, 0, DIM, WIDTH) * sm_scale
                for first in range(0, KEPT, TILE):
                    at = first + tl.arange(0, TILE)
                    there = at < KEPT
                    if CODED:
                        group = head * GROUPS + first // GROUP
                        logits = anchor[:, None] + coded_logits(
                            query, queries, live, q_d, order, sm_scale, residual_k + head * (KEPT * K_BYTES), at, there,
                            k_scale + group * DIM, k_min + group * DIM, tl.load(k_unit + head),
                            DIM, WIDTH, K_BITS, K_PLANES, K_VECTOR, K_BYTES, ROWS_DOT,
                        )  # fmt: skip
                    else:
                        keys = residual_k + head * (KEPT * DIM) + at * DIM
                        logits = plain_logits(query, queries, live, q_d, sm_scale, keys, there, 1, DIM, WIDTH, ROWS_DOT)
                    peak, total = _join(peak, total, tl.where(there[None, :], logits, NONE), LARGEST)
            if LARGEST:
                score = tl.where((total > 0) | (anchor != anchor), float("nan"), peak)
            else:
                score = tl.where(peak == float("inf"), peak, peak + tl.log(total))
            tl.store(scores + ((batch * HEADS + which) * rows + row) * blocks + block, score, mask=live)


@triton.jit
def _minmax_kernel(
    q,  # [B, Hq, Sq, D]
    scores,  # [B, H, M, N]
    counts,
    k_min,  # [B, N, H, D]
    k_max,
    blocks,
    length,
    sm_scale,
    q_b,
    q_h,
    q_s,
    q_d,
    HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    which = tl.program_id(0).to(tl.int64)
    batch, head = which // HEADS, which % HEADS
    count = blocks if counts is None else tl.load(counts + batch)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < tl.minimum(count, blocks)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    rows = GROUP_SIZE * length
    live, column = row < rows, tl.arange(0, WIDTH)
    queries = _query_rows(q, row, batch, head, length, q_b, q_h, q_s, GROUP_SIZE)
    query = load_columns(queries, live, q_d, None, 0, DIM, WIDTH) * sm_scale
    at = ((batch * blocks + block) * HEADS + head)[:, None] * DIM + column[None, :]
    inside = there[:, None] & (column < DIM)[None, :]
    low, high = tl.load(k_min + at, mask=inside, other=0.0), tl.load(k_max + at, mask=inside, other=0.0)
    # max(q * low, q * high) is q+ * high + q- * low
    score = dot(tl.where(query < 0, 0.0, query), tl.trans(high), DOT)
    score += dot(tl.where(query > 0, 0.0, query), tl.trans(low), DOT)
    place = (which * rows + row)[:, None] * blocks + block[None, :]
    tl.store(scores + place, score, mask=live[:, None] & there[None, :])


def route_blocks(
    q: Tensor,
    blocks: CompressedBlocks,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float,
    sink_blocks: int,
    recent_blocks: int,
) -> Tensor:
    """Block indices ``[B, Hkv, min(top_k, N)]`` int32, ascending, -1 where unused."""
    batch, heads, total = q.shape[0], blocks.num_kv_heads, blocks.num_blocks
    counts, width = blocks.block_counts, min(top_k, total)
    counts = None if counts is None else counts.contiguous()
    if total == 0 or q.shape[2] == 0:
        share_of_mass = torch.zeros(batch, heads, total, device=q.device)
        return select_blocks(share_of_mass, counts, top_k, sink_blocks, recent_blocks)
    scores = route_scores(q, blocks, router, sm_scale)  # [B, Hkv, M, N]
    pins = Pins(top_k, sink_blocks, recent_blocks)
    if share == "all":
        return select_scores(scores.view(batch, 1, q.shape[1] * q.shape[2], total), counts, 1, heads, pins, width)
    scores = scores.view(batch * heads, q.shape[1] // heads, q.shape[2], total)
    chosen = select_scores(scores, counts, heads, 1, pins, width)
    return chosen.view(batch, heads, width)


def route_scores(q: Tensor, blocks: CompressedBlocks, router: str, sm_scale: float) -> Tensor:
    """Scores ``[B, Hkv, G * Sq, N]`` of every block; what lies beyond ``block_counts`` is not written."""
    batch, heads, length, dim = q.shape
    heads_kv, total, fmt = blocks.num_kv_heads, blocks.num_blocks, blocks.format
    rows = heads // heads_kv * length
    scores = torch.empty(batch, heads_kv, rows, total, dtype=torch.float32, device=q.device)
    lowrank = router == "lowrank" or (router == "keys" and not fmt.keeps_every_row)
    stored = blocks.num_residuals > 0 and not (lowrank and fmt.keeps_every_row)
    rows_dot, factors_dot = dot_dtype(blocks.anchor_k), dot_dtype(blocks.anchor_k, blocks.u)
    wide = tl.float32 == rows_dot or (router != "minmax" and tl.float32 == factors_dot)
    tiles = config(batch, total, heads_kv, rows, blocks.block_size, dim, lowrank, stored or router == "minmax", wide)
    common: dict[str, Any] = {
        "HEADS": heads_kv,
        "GROUP_SIZE": heads // heads_kv,
        "DIM": dim,
        "WIDTH": power_of_two(dim, 16),
        "ROWS": tiles.rows,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "maxnreg": MOST_REGISTERS if wide and router != "minmax" else None,
    }
    parts = {name: part.contiguous() for name, part in blocks.parts()}
    if router == "minmax":
        launch(
            _minmax_kernel,
            (batch * heads_kv, triton.cdiv(total, tiles.blocks), triton.cdiv(rows, tiles.rows)),
            q,
            scores,
            parts.get("block_counts"),
            parts["k_min"],
            parts["k_max"],
            total,
            length,
            sm_scale,
            *q.stride(),
            DOT=rows_dot,
            BLOCKS=tiles.blocks,
            **common,
        )
        return scores
    codes = key_codes(blocks)
    names = (
        *("anchor_k", "u", "u_scale", "u_unit", "basis_k", "basis_k_scale", "residual_indices", "residual_k"),
        *("residual_k_scale", "residual_k_min", "residual_k_unit", "residual_k_order"),
    )
    launch(
        _score_kernel,
        (batch * total * triton.cdiv(heads_kv, tiles.heads), triton.cdiv(rows, tiles.rows)),
        q,
        scores,
        parts.get("block_counts"),
        *(parts.get(name) for name in names),
        total,
        length,
        sm_scale,
        *q.stride(),
        HEADS_TILE=tiles.heads,
        BLOCK_SIZE=blocks.block_size,
        RANK=blocks.rank,
        RANKS=power_of_two(blocks.rank, 16) if blocks.rank else 0,
        KEPT=blocks.num_residuals,
        KEPTS=power_of_two(blocks.num_residuals, 16),
        K_BITS=codes.bits,
        K_PLANES=codes.planes,
        K_VECTOR=codes.vector,
        K_BYTES=codes.row_bytes,
        LOWRANK=lowrank,
        STORED=stored,
        LARGEST=router == "residual",
        CODED=not fmt.exact_rows,
        FACTORS_DOT=factors_dot,
        ROWS_DOT=rows_dot,
        TILE=tiles.tile,
        **common,
    )
    return scores
