"""Routing as Metal kernels, by the host: scores, selection and their parity with the reference, over few builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx: Any = pytest.importorskip("mlx.core")
from metal_cases import BUILDS, of_build  # noqa: E402
from metal_host import MODES, metal, needs_host  # noqa: E402
from strategies import scales, special_scores, stable_selection  # noqa: E402

from dkv import testing  # noqa: E402
from dkv._dispatch import op_module  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

pytestmark = needs_host
few = settings(max_examples=max(1, 2 * settings().max_examples // 3))  # of every build in every mode
ROUTERS = ["lowrank", "keys", "minmax", "residual"]
MIXED = {"key_bits": (8, 7, 5, 4, 3, 2, 1, 0), "value_bits": 3}
FORMATS = [
    BlockFormat(16, 5, 6, minmax=True),
    BlockFormat(16, 5, 15, minmax=True),
    BlockFormat(256, 5, 255, **MIXED, minmax=True),
    BlockFormat(140, 0, 130, **MIXED, minmax=True),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", BUILDS)
@few
@given(
    data=st.data(),
    router=st.sampled_from(ROUTERS),
    top_k=st.sampled_from([2, 1, 3, 8]),
    share=st.sampled_from(["kv_head", "all"]),
    sm_scale=scales,
    pinned=st.sampled_from([(0, 0), (1, 0), (0, 1)]),
)
def test_parity(
    build: str, mode: str, data: st.DataObject, router: str, top_k: int, share: str, sm_scale: float | None,
    pinned: tuple[int, int],
) -> None:  # fmt: skip
    case = data.draw(of_build(BUILDS[build], minmax=True))
    options = {"router": router, "top_k": top_k, "share": share, "sm_scale": sm_scale}
    options |= {"sink_blocks": pinned[0], "recent_blocks": pinned[1]}
    with metal(mode):
        testing.assert_matches_reference("mlx-metal", "route_blocks", case.inputs("mlx"), **options)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_parity_of_scores(fmt: BlockFormat, router: str) -> None:
    made = testing.make_inputs(0, num_blocks=3, config=fmt, q_len=2)
    want = op_module("reference", "route").route_scores(made.q, made.blocks, router)
    inputs = testing.to_library(made, "mlx")
    with metal("checked"):
        got = op_module("mlx-metal", "route").route_scores(inputs.q, inputs.blocks, router, 24**-0.5)
    np.testing.assert_allclose(testing.to_numpy(got).reshape(want.shape), want, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 129, 1100])
@pytest.mark.parametrize("mode", ["checked", "random"])
def test_selection_is_a_stable_sort(mode: str, size: int) -> None:
    rng = np.random.default_rng(size)
    score = special_scores(rng, size)
    counts = np.array([size, max(0, size - 7)], np.int32)
    for top_k, first, last in ((9, 2, 1), (1000, 0, 3), (size + 1, 0, 0)):
        with metal(mode):
            got = op_module("mlx-metal", "route").select_blocks(mx.array(score), mx.array(counts), top_k, first, last)
            got = testing.to_numpy(got)
        assert np.array_equal(got, stable_selection(score, counts, top_k, first, last))


@pytest.mark.parametrize("shape", [(1, 1, 50), (3, 1, 40), (2, 9, 20), (1, 70, 300)])
def test_selection_from_scores(shape: tuple[int, int, int]) -> None:
    """Softmax over blocks, the largest of the first axis, the mean of the second; special scores among them."""
    rng = np.random.default_rng(shape[2])
    scores = 3 * rng.standard_normal((4, *shape)).astype(np.float32)
    if shape[:2] == (1, 1):
        scores = scores.round(0)  # ties
    scores[0, :, 0, 3] = np.nan
    scores[1, 0, 0, [5, 6]] = np.inf
    scores[2, 0, 0] = -np.inf
    counts = np.array([shape[2], shape[2] - 2], np.int32)
    scores[2:, ..., -2:] = np.nan
    mean = np.zeros((4, shape[2]))
    for p in range(4):
        part = scores[p, ..., : counts[p // 2]].astype(np.float64)
        part = np.where(np.isnan(part), -np.inf, part)
        infinite = np.isposinf(part)
        part = np.where(infinite.any(-1, keepdims=True), np.where(infinite, 0.0, -np.inf), part)
        top = part.max(-1, keepdims=True)
        weight = np.exp(part - np.where(np.isneginf(top), 0.0, top))
        weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
        mean[p, : counts[p // 2]] = weight.max(0).mean(0)
    for top_k, first, last in ((5, 1, 0), (7, 0, 2)):
        with metal("checked"):
            select = op_module("mlx-metal", "route").select_scores
            got = testing.to_numpy(select(mx.array(scores), mx.array(counts), 2, 3, top_k, first, last))
        want = stable_selection(mean.reshape(2, 2, -1), counts, top_k, first, last).reshape(4, -1)
        assert got.shape == (4, 3, top_k) and (got == want[:, None]).all()
