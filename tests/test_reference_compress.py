"""Compression against the definition: optimal error, exact rows, bounded quantisation, finite storage."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_dense import DTYPES, Case, cases, compressed, f64, rebuild
from strategies import positions

from dkv.reference import compress, decode, storage
from dkv.types import BlockFormat

EXACT = {"factor_bits": 32, "residual_bits": 16}


def random_block(
    seed: int, H: int, S: int, D: int, Dv: int, dtype: object = np.float32
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, H, S, D)).astype(dtype), rng.standard_normal((1, H, S, Dv)).astype(dtype)


def joint_rows(k: np.ndarray, v: np.ndarray, keys_only: bool = False) -> tuple[np.ndarray, float]:
    """Joint rows ``[S, W]`` of one block ``[H, S, D]``, row by row, and the value gain."""
    k, v = f64(k), f64(v)
    dk = np.stack([(k[:, i] - k[:, 0]).ravel() for i in range(k.shape[1])])
    dv = np.stack([(v[:, i] - v[:, 0]).ravel() for i in range(v.shape[1])])
    if keys_only:
        return dk, 1.0
    energy_k, energy_v = (dk**2).sum(), (dv**2).sum()
    gain = min(max((energy_k / energy_v) ** 0.5, 1.0), 1e4) if min(energy_k, energy_v) >= 1e-12 else 1.0
    return np.hstack([dk, gain * dv]), gain


@given(cases())
def test_parts_have_their_documented_shapes_and_are_finite(case: Case) -> None:
    k, v = case.keys_values()
    before = k.copy(), v.copy()
    blocks = compressed(k, v, case.fmt, case.keep)
    assert (before[0] == k).all() and (before[1] == v).all()
    B, N, H, D, Dv, S, R = case.B, case.N, case.H, case.D, case.Dv, case.fmt.block_size, case.fmt.num_residuals
    every_row = R == S - 1
    r = min(case.fmt.rank, S - 1, H * D if every_row else H * (D + Dv))
    cache = np.dtype(DTYPES[case.dtype])
    factor = {8: np.dtype(np.int8), 16: cache if cache.name == "bfloat16" else np.dtype(np.float16)}
    factor_dtype = factor.get(case.fmt.factor_bits, np.dtype(np.float32))
    want = {
        "anchor_k": ((H, D), cache),
        "anchor_v": ((H, Dv), cache),
        "k_min": ((H, D), cache),
        "k_max": ((H, D), cache),
    }
    want |= {"u": ((S, r), factor_dtype), "u_unit": ((), np.float32), "basis_k": ((H, r, D), factor_dtype)}
    if not every_row:
        want["residual_indices"] = ((R,), np.uint8)
        want |= {"basis_v": ((H, r, Dv), factor_dtype), "v_gain": ((), np.float32)}
    if case.fmt.factor_bits == 8:
        want["basis_k_scale"] = ((r,), np.float32)
        if r:
            want["u_scale"] = ((S,), np.float16)
        if not every_row:
            want["basis_v_scale"] = ((r,), np.float32)
    parts = dict(blocks.parts())
    if case.fmt.residual_bits == 16:
        want |= {"residual_k": ((H, R, D), cache), "residual_v": ((H, R, Dv), cache)}
    else:  # rows of codes: test_reference_rows.py counts their bytes
        want |= {name: ((H, R, parts[name].shape[4]), np.uint8) for name in ("residual_k", "residual_v")}
        for name in ("scale", "min"):
            want[f"residual_k_{name}"] = ((H, (R + 127) // 128, D), np.float16)
            want[f"residual_v_{name}"] = ((H, (R + 127) // 128, Dv), np.float16)
        want |= {"residual_k_unit": ((H,), np.float32), "residual_v_unit": ((H,), np.float32)}
        if len(set(case.fmt.key_bits or ())) > 1:
            want["residual_k_order"] = ((H, D), np.uint8)
    assert set(parts) == set(want)
    for name, (shape, dtype) in want.items():
        assert parts[name].shape == (B, N, *shape), name
        assert parts[name].dtype == dtype, name
        assert np.isfinite(f64(parts[name])).all(), name
    assert (f64(blocks.u)[:, :, 0] == 0).all()
    kept = positions(blocks)
    assert kept.shape == (B, N, R) and (np.diff(kept, axis=2) > 0).all() and (kept > 0).all() and (kept < S).all()


@given(cases())
def test_reconstruction_is_the_row_by_row_decoding(case: Case) -> None:
    blocks = case.blocks()
    k, v, _ = rebuild(blocks)
    got = compress.reconstruct_blocks(blocks)
    for rows, want, dim in ((got[0], k, case.D), (got[1], v, case.Dv)):
        want = want.transpose(0, 2, 1, 3, 4).reshape(case.B, case.H, case.N * case.fmt.block_size, dim)
        assert rows.shape == want.shape
        assert rows.dtype == DTYPES[case.dtype]
        eps = float(ml_dtypes.finfo(rows.dtype).eps)
        np.testing.assert_allclose(f64(rows), want, rtol=eps, atol=1e-6)


@given(cases(min_batch=1, min_blocks=1))
def test_truncation_error_is_that_of_the_optimal_svd(case: Case) -> None:
    fmt = BlockFormat(case.fmt.block_size, case.fmt.rank, case.fmt.num_residuals, **EXACT)
    k, v = (x.astype(np.float32) for x in case.keys_values())
    blocks = compressed(k, v, fmt, case.keep)
    u, basis_k, basis_v = storage.lowrank_factors(blocks)
    S = fmt.block_size
    for b, n in np.ndindex(case.B, case.N):
        rows = slice(n * S, (n + 1) * S)
        x, gain = joint_rows(k[b, :, rows], v[b, :, rows], fmt.keeps_every_row)
        halves = [basis_k[b, n]] if basis_v is None else [basis_k[b, n], gain * basis_v[b, n]]
        basis = np.hstack([half.swapaxes(0, 1).reshape(blocks.rank, half.shape[0] * half.shape[2]) for half in halves])
        norm = np.maximum(np.linalg.norm(x, axis=1), 1e-5)[:, None]
        error = (((x - u[b, n] @ basis) / norm) ** 2).sum()
        tail = np.linalg.eigvalsh((x / norm) @ (x / norm).T)[::-1][blocks.rank :].clip(0).sum()
        np.testing.assert_allclose(error, tail, rtol=1e-4, atol=1e-9)


@given(cases(min_batch=1, min_blocks=1), st.booleans())
def test_kept_rows_have_the_highest_scores(case: Case, weighted: bool) -> None:
    S, R = case.fmt.block_size, case.fmt.num_residuals
    k, v = case.keys_values()
    weight = case.rng.uniform(0, 2, (case.B, case.N * S)) if weighted else None
    blocks = compressed(k, v, case.fmt, case.keep, weight)
    for b, n in np.ndindex(case.B, case.N):
        rows = slice(n * S, (n + 1) * S)
        block_v = f64(v[b, :, rows])
        score = np.zeros(S)
        if case.keep == "distinct":
            for h in range(case.H):
                mean = sum(block_v[h]) / S
                norms = np.array([np.sqrt(row @ row) for row in block_v[h]]) * np.sqrt(mean @ mean)
                score += (1 - block_v[h] @ mean / norms) / case.H
        else:
            x, _ = joint_rows(k[b, :, rows], v[b, :, rows])
            norm = np.maximum(np.linalg.norm(x, axis=1), 1e-5)[:, None]
            left, sizes, right = np.linalg.svd(x / norm, full_matrices=False)
            score = ((x - norm * (left * sizes)[:, : blocks.rank] @ right[: blocks.rank]) ** 2).sum(axis=1)
        if weight is not None:
            score = score * weight[b, rows]
        kept = positions(blocks)[b, n]
        others = np.setdiff1d(np.arange(1, S), kept)
        assert len(kept) == R
        if len(kept) and len(others):
            assert score[kept].min() >= score[others].max() - 1e-9


def test_equal_scores_keep_the_earliest_rows() -> None:
    v = np.zeros((1, 1, 8, 2), np.float32)
    k = np.random.default_rng(0).standard_normal((1, 1, 8, 3)).astype(np.float32)
    blocks = compressed(k, v, BlockFormat(8, 2, 3))
    assert blocks.residual_indices.tolist() == [[[1, 2, 3]]]


def test_a_zero_value_counts_as_orthogonal() -> None:
    rng = np.random.default_rng(1)
    k = rng.standard_normal((1, 2, 16, 3)).astype(np.float32)
    v = (1 + 0.1 * rng.standard_normal((1, 2, 16, 4))).astype(np.float32)
    v[0, :, 11] = 0
    assert compressed(k, v, BlockFormat(16, 2, 1)).residual_indices.tolist() == [[[11]]]


def test_token_weight_zero_keeps_a_row_out_and_a_large_one_in() -> None:
    k, v = random_block(3, 2, 16, 6, 5)
    weight = np.ones((1, 16))
    weight[0, [4, 9]] = 1e6
    weight[0, 7] = 0
    blocks = compressed(k, v, BlockFormat(16, 2, 14), token_weight=weight)
    assert {4, 9} <= set(blocks.residual_indices[0, 0].tolist())
    assert 7 not in blocks.residual_indices
    few = compressed(k, v, BlockFormat(16, 2, 2), token_weight=weight)
    assert few.residual_indices.tolist() == [[[4, 9]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 16, 256])
def test_full_rank_reconstructs_every_row(size: int, dtype: str) -> None:
    k, v = random_block(1, 2, size, 5, 3, DTYPES[dtype])
    blocks = compressed(k, v, BlockFormat(size, 128, 0, **EXACT))
    for got, want in zip(compress.reconstruct_blocks(blocks), (k, v), strict=True):
        eps = float(ml_dtypes.finfo(want.dtype).eps)
        np.testing.assert_allclose(f64(got), f64(want), rtol=eps, atol=1e-5)


def test_int8_factors_stay_within_half_a_step() -> None:
    k, v = random_block(5, 3, 64, 10, 6)
    exact = compressed(k, v, BlockFormat(64, 8, 20, **EXACT))
    coded = compressed(k, v, BlockFormat(64, 8, 20, 8, 16))
    for want, got, axes in (
        (storage.lowrank_factors(exact)[0], storage.lowrank_factors(coded)[0], 3),
        (storage.lowrank_factors(exact)[1], storage.lowrank_factors(coded)[1], (2, 4)),
        (storage.lowrank_factors(exact)[2], storage.lowrank_factors(coded)[2], (2, 4)),
    ):
        largest = abs(want).max(axis=axes, keepdims=True)
        assert (abs(got - want) <= largest / 127 * 0.5 + largest * 2.0**-10).all()


def test_a_constant_channel_bias_costs_no_precision() -> None:
    k, v = random_block(6, 1, 64, 8, 8)
    bias = np.array([1000.0, -512.0, 0, 0, 64.0, 0, 3.0, 0], np.float32)
    plain = compressed(np.round(k, 2), v, BlockFormat(64, 4, 63))
    biased = compressed(np.round(k, 2) + bias, v, BlockFormat(64, 4, 63))
    error = abs(storage.residual_rows(plain)[0] - np.round(k, 2)[:, None, :, 1:]).max()
    error_biased = abs(storage.residual_rows(biased)[0] - (np.round(k, 2) + bias)[:, None, :, 1:]).max()
    assert error_biased <= 1.01 * error


@given(st.floats(0, 1e300))
def test_power_of_two_is_the_smallest_that_covers(x: float) -> None:
    unit = float(storage.power_of_two(np.asarray(x)))
    assert np.float32(unit) == unit and unit >= 2.0**-126
    if x == 0:
        assert unit == 1
    elif 2.0**-126 < x <= 2.0**127:
        assert unit / 2 < x <= unit


def test_a_power_of_two_covers_itself() -> None:
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(storage.power_of_two(2.0**exponents), 2.0**exponents)
    above = np.nextafter(2.0 ** exponents[:-1], np.inf)
    np.testing.assert_array_equal(storage.power_of_two(above), 2.0 ** (exponents[:-1] + 1))
    assert storage.power_of_two(np.asarray(8.0), 14) == 2.0**-11


@given(cases(min_batch=1, min_blocks=1))
def test_blocks_are_compressed_on_their_own(case: Case) -> None:
    k, v = case.keys_values()
    S = case.fmt.block_size
    whole = compressed(k, v, case.fmt, case.keep)
    alone = compressed(k[-1:, :, -S:], v[-1:, :, -S:], case.fmt, case.keep)
    for name, part in alone.parts():
        assert getattr(whole, name)[-1:, -1:].tobytes() == part.tobytes(), name


def test_min_and_max_are_those_of_the_block() -> None:
    k, v = random_block(8, 2, 32, 6, 4, np.float16)
    blocks = compressed(k, v, BlockFormat(16, 2, 3, minmax=True))
    for n in range(2):
        assert (blocks.k_min[0, n] == k[0, :, 16 * n : 16 * n + 16].min(axis=1)).all()
        assert (blocks.k_max[0, n] == k[0, :, 16 * n : 16 * n + 16].max(axis=1)).all()


def test_non_contiguous_inputs_give_the_same_bytes() -> None:
    k, v = random_block(9, 2, 32, 6, 4)
    view_k = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    view_v = np.repeat(v, 2, axis=3)[..., ::2]
    want, got = compressed(k, v, BlockFormat(16, 3, 4)), compressed(view_k, view_v, BlockFormat(16, 3, 4))
    assert all(getattr(got, name).tobytes() == part.tobytes() for name, part in want.parts())


# Faults that users of other projects met.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input_is_refused_by_name(bad: float) -> None:
    """NaN surfaced as a hang or a bare solver error (numpy#5588, pytorch#28293, GaLore#26, lightly#1599)."""
    k, v = random_block(0, 2, 4 * 256, 8, 8)
    k[0, 1, 2 * 256 + 7, 3] = bad
    with pytest.raises(ValueError, match=r"batch row 0, block 2: non-finite"):
        compressed(k, v, BlockFormat())
    k, v = random_block(0, 2, 16, 8, 8)
    v[0, 0, 9, 1] = bad
    with pytest.raises(ValueError, match=r"batch row 0, block 1: non-finite"):
        compressed(k, v, BlockFormat(8, 2, 2))


def test_a_failing_svd_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide and conquer fails now and then on ordinary data (VeloxQuant-MLX#147, scipy#10032, ITensors.jl#595)."""
    k, v = random_block(1, 2, 64, 12, 9)
    fmt = BlockFormat(64, 10, 0, **EXACT)
    want = compress.reconstruct_blocks(compressed(k, v, fmt))

    def fail(*args: object, **kwargs: object) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fail)
    got = compress.reconstruct_blocks(compressed(k, v, fmt))
    for rows, optimal, true in zip(got, want, (k, v), strict=True):
        assert ((rows - true) ** 2).sum() <= 1.01 * ((optimal - true) ** 2).sum()
        np.testing.assert_allclose(rows, optimal, atol=1e-5)
    monkeypatch.setattr(np.linalg, "eigh", fail)
    with pytest.raises(ValueError, match=r"batch row 0, block 0: SVD did not converge"):
        compressed(k, v, fmt)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_equal_rows_reconstruct_bit_exactly(bits: int) -> None:
    """Repeated equal rows make a solver fail (pytorch#181641)."""
    row = np.arange(1, 9, dtype=np.float32)
    k, v = np.tile(row, (1, 2, 256, 1)), np.tile(row + 0.3, (1, 2, 256, 1))
    blocks = compressed(k, v, BlockFormat(256, 32, 64, bits, 16))
    got = compress.reconstruct_blocks(blocks)
    assert (got[0] == k).all() and (got[1] == v).all()
    assert all(np.isfinite(f64(part)).all() for _, part in blocks.parts())


def test_equal_singular_values_leave_the_right_error() -> None:
    """Many equal singular values (numpy#12941): any basis will do, the error is fixed."""
    rng = np.random.default_rng(2)
    x = np.linalg.qr(rng.standard_normal((256, 64)))[0] @ np.linalg.qr(rng.standard_normal((128, 64)))[0].T
    u, basis = compress.truncated_svd(x, 32)
    assert ((x - u @ basis) ** 2).sum() == pytest.approx(32, abs=1e-3)


def test_factor_signs_do_not_matter() -> None:
    """Tests compared factors across devices, and signs differ (pytorch#48436, TransformerLens#330, tensorly#74)."""
    k, v = random_block(3, 2, 64, 8, 6)
    blocks = compressed(k, v, BlockFormat(32, 6, 8))
    flipped = blocks.map(np.copy)
    flipped.u[..., 1::2] *= -1
    flipped.basis_k[..., 1::2, :] *= -1
    flipped.basis_v[..., 1::2, :] *= -1
    q = np.random.default_rng(4).standard_normal((1, 4, 1, 8)).astype(np.float32)
    indices = np.array([[[0, 1], [1, -1]]], np.int32)
    want, got = decode.lowrank_attention(q, blocks, indices), decode.lowrank_attention(q, flipped, indices)
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)


