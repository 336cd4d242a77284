"""Bytes of one compressed block in one layer, counted from real arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import dkv
from dkv.config import DKVConfig


class Geometry(NamedTuple):
    """Attention shape of a model."""

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


GEOMETRIES = (
    Geometry("Qwen2.5-1.5B", 28, 2, 128),
    Geometry("Llama-3.2-3B", 28, 8, 128),
    Geometry("SmolLM2-135M", 30, 3, 64),
)

CONTEXTS = tuple(1 << power for power in range(10, 21))  # 1k to 1M tokens

FOOTNOTE = (
    "published R=...: counted as the publication counts it, without the residual positions (1 byte each); "
    "'as stored' is what dkv holds for the same settings"
)


def run(seed: int = 0) -> list[dict[str, Any]]:
    """One row per model and layout.

    Returns
    -------
    list of dict
        Keys ``model``, ``layout``, ``bytes_per_block_layer``, ``dense_bytes``, ``ratio``. Random float16 K and V: the
        bytes of a block depend on its shape alone.
    """
    from dkv.reference import accounting

    rng = np.random.default_rng(seed)
    rows = []
    for shape in GEOMETRIES:
        size = (1, shape.num_kv_heads, DKVConfig().block_size, shape.head_dim)
        k, v = (rng.standard_normal(size, dtype=np.float32).astype(np.float16) for _ in range(2))
        for residuals in (128, 64):
            blocks = dkv.compress_blocks(k, v, config=DKVConfig.paper(num_residuals=residuals))
            rows.append(
                _row(shape, f"published R={residuals}", accounting.published_nbytes(blocks), blocks.dense_nbytes)
            )
            rows.append(_row(shape, f"published R={residuals} as stored", blocks.nbytes, blocks.dense_nbytes))
        for layout, config in (("compact R=64", DKVConfig(num_residuals=64)), ("default", DKVConfig())):
            blocks = dkv.compress_blocks(k, v, config=config)
            rows.append(_row(shape, layout, blocks.nbytes, blocks.dense_nbytes))
    return rows


def dense_block_nbytes(shape: Geometry) -> int:
    """Bytes of a block's tokens in a layer of a dense float16 cache."""
    return DKVConfig().block_size * 2 * 2 * shape.num_kv_heads * shape.head_dim


def cache_nbytes(shape: Geometry, context: int, block_nbytes: float) -> float:
    """Bytes of a whole float16 cache by those of a block and layer; the default's sink and window are exact."""
    config = DKVConfig()
    blocks = max(0, (context - config.sink_tokens - config.window) // config.block_size)
    exact = context / config.block_size - blocks  # in blocks
    return shape.num_layers * (exact * dense_block_nbytes(shape) + blocks * block_nbytes)


def cache_curves(rows: Sequence[dict[str, Any]], shape: Geometry) -> dict[str, tuple[list[int], list[float]]]:
    """``layout -> (contexts, bytes)`` of a model's rows, and of dense attention."""
    own = {row["layout"]: row["bytes_per_block_layer"] for row in rows if row["model"] == shape.model}
    own = {"dense": dense_block_nbytes(shape)} | own
    return {
        layout: (list(CONTEXTS), [cache_nbytes(shape, context, nbytes) for context in CONTEXTS])
        for layout, nbytes in own.items()
        if not layout.endswith("as stored")
    }


def _row(shape: Geometry, layout: str, nbytes: int, dense_nbytes: int) -> dict[str, Any]:
    return {
        "model": shape.model,
        "layout": layout,
        "bytes_per_block_layer": int(nbytes),
        "dense_bytes": int(dense_nbytes),
        "ratio": round(dense_nbytes / nbytes, 3),
    }
