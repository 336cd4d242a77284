"""Decode attention against plain softmax attention over the rebuilt rows."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import DTYPES, Case, assert_states_close, attention, cases, compressed, f64, poisoned, rebuild
from strategies import positions

from dkv.reference import compress, decode, merge, prefill, route
from dkv.types import BlockFormat, CompressedBlocks

softcaps = st.sampled_from([None, 2.0])
scales = st.sampled_from([None, 0.31])


def selected_rows(blocks: CompressedBlocks, indices: np.ndarray, Sq: int, want: str) -> np.ndarray:
    """Which of the ``N * S`` rows a half attends, bool ``[B, Hkv, Sq, N * S]``."""
    B, N, H, _ = blocks.anchor_k.shape
    S = blocks.format.block_size
    visible = np.zeros((B, H, Sq, N, S), bool)
    for b, h in np.ndindex(B, H):
        for n in set(indices[b, h].tolist()) - {-1}:
            kept = set(positions(blocks)[b, n].tolist())
            for i in range(S):
                visible[b, h, :, n, i] = want == "all" or (i in kept) == (want == "residual")
    return visible.reshape(B, H, Sq, N * S)


def flat(x: np.ndarray) -> np.ndarray:
    """``[B, N, H, S, D]`` to ``[B, H, N * S, D]``."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3], x.shape[4])


def window_rows(case: Case, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(case.seed + 3)
    shapes = ((case.B, case.H, rows, case.D), (case.B, case.H, rows, case.Dv))
    return rng.standard_normal(shapes[0]).astype(np.float32), rng.standard_normal(shapes[1]).astype(np.float32)


def window_mask(
    lengths: np.ndarray, Sq: int, rows: int, H: int, window: int | None = None, causal: bool = True
) -> np.ndarray:
    """Which rows a query sees, bool ``[B, H, Sq, rows]``, entry by entry."""
    visible = np.zeros((len(lengths), H, Sq, rows), bool)
    for b, i, j in np.ndindex(len(lengths), Sq, rows):
        position = lengths[b] - Sq + i
        visible[b, :, i, j] = (
            j < lengths[b] and (not causal or j <= position) and (window is None or position - j < window)
        )
    return visible


@given(cases(), st.integers(1, 4), softcaps, scales)
def test_both_halves_equal_attention_over_the_rebuilt_rows(
    case: Case, width: int, softcap: float | None, sm_scale: float | None
) -> None:
    blocks, q, indices = case.blocks(), case.queries(), case.indices(width)
    k, v, _ = rebuild(blocks)
    before = {name: part.tobytes() for name, part in blocks.parts()}
    for want, op in (("residual", decode.residual_attention), ("lowrank", decode.lowrank_attention)):
        visible = selected_rows(blocks, indices, case.Sq, want)
        got = op(q, blocks, indices, sm_scale, softcap)
        assert got[0].shape == (case.B, case.H * case.G, case.Sq, case.Dv)
        assert got[1].dtype == np.float32
        assert_states_close(got, attention(q, flat(k), flat(v), visible, sm_scale, softcap))
    assert before == {name: part.tobytes() for name, part in blocks.parts()}


@given(cases(), st.sampled_from([0, 1, 3, 9]), softcaps, scales, st.booleans(), st.sampled_from([None, 1, 2, 5]))
def test_decode_is_attention_over_blocks_and_window(
    case: Case, rows: int, softcap: float | None, sm_scale: float | None, with_sink: bool, window: int | None
) -> None:
    blocks, q, indices = case.blocks(), case.queries(), case.indices(3)
    k, v, _ = rebuild(blocks)
    k_window, v_window = window_rows(case, rows)
    seq_lens = case.rng.integers(0, rows + 1, case.B)
    sink = case.rng.standard_normal(case.H * case.G) if with_sink else None
    mask = window_mask(seq_lens, case.Sq, rows, case.H, window)
    visible = np.concatenate([selected_rows(blocks, indices, case.Sq, "all"), mask], axis=3)
    for b, length in enumerate(seq_lens):
        k_window[b, :, length:] = v_window[b, :, length:] = np.nan
    got = decode.decode_attention(
        q, blocks, k_window, v_window, indices, seq_lens, window, softcap=softcap, sink=sink, sm_scale=sm_scale
    )
    k, v = np.concatenate([flat(k), k_window], axis=2), np.concatenate([flat(v), v_window], axis=2)
    assert_states_close(got, attention(q, k, v, visible, sm_scale, softcap, sink))


@given(cases(), st.sampled_from([0, 1, 4, 11]), st.booleans(), st.booleans(), st.sampled_from([None, 1, 4]), softcaps)
def test_exact_attention_is_plain_softmax(
    case: Case, rows: int, causal: bool, ragged: bool, window: int | None, softcap: float | None
) -> None:
    q = case.queries()
    k, v = window_rows(case, rows)
    seq_lens = case.rng.integers(0, rows + 1, case.B) if ragged else None
    lengths = seq_lens if ragged else np.full(case.B, rows)
    sink = case.rng.standard_normal(case.H * case.G) if case.seed % 2 else None
    for b, length in enumerate(lengths):
        k[b, :, length:], v[b, :, length:] = np.nan, np.inf
    before = k.tobytes(), v.tobytes(), q.tobytes()
    got = decode.exact_attention(q, k, v, causal, seq_lens, window, softcap, sink)
    assert before == (k.tobytes(), v.tobytes(), q.tobytes())
    mask = window_mask(lengths, case.Sq, rows, case.H, window, causal)
    assert_states_close(got, attention(q, k, v, mask, None, softcap, sink))


@pytest.mark.parametrize("factor_bits", [8, 16, 32])
@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257])
def test_full_size_blocks_and_windows(rows: int, factor_bits: int) -> None:
    case = Case(1, 2, 2, 3, 1, 64, 32, BlockFormat(256, 32, 64, factor_bits, 8), "distinct", "float16", rows)
    blocks, q, indices = case.blocks(), case.queries(), np.array([[[0, 1], [1, -1]]], np.int32)
    k_window, v_window = window_rows(case, rows)
    got = decode.decode_attention(q, blocks, k_window, v_window, indices)
    k, v, _ = rebuild(blocks)
    visible = np.concatenate([selected_rows(blocks, indices, 1, "all"), np.ones((1, 2, 1, rows), bool)], axis=3)
    k, v = np.concatenate([flat(k), k_window], axis=2), np.concatenate([flat(v), v_window], axis=2)
    assert_states_close(got, attention(q, k, v, visible))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_residuals", [0, 5, 15])