@pytest.mark.parametrize(("size", "head_dim", "rank"), [(7, 16, 6), (256, 3, 18), (256, 1, 6)])
def test_rank_is_clipped_to_what_the_block_allows(size: int, head_dim: int, rank: int) -> None:
    """A rank above the matrix's own asserts with an unreadable message (pytorch#72909)."""
    k, v = random_block(5, 3, size, head_dim, head_dim)
    blocks = compressed(k, v, BlockFormat(size, 32, 0, **EXACT))
    assert blocks.u.shape == (1, 1, size, rank)
    got = compress.reconstruct_blocks(blocks)
    np.testing.assert_allclose(got[0], k, atol=1e-5)
    np.testing.assert_allclose(got[1], v, atol=1e-5)


@pytest.mark.parametrize(("batch", "num_blocks", "size"), [(1, 1, 1), (1, 0, 16), (0, 2, 16), (2, 1, 2)])
def test_empty_matrices_are_no_exception(batch: int, num_blocks: int, size: int) -> None:
    """Zero-row matrices give wrong factor shapes or solver errors (pytorch#51109, jax#5331, numpy#11424)."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((batch, 2, num_blocks * size, 5)).astype(np.float32)
    v = rng.standard_normal((batch, 2, num_blocks * size, 3)).astype(np.float32)
    for num_residuals in (0, size - 1):
        blocks = compressed(k, v, BlockFormat(size, 32, num_residuals, **EXACT))
        assert blocks.u.shape[:3] == (batch, num_blocks, size)
        got = compress.reconstruct_blocks(blocks)
        np.testing.assert_allclose(got[0], k, atol=1e-6)
        np.testing.assert_allclose(got[1], v, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_factored_in_wide_floats(dtype: str) -> None:
    """Half precision unsupported in the SVD, or used in its iteration (numpy#11690, apex#887, nx#1177)."""
    k, v = random_block(6, 2, 64, 16, 16, DTYPES[dtype])
    fmt = BlockFormat(64, 8, 0, factor_bits=16)
    half = compress.reconstruct_blocks(compressed(k, v, fmt))
    wide = compress.reconstruct_blocks(
        compressed(k.astype(np.float32), v.astype(np.float32), BlockFormat(64, 8, 0, **EXACT))
    )
    ulp = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for got, want, true in zip(half, wide, (k, v), strict=True):
        assert got.dtype == DTYPES[dtype]
        error, error_wide = (np.linalg.norm(f64(x) - f64(true)) for x in (got, want))
        assert error <= error_wide + 2 * ulp * np.linalg.norm(f64(true))


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_largest_singular_values_are_kept(shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Singular values came back unsorted on one device (pytorch#120912)."""
    rng = np.random.default_rng(7)
    left, right = (np.linalg.qr(rng.standard_normal((n, 64)))[0] for n in (256, 128))
    x = left * np.arange(64, 0, -1) @ right.T
    svd = np.linalg.svd

    def unsorted(matrix: np.ndarray, full_matrices: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        left, sizes, right = svd(matrix, full_matrices=full_matrices)
        order = np.random.default_rng(0).permutation(len(sizes))
        return left[:, order], sizes[order], right[order]

    if shuffled:
        monkeypatch.setattr(np.linalg, "svd", unsorted)
    u, basis = compress.truncated_svd(x, 32)
    assert ((x - u @ basis) ** 2).sum() == pytest.approx(11440, abs=0.5)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_values_without_spread_come_back_exactly(bits: int) -> None:
    """A group without spread collapses its scale (VeloxQuant-MLX#162)."""
    k, _ = random_block(8, 2, 256, 8, 1)
    v = np.tile(np.random.default_rng(9).standard_normal((1, 2, 1, 6)).astype(np.float32), (1, 1, 256, 1))
    blocks = compressed(k, v, BlockFormat(256, 8, 64, bits, 16))
    got = compress.reconstruct_blocks(blocks)
    np.testing.assert_array_max_ulp(got[1], v, maxulp=1)
    tiny = compressed(k, np.zeros((1, 2, 256, 1), np.float32), BlockFormat(256, 8, 64, bits, 16))
    alone = compress.reconstruct_blocks(tiny)[0]
    assert np.linalg.norm(got[0] - k) <= 1.01 * np.linalg.norm(alone - k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_residuals_than_rows_keep_all_bit_exactly(dtype: str) -> None:
    """A count beyond the size raised (native-sparse-attention-pytorch#18)."""
    k, v = random_block(10, 2, 512, 8, 6, DTYPES[dtype])
    for num_residuals in (300, 255):
        blocks = compressed(k, v, BlockFormat(256, 8, num_residuals, residual_bits=16))
        got = compress.reconstruct_blocks(blocks)
        assert (got[0] == k).all() and (got[1] == v).all()
        assert blocks.residual_indices is None and blocks.num_residuals == 255
        assert blocks.residual_k.shape == (1, 2, 2, 255, 8)
    none = compressed(k, v, BlockFormat(256, 8, 0))
    assert none.residual_k.shape[3] == none.residual_indices.shape[2] == 0


@pytest.mark.parametrize("fmt", [BlockFormat(256, 8, 64), BlockFormat(256, 8, 64, **EXACT), BlockFormat()])
def test_scaling_the_input_scales_the_reconstruction(fmt: BlockFormat) -> None:
    """The same matrix converged only after scaling (scipy#10032)."""
    k, v = random_block(11, 2, 256, 64, 32)
    want = compress.reconstruct_blocks(compressed(k, v, fmt))
    for factor in (2.0**-20, 2.0**20):
        got = compress.reconstruct_blocks(compressed(k * np.float32(factor), v * np.float32(factor), fmt))
        for rows, rows_want in zip(got, want, strict=True):
            np.testing.assert_allclose(rows / factor, rows_want, rtol=1e-6, atol=1e-6 * abs(rows_want).max())


def test_compression_is_repeatable_and_leaves_the_global_generator_alone() -> None:
    """An unseeded start vector makes results flaky (cupy#10239)."""
    k, v = random_block(12, 2, 256, 16, 16)
    np.random.seed(5)  # noqa: NPY002  the global state is what is tested
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = compressed(k, v, BlockFormat()), compressed(k, v, BlockFormat())
    assert (state == np.random.get_state()[1]).all()  # noqa: NPY002
    assert all(getattr(second, name).tobytes() == part.tobytes() for name, part in first.parts())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [(8, 4), (8, 1), (16, 16), (32, 5)])
@pytest.mark.parametrize("magnitude", ["largest", "smallest"])
def test_every_stored_number_is_finite_at_the_ends_of_the_dtype(
    dtype: str, bits: tuple[int, int], magnitude: str
) -> None:
    """Huge "masked" keys overflowed to inf and the model printed one token for ever (kvpress#250)."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    size = float(info.max if magnitude == "largest" else info.smallest_subnormal)
    sign = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], (2, 1, 2, 64, 8))
    k, v = (size * sign).astype(DTYPES[dtype])
    for num_residuals in (0, 20, 63):
        with np.errstate(over="raise", invalid="raise"):
            blocks = compressed(k, v, BlockFormat(64, 4, num_residuals, *bits, minmax=True))
        for name, part in blocks.parts():
            assert np.isfinite(f64(part)).all(), name
        for rows in compress.reconstruct_blocks(blocks):
            assert np.isfinite(f64(rows)).all()
