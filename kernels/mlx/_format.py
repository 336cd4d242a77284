"""What the kernels are told of a format: sizes of their arrays, and where the parts of coded rows lie."""

from __future__ import annotations

import functools

from dkv.types import CompressedBlocks, code_bytes, code_parts

ROWS = (1, 4, 8)  # of queries that a threadgroup may take
WIDTHS = (32, 64, 128, 256)  # channels that it has room for
RANKS = (32, 64, 128)

Segments = tuple[tuple[int, int], ...]


def at_least(sizes: tuple[int, ...], wanted: int, name: str) -> int:
    """The smallest of ``sizes`` that holds ``wanted``."""
    for size in sizes:
        if size >= wanted:
            return size
    raise NotImplementedError(f"the Metal kernels take {name} up to {sizes[-1]}, got {wanted}")


def query_rows(rows: int) -> int:
    """Rows of queries of a threadgroup, of ``rows`` of a kv head."""
    return at_least(ROWS, min(rows, ROWS[-1]), "rows of queries")


@functools.lru_cache(maxsize=256)
def code_runs(segments: Segments) -> tuple[int, ...]:
    """Six numbers for each part of each run of channels, as ``rows.metal`` names them; see the law, "Packing"."""
    runs: list[int] = []
    start = byte = 0
    for count, bits in segments:
        left = bits
        for part in code_parts(bits):
            left -= part
            size = -(-count * part // 8)
            runs += (byte, size, part, left, start, count)
            byte += size
        start += count
    return tuple(runs)


def key_layout(blocks: CompressedBlocks) -> tuple[int, tuple[int, ...]]:
    """Bytes of a coded key and its runs; nothing where rows are exact."""
    if blocks.format.exact_rows:
        return 0, ()
    segments = blocks.format.key_segments(blocks.head_dim)
    return code_bytes(segments), code_runs(segments)


def value_layout(blocks: CompressedBlocks) -> tuple[int, tuple[int, ...]]:
    """As :func:`key_layout`, of values."""
    if blocks.format.exact_rows:
        return 0, ()
    segments = blocks.format.value_segments(blocks.head_dim_v)
    return code_bytes(segments), code_runs(segments)
