"""Faults that users of other kernels met with dtypes, integers and the interpreter. Each names its source."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS, CASE_BACKENDS, call, library

import dkv
from dkv import testing
from dkv.types import AttentionState, BlockFormat

TORCH_BACKENDS = [name for name in BACKENDS if library(name) == "torch"]
EXACT_ROWS = BlockFormat(16, 4, 5, 32, 16, minmax=True)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """A watchdog: what takes more of the processor's time ends with an error."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} seconds")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_t04_float8_is_not_offered(backend: str) -> None:
    """ml_dtypes#400, #260, ao#1912: a cast to float8 saturated in one library and gave NaN in another."""
    kind = pytest.importorskip("ml_dtypes").float8_e4m3fn if backend == "reference" else None
    rows = np.array([448, 464, 465, 1000, -1000], np.float32)[None, None, :, None]
    if library(backend) == "torch":
        rows = pytest.importorskip("torch").tensor(rows).to(pytest.importorskip("torch").float8_e4m3fn)
    elif kind is not None:
        rows = rows.astype(kind)
    else:  # MLX has none
        assert not [name for name in dir(pytest.importorskip("mlx.core")) if name.startswith("float8")]
        return
    for refused in (
        lambda: dkv.compress_blocks(rows, rows, config=dkv.DKVConfig(block_size=5), backend=backend),
        lambda: dkv.exact_attention(rows, rows, rows, backend=backend),
        lambda: dkv.prefill_attention(rows, rows, rows, backend=backend),
    ):
        with pytest.raises(TypeError, match=r"must be one of .*float32.*, got float8"):
            refused()


@pytest.mark.parametrize("option", ["sm_scale", "softcap"])
@pytest.mark.parametrize("size", [1e-60, 1e-42, 1e39, 1e300])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_t04_a_scale_that_float32_does_not_hold_is_refused(backend: str, size: float, option: str) -> None:
    """The same kind: kernels cast it to zero or infinity, and every number of the result was NaN."""
    made = testing.make_inputs(0, num_blocks=2, config=EXACT_ROWS)
    blocks, rows = made.blocks, (made.k_window, made.v_window)
    chosen = np.zeros((2, 2, 1), np.int32)
    for op, arguments in (
        ("exact_attention", (made.q, *rows)),
        ("prefill_attention", (made.q, *rows)),
        ("decode_attention", (made.q, blocks, *rows)),
        ("lowrank_attention", (made.q, blocks, chosen)),
        ("residual_attention", (made.q, blocks, chosen)),
    ):
        with pytest.raises(ValueError, match=f"{option} must be 1.2e-38..3.4e.38"):
            call(backend, op, *arguments, **{option: size})
    if option == "sm_scale":
        with pytest.raises(ValueError, match="sm_scale must be 1.2e-38"):
            call(backend, "route_blocks", made.q, blocks, sm_scale=size)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_t03_a_window_beyond_32_bits_hides_nothing(backend: str) -> None:
    """SageAttention#386, #387, of the same kind: a number that a caller may give did not fit into 32 bits."""
    made = testing.make_inputs(5, num_blocks=2, q_len=3, config=EXACT_ROWS)
    rows = (made.k_window, made.v_window)
    for op, arguments in (("exact_attention", (made.q, *rows)), ("decode_attention", (made.q, made.blocks, *rows))):
        want = call(backend, op, *arguments)
        for window in (2**31 - 1, 2**31, 2**63):
            state = call(backend, op, *arguments, window=window)
            np.testing.assert_allclose(state.out, want.out, atol=1e-6)
            np.testing.assert_allclose(state.lse, want.lse, atol=1e-6)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_t04_values_without_channels_are_refused(backend: str) -> None:
    """The same kind: an axis of length zero met a reshape that nobody could read."""
    q, k, v = (np.ones((1, 1, rows, dim), np.float32) for rows, dim in ((1, 4), (5, 4), (5, 0)))
    for op in ("exact_attention", "prefill_attention"):
        with pytest.raises(ValueError, match="v must have at least one channel"):
            call(backend, op, q, k, v)
    state = AttentionState(np.zeros((1, 1, 1, 0), np.float32), np.zeros((1, 1, 1), np.float32))
    with pytest.raises(ValueError, match=r"states\[0\].out must have at least one channel"):
        call(backend, "merge_states", [state, state])


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_i01_bfloat16_is_widened_before_any_arithmetic(backend: str) -> None:
    """triton#11584, #10945, #4972, #11585: the interpreter keeps bfloat16 as integers and computes with their bits."""
    rng = np.random.default_rng(1)
    kind = testing.make_inputs(0, num_blocks=0, window=0, dtype="bfloat16").q.dtype
    q, k, k_window = (rng.integers(-2, 3, (1, heads, 16, 16)) for heads in (2, 1, 1))
    v, v_window = np.full((1, 1, 16, 16), 2), np.full((1, 1, 16, 16), -1)
    config = dkv.DKVConfig(block_size=16, num_residuals=5, rank=4, format="fp32", router="minmax")
    narrow, wide = ([x.astype(dtype) for x in (q, k, v, k_window, v_window)] for dtype in (kind, np.float32))
    stored = [call(backend, "compress_blocks", *each[1:3], config=config) for each in (narrow, wide)]
    for name, part in stored[0].parts():
        assert np.array_equal(part.astype(np.float64), getattr(stored[1], name).astype(np.float64)), name
    rebuilt = [call(backend, "reconstruct_blocks", blocks) for blocks in stored]
    assert all(np.array_equal(x, y.astype(kind)) for x, y in zip(*rebuilt, strict=True))
    results = []
    for each, blocks in zip((narrow, wide), stored, strict=True):
        made = [
            call(backend, "exact_attention", each[0], *each[3:]),
            call(backend, "prefill_attention", each[0], *each[3:], config=config),
            call(backend, "decode_attention", each[0], blocks, *each[3:], config=config),
        ]
        made += [
            call(backend, op, each[0], blocks, np.zeros((1, 1, 1), np.int32))
            for op in ("lowrank_attention", "residual_attention")
        ]
        results.append([*made, call(backend, "merge_states", made[:2])])
        chosen = [call(backend, "route_blocks", each[0], blocks, router=router) for router in ("minmax", "residual")]
        assert all((indices == 0).all() for indices in chosen)
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        if index < 5:  # a merge of rounded outputs is another one
            assert np.array_equal(one.out, other.out.astype(kind))
            np.testing.assert_allclose(one.lse, other.lse, rtol=1e-6, atol=1e-6)
        if index in (0, 1, 5):
            assert (one.out == -1).all()  # an exact integer


