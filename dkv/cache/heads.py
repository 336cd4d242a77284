"""Head groups on the head axis: views where a group's heads lie side by side, copies only where they do not."""

from __future__ import annotations

from collections.abc import Sequence

from dkv.cache._arrays import Array, cat
from dkv.config import DKVConfig, HeadGroup


def check_groups(groups: Sequence[HeadGroup], config: DKVConfig) -> tuple[HeadGroup, ...]:
    """The groups, each head in one of them, all closing together."""
    groups = tuple(HeadGroup(tuple(heads), own, weight) for heads, own, weight in groups)
    heads = [head for group in groups for head in group.heads]
    if not heads or sorted(heads) != list(range(len(heads))):
        raise ValueError(f"groups must name every kv head once, got {[list(group.heads) for group in groups]}")
    for group in groups:
        own = group.config
        if not group.heads or (own and (own.splits_heads or own.block_size != config.block_size)):
            raise ValueError("a group must have heads and a plain config of the cache's block_size")
    return groups


def one_group(config: DKVConfig, num_kv_heads: int) -> tuple[HeadGroup, ...]:
    return (HeadGroup(tuple(range(num_kv_heads)), config),)


def codec_of(group: HeadGroup) -> tuple[object, ...]:
    """What decides how a group's blocks are stored."""
    return group.heads, None if group.config is None else group.config.block_format, group.channel_weight


def by_choice(heads: Sequence[int], chosen: Sequence[bool]) -> list[tuple[bool, tuple[int, ...]]]:
    """Places among ``heads`` of those that are ``chosen``, and of those that are not, where there are any."""
    parts = [(wanted, tuple(i for i, head in enumerate(heads) if chosen[head] == wanted)) for wanted in (True, False)]
    return [part for part in parts if part[1]]


def runs(heads: Sequence[int], width: int = 1) -> list[tuple[int, int]]:
    """Ascending ``heads`` as half-open ranges of neighbours, in units of ``width``."""
    found: list[tuple[int, int]] = []
    for head in heads:
        if found and found[-1][1] == head * width:
            found[-1] = (found[-1][0], (head + 1) * width)
        else:
            found.append((head * width, (head + 1) * width))
    return found


def pick(x: Array, heads: Sequence[int], num_kv_heads: int) -> Array:
    """The part of ``x [B, H, ...]`` that belongs to kv ``heads``; ``H`` is a multiple of ``num_kv_heads``."""
    if len(heads) == num_kv_heads:
        return x
    parts = [x[:, start:stop] for start, stop in runs(heads, x.shape[1] // num_kv_heads)]
    return parts[0] if len(parts) == 1 else cat(parts, 1)


def put_back(parts: Sequence[Array], groups: Sequence[Sequence[int]]) -> Array:
    """The inverse of :func:`pick` over all ``groups``, ``[B, H, ...]`` in the order of the heads."""
    if len(parts) == 1:
        return parts[0]
    width = sum(part.shape[1] for part in parts) // sum(len(heads) for heads in groups)
    pieces = []
    for part, heads in zip(parts, groups, strict=True):
        taken = 0
        for start, stop in runs(heads, width):
            pieces.append((start, part[:, taken : taken + stop - start]))
            taken += stop - start
    return cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], 1)
