"""Compression by every backend against the reference, and what must hold for any of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, BACKENDS, Case, call, cases, library, more, poisoned

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks

FORMATS = {
    "compact": BlockFormat(16, 5, 6, minmax=True),
    "compact, every row": BlockFormat(16, 5, 15),
    "int8 rows": BlockFormat(16, 5, 6, 8, 8),
    "float16": BlockFormat(16, 5, 6, 16, 16),
    "float32": BlockFormat(16, 5, 6, 32, 16),
    "wide": BlockFormat(8, 5, 3, 32, 16),
    "mixed": BlockFormat(16, 5, 15, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3),
    "mixed, some rows": BlockFormat(16, 0, 6, key_bits=(7, 7, 5, 5, 1, 1, 0, 0), value_bits=1),
    "means": BlockFormat(16, 0, 15, key_bits=(0,) * 8, value_bits=0),
}
MIXED = {"key_bits": (6, 5, 5, 4, 4, 3, 3, 2), "value_bits": 3}
CONFIGS = {
    "default": dkv.DKVConfig(),
    "some rows": dkv.DKVConfig(num_residuals=64),
    "paper": dkv.DKVConfig.paper(64),
    "mixed": dkv.DKVConfig(rank=0, **MIXED),
}


def compress(
    backend: str,
    k: Any,
    v: Any,
    fmt: BlockFormat,
    keep: str = "distinct",
    weight: Any = None,
    channel_weight: Any = None,
) -> CompressedBlocks:
    """The backend's own function, for formats that no config stands for; arrays of its library in and out."""
    made = op_module(backend, "compress").compress_blocks(k, v, fmt, keep, weight, channel_weight)
    return CompressedBlocks(format=fmt, **made) if isinstance(made, dict) else made


def compress_numpy(backend: str, k: np.ndarray, v: np.ndarray, fmt: BlockFormat, **options: Any) -> CompressedBlocks:
    kind = library(backend)
    options = {name: testing.to_library(x, kind) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return testing.to_numpy(compress(backend, testing.to_library(k, kind), testing.to_library(v, kind), fmt, **options))


def assert_same_bits(a: CompressedBlocks, b: CompressedBlocks) -> None:
    for field in dataclasses.fields(CompressedBlocks):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "format" or x is None:
            assert x == y, field.name
        else:
            assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), field.name


@pytest.mark.parametrize("keep", ["distinct", "error"])
@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=cases(full=False), weighted=st.booleans())
def test_parity(backend: str, keep: str, case: Case, weighted: bool) -> None:
    inputs = case.inputs(library(backend))
    options = {"keep": keep}
    if weighted:
        tokens = inputs.k.shape[2]
        options["token_weight"] = case.rng.choice([0.0, 1.0, 2.5], (case.shape["batch"], tokens)).astype(np.float32)
        channels = (case.shape["num_kv_heads"], case.shape["head_dim"])
        options["channel_weight"] = case.rng.choice([0.0, 1.0, 1.0, 2.5], channels).astype(np.float32)
    testing.assert_matches_reference(backend, "compress_blocks", inputs, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=cases())
