"""Faults that users of other caches met, in the runtime of one layer, of torch and of mlx. Each names its source."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import numpy as np
import pytest

import dkv
from dkv import DKVConfig, testing
from dkv._dispatch import op_module
from dkv.cache.lengths import due_blocks

MODULES = {"torch": ("torch", "dkv.cache.layer"), "mlx": ("mlx.core", "dkv.cache.mlx_layer")}
BIG = DKVConfig(window=1, sink_tokens=0, format="fp32", rank=8, top_k=1000)  # "close at 256", every row exact
SPARSE = {"prefill_dense_below": 0, "prefill_tail": 0}
TOLERANCE = 1e-5


@pytest.fixture(params=sorted(MODULES))
def kind(request: Any) -> str:
    pytest.importorskip(MODULES[request.param][0])
    return str(request.param)


def new(kind: str, config: DKVConfig) -> Any:
    return importlib.import_module(MODULES[kind][1]).LayerCache(config)


def rows_of(seed: int, tokens: int, batch: int = 1, heads: int = 2, dims: tuple[int, int] = (8, 6)) -> Any:
    rng = np.random.default_rng(seed)
    shapes = ((batch, 2 * heads, tokens, dims[0]), (batch, heads, tokens, dims[0]), (batch, heads, tokens, dims[1]))
    return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in shapes)


def cast(arrays: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return tuple(x.astype(dtype) for x in arrays)


def step(kind: str, layer: Any, q: Any, k: Any, v: Any, spans: Any = None) -> Any:
    """One chunk; ``spans`` says where its real tokens are."""
    q, k, v = (testing.to_library(x, kind) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    if kind == "mlx":
        layer.append(k, v, spans)
        return testing.to_numpy(layer.attend(q, spans))
    padding = None
    if spans is not None:
        import torch

        at = torch.arange(q.shape[2])
        padding = torch.stack([(at >= first) & (at < first + count) for first, count in spans])
    return testing.to_numpy(layer.attend(q, k, v, padding=padding))


def fed(kind: str, layer: Any, parts: Any, chunks: Any) -> np.ndarray:
    outs, start = [], 0
    for length in chunks:
        outs.append(step(kind, layer, *(x[:, :, start : start + length] for x in parts)))
        start += length
    return np.concatenate(outs, axis=2)


def dense(parts: Any, queries: int | None = None) -> np.ndarray:
    """Float64 causal attention of the last ``queries``, all when None."""
    q, k, v = (np.asarray(x, np.float64) for x in parts)
    q = q if queries is None else q[:, :, q.shape[2] - queries :]
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    logits = np.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[3])
    seen = np.arange(k.shape[2]) <= offset + np.arange(q.shape[2])[:, None]
    weight = np.exp(np.where(seen, logits - logits.max(-1, keepdims=True), -np.inf))
    return weight / weight.sum(-1, keepdims=True) @ v


def held_rows(layer: Any, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys of the closed blocks and of the exact rows of a cache without sink rows."""
    tail = testing.to_numpy(layer.k_rows)[:, :, : layer.rows[0]]
    if not layer.blocks:
        return k[:, :, :0], tail
    return testing.to_numpy(dkv.reconstruct_blocks(layer.blocks[0]))[0], tail


