"""Merging states of disjoint key sets against one softmax over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import DTYPES, assert_states_close, f64

from dkv.reference import decode, merge


def random_states(
    rng: np.random.Generator, n: int, shape: tuple[int, ...], dtype: object = np.float32
) -> tuple[list, list]:
    outs = [rng.standard_normal((*shape, 5)).astype(dtype) for _ in range(n)]
    lses = [(3 * rng.standard_normal(shape)).astype(np.float32) for _ in range(n)]
    for out, lse in zip(outs, lses, strict=True):
        empty = rng.random(shape) < 0.3
        lse[empty], out[empty] = rng.choice([-np.inf, np.inf]), rng.choice([np.nan, np.inf, 7.0])
    return outs, lses


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(sorted(DTYPES)))
def test_merge_is_the_weighted_mean(seed: int, n: int, dtype: str) -> None:
    outs, lses = random_states(np.random.default_rng(seed), n, (2, 3, 4), DTYPES[dtype])
    before = [x.tobytes() for x in outs + lses]
    out, lse = merge.merge_states(outs, lses)
    assert before == [x.tobytes() for x in outs + lses]
    assert out.dtype == DTYPES[dtype] and lse.dtype == np.float32
    want, want_lse = np.zeros((2, 3, 4, 5)), np.full((2, 3, 4), -np.inf)
    for at in np.ndindex(2, 3, 4):
        live = [(f64(o[at]), float(x[at])) for o, x in zip(outs, lses, strict=True) if np.isfinite(x[at])]
        total = sum(np.exp(x) for _, x in live)
        if live:
            want[at], want_lse[at] = sum(np.exp(x) * o for o, x in live) / total, np.log(total)
    eps = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert_states_close((out, lse), (want, want_lse), rtol=eps, atol=eps)


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(1, 4))
def test_split_keys_merge_to_the_whole(seed: int, rows: int, pieces: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 6, 3, 4), (2, 2, rows, 4), (2, 2, rows, 5)))
    cuts = [0, *sorted(rng.integers(0, rows + 1, pieces - 1)), rows]
    states = [decode.exact_attention(q, k[:, :, i:j], v[:, :, i:j], causal=False) for i, j in itertools.pairwise(cuts)]
    got = merge.merge_states([s[0] for s in states], [s[1] for s in states])
    assert_states_close(got, decode.exact_attention(q, k, v, causal=False), rtol=1e-6, atol=1e-6)


# Faults that users of other projects met.


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n", [2, 3])
def test_two_empty_states_merge_to_the_empty_state(dtype: object, n: int) -> None:
    """-inf minus -inf is NaN (flashinfer#4051, vllm#28181, #39148, #27491)."""
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((3, 2, 4)).astype(dtype) for _ in range(n)]
    lses = [rng.standard_normal((3, 2)).astype(np.float32) for _ in range(n)]
    for out, lse in zip(outs, lses, strict=True):
        out[1], lse[1] = 0, -np.inf
    out, lse = merge.merge_states(outs, lses)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()
    without = merge.merge_states([o[[0, 2]] for o in outs], [x[[0, 2]] for x in lses])
    assert (out[[0, 2]] == without[0]).all() and (lse[[0, 2]] == without[1]).all()


@pytest.mark.parametrize("marker", [np.inf, -np.inf])
@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
def test_both_markers_of_no_keys_are_empty(marker: float, garbage: float) -> None:
    """One kernel family marks "no keys" with +inf, another with -inf (flash-attention#978, vllm#39148)."""
    outs = [np.full((1, 2), garbage, np.float32), np.array([[1, 2]], np.float32)]
    out, lse = merge.merge_states(outs, [np.array([marker], np.float32), np.zeros(1, np.float32)])
    assert out.tolist() == [[1, 2]] and lse.tolist() == [0]
    out, lse = merge.merge_states(outs[:1], [np.array([marker], np.float32)])
    assert out.tolist() == [[0, 0]] and lse.tolist() == [-np.inf]


