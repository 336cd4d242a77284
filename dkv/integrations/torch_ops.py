"""The ops as ``torch.ops.dkv.*``, for ``torch.compile`` and for engines that call registered operators.

Importing this registers them. A ``CompressedBlocks`` passes as a list of its parts, ``None`` where one is not stored,
and its format as integers; the functions here take it whole, with the arguments of ``dkv.<op>``, and trace without a
graph break. What an op returns is contiguous and new: never an argument, nor a view of one. Tensors on a CPU go to the
torch kernels, tensors on a GPU to the Triton kernels, and ``backend`` names one. There are no gradients.
Make a ``DKVConfig`` outside of what is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dkv import _checks as check
from dkv.config import DKVConfig
from dkv.types import AttentionState, CompressedBlocks

from ._registered import pack_blocks, pack_format, stored_parts

__all__ = [
    "compress_blocks",
    "decode_attention",
    "decode_attention_out",
    "exact_attention",
    "lowrank_attention",
    "merge_states",
    "pack_blocks",
    "pack_format",
    "prefill_attention",
    "reconstruct_blocks",
    "residual_attention",
    "route_blocks",
    "stored_parts",
]

_DEFAULT = DKVConfig()


def compress_blocks(
    k: Tensor,
    v: Tensor,
    *,
    config: DKVConfig | None = None,
    token_weight: Tensor | None = None,
    channel_weight: Tensor | None = None,
    backend: str | None = None,
) -> CompressedBlocks:
    """As :func:`dkv.compress_blocks`."""
    config = _DEFAULT if config is None else config
    check.check_config(config, plain=True)
    fmt = config.block_format
    made = torch.ops.dkv.compress_blocks(k, v, pack_format(fmt), config.keep, token_weight, channel_weight, backend)
    rank = fmt.stored_rank(k.shape[1], k.shape[3], v.shape[3])
    return CompressedBlocks(format=fmt, **dict(zip(stored_parts(fmt, rank), made)))


def reconstruct_blocks(blocks: CompressedBlocks, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`dkv.reconstruct_blocks`."""
    return torch.ops.dkv.reconstruct_blocks(pack_blocks(blocks), pack_format(blocks.format), backend)


def route_blocks(
    q: Tensor,
    blocks: CompressedBlocks,
    *,
    top_k: int = 16,
    router: str = "lowrank",
    share: str = "kv_head",
    sm_scale: float | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 0,
    backend: str | None = None,
) -> Tensor:
    """As :func:`dkv.route_blocks`."""
    return torch.ops.dkv.route_blocks(
        q,
        pack_blocks(blocks),
        pack_format(blocks.format),
        top_k,
        router,
        share,
        sm_scale,
        sink_blocks,
        recent_blocks,
        backend,
    )


def lowrank_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    block_indices: Tensor,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """As :func:`dkv.lowrank_attention`."""
    return _blocks_op(torch.ops.dkv.lowrank_attention, q, blocks, block_indices, sm_scale, softcap, backend)


def residual_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    block_indices: Tensor,
    *,
    sm_scale: float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """As :func:`dkv.residual_attention`."""
    return _blocks_op(torch.ops.dkv.residual_attention, q, blocks, block_indices, sm_scale, softcap, backend)


def _blocks_op(op, q, blocks, block_indices, sm_scale, softcap, backend):
    parts, fmt = pack_blocks(blocks), pack_format(blocks.format)
    return AttentionState(*op(q, parts, fmt, block_indices, sm_scale, softcap, backend))


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    seq_lens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
    lse_base: str = "e",
    backend: str | None = None,
) -> AttentionState:
    """As :func:`dkv.exact_attention`."""
    check.check_choice("lse_base", lse_base, ("e", "2"))
    settings = (causal, seq_lens, window, softcap, sink, sm_scale, backend)
    out, lse = torch.ops.dkv.exact_attention(q, k, v, *settings)
    return AttentionState(out, lse if lse_base == "e" else lse / math.log(2.0))


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: DKVConfig | None = None,
    block_indices: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """As :func:`dkv.prefill_attention`."""
    config = _DEFAULT if config is None else config
    check.check_config(config)
    sizes = (config.prefill_keys, config.prefill_block, config.prefill_window, config.prefill_stride)
    limits = (config.prefill_top_k, config.prefill_ratio, config.prefill_mass)
    return AttentionState(
        *torch.ops.dkv.prefill_attention(q, k, v, block_indices, *sizes, *limits, softcap, sink, sm_scale, backend)
    )


def _decode_arguments(
    q, blocks, k_window, v_window, config, block_indices, seq_lens, window, softcap, sink, sm_scale, backend
):
    config = _DEFAULT if config is None else config
    check.check_config(config, plain=True)
    routing = (config.top_k, config.router, config.share, config.sink_blocks, config.recent_blocks, backend)
    parts, fmt = pack_blocks(blocks), pack_format(blocks.format)
    return (q, parts, fmt, k_window, v_window, block_indices, seq_lens, window, softcap, sink, sm_scale, *routing)


def decode_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    *,
    config: DKVConfig | None = None,
    block_indices: Tensor | None = None,
    seq_lens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """As :func:`dkv.decode_attention`."""
    return AttentionState(
        *torch.ops.dkv.decode_attention(
            *_decode_arguments(
                q, blocks, k_window, v_window, config, block_indices, seq_lens, window, softcap, sink, sm_scale, backend
            )
        )
    )


def decode_attention_out(
    q: Tensor,
    blocks: CompressedBlocks,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    *,
    out: Tensor,
    lse: Tensor,
    config: DKVConfig | None = None,
    block_indices: Tensor | None = None,
    seq_lens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
    backend: str | None = None,
) -> AttentionState:
    """As :func:`decode_attention`, into ``out [B, Hq, Sq, Dv]`` in the dtype of ``q`` and ``lse`` float32."""
    arguments = _decode_arguments(
        q, blocks, k_window, v_window, config, block_indices, seq_lens, window, softcap, sink, sm_scale, backend
    )
    torch.ops.dkv.decode_attention_out(*arguments, into_out=out, into_lse=lse)  # dynamo keeps the name `out` to itself
    return AttentionState(out, lse)


def merge_states(states: Sequence[AttentionState], *, backend: str | None = None) -> AttentionState:
    """As :func:`dkv.merge_states`."""
    outs, lses = [state[0] for state in states], [state[1] for state in states]
    return AttentionState(*torch.ops.dkv.merge_states(outs, lses, backend))