def test_reconstruction_parity(backend: str, case: Case) -> None:
    testing.assert_matches_reference(backend, "reconstruct_blocks", case.inputs(library(backend)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_at_the_shape_of_a_model(backend: str, config: dkv.DKVConfig, dtype: str) -> None:
    if dtype == "bfloat16" and config.format == "fp16":
        config = dataclasses.replace(config, format="bf16")
    shape = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 2, "head_dim": 128, "head_dim_v": 64, "window": 0}
    inputs = testing.make_inputs(0, **shape, num_blocks=1, dtype=dtype, config=config, library=library(backend))
    testing.assert_matches_reference(backend, "compress_blocks", inputs)


@pytest.mark.parametrize("num_residuals", [255, 140])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("torch", "mlx-twin")])
def test_float64_gives_the_codes_of_the_reference_bit_by_bit(backend: str, dtype: str, num_residuals: int) -> None:
    """Codes, scales, minima, units and order; a minimum rounded twice on its way to float16 would show here."""
    shape = {"batch": 1, "num_kv_heads": 3, "head_dim": 80, "head_dim_v": 72, "num_blocks": 2, "window": 0}
    for seed, fields in enumerate((MIXED, {"residual_bits": 4}, {"residual_bits": 1, "value_bits": 0})):
        fmt = BlockFormat(256, 0, num_residuals, **fields)
        made = testing.make_inputs(seed, **shape, dtype=dtype, config=fmt)
        weight = np.random.default_rng(seed).random((3, 80)).astype(np.float32) if fmt.orders_channels else None
        want, got = (
            compress_numpy(name, made.k, made.v, fmt, channel_weight=weight) for name in ("reference", backend)
        )
        assert_same_bits(got, want)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_range_of_the_list_is_tried(backend: str, bits: int) -> None:
    """Rows that lie on the steps of one range, but for the largest and the smallest, are coded by that range."""
    clips, levels = np.array(op_module("reference", "storage").CLIPS[bits]), 2**bits - 1
    codes = np.random.default_rng(bits).integers(0, levels + 1, (1, 1, 129, len(clips)))
    x = clips * (2 * codes / levels - 1)
    x[:, :, :3] = np.array([0, 1, -1])[:, None]
    x = x.astype(np.float32)
    blocks = compress_numpy(backend, x, x, BlockFormat(129, 0, 128, residual_bits=bits))
    for part in ("k", "v"):
        scale = getattr(blocks, f"residual_{part}_scale")[0, 0, 0, 0].astype(float)
        unit = getattr(blocks, f"residual_{part}_unit")[0, 0, 0]
        np.testing.assert_allclose(levels / 2 * unit * scale, clips, rtol=1e-3)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_of_two_ranges_that_err_alike_the_first_is_stored(backend: str) -> None:
    """A bit for -4, -3, 3, 4: both -4 or 4 and, at 0.75 of the range, -3 or 3 miss two rows by one."""
    x = np.array([0, -4, -3, 3, 4], np.float32).reshape(1, 1, 5, 1)
    blocks = compress_numpy(backend, x, x, BlockFormat(5, 0, 4, residual_bits=1))
    for part in call(backend, "reconstruct_blocks", blocks):
        assert part.ravel().tolist() == [0, -4, -4, 4, 4]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_queries_say_which_channels_matter(backend: str) -> None:
    """A channel of large weight and small spread comes before one of small weight and large spread."""
    made = testing.make_inputs(10, config=FORMATS["mixed"], head_dim=8, num_blocks=1, batch=1)
    weight = np.ones((2, 8), np.float32)
    plain = compress_numpy(backend, made.k, made.v, FORMATS["mixed"], channel_weight=weight)
    assert_same_bits(plain, compress_numpy(backend, made.k, made.v, FORMATS["mixed"]))
    last = plain.residual_k_order[0, 0, :, -1].astype(int)  # 0 bits
    weight[[0, 1], last] = 1e6
    weighted = compress_numpy(backend, made.k, made.v, FORMATS["mixed"], channel_weight=weight)
    assert weighted.residual_k_order[0, 0, :, 0].tolist() == last.tolist()
    error, without = (
        np.abs(call(backend, "reconstruct_blocks", blocks)[0] - made.k)[0, [0, 1], :, last].max(1)
        for blocks in (weighted, plain)
    )
    assert (20 * error < without).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_neighbours_do_not_change_a_block(backend: str, dtype: str, fmt: BlockFormat) -> None:
    made = testing.make_inputs(1, batch=3, num_blocks=4, dtype=dtype, config=fmt, window=0)
    together = compress_numpy(backend, made.k, made.v, fmt)
    for b, n in ((0, 0), (2, 1), (1, 3)):
        rows = slice(n * fmt.block_size, (n + 1) * fmt.block_size)
        alone = compress_numpy(backend, made.k[b : b + 1, :, rows], made.v[b : b + 1, :, rows], fmt)
        assert_same_bits(alone, together.map(lambda x, b=b, n=n: x[b : b + 1, n : n + 1]))


