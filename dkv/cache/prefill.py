"""A chunk of a prompt against all before it: exact sink rows, closed blocks, window. The law, section 7."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dkv.cache.heads import by_choice, pick, put_back
from dkv.config import DKVConfig
from dkv.kernels.torch.compress import reconstruct_blocks
from dkv.kernels.torch.merge import merge_states
from dkv.kernels.torch.prefill import attend_blocks, block_shares, choose_blocks, sampled_scores, with_sink
from dkv.types import CompressedBlocks

WORKSPACE_BYTES = 128 << 20  # rows that are decoded at one time
FEWEST_QUERIES = 16  # for which all rows of blocks are decoded; fewer attend their codes in less time
MASKED_QUERIES = 512  # of one mask


class Past(NamedTuple):
    """The rows of some kv heads of a layer: ``sinks`` exact ones, those of the blocks, the other exact ones."""

    k: Tensor
    v: Tensor
    sinks: int
    blocks: CompressedBlocks | None

    @property
    def closed(self) -> int:
        return 0 if self.blocks is None else self.blocks.num_blocks * self.blocks.block_size

    @property
    def fits(self) -> bool:
        """Whether all rows may be decoded at one time."""
        return 4 * len(self) * sum(x[:, :, :1].numel() for x in (self.k, self.v)) <= WORKSPACE_BYTES

    def every(self) -> tuple[Tensor, Tensor]:
        """All rows in float32, those of the blocks decoded."""
        k, v = self.k.float(), self.v.float()
        if self.blocks is None:
            return k, v
        decoded = reconstruct_blocks(dataclasses.replace(self.blocks, block_counts=None), torch.float32)
        at = self.sinks
        joined = (torch.cat([x[:, :, :at], y, x[:, :, at:]], 2) for x, y in zip((k, v), decoded, strict=True))
        return next(joined), next(joined)

    def without(self, newest: int) -> Past:
        """All but the newest rows, which are exact ones."""
        stop = self.k.shape[2] - newest
        return Past(self.k[:, :, :stop], self.v[:, :, :stop], self.sinks, self.blocks)

    def __len__(self) -> int:
        return self.k.shape[2] + self.closed

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by their number, ``[B, H, len(rows), D or Dv]``; of the blocks, only those that hold one are decoded."""
        inner = (rows >= self.sinks) & (rows < self.sinks + self.closed)
        if self.blocks is None or not bool(inner.any()):
            rows = torch.where(rows < self.sinks, rows, rows - self.closed)
            return self.k.index_select(2, rows), self.v.index_select(2, rows)
        taken = [x.new_empty(*x.shape[:2], len(rows), x.shape[3]) for x in (self.k, self.v)]
        outer = rows[~inner]
        outer = torch.where(outer < self.sinks, outer, outer - self.closed)
        at, size = rows[inner] - self.sinks, self.blocks.block_size
        needed = torch.unique(at // size)
        at = torch.searchsorted(needed, at // size) * size + at % size
        part = dataclasses.replace(self.blocks, block_counts=None).map(lambda x: x.index_select(1, needed))
        for new, exact, decoded in zip(taken, (self.k, self.v), reconstruct_blocks(part, torch.float32), strict=True):
            new[:, :, ~inner] = exact.index_select(2, outer)
            new[:, :, inner] = decoded.index_select(2, at)
        return taken[0], taken[1]


def dense_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A chunk that nothing came before, in its own dtype."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def alike(tokens: Sequence[int], q: Tensor, padding: Tensor | None) -> list[tuple[slice, Tensor]]:
    """Sequences that can be taken together, all of them or each alone where they differ, and their real queries."""
    every = torch.arange(q.shape[2], device=q.device)
    if padding is None and len(set(tokens)) == 1:
        return [(slice(0, len(tokens)), every)]
    rows = [every if padding is None else padding[row].nonzero().flatten() for row in range(len(tokens))]
    return [(slice(row, row + 1), at) for row, at in enumerate(rows)]


def attend_past(
    q: Tensor,
    pasts: Sequence[tuple[tuple[int, ...], Past]],
    selects: Sequence[bool],
    config: DKVConfig,
    sm_scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, int, int]:
    """The newest queries ``q [B, Hq, n, D]`` over their past, whose last ``n`` rows are their own; ``n`` is 1 or more.

    Gives ``[B, Hq, n, Dv]``, and how many key blocks all query blocks of all heads attend and could attend.

    ``pasts`` holds the kv heads of each past; ``selects [Hkv]`` says which of them select key blocks beyond the
    mandatory ones.
    """
    heads_kv = sum(len(heads) for heads, _ in pasts)
    config = config.within(q.shape[2], max(len(past) for _, past in pasts))
    order: list[tuple[int, ...]] = []
    outs, lses, visited, visible = [], [], 0, 0
    for heads, past in pasts:
        for wanted, own in by_choice(heads, selects):
            order.append(tuple(heads[place] for place in own))
            blocks = past.blocks if past.blocks is None else _of_heads(past.blocks, own)
            part = Past(pick(past.k, own, len(heads)), pick(past.v, own, len(heads)), past.sinks, blocks)
            queries, blocks_seen = pick(q, order[-1], heads_kv), _visible_blocks(q.shape[2], len(part), config)
            visible += blocks_seen * len(own) * q.shape[0]
            if wanted and _selects_all(part, config) and softcap is None and sink is None and part.fits:
                outs.append(_attend_every(queries, part, sm_scale))
                visited += blocks_seen * len(own) * q.shape[0]
                continue
            out, lse, lists = _attend(queries, part, wanted, config, sm_scale, softcap)
            outs.append(out)
            lses.append(lse)
            visited += int((lists >= 0).sum())
    out = put_back(outs, order)
    return (out if sink is None else with_sink(out, put_back(lses, order), sink)[0]), visited, visible


def _selects_all(past: Past, config: DKVConfig) -> bool:
    """Whether a query block that selects attends every key block that it sees."""
    top_k, ratio, mass = config.prefill_limits()
    return top_k >= -(-len(past) // config.prefill_keys) and ratio == 1 and mass == 1


def _attend_every(q: Tensor, past: Past, sm_scale: float) -> Tensor:
    """Some heads over every row of one past, in float32."""
    (k, v), first, outs = past.every(), len(past) - q.shape[2], []
    for part in q.float().split(MASKED_QUERIES, dim=2):
        stop = first + part.shape[2]
        seen = torch.ones(part.shape[2], stop, dtype=torch.bool, device=q.device).tril(first)
        outs.append(
            torch.nn.functional.scaled_dot_product_attention(
                part, k[:, :, :stop], v[:, :, :stop], seen, scale=sm_scale, enable_gqa=True
            )
        )
        first = stop
    return torch.cat(outs, dim=2)


def _visible_blocks(length: int, total: int, config: DKVConfig) -> int:
    """Key blocks at or before the last query of each query block, over all query blocks."""
    first, block = total - length, config.prefill_block
    lasts = (min(first + start + block, total) - 1 for start in range(0, length, block))
    return sum(last // config.prefill_keys + 1 for last in lasts)


def _of_heads(blocks: CompressedBlocks, places: Sequence[int]) -> CompressedBlocks:
    """The parts of some heads; what all heads of a block share stays as it is."""
    if len(places) == blocks.num_kv_heads:
        return blocks
    at = torch.tensor(places, device=blocks.anchor_k.device)
    return blocks.map_heads(lambda part: part.index_select(2, at))


def _attend(
    q: Tensor, past: Past, selects: bool, config: DKVConfig, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """State of some heads of one past, and the key blocks of their query blocks."""
    size, length, total = config.prefill_keys, q.shape[2], len(past)
    count, first = -(-total // size), total - length
    top_k, ratio, mass = config.prefill_limits() if selects else (1, 1.0, 1.0)
    every = torch.arange(total, device=q.device)
    step = max(1, WORKSPACE_BYTES // (4 * size * sum(x[:, :, :1].numel() for x in (past.k, past.v))))
    kept = None
    if selects and not _selects_all(past, config):
        scores = []
        for low in range(0, count, step):
            kept = past.take(every[low * size : (low + step) * size])
            scores.append(
                sampled_scores(
                    q, kept[0], size, config.prefill_block, config.prefill_stride, sm_scale, first, low * size
                )
            )
        share = block_shares(torch.cat(scores, dim=-1), length, config.prefill_block, config.prefill_stride)
    else:
        share = q.new_zeros(*past.k.shape[:2], -(-length // config.prefill_block), count)
    lists = choose_blocks(share, total, length, size, config.prefill_block, top_k, config.prefill_window, ratio, mass)
    if kept is not None and count <= step:
        return *attend_blocks(q, *kept, lists, size, config.prefill_block, first, softcap, sm_scale), lists
    states = [
        attend_blocks(q, *past.take(rows), part, size, config.prefill_block, start, softcap, sm_scale)
        for rows, part, start in _pieces(lists, every, size, first, step)
    ]
    out, lse = states[0]
    for state in states[1:]:
        out, lse = merge_states([out, state[0]], [lse, state[1]])
    return out, lse, lists


def _pieces(lists: Tensor, every: Tensor, size: int, first: int, step: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Rows of at most ``step`` key blocks that are selected, the lists that name them, the first query's row in them.

    Blocks at or after the first query are all kept, so that what is left out lies before every query.
    """
    count = -(-len(every) // size)
    used = torch.zeros(count + 1, dtype=torch.bool, device=lists.device)
    used[lists.flatten().long()] = True  # -1 is the place beyond the last block
    used[max(0, first // size) : count] = True
    used[count] = False
    found = used.nonzero().flatten()
    rank = torch.cat([used.cumsum(0) - 1, used.new_zeros(1, dtype=torch.long)])
    place = torch.where(lists < 0, -1, rank[lists.long()])
    start = first - size * int((~used[: max(0, first // size)]).sum())
    for low in range(0, len(found), step):
        blocks = found[low : low + step]
        rows = (blocks[:, None] * size + torch.arange(size, device=lists.device)).flatten()
        part = torch.where((place >= low) & (place < low + step), place - low, -1)
        yield rows[rows < len(every)], part, start - low * size