def test_nothing_lost_equals_dense(num_residuals: int, dtype: str) -> None:
    """Full rank, or every row kept exact, is attention over the original rows."""
    fmt = BlockFormat(16, 128, num_residuals, factor_bits=32, residual_bits=16)
    case = Case(2, 3, 2, 2, 2, 10, 6, fmt, "error", dtype, 4)
    k, v = case.keys_values()
    q, indices = case.queries(), np.tile(np.arange(3, dtype=np.int32), (2, 2, 1))
    k_window, v_window = window_rows(case, 5)
    got = decode.decode_attention(q, case.blocks(), k_window, v_window, indices)
    visible = np.concatenate([np.ones((2, 2, 2, 48), bool), window_mask(np.array([5, 5]), 2, 5, 2)], axis=3)
    k, v = np.concatenate([f64(k), k_window], axis=2), np.concatenate([f64(v), v_window], axis=2)
    assert_states_close(got, attention(q, k, v, visible), rtol=1e-5, atol=1e-5)


@given(cases(min_batch=1))
def test_halves_merge_to_the_whole(case: Case) -> None:
    blocks, q, indices = case.blocks(), case.queries(), case.indices(3)
    k, v = window_rows(case, 4)
    states = [
        decode.lowrank_attention(q, blocks, indices),
        decode.residual_attention(q, blocks, indices),
        decode.exact_attention(q, k, v),
    ]
    got = merge.merge_states([s[0] for s in states], [s[1] for s in states])
    want = decode.decode_attention(q, blocks, k, v, indices)
    assert_states_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_output_is_in_the_dtype_of_the_query(dtype: object) -> None:
    """Mixed dtypes made the second call fail (kvpress#27): inside everything is wide."""
    case = Case(1, 2, 2, 2, 1, 6, 5, BlockFormat(8, 3, 2, 16), "distinct", "float16", 0)
    q, indices = case.queries(dtype), np.array([[[0, 1], [0, -1]]], np.int32)
    k, v = window_rows(case, 3)
    out, lse = decode.decode_attention(q, case.blocks(), k, v.astype(np.float16), indices)
    want = decode.decode_attention(q.astype(np.float64), case.blocks(), k, v.astype(np.float16), indices)
    assert out.dtype == dtype and lse.dtype == np.float32
    np.testing.assert_allclose(f64(out), want[0], rtol=float(ml_dtypes.finfo(dtype).eps))
    np.testing.assert_allclose(lse, want[1], rtol=1e-6)


