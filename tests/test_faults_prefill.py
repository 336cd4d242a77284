"""Faults that users of other kernels met in sparse prefill. Each names its source."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from strategies import CASE_BACKENDS, call, library

import dkv
from dkv import testing
from dkv._dispatch import op_module


def prompt(seed: int, keys: int, queries: int | None = None, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    made = testing.make_inputs(
        seed, batch=1, num_blocks=0, window=keys, q_len=keys if queries is None else queries, dtype=dtype
    )
    return made.q, made.k_window, made.v_window


def select(backend: str, q: np.ndarray, k: np.ndarray, config: dkv.DKVConfig) -> np.ndarray:
    fn = op_module(backend, "prefill").select_key_blocks
    q, k = testing.to_library([q, k], library(backend))
    settings = {"block_size": config.prefill_keys, "prefill_block": config.prefill_block}
    settings |= {"top_k": config.prefill_top_k, "prefill_window": config.prefill_window}
    limits = {"stride": config.prefill_stride, "ratio": 1.0, "mass": 1.0}
    return testing.to_numpy(fn(q, k, **settings, **limits, sm_scale=q.shape[3] ** -0.5))


def masked_dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 attention of ``seen [B, Hkv, Sq, Sk]``, every query of which sees a key."""
    group, wide = q.shape[1] // k.shape[1], [x.astype(np.float64) for x in (q, k, v)]
    k, v, seen = (np.repeat(x, group, axis=1) for x in (wide[1], wide[2], seen))
    logits = np.where(seen, np.einsum("bhqd,bhkd->bhqk", wide[0], k) / math.sqrt(q.shape[-1]), -np.inf)
    top = logits.max(-1, keepdims=True)
    total = np.exp(logits - top).sum(-1, keepdims=True)
    return np.exp(logits - top) / total @ v, (top + np.log(total))[..., 0]


