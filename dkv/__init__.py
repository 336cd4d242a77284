"""DKV: a KV cache that stays small and remembers. Public names only; importing this loads NumPy and nothing heavier."""

from dkv._dispatch import available_backends
from dkv._version import __version__
from dkv.compress import compress_blocks, reconstruct_blocks
from dkv.config import DKVConfig, HeadTier
from dkv.decode import decode_attention, exact_attention, lowrank_attention, residual_attention
from dkv.merge import merge_states
from dkv.prefill import prefill_attention
from dkv.profile import HeadProfile
from dkv.route import route_blocks
from dkv.types import AttentionState, BlockFormat, CompressedBlocks

__all__ = [
    "AttentionState",
    "BlockFormat",
    "CompressedBlocks",
    "DKVConfig",
    "HeadProfile",
    "HeadTier",
    "__version__",
    "available_backends",
    "compress_blocks",
    "decode_attention",
    "exact_attention",
    "lowrank_attention",
    "merge_states",
    "prefill_attention",
    "reconstruct_blocks",
    "residual_attention",
    "route_blocks",
]
