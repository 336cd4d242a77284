"""Head groups: which kv heads are compressed together, and a layer's attention put together from its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dkv.reference.decode import State, decode_attention

Heads = Sequence[int]


def assign_tiers(scores: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """The tier of every kv head of a model, ``[layers, Hkv]``, by descending ``scores [layers, Hkv]``."""
    order = np.argsort(-np.ravel(scores), kind="stable")  # ties to the lower layer, then to the lower head
    ends = np.rint(np.cumsum(np.asarray(shares, np.float64)[:-1]) * order.size).astype(int)
    tiers = np.empty(order.size, int)
    tiers[order] = np.searchsorted(ends, np.arange(order.size), side="right")
    return tiers.reshape(np.shape(scores))


def split_heads(x: np.ndarray, groups: Sequence[Heads]) -> list[np.ndarray]:
    """``x [B, H, ...]`` by group. ``H`` counts kv heads, or query heads, ``G`` of them to each kv head."""
    width = x.shape[1] // sum(len(heads) for heads in groups)
    return [x[:, [head * width + i for head in heads for i in range(width)]] for heads in groups]


def join_heads(parts: Sequence[np.ndarray], groups: Sequence[Heads]) -> np.ndarray:
    """The inverse of :func:`split_heads`."""
    place = split_heads(np.arange(sum(part.shape[1] for part in parts))[None], groups)
    joined = np.concatenate(parts, axis=1)
    joined[:, np.concatenate(place, axis=1)[0]] = joined.copy()
    return joined


def decode_groups(
    q: np.ndarray,
    groups: Sequence[Heads],
    blocks: Sequence[Any],
    k_window: np.ndarray,
    v_window: np.ndarray,
    block_indices: Sequence[np.ndarray],
    sink: np.ndarray | None = None,
    **options: Any,
) -> State:
    """:func:`dkv.reference.decode.decode_attention` of a layer whose heads are grouped.

    ``blocks`` and ``block_indices`` have one entry per group; all other arguments are the layer's.
    """
    queries, keys, values = (split_heads(x, groups) for x in (q, k_window, v_window))
    sinks = [None] * len(groups) if sink is None else [part[0] for part in split_heads(sink[None], groups)]
    states = [
        decode_attention(queries[i], blocks[i], keys[i], values[i], block_indices[i], sink=sinks[i], **options)
        for i in range(len(groups))
    ]
    return join_heads([out for out, _ in states], groups), join_heads([lse for _, lse in states], groups)