def close(state: Any, want: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(state[0].astype(np.float64), want[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(state[1], want[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p01_the_last_partial_query_block_has_keys(backend: str) -> None:
    """LMCache#3092: blocks were counted by ceil and filled by floor, so the last query block saw nothing."""
    q, k, v = prompt(0, 300)
    sizes = {"block_size": 128, "prefill_key_block": 128, "prefill_block": 128}
    config = dkv.DKVConfig(**sizes, prefill_top_k=1, prefill_window=0)
    state = call(backend, "prefill_attention", q, k, v, config=config)
    chosen = select(backend, q, k, config)
    assert chosen.shape[2] == 3 and (chosen == 2).any(-1)[:, :, 2].all()
    row, key = np.arange(300)[:, None], np.arange(300)
    listed = (chosen[..., None] == key // 128).any(3)  # [B, Hkv, 3, Sk]
    close(state, masked_dense(q, k, v, listed[:, :, row[:, 0] // 128] & (key <= row)))


@pytest.mark.parametrize("length", [1, 5, 63, 64, 65])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p02_prompts_shorter_than_a_block(backend: str, length: int) -> None:
    """LMCache#2791: a sequence shorter than one block crashed."""
    q, k, v = prompt(1, length)
    config = dkv.DKVConfig(block_size=64, prefill_block=32)
    row, key = np.arange(length)[:, None], np.arange(length)
    state = call(backend, "prefill_attention", q, k, v, config=config)
    close(state, masked_dense(q, k, v, np.broadcast_to(key <= row, (1, 2, length, length))))


@pytest.mark.parametrize("op", ["exact_attention", "prefill_attention"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p03_queries_stand_at_the_last_keys(backend: str, op: str) -> None:
    """flash-attention#517, sparkinfer#3, onnx#8068, executorch#21749: a top-left mask hides the past from a chunk."""
    q, k = np.zeros((1, 1, 2, 4), np.float32), np.ones((1, 1, 5, 4), np.float32)
    v = np.broadcast_to(np.arange(5, dtype=np.float32)[:, None], (1, 1, 5, 3)).copy()
    state = call(backend, op, q, k, v)
    np.testing.assert_allclose(state.out[0, 0, :, 0], [1.5, 2.0], atol=1e-6)
    np.testing.assert_allclose(state.lse[0, 0], [1.386294, 1.609438], atol=1e-6)


@pytest.mark.parametrize("op", ["exact_attention", "prefill_attention"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p04_queries_before_the_first_key_are_empty(backend: str, op: str) -> None:
    """flashinfer#4452, flash-attention#1778: rows without a key got a finite lse."""
    q, k = np.zeros((1, 1, 5, 4), np.float32), np.ones((1, 1, 2, 4), np.float32)
    v = np.broadcast_to(np.array([[10.0], [20.0]], np.float32), (1, 1, 2, 3)).copy()
    state = call(backend, op, q, k, v)
    assert not state.out[0, 0, :3].any() and np.isneginf(state.lse[0, 0, :3]).all()
    np.testing.assert_allclose(state.out[0, 0, 3:, 0], [10, 15], atol=1e-6)
    np.testing.assert_allclose(state.lse[0, 0, 3:], [0, math.log(2)], atol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p05_no_slot_is_spent_on_the_future(backend: str) -> None:
    """MInference#108: early query blocks spent their budget on key blocks that they cannot see."""
    q, k, v = prompt(2, 512)
    q = np.abs(q)
    k = np.array(k + np.arange(512, dtype=np.float32)[:, None] / 64)  # later keys score higher
    config = dkv.DKVConfig(block_size=64, prefill_block=64, prefill_top_k=4, prefill_window=0)
    chosen = select(backend, q, k, config)
    for b, h, i in np.ndindex(1, 2, 8):
        used = chosen[b, h, i][chosen[b, h, i] >= 0].tolist()
        assert set(used) <= set(range(i + 1)) and i in used and len(used) == len(set(used)) == min(4, i + 1)
    state = call(backend, "prefill_attention", q, k, v, config=config)
    row = np.arange(64)
    want = masked_dense(*(x[:, :, :64] for x in (q, k, v)), np.broadcast_to(row <= row[:, None], (1, 2, 64, 64)))
    close((state.out[:, :, :64], state.lse[:, :, :64]), want)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p07_the_order_of_the_list_does_not_matter(backend: str) -> None:
    """vllm#4405, aiter#2505, FlagAttention#25: NaN when the block visited first was masked for some rows."""
    q, k, v = prompt(3, 200)
    config = dkv.DKVConfig(block_size=64, prefill_block=32, prefill_window=32)
    up = np.broadcast_to(np.arange(4, dtype=np.int32), (1, 2, 7, 4)).copy()
    row, key = np.arange(200)[:, None], np.arange(200)
    want = masked_dense(q, k, v, np.broadcast_to(key <= row, (1, 2, 200, 200)))
    states = [
        call(backend, "prefill_attention", q, k, v, config=config, block_indices=indices)
        for indices in (up, np.array(up[..., ::-1]), np.array(up[..., [3, 0, 2, 1]]))
    ]
    for state in states:
        close(state, want)
        close(state, states[0], 1e-6)
    narrow = call(backend, "exact_attention", q, k, v, window=32)
    close(narrow, masked_dense(q, k, v, np.broadcast_to((key <= row) & (row - key < 32), (1, 2, 200, 200))))


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p08_a_large_count_is_dense(backend: str) -> None:
    """MInference#108: is a very large budget really dense?"""
    q, k, v = prompt(4, 700)
    row, key = np.arange(700)[:, None], np.arange(700)
    want = masked_dense(q, k, v, np.broadcast_to(key <= row, (1, 2, 700, 700)))
    for block_size, top_k in ((256, 3), (64, 11), (64, 99)):
        config = dkv.DKVConfig(
            block_size=block_size, prefill_key_block=block_size, prefill_top_k=top_k, prefill_window=0
        )
        close(call(backend, "prefill_attention", q, k, v, config=config), want)


@pytest.mark.parametrize("length", [65, 127])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p09_storage_behind_the_last_key_is_not_read(backend: str, length: int) -> None:
    """FastVideo#1094: padding of the last tile produced NaN."""
    rows = prompt(5, length)
    config = dkv.DKVConfig(block_size=64, prefill_block=64)
    want = call(backend, "prefill_attention", *rows, config=config)
    views = []
    for x in rows:
        buffer = np.full((*x.shape[:2], 128, x.shape[3]), np.nan, np.float32)
        buffer[:, :, :length] = x
        views.append(testing.to_library(buffer, library(backend))[:, :, :length])
    close(testing.to_numpy(dkv.prefill_attention(*views, config=config, backend=backend)), want, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p10_chunks_are_the_whole(backend: str, dtype: str) -> None:
    """candle#3743: prefill in chunks broke on a cache that was not empty."""
    q, k, v = prompt(6, 600, dtype=dtype)
    whole = call(backend, "prefill_attention", q, k, v)
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7 * float(np.abs(whole.out.astype(np.float64)).max())
    for chunks in ((256, 256, 88), (1, 599)):
        stop, outs, lses = 0, [], []
        for count in chunks:
            start, stop = stop, stop + count
            arrays = [np.array(x) for x in (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])]
            state = call(backend, "prefill_attention", *arrays)
            outs.append(state.out)
            lses.append(state.lse)
        np.testing.assert_allclose(np.concatenate(lses, axis=2), whole.lse, atol=1e-5)
        out = np.concatenate(outs, axis=2).astype(np.float64)
        np.testing.assert_allclose(out, whole.out.astype(np.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_p10_aligned_chunks_select_as_the_whole_does(backend: str) -> None:
    """The same source, where the budget leaves blocks out."""
    q, k, v = prompt(7, 600)
    config = dataclasses.replace(dkv.DKVConfig(block_size=64), prefill_top_k=4, prefill_window=64, prefill_block=64)
    whole = call(backend, "prefill_attention", q, k, v, config=config)
    stop = 0
    for count in (256, 256, 88):
        start, stop = stop, stop + count
        arrays = [np.array(x) for x in (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])]
        state = call(backend, "prefill_attention", *arrays, config=config)
        close(state, (whole.out[:, :, start:stop], whole.lse[:, :, start:stop]), 2e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_a_key_just_after_the_last_query_moves_no_mass(backend: str) -> None:
    """A block of keys that ends one key too late would take the mass of the head that decides."""
    q, k = np.zeros((1, 2, 2, 2), np.float32), np.zeros((1, 1, 128, 2), np.float32)
    q[0, 0, :, 0], q[0, 1, :, 1] = 4, 3
    k[0, 0, 32:64, 0], k[0, 0, 64:96, 1], k[0, 0, 127, 0] = 2**0.5, 2**0.5, 3200
    config = dkv.DKVConfig(block_size=32, prefill_block=1, prefill_top_k=3, prefill_window=0)
    chosen = select(backend, q, k, config)
    assert [row[row >= 0].tolist() for row in chosen[0, 0]] == [[0, 1, 3], [0, 2, 3]]


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_r11_a_block_listed_twice_counts_once(backend: str, size: int) -> None:
    """vllm#56254: the contract said unique, the code kept duplicates."""
    q, k, v = prompt(8, 60)
    config = dkv.DKVConfig(block_size=size, prefill_block=32)
    once, more = (np.tile(np.array(row), (1, 2, 2, 1)) for row in ([0, 1, 2], [1, 0, 1, 2, -1, 0, 2, 1]))
    states = [call(backend, "prefill_attention", q, k, v, config=config, block_indices=x) for x in (once, more)]
    close(*states, 1e-6)
