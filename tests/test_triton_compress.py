"""What is particular to compression by Triton kernels: their float64 codes, their pieces, what is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS
from test_compress import assert_same_bits, compress, compress_numpy

from dkv import testing
from dkv.types import BlockFormat

if "triton" not in BACKENDS:
    pytest.skip("triton kernels do not run here", allow_module_level=True)

import torch

from dkv.kernels.triton import _launch, _lowrank, _quantise
from dkv.kernels.triton import compress as module

MIXED = {"key_bits": (8, 6, 5, 4, 3, 2, 1, 0), "value_bits": 3}


def recorded(monkeypatch: pytest.MonkeyPatch, fmt: BlockFormat, keep: str = "distinct") -> list[str]:
    """Names of the kernels that compression and its inverse launch, from tensors without numbers."""
    names: list[str] = []
    monkeypatch.setattr(_launch, "recorder", lambda kernel, *_: names.append(kernel.fn.__name__))
    k, v = torch.empty(2, 3, 3 * 256, 40, device="meta"), torch.empty(2, 3, 3 * 256, 24, device="meta")
    blocks = compress("triton", k, v, fmt, keep)
    for rows, part in zip((k, v), module.reconstruct_blocks(blocks), strict=True):
        assert part.shape == rows.shape and part.dtype == rows.dtype
    return names


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fields", [MIXED, {"residual_bits": 4}, {"residual_bits": 8, "value_bits": 0}], ids=str)
def test_codes_are_those_of_the_reference_bit_by_bit(dtype: str, fields: dict[str, Any]) -> None:
    """Two groups of rows, some or all of them; the kernels round in float64 as the reference does."""
    for num_residuals in (131, 139):
        fmt = BlockFormat(140, 0, num_residuals, **fields)
        made = testing.make_inputs(
            3, batch=2, num_kv_heads=2, head_dim=19, head_dim_v=11, num_blocks=1, window=0, dtype=dtype, config=fmt
        )
        assert_same_bits(compress_numpy("triton", made.k, made.v, fmt), made.blocks)


@pytest.mark.parametrize("keep", ["distinct", "error"])
def test_pieces_of_the_workspace_do_not_show(keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = BlockFormat(16, 5, 6, **MIXED)
    made = testing.make_inputs(2, batch=2, num_blocks=2, config=fmt)
    weight = np.random.default_rng(0).random((2, 2 * 16)).astype(np.float32)
    whole = compress_numpy("triton", made.k, made.v, fmt, weight=weight, keep=keep)
    for part in (module, _quantise):
        monkeypatch.setattr(part, "WORKSPACE_BYTES", 1)
    assert_same_bits(compress_numpy("triton", made.k, made.v, fmt, weight=weight, keep=keep), whole)


def test_without_factors_nothing_is_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fitted presets have rank 0 and keep every row."""
    coded = ["_row_ranges", "_row_units", "_code_rows", "_pack"]
    rebuilt = ["lowrank_rows", "residual_rows"] * 2
    assert recorded(monkeypatch, BlockFormat(256, 0, 255)) == coded * 2 + rebuilt
    ordered = [coded[0], "_channel_order", *coded[1:]]
    assert recorded(monkeypatch, BlockFormat(256, 0, 255, **MIXED)) == ordered + coded + rebuilt
    assert recorded(monkeypatch, BlockFormat(256, 0, 255, 32, 16)) == rebuilt


def test_the_error_of_the_low_rank_part_is_computed_where_rows_are_chosen_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {keep: recorded(monkeypatch, BlockFormat(256, 8, 64), keep) for keep in ("distinct", "error")}
    assert ["_lowrank_errors" in names[keep] for keep in ("distinct", "error")] == [False, True]
    assert "_select_rows" not in recorded(monkeypatch, BlockFormat(256, 8, 0), "error")


def test_small_singular_values_beside_large_ones() -> None:
    """Sizes from 1 down to 1e-6: a Gram matrix in float32 would lose all below 3e-4."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((96, n)))[0] for n in (96, 40))
    sizes = np.geomspace(1, 1e-6, 40)
    rows = np.zeros((97, 80))
    rows[1:, :40] = (left[:, :40] * sizes) @ right[:40].T
    rows[1:, :40] /= np.linalg.norm(rows[1:, :40], axis=1, keepdims=True)  # norms of rows are divided out
    exact = np.linalg.svd(rows[1:, :40], compute_uv=False)
    k = rows[None, None, :, :40].astype(np.float32)
    v = np.zeros((1, 1, 97, 4), np.float32)
    for rank in (4, 16, 30):
        blocks = compress_numpy("triton", k, v, BlockFormat(97, rank, 0, 32, 16))
        u, basis = (np.asarray(x, np.float64) for x in (blocks.u[0, 0], blocks.basis_k[0, 0, 0]))
        error = np.square(k[0, 0] - float(blocks.u_unit[0, 0]) * u @ basis).sum()
        assert error <= 1.001 * np.square(exact[rank:]).sum() + 2.0**-46 * 96


def test_both_halves_of_a_symmetric_product() -> None:
    """Three tiles a side; the solver reads one half, what stands in for it when it fails reads both."""
    rows = torch.randn(2, 140, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for left, right in ((rows, rows.mT), (rows.mT, rows)):
        got = _lowrank.product(left, right, symmetric=True)
        assert torch.equal(got, got.mT) and torch.allclose(got, left @ right, rtol=0, atol=1e-12)


def test_a_gradient_that_is_asked_for_does_not_hinder() -> None:
    made = testing.make_inputs(11, num_blocks=1, batch=1, config=BlockFormat(16, 5, 6, minmax=True), library="torch")
    got = compress("triton", made.k.clone().requires_grad_(), made.v.clone().requires_grad_(), made.blocks.format)
    want = compress("triton", made.k, made.v, made.blocks.format)
    assert_same_bits(testing.to_numpy(got), testing.to_numpy(want))