@pytest.mark.parametrize("fmt", [EXACT_ROWS, BlockFormat(16, 4, 15)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_i02_nan_in_a_block_that_is_not_selected(backend: str, fmt: BlockFormat) -> None:
    """triton#10291, #7349, #10699: a maximum skips NaN when compiled and takes it when interpreted."""
    made = testing.make_inputs(2, batch=1, num_blocks=4, config=fmt)
    parts = {}
    for name, part in made.blocks.parts():
        if part.dtype.kind == "f":
            parts[name] = np.array(part)
            parts[name][:, 2] = np.nan
    dirty = dataclasses.replace(made.blocks, **parts)
    used = np.array([[[0, 1, 3]] * 2], np.int32)
    window = (made.k_window, made.v_window)
    want = call(backend, "decode_attention", made.q, made.blocks, *window, block_indices=used)
    config = dkv.DKVConfig(top_k=3)
    for options in ({"block_indices": used}, {"config": config}):
        state = call(backend, "decode_attention", made.q, dirty, *window, **options)
        assert state.out.tobytes() == want.out.tobytes() and state.lse.tobytes() == want.lse.tobytes()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_i06_loops_over_nothing_end(backend: str) -> None:
    """triton#11402: a loop that should run no time never ended in the interpreter."""
    made = testing.make_inputs(3, num_blocks=2, config=EXACT_ROWS)
    none = dataclasses.replace(made.blocks, block_counts=np.zeros(2, np.int32))
    empty = made.blocks.map(lambda part: part[:, :0])
    no_lengths, no_slots = np.zeros(2, np.int32), np.zeros((2, 2, 0), np.int32)
    rows = (made.k_window, made.v_window)
    nothing = tuple(x[:, :, :0] for x in rows)

    def states() -> list[Any]:
        return [
            call(backend, "exact_attention", made.q, *rows, seq_lens=no_lengths),
            call(backend, "exact_attention", made.q, *nothing),
            call(backend, "decode_attention", made.q, none, *rows, seq_lens=no_lengths),
            call(backend, "decode_attention", made.q, empty),
            call(backend, "decode_attention", made.q, made.blocks, block_indices=no_slots),
            call(backend, "lowrank_attention", made.q, made.blocks, no_slots),
            call(backend, "residual_attention", made.q, none, np.zeros((2, 2, 1), np.int32)),
            call(backend, "prefill_attention", made.q, *nothing),
        ]

    with within(10):
        found = states()
    for state in found:
        assert not state.out.any() and np.isneginf(state.lse).all()


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_i11_empty_batches_start_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """triton-ascend#984, slangpy#830, mlx#410: an empty batch launched a grid of size zero, which aborts somewhere."""
    made = testing.make_inputs(4, num_blocks=3, q_len=2, config=EXACT_ROWS)
    started: list[Any] = []
    if backend == "triton":
        from dkv.kernels.triton import _launch

        monkeypatch.setattr(_launch, "recorder", lambda *launch: started.append(launch))
    for batch, length in ((0, 2), (2, 0)):
        q = made.q[:batch, :, :length]
        k, v, k_window, v_window = (x[:batch] for x in (made.k, made.v, made.k_window, made.v_window))
        blocks = made.blocks.map(lambda part, batch=batch: part[:batch])
        chosen = np.zeros((batch, 2, 2), np.int32)
        shape = (batch, made.q.shape[1], length)
        states = [
            call(backend, "exact_attention", q, k_window, v_window),
            call(backend, "lowrank_attention", q, blocks, chosen),
            call(backend, "residual_attention", q, blocks, chosen),
            call(backend, "decode_attention", q, blocks, k_window, v_window, block_indices=chosen),
            call(backend, "prefill_attention", q, k, v),
        ]
        states.append(call(backend, "merge_states", [AttentionState(*states[0])] * 2))
        for state in states:
            assert state.out.shape == (*shape, v.shape[3]) and state.out.dtype == q.dtype
            assert state.lse.shape == shape and state.lse.dtype == np.float32
        if batch == 0:
            assert call(backend, "route_blocks", q, blocks, top_k=2).shape == (0, 2, 2)
            made_blocks = call(backend, "compress_blocks", k, v, config=made.config)
            assert made_blocks.anchor_k.shape == (0, 3, 2, k.shape[3])
            rebuilt = call(backend, "reconstruct_blocks", made_blocks)
            assert [x.shape for x in rebuilt] == [k.shape, v.shape]
    none = made.blocks.map(lambda part: part[:, :0])
    assert call(backend, "route_blocks", made.q, none, top_k=2).shape == (2, 2, 0)
    assert call(backend, "reconstruct_blocks", none)[0].shape == (2, 2, 0, made.k.shape[3])
    assert not started
