"""What a cache must be equal to: plain rows of every sequence, and attention in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from dkv import DKVConfig, testing

HEADS, QUERY_HEADS, DIM = 2, 4, 8


class Rows:
    """One sequence: ``k, v [layers, n, HEADS, DIM]``, how many blocks of them closed and how many of those left."""

    def __init__(self, layers: int) -> None:
        self.k, self.v = np.zeros((2, layers, 0, HEADS, DIM))
        self.closed = self.dropped = 0

    def __len__(self) -> int:
        return self.k.shape[1]


class Dense:
    """A batch of sequences beside a cache of ``config``, whose blocks keep every row exactly."""

    def __init__(self, config: DKVConfig, layers: int) -> None:
        self.config, self.layers = config, layers
        self.rows: list[Rows] = []

    def start(self, batch: int) -> Dense:
        """A batch of sequences without a token."""
        self.rows = [Rows(self.layers) for _ in range(batch)]
        return self

    def copy(self) -> Dense:
        return copy.deepcopy(self)

    @property
    def tokens(self) -> list[int]:
        return [len(row) for row in self.rows]

    @property
    def held(self) -> list[int]:
        """Closed blocks that are still there."""
        return [row.closed - row.dropped for row in self.rows]

    @property
    def dropped(self) -> list[int]:
        return [row.dropped * self.config.block_size for row in self.rows]

    def closed_after(self, added: Sequence[int], window: int) -> list[int]:
        sink, size = self.config.sink_tokens, self.config.block_size
        return [
            max(row.closed, (len(row) + more - sink - window) // size)
            for row, more in zip(self.rows, added, strict=True)
        ]

    def has_room(self, added: Sequence[int], window: int) -> bool:
        limit = self.config.max_blocks
        if limit is None or self.config.when_full == "drop_oldest":
            return True
        return max(self.closed_after(added, window), default=0) <= limit

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Append ``k, v [layers, B, H, n, D]`` where ``real [B, n]``, attend ``q``, close; zeros for padding."""
        out = np.zeros(q.shape)
        for b, row in enumerate(self.rows):
            at = real[b].nonzero()[0]
            first = len(row)
            row.k = np.concatenate([row.k, k[:, b][:, :, at].swapaxes(1, 2)], axis=1)
            row.v = np.concatenate([row.v, v[:, b][:, :, at].swapaxes(1, 2)], axis=1)
            out[:, b, :, at] = self._attend(row, q[:, b][:, :, at], first).transpose(2, 0, 1, 3)
        self.close(self.config.window)
        return out

    def _attend(self, row: Rows, q: np.ndarray, first: int) -> np.ndarray:
        """``q [layers, Hq, m, D]`` of the rows from ``first`` on; those that have left are not seen."""
        group = q.shape[1] // row.k.shape[2]
        k, v = (np.repeat(part, group, axis=2).swapaxes(1, 2) for part in (row.k, row.v))  # [layers, Hq, n, D]
        logits = q.astype(np.float64) @ k.swapaxes(2, 3) * q.shape[3] ** -0.5
        places = np.arange(len(row))
        sink = self.config.sink_tokens
        there = (places < sink) | (places >= sink + row.dropped * self.config.block_size)
        seen = there & (places <= first + np.arange(q.shape[2])[:, None])
        logits = np.where(seen, logits, -np.inf)
        weight = np.exp(logits - logits.max(axis=3, keepdims=True, initial=-1e9))
        return weight / weight.sum(axis=3, keepdims=True) @ v

    def close(self, window: int) -> None:
        for row, closed in zip(self.rows, self.closed_after([0] * len(self.rows), window), strict=True):
            row.closed = closed
            if self.config.max_blocks is not None:
                row.dropped = max(row.dropped, closed - self.config.max_blocks)

    def can_lose(self, lost: Sequence[int]) -> bool:
        sink, size = self.config.sink_tokens, self.config.block_size
        return not any(
            row.closed and gone > len(row) - sink - row.closed * size
            for row, gone in zip(self.rows, lost, strict=True)
        )

    def lose(self, lost: Sequence[int]) -> None:
        for row, gone in zip(self.rows, lost, strict=True):
            kept = len(row) - gone
            row.k, row.v = row.k[:, :kept], row.v[:, :kept]

    def select(self, index: Sequence[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[i]) for i in index]


def exact(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal but for float32."""
    tolerance = testing.TOLERANCES["decode_attention"]["float32"].value
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max(initial=0)))


def drawn(rng: np.random.Generator, layers: int, batch: int, length: int) -> tuple[np.ndarray, ...]:
    """Queries, keys and values in float32, ``[layers, batch, heads, length, DIM]``."""
    shapes = ((layers, batch, heads, length, DIM) for heads in (QUERY_HEADS, HEADS, HEADS))
    return tuple(rng.standard_normal(shape).astype(np.float32) * 1.5 for shape in shapes)
