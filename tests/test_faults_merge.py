"""Faults that users of other kernels met when states were merged. Each names its source."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from strategies import CASE_BACKENDS, call, library

import dkv
from dkv import testing
from dkv.types import AttentionState


def states(rng: np.random.Generator, count: int, dtype: str = "float32") -> list[AttentionState]:
    """``T = 3`` queries, ``H = 2`` heads, ``D = 4``."""
    return [
        AttentionState(
            rng.standard_normal((1, 2, 3, 4)).astype(dtype), rng.standard_normal((1, 2, 3)).astype(np.float32)
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m01_two_empty_partitions_make_no_nan(backend: str, dtype: str, count: int) -> None:
    """flashinfer#4051, vllm#28181, vllm#39148, vllm#27491: minus infinity less minus infinity, then NaN everywhere."""
    parts = states(np.random.default_rng(0), count, dtype)
    alone = call(backend, "merge_states", [AttentionState(s.out[:, :, [0, 2]], s.lse[:, :, [0, 2]]) for s in parts])
    for state in parts:
        state.out[:, :, 1], state.lse[:, :, 1] = 0, -np.inf
    merged = call(backend, "merge_states", parts)
    assert (merged.out[:, :, 1] == 0).all() and np.isneginf(merged.lse[:, :, 1]).all()
    assert merged.out[:, :, [0, 2]].tobytes() == alone.out.tobytes()
    assert merged.lse[:, :, [0, 2]].tobytes() == alone.lse.tobytes()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m03_plus_infinity_also_means_no_keys(backend: str) -> None:
    """flash-attention#978, vllm#39148: one kernel marks "no keys" with plus infinity, another with minus infinity."""
    nothing = AttentionState(np.zeros((1, 1, 1, 2), np.float32), np.full((1, 1, 1), np.inf, np.float32))
    some = AttentionState(np.array([[[[1, 2]]]], np.float32), np.zeros((1, 1, 1), np.float32))
    for order in ([nothing, some], [some, nothing]):
        merged = call(backend, "merge_states", order)
        assert merged.out.ravel().tolist() == [1, 2] and merged.lse.item() == 0
    merged = call(backend, "merge_states", [nothing, nothing])
    assert not merged.out.any() and np.isneginf(merged.lse).all()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m04_lse_is_in_natural_log(backend: str) -> None:
    """sglang#40903, sglang#35045, flashinfer#2113, flashinfer#4485, vllm#47079: base 2 met base e without an error."""
    parts = []
    for count, value in ((3072, 0.0), (64, 1.0)):
        k, v = np.zeros((1, 1, count, 4), np.float32), np.full((1, 1, count, 2), value, np.float32)
        parts.append(call(backend, "exact_attention", np.ones((1, 1, 1, 4), np.float32), k, v))
    np.testing.assert_allclose([p.lse.item() for p in parts], [8.030084, 4.158883], atol=2e-6)
    merged = call(backend, "merge_states", parts)
    np.testing.assert_allclose(merged.out, 64 / 3136, rtol=1e-6)
    np.testing.assert_allclose(merged.lse, 8.050703, atol=2e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m05_a_transposed_lse_is_read_by_its_strides(backend: str) -> None:
    """vllm#22003: lse arrived as a view and was read flat."""
    rng = np.random.default_rng(1)
    lse = np.arange(15, dtype=np.float32).reshape(1, 5, 3)  # stored [T, H]
    parts = [AttentionState(rng.standard_normal((1, 3, 5, 4)).astype(np.float32), lse[:, ::step]) for step in (1, -1)]
    dense = [AttentionState(s.out, np.ascontiguousarray(s.lse.swapaxes(1, 2))) for s in parts]
    want = call(backend, "merge_states", dense)
    views = []
    for state in parts:
        out, stored = testing.to_library([state.out, np.ascontiguousarray(state.lse)], library(backend))
        views.append(AttentionState(out, stored.swapaxes(1, 2)))
    got = testing.to_numpy(dkv.merge_states(views, backend=backend))
    assert got.out.tobytes() == want.out.tobytes() and got.lse.tobytes() == want.lse.tobytes()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m08_states_that_are_marked_empty_through_a_view(backend: str) -> None:
    """flashinfer#5055: a mask of rows given as a view of stride 2 or 0 was read flat, and other rows were merged."""
    one, other = states(np.random.default_rng(3), 2)
    marks = np.full((1, 2, 6), np.nan, np.float32)  # what lies between is not to be read
    marks[..., ::2] = [0, -np.inf, 1]
    flat = np.ascontiguousarray(marks[..., ::2])
    want = call(backend, "merge_states", [one, AttentionState(other.out, flat)])
    assert want.out[:, :, 1].tobytes() == one.out[:, :, 1].tobytes() and (want.lse[:, :, 1] == one.lse[:, :, 1]).all()
    assert (want.out[:, :, [0, 2]] != one.out[:, :, [0, 2]]).all()
    out_one, lse_one, out_other, buffer, row = testing.to_library([*one, other.out, marks, flat[:, :1]], library(backend))
    expand = {"numpy": np.broadcast_to, "mlx": getattr(sys.modules.get("mlx.core"), "broadcast_to", None)}
    wide = row.expand(1, 2, 3) if library(backend) == "torch" else expand[library(backend)](row, (1, 2, 3))
    for view in (buffer[..., ::2], wide):
        pair = [AttentionState(out_one, lse_one), AttentionState(out_other, view)]
        got = testing.to_numpy(dkv.merge_states(pair, backend=backend))
        assert got.out.tobytes() == want.out.tobytes() and got.lse.tobytes() == want.lse.tobytes()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m09_lse_rows_stay_in_their_head_and_sequence(backend: str) -> None:
    """vllm-project/flash-attention#87, Dao-AILab/flash-attention#876, #648: splits put rows in another order."""
    q = np.zeros((4, 4, 1, 2), np.float32)
    q[..., 0] = (10 * np.arange(4)[:, None] + np.arange(4))[..., None]
    k = np.zeros((4, 1, 7, 2), np.float32)
    k[..., 0] = 1
    v = np.ones((4, 1, 7, 3), np.float32)
    parts = [
        call(backend, "exact_attention", q, np.array(k[:, :, a:b]), np.array(v[:, :, a:b]), sm_scale=1.0)
        for a, b in ((0, 3), (3, 4), (4, 7))
    ]
    want = 10 * np.arange(4)[:, None] + np.arange(4) + math.log(7)
    np.testing.assert_allclose(call(backend, "merge_states", parts).lse[..., 0], want, rtol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m10_the_scale_is_applied_once(backend: str) -> None:
    """flash-sparse-attention#106: the lse of a split was multiplied by the softmax scale again."""
    q = np.ones((1, 1, 1, 1), np.float32)
    parts = [
        call(
            *(backend, "exact_attention", q, np.full((1, 1, 1, 1), logit, np.float32)),
            np.full((1, 1, 1, 1), value, np.float32),
            sm_scale=0.125,
        )
        for logit, value in ((80, 1), (72, 0))
    ]
    merged = call(backend, "merge_states", parts)
    np.testing.assert_allclose(merged.lse.item(), 10.313262, atol=2e-6)
    np.testing.assert_allclose(merged.out.item(), 0.731059, atol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_m11_reductions_of_any_length_and_order(backend: str) -> None:
    """flashinfer#5262: reductions over nothing, or seeded with a finite number, mishandled empty states."""
    with pytest.raises(ValueError, match="at least one AttentionState, got none"):
        dkv.merge_states([], backend=backend)
    rng = np.random.default_rng(2)
    parts = states(rng, 7)
    one = call(backend, "merge_states", parts[:1])
    assert one.out.tobytes() == parts[0].out.tobytes() and one.lse.tobytes() == parts[0].lse.tobytes()
    want = call(backend, "merge_states", parts)
    for _ in range(20):
        got = call(backend, "merge_states", [parts[i] for i in rng.permutation(7)])
        np.testing.assert_allclose(got.out, want.out, atol=1e-6)
        np.testing.assert_allclose(got.lse, want.lse, atol=1e-6)
    big, small = (
        parts[0]._replace(lse=np.full((1, 2, 3), 1e4, np.float32)),
        parts[1]._replace(lse=np.full((1, 2, 3), -1e4, np.float32)),
    )
    for order in ([big, small], [small, big]):
        merged = call(backend, "merge_states", order)
        assert merged.out.tobytes() == big.out.tobytes() and merged.lse.tobytes() == big.lse.tobytes()