@given(cases(min_batch=1, min_blocks=2))
def test_what_is_not_selected_is_not_read(case: Case) -> None:
    """Blocks beyond ``block_counts`` and blocks not in the list may hold anything."""
    blocks, q = case.blocks(), case.queries()
    indices = np.full((case.B, case.H, 3), -1, np.int32)
    indices[..., 1] = 0
    want = decode.decode_attention(q, blocks, None, None, indices)
    poison = blocks.map(lambda part: poisoned(part, (slice(None), slice(1, None))))
    unselected = dataclasses.replace(poison, residual_indices=blocks.residual_indices)
    got = decode.decode_attention(q, unselected, None, None, indices)
    counts = np.ones(case.B, np.int32)
    short = dataclasses.replace(poison, block_counts=counts)
    beyond = np.tile(np.array([1, 0, case.N - 1], np.int32), (case.B, case.H, 1))
    got_short = decode.decode_attention(q, short, None, None, beyond)
    for state in (got, got_short):
        assert all(x.tobytes() == y.tobytes() for x, y in zip(state, want, strict=True))
    rows = compress.reconstruct_blocks(short)
    whole = compress.reconstruct_blocks(blocks)
    S = case.fmt.block_size
    for part, part_whole in zip(rows, whole, strict=True):
        assert (part[:, :, :S] == part_whole[:, :, :S]).all() and (f64(part[:, :, S:]) == 0).all()


def test_only_the_anchor_is_low_rank_where_every_row_is_kept() -> None:
    case = Case(1, 2, 2, 2, 1, 6, 5, BlockFormat(8, 3, 7), "distinct", "float32", 0)
    blocks, q, indices = case.blocks(), case.queries(), np.array([[[0, 1], [0, 1]]], np.int32)
    assert blocks.basis_v is None
    spoilt = dataclasses.replace(blocks, u=blocks.u * np.int8(0))
    got, want = decode.lowrank_attention(q, blocks, indices), decode.lowrank_attention(q, spoilt, indices)
    np.testing.assert_array_equal(got[0], want[0])
    anchors_k, anchors_v = (x.swapaxes(1, 2) for x in (blocks.anchor_k, blocks.anchor_v))
    assert_states_close(got, attention(q, anchors_k, anchors_v, np.ones((1, 2, 1, 2), bool)))


def test_a_shift_of_all_logits_moves_only_the_lse() -> None:
    case = Case(1, 2, 1, 2, 1, 6, 5, BlockFormat(8, 128, 2, 32, 16), "error", "float32", 1)
    k, v = case.keys_values()
    q, indices = case.queries(), np.array([[[0, 1]]], np.int32)
    q[..., 0] = 1.0
    shifted = k.copy()
    shifted[..., 0] += 4.0
    want = decode.decode_attention(q, compressed(k, v, case.fmt, "error"), None, None, indices)
    got = decode.decode_attention(q, compressed(shifted, v, case.fmt, "error"), None, None, indices)
    assert_states_close(got, (want[0], want[1] + 4.0 / np.sqrt(6)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_blocks", [0, 2])
def test_nothing_to_attend_is_the_empty_state(num_blocks: int) -> None:
    case = Case(2, num_blocks, 2, 2, 3, 6, 5, BlockFormat(8, 3, 2), "distinct", "float32", 0)
    blocks, q, indices = case.blocks(), case.queries(np.float32), np.full((2, 2, 4), -1, np.int32)
    sink = np.array([0.5, -1.0, 2.0, 0.0])
    for state in (
        decode.lowrank_attention(q, blocks, indices),
        decode.residual_attention(q, blocks, indices),
        decode.decode_attention(q, blocks, None, None, indices),
        decode.decode_attention(q, blocks, *window_rows(case, 0), indices),
        decode.decode_attention(q, blocks, *window_rows(case, 3), indices, seq_lens=np.zeros(2, int)),
    ):
        assert (state[0] == 0).all() and (state[1] == -np.inf).all()
    out, lse = decode.decode_attention(q, blocks, None, None, indices, sink=sink)
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None].astype(np.float32), lse.shape))
    out, lse = decode.exact_attention(q, *window_rows(case, 0), sink=np.full(4, -np.inf))
    assert (out == 0).all() and (lse == -np.inf).all()


