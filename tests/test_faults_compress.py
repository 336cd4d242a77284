"""Faults that users of other kernels and of SVD routines met in compression. Each names its source."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from strategies import CASE_BACKENDS, call, library, positions

import dkv
from dkv import testing
from dkv._dispatch import op_module
from dkv.types import BlockFormat, CompressedBlocks

MIXED = BlockFormat(64, 0, 63, key_bits=(8, 6, 5, 4, 3, 2, 1, 0), value_bits=3)
SOLVERS = {  # module, function and what it raises where it does not converge
    "reference": ("numpy.linalg", "svd", "LinAlgError"),
    "torch": ("torch.linalg", "eigh", "LinAlgError"),
    "triton": ("torch.linalg", "eigh", "LinAlgError"),
    "mlx-metal": ("mlx.core.linalg", "eigh", "RuntimeError"),
    "mlx-twin": ("mlx.core.linalg", "eigh", "RuntimeError"),
}


def compress(backend: str, k: np.ndarray, v: np.ndarray, fmt: BlockFormat, keep: str = "error") -> CompressedBlocks:
    """Through the backend's own function, for formats that no config stands for."""
    k, v = testing.to_library([k, v], library(backend))
    made = op_module(backend, "compress").compress_blocks(k, v, fmt, keep, None)
    return testing.to_numpy(CompressedBlocks(format=fmt, **made) if isinstance(made, dict) else made)


def rebuilt(backend: str, blocks: CompressedBlocks) -> np.ndarray:
    """``[B, H, N * S, D + Dv]``, float64."""
    return np.concatenate([x.astype(np.float64) for x in call(backend, "reconstruct_blocks", blocks)], axis=-1)


