"""The runtime of one layer: a pool of compressed blocks, exact rows, and the surgery that a cache goes through."""

from dkv.cache.layer import LayerCache

__all__ = ["LayerCache"]
