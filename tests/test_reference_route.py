"""Routing against scores of the rebuilt rows and a plain stable sort."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import Case, cases, compressed, f64, poisoned, rebuild
from strategies import positions

from dkv.reference import decode, route
from dkv.types import BlockFormat

ROUTERS = ["lowrank", "keys", "minmax", "residual"]


def dense_scores(case: Case, router: str, sm_scale: float) -> np.ndarray:
    """Scores ``[B, Hq, Sq, N]`` from the rebuilt rows, entry by entry."""
    blocks, q = case.blocks(), case.queries()
    k, _, low_k = rebuild(blocks)
    scores = np.zeros((*q.shape[:3], case.N))
    for b, h, s, n in np.ndindex(*scores.shape):
        kv, query = h // case.G, q[b, h, s]
        if router == "minmax":
            low, high = f64(blocks.k_min[b, n, kv]), f64(blocks.k_max[b, n, kv])
            score = sum(max(query[d] * low[d], query[d] * high[d]) for d in range(case.D)) * sm_scale
        elif router == "residual":
            rows = [0, *positions(blocks)[b, n].tolist()]
            score = max(query @ k[b, n, kv, i] for i in rows) * sm_scale
        else:
            rows = low_k if router == "lowrank" and case.fmt.keeps_every_row else k
            score = np.log(np.exp(rows[b, n, kv] @ query * sm_scale).sum())
        scores[b, h, s, n] = score
    return scores


@pytest.mark.parametrize("router", ROUTERS)
@given(case=cases(), sm_scale=st.sampled_from([None, 0.2]))
def test_scores_are_those_of_the_rebuilt_rows(router: str, case: Case, sm_scale: float | None) -> None:
    got = route.route_scores(case.queries(), case.blocks(), router, sm_scale)
    np.testing.assert_allclose(got, dense_scores(case, router, sm_scale or case.D**-0.5), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("share", ["kv_head", "all"])
@pytest.mark.parametrize("router", ROUTERS)
@given(case=cases(min_batch=1, min_blocks=2), top_k=st.integers(1, 2), sink=st.integers(0, 1), recent=st.integers(0, 1))
def test_the_blocks_with_the_most_mass_are_selected(
    router: str, share: str, case: Case, top_k: int, sink: int, recent: int
) -> None:
    top_k = max(top_k, sink + recent)
    case = dataclasses.replace(case, N=2 * case.N)
    blocks = case.blocks()
    got = route.route_blocks(case.queries(), blocks, top_k, router, share, sink_blocks=sink, recent_blocks=recent)
    width = min(top_k, case.N)
    assert got.shape == (case.B, case.H, width) and got.dtype == np.int32
    scores = dense_scores(case, router, case.D**-0.5)
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    p = p / p.sum(axis=3, keepdims=True)
    for b, kv in np.ndindex(case.B, case.H):
        heads = range(case.H * case.G) if share == "all" else range(kv * case.G, (kv + 1) * case.G)
        each = np.array([[p[b, h, s] for s in range(case.Sq)] for h in heads])  # [heads, Sq, N]
        mass = each.mean((0, 1)) if share == "all" else each.max(0).mean(0)
        chosen = got[b, kv].tolist()
        assert chosen == sorted(set(chosen)) and min(chosen) >= 0
        pinned = set(range(case.N)[:sink]) | set(range(case.N)[case.N - recent :])
        assert pinned <= set(chosen)
        left_out = [mass[n] for n in range(case.N) if n not in chosen]
        if left_out:
            assert min([mass[n] for n in chosen if n not in pinned], default=1) >= max(left_out) - 1e-9


@given(cases(min_batch=1, min_blocks=2), st.sampled_from(ROUTERS), st.integers(0, 2))
def test_blocks_beyond_the_count_are_neither_read_nor_selected(case: Case, router: str, count: int) -> None:
    count = min(count, case.N - 1)
    blocks, q = case.blocks(), case.queries()
    poison = blocks.map(lambda part: poisoned(part, (slice(None), slice(count, None))))
    short = dataclasses.replace(poison, block_counts=np.full(case.B, count, np.int32))
    got = route.route_blocks(q, short, 3, router, recent_blocks=1)
    whole = dataclasses.replace(blocks, block_counts=np.full(case.B, count, np.int32))
    np.testing.assert_array_equal(got, route.route_blocks(q, whole, 3, router, recent_blocks=1))
    assert got.shape == (case.B, case.H, min(3, case.N))
    assert (got < count).all()
    if count == 1:
        assert (got[..., 0] == 0).all() and (got[..., 1:] == -1).all()


def test_sequences_of_a_batch_have_counts_of_their_own() -> None:
    case = Case(3, 4, 2, 1, 1, 6, 5, BlockFormat(8, 3, 2), "distinct", "float32", 0)
    blocks = dataclasses.replace(case.blocks(), block_counts=np.array([0, 2, 4], np.int32))
    got = route.route_blocks(case.queries(), blocks, 4)
    assert got.tolist() == [[[-1] * 4] * 2, [[0, 1, -1, -1]] * 2, [[0, 1, 2, 3]] * 2]


def test_no_residual_row_is_read_by_the_lowrank_router_where_every_row_is_kept() -> None:
    case = Case(1, 2, 2, 2, 1, 6, 5, BlockFormat(8, 3, 7, 8, 16), "distinct", "float32", 0)
    blocks = case.blocks()
    spoilt = dataclasses.replace(blocks, residual_k=blocks.residual_k * np.nan)
    got, want = (route.route_scores(case.queries(), x, "lowrank") for x in (spoilt, blocks))
    np.testing.assert_array_equal(got, want)


def test_equal_blocks_are_taken_from_the_first() -> None:
    k, v = (
        np.tile(np.random.default_rng(0).standard_normal((1, 2, 8, 3)).astype(np.float32), (1, 1, 6, 1)) for _ in "kv"
    )
    blocks = compressed(k, v, BlockFormat(8, 2, 3))
    got = route.route_blocks(np.ones((1, 4, 1, 3)), blocks, 3, sink_blocks=0)
    assert got.tolist() == [[[0, 1, 2]] * 2]
    for top_k in range(1, 34):
        assert pick([n % 3 for n in range(99)], top_k) == list(range(2, 99, 3))[:top_k]


# Faults that users of other projects met.


def pick(scores: list[float], top_k: int, sink: int = 0, recent: int = 0, valid: np.ndarray | None = None) -> list[int]:
    p = np.array(scores)[None, None]
    valid = np.ones((1, len(scores)), bool) if valid is None else valid[None]
    return route.select_blocks(p, valid, top_k, sink, recent)[0, 0].tolist()


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_more_slots_than_blocks_select_all(num_blocks: int, router: str) -> None:
    """K above the number of blocks raised inside top-k (native-sparse-attention-pytorch#18, loki#1)."""
    case = Case(1, num_blocks, 2, 2, 1, 6, 5, BlockFormat(8, 3, 2, minmax=True), "distinct", "float32", 0)
    blocks, q = case.blocks(), case.queries()
    got = route.route_blocks(q, blocks, 8, router)
    assert got.tolist() == [[list(range(num_blocks))] * 2]
    padded = np.concatenate([got, np.full((1, 2, 5), -1, np.int32)], axis=2)
    want = decode.decode_attention(q, blocks, None, None, got)
    for x, y in zip(decode.decode_attention(q, blocks, None, None, padded), want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_nan_scores_come_last() -> None:
    """NaN scores yielded stale, repeated or sign-dependent indices (vllm#50201, tt-metal#56626, triton#10697)."""
    assert pick([1, np.nan, 3, -np.nan], 2) == [0, 2]
    assert pick([np.nan, -np.nan, np.nan], 2) == [0, 1]
    assert pick([np.nan, -np.inf, 2], 2) == [0, 2]
    case = Case(1, 4, 1, 1, 1, 4, 4, BlockFormat(4, 2, 1, 32, 16, minmax=True), "distinct", "float32", 1)
    blocks = case.blocks()
    for part in (blocks.anchor_k, blocks.k_min, blocks.residual_k):
        part[:, [1, 3]] = np.nan
    for router in ROUTERS:
        assert route.route_blocks(case.queries(), blocks, 2, router, sink_blocks=0).tolist() == [[[0, 2]]]


def test_several_infinite_scores_are_all_winners() -> None:
    """Repeated arg-max with several +inf drops a winner (triton#6635)."""
    rng = np.random.default_rng(2)
    scores = rng.permutation(32).astype(float)
    scores[[3, 9, 20, 31]] = np.inf
    want = sorted(np.argsort(-scores, kind="stable")[:16].tolist())
    assert pick(scores.tolist(), 16) == want
    p = route.block_probabilities(scores)
    assert p[[3, 9, 20, 31]].tolist() == [0.25] * 4 and p.sum() == 1


def test_no_padding_lane_is_selected() -> None:
    """Scores equal the pad value and lanes of the padding escape (tt-metal#53326)."""
    scores = [-np.inf, -np.inf, 2, -np.inf, 1]
    assert pick(scores, 4) == [0, 1, 2, 4]
    assert pick([*scores, 9, 9, 9], 4, valid=np.arange(8) < 5) == [0, 1, 2, 4]
    assert pick(route.block_probabilities(np.full(3, -np.inf)).tolist(), 2) == [0, 1]


def test_sink_and_recent_blocks_are_pinned() -> None:
    """As selection starts, the first tokens fall out and text collapses (mlx-lm#1443, #1552)."""
    scores = np.random.default_rng(3).uniform(1, 2, 40)
    scores[0] = 0
    got = pick(scores.tolist(), 8, sink=1, recent=1)
    assert len(set(got)) == 8 and got[0] == 0 and got[-1] == 39


@pytest.mark.parametrize("router", ROUTERS)
def test_query_heads_route_with_their_own_key_head(router: str) -> None:
    """Kernels indexed key heads with query-head numbers (LMCache#3092, SnapKV#16, HeadKV#3)."""
    k = 0.01 * np.random.default_rng(4).standard_normal((1, 2, 5 * 8, 6)).astype(np.float32)
    k[0, 0, 8:16] += 3
    k[0, 1, 24:32] += 3
    blocks = compressed(k, k[..., :4], BlockFormat(8, 3, 2, minmax=True))
    got = route.route_blocks(np.ones((1, 12, 1, 6)), blocks, 1, router, sink_blocks=0)
    assert got.tolist() == [[[1], [3]]]
    assert blocks.num_kv_heads == 2
    scores = route.route_scores(np.ones((1, 12, 1, 6)), blocks, router)
    assert scores[0, :, 0].argmax(axis=1).tolist() == [1] * 6 + [3] * 6


def test_padding_blocks_are_neither_selected_nor_pinned() -> None:
    """Left padding shifts which block counts as first (mlx-lm#1552)."""
    valid = np.array([False, True, True, True, True])
    assert pick([1e4, 0.1, 0.3, 0.4, 0.2], 3, sink=1, valid=valid) == [1, 2, 3]
    assert pick([1e4, 0.1, 0.3, 0.4, 0.2], 3, sink=1, recent=1, valid=valid) == [1, 3, 4]