def test_c04_single_tokens_are_compressed_as_a_whole_text_is(kind: str) -> None:
    """VeloxQuant-MLX#86: tokens that came one at a time were never compressed, and the exact window grew."""
    config = DKVConfig(window=64, sink_tokens=16, format="fp32", rank=2, top_k=2)
    parts, layer, whole = rows_of(0, 2000), new(kind, config), new(kind, config)
    for token in range(2000):
        step(kind, layer, *(x[:, :, token : token + 1] for x in parts))
        assert layer.rows[0] < 16 + 64 + 256 and layer.k_rows.shape[2] <= 512
    fed(kind, whole, parts, [2000])
    assert layer.block_counts == whole.block_counts == [(2000 - 80) // 256]
    for (name, one), (_, other) in zip(layer.blocks[0].parts(), whole.blocks[0].parts(), strict=True):
        np.testing.assert_array_equal(testing.to_numpy(one), testing.to_numpy(other), err_msg=name)


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
def test_c21_blocks_and_tail_by_one_formula(kind: str, length: int) -> None:
    """MinivLLM#77, nano-vllm#240: the last block's tokens were miscounted where it is full."""
    parts, layer = rows_of(length, length), new(kind, BIG)
    out = fed(kind, layer, parts, [length])
    count = max(0, length - 1) // 256
    assert due_blocks(BIG, [length], [length], BIG.window) == ([0], [count])
    assert (layer.tokens, layer.rows, layer.block_counts) == ([length], [length - 256 * count], [count])
    closed, tail = held_rows(layer, parts[1])
    np.testing.assert_array_equal(np.concatenate([closed, tail], axis=2), parts[1])
    np.testing.assert_allclose(out, dense(parts), atol=TOLERANCE)
    more = rows_of(1, 1)
    joined = [np.concatenate([a, b], axis=2) for a, b in zip(parts, more, strict=True)]
    np.testing.assert_allclose(step(kind, layer, *more), dense(joined, 1), atol=TOLERANCE)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("window", [1, 4])
def test_c21_at_every_length_of_a_small_block(kind: str, size: int, window: int) -> None:
    """The same kind: every residue, not a sample; what is read, what is stored and the formula."""
    config = dataclasses.replace(BIG, block_size=size, window=window, sink_tokens=3, rank=2)
    parts, layer = rows_of(size, 40), new(kind, config)
    want = dense(parts)
    for length in range(1, 41):
        out = step(kind, layer, *(x[:, :, length - 1 : length] for x in parts))
        np.testing.assert_allclose(out, want[:, :, length - 1 : length], atol=TOLERANCE)
        count = max(0, length - min(length, 3) - window) // size
        assert (layer.rows, layer.block_counts) == ([length - size * count], [count])
    for first in range(1, 2 * size + 6):
        layer = new(kind, config)
        np.testing.assert_allclose(fed(kind, layer, parts, [first, 40 - first]), want, atol=TOLERANCE)
        assert layer.block_counts == [(37 - window) // size]


def test_c22_a_chunk_of_many_tokens_closes_what_it_makes_due(kind: str) -> None:
    """mlx-lm#1914: an eviction that assumed one new token never came for chunks."""
    parts, layer = rows_of(3, 500), new(kind, BIG)
    fed(kind, layer, parts, [200])
    assert (layer.rows, layer.block_counts) == ([200], [0])
    out = step(kind, layer, *(x[:, :, 200:] for x in parts))
    assert (layer.rows, layer.block_counts) == ([244], [1])
    closed, tail = held_rows(layer, parts[1])
    np.testing.assert_array_equal(np.concatenate([closed, tail], axis=2), parts[1])
    np.testing.assert_allclose(out, dense(parts, 300), atol=TOLERANCE)


@pytest.mark.parametrize("window", [1024, 1])
def test_c23_a_slot_that_is_used_again_holds_nothing_of_its_last_owner(kind: str, window: int) -> None:
    """vllm#47305: freed storage was not cleared, and the next row read the last owner's NaN."""
    config = dataclasses.replace(BIG, window=window)
    bad, good, layer = rows_of(4, 700), rows_of(5, 40), new(kind, config)
    bad[2][:, :, 3:] = np.nan
    want = fed(kind, new(kind, config), good, [10, 1, 29])
    if window == 1:
        with pytest.raises(ValueError, match="block 0"):
            step(kind, layer, *bad)
    else:
        step(kind, layer, *bad)
    layer.reset()
    np.testing.assert_array_equal(fed(kind, layer, good, [10, 1, 29]), want)
    if window == 1:
        return
    layer = new(kind, config)
    step(kind, layer, *bad)
    layer.crop(700 - 2)  # the rest is spare room
    kept = [np.concatenate([a[:, :, :2], b], axis=2) for a, b in zip(bad, good, strict=True)]
    out = fed(kind, layer, good, [10, 1, 29])
    np.testing.assert_allclose(out, dense(kept, 40), atol=TOLERANCE)
    layer, both = new(kind, config), [np.concatenate([a[:, :, :700], np.zeros_like(a)]) for a in bad]
    for part, own in zip(both, good, strict=True):
        part[1:, :, 690:] = own[:, :, :10]
    step(kind, layer, *both, spans=[(0, 700), (690, 10)])
    layer.select([1])
    assert layer.tokens == [10]
    np.testing.assert_allclose(fed(kind, layer, [x[:, :, 10:] for x in good], [1, 29]), want[:, :, 10:], atol=1e-6)


@pytest.mark.parametrize("length", [1, 3, 17, 40])
@pytest.mark.parametrize("below", [0, 8192])
def test_c17_sequences_with_as_many_exact_rows_and_other_blocks(kind: str, length: int, below: int) -> None:
    """mlx-vlm#1248: caches of other lengths in one batch; here their blocks differ and their windows do not."""
    limits = {"prefill_dense_below": below, "prefill_tail": 0, "prefill_mass": 1.0}
    layer = new(kind, dataclasses.replace(BIG, block_size=4, window=3, sink_tokens=2, rank=2, **limits))
    parts, more = rows_of(11, 44, batch=2), rows_of(12, length, batch=2)
    step(kind, layer, *parts, spans=[(0, 36), (0, 44)])
    assert layer.rows == [8, 8] and layer.block_counts == [7, 9]
    out = step(kind, layer, *more)
    for row, tokens in enumerate((36, 44)):
        one = [np.concatenate([a[row : row + 1, :, :tokens], b[row : row + 1]], 2) for a, b in zip(parts, more)]
        np.testing.assert_allclose(out[row : row + 1], dense(one, length), atol=TOLERANCE)


@pytest.mark.parametrize("dropped", [0, 1, 5, 9])
def test_c32_the_newest_chunk_can_be_taken_back_where_that_is_asked_for(kind: str, dropped: int) -> None:
    """mlx-vlm#1956: rejected drafts. What a chunk makes due closes only as the next one comes."""
    config = dataclasses.replace(BIG, block_size=4, window=2, rank=2)
    parts, layer, plain = rows_of(6, 60), new(kind, config), new(kind, config)
    layer.rewinds, want, start = True, dense(parts), 0
    while start + 10 <= 50:
        out = step(kind, layer, *(x[:, :, start : start + 10] for x in parts))
        np.testing.assert_allclose(out, want[:, :, start : start + 10], atol=TOLERANCE)
        layer.crop(dropped)
        start += 10 - dropped
        assert layer.tokens == [start]
    layer.rewinds = False
    step(kind, layer, *(x[:, :, start : start + 1] for x in parts))
    fed(kind, plain, parts, [start + 1])
    assert (layer.rows, layer.block_counts) == (plain.rows, plain.block_counts)


def test_chunks_that_do_not_fit_are_refused_before_anything_is_stored() -> None:
    """Rows of one head, another dtype or length were broadcast or rounded into the rows that are held."""
    torch = pytest.importorskip("torch")
    layer = new("torch", BIG)
    q, k, v = (testing.to_library(x, "torch") for x in rows_of(7, 5))
    step("torch", layer, q, k, v)
    for wrong, kinds, message in (
        ((q, k[:, :1], v[:, :1]), ValueError, "k must be as the cache's, 2 kv heads of 8 channels, got 1 of 8"),
        ((q[..., :6], k[..., :6], v), ValueError, "k must be as the cache's"),
        ((q, k, v[..., :1]), ValueError, "v must be as the cache's"),
        ((q, k, v[:, :, :1]), ValueError, "v must have shape"),
        ((q[:, :, :2], k, v), ValueError, "q must have shape"),
        ((q[:, :3], k, v), ValueError, "q must have a multiple of 2 heads"),
        ((q, k.half(), v.half()), TypeError, "k must have the cache's dtype float32, got float16"),
        ((q, k, v.bfloat16()), TypeError, r"v must have the dtype of k \(float32\), got bfloat16"),
    ):
        with pytest.raises(kinds, match=message):
            layer.attend(*wrong)
    for padding in (torch.ones(2, 5) > 0, torch.ones(1, 4) > 0, torch.ones(1, 5)):
        with pytest.raises((TypeError, ValueError), match="padding must"):
            layer.attend(q, k, v, padding=padding)
    assert (layer.tokens, layer.offset) == ([5], 5)


# prefill through a cache


def test_p01_the_last_partial_query_block_has_keys(kind: str) -> None:
    """LMCache#3092: blocks were counted by ceil and filled by floor, so the last query block saw nothing."""
    limits = {"prefill_top_k": 1, "prefill_window": 0, "prefill_block": 128, "prefill_key_block": 128}
    config = dataclasses.replace(BIG, **SPARSE, **limits)
    q, k, v = rows_of(8, 300)
    names = ("top_k", "ratio", "mass", "stride")
    options = {name: getattr(config, f"prefill_{name}") for name in names} | {"prefill_window": 0}
    want = op_module("reference", "prefill").prefill_attention(q, k, v, block_size=128, prefill_block=128, **options)[0]
    got = fed(kind, new(kind, config), (q, k, v), [300])
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    assert np.abs(got - dense((q, k, v))).max() > 0.01


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65])
def test_p02_prompts_shorter_than_a_block(kind: str, length: int) -> None:
    """LMCache#2791: a sequence shorter than one block crashed."""
    parts = rows_of(9, length + 1)
    for tail in (0, 128):
        layer = new(kind, dataclasses.replace(BIG, block_size=64, prefill_dense_below=0, prefill_tail=tail))
        np.testing.assert_allclose(fed(kind, layer, parts, [length, 1]), dense(parts), atol=TOLERANCE)


