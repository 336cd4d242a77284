"""What the Metal kernels of compression and prefill are tried with where they are broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from dkv import testing
from dkv._dispatch import op_module
from dkv.kernels.mlx import _metal
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
    made.v[0, -1, 5:7] = 0  # rows without a direction
    if spread:
        sizes = (10.0 ** rng.uniform(-spread, spread, dim)).astype(np.float32)
        made = made._replace(k=made.k * sizes)
    if spread > 30:  # what no float holds, and no square
        k, v = (np.clip(1e38 * x.astype(np.float64), -3e38, 3e38).astype(np.float32) for x in (made.k, made.v))
        made = made._replace(k=k, v=v)
    inputs, weights = testing.to_library(made, "mlx"), weights if weighted else {}
    return inputs, weights, compressed("mlx-twin", inputs, keep, weights)


ARITHMETIC = """
const uint i = thread_position_in_grid.x;
const Wide x = Wide{a[i], b[i]};
const Wide y = Wide{c[i], d[i]};
const Wide found[6] = {
    plus(x, y), times(x, y), over(x, y), root(magnitude(x)), nudged(x, d[i]), trimmed(Wide{a[i], d[i]})};
for (int op = 0; op < 6; op++) {
  high[i * 6 + op] = found[op].high;
  low[i * 6 + op] = found[op].low;
}
rounded[i * 4] = nearest(x);
rounded[i * 4 + 1] = nearest_half(x);
rounded[i * 4 + 2] = float(exponent_above(magnitude(x)));
rounded[i * 4 + 3] = below(x, y) ? 1.0f : 0.0f;
"""


def arithmetic() -> None:
    """The numbers of 48 bits against numbers of 64, and where they round against float64."""
    rng = np.random.default_rng(3)
    a, c = (np.float32(rng.choice([-1, 1], 4000) * 2 ** rng.uniform(-8, 11, 4000)) for _ in range(2))
    a[:2000] = rng.integers(-1024, 1024, 2000) + np.float32(0.5)  # halves, and one bit beside or beyond them
    a[2000:3000] = rng.integers(1024, 2048, 1000) * np.float32(2) ** rng.integers(-30, 4, 1000) + 0
    a[2000:3000] *= np.float32(1 + 2**-11)
    a[3000:3100], a[3100:3110] = 2.0 ** rng.integers(-8, 8, 100), np.float32(3 * 2**-25)
    c[:50] = a[:50]
    b, d = (np.float32(x * rng.choice([0, 2**-26, -(2**-26), 2**-47, -(2**-47)], 4000)) for x in (a, c))
    b[3110:] = 0.0
    d[3110:] = a[3110:] * np.float32(2**-53) * rng.uniform(-1.4, 1.4, 890)  # around the last place of float64
    kernel = _metal.builder(
        name="dkv_arithmetic",
        input_names=list("abcd"),
        output_names=["high", "low", "rounded"],
        source=ARITHMETIC,
        header=_metal.text("wide.metal"),
    )
    high, low, rounded = kernel(
        inputs=[mx.array(x) for x in (a, b, c, d)],
        grid=(4000, 1, 1),
        threadgroup=(100, 1, 1),
        output_shapes=[(4000, 6), (4000, 6), (4000, 4)],
        output_dtypes=[mx.float32] * 3,
    )
    high, low, rounded = (np.array(part) for part in (high, low, rounded))
    x, y = (p.astype(np.longdouble) + q for p, q in ((a, b), (c, d)))
    got = high.astype(np.longdouble) + low
    for op, want in enumerate((x + y, x * y, x / y, np.sqrt(abs(x)))):
        scale = abs(x) + abs(y) if op == 0 else abs(want)
        assert (abs(got[:, op] - want) <= 2.0**-44 * scale).all(), op
        assert (abs(low[:, op]) <= 2.0**-24 * abs(high[:, op])).all(), op
    assert np.array_equal(high[b != 0, 4], a[b != 0]) and np.array_equal(low[b != 0, 4], b[b != 0])
    kept = abs(d[3110:]) > np.ldexp(1.0, np.frexp(a[3110:])[1] - 54)
    assert np.array_equal(low[3110:, 5], np.where(kept, d[3110:], 0)) and 100 < kept.sum() < 800
    want = (a.astype(np.float64) + d.astype(np.float64))[3110:]
    assert np.array_equal(got[3110:, 4].astype(np.float64), want) and (want != a[3110:]).any()
    assert np.array_equal(rounded[:, 0], np.rint(x).astype(np.float32))
    assert np.array_equal(rounded[:, 1], x.astype(np.float64).astype(np.float16).astype(np.float32))
    fraction, exponent = np.frexp(abs(x))
    assert np.array_equal(rounded[:, 2], exponent - (fraction == 0.5))
    assert np.array_equal(rounded[:, 3], x < y)


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
    lambda: arithmetic,
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
