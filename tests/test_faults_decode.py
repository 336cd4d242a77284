"""Faults that users of other kernels met in decode attention. Each names its source."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest
from strategies import CASE_BACKENDS, BACKENDS, call, library, poisoned

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks

MIXED = BlockFormat(16, 0, 15, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3)
SAME_BITS = ("reference", "triton", "mlx-metal")  # whatever the batch; the others call a library's product of matrices
EXACT_ROWS = BlockFormat(16, 4, 15, 32, 16)


def blocks_of(k: np.ndarray, v: np.ndarray, fmt: BlockFormat) -> CompressedBlocks:
    return CompressedBlocks(format=fmt, **op_module("reference", "compress").compress_blocks(k, v, fmt))


def every_block(blocks: CompressedBlocks) -> np.ndarray:
    size = (blocks.batch_size, blocks.num_kv_heads, blocks.num_blocks)
    return np.broadcast_to(np.arange(size[2], dtype=np.int32), size).copy()


def rows_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fill_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is loaded, what it allocates without filling it holds NaN."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    empty = torch.empty

    def full_of_nan(*shape: Any, **options: Any) -> Any:
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", full_of_nan)


def dense64(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One query, every key, in float64 and nothing else."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / math.sqrt(q.shape[-1])
    top = logits.max(-1, keepdims=True)
    weight = np.exp(logits - top)
    total = weight.sum(-1, keepdims=True)
    return weight / total @ v, (top + np.log(total))[..., 0]


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d01_sequences_of_length_zero(backend: str) -> None:
    """flash-attention#2470, #1155: no keys crashed the host, or the kernel wrote out of bounds."""
    rng, lengths = np.random.default_rng(0), [0, 5, 256, 0]
    q = rng.standard_normal((4, 4, 1, 64)).astype(np.float32)
    k, v = (rng.standard_normal((4, 2, 256, dim)).astype(np.float32) for dim in (64, 48))
    state = call(backend, "exact_attention", q, k, v, seq_lens=np.array(lengths, np.int32))
    for b in (0, 3):
        assert not state.out[b].any() and np.isneginf(state.lse[b]).all()
    for b in (1, 2):
        rows = slice(b, b + 1), slice(None), slice(0, lengths[b])
        alone = call(backend, "exact_attention", q[rows[0]], np.array(k[rows]), np.array(v[rows]))
        np.testing.assert_allclose(state.out[b], alone.out[0], atol=1e-6)
        np.testing.assert_allclose(state.lse[b], alone.lse[0], atol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d02_slots_never_written_have_no_effect(backend: str, garbage: float) -> None:
    """flash-attention#2374, #1745, flashinfer#941, vllm#936, vllm#47305, Wan2GP#1628: weight zero times NaN is NaN."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 4, 1, 32)).astype(np.float32)
    k, v = (rng.standard_normal((1, 2, 256, 32)).astype(np.float32) for _ in range(2))
    k[:, :, 13:], v[:, :, 13:] = 0, 0
    seq_lens = np.array([13], np.int32)
    clean = call(backend, "exact_attention", q, k, v, seq_lens=seq_lens)
    k[:, :, 13:], v[:, :, 13:] = garbage, garbage
    dirty = call(backend, "exact_attention", q, k, v, seq_lens=seq_lens)
    assert np.isfinite(clean.out).all()
    assert clean.out.tobytes() == dirty.out.tobytes() and clean.lse.tobytes() == dirty.lse.tobytes()


@pytest.mark.parametrize("fmt", [EXACT_ROWS, BlockFormat(16, 4, 5), BlockFormat(16, 4, 15), MIXED])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d02_blocks_never_written_have_no_effect(backend: str, fmt: BlockFormat) -> None:
    """The same sources, for slots of blocks beyond the valid ones, routed and decoded."""
    made = testing.make_inputs(2, num_blocks=4, config=fmt)
    counts = np.array([2, 0], np.int32)
    blocks = dataclasses.replace(made.blocks, block_counts=counts)
    dirty = poisoned(blocks, np.arange(4) >= counts[:, None])
    results = [
        call(backend, "decode_attention", made.q, x, made.k_window, made.v_window, config=made.config)
        for x in (blocks, dirty)
    ]
    assert np.isfinite(results[0].out).all()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d06_query_heads_repeat_key_heads(backend: str) -> None:
    """jax-js#180, quant.cpp#61, aprender#2010: query heads were mapped by tiling, and only equal counts were tested."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 4, 1, 8)).astype(np.float32)
    k = rng.standard_normal((1, 2, 32, 8)).astype(np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[:, None, None], (1, 2, 32, 3)).copy()
    state = call(backend, "exact_attention", q, k, v)
    np.testing.assert_allclose(state.out[0, :, 0, 0], [0, 0, 1, 1], atol=1e-6)
    for fmt in (EXACT_ROWS, BlockFormat(16, 4, 5), BlockFormat(16, 4, 0)):
        blocks = blocks_of(k, v, fmt)
        state = call(backend, "decode_attention", q, blocks, block_indices=every_block(blocks))
        np.testing.assert_allclose(state.out[0, :, 0, 0], [0, 0, 1, 1], atol=1e-6)
    state = call(backend, "prefill_attention", q, k, v)
    np.testing.assert_allclose(state.out[0, :, 0, 0], [0, 0, 1, 1], atol=1e-6)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 16])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d07_every_group_size(backend: str, group: int) -> None:
    """flashinfer#996, mlc-llm#2543, pegainfer#519: a ratio was missing from a table, or present and wrong."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 2 * group, 1, 64)).astype(np.float32)
    k, v = (rng.standard_normal((1, 2, 300, dim)).astype(np.float32) for dim in (64, 40))
    fmt = BlockFormat(256, 8, 255, 32, 16)
    blocks = blocks_of(k[:, :, :256], v[:, :, :256], fmt)
    state = call(backend, "decode_attention", q, blocks, np.array(k[:, :, 256:]), np.array(v[:, :, 256:]))
    out, lse = dense64(q, k, v)
    np.testing.assert_allclose(state.out, out, atol=1e-5)
    np.testing.assert_allclose(state.lse, lse, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (80, 80), (96, 96), (192, 192), (192, 128)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d08_head_sizes_that_are_not_powers_of_two(backend: str, head_dim: int, head_dim_v: int) -> None:
    """sglang#1281, turboquant-vllm#52, triton-distributed#200: no compilation, or padding lanes joined the product."""
    rng = np.random.default_rng(5)

    def guarded(rows: int, heads: int, dim: int) -> Any:
        """NaN lies after each row."""
        buffer = np.full((1, heads, rows, dim + 9), np.nan, np.float32)
        buffer[..., :dim] = rng.standard_normal((1, heads, rows, dim))
        return buffer

    q, k, v = guarded(1, 4, head_dim), guarded(50, 2, head_dim), guarded(50, 2, head_dim_v)
    views = [
        testing.to_library(x, library(backend))[..., :dim] for x, dim in ((q, head_dim), (k, head_dim), (v, head_dim_v))
    ]
    out, lse = dense64(q[..., :head_dim], k[..., :head_dim], v[..., :head_dim_v])
    fmt = BlockFormat(16, 4, 15, 32, 16)
    rows = views[1][:, :, :48], views[2][:, :, :48]
    made = op_module(backend, "compress").compress_blocks(*rows, fmt, "distinct", None)
    blocks = CompressedBlocks(format=fmt, **made) if isinstance(made, dict) else made
    for state in (
        dkv.exact_attention(*views, backend=backend),
        dkv.prefill_attention(*views, backend=backend),
        dkv.decode_attention(views[0], blocks, views[1][:, :, 48:], views[2][:, :, 48:], backend=backend),
    ):
        state = testing.to_numpy(state)
        assert state.out.shape[-1] == head_dim_v
        np.testing.assert_allclose(state.out, out, atol=1e-5)
        np.testing.assert_allclose(state.lse, lse, atol=1e-5)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d12_all_keys_masked_is_empty_and_not_an_average(backend: str) -> None:
    """TensorRT-LLM#17477: a finite floor in place of minus infinity averages what is masked."""
    q, k = np.ones((1, 2, 1, 4), np.float32), np.ones((1, 1, 9, 4), np.float32)
    v = np.full((1, 1, 9, 3), 5, np.float32)
    none = np.zeros(1, np.int32)
    for options in ({}, {"causal": False}, {"window": 2}, {"softcap": 3.0}):
        state = call(backend, "exact_attention", q, k, v, seq_lens=none, **options)
        assert not state.out.any() and np.isneginf(state.lse).all()
    blocks = blocks_of(np.ones((1, 1, 16, 4), np.float32), np.ones((1, 1, 16, 3), np.float32), BlockFormat(16, 2, 4))
    unused = np.full((1, 1, 3), -1, np.int32)
    for op in ("lowrank_attention", "residual_attention"):
        state = call(backend, op, q, blocks, unused)
        assert not state.out.any() and np.isneginf(state.lse).all()
    state = call(backend, "decode_attention", q, blocks, k, v, block_indices=unused, seq_lens=none)
    assert not state.out.any() and np.isneginf(state.lse).all()


