"""What the Metal kernels of compression and prefill are tried with where they are broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks

MIXED = {"key_bits": (8, 7, 5, 4, 3, 2, 1, 0), "value_bits": 3}


def assert_bytes_of_the_twin(got: CompressedBlocks, want: CompressedBlocks) -> None:
    """All but the factors, which matter by their product alone; zeros of either sign are the same."""
    for field in dataclasses.fields(CompressedBlocks):
        if field.name == "format" or field.name.startswith(("u", "basis")):
            continue
        one, other = getattr(got, field.name), getattr(want, field.name)
        assert (one is None) == (other is None), field.name
        if one is not None:
            assert one.dtype == other.dtype and np.array_equal(one, other), field.name


def compressed(backend: str, inputs: testing.Inputs, keep: str, weights: dict[str, np.ndarray]) -> CompressedBlocks:
    weights = {name: testing.to_library(x, "mlx") for name, x in weights.items()}
    arguments = (weights.get("token_weight"), weights.get("channel_weight"))
    compress = op_module(backend, "compress").compress_blocks
    return testing.to_numpy(compress(inputs.k, inputs.v, inputs.blocks.format, keep, *arguments))


def _compress(
    fmt: BlockFormat, keep: str = "distinct", spread: float = 0.0, weighted: bool = True, **shape: Any
) -> Callable[[], None]:
    """Compression against the reference and the twin; ``spread`` of the sizes of channels, as a power of ten."""

    def run() -> None:
        inputs, weights, want = _compress_inputs(fmt, keep, spread, weighted, tuple(shape.items()))
        if not spread:
            testing.assert_matches_reference("mlx-metal", "compress_blocks", inputs, keep=keep, **weights)
        assert_bytes_of_the_twin(compressed("mlx-metal", inputs, keep, weights), want)

    return run


@functools.cache
def _compress_inputs(
    fmt: BlockFormat, keep: str, spread: float, weighted: bool, shape: tuple[tuple[str, int], ...]
) -> Any:
    made = testing.make_inputs(7, config=fmt, **{"num_blocks": 2, "window": 0, "head_dim": 17} | dict(shape))
    rng = np.random.default_rng(8)
    batch, heads, tokens, dim = made.k.shape
    weights = {"token_weight": rng.choice([0.0, 1.0, 1.0, 2.5, 1e38], (batch, tokens)).astype(np.float32)}
    weights["channel_weight"] = rng.choice([0.0, 1.0, 2.5, 1e-35, 1e35], (heads, dim)).astype(np.float32)
    for x in (made.k, made.v):
        x[0, 0] = x[0, 0, :1]  # a head without spread
        x[..., 1] = x[:, :, :1, 1]  # a channel without any
    made.v[-1] *= np.float32(1e-9)  # of no energy
    if spread:
        sizes = (10.0 ** rng.uniform(-spread, spread, dim)).astype(np.float32)
        made = made._replace(k=made.k * sizes)
    if spread > 30:  # what no float holds, and no square
        k, v = (np.clip(1e38 * x.astype(np.float64), -3e38, 3e38).astype(np.float32) for x in (made.k, made.v))
        made = made._replace(k=k, v=v)
    inputs, weights = testing.to_library(made, "mlx"), weights if weighted else {}
    return inputs, weights, compressed("mlx-twin", inputs, keep, weights)


def _prefill(**shape: Any) -> Callable[[], None]:
    """Repeats, -1 and blocks that do not exist among the listed ones, a sink and a soft-cap, and without them."""

    def run() -> None:
        inputs, indices, sink = _prefill_inputs(tuple(shape.items()))
        check = functools.partial(testing.assert_matches_reference, "mlx-metal", "prefill_attention", inputs)
        check(block_indices=indices, sink=sink, softcap=5.0)
        check(block_indices=indices)

    return run


@functools.cache
def _prefill_inputs(shape: tuple[tuple[str, int], ...]) -> Any:
    made = testing.make_inputs(9, **{"q_len": 21, "num_blocks": 3, "window": 5} | dict(shape), library="mlx")
    made = made._replace(config=dataclasses.replace(made.config, prefill_block=11))
    rng, (batch, heads) = np.random.default_rng(1), made.k.shape[:2]
    indices = rng.integers(-1, 6, (batch, heads, 2, 9), np.int32)
    indices[..., :2] = 2
    return made, indices, rng.standard_normal(made.q.shape[1]).astype(np.float32)


COMPRESS: list[Callable[[], Callable[[], None]]] = [
    lambda: _compress(BlockFormat(16, 5, 6)),
    lambda: _compress(BlockFormat(16, 5, 6), weighted=False),
    lambda: _compress(BlockFormat(16, 5, 15, **MIXED), num_blocks=5),
    lambda: _compress(BlockFormat(16, 0, 6), "error"),
    lambda: _compress(BlockFormat(140, 3, 137, **MIXED), num_blocks=1, batch=1, head_dim=24),
    lambda: _compress(BlockFormat(140, 3, 139, **MIXED), spread=12.0, num_blocks=1, batch=1, head_dim=24),
    lambda: _compress(BlockFormat(16, 5, 6, 32, **MIXED), spread=31.0, head_dim=130, head_dim_v=140, num_blocks=1),
]
PREFILL: list[Callable[[], Callable[[], None]]] = [
    lambda: _prefill(),
    lambda: _prefill(head_dim=130, head_dim_v=40, q_len=13, num_kv_heads=1, num_q_heads=2),
]
