"""Joining, cutting and picking rows of :class:`CompressedBlocks` held in torch or mlx arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dkv.cache._arrays import cat, copied, integers, zeros
from dkv.types import CompressedBlocks


def with_counts(blocks: CompressedBlocks, counts: Sequence[int]) -> CompressedBlocks:
    """The same blocks with ``counts`` valid ones per sequence; ``block_counts`` is stored only where they differ."""
    if all(count == blocks.num_blocks for count in counts):
        return dataclasses.replace(blocks, block_counts=None)
    return dataclasses.replace(blocks, block_counts=integers(counts, blocks.anchor_k))


def join_blocks(
    old: CompressedBlocks | None, spans: Sequence[tuple[int, int]], new: CompressedBlocks, new_counts: Sequence[int]
) -> CompressedBlocks:
    """Row ``b`` is the blocks in the half-open range ``spans[b]`` of ``old``, then ``new_counts[b]`` of ``new``."""
    if old is None:
        return with_counts(cut_blocks(new, max(new_counts)), new_counts)
    counts = [stop - start + new for (start, stop), new in zip(spans, new_counts, strict=True)]
    uniform = len(set(spans)) == 1 and len(set(new_counts)) == 1
    parts = {}
    for name, part in old.parts():
        if name == "block_counts":
            continue
        added = getattr(new, name)
        if uniform:
            parts[name] = cat([part[:, slice(*spans[0])], added[:, : new_counts[0]]], 1)
            continue
        joined = zeros(part, (part.shape[0], max(counts), *part.shape[2:]))
        for row, ((start, stop), count) in enumerate(zip(spans, new_counts, strict=True)):
            joined[row, : stop - start] = part[row, start:stop]
            joined[row, stop - start : counts[row]] = added[row, :count]
        parts[name] = joined
    return with_counts(CompressedBlocks(format=old.format, **parts), counts)


def cut_blocks(blocks: CompressedBlocks, count: int) -> CompressedBlocks:
    """The first ``count`` blocks of every sequence, copied so that the rest is freed."""
    if count == blocks.num_blocks:
        return blocks
    return blocks.map(lambda part: part if part.ndim == 1 else copied(part[:, :count]))


def stack_rows(rows: Sequence[CompressedBlocks | None]) -> CompressedBlocks:
    """One batch from single-sequence blocks of differing counts, zero-padded; None is a sequence without blocks."""
    template = next(row for row in rows if row is not None)
    count = max(row.num_blocks for row in rows if row is not None)
    parts = {}
    for name, part in template.parts():
        stacked = zeros(part, (len(rows), count, *part.shape[2:]))
        for index, row in enumerate(rows):
            if row is not None:
                stacked[index, : row.num_blocks] = getattr(row, name)[0]
        parts[name] = stacked
    return CompressedBlocks(format=template.format, **parts)