def test_lse_is_in_natural_log() -> None:
    """A base-2 lse fed to a base-e merge starves the newest tokens (sglang#40903, flashinfer#2113, vllm#47079)."""
    q = np.zeros((1, 1, 1, 2))
    states = [
        decode.exact_attention(q, np.zeros((1, 1, n, 2)), np.full((1, 1, n, 1), value))
        for n, value in ((3072, 0.0), (64, 1.0))
    ]
    assert [float(s[1].item()) for s in states] == pytest.approx([8.030084, 4.158883], abs=1e-6)
    out, lse = merge.merge_states([s[0] for s in states], [s[1] for s in states])
    assert out.item() == pytest.approx(64 / 3136, abs=1e-7)
    assert lse.item() == pytest.approx(8.050703, abs=1e-6)


def test_a_transposed_lse_is_read_by_its_strides() -> None:
    """A non-contiguous lse was read flat (vllm#22003)."""
    lse = np.arange(15, dtype=np.float32).reshape(3, 5).T
    outs = [np.full((5, 3, 2), value, np.float32) for value in (0, 1)]
    got = merge.merge_states(outs, [lse, np.zeros((5, 3), np.float32)])
    want = merge.merge_states(outs, [lse.copy(), np.zeros((5, 3), np.float32)])
    assert (got[0] == want[0]).all() and (got[1] == want[1]).all()


def test_lse_rows_stay_in_their_head_and_sequence() -> None:
    """Rows of the lse came out in another order on the split path (flash-attention#876, #648)."""
    q, k = np.zeros((4, 4, 1, 1)), np.ones((4, 1, 7, 1))
    q[..., 0, 0] = 10 * np.arange(4)[:, None] + np.arange(4)
    pieces = (k[:, :, :3], k[:, :, 3:6], k[:, :, 6:])
    states = [decode.exact_attention(q, piece, piece, sm_scale=1.0) for piece in pieces]
    _, lse = merge.merge_states([s[0] for s in states], [s[1] for s in states])
    np.testing.assert_allclose(lse, q[..., 0] + np.log(7), rtol=1e-6)


def test_the_scale_is_applied_once() -> None:
    """The lse of a split was scaled again (flash-sparse-attention#106)."""
    q = np.ones((1, 1, 1, 1))
    states = [
        decode.exact_attention(q, np.full((1, 1, 1, 1), dot), np.full((1, 1, 1, 1), value), sm_scale=0.125)
        for dot, value in ((80.0, 1.0), (72.0, 0.0))
    ]
    out, lse = merge.merge_states([s[0] for s in states], [s[1] for s in states])
    assert lse.item() == pytest.approx(10.313262, abs=1e-6)
    assert out.item() == pytest.approx(0.731059, abs=1e-6)


def test_reductions_of_any_length_and_order() -> None:
    """Zero-partition reductions and finite initial values mis-handle empties (flashinfer#5262)."""
    rng = np.random.default_rng(1)
    outs, lses = random_states(rng, 7, (2, 3))
    first = np.where(np.isfinite(lses[0]), lses[0], 0).astype(np.float32)
    out, lse = merge.merge_states([np.nan_to_num(outs[0], posinf=1)], [first])
    assert (out == np.nan_to_num(outs[0], posinf=1)).all() and (lse == first).all()
    want = merge.merge_states(outs, lses)
    for _ in range(20):
        order = rng.permutation(7)
        got = merge.merge_states([outs[i] for i in order], [lses[i] for i in order])
        assert_states_close(got, want, rtol=1e-6, atol=1e-6)
    far = [np.full(1, x, np.float32) for x in (1e4, -1e4)]
    out, lse = merge.merge_states([np.full((1, 1), 0.3, np.float32), np.ones((1, 1), np.float32)], far)
    assert out.item() == np.float32(0.3) and lse.item() == 1e4


def test_a_nan_lse_is_not_hidden() -> None:
    out, lse = merge.merge_states([np.ones((2, 1)), np.ones((2, 1))], [np.array([np.nan, 0.0]), np.zeros(2)])
    assert np.isnan(out[0]).all() and np.isnan(lse[0]) and out[1] == 1 and np.isfinite(lse[1])
