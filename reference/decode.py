"""Attention over compressed blocks and over plain rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dkv.reference.merge import merge
from dkv.reference.storage import is_residual, lowrank_factors, narrow, residual_rows, valid_blocks, widen

State = tuple[np.ndarray, np.ndarray]


def lowrank_attention(
    q: np.ndarray, blocks: Any, block_indices: np.ndarray, sm_scale: float | None = None, softcap: float | None = None
) -> State:
    """Attention over the anchors and the low-rank rows of the selected blocks, without rebuilding K or V.

    Differential-KV, paper section 5.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    blocks : CompressedBlocks
    block_indices : array [B, Hkv, W], int32
        A set: order and repeats do not matter. Entries that name no valid block are unused.
    sm_scale : float, optional
        ``D ** -0.5`` when None.
    softcap : float, optional

    Returns
    -------
    out : array [B, Hq, Sq, Dv], dtype of ``q``
    lse : array [B, Hq, Sq], float32
    """
    return finish(lowrank_state(q, blocks, block_indices, sm_scale, softcap), q)


def residual_attention(
    q: np.ndarray, blocks: Any, block_indices: np.ndarray, sm_scale: float | None = None, softcap: float | None = None
) -> State:
    """Attention over the residual rows of the selected blocks; arguments and result as :func:`lowrank_attention`."""
    return finish(residual_state(q, blocks, block_indices, sm_scale, softcap), q)


def exact_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = True,
    seq_lens: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
    sm_scale: float | None = None,
) -> State:
    """Attention over plain rows, bottom-right aligned.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    v : array [B, Hkv, Sk, Dv]
    causal : bool
    seq_lens : array [B], int, optional
        Valid rows of each sequence, all when None. The last query stands at row ``seq_lens - 1``.
    window : int, optional
        A query sees its own row and the ``window - 1`` before it.
    softcap : float, optional
    sink : array [Hq], optional
        One more logit per head that carries no value.
    sm_scale : float, optional

    Returns
    -------
    out : array [B, Hq, Sq, Dv], dtype of ``q``
    lse : array [B, Hq, Sq], float32
    """
    return finish(exact_state(q, k, v, causal, seq_lens, window, softcap, sink, sm_scale), q)


def decode_attention(
    q: np.ndarray,
    blocks: Any,
    k_window: np.ndarray | None,
    v_window: np.ndarray | None,
    block_indices: np.ndarray,
    seq_lens: np.ndarray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: np.ndarray | None = None,
    sm_scale: float | None = None,
) -> State:
    """The merge of low-rank rows, residual rows and a causal recency window (Differential-KV, paper section 5).

    ``seq_lens``, ``window`` and ``sink`` belong to the recency window ``[B, Hkv, Sw, D or Dv]``; without one, ``sink``
    still counts once. Result as :func:`exact_attention`.
    """
    if k_window is None or v_window is None:
        B, _, Hkv, D = blocks.anchor_k.shape
        k_window, v_window = np.zeros((B, Hkv, 0, D)), np.zeros((B, Hkv, 0, blocks.anchor_v.shape[3]))
        seq_lens = None
    states = [
        lowrank_state(q, blocks, block_indices, sm_scale, softcap),
        residual_state(q, blocks, block_indices, sm_scale, softcap),
        exact_state(q, k_window, v_window, True, seq_lens, window, softcap, sink, sm_scale),
    ]
    return finish(merge([out for out, _ in states], [lse for _, lse in states]), q)


def lowrank_state(
    q: np.ndarray, blocks: Any, indices: np.ndarray, sm_scale: float | None, softcap: float | None
) -> State:
    """:func:`lowrank_attention` that returns float64."""
    u, basis_k, basis_v = lowrank_factors(blocks)
    attended = ~is_residual(blocks)  # [B, N, S]
    q, out, lse = _by_kv_head(q, blocks.anchor_k.shape[2], blocks.anchor_v.shape[3])  # q [B, Hkv, G, Sq, D]
    for b, h in np.ndindex(q.shape[:2]):
        chosen = selected(blocks, indices, b, h)  # [w]
        rows, coefficients = attended[b, chosen], u[b, chosen]  # [w, S], [w, S, r]
        a_k, a_v = widen(blocks.anchor_k[b, chosen, h]), widen(blocks.anchor_v[b, chosen, h])  # [w, D], [w, Dv]
        logits = lowrank_logits(q[b, h], a_k, basis_k[b, chosen, h], coefficients)  # [G, Sq, w, S]
        logits = scaled(logits, q.shape[-1], sm_scale, softcap)
        weight, lse[b, h] = softmax(logits.reshape(*logits.shape[:2], rows.size), rows.ravel())
        weight = weight.reshape(logits.shape)
        out[b, h] = weight.sum(axis=3) @ a_v
        if basis_v is not None:
            in_rank_space = np.einsum("gqws,wsr->gqwr", weight, coefficients)
            out[b, h] += np.einsum("gqwr,wrv->gqv", in_rank_space, basis_v[b, chosen, h])
    return _by_query_head(out), _by_query_head(lse)


def lowrank_logits(q: np.ndarray, a_k: np.ndarray, basis_k: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Unscaled logits ``[..., w, S]`` of ``q [..., D]`` against ``w`` blocks."""
    in_rank_space = np.einsum("...d,wrd->...wr", q, basis_k)
    return (q @ a_k.T)[..., None] + np.einsum("...wr,wsr->...ws", in_rank_space, u)


