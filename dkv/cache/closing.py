"""Old exact rows of a layer become compressed blocks; layers of torch and of mlx alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dkv._checks import check_count
from dkv.cache._arrays import Array, weights, zeros
from dkv.cache.heads import pick
from dkv.cache.lengths import due_blocks, surplus
from dkv.cache.pool import join_blocks, stack_rows
from dkv.compress import RefusedBlock, compress_blocks
from dkv.config import HeadGroup
from dkv.types import CompressedBlocks


def close_blocks(layer: Any, window: int) -> bool:
    """Compress the oldest full blocks of a ``LayerCache`` behind its sink tokens; whether there were any.

    At least ``window`` rows stay exact, and at most ``max_blocks`` closed blocks, the newest. Nothing has changed where
    a block is refused.
    """
    check_count("window", window)
    size = layer.config.block_size
    sinks, due = due_blocks(layer.config, layer.tokens, layer.rows, window)
    if not any(due):
        return False
    over = surplus(layer.config, layer.block_counts, due)
    unmade = [max(0, gone - held) for gone, held in zip(over, layer.block_counts, strict=True)]  # never compressed
    starts = [sink + count * size for sink, count in zip(sinks, unmade, strict=True)]
    made = [a - b for a, b in zip(due, unmade, strict=True)]
    buffers, groups = (layer.k_rows, layer.v_rows), layer.stored_groups()
    try:
        new = [_compressed(buffers, group, starts, made, size) for group in groups]  # all of them before any is kept
    except RefusedBlock as error:
        row = error.row
        block = layer.dropped[row] + layer.block_counts[row] + unmade[row] + error.block
        first = sinks[row] + block * size
        raise RefusedBlock(row, block, f"of the cache, tokens {first} to {first + size - 1}") from error
    old: Sequence[CompressedBlocks | None] = layer.blocks or (None,) * len(groups)
    spans = [(gone - none, held) for gone, none, held in zip(over, unmade, layer.block_counts, strict=True)]
    layer.blocks = tuple(join_blocks(before, spans, after, made) for before, after in zip(old, new, strict=True))
    layer.block_counts = [held + a - b for held, a, b in zip(layer.block_counts, due, over, strict=True)]
    layer.dropped = [a + b for a, b in zip(layer.dropped, over, strict=True)]
    left = [row - count * size for row, count in zip(layer.rows, due, strict=True)]
    capacity = -(-max(left) // size) * size
    closed = [count * size for count in due]
    layer.k_rows, layer.v_rows = (_without(buffer, layer.rows, sinks, closed, capacity) for buffer in buffers)
    layer.rows = left
    return True


def _compressed(
    buffers: Sequence[Array], group: HeadGroup, starts: list[int], counts: list[int], size: int
) -> CompressedBlocks:
    """``counts[b]`` blocks behind the first ``starts[b]`` rows, of a group's heads."""
    if len(set(counts)) == 1 and len(set(starts)) == 1:
        return _compressed_rows(buffers, group, slice(None), slice(starts[0], starts[0] + counts[0] * size))
    rows = [
        _compressed_rows(buffers, group, slice(row, row + 1), slice(start, start + count * size)) if count else None
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    return stack_rows(rows)


def _compressed_rows(buffers: Sequence[Array], group: HeadGroup, sequences: slice, rows: slice) -> CompressedBlocks:
    k, v = (pick(buffer[sequences, :, rows], group.heads, buffer.shape[1]) for buffer in buffers)
    weight = None if group.channel_weight is None else weights(group.channel_weight, k)
    try:
        return compress_blocks(k, v, config=group.config, channel_weight=weight)
    except RefusedBlock as error:  # of these sequences and rows; the caller knows the others
        raise RefusedBlock((sequences.start or 0) + error.row, error.block) from error


def _without(buffer: Array, rows: list[int], sinks: list[int], closed: list[int], capacity: int) -> Array:
    """A new, smaller buffer without the closed rows, ``closed[b]`` of them behind ``sinks[b]``."""
    kept = zeros(buffer, (*buffer.shape[:2], capacity, buffer.shape[3]))
    for row, (sink, gone, stored) in enumerate(zip(sinks, closed, rows, strict=True)):
        kept[row, :, :sink] = buffer[row, :, :sink]
        kept[row, :, sink : stored - gone] = buffer[row, :, sink + gone : stored]
    return kept
