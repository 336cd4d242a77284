"""Score every compressed block and select the most relevant ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dkv.types import CompressedBlocks

from ._storage import Selected
from .decode import WORKSPACE_BYTES, grouped_queries, residual_logits, residual_mask

PIECE_BYTES = 4 << 20  # of what scoring in the rank space widens at one time: what stays in a core's cache
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
    batch, heads = q.shape[0], blocks.num_kv_heads
    counts = blocks.block_counts
    if counts is None:
        counts = torch.full((batch,), blocks.num_blocks, device=q.device)
    if blocks.num_blocks == 0 or q.shape[2] == 0 or sink_blocks + recent_blocks == top_k:  # the pinned ones are all
        mean = torch.zeros(batch, heads, blocks.num_blocks, device=q.device)
    else:
        scores = route_scores(q, blocks, router, sm_scale)  # [B, Hkv, M, N]
        per_group = (q.shape[1] // heads, q.shape[2])
        share_of_mass = _softmax_over_blocks(scores, counts).unflatten(2, per_group)  # [B, Hkv, G, Sq, N]
        if share == "all":
            mean = share_of_mass.mean((1, 2, 3))[:, None].expand(-1, heads, -1)
        else:
            mean = share_of_mass.amax(2).mean(2)
    return select_blocks(mean, counts, top_k, sink_blocks, recent_blocks)


def _softmax_over_blocks(scores: Tensor, counts: Tensor) -> Tensor:
    slots = torch.arange(scores.shape[-1], device=scores.device)
    usable = (slots < counts.view(-1, 1, 1, 1)) & ~scores.isnan()
    scores = torch.where(usable, scores, -torch.inf)
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
    key = torch.where(score.isnan(), -torch.inf, score)
    key = key.clamp(-1.0, torch.finfo(key.dtype).max)  # below the pinned ones, above what is not valid
    key = torch.where(pinned, torch.inf, torch.where(valid, key, -2.0))
    order = key.sort(dim=-1, descending=True, stable=True).indices[..., : min(top_k, total)]
    chosen = torch.where(order < counts, order, total).sort(dim=-1).values
    return torch.where(chosen < total, chosen, -1).int()


def route_scores(q: Tensor, blocks: CompressedBlocks, router: str, sm_scale: float) -> Tensor:
    """Scores ``[B, Hkv, G * Sq, N]`` of every block, taken in pieces that bound the workspace."""
    grouped = grouped_queries(q, blocks.num_kv_heads)
    batch, heads, rows, dim = grouped.shape
    if router == "keys" and not blocks.format.keeps_every_row:
        router = "lowrank"
    score = {"lowrank": _lowrank, "keys": _keys, "minmax": _minmax, "residual": _residual}[router]
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
    starts = range(0, blocks.num_blocks, step)
    return torch.cat([score(grouped, _slice_blocks(blocks, i, step), sm_scale) for i in starts], dim=-1)


def _slice_blocks(blocks: CompressedBlocks, start: int, count: int) -> CompressedBlocks:
    """Views of ``count`` blocks from ``start``; ``block_counts``, the one part of one axis, counts from there."""

    def cut(part: Tensor) -> Tensor:
        return (part - start).clamp(0, count) if part.ndim == 1 else part[:, start : start + count]

    return blocks.map(cut)


def _lowrank(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    batch, heads, rows, _ = q.shape
    logits = _rank_space_logits(q * (sm_scale * LOG2_E), blocks)  # [B, N, H * M, S]
    exact = None
    if not blocks.format.keeps_every_row:
        every = Selected(blocks, None)
        logits = torch.where(residual_mask(blocks, every)[:, 0, :, None], -torch.inf, logits)
        if blocks.num_residuals:
            exact = residual_logits(q, blocks, every, sm_scale).logsumexp(-1)  # [B, H, N, M]
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak.isinf(), 0.0, peak)
    total = (logits - peak).exp2_().sum(-1)  # exp2 takes a third of the time of exp
    lse = (total.log2() + peak[..., 0]) / LOG2_E
    if exact is not None:
        lse = torch.logaddexp(lse, exact.permute(0, 2, 1, 3).flatten(2))
    return lse.view(batch, blocks.num_blocks, heads, rows).permute(0, 2, 3, 1)


def _rank_space_logits(q: Tensor, blocks: CompressedBlocks) -> Tensor:
    """Logits of every row of every block in the rank space, ``[B, N, H * M, S]``; parts as they lie, none gathered."""
    dtype = q.dtype
    query = q[:, None] @ blocks.basis_k.to(dtype).mT  # [B, N, H, M, r]
    if blocks.basis_k_scale is not None:
        query = query * blocks.basis_k_scale.to(dtype)[:, :, None, None]
    row_scale = blocks.u_unit.to(dtype)[..., None]  # [B, N, S or 1]
    if blocks.u_scale is not None:
        row_scale = row_scale * blocks.u_scale.to(dtype)
    anchor = torch.einsum("bhmd,bnhd->bnhm", q, blocks.anchor_k.to(dtype)).flatten(2)
    # one product per block for all heads: [B, N, H * M, r] @ [B, N, r, S]
    logits = query.flatten(2, 3) @ blocks.u.to(dtype).mT
    return logits.mul_(row_scale[:, :, None]).add_(anchor[..., None])


def _keys(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    """Blocks that keep every row: the anchor and the residual rows."""
    return _stored_rows(q, blocks, sm_scale, torch.logsumexp, torch.logaddexp)


def _minmax(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    every = Selected(blocks, None)
    low, high = every.per_head("k_min", q.dtype), every.per_head("k_max", q.dtype)  # [B, H, N, D]
    # max(q * low, q * high) is q+ * high + q- * low
    return (q.clamp(min=0) @ high.mT + q.clamp(max=0) @ low.mT) * sm_scale


def _residual(q: Tensor, blocks: CompressedBlocks, sm_scale: float) -> Tensor:
    return _stored_rows(q, blocks, sm_scale, torch.amax, torch.maximum)


def _stored_rows(
    q: Tensor,
    blocks: CompressedBlocks,
    sm_scale: float,
    over_rows: Callable[[Tensor, int], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The anchor's logit joined with that of the residual rows, ``[B, H, M, N]``."""
    every = Selected(blocks, None)
    anchor = q @ every.per_head("anchor_k", q.dtype).mT * sm_scale
    if blocks.num_residuals == 0:
        return anchor
    return join(anchor, over_rows(residual_logits(q, blocks, every, sm_scale), -1).transpose(2, 3))
