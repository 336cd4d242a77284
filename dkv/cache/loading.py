"""What was saved of a layer must fit before a cache takes any of it; arrays of torch or mlx."""

from __future__ import annotations

import dataclasses
from typing import Any

from dkv._files import build_blocks
from dkv.config import DKVConfig, HeadGroup
from dkv.types import CompressedBlocks


def check_lengths(config: DKVConfig, tokens: Any, rows: Any, block_counts: Any, dropped: Any, where: str) -> None:
    """Lists of whole numbers, one a sequence, that add up."""
    lists = (tokens, rows, block_counts, dropped)
    if not all(isinstance(values, list) and len(values) == len(tokens) for values in lists):
        raise ValueError(f"{where} has no lengths")
    for token, row, count, gone in zip(*lists, strict=True):
        whole = all(type(value) is int and value >= 0 for value in (token, row, count, gone))
        added_up = whole and row + (count + gone) * config.block_size == token
        if not added_up or (count and row < config.sink_tokens) or not _held_within(config, count, gone):
            raise ValueError(
                f"{where} has lengths that do not fit: {token} tokens, {row} rows, {count} blocks and {gone} dropped"
            )


def _held_within(config: DKVConfig, count: int, gone: int) -> bool:
    """Whether a limit allows ``count`` blocks and explains the ``gone`` ones."""
    if config.max_blocks is None:
        return gone == 0
    return count <= config.max_blocks and (gone == 0 or (config.when_full == "drop_oldest" and count > 0))


def fitting_blocks(
    group: HeadGroup, parts: dict[str, Any], rows: tuple[Any, Any], block_counts: list[int], where: str
) -> CompressedBlocks:
    """A group's blocks from their named parts, beside the exact rows (K, V) and lengths that were saved with them."""
    assert group.config is not None
    blocks = build_blocks(dataclasses.asdict(group.config.block_format), parts)
    got = (blocks.batch_size, blocks.num_kv_heads, blocks.num_blocks, blocks.head_dim, blocks.head_dim_v)
    wanted = (len(block_counts), len(group.heads), max(block_counts), *(part.shape[3] for part in rows))
    if got != wanted or blocks.anchor_k.dtype != rows[0].dtype:
        raise ValueError(f"{where}: blocks do not fit its rows")
    held = [blocks.num_blocks] * len(block_counts) if blocks.block_counts is None else blocks.block_counts.tolist()
    if held != block_counts:
        raise ValueError(f"{where}: block_counts are {held}, its lengths say {block_counts}")
    return blocks
