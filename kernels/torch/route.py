"""Score every compressed block and select the most relevant ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dkv.types import CompressedBlocks

from ._scratch import scratch, widened
from ._storage import Selected
from .decode import (
    WORKSPACE_BYTES,
    anchor_logits,
    cut_selection,
    distinct,
    grouped_queries,
    residual_logits,
    residual_mask,
    u_row_scale,
)

PIECE_BYTES = 12 << 20  # of what scoring in the rank space widens at one time: what stays in a core's cache
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
    pinned = _pinned(candidates, chosen.valid, _counts(blocks), sink_blocks, recent_blocks)
    place = _best(mean, chosen.valid, pinned, top_k)
    total = blocks.num_blocks
    return _ascending(torch.where(chosen.valid, candidates, total).gather(-1, place), total)


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
    valid = slots < counts.view(-1, 1, 1)
    order = _best(score, valid, _pinned(slots, valid, counts, sink_blocks, recent_blocks), top_k)
    return _ascending(torch.where(order < counts.view(-1, 1, 1), order, total), total)


def _pinned(places: Tensor, valid: Tensor, counts: Tensor, sink_blocks: int, recent_blocks: int) -> Tensor:
    """Which of the valid ``places`` are a sequence's first or newest blocks."""
    return valid & ((places < sink_blocks) | (places >= counts.view(-1, 1, 1) - recent_blocks))


def _ascending(found: Tensor, total: int) -> Tensor:
    """Block numbers int32, those that are ``total`` last and as -1."""
    found = found.sort(dim=-1).values
    return torch.where(found < total, found, -1).int()


def _best(score: Tensor, valid: Tensor, pinned: Tensor, top_k: int) -> Tensor:
    """Places of the pinned, then of the highest ``score``, then of those that are not valid; ties to the first."""
    key = torch.where(score.isnan(), -torch.inf, score)
    key = key.clamp(-1.0, torch.finfo(key.dtype).max)  # below the pinned ones, above what is not valid
    key = torch.where(pinned, torch.inf, torch.where(valid, key, -2.0))
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]


@torch.no_grad()
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
    if router == "lowrank" and blocks.format.keeps_every_row:
        return _rank_space_scores(grouped, blocks, sm_scale)
    step = max(1, WORKSPACE_BYTES // max(1, 4 * batch * heads * width[router]))
    starts = range(0, blocks.num_blocks, step)
    pieces = (Selected(_slice_blocks(blocks, start, step), None) for start in starts)
    return torch.cat([_SCORES[router](grouped, piece, sm_scale) for piece in pieces], dim=-1)


@torch.no_grad()
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


def _rank_space_scores(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    """Of every block that keeps every row, ``[B, H, M, N]``: parts as they lie, one product a block for all heads."""
    batch, heads, rows, dim = q.shape
    count, size, rank, dtype, device = blocks.num_blocks, blocks.block_size, blocks.rank, q.dtype, q.device
    binary = q * (sm_scale * LOG2_E)
    scale = None if blocks.basis_k_scale is None else blocks.basis_k_scale[:, None, None].to(dtype)  # [B, 1, 1, N, r]
    sums, peaks = (torch.empty(batch, count, heads * rows, dtype=dtype, device=device) for _ in range(2))
    per_block = 4 * batch * heads * (2 * size * rows + rank * dim) + 4 * batch * rank * (size + heads * rows)
    space = min(PIECE_BYTES, WORKSPACE_BYTES) if device.type == "cpu" else WORKSPACE_BYTES
    step = max(1, space // max(1, per_block))
    anchors = []
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        number = part.stop - start
        anchors.append(binary @ blocks.anchor_k[:, part].to(dtype).permute(0, 2, 3, 1))  # [B, H, M, n]
        row_scale = blocks.u_unit[:, part, None].to(dtype)  # [B, n, S or 1]
        if blocks.u_scale is not None:
            row_scale = row_scale * blocks.u_scale[:, part]
        basis = scratch("basis", (batch, heads, number, rank, dim), dtype, device)
        basis.copy_(blocks.basis_k[:, part].transpose(1, 2))
        query = (binary @ basis.flatten(2, 3).mT).unflatten(3, (number, rank))  # [B, H, M, n, r]
        query = query if scale is None else query.mul_(scale[:, :, :, part])
        turned = scratch("query", (batch, number, heads, rows, rank), dtype, device).copy_(query.permute(0, 3, 1, 2, 4))
        u = widened("u", blocks.u[:, part], dtype)
        logits = scratch("logits", (batch * number, heads * rows, size), dtype, device)
        torch.bmm(turned.view(batch * number, heads * rows, rank), u.flatten(0, 1).mT, out=logits)
        logits = logits.view(batch, number, heads * rows, size).mul_(row_scale[:, :, None])
        _binary_sums(logits, peaks[:, part], sums[:, part])
    lse = (sums.log2_() + peaks).unflatten(2, (heads, rows)).permute(0, 2, 3, 1)
    return (lse + torch.cat(anchors, dim=-1)) / LOG2_E


def _lowrank(q: Tensor, chosen: Selected, sm_scale: float) -> Tensor:
    blocks, binary = chosen.blocks, q * (sm_scale * LOG2_E)
    query = binary[:, :, None] @ widened("basis", chosen.per_head("basis_k"), q.dtype).mT  # [B, H, W, M, r]
    if blocks.basis_k_scale is not None:
        query = query * chosen.shared("basis_k_scale", q.dtype)[..., None, :]
    u = widened("u", chosen.shared("u"), q.dtype)
    shape = (*query.shape[:-1], u.shape[-2])
    logits = scratch("logits", (math.prod(shape[:-2]), *shape[-2:]), q.dtype, q.device)
    torch.bmm(query.flatten(0, 2), u.expand(*query.shape[:3], -1, -1).flatten(0, 2).mT, out=logits)
    logits = logits.view(shape).mul_(u_row_scale(blocks, chosen, q.dtype)[..., None, :])
    if not blocks.format.keeps_every_row:
        logits.masked_fill_(residual_mask(blocks, chosen)[..., None, :], -torch.inf)
    peaks, sums = torch.empty(2, *shape[:-1], dtype=q.dtype, device=q.device)
    _binary_sums(logits, peaks, sums)
    lse = ((sums.log2_() + peaks).mT + anchor_logits(binary, chosen)) / LOG2_E  # [B, H, M, W]
    if blocks.format.keeps_every_row or blocks.num_residuals == 0:
        return lse
    return torch.logaddexp(lse, residual_logits(q, blocks, chosen, sm_scale).logsumexp(-1))


def _binary_sums(logits: Tensor, peaks: Tensor, sums: Tensor) -> None:
    """Largest logit over the last axis, and the sum of ``2 ** (logit - largest)``; the logits are overwritten."""
    limit = torch.finfo(logits.dtype).max  # inf - inf would be NaN
    torch.amax(logits, -1, out=peaks).clamp_(-limit, limit)
    torch.sum(logits.sub_(peaks[..., None]).exp2_(), -1, out=sums)  # exp2 takes a third of the time of exp


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