@pytest.mark.parametrize("fmt", [FORMATS["compact"], FORMATS["compact, every row"], FORMATS["mixed"]])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "torch"])
def test_pieces_of_the_workspace_do_not_show(backend: str, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    made = testing.make_inputs(2, batch=2, num_blocks=5, config=fmt)
    weight = np.random.default_rng(0).random((2, 5 * 16)).astype(np.float32)
    whole = compress_numpy(backend, made.k, made.v, fmt, weight=weight)
    for workspace in ("ROW_BYTES", "WORKSPACE_BYTES"):
        monkeypatch.setattr(op_module(backend, "compress"), workspace, 1)
        assert_same_bits(compress_numpy(backend, made.k, made.v, fmt, weight=weight), whole)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_blocks_share_no_memory_with_keys_and_values(backend: str, fmt: BlockFormat) -> None:
    inputs = testing.make_inputs(3, config=fmt, library=library(backend))
    before = testing.to_numpy(inputs)
    blocks = compress(backend, inputs.k, inputs.v, fmt)
    rebuilt = dkv.reconstruct_blocks(blocks, backend=backend)
    held = testing.to_numpy(blocks)
    for part in rebuilt:
        part[...] = 0
    assert_same_bits(testing.to_numpy(blocks), held)
    for _, part in blocks.parts():
        part[...] = 0
    after = testing.to_numpy(inputs)
    assert after.k.tobytes() == before.k.tobytes() and after.v.tobytes() == before.v.tobytes()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_keys_and_values_that_ask_for_a_gradient(fmt: BlockFormat) -> None:
    """A forward pass outside no_grad compresses the same and decodes."""
    torch = pytest.importorskip("torch")
    made = testing.make_inputs(11, config=fmt, library="torch")
    weight = torch.ones(made.k.shape[1], made.k.shape[3]).requires_grad_()
    want = compress("torch", made.k, made.v, fmt, channel_weight=weight.detach())
    k, v = (x.clone().requires_grad_() for x in (made.k, made.v))
    got = compress("torch", k, v, fmt, channel_weight=weight)
    assert_same_bits(*(testing.to_numpy(blocks.map(torch.Tensor.detach)) for blocks in (got, want)))
    state = dkv.decode_attention(made.q.clone().requires_grad_(), got, made.k_window, made.v_window)
    assert state.out.requires_grad and bool(state.out.isfinite().all())


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_are_read_by_their_strides(backend: str, fmt: BlockFormat) -> None:
    made = testing.make_inputs(4, config=fmt)

    def strided(x: np.ndarray) -> Any:
        buffer = np.repeat(x, 2, axis=-1)
        buffer[..., 1::2] = 9
        return testing.to_library(buffer.swapaxes(1, 2), library(backend)).swapaxes(1, 2)[..., ::2]

    k, v = strided(made.k), strided(made.v)
    inputs = testing.to_library(made, library(backend))._replace(k=k, v=v)
    testing.assert_matches_reference(backend, "compress_blocks", inputs)
    blocks = made.blocks.map(lambda x: strided(x) if x.ndim > 2 else testing.to_library(x, library(backend)))
    testing.assert_matches_reference(backend, "reconstruct_blocks", inputs._replace(blocks=blocks))


@pytest.mark.parametrize("magnitude", ["largest", "smallest"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_at_the_ends_of_the_dtype_are_stored(
    backend: str, fmt: BlockFormat, dtype: str, magnitude: str
) -> None:
    made = testing.make_inputs(5, dtype=dtype, config=fmt, num_blocks=1)
    info = {"float32": (3e38, 1e-45), "float16": (65504.0, 6e-8), "bfloat16": (3e38, 1e-40)}[dtype]
    size = info[magnitude == "smallest"]
    rng = np.random.default_rng(6)
    k, v = ((size * rng.choice([-1.0, 0.5, 1.0], x.shape)).astype(x.dtype) for x in (made.k, made.v))
    inputs = testing.to_library(made._replace(k=k, v=v), library(backend))
    blocks = testing.assert_matches_reference(backend, "compress_blocks", inputs)
    for part in testing.to_numpy(dkv.reconstruct_blocks(blocks, backend=backend)):
        assert np.isfinite(part.astype(np.float64)).all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_blocks_beyond_the_counts_come_back_as_zeros(backend: str) -> None:
    made = testing.make_inputs(7, num_blocks=3)
    counts = np.array([1, 0], np.int32)
    beyond = np.arange(3) >= counts[:, None]
    blocks = poisoned(dataclasses.replace(made.blocks, block_counts=counts), beyond)
    k, v = call(backend, "reconstruct_blocks", blocks)
    want_k, want_v = call(backend, "reconstruct_blocks", made.blocks)
    for got, want in ((k, want_k), (v, want_v)):
        assert got[:1, :, :16].tobytes() == want[:1, :, :16].tobytes()
        assert not got[0, :, 16:].any() and not got[1].any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_bytes_are_those_of_the_formula(backend: str, fmt: BlockFormat) -> None:
    inputs = testing.make_inputs(8, config=fmt, dtype="float16", library=library(backend))
    blocks = compress(backend, inputs.k, inputs.v, fmt)
    per_block = op_module("reference", "accounting").block_nbytes(fmt, 2, 24, 20, 2)
    assert blocks.nbytes == 2 * 3 * sum(per_block.values())
    assert blocks.dense_nbytes == inputs.k.nbytes + inputs.v.nbytes
    for name, part in blocks.parts():
        assert part.nbytes == 6 * per_block.get(name, 0), name


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_empty_batches_and_no_blocks(backend: str) -> None:
    for batch, num_blocks in ((0, 2), (2, 0), (0, 0)):
        for fmt in FORMATS.values():
            made = testing.make_inputs(9, batch=batch, num_blocks=num_blocks, config=fmt)
            blocks = compress_numpy(backend, made.k, made.v, fmt)
            for name, part in blocks.parts():
                want = getattr(made.blocks, name)
                assert part.shape == want.shape and part.dtype == want.dtype, name
            k, v = call(backend, "reconstruct_blocks", blocks)
            assert k.shape == made.k.shape and v.shape == made.v.shape


@pytest.mark.parametrize("keep", ["distinct", "error"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_ties_go_to_the_lowest_channel_and_token(backend: str, keep: str) -> None:
    x = np.tile(np.array([0, 1], np.float32).repeat([1, 8])[:, None], (1, 1, 1, 24))
    ordered = compress_numpy(backend, x, x, BlockFormat(9, 0, 8, key_bits=(8, 8, 8, 8, 4, 4, 4, 4)))
    assert ordered.residual_k_order.ravel().tolist() == list(range(24))
    kept = compress_numpy(backend, x, x, BlockFormat(9, 0, 3), keep=keep)
    assert kept.residual_indices.ravel().tolist() == [1, 2, 3]
