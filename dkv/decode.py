"""Attention over compressed blocks and exact rows."""

from __future__ import annotations

import math
from typing import Any

from dkv import _checks as check
from dkv._dispatch import op_module, resolve
from dkv.config import DKVConfig
from dkv.route import route_blocks
from dkv.types import AttentionState, CompressedBlocks


def lowrank_attention(
    q: Any,
    blocks: CompressedBlocks,
    block_indices: Any,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Attention over the anchors and low-rank rows of the selected blocks; K and V are never rebuilt.

    Differential-KV, paper section 5. Where every row is a residual only the anchors are attended here.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    blocks : CompressedBlocks
    block_indices : array [B, Hkv, W], int32
        As :func:`dkv.route_blocks` returns them. -1 is unused and never dereferenced; a repeated block counts once.
    sm_scale : float, optional
        ``D ** -0.5`` when None.
    softcap : float, optional
        A scaled logit ``x`` becomes ``softcap * tanh(x / softcap)``.
    backend : str, optional

    Returns
    -------
    AttentionState
        ``out [B, Hq, Sq, Dv]`` in the dtype of ``q``, ``lse [B, Hq, Sq]`` float32, natural log.
    """
    return _blocks_op("lowrank_attention", q, blocks, block_indices, sm_scale, softcap, backend)


def residual_attention(
    q: Any,
    blocks: CompressedBlocks,
    block_indices: Any,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Attention over the residual rows of the selected blocks. Arguments and result as :func:`lowrank_attention`."""
    return _blocks_op("residual_attention", q, blocks, block_indices, sm_scale, softcap, backend)


def _blocks_op(name, q, blocks, block_indices, sm_scale, softcap, backend):
    check.check_blocks(blocks)
    check.check_query(q, blocks)
    check.check_integers("block_indices", block_indices, "B Hkv W", B=blocks.batch_size, Hkv=blocks.num_kv_heads)
    scale = check.check_logits(q, sm_scale, softcap)
    chosen = resolve(backend, q=q, blocks=blocks.anchor_k, block_indices=block_indices)
    check.check_device(q=q, blocks=blocks.anchor_k, block_indices=block_indices)
    fn = getattr(op_module(chosen, "decode"), name)
    return AttentionState(*fn(q, blocks, block_indices, scale, softcap))


def exact_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    seq_lens: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Any = None,
    sm_scale: float | None = None,
    lse_base: str = "e",
    backend: str | None = None,
) -> AttentionState:
    """Attention over plain rows.

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
    k : array [B, Hkv, Sk, D]
    v : array [B, Hkv, Sk, Dv]
    causal : bool
        Bottom-right aligned: query ``i`` sees keys up to ``seq_lens - Sq + i``.
    seq_lens : array [B], int, optional
        Valid rows of each sequence, all when None. Rows beyond may hold anything.
    window : int, optional
        Sliding window: only the ``window`` newest keys up to a query's own position.
    softcap : float, optional
        A scaled logit ``x`` becomes ``softcap * tanh(x / softcap)``.
    sink : array [Hq], optional
        A learned logit per head that joins the denominator with value zero; -inf is none. A NaN or +inf is refused
        where the array lives on the host, and gives NaN elsewhere. Give it to one part of a merge only.
    sm_scale : float, optional
        ``D ** -0.5`` when None.
    lse_base : {"e", "2"}
        "2" converts ``lse`` for FlashInfer; such a state must not be merged with natural ones.
    backend : str, optional

    Returns
    -------
    AttentionState
        A query that sees no key gives out 0 and lse -inf (or the sink's logit).
    """
    check.check_rows(q, k, v)
    check.check_flag("causal", causal)
    check.check_seq_lens(seq_lens, q.shape[0], k.shape[2])
    window = check.check_window(window, k.shape[2])
    check.check_choice("lse_base", lse_base, ("e", "2"))
    scale = check.check_logits(q, sm_scale, softcap, sink)
    chosen = resolve(backend, q=q, k=k, v=v, seq_lens=seq_lens, sink=sink)
    check.check_device(q=q, k=k, v=v, seq_lens=seq_lens, sink=sink)
    fn = op_module(chosen, "decode").exact_attention
    out, lse = fn(q, k, v, causal, seq_lens, window, softcap, sink, scale)
    return AttentionState(out, lse if lse_base == "e" else lse / math.log(2.0))


