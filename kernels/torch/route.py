"""Score every compressed block and select the most relevant ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dkv.types import CompressedBlocks

from ._storage import Selected
from .decode import (
    WORKSPACE_BYTES,
    anchor_logits,
    cut_selection,
    distinct,
    grouped_queries,
    lowrank_logits,
    residual_logits,
    residual_mask,
)

PIECE_BYTES = 16 << 20  # of what scoring in the rank space widens at one time: what stays in a core's cache
LOG2_E = math.log2(math.e)


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
    counts = _counts(blocks)
    if blocks.num_blocks == 0 or q.shape[2] == 0 or sink_blocks + recent_blocks == top_k:  # the pinned ones are all
        mean = torch.zeros(q.shape[0], blocks.num_kv_heads, blocks.num_blocks, device=q.device)
    else:
        mean = _shares(q, route_scores(q, blocks, router, sm_scale), _below(counts, blocks.num_blocks), share)
    return select_blocks(mean, counts, top_k, sink_blocks, recent_blocks)


def scan_blocks(
    q: Tensor,
    blocks: CompressedBlocks,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float,
    sink_blocks: int,
    recent_blocks: int,
    candidates: int,
) -> tuple[Tensor, Tensor]:
    """What :func:`route_blocks` selects, and what later steps select from, ``[B, Hkv, C]``, ascending, then -1."""
    counts, total = _counts(blocks), blocks.num_blocks
    mean = _shares(q, route_scores(q, blocks, router, sm_scale), _below(counts, total), share)
    chosen, best = (
        select_blocks(mean, counts, number, sink_blocks, recent_blocks) for number in (top_k, max(top_k, candidates))
    )
    after = torch.where(chosen < 0, -1, chosen + 1)
    found = distinct(torch.cat([best, after], dim=-1), counts.view(-1, 1, 1))
    found = torch.where(found < 0, total, found).sort(dim=-1).values[..., : min(total, found.shape[-1])]
    width = int((found < total).sum(-1).max())
    return chosen, torch.where(found < total, found, -1)[..., :width]


def route_among(
    q: Tensor,
    blocks: CompressedBlocks,
    candidates: Tensor,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float,
    sink_blocks: int,
    recent_blocks: int,
) -> Tensor:
    """As :func:`route_blocks`, among the ``candidates [B, Hkv, C]`` of :func:`scan_blocks` alone."""
    chosen = Selected(blocks, candidates)
    mean = _shares(q, candidate_scores(q, chosen, router, sm_scale), chosen.valid[:, :, None], share)  # [B, Hkv, C]
    counts = _counts(blocks).view(-1, 1, 1)
    pinned = chosen.valid & ((candidates < sink_blocks) | (candidates >= counts - recent_blocks))
    place = _best(mean, chosen.valid, pinned, top_k)
    total = blocks.num_blocks
    found = torch.where(chosen.valid, candidates, total).gather(-1, place).sort(dim=-1).values
    return torch.where(found < total, found, -1).int()


def _counts(blocks: CompressedBlocks) -> Tensor:
    if blocks.block_counts is not None:
        return blocks.block_counts
    return torch.full((blocks.batch_size,), blocks.num_blocks, device=blocks.anchor_k.device)


def _below(counts: Tensor, total: int) -> Tensor:
    return torch.arange(total, device=counts.device) < counts.view(-1, 1, 1, 1)


def _shares(q: Tensor, scores: Tensor, valid: Tensor, share: str) -> Tensor:
    """From ``scores [B, Hkv, M, N]`` what kv heads go by, ``[B, Hkv, N]``; ``valid`` broadcasts to the scores."""
    heads = scores.shape[1]
    per_group = (q.shape[1] // heads, q.shape[2])
    share_of_mass = _softmax_over_blocks(scores, valid).unflatten(2, per_group)  # [B, Hkv, G, Sq, N]
    if share == "all":
        return share_of_mass.mean((1, 2, 3))[:, None].expand(-1, heads, -1)
    return share_of_mass.amax(2).mean(2)


def _softmax_over_blocks(scores: Tensor, valid: Tensor) -> Tensor:
    scores = torch.where(valid & ~scores.isnan(), scores, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.where(scores == peak, 1.0, (scores - peak).exp())  # inf - inf would be NaN
    total = weight.sum(-1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def select_blocks(score: Tensor, counts: Tensor, top_k: int, sink_blocks: int, recent_blocks: int) -> Tensor:
    """Sink and recent blocks, then the highest of ``score [B, Hkv, N]``, ties to the lowest index."""
    total = score.shape[-1]
    slots = torch.arange(total, device=score.device)
    counts = counts.view(-1, 1, 1)
    valid = slots < counts
    pinned = valid & ((slots < sink_blocks) | (slots >= counts - recent_blocks))
    order = _best(score, valid, pinned, top_k)
    chosen = torch.where(order < counts, order, total).sort(dim=-1).values
    return torch.where(chosen < total, chosen, -1).int()


def _best(score: Tensor, valid: Tensor, pinned: Tensor, top_k: int) -> Tensor:
    """Places of the pinned, then of the highest ``score``, then of those that are not valid; ties to the first."""
    key = torch.where(score.isnan(), -torch.inf, score)
    key = key.clamp(-1.0, torch.finfo(key.dtype).max)  # below the pinned ones, above what is not valid
    key = torch.where(pinned, torch.inf, torch.where(valid, key, -2.0))
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


def route_scores(q: Tensor, blocks: CompressedBlocks, router: str, sm_scale: float) -> Tensor:
    """Scores ``[B, Hkv, G * Sq, N]`` of every block, taken in pieces that bound the workspace."""
    grouped = grouped_queries(q, blocks.num_kv_heads)
    batch, heads, rows, dim = grouped.shape
    router = _router(router, blocks)
    size, rank = blocks.block_size, blocks.rank
    width = {
        "lowrank": 2 * size * rows + rank * (size + dim),
        "keys": 2 * size * (rows + dim),
        "minmax": 2 * (rows + dim),
        "residual": 2 * blocks.num_residuals * (rows + dim),
    }
    cached = router == "lowrank" and blocks.format.keeps_every_row and q.device.type == "cpu"
    space = min(PIECE_BYTES, WORKSPACE_BYTES) if cached else WORKSPACE_BYTES
    step = max(1, space // max(1, 4 * batch * heads * width[router]))
    pieces = (_slice_blocks(blocks, i, step) for i in range(0, blocks.num_blocks, step))
    if router == "lowrank":
        return torch.cat([_lowrank_scan(grouped, piece, sm_scale) for piece in pieces], dim=-1)
    return torch.cat([_SCORES[router](grouped, Selected(piece, None), sm_scale) for piece in pieces], dim=-1)


def candidate_scores(q: Tensor, chosen: Selected, router: str, sm_scale: float) -> Tensor:
    """Scores ``[B, Hkv, G * Sq, W]`` of selected blocks, in pieces that bound the workspace."""
    blocks = chosen.blocks
    grouped, router = grouped_queries(q, blocks.num_kv_heads), _router(router, blocks)
    return torch.cat([_SCORES[router](grouped, piece, sm_scale) for piece in cut_selection(grouped, chosen)], dim=-1)


def _router(router: str, blocks: CompressedBlocks) -> str:
    return "lowrank" if router == "keys" and not blocks.format.keeps_every_row else router


def _slice_blocks(blocks: CompressedBlocks, start: int, count: int) -> CompressedBlocks:
    """Views of ``count`` blocks from ``start``; ``block_counts``, the one part of one axis, counts from there."""

    def cut(part: Tensor) -> Tensor:
        return (part - start).clamp(0, count) if part.ndim == 1 else part[:, start : start + count]

    return blocks.map(cut)


def _lowrank_scan(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    batch, heads, rows, _ = q.shape
    logits = _rank_space_logits(q * (sm_scale * LOG2_E), blocks)  # [B, N, H * M, S]
    every = Selected(blocks, None)
    if not blocks.format.keeps_every_row:
        logits = torch.where(residual_mask(blocks, every)[:, 0, :, None], -torch.inf, logits)
    lse = _lse_of_binary(logits).view(batch, blocks.num_blocks, heads, rows).permute(0, 2, 3, 1)
    return _with_residual_rows(lse, q, every, sm_scale)


def _rank_space_logits(q: Tensor, blocks: CompressedBlocks) -> Tensor:
    """Logits of every row of every block in the rank space, ``[B, N, H * M, S]``; parts as they lie, none gathered."""
    dtype = q.dtype
    query = q[:, None] @ blocks.basis_k.to(dtype).mT  # [B, N, H, M, r]
    if blocks.basis_k_scale is not None:
        query = query * blocks.basis_k_scale.to(dtype)[:, :, None, None]
    row_scale = blocks.u_unit.to(dtype)[..., None]  # [B, N, S or 1]
    if blocks.u_scale is not None:
        row_scale = row_scale * blocks.u_scale.to(dtype)
    anchor = (q @ blocks.anchor_k.to(dtype).permute(0, 2, 3, 1)).flatten(1, 2).mT  # [B, N, H * M]
    # one product per block for all heads: [B, N, H * M, r] @ [B, N, r, S]
    logits = query.flatten(2, 3) @ blocks.u.to(dtype).mT
    return logits.mul_(row_scale[:, :, None]).add_(anchor[..., None])


def _lse_of_binary(logits: Tensor) -> Tensor:
    """Natural log of the sum of ``2 ** logits`` over the last axis; the logits are overwritten."""
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak.isinf(), 0.0, peak)
    total = logits.sub_(peak).exp2_().sum(-1)  # exp2 takes a third of the time of exp
    return (total.log2() + peak[..., 0]) / LOG2_E


def _with_residual_rows(lse: Tensor, q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    """Low-rank scores ``[B, H, M, W]`` joined with those of the residual rows, where some rows are none."""
    blocks = chosen.blocks
    if blocks.format.keeps_every_row or blocks.num_residuals == 0:
        return lse
    return torch.logaddexp(lse, residual_logits(q, blocks, chosen, sm_scale).logsumexp(-1))


def _lowrank(q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    blocks = chosen.blocks
    logits, _ = lowrank_logits(q * LOG2_E, blocks, chosen, sm_scale)  # [B, H, W, M, S]
    if not blocks.format.keeps_every_row:
        logits = torch.where(residual_mask(blocks, chosen)[..., None, :], -torch.inf, logits)
    return _with_residual_rows(_lse_of_binary(logits).mT, q, chosen, sm_scale)


def _keys(q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    """Blocks that keep every row: the anchor and the residual rows."""
    return _stored_rows(q, chosen, sm_scale, torch.logsumexp, torch.logaddexp)


def _minmax(q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    low, high = chosen.per_head("k_min", q.dtype), chosen.per_head("k_max", q.dtype)  # [B, H, W, D]
    # max(q * low, q * high) is q+ * high + q- * low
    return (q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT) * sm_scale


def _residual(q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    return _stored_rows(q, chosen, sm_scale, torch.amax, torch.maximum)


def _stored_rows(
    q: Tensor,
    chosen: Selected,
    sm_scale: float,
    over_rows: Callable[[Tensor, int], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The anchor's logit joined with that of the residual rows, ``[B, H, M, W]``."""
    anchor = anchor_logits(q, chosen) * sm_scale
    if chosen.blocks.num_residuals == 0:
        return anchor
    return join(anchor, over_rows(residual_logits(q, chosen.blocks, chosen, sm_scale), -1))


_SCORES = {"lowrank": _lowrank, "keys": _keys, "minmax": _minmax, "residual": _residual}
