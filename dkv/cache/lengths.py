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


def surplus(config: DKVConfig, block_counts: Sequence[int], due: Sequence[int]) -> list[int]:
    """Blocks of each sequence, the oldest first, that must leave so that ``due`` more are within ``max_blocks``.

    Raises
    ------
    ValueError
        When there are any and the config does not let them leave.
    """
    if config.max_blocks is None:
        return [0] * len(due)
    over = [max(0, count + new - config.max_blocks) for count, new in zip(block_counts, due, strict=True)]
    if any(over) and config.when_full == "error":
        sequence = max(range(len(over)), key=over.__getitem__)
        raise ValueError(
            f"max_blocks is {config.max_blocks} and these tokens would make it {config.max_blocks + over[sequence]} in "
            f"sequence {sequence}: nothing was changed; allow more, or set when_full to 'drop_oldest'"
        )
    return over


def check_room(
    config: DKVConfig, tokens: Sequence[int], rows: Sequence[int], block_counts: Sequence[int], added: Sequence[int]
) -> None:
    """Refuse to add ``added`` tokens to each sequence where that would close more blocks than may be held."""
    if config.max_blocks is None or config.when_full != "error":
        return
    tokens, rows = ([a + b for a, b in zip(values, added, strict=True)] for values in (tokens, rows))
    surplus(config, block_counts, due_blocks(config, tokens, rows, config.window)[1])


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
