"""Attention over the union of disjoint key sets, from the states of the sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dkv.reference.storage import narrow, widen


def merge_states(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge one or more attention states (the log-sum-exp reduction; Differential-KV, paper section 5).

    Parameters
    ----------
    outs : sequence of arrays [..., Dv]
    lses : sequence of arrays [...]
        Natural log. A state whose ``lse`` is ``-inf`` (or ``+inf``) is empty whatever its ``out`` holds.

    Returns
    -------
    out : array [..., Dv], dtype of the first ``out``
    lse : array [...], float32
    """
    out, lse = merge(list(outs), list(lses))
    return narrow(out, np.asarray(outs[0]).dtype), narrow(lse, np.float32)


def merge(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """:func:`merge_states` that returns float64."""
    lse = np.stack([widen(x) for x in lses])  # [n, ...]
    empty = np.isinf(lse)
    lse = np.where(empty, -np.inf, lse)
    top = lse.max(axis=0)
    top = np.where(np.isneginf(top), 0.0, top)
    weight = np.exp(lse - top)  # [n, ...]
    total = weight.sum(axis=0)
    values = [np.where(e[..., None], 0.0, widen(o)) for e, o in zip(empty, outs, strict=True)]
    out = sum(w[..., None] * o for w, o in zip(weight, values, strict=True))
    none = total == 0
    out = np.where(none[..., None], 0.0, out) / np.where(none, 1.0, total)[..., None]
    return out, np.where(none, -np.inf, top + np.log(np.where(none, 1.0, total)))
