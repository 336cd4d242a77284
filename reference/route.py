"""Which blocks a query attends."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkv.reference.decode import lowrank_logits, scaled, softmax
from dkv.reference.storage import is_residual, lowrank_factors, residual_rows, valid_blocks, widen


def route_blocks(
    q: np.ndarray,
    blocks: Any,
    top_k: int = 16,
    router: str = "lowrank",
    share: str = "kv_head",
    sm_scale: float | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 0,
    candidates: np.ndarray | None = None,
) -> np.ndarray:
    """The blocks that carry most of the attention of ``q``.

    Differential-KV, paper section 5 (router "residual", share "all"); Quest for "minmax".

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    blocks : CompressedBlocks
    top_k : int
        Blocks selected in all, sink and recent blocks included.
    router : {"lowrank", "keys", "minmax", "residual"}
    share : {"kv_head", "all"}
    sm_scale : float, optional
    sink_blocks, recent_blocks : int
        First and last valid blocks that are selected whatever their score.
    candidates : array [B, Hkv, C], int32, optional
        As :func:`candidate_blocks` gives them: only these are scored and selected.

    Returns
    -------
    array [B, Hkv, min(top_k, N)], int32
        Ascending block indices, then -1.
    """
    B, Hq = q.shape[:2]
    N, Hkv = blocks.anchor_k.shape[1:3]
    scores, valid = (
        route_scores(q, blocks, router, sm_scale),
        valid_blocks(blocks)[:, None],
    )  # [B, Hq, Sq, N], [B, 1, N]
    if candidates is not None:
        valid = valid & (candidates[..., None] == np.arange(N)).any(axis=2)  # [B, Hkv, N]
        scores = np.where(np.repeat(valid, Hq // Hkv, axis=1)[:, :, None], scores, -np.inf)
    share_of_mass = block_probabilities(scores)  # [B, Hq, Sq, N]
    queries = max(q.shape[2], 1)
    if share == "all":
        p = np.repeat(share_of_mass.sum(axis=2).mean(axis=1)[:, None] / queries, Hkv, axis=1)  # [B, Hkv, N]
    else:
        p = share_of_mass.reshape(B, Hkv, Hq // Hkv, q.shape[2], N).max(axis=2).sum(axis=2) / queries
    return select_blocks(p, valid, top_k, sink_blocks, recent_blocks)


def candidate_blocks(
    q: np.ndarray,
    blocks: Any,
    top_k: int,
    router: str,
    share: str,
    sm_scale: float | None,
    sink_blocks: int,
    recent_blocks: int,
    number: int,
) -> np.ndarray:
    """What steps after a scan by ``q`` select from: its best ``number`` blocks, and those after the selected ones.

    Returns
    -------
    array [B, Hkv, C], int32
        Ascending block indices, then -1.
    """
    rule = router, share, sm_scale, sink_blocks, recent_blocks
    chosen, best = (route_blocks(q, blocks, most, *rule) for most in (top_k, max(top_k, number)))
    B, Hkv, _ = chosen.shape
    counts = valid_blocks(blocks).sum(axis=1)
    found = np.full((B, Hkv, best.shape[2] + chosen.shape[2]), -1, np.int32)
    for b, h in np.ndindex(B, Hkv):
        after = chosen[b, h][chosen[b, h] >= 0] + 1
        both = np.union1d(best[b, h][best[b, h] >= 0], after[after < counts[b]])
        found[b, h, : len(both)] = both
    return found


def route_scores(q: np.ndarray, blocks: Any, router: str, sm_scale: float | None = None) -> np.ndarray:
    """Score of every block for every query, float64 ``[B, Hq, Sq, N]``.

    ``-inf`` stands for NaN and for a block that is not valid.
    "keys": log-sum-exp of the block's logits, residual rows as they are decoded. "lowrank": the same, but where every
    row is a residual, all rows in the low-rank space instead. "minmax": upper bound of its logits. "residual": largest
    logit of its anchor and residual rows.
    """
    B, Hq, Sq, D = q.shape
    N, Hkv = blocks.anchor_k.shape[1:3]
    valid, kept = valid_blocks(blocks), is_residual(blocks)
    u, basis_k, _ = lowrank_factors(blocks)
    residual_k = residual_rows(blocks)[0]  # [B, N, Hkv, R, D]
    scores = np.full((B, Hkv, Hq // Hkv, Sq, N), -np.inf)
    q = widen(q).reshape(B, Hkv, Hq // Hkv, Sq, D)
    for b, h in np.ndindex(B, Hkv):
        n = np.flatnonzero(valid[b])
        query, a_k = q[b, h], widen(blocks.anchor_k[b, n, h])  # [G, Sq, D], [n, D]
        at_residuals = np.einsum("gqd,nrd->gqnr", query, residual_k[b, n, h])
        if router == "minmax":
            low, high = widen(blocks.k_min[b, n, h]), widen(blocks.k_max[b, n, h])  # [n, D]
            bound = np.maximum(query[:, :, None] * low, query[:, :, None] * high).sum(axis=-1)
            scores[b, h][..., n] = scaled(bound, D, sm_scale)
        elif router == "residual":
            largest = np.maximum(query @ a_k.T, at_residuals.max(axis=-1, initial=-np.inf))
            scores[b, h][..., n] = scaled(largest, D, sm_scale)
        else:
            logits = lowrank_logits(query, a_k, basis_k[b, n, h], u[b, n])  # [G, Sq, n, S]
            if router == "keys" or not blocks.format.keeps_every_row:
                logits[..., kept[b, n]] = at_residuals.reshape(*logits.shape[:2], kept[b, n].sum())
            scores[b, h][..., n] = softmax(scaled(logits, D, sm_scale), True)[1]
    return np.where(np.isnan(scores), -np.inf, scores).reshape(B, Hq, Sq, N)


def block_probabilities(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis: zeros where all are ``-inf``, equal shares for the ``+inf`` where there are any."""
    infinite = np.isposinf(scores)
    scores = np.where(infinite.any(axis=-1, keepdims=True), np.where(infinite, 0.0, -np.inf), scores)
    return softmax(scores, True)[0]


def select_blocks(
    p: np.ndarray, valid: np.ndarray, top_k: int, sink_blocks: int = 0, recent_blocks: int = 0
) -> np.ndarray:
    """The pinned blocks and the highest ``p``, ties to the lowest index.

    Parameters
    ----------
    p : array [B, H, N]
        NaN counts as ``-inf``.
    valid : array [B, N] or [B, H, N], bool
        Blocks that may be selected. The first ``sink_blocks`` and last ``recent_blocks`` of them always are.
    top_k, sink_blocks, recent_blocks : int

    Returns
    -------
    array [B, H, min(top_k, N)], int32
        Ascending block indices, then -1.
    """
    B, H, N = p.shape
    p = np.where(np.isnan(p), -np.inf, widen(p))
    valid = np.broadcast_to(valid if valid.ndim == 3 else valid[:, None], (B, H, N))
    selected = np.full((B, H, min(top_k, N)), -1, np.int32)
    for b, h in np.ndindex(B, H):
        usable = np.flatnonzero(valid[b, h])
        pinned = np.union1d(usable[:sink_blocks], usable[max(0, len(usable) - recent_blocks) :])
        others = np.setdiff1d(usable, pinned)
        best = others[np.argsort(-p[b, h, others], kind="stable")]
        chosen = np.sort(np.concatenate([pinned, best])[:top_k])
        selected[b, h, : len(chosen)] = chosen
    return selected
