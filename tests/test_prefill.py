"""Prefill by every backend against the reference, and what must hold for any of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, BACKENDS, call, library, more, scales, softcaps

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import AttentionState

SMALL = dkv.DKVConfig(block_size=16, prefill_block=8, prefill_top_k=3, prefill_window=5, num_residuals=3)


@dataclasses.dataclass
class Prompt:
    seed: int
    shape: dict[str, int]
    dtype: str
    config: dkv.DKVConfig

    def inputs(self, kind: str = "numpy") -> testing.Inputs:
        """All keys lie in the window part."""
        return testing.make_inputs(
            self.seed, **self.shape, num_blocks=0, dtype=self.dtype, config=self.config, library=kind
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    block_size = draw(st.sampled_from([16, 8, 40, 64]))
    num_kv_heads, group = draw(st.sampled_from([2, 1, 3])), draw(st.sampled_from([2, 3, 1]))
    keys = draw(st.sampled_from([65, 130, 1, 0, block_size - 1, block_size, block_size + 1, 257]))
    shape = {
        "batch": draw(st.sampled_from([2, 1, 0])),
        "num_q_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([8, 5, 24])),
        "head_dim_v": draw(st.sampled_from([7, 3, 20])),
        "window": keys,
        "q_len": draw(st.sampled_from([keys, max(1, keys // 2), 1, keys + 3, 17])),
    }
    config = dkv.DKVConfig(
        block_size=block_size,
        prefill_block=draw(st.sampled_from([8, 16, 24, 128])),
        prefill_top_k=draw(st.sampled_from([3, 1, 2, None])),
        prefill_window=draw(st.sampled_from([5, 0, 40])),
        prefill_key_block=draw(st.sampled_from([64, 11])),
        prefill_stride=draw(st.sampled_from([5, 1, 16, 32])),
        prefill_ratio=draw(st.sampled_from([None, 0.4, 0.05, 1.0])),
        prefill_mass=draw(st.sampled_from([None, 0.6, 0.95, 1])),
        num_residuals=3,
    )
    return Prompt(draw(st.integers(0, 2**31)), shape, draw(st.sampled_from(["float32", "float16", "bfloat16"])), config)


def select(
    backend: str, q: np.ndarray, k: np.ndarray, config: dkv.DKVConfig, sm_scale: float | None = None
) -> np.ndarray:
    fn = op_module(backend, "prefill").select_key_blocks
    top_k, ratio, mass = config.prefill_limits()
    settings = {"block_size": config.prefill_keys, "prefill_block": config.prefill_block, "top_k": top_k}
    settings |= {"prefill_window": config.prefill_window, "stride": config.prefill_stride}
    settings |= {"ratio": ratio, "mass": mass, "sm_scale": q.shape[3] ** -0.5 if sm_scale is None else sm_scale}
    q, k = testing.to_library([q, k], library(backend))
    return testing.to_numpy(fn(q, k, **settings))


def every_block(q: np.ndarray, k: np.ndarray, config: dkv.DKVConfig) -> np.ndarray:
    size = (q.shape[0], k.shape[1], -(-q.shape[2] // config.prefill_block), -(-k.shape[2] // config.prefill_keys))
    return np.broadcast_to(np.arange(size[3], dtype=np.int32), size).copy()


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> AttentionState:
    return call("reference", "exact_attention", q, k, v, **options)


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(a[0].astype(np.float64), b[0].astype(np.float64), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a[1], b[1], rtol=tolerance, atol=tolerance)


def prompt(seed: int, keys: int, queries: int | None = None, **options: Any) -> tuple[np.ndarray, ...]:
    made = testing.make_inputs(seed, num_blocks=0, window=keys, q_len=keys if queries is None else queries, **options)
    return made.q, made.k_window, made.v_window


@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=prompts(), softcap=softcaps, sm_scale=scales, with_sink=st.booleans())
def test_parity(backend: str, case: Prompt, softcap: float | None, sm_scale: float | None, with_sink: bool) -> None:
    inputs = case.inputs(library(backend))
    sink = np.random.default_rng(case.seed).standard_normal(case.shape["num_q_heads"]).astype(np.float32)
    options = {"softcap": softcap, "sm_scale": sm_scale, "sink": sink if with_sink else None}
    testing.assert_matches_reference(backend, "prefill_attention", inputs, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=prompts(), seed=st.integers(0, 2**31), width=st.integers(0, 4))
def test_parity_on_any_list_of_blocks(backend: str, case: Prompt, seed: int, width: int) -> None:
    """In any order, with repeats, -1 and blocks that hold no key."""
    inputs = case.inputs()
    size = every_block(inputs.q, inputs.k_window, case.config).shape
    indices = np.random.default_rng(seed).integers(-1, size[3] + 1, (*size[:3], width), np.int32)
    testing.assert_matches_reference(
        backend, "prefill_attention", testing.to_library(inputs, library(backend)), block_indices=indices
    )


@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=prompts(), sm_scale=scales)
def test_parity_of_the_selection(backend: str, case: Prompt, sm_scale: float | None) -> None:
    inputs = case.inputs()
    want = select("reference", inputs.q, inputs.k_window, case.config, sm_scale)
    got = select(backend, inputs.q, inputs.k_window, case.config, sm_scale)
    assert got.dtype == np.int32 and np.array_equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_of_the_selection_among_many_blocks(backend: str) -> None:
    best = dataclasses.replace(SMALL, block_size=40, prefill_block=48, prefill_window=20, prefill_top_k=6)
    ratio = dataclasses.replace(best, prefill_top_k=None, prefill_ratio=0.45)
    for seed, config in enumerate((best, best, ratio, dataclasses.replace(ratio, prefill_mass=0.7))):
        q, k, _ = prompt(seed, 900 + seed, 300)
        got = select(backend, q, k, config)
        assert np.array_equal(got, select("reference", q, k, config))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_later_keys_do_not_change_a_selection(backend: str) -> None:
    config = dataclasses.replace(SMALL, block_size=64, prefill_block=24, prefill_top_k=3, prefill_window=0)
    for seed in range(3):
        q, k, _ = prompt(seed, 500)
        whole = select(backend, q, k, config)
        for query_block in (3, 9, 14):
            seen = min(500, 24 * (query_block + 1))
            changed = np.array(k)
            changed[:, :, seen:] = 50 * np.random.default_rng(seed).standard_normal(changed[:, :, seen:].shape)
            got = select(backend, q, changed, config)[:, :, query_block]
            assert np.array_equal(got, whole[:, :, query_block])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_every_block_is_dense_attention(backend: str, dtype: str) -> None:
    q, k, v = prompt(1, 150, 70, dtype=dtype)
    wide = [x.astype(np.float32) for x in (q, k, v)]
    state = call(backend, "prefill_attention", q, k, v, config=SMALL, block_indices=every_block(q, k, SMALL))
    close(state, dense(*wide), {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype])
    assert state.out.dtype == q.dtype and state.lse.dtype == np.float32


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_chunk_with_a_prefix_is_the_tail_of_the_whole(backend: str) -> None:
    q, k, v = prompt(2, 96)
    limits = {"prefill_ratio": 0.7, "prefill_mass": 0.9, "prefill_stride": 3, "prefill_top_k": 4}
    config = dataclasses.replace(SMALL, **limits)
    whole = call(backend, "prefill_attention", q, k, v, config=config)
    for start, stop in ((0, 40), (40, 48), (48, 96)):
        arrays = [np.ascontiguousarray(x) for x in (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])]
        chunk = call(backend, "prefill_attention", *arrays, config=config)
        close(chunk, (whole.out[:, :, start:stop], whole.lse[:, :, start:stop]), 2e-6)


@pytest.mark.parametrize("limits", [{"prefill_ratio": 1.0}, {"prefill_mass": 1.0}, {"prefill_top_k": 10}])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_limits_that_select_everything_are_dense(backend: str, limits: dict[str, Any]) -> None:
    q, k, v = prompt(9, 150, 70)
    config = dataclasses.replace(SMALL, **{"prefill_top_k": None} | limits)
    close(call(backend, "prefill_attention", q, k, v, config=config), dense(q, k, v))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_head_that_looks_at_its_window_selects_nothing_else(backend: str) -> None:
    """One head's queries find a far block, the other's their own: the same mass is a budget of each head's own."""
    q, k = np.zeros((1, 2, 256, 4), np.float32), np.zeros((1, 2, 256, 4), np.float32)
    q[..., 0] = k[:, 0, 32:48, 0] = 8
    k[0, 0, 0, 0] = 9.5  # takes nearly all, and is not counted
    k[0, 1, :, 0] = np.repeat(np.arange(16), 16)
    config = dkv.DKVConfig(
        block_size=16, prefill_block=16, prefill_window=0, prefill_mass=0.9, prefill_stride=4, num_residuals=3
    )
    chosen = select(backend, q, k, config)[0, :, 15]
    assert [row[row >= 0].tolist() for row in chosen] == [[0, 2, 15], [0, 15]]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_shift_of_all_logits_moves_the_lse_alone(backend: str) -> None:
    q, k, v = prompt(3, 90)
    longer_q = np.concatenate([q, np.full_like(q[..., :1], 40.0)], axis=-1)
    still, moved = (
        call(
            *(backend, "prefill_attention", longer_q, np.concatenate([k, np.full_like(k[..., :1], one)], axis=-1), v),
            **{"config": SMALL, "sm_scale": 0.25},
        )
        for one in (0.0, 1.0)
    )
    np.testing.assert_allclose(moved.out, still.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moved.lse, still.lse + 10, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_blocks_that_are_not_selected_are_not_read(backend: str, garbage: float) -> None:
    q, k, v = prompt(4, 64)
    indices = np.full((2, 2, 8, 3), -1, np.int32)
    indices[:, :, 2:, 1] = 1
    indices[:, :, 6:, 0] = 3
    clean = call(backend, "prefill_attention", q, k, v, config=SMALL, block_indices=indices)
    for part in (k, v):
        part[:, :, :16] = part[:, :, 32:48] = garbage
    dirty = call(backend, "prefill_attention", q, k, v, config=SMALL, block_indices=indices)
    assert clean.out.tobytes() == dirty.out.tobytes() and clean.lse.tobytes() == dirty.lse.tobytes()
    assert not clean.out[:, :, :16].any() and np.isneginf(clean.lse[:, :, :16]).all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_second_run_gives_the_same_bits_and_shares_no_memory(backend: str) -> None:
    q, k, v = testing.to_library(prompt(5, 70), library(backend))
    before = testing.to_numpy([q, k, v])
    first, second = (dkv.prefill_attention(q, k, v, config=SMALL, backend=backend) for _ in range(2))
    for a, b in zip(testing.to_numpy(first), testing.to_numpy(second), strict=True):
        assert a.tobytes() == b.tobytes()
    for part in first:
        part[...] = 0
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, testing.to_numpy([q, k, v]), strict=True))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_strided_inputs_are_read_by_their_strides(backend: str) -> None:
    rows = prompt(6, 70, 33)

    def strided(x: np.ndarray) -> Any:
        buffer = np.repeat(x, 2, axis=-1)
        buffer[..., 1::2] = 9
        return testing.to_library(buffer.swapaxes(1, 2), library(backend)).swapaxes(1, 2)[..., ::2]

    strides = dkv.prefill_attention(*(strided(x) for x in rows), config=SMALL, backend=backend)
    close(testing.to_numpy(strides), call(backend, "prefill_attention", *rows, config=SMALL), 2e-6)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("torch", "mlx-twin")])
