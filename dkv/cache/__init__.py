"""The runtime of one layer: a pool of compressed blocks, exact rows, and the surgery that a cache goes through.

``layer`` is for torch, ``mlx_layer`` for mlx; what is left takes the arrays of either.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LayerCache"]


def __getattr__(name: str) -> Any:
    if name == "LayerCache":  # on demand: the mlx runtime runs without torch
        from dkv.cache.layer import LayerCache

        return LayerCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