@pytest.mark.parametrize("op", ["exact_attention", "residual_attention", "prefill_attention"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d15_the_scale_is_not_rounded_to_bfloat16(backend: str, op: str) -> None:
    """mlx#3119: one path rounded the softmax scale to the dtype of the inputs."""
    kind = testing.make_inputs(0, batch=1, num_blocks=0, window=0, dtype="bfloat16").q.dtype
    q, k, v = np.zeros((1, 1, 1, 80), kind), np.zeros((1, 1, 2, 80), kind), np.ones((1, 1, 2, 4), kind)
    q[..., :2], k[..., 0], k[0, 0, 1, 1] = 10, 400, -1  # 4000 and 3990, exact in bfloat16
    want = 4000 / math.sqrt(80) + math.log1p(math.exp(-10 / math.sqrt(80)))
    if op == "residual_attention":
        rows = [np.concatenate([x[:, :, :1], x], axis=2) for x in (k, v)]  # the anchor is not among them
        blocks = blocks_of(*rows, BlockFormat(3, 1, 2, 16, 16))
        state = call(backend, op, q, blocks, np.zeros((1, 1, 1), np.int32))
    else:
        state = call(backend, op, q, k, v)
    assert abs(state.lse.item() - want) < 1e-3


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d16_the_soft_cap_is_never_ignored(backend: str) -> None:
    """flashinfer#1193: a refactor dropped the logit soft-cap without an error."""
    want = 50 * math.tanh(2)
    q = np.full((1, 1, 1, 4), 10, np.float32)
    k, v = np.full((1, 1, 1, 4), 5, np.float32), np.ones((1, 1, 1, 3), np.float32)  # 10 * 5 * 4 / sqrt(4) = 100
    blocks = blocks_of(np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2), BlockFormat(2, 1, 1, 32, 16))
    first = np.zeros((1, 1, 1), np.int32)
    for op, arguments in (
        ("exact_attention", (q, k, v)),
        ("prefill_attention", (q, k, v)),
        ("lowrank_attention", (q, blocks, first)),
        ("residual_attention", (q, blocks, first)),
    ):
        state = call(backend, op, *arguments, softcap=50.0)
        np.testing.assert_allclose(state.lse.item(), want, atol=1e-4)
        assert abs(want - 48.2014) < 1e-4
    state = call(backend, "decode_attention", q, blocks, k, v, softcap=50.0)
    np.testing.assert_allclose(state.lse.item(), want + math.log(3), atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_m12_parts_are_not_rounded_before_the_merge(backend: str, dtype: str) -> None:
    """flashinfer#5107, b12x#292: partial outputs were rounded to the output dtype before they were merged."""
    fmt = BlockFormat(64, 4, 63, 16, 16)
    shape = {"num_q_heads": 4, "head_dim": 64, "num_blocks": 15, "window": 64}
    made = testing.make_inputs(0, **shape, dtype=dtype, config=fmt)
    rows = [np.concatenate(pair, axis=2) for pair in ((made.k, made.k_window), (made.v, made.v_window))]
    exact = call("reference", "exact_attention", made.q.astype(np.float32), *(x.astype(np.float32) for x in rows)).out

    def error(state: Any) -> float:
        return math.sqrt(np.square(state.out.astype(np.float64) - exact).mean())

    whole = error(call(backend, "exact_attention", made.q, *rows))
    options = {"block_indices": every_block(made.blocks)}
    split = error(call(backend, "decode_attention", made.q, made.blocks, made.k_window, made.v_window, **options))
    assert split <= 1.1 * whole


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d03_more_splits_than_keys(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#47188, rocMLIR#2371, pegainfer#21: a split with nothing to do was merged, and gave NaN or old memory."""
    q, k, v = (rows_of(12, 1, heads, length, 8) for heads, length in ((4, 1), (2, 2048), (2, 2048)))
    k[:, :, 3:] = v[:, :, 3:] = np.nan
    fill_new_memory(monkeypatch)
    state = call(backend, "exact_attention", q, k, v, seq_lens=np.array([3], np.int32))
    alone = call(backend, "exact_attention", q, *(np.array(x[:, :, :3]) for x in (k, v)))
    np.testing.assert_allclose(state.out, alone.out, atol=1e-6)
    np.testing.assert_allclose(state.lse, alone.lse, atol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d05_rows_of_another_layout_give_the_same_numbers(backend: str) -> None:
    """FlagGems#5235, flash-attention#2670: rows of ``[B, S, H, D]`` were walked with the strides of ``[B, H, S, D]``."""
    made = testing.make_inputs(13, q_len=3, window=20, num_blocks=2)
    rows = [made.q, made.k_window, made.v_window]
    turned = [testing.to_library(np.array(x.swapaxes(1, 2)), library(backend)).swapaxes(1, 2) for x in rows]
    rows, blocks = testing.to_library([rows, made.blocks], library(backend))
    for name, extra in (("exact_attention", ()), ("prefill_attention", ()), ("decode_attention", (blocks,))):
        op = getattr(dkv, name)
        states = [testing.to_numpy(op(q, *extra, k, v, backend=backend)) for q, k, v in (rows, turned)]
        for one, other in zip(*states, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d09_a_row_does_not_depend_on_its_batch_mates(backend: str) -> None:
    """FlashMLA#212, aiter#4378, sglang#10425: the number of splits followed the batch, and with it the bits of a row."""
    q, k, v = (rows_of(14, 33, heads, length, 8) for heads, length in ((2, 1), (1, 1000), (1, 1000)))
    lengths = np.array([777, *range(968, 1000)], np.int32)
    states = [
        call(backend, "exact_attention", q[:batch], k[:batch], v[:batch], seq_lens=lengths[:batch])
        for batch in (1, 2, 8, 33)
    ]
    for state in states[1:]:
        if backend in SAME_BITS:
            assert state.out[0].tobytes() == states[0].out[0].tobytes()
            assert state.lse[0].tobytes() == states[0].lse[0].tobytes()
        np.testing.assert_allclose(state.out[0], states[0].out[0], rtol=0, atol=2.0**-22)
        np.testing.assert_allclose(state.lse[0], states[0].lse[0], rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d10_every_length_up_to_600(backend: str) -> None:
    """torchtitan#3235: only the automatic choice of splits gave NaN, and seldom."""
    q, k, v = rows_of(15, 601, 1, 1, 4), rows_of(16, 1, 1, 600, 4), rows_of(17, 1, 1, 600, 3)
    rows = [np.array(np.broadcast_to(x, (601, *x.shape[1:]))) for x in (k, v)]
    state = call(backend, "exact_attention", q, *rows, seq_lens=np.arange(601, dtype=np.int32))
    assert not state.out[0].any() and np.isneginf(state.lse[0]).all()
    logits = q[:, 0, 0].astype(np.float64) @ k[0, 0].T.astype(np.float64) / 2
    weight = np.where(np.arange(600) < np.arange(601)[:, None], np.exp(logits), 0)[1:]
    np.testing.assert_allclose(state.out[1:, 0, 0], weight @ v[0, 0] / weight.sum(1, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(state.lse[1:, 0, 0], np.log(weight.sum(1)), atol=1e-5)


@pytest.mark.parametrize("order", ["usual", "reversed"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_d11_idle_splits_store_nothing_over_the_one_that_works(
    backend: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sgl-kernel-xpu#487: with one live split, an idle one overwrote its lse with minus infinity."""
    q, k, v = (rows_of(18, 1, heads, length, 8) for heads, length in ((4, 1), (2, 1024), (2, 1024)))
    if order == "reversed" and backend == "triton":
        from triton.runtime.interpreter import interpreter_builder as builder

        place = builder.set_grid_idx

        def reverse(*at: int) -> None:
            place(*(size - 1 - index for size, index in zip(builder.grid_dim, at, strict=True)))

        monkeypatch.setattr(builder, "set_grid_idx", reverse)
    hosted = contextlib.nullcontext()
    if order == "reversed" and backend == "mlx-metal":
        import metal_host

        hosted = metal_host.metal("random")
    lengths = np.array([100], np.int32)
    out, lse = dense64(q, k[:, :, :100], v[:, :, :100])
    with hosted:
        states = [call(backend, "exact_attention", q, k, v, seq_lens=lengths) for _ in range(10)]
    for state in states:
        np.testing.assert_allclose(state.out, out, atol=1e-5)
        np.testing.assert_allclose(state.lse, lse, atol=1e-5)
        assert state.lse.tobytes() == states[0].lse.tobytes()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if library(name) == "torch"])
def test_d14_every_number_of_a_result_is_written(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#19902: the kernel wrote packed rows alone, and the wrapper returned others too."""
    torch = pytest.importorskip("torch")
    inputs = testing.make_inputs(7, batch=3, num_blocks=4, window=300, q_len=2, library="torch")
    options = {"seq_lens": torch.tensor([0, 1, 300])}
    blocks = dataclasses.replace(inputs.blocks, block_counts=torch.tensor([0, 1, 4], dtype=torch.int32))
    rows = inputs.k_window, inputs.v_window
    fill_new_memory(monkeypatch)
    for state in (
        dkv.exact_attention(inputs.q, *rows, **options, backend=backend),
        dkv.decode_attention(inputs.q, blocks, *rows, **options, backend=backend),
        dkv.prefill_attention(inputs.q, *rows, backend=backend),
    ):
        assert not state.out.isnan().any() and not state.lse.isnan().any()


@pytest.mark.parametrize("cache", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", CASE_BACKENDS[1:])
def test_t05_queries_blocks_and_window_of_three_dtypes(backend: str, cache: str) -> None:
    """kvpress#27: a second call mixed dtypes, and queries and keys had to match."""
    kinds = [
        testing.make_inputs(
            8, dtype=dtype, config=BlockFormat(16, 4, 6, 16, 16), num_blocks=3, library=library(backend)
        )
        for dtype in ("bfloat16" if cache == "float16" else "float16", cache, "float32")
    ]
    mixed = kinds[0]._replace(blocks=kinds[1].blocks, k_window=kinds[2].k_window, v_window=kinds[0].v_window)
    for op in ("decode_attention", "exact_attention"):
        assert testing.assert_matches_reference(backend, op, mixed).out.dtype == mixed.q.dtype


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_t06_masking_needs_no_large_numbers(backend: str, size: float) -> None:
    """kvpress#250: keys set to a huge vector overflowed float16, and the logits were NaN."""
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((1, 2, rows, 8)) for rows in (1, 40, 40))
    q *= size / np.linalg.norm(q, axis=-1, keepdims=True)
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    state = call(backend, "exact_attention", q, k, v, seq_lens=np.array([17], np.int32))
    out, lse = dense64(q, k[:, :, :17], v[:, :, :17])
    np.testing.assert_allclose(state.out.astype(np.float64), out, atol=2e-3)
    np.testing.assert_allclose(state.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if library(name) == "torch"])
def test_t03_strides_times_rows_beyond_32_bits(backend: str) -> None:
    """SageAttention#386, #387: views of a fused projection have large strides, and rows times stride overflowed."""
    torch = pytest.importorskip("torch")
    made = testing.make_inputs(10, batch=1, num_q_heads=2, window=3, q_len=3, dtype="float16", library="torch")
    parts, buffer = (made.q, made.k_window, made.v_window), torch.empty(2**31 + 256, dtype=torch.float16)
    views = []
    for part in parts:  # only pages that are touched take memory
        heads, rows, dim = part.shape[1:]
        view = buffer.as_strided((1, heads, rows, dim), (0, dim, 2**30, 1), sum(x[0, :, 0].numel() for x in views))
        views.append(view.copy_(part))
    for op in (dkv.exact_attention, dkv.prefill_attention):
        got, want = op(*views, backend=backend), op(*parts, backend=backend)
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_t08_counts_beyond_16_bits(backend: str) -> None:
    """intel-xpu-backend-for-triton#2058, triton#11531: sums of small integers overflowed in the interpreter."""
    k, v = np.zeros((1, 1, 70000, 2), np.float32), np.ones((1, 1, 70000, 1), np.float32)
    state = call(backend, "exact_attention", np.ones((1, 1, 1, 2), np.float32), k, v)
    np.testing.assert_allclose(state.lse, math.log(70000), rtol=1e-6)
    score = np.arange(70000, dtype=np.float32)[None, None] % 69990
    fn, counts = op_module(backend, "route").select_blocks, np.array([70000], np.int32)
    chosen = testing.to_numpy(fn(*testing.to_library([score, counts], library(backend)), 4, 1, 1))
    assert chosen.tolist() == [[[0, 69988, 69989, 69999]]]
