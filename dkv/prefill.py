"""Block-sparse causal attention for prompts."""

from __future__ import annotations

from typing import Any

from dkv import _checks as check
from dkv._dispatch import op_module, resolve
from dkv.config import DKVConfig
from dkv.types import AttentionState


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    config: DKVConfig | None = None,
    block_indices: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    sm_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Causal attention, bottom-right aligned, in which each query block attends a few key blocks. Training-free.

    Every block of ``config.prefill_block`` queries attends the first key block, its recency window and diagonal, and
    the key blocks that a sample of its queries attends most, as many as ``config.prefill_top_k``, ``prefill_ratio`` and
    ``prefill_mass`` allow. With every block selected the result is dense causal attention.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    v : array [B, Hkv, Sk, Dv]
    config : DKVConfig, optional
    block_indices : array [B, Hkv, ceil(Sq / prefill_block), W], int32, optional
        Used instead of the selection; -1 is unused.
    softcap, sink, sm_scale, backend
        As in :func:`dkv.exact_attention`.

    Returns
    -------
    AttentionState
    """
    config = DKVConfig() if config is None else config
    check.check_config(config)
    check.check_rows(q, k, v)
    scale = check.check_logits(q, sm_scale, softcap, sink)
    chosen = resolve(backend, q=q, k=k, v=v, block_indices=block_indices, sink=sink)
    check.check_device(q=q, k=k, v=v, block_indices=block_indices, sink=sink)
    module = op_module(chosen, "prefill")
    config = config.within(max(1, q.shape[2]), k.shape[2])
    size, query_block = config.prefill_keys, config.prefill_block
    if block_indices is None:
        top_k, ratio, mass = config.prefill_limits()
        limits = {"stride": config.prefill_stride, "ratio": ratio, "mass": mass}
        block_indices = module.select_key_blocks(
            q, k, size, query_block, top_k, config.prefill_window, scale, **limits
        )
    else:
        sizes = {"B": q.shape[0], "Hkv": k.shape[1], "n": -(-q.shape[2] // query_block)}
        check.check_integers("block_indices", block_indices, "B Hkv n W", **sizes)
    return AttentionState(
        *module.prefill_attention(
            q,
            k,
            v,
            block_indices=block_indices,
            block_size=size,
            prefill_block=query_block,
            softcap=softcap,
            sink=sink,
            sm_scale=scale,
        )
    )
