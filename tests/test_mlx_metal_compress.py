"""Compression with Metal kernels, by the host: parity with the reference, and the very bytes of the twin."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx: Any = pytest.importorskip("mlx.core")
import metal_mutants  # noqa: E402
from metal_host import MODES, compared_text, metal, needs_host  # noqa: E402
from metal_row_cases import COMPRESS, MIXED, arithmetic, assert_bytes_of_the_twin, compressed  # noqa: E402
from strategies import widths  # noqa: E402

import dkv  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

pytestmark = needs_host

few = settings(max_examples=max(6, settings().max_examples // 2))
# Each dtype builds every kernel anew: the cache's usual one is run in every mode.
BUILDS = [*(("float16", mode) for mode in MODES), ("bfloat16", "checked"), ("float32", "plain")]


@st.composite
def formats(draw: st.DrawFn) -> BlockFormat:
    size = draw(st.sampled_from([16, 11, 1, 2, 131, 140]))
    bits = draw(widths())
    kept = draw(st.sampled_from([size // 2, 300, 3, 0, 130]))
    rank, factor_bits = draw(st.sampled_from([5, 3, 0])), draw(st.sampled_from([8, 16, 32]))
    return BlockFormat(size, rank, kept, factor_bits, minmax=draw(st.booleans()), **bits)


@pytest.mark.parametrize(("dtype", "mode"), BUILDS)
@few
@given(
    fmt=formats(),
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([2, 1, 3]),
    dims=st.sampled_from([(24, 20), (5, 8), (17, 31)]),
    keep=st.sampled_from(["distinct", "error"]),
    weighted=st.booleans(),
)
def test_parity(
    dtype: str, mode: str, fmt: BlockFormat, seed: int, heads: int, dims: tuple[int, int], keep: str, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    shape = {"batch": int(rng.integers(1, 3)), "num_blocks": int(rng.integers(1, 4 if fmt.block_size < 64 else 2))}
    shape |= {"num_kv_heads": heads, "num_q_heads": heads, "head_dim": dims[0], "head_dim_v": dims[1], "window": 0}
    inputs = testing.make_inputs(seed, **shape, dtype=dtype, config=fmt, library="mlx")
    weights = {}
    if weighted:
        weights["token_weight"] = rng.choice([0.0, 1.0, 2.5], (shape["batch"], inputs.k.shape[2])).astype(np.float32)
        weights["channel_weight"] = rng.choice([0.0, 1.0, 2.5], (heads, dims[0])).astype(np.float32)
    with metal(mode):
        testing.assert_matches_reference("mlx-metal", "compress_blocks", inputs, keep=keep, **weights)
        got = compressed("mlx-metal", inputs, keep, weights)
    assert_bytes_of_the_twin(got, compressed("mlx-twin", inputs, keep, weights))


@pytest.mark.parametrize("mode", ["plain", "fused"])
def test_numbers_of_48_bits(mode: str) -> None:
    with metal(mode):
        arithmetic()


@pytest.mark.parametrize("size", [3e38, 1e-30, 1e15])
@pytest.mark.parametrize("keep", ["distinct", "error"])
def test_numbers_near_the_ends_of_float32(keep: str, size: float) -> None:
    """Differences beyond any float, and squares beyond and below; the twin has float64."""
    fmt = BlockFormat(16, 5, 6, 32, **MIXED)
    made = testing.make_inputs(0, config=fmt, num_blocks=2, head_dim=17, head_dim_v=31)
    rng = np.random.default_rng(1)
    k, v = ((size * rng.choice([-1.0, 0.25, 0.5, 1.0], x.shape)).astype(np.float32) for x in (made.k, made.v))
    k[:, :, ::3] *= np.float32(1e-8)
    inputs = testing.to_library(made._replace(k=k, v=v), "mlx")
    with metal("plain"):
        testing.assert_matches_reference("mlx-metal", "compress_blocks", inputs, keep=keep)
        got = compressed("mlx-metal", inputs, keep, {})
    assert_bytes_of_the_twin(got, compressed("mlx-twin", inputs, keep, {}))


@pytest.mark.parametrize("weighted", [False, True])
def test_one_row_far_above_the_others_leaves_them_in_their_order(weighted: bool) -> None:
    """Beside its error, the squares of theirs are below any float32."""
    made = testing.make_inputs(5, config=BlockFormat(16, 5, 6, 32, 16), num_blocks=2, head_dim=17, head_dim_v=31)
    k = np.array(made.k)
    k[:, :, 5] = 3.4e38
    inputs = testing.to_library(made._replace(k=k), "mlx")
    weight = np.random.default_rng(6).uniform(0.5, 2, (2, 32)).astype(np.float32)
    options = {"token_weight": weight} if weighted else {}
    with metal("plain"):
        got = compressed("mlx-metal", inputs, "error", options)
    assert_bytes_of_the_twin(got, compressed("mlx-twin", inputs, "error", options))


def test_channels_far_apart_in_size_keep_their_order() -> None:
    """Squares of ranges from 1e-60 to 1e60, and weights that reorder them."""
    sizes = np.geomspace(1e-30, 1e30, 24)[np.random.default_rng(2).permutation(24)]
    x = np.random.default_rng(3).standard_normal((1, 2, 140, 24)) * sizes
    made = testing.make_inputs(0, num_blocks=0)._replace(k=x.astype(np.float32), v=x.astype(np.float32))
    weight = np.exp(np.random.default_rng(4).uniform(-80, 80, (2, 24))).astype(np.float32)
    blocks = made.blocks
    for weights in ({}, {"channel_weight": weight}):
        inputs = testing.to_library(made._replace(blocks=dataclasses.replace(blocks)), "mlx")
        fmt = BlockFormat(140, 0, 139, **MIXED)
        inputs = inputs._replace(blocks=dataclasses.replace(inputs.blocks, format=fmt))
        with metal("plain"):
            got = compressed("mlx-metal", inputs, "distinct", weights)
        want = compressed("mlx-twin", inputs, "distinct", weights)
        assert got.residual_k_order.tolist() == want.residual_k_order.tolist()
        assert_bytes_of_the_twin(got, want)


def test_a_model_s_shape_and_rows_that_do_not_lie_in_a_row() -> None:
    fmt = BlockFormat(256, 8, 200, **MIXED)
    shape = {"batch": 2, "num_kv_heads": 2, "num_q_heads": 2, "head_dim": 128, "head_dim_v": 64, "window": 0}
    made = testing.make_inputs(5, **shape, num_blocks=1, dtype="float16", config=fmt, library="mlx")
    turned = made._replace(**{name: mx.contiguous(getattr(made, name).swapaxes(1, 2)).swapaxes(1, 2) for name in "kv"})
    with metal("plain"):
        got = compressed("mlx-metal", turned, "distinct", {})
    assert_bytes_of_the_twin(got, compressed("mlx-twin", made, "distinct", {}))


BARRIERS = [
    (mutant, COMPRESS[1] if file != "row_order.metal" else COMPRESS[3])
    for file in ("wide.metal", "select_rows.metal", "row_order.metal")
    for mutant in metal_mutants.barriers(file)
]


@pytest.mark.parametrize(("mutant", "case"), BARRIERS, ids=lambda x: getattr(x, "file", "").partition(".")[0])
def test_compression_without_a_barrier_is_caught(mutant: metal_mutants.Mutant, case: Any) -> None:
    assert metal_mutants.caught(mutant, [case])


def test_the_text_is_the_one_that_mlx_compiles() -> None:
    """Of each kernel of compression and prefill, by exporting the call."""
    made = testing.make_inputs(6, config=BlockFormat(16, 5, 6, **MIXED), dtype="float16", num_blocks=1, library="mlx")
    with compared_text() as seen:
        compressed("mlx-metal", made, "distinct", {})
        dkv.prefill_attention(made.q, made.k, made.v, backend="mlx-metal")
    rows = {"gain", "unit_rows", "distinct", "select_rows", "row_order", "row_scales", "row_codes"}
    assert seen == rows | {"prefill"}
