"""Block-sparse causal attention over a prompt."""

from __future__ import annotations

import math

import numpy as np

from dkv.reference.decode import State, attend_rows, finish, scaled, softmax, with_sink
from dkv.reference.storage import widen

KEY_GROUP = 32  # keys whose mean stands for them in the scores
QUERY_GROUP = 16  # queries likewise


def prefill_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block_size: int = 256,
    prefill_block: int = 128,
    top_k: int | None = None,
    prefill_window: int = 512,
    sm_scale: float | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
    block_indices: np.ndarray | None = None,
) -> State:
    """Causal attention, bottom-right aligned, in which every query block attends the key blocks selected for it.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    v : array [B, Hkv, Sk, Dv]
    block_size, prefill_block, top_k, prefill_window
        As in :func:`select_key_blocks`.
    sm_scale, softcap : float, optional
    sink : array [Hq], optional
    seq_lens : array [B], int, optional
        Valid keys of each sequence; its last query stands at key ``seq_lens - 1``.
    block_indices : array [B, Hkv, ceil(Sq / prefill_block), W], int, optional
        Key blocks to attend instead of :func:`select_key_blocks`'s. A set each; negative entries are unused.

    Returns
    -------
    out : array [B, Hq, Sq, Dv], dtype of ``q``
    lse : array [B, Hq, Sq], float32
    """
    if block_indices is None:
        block_indices = select_key_blocks(
            q, k, block_size, prefill_block, top_k, prefill_window, sm_scale=sm_scale, seq_lens=seq_lens
        )
    B, Hq, Sq, D = q.shape
    Hkv, Sk = k.shape[1:3]
    query = widen(q).reshape(B, Hkv, Hq // Hkv, Sq, D)
    out, lse = np.zeros((*query.shape[:4], v.shape[3])), np.full(query.shape[:4], -np.inf)
    for b, h in np.ndindex(B, Hkv):
        length = Sk if seq_lens is None else int(seq_lens[b])
        for t, start in enumerate(range(0, Sq, prefill_block)):
            block = slice(start, min(start + prefill_block, Sq))
            position = np.arange(block.start, block.stop)[:, None] + length - Sq  # [n, 1]
            rows = np.flatnonzero(np.isin(np.arange(length) // block_size, block_indices[b, h, t]))
            visible = rows <= position
            keys, values = widen(k[b, h, rows]), widen(v[b, h, rows])
            out[b, h, :, block], lse[b, h, :, block] = attend_rows(
                query[b, h, :, block], keys, values, visible, sm_scale, softcap
            )
    state = out.reshape(B, Hq, Sq, v.shape[3]), lse.reshape(B, Hq, Sq)
    return finish(state if sink is None else with_sink(*state, sink), q)


def select_key_blocks(
    q: np.ndarray,
    k: np.ndarray,
    block_size: int = 256,
    prefill_block: int = 128,
    top_k: int | None = None,
    prefill_window: int = 512,
    sm_scale: float | None = None,
    seq_lens: np.ndarray | None = None,
) -> np.ndarray:
    """The key blocks that every query block attends: the first, its window, and the best of those between.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    block_size : int
        Keys in a key block.
    prefill_block : int
        Queries in a query block.
    top_k : int, optional
        Key blocks selected in all; more where the first block and the window alone are more.
        ``max(16, ceil(2 * sqrt(ceil(Sk / block_size))))`` when None.
    prefill_window : int
        Keys before a query block that it always attends.
    sm_scale : float, optional
    seq_lens : array [B], int, optional

    Returns
    -------
    array [B, Hkv, ceil(Sq / prefill_block), W], int32
        Ascending block indices, then -1; ``W`` as in :func:`selection_width`.
    """
    B, Hq, Sq, D = q.shape
    Hkv, Sk = k.shape[1:3]
    num_key_blocks, num_query_blocks = -(-Sk // block_size), -(-Sq // prefill_block)
    if top_k is None:
        top_k = default_top_k(num_key_blocks)
    width = selection_width(num_key_blocks, block_size, prefill_block, top_k, prefill_window)
    selected = np.full((B, Hkv, num_query_blocks, width), -1, np.int32)
    query = widen(q).reshape(B, Hkv, Hq // Hkv, Sq, D)
    for b, h in np.ndindex(B, Hkv):
        length = Sk if seq_lens is None else int(seq_lens[b])
        mean_k, ends, owner = key_means(widen(k[b, h, :length]), block_size)
        for t in range(num_query_blocks):
            start, stop = t * prefill_block, min((t + 1) * prefill_block, Sq)
            first, last = length - Sq + start, length - Sq + stop - 1  # positions of the block's queries
            if last < 0:
                continue
            candidates = last // block_size + 1
            window_start = max(0, first - prefill_window) // block_size
            mandatory = np.union1d(0, np.arange(window_start, candidates))
            mean_q = query_means(query[b, h, :, start:stop])  # [G, n, D]
            p = candidate_probabilities(mean_q, mean_k[ends <= last], owner[ends <= last], candidates, sm_scale)
            others = np.setdiff1d(np.arange(candidates), mandatory)
            best = others[np.argsort(-p[others], kind="stable")][: max(0, top_k - len(mandatory))]
            chosen = np.sort(np.concatenate([mandatory, best]))
            selected[b, h, t, : len(chosen)] = chosen
    return selected


def default_top_k(num_key_blocks: int) -> int:
    return max(16, math.ceil(2 * math.sqrt(num_key_blocks)))


def selection_width(num_key_blocks: int, block_size: int, prefill_block: int, top_k: int, prefill_window: int) -> int:
    """Room for ``top_k`` blocks, or for the first block and every block that a window can touch."""
    window_blocks = (prefill_window + prefill_block + block_size - 2) // block_size + 1
    return min(num_key_blocks, max(top_k, 1 + window_blocks))


def key_means(k: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of up to 32 consecutive keys of one block, the position of their last key, and their block.

    ``k [n, D]``. A block has ``ceil(block_size / 32)`` groups, the last one shorter where 32 does not divide
    ``block_size``. A group that ``k`` ends within is left out.
    """
    starts = [j + s for j in range(0, len(k), block_size) for s in range(0, block_size, KEY_GROUP)]
    stops = [min(start + KEY_GROUP, start - start % block_size + block_size) for start in starts]
    groups = [(start, stop) for start, stop in zip(starts, stops, strict=True) if stop <= len(k)]
    means = np.array([k[start:stop].mean(axis=0) for start, stop in groups]).reshape(len(groups), k.shape[1])
    ends = np.array([stop - 1 for _, stop in groups], np.int64)
    return means, ends, ends // block_size


def query_means(q: np.ndarray) -> np.ndarray:
    """Means of up to 16 consecutive queries of ``q [G, n, D]``."""
    starts = range(0, q.shape[1], QUERY_GROUP)
    return np.stack([q[:, start : start + QUERY_GROUP].mean(axis=1) for start in starts], axis=1)


def candidate_probabilities(
    mean_q: np.ndarray, mean_k: np.ndarray, owner: np.ndarray, candidates: int, sm_scale: float | None
) -> np.ndarray:
    """Softmax over candidate blocks of their best key group's logit, averaged over query groups and heads.

    ``mean_q [G, n, D]``, ``mean_k [m, D]`` of blocks ``owner [m]``. A block without a group has probability 0.
    """
    logits = scaled(mean_q @ mean_k.T, mean_q.shape[-1], sm_scale)  # [G, n, m]
    best = np.full((*logits.shape[:2], candidates), -np.inf)
    for j in range(candidates):
        best[..., j] = logits[..., owner == j].max(axis=-1, initial=-np.inf)
    best = np.where(np.isnan(best), -np.inf, best)
    return softmax(best, True)[0].mean(axis=(0, 1))
