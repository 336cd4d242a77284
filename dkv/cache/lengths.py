"""How many rows of a sequence are exact and when they close. Rows, oldest first: sink rows, closed blocks, window."""

from __future__ import annotations

from collections.abc import Sequence

from dkv.config import DKVConfig


def due_blocks(
    config: DKVConfig, tokens: Sequence[int], rows: Sequence[int], window: int
) -> tuple[list[int], list[int]]:
    """Sink rows of each sequence, and the full blocks behind them that leave at least ``window`` rows exact."""
    sinks = [min(token, config.sink_tokens) for token in tokens]
    due = [max(0, (row - sink - window) // config.block_size) for row, sink in zip(rows, sinks, strict=True)]
    return sinks, due


def check_crop(
    config: DKVConfig,
    tokens: Sequence[int],
    rows: Sequence[int],
    block_counts: Sequence[int],
    gone: Sequence[int],
    what: str,
) -> None:
    """Refuse to take ``gone`` tokens off the end of each sequence where one of them lies in a closed block."""
    for sequence, lost in enumerate(gone):
        window = rows[sequence] - min(tokens[sequence], config.sink_tokens)
        if block_counts[sequence] and lost > window:
            raise ValueError(
                f"{what} reaches into a closed block: sequence {sequence} holds {window} exact rows after it"
            )
