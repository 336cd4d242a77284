"""Merge by every backend against the reference, and its algebra."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, BACKENDS, call, cases, library, more

from dkv import testing
from dkv.types import AttentionState


def random_states(seed: int, count: int, dtype: str = "float32", empty: float = 0.25) -> list[AttentionState]:
    """States over ``[2, 3, 5]`` queries with values of 7 channels; some are empty and hold garbage."""
    rng, states = np.random.default_rng(seed), []
    kind = testing.make_inputs(0, batch=1, num_blocks=0, window=0, dtype=dtype).q.dtype
    for _ in range(count):
        out, lse = rng.standard_normal((2, 3, 5, 7)), 4 * rng.standard_normal((2, 3, 5))
        none = rng.random(lse.shape) < empty
        out[none] = rng.choice([np.nan, np.inf, 7.0])
        lse[none] = rng.choice([-np.inf, np.inf])
        states.append(AttentionState(out.astype(kind), lse.astype(np.float32)))
    return states


def empty_state(garbage: float = 0.0, marker: float = -np.inf) -> AttentionState:
    return AttentionState(np.full((2, 3, 5, 7), garbage, np.float32), np.full((2, 3, 5), marker, np.float32))


def close(a: AttentionState, b: AttentionState, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(a.out.astype(np.float64), b.out.astype(np.float64), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a.lse, b.lse, rtol=tolerance, atol=tolerance)


def same(a: AttentionState, b: AttentionState) -> bool:
    return a.out.tobytes() == b.out.tobytes() and a.lse.tobytes() == b.lse.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=cases(full=False))
def test_parity(backend: str, case: Any) -> None:
    testing.assert_matches_reference(backend, "merge_states", case.inputs(library(backend)))


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 6), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
def test_parity_with_empty_states_among_them(backend: str, seed: int, count: int, dtype: str) -> None:
    states = random_states(seed, count, dtype)
    got, want = call(backend, "merge_states", states), call("reference", "merge_states", states)
    close(got, want, {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype])


@pytest.mark.parametrize("marker", [-np.inf, np.inf])
@pytest.mark.parametrize("garbage", [0.0, 3.0, np.nan, np.inf])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_empty_state_is_neutral_whatever_it_holds(backend: str, garbage: float, marker: float) -> None:
    state, nothing = random_states(0, 1, empty=0.0)[0], empty_state(garbage, marker)
    for order in ([state, nothing], [nothing, state], [nothing, state, nothing]):
        assert same(call(backend, "merge_states", order), state)
    both = call(backend, "merge_states", [nothing, nothing])
    assert (both.out == 0).all() and np.isneginf(both.lse).all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@given(seed=st.integers(0, 2**31))
def test_merge_does_not_depend_on_order(backend: str, seed: int) -> None:
    a, b, c = states = random_states(seed, 3)
    whole = call(backend, "merge_states", states)
    for order in itertools.permutations(states):
        close(call(backend, "merge_states", order), whole)

    def merge(*parts: AttentionState) -> AttentionState:
        return call(backend, "merge_states", parts)

    assert same(merge(a, b), merge(a, b))
    close(merge(a, b), merge(b, a))
    close(merge(merge(a, b), c), whole)
    close(merge(a, merge(b, c)), whole)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_shift_of_every_lse_shifts_the_lse_alone(backend: str) -> None:
    states = random_states(1, 4)
    shifted = [state._replace(lse=state.lse + np.float32(64)) for state in states]
    still, moved = call(backend, "merge_states", states), call(backend, "merge_states", shifted)
    np.testing.assert_allclose(moved.out, still.out, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(moved.lse, still.lse + 64, rtol=1e-6)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_one_state_comes_back_as_a_copy(backend: str) -> None:
    from dkv import merge_states

    state = testing.to_library(random_states(2, 1, empty=0.0)[0], library(backend))
    merged = merge_states([state], backend=backend)
    before = testing.to_numpy(state)
    assert same(testing.to_numpy(merged), before)
    merged.out[...] = 0
    merged.lse[...] = 0
    assert same(testing.to_numpy(state), before)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_nan_lse_is_not_hidden(backend: str) -> None:
    bad, good = random_states(3, 2, empty=0.0)
    bad.lse[1, 2, 3] = np.nan
    merged = call(backend, "merge_states", [good, bad])
    assert np.isnan(merged.lse[1, 2, 3]) and np.isnan(merged.out[1, 2, 3]).all()
    assert np.isnan(merged.lse).sum() == 1


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_empty_arrays_merge_to_empty_arrays(backend: str) -> None:
    state = AttentionState(np.zeros((0, 3, 1, 7), np.float32), np.zeros((0, 3, 1), np.float32))
    merged = call(backend, "merge_states", [state, state])
    assert merged.out.shape == (0, 3, 1, 7) and merged.lse.shape == (0, 3, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_mean_of_numbers_near_the_largest_does_not_overflow(backend: str, dtype: str) -> None:
    kind = testing.make_inputs(0, batch=1, num_blocks=0, window=0, dtype=dtype).q.dtype
    states = [
        AttentionState(np.full((1, 1, 1, 3), 3e38, np.float32).astype(kind), np.full((1, 1, 1), lse, np.float32))
        for lse in (0, 1, 0.5)
    ]
    merged = call(backend, "merge_states", states)
    np.testing.assert_allclose(merged.out.astype(np.float64), states[0].out.astype(np.float64), rtol=1e-6)
