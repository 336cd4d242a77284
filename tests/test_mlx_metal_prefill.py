"""Prefill as a Metal kernel, by the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx: Any = pytest.importorskip("mlx.core")
import metal_mutants  # noqa: E402
from metal_host import MODES, metal, needs_host  # noqa: E402
from metal_row_cases import PREFILL  # noqa: E402
from strategies import scales, softcaps  # noqa: E402

import dkv  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

pytestmark = needs_host
few = settings(max_examples=max(8, settings().max_examples // 2))
# dtype, head dims with room in the same width, lengths of which a threadgroup takes the same number of rows
BUILDS = {
    "narrow": ("float32", ((24, 20), (17, 31), (5, 8)), (5, 8, 21, 40)),
    "wide": ("float16", ((72, 128), (128, 64)), (5, 33)),
    "widest": ("bfloat16", ((192, 130),), (1,)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", BUILDS)
@few
@given(data=st.data(), softcap=softcaps, sm_scale=scales, with_sink=st.booleans(), listed=st.booleans())
def test_parity(
    build: str, mode: str, data: st.DataObject, softcap: float | None, sm_scale: float | None, with_sink: bool,
    listed: bool,
) -> None:  # fmt: skip
    dtype, dims, lengths = BUILDS[build]
    (dim, dim_v), length = data.draw(st.sampled_from(dims)), data.draw(st.sampled_from(lengths))
    heads, group = data.draw(st.sampled_from([(2, 3), (1, 7), (3, 1), (2, 2)]))
    num_blocks = data.draw(st.sampled_from([3, 1, 5, 0]))
    size = data.draw(st.sampled_from([16, 11, 140])) if build == "narrow" else 16
    shape = {"batch": data.draw(st.sampled_from([2, 1])), "num_kv_heads": heads, "num_q_heads": heads * group}
    shape |= {"head_dim": dim, "head_dim_v": dim_v, "q_len": length, "window": data.draw(st.sampled_from([13, 1, 0]))}
    seed = data.draw(st.integers(0, 2**31))
    inputs = testing.make_inputs(
        seed, **shape, num_blocks=num_blocks, dtype=dtype, config=BlockFormat(size, 2, 3), library="mlx"
    )
    config = dataclasses.replace(
        inputs.config,
        prefill_block=data.draw(st.sampled_from([5, 8, 21, 64])),
        prefill_top_k=data.draw(st.sampled_from([2, 1, 9])),
        prefill_window=data.draw(st.sampled_from([0, 7, 40])),
    )
    rng, options = np.random.default_rng(seed), {"softcap": softcap, "sm_scale": sm_scale}
    if with_sink:
        options["sink"] = rng.standard_normal(heads * group).astype(np.float32)
    if listed:
        count = -(-length // config.prefill_block)
        options["block_indices"] = rng.integers(-1, num_blocks + 2, (shape["batch"], heads, count, 4), np.int32)
    with metal(mode):
        testing.assert_matches_reference("mlx-metal", "prefill_attention", inputs._replace(config=config), **options)


def test_a_block_that_is_not_chosen_is_not_read() -> None:
    inputs = testing.make_inputs(1, num_blocks=3, window=0, q_len=9, library="mlx")
    config = dataclasses.replace(inputs.config, prefill_block=9)
    spoiled = [mx.where(mx.arange(48)[:, None] // 16 == 1, mx.nan, x) for x in (inputs.k, inputs.v)]
    indices = mx.broadcast_to(mx.array([0, 2, 2, -1]), (2, 2, 1, 4))
    options = {"config": config, "block_indices": indices, "backend": "mlx-metal"}
    with metal("checked"):
        clean = testing.to_numpy(dkv.prefill_attention(inputs.q, inputs.k, inputs.v, **options))
        dirty = testing.to_numpy(dkv.prefill_attention(inputs.q, *spoiled, **options))
    assert clean.out.tobytes() == dirty.out.tobytes() and clean.lse.tobytes() == dirty.lse.tobytes()
    assert np.isfinite(clean.out).all()


def test_a_head_that_the_kernel_has_no_room_for_is_refused() -> None:
    inputs = testing.make_inputs(2, head_dim=260, num_blocks=1, window=3, library="mlx")
    with metal("plain"), pytest.raises(NotImplementedError, match="head dims up to 256, got 260"):
        dkv.prefill_attention(inputs.q, inputs.k, inputs.v, backend="mlx-metal")


def test_threadgroup_memory_suffices_for_the_widest_head() -> None:
    inputs = testing.make_inputs(3, head_dim=192, head_dim_v=130, q_len=9, num_blocks=1, window=0, library="mlx")
    with metal("plain") as host:
        dkv.prefill_attention(inputs.q, inputs.k, inputs.v, backend="mlx-metal")
    assert host.report is not None and 0 < host.report.threadgroup_bytes <= 32768


@pytest.mark.parametrize("mutant", [*metal_mutants.barriers("prefill.metal")], ids=lambda mutant: f"{mutant.line}")
def test_prefill_without_a_barrier_is_caught(mutant: metal_mutants.Mutant) -> None:
    assert metal_mutants.caught(mutant, PREFILL[:1])
