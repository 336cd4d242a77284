"""Merge as a Metal kernel, by the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core")
from metal_host import MODES, metal, needs_host
from strategies import call

from dkv.types import AttentionState

pytestmark = needs_host
few = settings(max_examples=max(8, settings().max_examples // 2))
DTYPES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def states(seed: int, count: int, dtype: str, shape: tuple[int, ...], empty: float = 0.3) -> list[AttentionState]:
    """Random states; some are empty and hold garbage."""
    from dkv import testing

    rng, kind = np.random.default_rng(seed), testing.make_inputs(0, batch=1, num_blocks=0, dtype=dtype).q.dtype
    made = []
    for _ in range(count):
        out, lse = rng.standard_normal(shape), 4 * rng.standard_normal(shape[:3])
        none = rng.random(lse.shape) < empty
        out[none], lse[none] = rng.choice([np.nan, np.inf, 7.0]), rng.choice([-np.inf, np.inf])
        made.append(AttentionState(out.astype(kind), lse.astype(np.float32)))
    return made


@pytest.mark.parametrize("mode", MODES)
@few
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 6),
    dtype=st.sampled_from([*DTYPES]),
    shape=st.sampled_from([(2, 3, 5, 7), (1, 1, 1, 3), (1, 2, 3, 130), (2, 1, 1, 64), (0, 2, 1, 8)]),
)
def test_parity(mode: str, seed: int, count: int, dtype: str, shape: tuple[int, ...]) -> None:
    parts = states(seed, count, dtype, shape)
    with metal(mode):
        got: Any = call("mlx-metal", "merge_states", parts)
    want: Any = call("reference", "merge_states", parts)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        one, other = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_allclose(one, other, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_one_state_that_is_not_empty_comes_back_bit_exact(dtype: str) -> None:
    (state,) = states(1, 1, dtype, (2, 3, 5, 7), empty=0.0)
    state.out[0, 0, 0] = [-0.0, 0.0, 1e-7, -1e-3, 3.0, 2.5e-5, -60000.0]
    nothing = AttentionState(np.full_like(state.out, np.nan), np.full_like(state.lse, np.inf))
    for order in ([state], [nothing, state], [state, nothing]):
        with metal("checked"):
            got: Any = call("mlx-metal", "merge_states", order)
        assert got.out.tobytes() == state.out.tobytes() and got.lse.tobytes() == state.lse.tobytes()


def test_states_of_several_dtypes_and_a_nan() -> None:
    (first,), (second,) = (states(2, 1, dtype, (1, 2, 3, 5), empty=0.0) for dtype in ("bfloat16", "float16"))
    second.lse[0, 1, 1] = np.nan
    with metal("plain"):
        got: Any = call("mlx-metal", "merge_states", [first, second])
    want: Any = call("reference", "merge_states", [first, second])
    assert got.out.dtype == first.out.dtype and np.isnan(got.lse[0, 1, 1])
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6)
    np.testing.assert_allclose(got.out.astype(np.float32), want.out.astype(np.float32), rtol=1.6e-2, atol=1e-6)
