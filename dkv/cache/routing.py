"""Which blocks the decode steps of a layer attend, and what a step leaves to those after it. The law, section 6."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dkv.cache.heads import pick
from dkv.config import DKVConfig, HeadGroup
from dkv.kernels.torch._storage import Selected
from dkv.kernels.torch.route import route_among, route_blocks, scan_blocks
from dkv.types import CompressedBlocks

FIRST_STEPS = 16  # after a chunk: a question may end in them and its answer begin, so each scans every block


class Routing:
    """The candidates that the last scan of every block found, of each stored group.

    Where every block is attended, or the steps after a scan are to keep its selection, the selection itself.
    """

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps  # of one token, since the last chunk
        self._forget()

    def forgotten(self) -> Routing:
        """The next step scans. A new value: a layer's shallow copy changes nothing of the layer."""
        return Routing(self._steps)

    def _forget(self) -> None:
        self._found: list[Tensor | Selected] = []
        self._used = 0  # steps since the scan, itself included

    def step(
        self,
        config: DKVConfig,
        groups: Sequence[HeadGroup],
        stored: Sequence[CompressedBlocks],
        counts: Sequence[int],
        q: Tensor,
        sm_scale: float,
    ) -> list[Selected | None]:
        """What one query ``q [B, Hq, 1, D]`` attends, for every group; None for a group that stores nothing."""
        self._steps += 1
        if self._steps <= FIRST_STEPS or self._used >= config.route_every:
            self._forget()
        self._used += 1
        heads_kv = sum(len(group.heads) for group in groups)
        chosen: list[Selected | None] = []
        blocks_of, place = iter(stored), 0
        for heads, own, _ in groups:
            if own is None:
                chosen.append(None)
                continue
            blocks, queries = next(blocks_of), pick(q, heads, heads_kv)
            if place == len(self._found):
                found, now = _scan(own, config, blocks, counts, queries, sm_scale)
                self._found.append(found)
            else:
                now = _among(own, blocks, self._found[place], queries, sm_scale)
            chosen.append(now)
            place += 1
        return chosen


def chunk_blocks(
    config: DKVConfig,
    blocks: CompressedBlocks,
    counts: Sequence[int],
    q: Tensor,
    padding: Tensor | None,
    sm_scale: float,
) -> Selected:
    """What the queries of a chunk attend."""
    top_k = config.chunk_top_k or blocks.num_blocks
    if top_k >= blocks.num_blocks:
        return _every(blocks, counts)
    if padding is not None:
        q = torch.where(padding[:, None, :, None], q, q[:, :, -1:])  # padding has no say in the selection
    return Selected(blocks, route_blocks(q, blocks, top_k, *_rule(config, top_k, sm_scale)))


def _scan(
    own: DKVConfig, layer: DKVConfig, blocks: CompressedBlocks, counts: Sequence[int], q: Tensor, sm_scale: float
) -> tuple[Tensor | Selected, Selected]:
    if own.top_k >= blocks.num_blocks:
        every = _every(blocks, counts)
        return every, every
    rule = _rule(own, own.top_k, sm_scale)
    pinned = rule[-2] + rule[-1] == own.top_k
    if layer.route_every == 1 or layer.route_candidates == 0 or pinned:
        chosen = Selected(blocks, route_blocks(q, blocks, own.top_k, *rule))
        return chosen, chosen
    chosen_blocks, candidates = scan_blocks(q, blocks, own.top_k, *rule, layer.route_candidates)
    return candidates, Selected(blocks, chosen_blocks)


def _among(own: DKVConfig, blocks: CompressedBlocks, found: Tensor | Selected, q: Tensor, sm_scale: float) -> Selected:
    if isinstance(found, Selected):
        return found
    return Selected(blocks, route_among(q, blocks, found, own.top_k, *_rule(own, own.top_k, sm_scale)))


def _rule(config: DKVConfig, top_k: int, sm_scale: float) -> tuple[str, str, float, int, int]:
    sinks = 0 if config.sink_tokens else min(config.sink_blocks, top_k)
    return config.router, config.share, sm_scale, sinks, config.recent_blocks


def _every(blocks: CompressedBlocks, counts: Sequence[int]) -> Selected:
    every = torch.arange(blocks.num_blocks, device=blocks.anchor_k.device, dtype=torch.int32)
    every = torch.where(every < torch.tensor(counts, device=every.device)[:, None], every, -1)
    return Selected(blocks, every[:, None].expand(-1, blocks.num_kv_heads, -1))