def test_no_queries_give_empty_arrays() -> None:
    """Empty batches aborted on some back ends (triton-ascend#984, slangpy#830, mlx#410)."""
    case = Case(2, 3, 2, 2, 0, 6, 5, BlockFormat(8, 3, 2, minmax=True), "distinct", "float32", 0)
    blocks, q, (k, v) = case.blocks(), case.queries(), window_rows(case, 4)
    for router in ("lowrank", "minmax", "residual"):
        indices = route.route_blocks(q, blocks, 2, router)
        assert indices.tolist() == [[[0, 1]] * 2] * 2
        out, lse = decode.decode_attention(q, blocks, k, v, indices)
        assert out.shape == (2, 4, 0, 5) and lse.shape == (2, 4, 0)
    out, lse = prefill.prefill_attention(q, k, v)
    assert out.shape == (2, 4, 0, 5) and lse.shape == (2, 4, 0)


# Faults that users of other projects met.


def plain(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def test_sequences_of_length_zero_are_empty_and_leave_the_others_alone() -> None:
    """A zero-length key set crashed the host or wrote out of bounds (flash-attention#2470, #1155)."""
    q, k, v = plain(4, 4, 2, 1, 256, 64, 64)
    lengths = np.array([0, 5, 256, 0])
    out, lse = decode.exact_attention(q, k, v, seq_lens=lengths)
    for b in (0, 3):
        assert (out[b] == 0).all() and (lse[b] == -np.inf).all()
    for b in (1, 2):
        alone = decode.exact_attention(q[b : b + 1], k[b : b + 1, :, : lengths[b]], v[b : b + 1, :, : lengths[b]])
        np.testing.assert_allclose(out[b], alone[0][0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(lse[b], alone[1][0], rtol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_rows_never_written_have_no_effect(garbage: float) -> None:
    """Weight 0 times NaN is NaN (flash-attention#2374, flashinfer#941, vllm#936)."""
    q, k, v = plain(1, 4, 2, 1, 256, 16, 8)
    k[:, :, 13:], v[:, :, 13:] = 0, 0
    want = decode.exact_attention(q, k, v, seq_lens=np.array([13]))
    k[:, :, 13:], v[:, :, 13:] = garbage, garbage
    got = decode.exact_attention(q, k, v, seq_lens=np.array([13]))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(got, want, strict=True))


def test_query_heads_repeat_key_heads() -> None:
    """Query heads were mapped to key heads by tiling (jax-js#180, quant.cpp#61, aprender#2010)."""
    q, k, v = plain(1, 4, 2, 1, 16, 6, 3)
    v[:, 0], v[:, 1] = 0, 1
    assert decode.exact_attention(q, k, v)[0][0, :, 0, 0].round(6).tolist() == [0, 0, 1, 1]
    blocks = compressed(k, v, BlockFormat(16, 128, 4, 32, 16))
    indices = np.zeros((1, 2, 1), np.int32)
    out, _ = decode.decode_attention(q, blocks, None, None, indices)
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0, 1, 1], atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 16])
def test_every_group_size(group: int) -> None:
    """Group sizes 5, 6, 7 and 16 were missing or wrong (flashinfer#996, mlc-llm#2543, pegainfer#519)."""
    q, k, v = plain(1, 2 * group, 2, 1, 300, 64, 64, group)
    blocks = compressed(k[:, :, :256], v[:, :, :256], BlockFormat(256, 32, 255, residual_bits=16))
    got = decode.decode_attention(q, blocks, k[:, :, 256:], v[:, :, 256:], np.zeros((1, 2, 1), np.int32))
    assert_states_close(got, attention(q, k, v, np.ones((1, 2, 1, 300), bool)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 72), (80, 80), (96, 96), (192, 192), (192, 128), (128, 64)])
