"""Block-sparse causal attention over a prompt."""

from __future__ import annotations

import math

import numpy as np

from dkv.reference.decode import State, attend_rows, finish, scaled, softmax, with_sink
from dkv.reference.storage import widen

DEFAULT_KEYS = 2048  # keys that a query block attends where nothing else limits it


def prefill_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block_size: int = 64,
    prefill_block: int = 128,
    top_k: int | None = None,
    prefill_window: int = 512,
    sm_scale: float | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
    seq_lens: np.ndarray | None = None,
    block_indices: np.ndarray | None = None,
    stride: int = 32,
    ratio: float | None = None,
    mass: float | None = None,
) -> State:
    """Causal attention, bottom-right aligned, in which every query block attends the key blocks selected for it.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    v : array [B, Hkv, Sk, Dv]
    block_size, prefill_block, top_k, prefill_window, stride, ratio, mass
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
            q, k, block_size, prefill_block, top_k, prefill_window, sm_scale, seq_lens, stride, ratio, mass
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
    block_size: int = 64,
    prefill_block: int = 128,
    top_k: int | None = None,
    prefill_window: int = 512,
    sm_scale: float | None = None,
    seq_lens: np.ndarray | None = None,
    stride: int = 32,
    ratio: float | None = None,
    mass: float | None = None,
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
        Key blocks selected at most; more where the first block and the window alone are more. ``ceil(2048 /
        block_size)`` when it, ``ratio`` and ``mass`` are None.
    prefill_window : int
        Keys before a query block that it always attends.
    sm_scale : float, optional
    seq_lens : array [B], int, optional
    stride : int
        One query in so many is scored.
    ratio : float, optional
        Share of the visible key blocks that is selected at most, above 0 and at most 1.
    mass : float, optional
        Share of the sampled queries' attention outside the first block at which the selection stops.

    Returns
    -------
    array [B, Hkv, ceil(Sq / prefill_block), W], int32
        Ascending block indices, then -1; ``W`` as in :func:`selection_width`.
    """
    B, Hq, Sq, D = q.shape
    Hkv, Sk = k.shape[1:3]
    num_key_blocks, num_query_blocks = -(-Sk // block_size), -(-Sq // prefill_block)
    if top_k is None:
        top_k = default_top_k(block_size) if ratio is None and mass is None else max(1, num_key_blocks)
    width = selection_width(num_key_blocks, block_size, prefill_block, top_k, prefill_window, ratio)
    selected = np.full((B, Hkv, num_query_blocks, width), -1, np.int32)
    query = widen(q).reshape(B, Hkv, Hq // Hkv, Sq, D)
    for b, h in np.ndindex(B, Hkv):
        length = Sk if seq_lens is None else int(seq_lens[b])
        for t in range(num_query_blocks):
            start, stop = t * prefill_block, min((t + 1) * prefill_block, Sq)
            first, last = length - Sq + start, length - Sq + stop - 1  # positions of the block's queries
            if last < 0:
                continue
            candidates = last // block_size + 1
            window_start = max(0, first - prefill_window) // block_size
            mandatory = np.union1d(0, np.arange(window_start, candidates))
            sampled = sampled_queries(stop - start, stride)
            p = block_shares(
                query[b, h, :, start + sampled], widen(k[b, h, : last + 1]), first + sampled, block_size, sm_scale
            )
            limit = top_k if ratio is None else min(top_k, math.ceil(ratio * candidates))
            others = np.setdiff1d(np.arange(candidates), mandatory)
            best = others[np.argsort(-p[others], kind="stable")][: max(0, limit - len(mandatory))]
            if mass is not None and mass < 1:
                before = p[mandatory[mandatory > 0]].sum() + np.cumsum(p[best]) - p[best]
                best = best[before < mass * p[1:].sum()]
            chosen = np.sort(np.concatenate([mandatory, best]))
            selected[b, h, t, : len(chosen)] = chosen
    return selected


def default_top_k(block_size: int) -> int:
    return math.ceil(DEFAULT_KEYS / block_size)


def selection_width(
    num_key_blocks: int,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    ratio: float | None = None,
) -> int:
    """Room for the most that may be chosen, or for the first block and every block that a window can touch."""
    window_blocks = (prefill_window + prefill_block + block_size - 2) // block_size + 1
    most = top_k if ratio is None else min(top_k, math.ceil(ratio * num_key_blocks))
    return min(num_key_blocks, max(most, 1 + window_blocks))


def sampled_queries(length: int, stride: int) -> np.ndarray:
    """The last of every ``stride`` queries, and the last of all."""
    return np.minimum(np.arange(stride, length + stride, stride), length) - 1


def block_shares(
    q: np.ndarray, k: np.ndarray, positions: np.ndarray, block_size: int, sm_scale: float | None
) -> np.ndarray:
    """Share of each key block in the attention of the queries ``q [n, G, D]`` at ``positions``, the mean over both."""
    num_blocks = -(-len(k) // block_size)
    logits = scaled(q @ k.T, q.shape[-1], sm_scale)  # [n, G, keys]
    logits = np.where(np.arange(len(k)) <= positions[:, None, None], logits, -np.inf)
    sums = np.full((*logits.shape[:2], num_blocks), -np.inf)
    for j in range(num_blocks):
        part = logits[..., j * block_size : (j + 1) * block_size]
        peak = part.max(axis=-1)
        peak = np.where(peak == -np.inf, 0.0, peak)
        with np.errstate(divide="ignore", invalid="ignore"):
            sums[..., j] = peak + np.log(np.exp(part - peak[..., None]).sum(axis=-1))
    sums = np.where(np.isnan(sums), -np.inf, sums)
    return softmax(sums, True)[0].mean(axis=(0, 1))
