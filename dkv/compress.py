"""Compress K and V into blocks, and rebuild them."""

from __future__ import annotations

from typing import Any

from dkv import _checks as check
from dkv._dispatch import op_module, resolve
from dkv.config import DKVConfig
from dkv.types import CompressedBlocks

MAX_ORDERED = 256  # channels whose stored order fits uint8


class RefusedBlock(ValueError):
    """Numbers that are not finite, and in which block of which batch row; nothing was compressed."""

    def __init__(self, row: int, block: int, where: str = "of k or v") -> None:
        super().__init__(f"NaN or infinity in batch row {row}, block {block} {where}; nothing was compressed")
        self.row, self.block = row, block


def compress_blocks(
    k: Any,
    v: Any,
    *,
    config: DKVConfig | None = None,
    token_weight: Any = None,
    channel_weight: Any = None,
    backend: str | None = None,
) -> CompressedBlocks:
    """Compress every block of ``config.block_size`` tokens, all kv heads together.

    Differential-KV, paper sections 3 and 4; the exact definition is in ``reference/README.md``.

    Parameters
    ----------
    k : array [B, Hkv, N * block_size, D], float16, bfloat16 or float32
        Keys as the model caches them, after the rotary embedding.
    v : array [B, Hkv, N * block_size, Dv], same dtype as ``k``
    config : DKVConfig, optional
        The default settings when None.
    token_weight : array [B, N * block_size], optional
        Finite and not negative; multiplies the keep-score of each token.
    channel_weight : array [Hkv, D], optional
        Mean square of the queries per key channel, finite and not negative; all 1 when None. Decides which channels of
        a key are the important ones where ``config.key_bits`` gives them different widths.
    backend : {"reference", "torch", "triton", "mlx", "mlx-metal", "mlx-twin"}, optional
        Used or refused; the arrays' own library decides when None.

    Returns
    -------
    CompressedBlocks
        ``N`` blocks per sequence, in arrays of the same library and device.

    Raises
    ------
    ValueError
        Shapes that do not fit; a NaN or an infinity in ``k`` or ``v`` (batch row and block are named).
    TypeError
        Wrong kinds of array, or dtypes that differ.
    """
    config = DKVConfig() if config is None else config
    check.check_config(config, plain=True)
    check.check_array("k", k, "B Hkv N D")
    check.check_array("v", v, "B Hkv N Dv", B=k.shape[0], Hkv=k.shape[1], N=k.shape[2])
    check.check_float("k", k)
    if check.dtype_name(v) != check.dtype_name(k):
        raise TypeError(f"v must have the dtype of k ({check.dtype_name(k)}), got {check.dtype_name(v)}")
    if k.shape[1] == 0 or k.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"k and v need heads and channels, got {list(k.shape)} and {list(v.shape)}")
    if k.shape[2] % config.block_size:
        raise ValueError(f"k must hold a multiple of block_size={config.block_size} tokens, got {k.shape[2]}")
    check.check_format(config, check.dtype_name(k))
    if config.block_format.orders_channels and k.shape[3] > MAX_ORDERED:
        raise ValueError(f"k must have at most {MAX_ORDERED} channels where key_bits differ, got {k.shape[3]}")
    chosen = resolve(backend, k=k, v=v, token_weight=token_weight, channel_weight=channel_weight)
    check.check_device(k=k, v=v, token_weight=token_weight, channel_weight=channel_weight)
    size = config.block_size
    _refuse_blocks(~_finite_blocks(k, size) | ~_finite_blocks(v, size))
    if token_weight is not None:
        check.check_array("token_weight", token_weight, "B N", B=k.shape[0], N=k.shape[2])
        check.check_real("token_weight", token_weight)
        if not bool(((token_weight >= 0) & (token_weight < float("inf"))).all()):
            raise ValueError("token_weight must be finite and not negative")
    if channel_weight is not None:
        check.check_array("channel_weight", channel_weight, "Hkv D", Hkv=k.shape[1], D=k.shape[3])
        check.check_real("channel_weight", channel_weight)
        if not bool(((channel_weight >= 0) & (channel_weight < float("inf"))).all()):
            raise ValueError("channel_weight must be finite and not negative")
    compress = op_module(chosen, "compress").compress_blocks
    result = compress(k, v, config.block_format, config.keep, token_weight, channel_weight)
    return result if isinstance(result, CompressedBlocks) else CompressedBlocks(format=config.block_format, **result)


def _finite_blocks(x: Any, size: int) -> Any:
    """Whether every number of a block is finite, ``[B, N]``."""
    finite = (x == x) & (abs(x) != float("inf"))
    return finite.reshape(x.shape[0], x.shape[1], x.shape[2] // size, size * x.shape[3]).all(-1).all(1)


def _refuse_blocks(bad: Any) -> None:
    if bool(bad.any()):
        row, block = next((b, n) for b in range(bad.shape[0]) for n in range(bad.shape[1]) if bool(bad[b, n]))
        raise RefusedBlock(row, block)


def reconstruct_blocks(blocks: CompressedBlocks, *, backend: str | None = None) -> tuple[Any, Any]:
    """Rebuild what the blocks stand for. For inspection and tests: attention never needs it.

    Parameters
    ----------
    blocks : CompressedBlocks
    backend : str, optional
        As in :func:`compress_blocks`.

    Returns
    -------
    k : array [B, Hkv, N * block_size, D], cache dtype
    v : array [B, Hkv, N * block_size, Dv], cache dtype
        Where every row is a residual, all rows are the stored ones.
    """
    check.check_blocks(blocks)
    return op_module(resolve(backend, blocks=blocks.anchor_k), "compress").reconstruct_blocks(blocks)