def same_bits(a: CompressedBlocks, b: CompressedBlocks) -> bool:
    return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in zip(a.parts(), b.parts(), strict=True))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_spectrum(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One block of 129 tokens of one head: its joint difference has these 64 singular values and rows of equal norm."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < 128:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    left = hadamard[:, :64] / np.sqrt(128)
    right = np.linalg.qr(np.random.default_rng(1).standard_normal((80, 64)))[0]
    rows = np.zeros((129, 80))
    rows[1:] = left * sizes @ right.T
    k, v = rows[:, :40], rows[:, 40:]
    if np.square(k).sum() > np.square(v).sum():  # a value gain of 1
        k, v = v, k
    return k[None, None].astype(np.float32), v[None, None].astype(np.float32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s01_a_number_that_is_not_finite_is_refused_by_name(backend: str, part: str, bad: float) -> None:
    """numpy#5588, pytorch#28293, #63220, GaLore#26, InfiniGen#3: a hang, NaN factors, or "did not converge"."""
    rows = {"k": noise(1, 1, 256, 12), "v": noise(1, 1, 256, 12)}
    rows[part][0, 0, 7, 3] = bad
    arrays = testing.to_library(list(rows.values()), library(backend))
    start = time.process_time()
    with pytest.raises(ValueError, match="NaN or infinity in batch row 0, block 0"):
        dkv.compress_blocks(*arrays, backend=backend)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("backend", sorted(set(CASE_BACKENDS) & set(SOLVERS)))
def test_s02_a_failing_solver_falls_back(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VeloxQuant-MLX#147, scipy#10032, ITensors.jl#595: the solver fails now and then on ordinary finite data."""
    module, name, error = SOLVERS[backend]
    linalg = pytest.importorskip(module)
    failure = getattr(linalg, error, RuntimeError)
    solve, calls = getattr(linalg, name), []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise failure("no convergence")
        return solve(*arguments, **options)

    fmt = BlockFormat(64, 8, 0, 32, 16)
    k, v = noise(1, 2, 64, 12), noise(1, 2, 64, 10, seed=1)
    usual = rebuilt(backend, compress(backend, k, v, fmt))
    monkeypatch.setattr(linalg, name, failing)
    fallen = rebuilt(backend, compress(backend, k, v, fmt))
    rows = np.concatenate([k, v], axis=-1)
    assert calls and np.square(rows - fallen).sum() <= 1.01 * np.square(rows - usual).sum()


@pytest.mark.parametrize("factor_bits", [8, 16, 32])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s03_equal_rows(backend: str, factor_bits: int) -> None:
    """pytorch#181641: repeated rows made the solver fail."""
    k = np.broadcast_to(np.arange(1, 13, dtype=np.float32), (1, 1, 256, 12)).copy()
    for keep in (0, 100, 255):
        blocks = compress(backend, k, k + 12, BlockFormat(256, 32, keep, factor_bits, 16))
        for got, want in zip(call(backend, "reconstruct_blocks", blocks), (k, k + 12), strict=True):
            assert got.tobytes() == want.tobytes()
        for name, part in blocks.parts():
            assert part.dtype.kind in "iu" or np.isfinite(part).all(), name


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s04_equal_singular_values(backend: str) -> None:
    """numpy#12941: any basis of a degenerate space is right, and so is the error."""
    k, v = with_spectrum(np.ones(64))
    blocks = compress(backend, k, v, BlockFormat(129, 32, 0, 32, 16))
    assert abs(np.square(rebuilt(backend, blocks) - np.concatenate([k, v], axis=-1)).sum() - 32) < 1e-3


@pytest.mark.parametrize("fmt", [BlockFormat(16, 5, 6), BlockFormat(16, 5, 6, 32, 16)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s05_factors_matter_by_their_product_alone(backend: str, fmt: BlockFormat) -> None:
    """pytorch#48436, TransformerLens#330, tensorly#74: signs of singular vectors differ between devices."""
    made = testing.make_inputs(2, config=fmt)
    sign = np.where(np.arange(made.blocks.rank) % 2, -1, 1)
    parts = {"u": made.blocks.u * sign.astype(made.blocks.u.dtype)}
    for name in ("basis_k", "basis_v"):
        parts[name] = getattr(made.blocks, name) * sign[:, None].astype(made.blocks.u.dtype)
    flipped = dataclasses.replace(made.blocks, **parts)
    window = (made.k_window, made.v_window)
    one, other = (call(backend, "decode_attention", made.q, x, *window) for x in (made.blocks, flipped))
    np.testing.assert_allclose(one.out, other.out, atol=1e-6)
    np.testing.assert_allclose(one.lse, other.lse, atol=1e-6)


@pytest.mark.parametrize(("size", "head_dim", "rank"), [(7, 24, 6), (40, 5, 10)])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s06_rank_is_clipped_to_the_block(backend: str, size: int, head_dim: int, rank: int) -> None:
    """pytorch#72909: a rank above the smaller side raised an unreadable error."""
    k, v = noise(1, 1, size, head_dim), noise(1, 1, size, head_dim, seed=1)
    blocks = compress(backend, k, v, BlockFormat(size, 32, 0, 32, 16))
    assert blocks.u.shape == (1, 1, size, rank) and blocks.basis_v.shape == (1, 1, 1, rank, head_dim)
    np.testing.assert_allclose(rebuilt(backend, blocks), np.concatenate([k, v], axis=-1), atol=1e-5)


@pytest.mark.parametrize(("batch", "num_blocks", "size"), [(1, 1, 1), (2, 0, 16), (0, 2, 16), (1, 2, 2)])
@pytest.mark.parametrize("bits", [3, 4, 16])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s07_matrices_without_rows(backend: str, bits: int, batch: int, num_blocks: int, size: int) -> None:
    """pytorch#51109, jax#5331, numpy#11424: a wrong factor shape, or an error from LAPACK."""
    k, v = (noise(batch, 2, num_blocks * size, dim, seed=dim) for dim in (6, 5))
    blocks = compress(backend, k, v, BlockFormat(size, 4, size - 1, 32, bits))
    assert blocks.u.shape == (batch, num_blocks, size, min(4, size - 1)) and blocks.basis_v is None
    got = rebuilt(backend, blocks)
    assert got.shape == (batch, 2, num_blocks * size, 11)
    if bits == 16 or size == 1:
        assert np.array_equal(got, np.concatenate([k, v], axis=-1))
    q = noise(batch, 4, 1, 6)
    indices = np.zeros((batch, 2, 1), np.int32) if num_blocks else np.zeros((batch, 2, 0), np.int32)
    state = call(backend, "decode_attention", q, blocks, block_indices=indices)
    assert np.isfinite(state.out).all() and state.out.shape == (batch, 4, 1, 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s08_half_precision_is_factored_in_wide_floats(backend: str, dtype: str) -> None:
    """numpy#11690, apex#887, nx#1177: half precision was refused by the SVD, or used inside it."""
    made = testing.make_inputs(3, dtype=dtype, config=BlockFormat(64, 6, 0, 32, 16), num_blocks=2)
    wide = [x.astype(np.float32) for x in (made.k, made.v)]
    fmt = made.blocks.format
    half, full = compress(backend, made.k, made.v, fmt), compress(backend, *wide, fmt)
    assert half.anchor_k.dtype == made.k.dtype and half.u.dtype == np.float32
    rows = np.concatenate(wide, axis=-1)
    ulp = 2 * testing.ROUNDING[dtype] * np.abs(rows).max()
    errors = [np.abs(rebuilt(backend, blocks) - rows).max() for blocks in (half, full)]
    assert errors[0] <= errors[1] + 2 * ulp


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("backend", sorted(set(CASE_BACKENDS) & set(SOLVERS)))
def test_s11_the_largest_singular_values_are_kept(
    backend: str, shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch#120912: singular values came back unsorted, and the wrong ones were cut."""
    k, v = with_spectrum(np.arange(64, 0, -1.0))
    if shuffled:
        module, name, _ = SOLVERS[backend]
        linalg = pytest.importorskip(module)
        solve = getattr(linalg, name)

        def unsorted(*arguments: Any, **options: Any) -> Any:
            solved = solve(*arguments, **options)
            if name == "svd":
                order = np.random.default_rng(0).permutation(solved[1].shape[-1])
                return solved[0][..., order], solved[1][..., order], solved[2][..., order, :]
            order = np.random.default_rng(0).permutation(solved[0].shape[-1])
            order = testing.to_library(order, library(backend))
            return solved[0][..., order], solved[1][..., order]

        monkeypatch.setattr(linalg, name, unsorted)
    blocks = compress(backend, k, v, BlockFormat(129, 32, 0, 32, 16))
    assert abs(np.square(rebuilt(backend, blocks) - np.concatenate([k, v], axis=-1)).sum() - 11440) < 0.5


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s13_the_bad_block_is_named(backend: str) -> None:
    """GaLore#26, lightly#1599: one bad element fails a batched call and nobody knows which."""
    k, v = noise(1, 2, 4 * 16, 6), noise(1, 2, 4 * 16, 5)
    k[0, 1, 2 * 16 + 5, 3] = np.nan
    config = dkv.DKVConfig(block_size=16, num_residuals=4)
    with pytest.raises(ValueError, match="batch row 0, block 2 "):
        call(backend, "compress_blocks", k, v, config=config)


@pytest.mark.parametrize("factor_bits", [8, 16, 32])
@pytest.mark.parametrize("num_residuals", [0, 9, 63])
@pytest.mark.parametrize("bits", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s14_values_without_spread_come_back_exactly(
    backend: str, bits: int, num_residuals: int, factor_bits: int
) -> None:
    """VeloxQuant-MLX#162: groups without spread collapsed the scale to an epsilon."""
    k = noise(1, 2, 64, 24)
    v = np.broadcast_to(noise(1, 2, 1, 20, seed=1), (1, 2, 64, 20)).copy()
    fmt = BlockFormat(64, 8, num_residuals, factor_bits, bits)
    blocks = compress(backend, k, v, fmt)
    for name, part in blocks.parts():
        assert part.dtype.kind in "iu" or np.isfinite(part).all(), name
    got_k, got_v = call(backend, "reconstruct_blocks", blocks)
    kept = np.zeros(64, bool)
    kept[positions(blocks).ravel()] = bits < 16  # a coded row is exact to its step alone
    np.testing.assert_array_max_ulp(got_v[:, :, ~kept], v[:, :, ~kept], 1)
    alone = compress(backend, k, np.zeros_like(v), fmt)
    error, without = (np.square(x - k).sum() for x in (got_k, call(backend, "reconstruct_blocks", alone)[0]))
    assert error <= without * (1 + 1e-6) + 1e-9
    constant = compress(backend, np.full_like(k, 3.1), np.full_like(v, -0.7), fmt)
    for got, want in zip(call(backend, "reconstruct_blocks", constant), (3.1, -0.7), strict=True):
        np.testing.assert_allclose(got, np.float32(want), rtol=2.0**-11 if bits < 16 else 0)


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s16_residual_counts_beyond_the_block(backend: str) -> None:
    """native-sparse-attention-pytorch#18: k beyond the size."""
    k, v = noise(1, 2, 256, 12), noise(1, 2, 256, 10, seed=1)
    stored = {}
    for count in (0, 255, 300):
        config = dkv.DKVConfig(num_residuals=count, format="fp32", rank=4)
        blocks = stored[count] = call(backend, "compress_blocks", k, v, config=config)
        kept = positions(blocks).ravel().tolist()
        assert kept == list(range(1, 256))[: len(kept)] and len(kept) == min(count, 255)
    assert same_bits(stored[255], stored[300])
    assert np.array_equal(rebuilt(backend, stored[300]), np.concatenate([k, v], axis=-1))
    assert np.isfinite(rebuilt(backend, stored[0])).all()
    # the anchor counts once
    q, all_equal = np.zeros((1, 2, 1, 12), np.float32), np.zeros((1, 2, 1), np.int32)
    for blocks in stored.values():
        state = call(backend, "decode_attention", q, blocks, block_indices=all_equal)
        np.testing.assert_allclose(state.lse, np.log(256), atol=1e-5)


@pytest.mark.parametrize("fmt", [BlockFormat(64, 8, 16), BlockFormat(64, 8, 16, 32, 16), BlockFormat(64, 8, 63), MIXED])
@pytest.mark.parametrize("keep", ["distinct", "error"])
@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s17_scaling_the_input_scales_the_reconstruction(backend: str, keep: str, fmt: BlockFormat) -> None:
    """scipy#10032: a matrix converged only after it was scaled."""
    k, v = noise(1, 2, 64, 80), noise(1, 2, 64, 72, seed=1)
    want = rebuilt(backend, compress(backend, k, v, fmt, keep))
    for scale in (2.0**-20, 2.0**20):
        scaled = compress(backend, k * np.float32(scale), v * np.float32(scale), fmt, keep)
        got = rebuilt(backend, scaled) / scale
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("backend", CASE_BACKENDS)
def test_s18_nothing_is_random(backend: str) -> None:
    """cupy#10239: an unseeded start vector made results flaky."""
    host = "import metal_host; hosted = metal_host.metal('plain'); hosted.__enter__()\n" if backend == "mlx-metal" else ""
    script = (
        f"{host}import hashlib; from dkv import testing, compress_blocks\n"
        f"made = testing.make_inputs(4, num_blocks=2, library={library(backend)!r})\n"
        f"blocks = compress_blocks(made.k, made.v, config=made.config, backend={backend!r})\n"
        "parts = b''.join(x.tobytes() for _, x in testing.to_numpy(blocks).parts())\n"
        "print(hashlib.sha256(parts).hexdigest())"
    )
    script = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}\n{script}"
    command = [sys.executable, "-c", script]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) > 32
    states = [np.random.get_state()[1].tobytes()]  # noqa: NPY002
    made = testing.make_inputs(4, num_blocks=2)
    first, second = (call(backend, "compress_blocks", made.k, made.v, config=made.config) for _ in range(2))
    assert same_bits(first, second) and states[0] == np.random.get_state()[1].tobytes()  # noqa: NPY002
