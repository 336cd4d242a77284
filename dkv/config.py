"""One frozen value that says how a cache is compressed, routed and prefilled."""

from __future__ import annotations

import dataclasses
from typing import Any

from dkv.types import BlockFormat

KEEPS = ("distinct", "error")
FORMATS = ("compact", "fp32", "fp16", "bf16")
ROUTERS = ("lowrank", "minmax", "residual")
SHARES = ("kv_head", "all")


@dataclasses.dataclass(frozen=True)
class DKVConfig:
    """Settings of a compressed cache.

    Parameters
    ----------
    block_size : int
        Tokens in a block, 2 to 256.
    rank : int
        Rank of the low-rank part, 1 to 128.
    num_residuals : int
        Rows of a block kept beside the low-rank part; ``block_size - 1`` or more keeps every row.
    keep : {"distinct", "error"}
        Which rows are kept when not all are: those whose values lie far from the block's mean value, or those that the
        low-rank part reconstructs worst.
    format : {"compact", "fp32", "fp16", "bf16"}
        "compact" stores int8 factors and 4-bit rows; the others store factors in that dtype and rows bit-exact.
    residual_bits : {4, 8, 16}, optional
        Overrides the format's row width; 16 means the cache's own dtype.
    top_k : int
        Blocks that a decode step attends, per kv head.
    router : {"lowrank", "minmax", "residual"}
    share : {"kv_head", "all"}
        Whether each kv head selects blocks of its own, or all heads of a layer share one set.
    sink_blocks : int
        Leading compressed blocks that are always selected by the ops.
    recent_blocks : int
        Trailing compressed blocks that are always selected.
    window : int
        Newest tokens that the runtime keeps exact, at least; at most ``window + block_size - 1``.
    sink_tokens : int
        First tokens of a sequence that the runtime keeps exact. They replace ``sink_blocks`` there.
    chunk_top_k : int, optional
        Compressed blocks that a chunk of more than one query attends in the runtime; all of them when None.
    prefill_block : int
        Queries that share one selection in :func:`dkv.prefill_attention`.
    prefill_top_k : int, optional
        Key blocks per query block, sink, window and diagonal included; ``max(16, 2 * sqrt(blocks))`` when None.
    prefill_window : int
        Newest tokens before a query block that it always attends.
    """

    block_size: int = 256
    rank: int = 32
    num_residuals: int = 255
    keep: str = "distinct"
    format: str = "compact"
    residual_bits: int | None = None
    top_k: int = 16
    router: str = "lowrank"
    share: str = "kv_head"
    sink_blocks: int = 1
    recent_blocks: int = 0
    window: int = 1024
    sink_tokens: int = 256
    chunk_top_k: int | None = None
    prefill_block: int = 128
    prefill_top_k: int | None = None
    prefill_window: int = 512

    def __post_init__(self) -> None:
        self._check_int("block_size", 2, 256)
        self._check_int("rank", 1, 128)
        self._check_int("num_residuals", 0)
        self._check_int("top_k", 1)
        self._check_int("sink_blocks", 0)
        self._check_int("recent_blocks", 0)
        self._check_int("window", 1)
        self._check_int("sink_tokens", 0)
        self._check_int("chunk_top_k", 1, optional=True)
        self._check_int("prefill_block", 1)
        self._check_int("prefill_top_k", 1, optional=True)
        self._check_int("prefill_window", 0)
        for name, choices in (("keep", KEEPS), ("format", FORMATS), ("router", ROUTERS), ("share", SHARES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        self.block_format  # noqa: B018  checks residual_bits

    def _check_int(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < low or (high is not None and value > high):
            allowed = f"{low}..{high}" if high is not None else f"{low} or more"
            raise ValueError(f"{name} must be {allowed}, got {value}")

    @property
    def block_format(self) -> BlockFormat:
        """The storage format of every block."""
        compact = self.format == "compact"
        bits = self.residual_bits if self.residual_bits is not None else (4 if compact else 16)
        return BlockFormat(
            block_size=self.block_size,
            rank=self.rank,
            num_residuals=self.num_residuals,
            factor_bits=8 if compact else (32 if self.format == "fp32" else 16),
            residual_bits=bits,
            minmax=self.router == "minmax",
        )

    @classmethod
    def paper(cls, num_residuals: int = 128) -> DKVConfig:
        """The published settings (Differential-KV, paper sections 4 and 6): rank 32, fp16, error-ranked residuals."""
        return cls(num_residuals=num_residuals, keep="error", format="fp16", router="residual", share="all")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DKVConfig:
        """The inverse of :meth:`to_dict`; an unknown field is a ``ValueError``."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown config fields {unknown}; known are {sorted(known)}")
        return cls(**values)
