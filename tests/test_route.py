"""Routing by every backend against the reference, and what must hold for any of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, BACKENDS, Case, call, cases, library, more, poisoned, scales

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat

ROUTERS = ["lowrank", "keys", "minmax", "residual"]
MIXED = {"key_bits": (8, 7, 5, 4, 3, 2, 1, 0), "value_bits": 3}
FORMATS = [
    BlockFormat(16, 5, 6, minmax=True),
    BlockFormat(16, 5, 15, minmax=True),
    BlockFormat(16, 5, 6, 16, 16, minmax=True),
    BlockFormat(16, 5, 0, 8, 4, minmax=True),
    BlockFormat(16, 5, 15, **MIXED, minmax=True),
    BlockFormat(16, 0, 6, **MIXED, minmax=True),
]


def select(backend: str, p: Any, counts: Any, top_k: int, sink_blocks: int = 0, recent_blocks: int = 0) -> np.ndarray:
    """The backend's selection from given probabilities ``[B, H, N]``."""
    p, counts = np.asarray(p, np.float32), np.asarray(counts, np.int32)
    fn = op_module(backend, "route").select_blocks
    if backend == "reference":
        return fn(p, np.arange(p.shape[-1]) < counts[:, None], top_k, sink_blocks, recent_blocks)
    arguments = testing.to_library([p, counts], library(backend))
    return testing.to_numpy(fn(*arguments, top_k, sink_blocks, recent_blocks))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(
    case=cases(minmax=True),
    top_k=st.sampled_from([2, 1, 3, 8]),
    share=st.sampled_from(["kv_head", "all"]),
    sm_scale=scales,
    pinned=st.sampled_from([(0, 0), (1, 0), (0, 1)]),
)
def test_parity(
    backend: str, router: str, case: Case, top_k: int, share: str, sm_scale: float | None, pinned: tuple[int, int]
) -> None:
    options = {"router": router, "top_k": top_k, "share": share, "sm_scale": sm_scale}
    options |= {"sink_blocks": pinned[0], "recent_blocks": pinned[1]}
    testing.assert_matches_reference(backend, "route_blocks", case.inputs(library(backend)), **options)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_of_scores(backend: str, fmt: BlockFormat, router: str) -> None:
    made = testing.make_inputs(0, num_blocks=5, config=fmt, q_len=2)
    want = op_module("reference", "route").route_scores(made.q, made.blocks, router)
    inputs = testing.to_library(made, library(backend))
    got = op_module(backend, "route").route_scores(inputs.q, inputs.blocks, router, 24**-0.5)
    # [B, Hkv, G * Sq, N] to [B, Hq, Sq, N]
    np.testing.assert_allclose(testing.to_numpy(got).reshape(want.shape), want, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("num_residuals", [0, 6, 15])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_keys_scores_every_row_that_the_blocks_stand_for(backend: str, num_residuals: int) -> None:
    made = testing.make_inputs(6, num_blocks=3, config=BlockFormat(16, 5, num_residuals))
    counted, q = [], testing.to_library(made.q, library(backend))
    for blocks in (made.blocks, dataclasses.replace(made.blocks, u=np.zeros_like(made.blocks.u))):
        k = call("reference", "reconstruct_blocks", blocks)[0].astype(np.float64).reshape(2, 2, 1, 3, 16, 24)
        logits = np.einsum("bhgd,bhxnsd->bhgns", made.q.reshape(2, 2, -1, 24).astype(np.float64), k) * 24**-0.5
        want = np.log(np.exp(logits).sum(-1))
        if backend == "reference":
            got = op_module(backend, "route").route_scores(made.q, blocks, "keys")
        else:
            parts = testing.to_library(blocks, library(backend))
            got = testing.to_numpy(op_module(backend, "route").route_scores(q, parts, "keys", 24**-0.5))
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=1e-5)
        counted.append(want)
    assert np.array_equal(*counted) == (num_residuals == 15)  # the low-rank part counts where it is needed alone


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(0, 12),
    top_k=st.integers(1, 14),
    sink_blocks=st.integers(0, 2),
    recent_blocks=st.integers(0, 2),
)
def test_selection_is_a_stable_sort(
    backend: str, seed: int, size: int, top_k: int, sink_blocks: int, recent_blocks: int
) -> None:
    rng = np.random.default_rng(seed)
    top_k = max(top_k, sink_blocks + recent_blocks)
    p = rng.choice([0.0, 0.25, 0.5, 1.0, np.nan, np.inf, 1e-30], (3, 2, size)).astype(np.float32)
    counts = rng.integers(0, size + 1, 3)
    got = select(backend, p, counts, top_k, sink_blocks, recent_blocks)
    assert got.dtype == np.int32 and got.shape == (3, 2, min(top_k, size))
    for b, h in np.ndindex(3, 2):
        count = int(counts[b])
        first, last = range(min(sink_blocks, count)), range(max(0, count - recent_blocks), count)
        rank = {j: -1.0 if np.isnan(p[b, h, j]) else float(p[b, h, j]) for j in range(count)}
        order = sorted(range(count), key=lambda j: (j not in first and j not in last, -rank[j], j))
        want = sorted(order[:top_k])
        assert got[b, h].tolist() == want + [-1] * (got.shape[2] - len(want))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_block_that_one_query_head_of_three_needs_is_not_outvoted(backend: str, router: str) -> None:
    """Head 0 lies on block 2, the other two mostly on block 1: their mean would be higher there."""
    p = np.array([[0.01, 0.01, 0.98], [0.4, 0.59, 0.01], [0.4, 0.59, 0.01]], np.float32)
    k = np.repeat(np.eye(3, dtype=np.float32), 8, axis=0)[None, None]  # block n is the n-th axis, so logits are ln p
    config = dkv.DKVConfig(block_size=8, rank=2, num_residuals=3, router="minmax")
    blocks = call("reference", "compress_blocks", k, k, config=config)
    options: dict[str, Any] = {"top_k": 1, "router": router, "sm_scale": 1.0, "sink_blocks": 0}
    q = np.log(p)[None, :, None]
    assert call(backend, "route_blocks", q, blocks, **options, share="kv_head").tolist() == [[[2]]]
    assert call(backend, "route_blocks", q, blocks, **options, share="all").tolist() == [[[1]]]
    # over queries it is the mean of the largest: two that need block 0 of three
    steps = np.log(np.array([[0.9, 0.05, 0.05], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05]], np.float32))
    every = np.tile(steps, (1, 3, 1, 1))
    assert call(backend, "route_blocks", every, blocks, **options, share="kv_head").tolist() == [[[0]]]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("share", ["kv_head", "all"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_list_ascends_without_repeats_and_holds_its_pins(backend: str, share: str, router: str) -> None:
    made = testing.make_inputs(1, num_blocks=7, config=FORMATS[0])
    options: dict[str, Any] = {"top_k": 4, "router": router, "share": share, "sink_blocks": 1, "recent_blocks": 2}
    chosen = call(backend, "route_blocks", made.q, made.blocks, **options)
    assert chosen.shape == (2, 2, 4) and chosen.dtype == np.int32
    assert (np.diff(chosen, axis=-1) > 0).all() and (chosen[..., 0] == 0).all() and (chosen[..., 2:] == [5, 6]).all()
    if share == "all":
        assert (chosen[:, 0] == chosen[:, 1]).all()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_what_lies_beyond_the_counts_is_not_read(backend: str, fmt: BlockFormat, router: str) -> None:
    made = testing.make_inputs(2, batch=3, num_blocks=5, config=fmt)
    counts = np.array([3, 0, 5], np.int32)
    blocks = dataclasses.replace(made.blocks, block_counts=counts)
    dirty = poisoned(blocks, np.arange(5) >= counts[:, None])
    options: dict[str, Any] = {"top_k": 4, "router": router, "recent_blocks": 1}
    clean = call(backend, "route_blocks", made.q, blocks, **options)
    assert np.array_equal(clean, call(backend, "route_blocks", made.q, dirty, **options))
    assert (clean[0, :, :3] == [0, 1, 2]).all() and (clean[0, :, 3] == -1).all() and (clean[1] == -1).all()
    alone = dataclasses.replace(made.blocks.map(lambda x: x[2:]), block_counts=None)
    assert np.array_equal(clean[2:], call(backend, "route_blocks", made.q[2:], alone, **options))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_block_that_holds_the_answer_is_found(backend: str, router: str) -> None:
    made = testing.make_inputs(3, num_blocks=6, config=FORMATS[1], num_q_heads=2, batch=1)
    k = np.array(made.k)
    for h, block in enumerate((4, 2)):
        k[0, h, 16 * block + 7] += 12 * made.q[0, h, 0]
    fmt = FORMATS[1]
    parts = op_module("reference", "compress").compress_blocks(k, made.v, fmt)
    blocks = dkv.CompressedBlocks(format=fmt, **parts)
    chosen = call(backend, "route_blocks", made.q, blocks, top_k=1, router=router, sink_blocks=0)
    assert chosen[0, :, 0].tolist() == [4, 2]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_second_run_selects_the_same(backend: str, router: str) -> None:
    made = testing.make_inputs(4, num_blocks=9, config=FORMATS[0])
    first, second = (call(backend, "route_blocks", made.q, made.blocks, top_k=4, router=router) for _ in range(2))
    assert np.array_equal(first, second)
    alone = call(backend, "route_blocks", made.q[1:], made.blocks.map(lambda x: x[1:]), top_k=4, router=router)
    assert np.array_equal(first[1:], alone)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_empty_batches_no_blocks_and_no_queries(backend: str) -> None:
    for shape, want in (({"batch": 0}, (0, 2, 2)), ({"num_blocks": 0}, (2, 2, 0)), ({"q_len": 0}, (2, 2, 2))):
        made = testing.make_inputs(5, **shape)
        chosen = call(backend, "route_blocks", made.q, made.blocks, top_k=2)
        assert chosen.shape == want and chosen.dtype == np.int32
        if shape == {"q_len": 0}:
            assert (chosen == [0, 1]).all()
