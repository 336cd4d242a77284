"""Decode by every backend against the reference, and what must hold for any of them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, BACKENDS, Case, call, cases, library, more, poisoned, scales, softcaps

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks

OPS = ["lowrank_attention", "residual_attention", "exact_attention", "decode_attention"]
EVERY_ROW = BlockFormat(16, 5, 15, residual_bits=16)
SOME_ROWS = BlockFormat(16, 5, 6)
MIXED = BlockFormat(16, 0, 15, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3)


def options_of(op: str, case: Case, with_sink: bool, band: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if op != "exact_attention":
        options["block_indices"] = case.indices()
    if op in ("exact_attention", "decode_attention"):
        options |= {"seq_lens": case.seq_lens(), "window": band, "sink": case.sink() if with_sink else None}
    return options


def every_block(blocks: CompressedBlocks) -> np.ndarray:
    every = np.arange(blocks.num_blocks, dtype=np.int32)
    return np.broadcast_to(every, (blocks.batch_size, blocks.num_kv_heads, len(every))).copy()


def all_ops(backend: str, inputs: testing.Inputs) -> dict[str, Any]:
    """Each op's state on ``inputs``, which are of the backend's library."""
    indices = testing.to_library(every_block(testing.to_numpy(inputs.blocks)), library(backend))
    q, blocks, k, v = inputs.q, inputs.blocks, inputs.k_window, inputs.v_window
    return {
        "lowrank_attention": dkv.lowrank_attention(q, blocks, indices, backend=backend),
        "residual_attention": dkv.residual_attention(q, blocks, indices, backend=backend),
        "exact_attention": dkv.exact_attention(q, k, v, backend=backend),
        "decode_attention": dkv.decode_attention(q, blocks, k, v, block_indices=indices, backend=backend),
        "routed": dkv.decode_attention(q, blocks, k, v, config=dkv.DKVConfig(top_k=2), backend=backend),
    }


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(a[0].astype(np.float64), b[0].astype(np.float64), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a[1], b[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@more
@given(case=cases(), softcap=softcaps, sm_scale=scales, with_sink=st.booleans(), band=st.sampled_from([None, 1, 4]))
def test_parity(
    backend: str, op: str, case: Case, softcap: float | None, sm_scale: float | None, with_sink: bool, band: int | None
) -> None:
    options = options_of(op, case, with_sink, band) | {"softcap": softcap, "sm_scale": sm_scale}
    testing.assert_matches_reference(backend, op, case.inputs(library(backend)), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(full=False))
def test_parity_without_causality(backend: str, case: Case) -> None:
    testing.assert_matches_reference(backend, "exact_attention", case.inputs(library(backend)), causal=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parity_at_the_shape_of_a_model(backend: str, dtype: str) -> None:
    shape: dict[str, Any] = {"batch": 1, "num_q_heads": 14, "num_kv_heads": 2, "head_dim": 128, "head_dim_v": 64}
    shape |= {"window": 300, "num_blocks": 3, "dtype": dtype}
    mixed = dkv.DKVConfig(rank=0, key_bits=(6, 5, 5, 4, 4, 3, 3, 2), value_bits=3)
    for config in (dkv.DKVConfig(), mixed):
        inputs = testing.make_inputs(5, **shape, config=config, library=library(backend))
        testing.assert_matches_reference(backend, "decode_attention", inputs)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_rows_kept_exactly_are_dense_attention(backend: str) -> None:
    inputs = testing.make_inputs(1, config=EVERY_ROW, q_len=2)
    state = call(
        *(backend, "decode_attention", inputs.q, inputs.blocks, inputs.k_window, inputs.v_window),
        block_indices=every_block(inputs.blocks),
    )
    rows = [np.concatenate(pair, axis=2) for pair in ((inputs.k, inputs.k_window), (inputs.v, inputs.v_window))]
    close(state, call("reference", "exact_attention", inputs.q, *rows))


@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS, MIXED])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_routing_that_takes_all_is_all_indices(backend: str, fmt: BlockFormat) -> None:
    inputs = testing.make_inputs(2, config=fmt, num_blocks=4)
    arguments = (inputs.q, inputs.blocks, inputs.k_window, inputs.v_window)
    routed = call(backend, "decode_attention", *arguments, config=dkv.DKVConfig(top_k=9))
    given_all = call(backend, "decode_attention", *arguments, block_indices=every_block(inputs.blocks))
    assert np.array_equal(routed.out, given_all.out) and np.array_equal(routed.lse, given_all.lse)


@pytest.mark.parametrize("op", ["lowrank_attention", "residual_attention"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_blocks_attended_apart_merge_to_blocks_attended_together(backend: str, op: str) -> None:
    inputs = testing.make_inputs(3, config=SOME_ROWS, num_blocks=4)
    every = every_block(inputs.blocks)
    whole = call(backend, op, inputs.q, inputs.blocks, every)
    parts = [call(backend, op, inputs.q, inputs.blocks, part) for part in (every[..., :1], every[..., 1:])]
    close(call(backend, "merge_states", parts), whole, 2e-6)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_keys_attended_apart_merge_to_keys_attended_together(backend: str) -> None:
    inputs = testing.make_inputs(4, window=31)
    q, k, v = inputs.q, inputs.k_window, inputs.v_window
    parts = [
        call(backend, "exact_attention", q, np.array(k[:, :, a:b]), np.array(v[:, :, a:b]), causal=False)
        for a, b in ((0, 0), (0, 11), (11, 12), (12, 31))
    ]
    close(call(backend, "merge_states", parts), call(backend, "exact_attention", q, k, v, causal=False), 2e-6)


@pytest.mark.parametrize("shift", [-7.0, 40.0])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_shift_of_all_logits_moves_the_lse_alone(backend: str, shift: float) -> None:
    inputs = testing.make_inputs(6, config=EVERY_ROW, q_len=2)

    def run(q: np.ndarray, one: float) -> Any:
        k, k_window = (np.concatenate([x, np.full_like(x[..., :1], one)], axis=-1) for x in (inputs.k, inputs.k_window))
        fmt = inputs.blocks.format
        parts = op_module("reference", "compress").compress_blocks(k, inputs.v, fmt)
        blocks = CompressedBlocks(format=fmt, **parts)
        options = {"block_indices": every_block(blocks), "sm_scale": 0.25}
        return call(backend, "decode_attention", q, blocks, k_window, inputs.v_window, **options)

    q = np.concatenate([inputs.q, np.full_like(inputs.q[..., :1], 4 * shift)], axis=-1)
    still, shifted = run(q, 0.0), run(q, 1.0)
    np.testing.assert_allclose(shifted.out, still.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shifted.lse, still.lse + shift, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_second_run_gives_the_same_bits(backend: str, fmt: BlockFormat) -> None:
    inputs = testing.make_inputs(7, config=fmt, library=library(backend))
    first, second = (testing.to_numpy(all_ops(backend, inputs)[op]) for op in ("routed", "routed"))
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes()


@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_outputs_share_no_memory_with_inputs(backend: str, dtype: str, fmt: BlockFormat) -> None:
    inputs = testing.make_inputs(8, config=fmt, dtype=dtype, library=library(backend))
    before = testing.to_numpy(inputs)
    for state in all_ops(backend, inputs).values():
        for part in state:
            part[...] = 0  # also refuses a broadcast view
    after = testing.to_numpy(inputs)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before[:5], after[:5], strict=True))
    for (name, a), (_, b) in zip(before.blocks.parts(), after.blocks.parts(), strict=True):
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_strided_inputs_are_read_by_their_strides(backend: str, fmt: BlockFormat, op: str) -> None:
    made = testing.make_inputs(9, config=fmt, q_len=2)

    def strided(x: np.ndarray) -> Any:
        """Every second number of a buffer whose first two axes lie swapped."""
        buffer = np.repeat(x, 2, axis=-1)
        buffer[..., 1::2] = 0
        return testing.to_library(buffer.swapaxes(0, 1), library(backend)).swapaxes(0, 1)[..., ::2]

    arrays = [strided(x) for x in made[:5]]
    inputs = testing.Inputs(*arrays, made.blocks.map(strided), made.config)
    testing.assert_matches_reference(backend, op, inputs)


@pytest.mark.parametrize("op", ["lowrank_attention", "residual_attention", "decode_attention"])
@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS, MIXED, BlockFormat(16, 5, 15), BlockFormat(16, 3, 4, 16, 16)])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_blocks_that_are_not_selected_are_not_read(backend: str, fmt: BlockFormat, op: str) -> None:
    inputs = testing.make_inputs(10, config=fmt, num_blocks=4)
    indices = np.array([[[-1, 2, -1], [2, 3, -1]], [[1, 1, -1], [-1, -1, -1]]], np.int32)
    used = np.array([[False, False, True, True], [False, True, False, False]])
    window = (inputs.k_window, inputs.v_window) if op == "decode_attention" else ()

    def run(blocks: CompressedBlocks) -> Any:
        arguments = (inputs.q, blocks, *window)
        if op == "decode_attention":
            return call(backend, op, *arguments, block_indices=indices)
        return call(backend, op, *arguments, indices)

    clean, dirty = run(inputs.blocks), run(poisoned(inputs.blocks, ~used, positions=False))
    assert clean.out.tobytes() == dirty.out.tobytes() and clean.lse.tobytes() == dirty.lse.tobytes()
    assert np.isfinite(clean.out).all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_rows_outside_a_sliding_window_are_not_read(backend: str) -> None:
    inputs = testing.make_inputs(11, window=12, q_len=2)
    seq_lens, outside = np.array([9, 12], np.int32), np.ones((2, 12), bool)
    outside[0, 5:9] = outside[1, 8:12] = False  # two queries, three rows each
    rows = [np.array(x) for x in (inputs.k_window, inputs.v_window)]
    clean = call(backend, "exact_attention", inputs.q, *rows, seq_lens=seq_lens, window=3)
    for part in rows:
        part.swapaxes(1, 2)[outside] = np.nan
    dirty = call(backend, "exact_attention", inputs.q, *rows, seq_lens=seq_lens, window=3)
    assert clean.out.tobytes() == dirty.out.tobytes() and clean.lse.tobytes() == dirty.lse.tobytes()
    assert np.isfinite(clean.out).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_are_merged_before_they_are_rounded(backend: str, dtype: str) -> None:
    inputs = testing.make_inputs(12, config=SOME_ROWS, dtype=dtype, num_blocks=4, window=40, library=library(backend))
    testing.assert_matches_reference(backend, "decode_attention", inputs)


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_lse_in_base_two_is_offered_at_the_border(backend: str, lse_base: str) -> None:
    inputs = testing.make_inputs(13, library=library(backend))
    testing.assert_matches_reference(backend, "exact_attention", inputs, lse_base=lse_base)


@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS, BlockFormat(16, 5, 15)])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "torch"])
def test_pieces_of_the_workspace_do_not_show(backend: str, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = testing.make_inputs(14, config=fmt, num_blocks=5, window=40, q_len=7, library=library(backend))
    whole = {op: testing.to_numpy(state) for op, state in all_ops(backend, inputs).items()}
    for op in ("decode", "route", "prefill"):
        monkeypatch.setattr(op_module(backend, op), "WORKSPACE_BYTES", 1)
    for op, state in all_ops(backend, inputs).items():
        close(testing.to_numpy(state), whole[op], 2e-6)


@pytest.mark.parametrize(
    "fmt",
    [
        *(BlockFormat(32, 5, 9), BlockFormat(32, 5, 31), BlockFormat(32, 5, 31, 16, 16)),
        dataclasses.replace(MIXED, block_size=32, num_residuals=31),
    ],
)
def test_memory_does_not_grow_with_the_cache(fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest array a decode makes is bounded by the workspace, the selected rows and the scores of the router."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            taken = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            result = func(*args, **(kwargs or {}))
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in taken:
                    self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
            return result

    workspace = 32 << 10
    for op in ("decode", "route"):
        monkeypatch.setattr(op_module("torch", op), "WORKSPACE_BYTES", workspace)
    largest = {}
    for num_blocks in (40, 80):
        monkeypatch.setattr(op_module("torch", "_scratch"), "_kept", threading.local())  # rooms that others made
        shape = {"batch": 1, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 48, "head_dim_v": 40, "window": 24}
        inputs = testing.make_inputs(15, **shape, num_blocks=num_blocks, config=fmt, library="torch")
        rebuilt = inputs.k.nbytes
        with Largest() as mode:
            dkv.decode_attention(
                inputs.q, inputs.blocks, inputs.k_window, inputs.v_window, config=dkv.DKVConfig(top_k=4)
            )
        largest[num_blocks] = mode.nbytes
        assert mode.nbytes <= 2 * workspace < rebuilt / 4
    assert largest[80] == largest[40]


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_random_generators_are_left_alone(backend: str) -> None:
    states = [np.random.get_state()[1].tobytes()]  # noqa: NPY002
    if library(backend) == "torch":
        import torch

        states.append(torch.get_rng_state().numpy().tobytes())
    inputs = testing.make_inputs(16, library=library(backend))
    all_ops(backend, inputs)
    dkv.compress_blocks(inputs.k, inputs.v, config=inputs.config, backend=backend)
    dkv.prefill_attention(inputs.q, inputs.k, inputs.v, config=inputs.config, backend=backend)
    assert states[0] == np.random.get_state()[1].tobytes()  # noqa: NPY002
    if library(backend) == "torch":
        assert states[1] == torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("fmt", [EVERY_ROW, SOME_ROWS])
@pytest.mark.parametrize("op", ["lowrank_attention", "residual_attention"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_indices_that_32_bits_would_wrap_name_no_block(backend: str, op: str, fmt: BlockFormat) -> None:
    made = testing.make_inputs(18, config=fmt)
    wide = np.array([2, 2**32 + 1, -(2**63), 2**32, 2**63 - 1])
    got = call(backend, op, made.q, made.blocks, np.tile(wide, (2, 2, 1)))
    want = call(backend, op, made.q, made.blocks, np.full((2, 2, 1), 2, np.int32))
    close(got, want, 2e-6)
