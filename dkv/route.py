"""Select the blocks that a query attends."""

from __future__ import annotations

from typing import Any

from dkv import _checks as check
from dkv._dispatch import op_module, resolve
from dkv.config import EVERY_BLOCK, ROUTERS, SHARES
from dkv.types import CompressedBlocks


def route_blocks(
    q: Any,
    blocks: CompressedBlocks,
    *,
    top_k: int = 16,
    router: str = "lowrank",
    share: str = "kv_head",
    sm_scale: float | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 0,
    backend: str | None = None,
) -> Any:
    """The ``top_k`` blocks that carry most of the attention of ``q``.

    Differential-KV, paper section 5 (router "residual"); Quest (router "minmax"); the log-sum-exp in the rank space is
    this package's.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    blocks : CompressedBlocks
    top_k : int
        Blocks selected in all, pinned ones included.
    router : {"lowrank", "keys", "minmax", "residual"}
        "minmax" needs blocks compressed with ``minmax=True`` in their format.
    share : {"kv_head", "all"}
        A set of its own for each kv head, or one set for all.
    sm_scale : float, optional
        ``D ** -0.5`` when None.
    sink_blocks, recent_blocks : int
        The first and the last blocks of each sequence that are always selected.
    backend : str, optional

    Returns
    -------
    array [B, Hkv, min(top_k, N)], int32
        Ascending block indices without duplicates, then -1 for unused slots.
    """
    check.check_blocks(blocks)
    check.check_query(q, blocks)
    check.check_count("top_k", top_k, 1)
    check.check_count("sink_blocks", sink_blocks)
    check.check_count("recent_blocks", recent_blocks)
    if sink_blocks + recent_blocks > top_k:
        raise ValueError(f"sink_blocks + recent_blocks ({sink_blocks} + {recent_blocks}) must not exceed top_k={top_k}")
    check.check_choice("router", router, ROUTERS)
    check.check_choice("share", share, SHARES)
    scale = check.check_logits(q, sm_scale, None)
    if router == "minmax" and blocks.k_min is None:
        raise ValueError("router 'minmax' needs k_min and k_max: compress with router='minmax' in the config")
    chosen = resolve(backend, q=q, blocks=blocks.anchor_k)
    check.check_device(q=q, blocks=blocks.anchor_k)
    pinned = (min(count, blocks.num_blocks) for count in (sink_blocks, recent_blocks))
    top_k = min(top_k, EVERY_BLOCK)  # kernels count in 32 bits
    return op_module(chosen, "route").route_blocks(q, blocks, top_k, router, share, scale, *pinned)