def test_head_sizes_that_are_not_powers_of_two(head_dim: int, head_dim_v: int) -> None:
    """Such sizes failed, or padded lanes polluted the dot product (sglang#1281, turboquant-vllm#52)."""
    q, k, v = plain(1, 4, 2, 1, 80, head_dim, head_dim_v)
    wide_q, wide_k, wide_v = (np.full((*x.shape[:3], x.shape[3] + 5), np.nan, np.float32) for x in (q, k, v))
    views = []
    for wide, x in ((wide_q, q), (wide_k, k), (wide_v, v)):
        wide[..., : x.shape[3]] = x
        views.append(wide[..., : x.shape[3]])
    blocks = compressed(views[1][:, :, :64], views[2][:, :, :64], BlockFormat(64, 8, 63, residual_bits=16))
    indices = np.zeros((1, 2, 1), np.int32)
    got = decode.decode_attention(views[0], blocks, views[1][:, :, 64:], views[2][:, :, 64:], indices)
    assert got[0].shape[3] == head_dim_v
    assert_states_close(got, attention(q, k, v, np.ones((1, 2, 1, 80), bool)), rtol=1e-5, atol=1e-5)


def test_all_keys_masked_is_empty_and_not_an_average() -> None:
    """A finite floor averages masked values without a warning (TensorRT-LLM#17477)."""
    q, k, v = plain(1, 2, 1, 1, 9, 4, 4)
    v[:] = 5
    out, lse = decode.exact_attention(q, k, v, seq_lens=np.array([0]))
    assert (out == 0).all() and (lse == -np.inf).all()


def test_the_scale_is_not_rounded_to_the_input_dtype() -> None:
    """The softmax scale was rounded to bfloat16 on one path (mlx#3119)."""
    q = np.zeros((1, 1, 1, 80), ml_dtypes.bfloat16)
    k = np.zeros((1, 1, 2, 80), ml_dtypes.bfloat16)
    q[..., :2] = 1
    k[0, 0, 0, :2] = 2000  # q.k = 4000
    k[0, 0, 1, 0], k[0, 0, 1, 1] = 2000, 1992
    gap = 4000 - float(f64(q)[0, 0, 0] @ f64(k)[0, 0, 1])
    _, lse = decode.exact_attention(q, k, np.ones_like(k))
    assert lse[0, 0, 0] == pytest.approx(4000 / 80**0.5 + np.log1p(np.exp(-gap / 80**0.5)), abs=1e-3)


def test_softcap_bounds_the_scaled_logit() -> None:
    """Logit soft-cap was ignored after a refactor (flashinfer#1193)."""
    q, k = np.full((1, 1, 1, 4), 100.0), np.full((1, 1, 1, 4), 0.5)
    _, lse = decode.exact_attention(q, k, np.ones((1, 1, 1, 2)), softcap=50.0)
    assert lse[0, 0, 0] == pytest.approx(50 * np.tanh(2), abs=1e-4)
    blocks = compressed(k, np.ones((1, 1, 1, 2)), BlockFormat(1, 0, 0))
    _, lse = decode.lowrank_attention(q, blocks, np.zeros((1, 1, 1), np.int32), softcap=50.0)
    assert lse[0, 0, 0] == pytest.approx(48.2014, abs=1e-4)


def test_a_block_listed_twice_counts_once() -> None:
    """Duplicates in the list were counted twice (vllm#56254)."""
    k, v = np.zeros((1, 1, 16, 2), np.float32), np.zeros((1, 1, 16, 1), np.float32)
    v[:, :, 12:] = 1
    for num_residuals in (0, 1, 3):
        blocks = compressed(k, v, BlockFormat(4, 2, num_residuals, 32, 16))
        out, _ = decode.decode_attention(np.ones((1, 1, 1, 2)), blocks, None, None, np.array([[[3, 3, 1]]], np.int32))
        assert out.item() == pytest.approx(0.5)


def test_queries_of_extreme_norm_on_huge_keys_stay_finite() -> None:
    """Huge "masked" keys overflowed to inf and every logit became NaN (kvpress#250)."""
    k, v = (np.full((1, 1, 16, 4), 65504, np.float16) for _ in range(2))
    k[:, :, ::3] *= -1
    for fmt in (BlockFormat(16, 3, 4), BlockFormat(16, 3, 15), BlockFormat(16, 3, 4, 16, 16)):
        for norm in (1e-3, 1e3):
            q = np.full((1, 1, 1, 4), norm, np.float16)
            out, lse = decode.decode_attention(q, compressed(k, v, fmt), None, None, np.zeros((1, 1, 1), np.int32))
            assert np.isfinite(out).all() and np.isfinite(lse).all()