def decode_attention(
    q: Any,
    blocks: CompressedBlocks,
    k_window: Any = None,
    v_window: Any = None,
    *,
    config: DKVConfig | None = None,
    block_indices: Any = None,
    seq_lens: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Any = None,
    sm_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """Route, attend the selected blocks and the recency window, merge (Differential-KV, paper section 5).

    Parameters
    ----------
    q : array [B, Hq, Sq, D]
        More than one query is causal, bottom-right aligned, inside the window; every query sees all selected blocks.
    blocks : CompressedBlocks
    k_window : array [B, Hkv, Sw, D], optional
    v_window : array [B, Hkv, Sw, Dv], optional
        The newest rows, those of the queries included.
    config : DKVConfig, optional
        Gives top_k, router, share, sink_blocks and recent_blocks.
    block_indices : array [B, Hkv, W], int32, optional
        Used instead of routing.
    seq_lens : array [B], int, optional
        Valid window rows of each sequence.
    window, softcap, sink, sm_scale
        As in :func:`exact_attention`; ``softcap`` applies to every part, ``window`` and ``sink`` to the window.
    backend : str, optional

    Returns
    -------
    AttentionState
        ``out [B, Hq, Sq, Dv]`` in the dtype of ``q``, ``lse [B, Hq, Sq]`` float32, natural log.

    Raises
    ------
    ValueError
        Shapes that do not fit; a config with tiers or a ratio, which stands for no single set of blocks.
    TypeError
        Arrays of another kind, library or dtype than is named above.
    """
    config = DKVConfig() if config is None else config
    check.check_config(config, plain=True)
    check.check_blocks(blocks)
    check.check_query(q, blocks)
    if (k_window is None) != (v_window is None):
        raise ValueError("k_window and v_window go together: give both or neither")
    rows = 0
    if k_window is not None:
        sizes = {"B": blocks.batch_size, "Hkv": blocks.num_kv_heads}
        check.check_array("k_window", k_window, "B Hkv Sw D", D=blocks.head_dim, **sizes)
        rows = k_window.shape[2]
        check.check_array("v_window", v_window, "B Hkv Sw Dv", Sw=rows, Dv=blocks.head_dim_v, **sizes)
        check.check_float("k_window", k_window)
        check.check_float("v_window", v_window)
    check.check_seq_lens(seq_lens, q.shape[0], rows)
    window = check.check_window(window, rows)
    scale = check.check_logits(q, sm_scale, softcap, sink)
    arrays = {"q": q, "blocks": blocks.anchor_k, "k_window": k_window, "v_window": v_window}
    arrays |= {"block_indices": block_indices, "seq_lens": seq_lens, "sink": sink}
    chosen = resolve(backend, **arrays)
    check.check_device(**arrays)
    if block_indices is None:
        block_indices = route_blocks(
            q,
            blocks,
            top_k=config.top_k,
            router=config.router,
            share=config.share,
            sm_scale=sm_scale,
            sink_blocks=config.sink_blocks,
            recent_blocks=config.recent_blocks,
            backend=chosen,
        )
    else:
        check.check_integers("block_indices", block_indices, "B Hkv W", B=blocks.batch_size, Hkv=blocks.num_kv_heads)
    fn = op_module(chosen, "decode").decode_attention
    return AttentionState(*fn(q, blocks, k_window, v_window, block_indices, seq_lens, window, softcap, sink, scale))