def residual_state(
    q: np.ndarray, blocks: Any, indices: np.ndarray, sm_scale: float | None, softcap: float | None
) -> State:
    """:func:`residual_attention` that returns float64."""
    k, v = residual_rows(blocks)  # [B, N, Hkv, R, D or Dv]
    q, out, lse = _by_kv_head(q, k.shape[2], v.shape[4])
    for b, h in np.ndindex(q.shape[:2]):
        chosen = selected(blocks, indices, b, h)
        keys, values = k[b, chosen, h].reshape(-1, k.shape[4]), v[b, chosen, h].reshape(-1, v.shape[4])
        logits = scaled(q[b, h] @ keys.T, q.shape[-1], sm_scale, softcap)  # [G, Sq, w * R]
        weight, lse[b, h] = softmax(logits, np.ones(len(keys), bool))
        out[b, h] = weight @ values
    return _by_query_head(out), _by_query_head(lse)


def exact_state(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool,
    seq_lens: np.ndarray | None,
    window: int | None,
    softcap: float | None,
    sink: np.ndarray | None,
    sm_scale: float | None,
) -> State:
    """:func:`exact_attention` that returns float64."""
    Sk, Hkv = k.shape[2], k.shape[1]
    q, out, lse = _by_kv_head(q, Hkv, v.shape[3])
    for b in range(q.shape[0]):
        length = Sk if seq_lens is None else int(seq_lens[b])
        query = np.arange(length - q.shape[3], length)[:, None]  # [Sq, 1] row at which a query stands
        key = np.arange(Sk)
        visible = np.broadcast_to(key < length, (q.shape[3], Sk))
        if causal:
            visible = visible & (key <= query)
        if window is not None:
            visible = visible & (query - key < window)
        for h in range(Hkv):
            out[b, h], lse[b, h] = attend_rows(q[b, h], widen(k[b, h]), widen(v[b, h]), visible, sm_scale, softcap)
    out, lse = _by_query_head(out), _by_query_head(lse)
    return (out, lse) if sink is None else with_sink(out, lse, sink)


def attend_rows(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, sm_scale: float | None, softcap: float | None
) -> State:
    """State of ``q [G, Sq, D]`` over the rows that ``visible [Sq, n]`` shows it."""
    seen = visible.any(axis=0, keepdims=True).T  # [n, 1]
    k, v = np.where(seen, k, 0.0), np.where(seen, v, 0.0)
    weight, lse = softmax(scaled(q @ k.T, q.shape[-1], sm_scale, softcap), visible)
    return weight @ v, lse


def with_sink(out: np.ndarray, lse: np.ndarray, sink: np.ndarray) -> State:
    """Add one logit per head, ``sink [Hq]``, to the denominator."""
    total = np.logaddexp(lse, widen(sink)[:, None])
    return out * np.exp(lse - np.where(np.isneginf(total), 0.0, total))[..., None], total


def softmax(logits: np.ndarray, visible: np.ndarray | bool) -> State:
    """Weights over the last axis and their log-sum-exp; zeros and ``-inf`` where nothing is visible."""
    logits = np.where(visible, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(logits - top)
    total = weight.sum(axis=-1, keepdims=True)
    some = total != 0
    lse = np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf)
    return weight / np.where(some, total, 1.0), lse[..., 0]


def scaled(logits: np.ndarray, head_dim: int, sm_scale: float | None, softcap: float | None = None) -> np.ndarray:
    """``logits * sm_scale``, bounded smoothly by ``softcap``."""
    logits = logits * (head_dim**-0.5 if sm_scale is None else float(sm_scale))
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def selected(blocks: Any, indices: np.ndarray, b: int, h: int) -> np.ndarray:
    """Valid blocks that kv head ``h`` of batch row ``b`` attends, ascending, each once."""
    chosen = np.unique(np.asarray(indices[b, h]))
    count = int(valid_blocks(blocks)[b].sum())
    return chosen[(chosen >= 0) & (chosen < count)].astype(np.int64)


def finish(state: State, q: np.ndarray) -> State:
    """A float64 state in the dtypes that ops return."""
    out, lse = state
    return narrow(out, q.dtype), narrow(lse, np.float32)


def _by_kv_head(q: np.ndarray, num_kv_heads: int, head_dim_v: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``q [B, Hkv, G, Sq, D]`` in float64, and an empty state of that shape."""
    B, Hq, Sq, D = q.shape
    q = widen(q).reshape(B, num_kv_heads, Hq // num_kv_heads, Sq, D)
    return q, np.zeros((*q.shape[:4], head_dim_v)), np.full(q.shape[:4], -np.inf)


def _by_query_head(x: np.ndarray) -> np.ndarray:
    """``[B, Hkv, G, ...]`` to ``[B, Hq, ...]``."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
