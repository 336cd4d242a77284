"""Decode as Metal kernels, by the host: every op in every mode against the reference, over few builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

mx: Any = pytest.importorskip("mlx.core")
from metal_cases import BUILDS, Case, of_build  # noqa: E402
from metal_host import LAUNCHES, MODES, SIGNATURES, metal, needs_host  # noqa: E402
from strategies import scales, softcaps  # noqa: E402

import dkv  # noqa: E402
from dkv import testing  # noqa: E402
from dkv.types import BlockFormat  # noqa: E402

pytestmark = needs_host
OPS = ["decode_attention", "lowrank_attention", "residual_attention", "exact_attention"]


def options_of(op: str, case: Case, with_sink: bool, band: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if op == "exact_attention" else {"block_indices": case.indices()}
    if op in ("exact_attention", "decode_attention"):
        options |= {"seq_lens": case.seq_lens(), "window": band, "sink": case.sink() if with_sink else None}
    return options


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", BUILDS)
@given(data=st.data(), softcap=softcaps, sm_scale=scales, with_sink=st.booleans(), band=st.sampled_from([None, 1, 5]))
def test_parity(
    build: str, mode: str, data: st.DataObject, softcap: float | None, sm_scale: float | None, with_sink: bool,
    band: int | None,
) -> None:  # fmt: skip
    case, op = data.draw(of_build(BUILDS[build])), data.draw(st.sampled_from(OPS))
    options = options_of(op, case, with_sink, band) | {"softcap": softcap, "sm_scale": sm_scale}
    with metal(mode):
        testing.assert_matches_reference("mlx-metal", op, case.inputs("mlx"), **options)


def test_all_queries_see_all_keys_without_causality() -> None:
    inputs = testing.make_inputs(8, q_len=5, window=140, library="mlx")
    with metal("checked"):
        testing.assert_matches_reference("mlx-metal", "exact_attention", inputs, causal=False)


def test_arrays_that_do_not_lie_in_a_row() -> None:
    inputs = testing.make_inputs(9, q_len=2, num_blocks=2, library="mlx")
    indices = mx.array([[[0, 1], [1, -1]]] * 2)

    turned = inputs._replace(
        blocks=inputs.blocks.map(_turned),
        **{name: _turned(getattr(inputs, name)) for name in ("q", "k_window", "v_window")},
    )
    lengths = mx.array([7, 0, 11, 0])[::2]
    states = []
    with metal("plain"):
        for one in (inputs, turned):
            arguments = one.q, one.blocks, one.k_window, one.v_window
            states.append(
                dkv.decode_attention(*arguments, block_indices=indices, seq_lens=lengths, backend="mlx-metal")
            )
    for one, other in zip(*map(testing.to_numpy, states), strict=True):
        assert one.tobytes() == other.tobytes()


def _turned(x: Any) -> Any:
    """The same numbers, with the first axis the last one in memory."""
    order = [*range(1, x.ndim), 0]
    return mx.contiguous(x.transpose(order)).transpose([x.ndim - 1, *range(x.ndim - 1)])


def test_lengths_and_widths_build_nothing_anew() -> None:
    counts, launches = [], LAUNCHES["dkv_decode"]
    with metal("plain"):
        for step in range(4):
            fmt = BlockFormat(16 + step, 5 + step, 6 * step, residual_bits=4 + step)
            shape = {"batch": 1 + step, "num_blocks": 1 + step, "window": 1 + 100 * step, "head_dim": 24 + step}
            inputs = testing.make_inputs(step, config=fmt, **shape, library="mlx")
            testing.assert_matches_reference("mlx-metal", "decode_attention", inputs)
            counts.append(len(SIGNATURES))
    assert counts == counts[:1] * 4 and LAUNCHES["dkv_decode"] == launches + 4


def test_batch_mates_change_no_bit() -> None:
    inputs = testing.make_inputs(10, batch=3, num_blocks=5, window=300, library="mlx")
    indices = mx.array(np.random.default_rng(0).integers(-1, 5, (3, 2, 40), np.int32))

    def run(one: testing.Inputs, chosen: Any) -> Any:
        arguments = one.q, one.blocks, one.k_window, one.v_window
        return testing.to_numpy(dkv.decode_attention(*arguments, block_indices=chosen, backend="mlx-metal"))

    with metal("plain"):
        whole = run(inputs, indices)
        for row in range(3):
            part = slice(row, row + 1)
            alone = inputs._replace(
                blocks=inputs.blocks.map(lambda x, part=part: x[part]),
                **{name: getattr(inputs, name)[part] for name in ("q", "k_window", "v_window")},
            )
            for one, other in zip(run(alone, indices[part]), whole, strict=True):
                assert one.tobytes() == other[part].tobytes()


def test_a_head_that_the_kernels_have_no_room_for_is_refused() -> None:
    inputs = testing.make_inputs(11, head_dim=260, num_blocks=1, window=3, library="mlx")
    with metal("plain"), pytest.raises(NotImplementedError, match="head dims up to 256, got 260"):
        dkv.exact_attention(inputs.q, inputs.k_window, inputs.v_window, backend="mlx-metal")
