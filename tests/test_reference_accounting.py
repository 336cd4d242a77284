"""Bytes by formula against the bytes of real arrays, and the numbers that are promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from reference_dense import DTYPES, Case, cases, compressed

from dkv.config import DKVConfig
from dkv.reference import accounting
from dkv.types import BlockFormat, CompressedBlocks


@given(cases())
def test_the_formula_counts_every_array(case: Case) -> None:
    """Reported bytes differed from stored bytes (VeloxQuant-MLX#378, #27, kvpress#13)."""
    blocks = case.blocks()
    itemsize = np.dtype(DTYPES[case.dtype]).itemsize
    want = accounting.block_nbytes(case.fmt, case.H, case.D, case.Dv, itemsize)
    got = {name: part.nbytes for name, part in blocks.parts() if part.nbytes}
    count = case.B * case.N
    assert got == {name: count * nbytes for name, nbytes in want.items() if count}
    assert blocks.nbytes == count * sum(want.values())
    assert blocks.dense_nbytes == count * case.fmt.block_size * case.H * (case.D + case.Dv) * itemsize


def real_blocks(fmt: BlockFormat, keep: str = "distinct") -> CompressedBlocks:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1, 2, 256, 128)).astype(np.float16) for _ in "kv")
    return compressed(k, v, fmt, keep)


@pytest.mark.parametrize(("num_residuals", "nbytes", "ratio"), [(128, 182_216, 1.44), (64, 116_680, 2.25)])
def test_the_published_layout_takes_its_published_bytes(num_residuals: int, nbytes: int, ratio: float) -> None:
    config = DKVConfig.paper(num_residuals)
    blocks = real_blocks(config.block_format, config.keep)
    assert accounting.published_nbytes(blocks) == nbytes
    assert blocks.dense_nbytes / nbytes == pytest.approx(ratio, abs=0.005)


def test_the_compact_format_takes_at_most_45_000_bytes_at_64_residuals() -> None:
    blocks = real_blocks(DKVConfig(num_residuals=64).block_format)
    assert blocks.nbytes == 44_888
    assert blocks.dense_nbytes / blocks.nbytes > 5.8


def test_bytes_of_coded_rows_by_hand() -> None:
    """80 channels in eighths of 10; widths 3 = 2 + 1 and so on; 96 values of 5 = 4 + 1; 200 rows are two groups."""
    fmt = BlockFormat(256, 4, 200, key_bits=(8, 6, 6, 3, 3, 3, 1, 0), value_bits=5)
    got = accounting.block_nbytes(fmt, 3, 80, 96, 2)
    key = 10 + (10 + 5) + (8 + 4) + 2  # 10 of 8 bits; 20 of 4 + 2; 30 of 2 + 1; 10 of 1, padded; 10 of none
    value = 48 + 12
    want = {"residual_indices": 200, "residual_k": 3 * 200 * key, "residual_v": 3 * 200 * value}
    want |= {"residual_k_order": 3 * 80, "residual_k_unit": 12, "residual_v_unit": 12}
    want |= {f"residual_{x}_{part}": 3 * 2 * dim * 2 for x, dim in (("k", 80), ("v", 96)) for part in ("scale", "min")}
    assert {name: got[name] for name in want} == want
    assert "residual_k_order" not in accounting.block_nbytes(BlockFormat(key_bits=(3,) * 8), 3, 80, 96, 2)


def test_the_default_takes_a_third() -> None:
    blocks = real_blocks(DKVConfig().block_format)
    assert blocks.nbytes == 87_444
    assert blocks.dense_nbytes / blocks.nbytes == pytest.approx(3.0, abs=0.005)