@pytest.mark.parametrize("below", [0, 8192])
def test_p03_queries_stand_at_the_last_keys(kind: str, below: int) -> None:
    """flash-attention#517, sparkinfer#3, onnx#8068, executorch#21749: a top-left mask hides the past from a chunk."""
    q, k = np.zeros((1, 1, 5, 4), np.float32), np.ones((1, 1, 5, 4), np.float32)
    v = np.broadcast_to(np.arange(5, dtype=np.float32)[:, None], (1, 1, 5, 3)).copy()
    layer = new(kind, dataclasses.replace(BIG, prefill_dense_below=below))
    out = fed(kind, layer, (q, k, v), [3, 2])
    np.testing.assert_allclose(out[0, 0, :, 0], [0, 0.5, 1.0, 1.5, 2.0], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("below", [0, 8192])
def test_p08_p10_chunks_on_a_warm_cache_are_the_whole_prompt(kind: str, dtype: str, below: int) -> None:
    """candle#3743, MInference#108: chunks on a warm cache broke; with every key block selected they are dense."""
    names = {"float32": "fp32", "bfloat16": "bf16"}
    limits = {"prefill_dense_below": below, "prefill_tail": 0, "prefill_top_k": 10**6}
    config = dataclasses.replace(BIG, window=24, sink_tokens=8, format=names[dtype], **limits)
    parts = cast(rows_of(10, 600), dtype)
    want = dense(parts)
    allowed = (
        TOLERANCE if dtype == "float32" else 2.0**-8 * np.maximum(1, np.abs(want))
    )  # half an ulp, and its rounding
    for chunks in ([600], [256, 256, 88], [1, 599]):
        layer = new(kind, config)
        got = fed(kind, layer, parts, chunks).astype(np.float64)
        assert (np.abs(got - want) <= allowed).all(), np.abs(got - want).max()
        assert layer.block_counts == [2]