def test_pieces_of_the_workspace_do_not_show(backend: str, with_sink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = prompt(7, 90)
    config = dataclasses.replace(SMALL, prefill_top_k=None, prefill_mass=0.6)
    options = {"config": config, "sink": np.arange(6, dtype=np.float32) if with_sink else None}
    whole, chosen = call(backend, "prefill_attention", q, k, v, **options), select(backend, q, k, config)
    for name, size in (("WORKSPACE_BYTES", 1), ("SCORED_NUMBERS", 1), ("SCORED_QUERIES", 3)):
        monkeypatch.setattr(op_module(backend, "prefill"), name, size)
    close(call(backend, "prefill_attention", q, k, v, **options), whole, 2e-6)
    assert np.array_equal(select(backend, q, k, config), chosen)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_empty_batches_no_keys_and_no_queries(backend: str) -> None:
    sink = np.arange(6, dtype=np.float32)
    for batch, keys, queries in ((0, 20, 20), (2, 0, 3), (2, 20, 0), (2, 0, 0)):
        q, k, v = prompt(8, keys, queries, batch=batch)
        state = call(backend, "prefill_attention", q, k, v, config=SMALL)
        assert state.out.shape == (batch, 6, queries, 20) and not state.out.any() and np.isneginf(state.lse).all()
        state = call(backend, "prefill_attention", q, k, v, config=SMALL, sink=sink)
        assert not state.out.any() and (state.lse == sink[:, None]).all()
