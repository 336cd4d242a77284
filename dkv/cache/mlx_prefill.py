"""A chunk of a prompt in mlx against all before it: exact sink rows, closed blocks, window. The law, section 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from dkv._dispatch import op_module
from dkv.cache.heads import by_choice, pick, put_back
from dkv.config import DKVConfig
from dkv.kernels.mlx.twin.prefill import choose_blocks
from dkv.types import CompressedBlocks


class Past(NamedTuple):
    """Rows of some kv heads, of sequences of equal length: ``k`` and ``v [B, H, tokens, D or Dv]``, oldest first."""

    heads: tuple[int, ...]
    k: mx.array
    v: mx.array

    def without(self, newest: int) -> Past:
        """All but the newest rows."""
        stop = self.k.shape[2] - newest
        return self._replace(k=self.k[:, :, :stop], v=self.v[:, :, :stop])


def every_row(
    heads: tuple[int, ...], k: mx.array, v: mx.array, sinks: int, blocks: CompressedBlocks | None
) -> Past:
    """The exact rows ``k`` and ``v``, and behind the first ``sinks`` of them those that the blocks stand for."""
    if blocks is None:
        return Past(heads, k, v)
    rebuilt = op_module("mlx", "compress").reconstruct_blocks(blocks)
    joined = (
        mx.concatenate([exact[:, :, :sinks], closed, exact[:, :, sinks:]], axis=2)
        for exact, closed in zip((k, v), rebuilt, strict=True)
    )
    return Past(heads, *joined)


def attend_past(
    q: mx.array,
    pasts: Sequence[Past],
    selects: Sequence[bool],
    config: DKVConfig,
    sm_scale: float,
    sink: mx.array | None,
) -> mx.array:
    """The newest queries ``q [B, Hq, n, D]`` over their past, whose last ``n`` rows are their own; ``[B, Hq, n, Dv]``.

    ``selects [Hkv]`` says which kv heads select key blocks beyond the mandatory ones.
    """
    heads_kv, heads_q = len(selects), q.shape[1]
    config = config.within(q.shape[2], max(past.k.shape[2] for past in pasts))
    order, outs = [], []
    for past in pasts:
        for wanted, places in by_choice(past.heads, selects):
            own = tuple(past.heads[place] for place in places)
            own_sink = None if sink is None else pick(sink.reshape(1, heads_q), own, heads_kv).reshape(-1)
            k, v = (pick(x, places, len(past.heads)) for x in (past.k, past.v))
            order.append(own)
            outs.append(_attend(pick(q, own, heads_kv), k, v, wanted, config, sm_scale, own_sink))
    return put_back(outs, order)


def _attend(
    q: mx.array, k: mx.array, v: mx.array, selects: bool, config: DKVConfig, sm_scale: float, sink: mx.array | None
) -> mx.array:
    prefill, size, block = op_module("mlx", "prefill"), config.prefill_keys, config.prefill_block
    if selects:
        top_k, ratio, mass = config.prefill_limits()
        window, stride = config.prefill_window, config.prefill_stride
        lists = prefill.select_key_blocks(q, k, size, block, top_k, window, sm_scale, stride, ratio, mass)
    else:
        length, total = q.shape[2], k.shape[2]
        share = mx.zeros((*k.shape[:2], -(-length // block), -(-total // size)))
        lists = choose_blocks(share, total, length, size, block, 1, config.prefill_window, 1.0, 1.0)
    return prefill.prefill_attention(q, k, v, lists, size, block, None, sink, sm_scale)[0]
