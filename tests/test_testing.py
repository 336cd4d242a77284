"""The comparison that kernels are held to must itself see faults, and its conversions must lose nothing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS, library

import dkv
from dkv import testing
from dkv.reference import storage
from dkv.types import BlockFormat, CompressedBlocks


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_module_runs(backend: str) -> None:
    inputs = testing.make_inputs(0, dtype="float16", config=BlockFormat(16, 4, 5), library=library(backend))
    testing.assert_matches_reference(backend, "decode_attention", inputs)

    def my_kernel(q: Any, blocks: Any, block_indices: Any, *, sm_scale: Any = None, softcap: Any = None) -> Any:
        return dkv.lowrank_attention(q, blocks, block_indices, sm_scale=sm_scale, softcap=softcap)

    state = testing.assert_matches_reference(my_kernel, "lowrank_attention", inputs, softcap=20.0)
    assert state.out.shape == (2, 6, 1, 20)


def test_every_op_has_tolerances_with_reasons() -> None:
    public = {name for name in dkv.__all__ if callable(getattr(dkv, name)) and name[0].islower()}
    assert set(testing.TOLERANCES) == public - {"available_backends"}
    for table in testing.TOLERANCES.values():
        assert {"float32", "float16", "bfloat16"} <= set(table)
        assert all(len(tolerance.reason) > 20 and 0 < tolerance.value < 1 for tolerance in table.values())
    with pytest.raises(ValueError, match="op must be one of"):
        testing.assert_matches_reference("reference", "attention", testing.make_inputs(0))


def test_importing_it_loads_numpy_alone() -> None:
    script = (
        f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}; import dkv.testing\n"
        "loaded = {'torch', 'mlx', 'triton', 'ml_dtypes', 'hypothesis'} & set(sys.modules); sys.exit(bool(loaded))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="bfloat16 in NumPy needs ml_dtypes: pip install ml_dtypes"):
        testing.make_inputs(0, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'float64'"):
        testing.make_inputs(0, dtype="float64")


def spoiled(**parts: Any) -> Any:
    """compress_blocks with some parts changed."""

    def run(k: Any, v: Any, config: Any, **options: Any) -> Any:
        blocks = dkv.compress_blocks(k, v, config=config, **options)
        changed = {name: change(getattr(blocks, name)) for name, change in parts.items()}
        return dataclasses.replace(blocks, **changed)

    return run


def test_a_wrong_compression_is_told_what_is_wrong() -> None:
    inputs = testing.make_inputs(19)
    for parts, message in (
        ({"anchor_k": lambda x: x + np.float32(1e-6)}, "anchor_k must be the exact rows"),
        ({"u_unit": lambda x: 2 * x}, r"row 0, block 0: squared low-rank error .*, allowed are"),
        (
            {"residual_k_scale": lambda x: x * np.float16(1.2)},
            "residual_k of row 0, block 0.*the reference's error of the group",
        ),
        ({"residual_v_min": lambda x: x[..., ::-1]}, "residual_v of row 0, block 0"),
        ({"residual_indices": lambda x: x[..., ::-1]}, "residual_indices must ascend"),
        ({"residual_indices": lambda x: 0 * x + np.arange(1, 7, dtype=np.uint8)}, "a kept row scores .* below"),
        ({"basis_k_scale": lambda x: x.astype(np.float64)}, r"basis_k_scale must be float32 .*, got float64"),
        ({"u_scale": lambda x: None}, "u_scale must be stored"),
        ({"u": lambda x: x + np.int8(1)}, "row 0 of u must be zero"),
    ):
        with pytest.raises(AssertionError, match=message):
            testing.assert_matches_reference(spoiled(**parts), "compress_blocks", inputs)


def test_codes_that_are_not_the_laws_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (8, 6, 4, 3, 2, 2, 1, 0)
    settings = {"num_residuals": 200, "key_bits": widths, "value_bits": 3}
    inputs = testing.make_inputs(21, batch=1, num_blocks=1, config=dkv.DKVConfig(**settings))
    weight = np.random.default_rng(0).uniform(0, 2, (2, 24)).astype(np.float32)
    for options in ({}, {"channel_weight": weight}):
        testing.assert_matches_reference(spoiled(), "compress_blocks", inputs, **options)
    for parts, message in (
        ({"residual_k_order": lambda x: 0 * x}, "residual_k_order must hold every channel once"),
        ({"residual_k_order": lambda x: x[..., ::-1].copy()}, "residual_k_order must descend in importance"),
        ({"residual_k_order": lambda x: None}, "residual_k_order must be stored"),
        ({"residual_k": lambda x: x[..., ::-1].copy()}, "error of residual_k of row 0, block 0"),
        ({"residual_v": lambda x: x ^ np.uint8(1)}, "error of residual_v of row 0, block 0"),
        ({"residual_v_scale": lambda x: x[..., ::-1, :].copy()}, "error of residual_v of row 0, block 0"),
        ({"residual_v_unit": lambda x: 2 * x}, "error of residual_v of row 0, block 0"),
    ):
        with pytest.raises(AssertionError, match=message):
            testing.assert_matches_reference(spoiled(**parts), "compress_blocks", inputs)

    def unweighted(k: Any, v: Any, config: Any, channel_weight: Any) -> Any:
        return dkv.compress_blocks(k, v, config=config)

    with pytest.raises(AssertionError, match="residual_k_order must descend in importance"):
        testing.assert_matches_reference(unweighted, "compress_blocks", inputs, channel_weight=weight)

    def unclipped(k: Any, v: Any, config: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(storage, "CLIPS", dict.fromkeys(range(1, 9), (1,)))
            return dkv.compress_blocks(k, v, config=config)

    with pytest.raises(AssertionError, match="error of residual_k of row 0, block 0"):
        testing.assert_matches_reference(unclipped, "compress_blocks", inputs)

    def coarse(scale: Any) -> Any:
        scale = scale.copy()
        scale[0, 0, 1, 1, 7] *= 1.25
        return scale

    small = inputs._replace(v=inputs.v * np.where(np.arange(20) == 7, np.float32(0.01), np.float32(1)))
    with pytest.raises(AssertionError, match=r": error of residual_v of row 0, block 0\[1, 1, 7\] is off"):
        testing.assert_matches_reference(spoiled(residual_v_scale=coarse), "compress_blocks", small)

    fine = testing.make_inputs(22, batch=1, num_blocks=1, config=dkv.DKVConfig(num_residuals=200, residual_bits=8))
    nudged = spoiled(residual_v_min=lambda x: x * np.float16(1 + 2**-9))
    with pytest.raises(AssertionError, match="total error of residual_v of row 0, block 0"):
        testing.assert_matches_reference(nudged, "compress_blocks", fine)


def test_a_wrong_route_is_told_what_is_wrong() -> None:
    inputs = testing.make_inputs(20, num_blocks=6)

    def answer(indices: list[int]) -> Any:
        return lambda q, blocks, top_k: np.broadcast_to(np.array(indices, np.int32), (2, 2, 3)).copy()

    for indices, message in (
        ([0, 0, 1], "must be 3 ascending"),
        ([1, 0, 2], "must be 3 ascending"),
        ([0, 1, -1], "must be 3 ascending"),
        ([0, 1, 9], "names blocks beyond 6"),
    ):
        with pytest.raises(AssertionError, match=message):
            testing.assert_matches_reference(answer(indices), "route_blocks", inputs, top_k=3)
    failed = 0
    for rest in ((1, 2), (3, 4), (1, 5)):  # three sets, of which one at most is the right one
        try:
            testing.assert_matches_reference(answer([0, *rest]), "route_blocks", inputs, top_k=3)
        except AssertionError as error:
            assert "probabilities differ by" in str(error)
            failed += 1
    assert failed >= 2


def test_a_wrong_kernel_is_told_what_is_wrong() -> None:
    inputs = testing.make_inputs(17)

    def scaled(q: Any, k: Any, v: Any) -> Any:
        out, lse = dkv.exact_attention(q, k, v)
        return out * np.float32(1.001), lse

    with pytest.raises(AssertionError, match=r"exact_attention float32: out.* is off by .*allowed are .*float32 acc"):
        testing.assert_matches_reference(scaled, "exact_attention", inputs)

    def in_place(q: Any, k: Any, v: Any) -> Any:
        state = dkv.exact_attention(q, k, v)
        q *= 2
        return state

    with pytest.raises(AssertionError, match="changed its inputs"):
        testing.assert_matches_reference(in_place, "exact_attention", inputs)
    for result in (np.nan, np.inf):
        with pytest.raises(AssertionError, match="the reference says"):
            lse = np.full(inputs.q.shape[:3], result, np.float32)
            testing.assert_matches_reference(
                lambda q, k, v, lse=lse: dkv.exact_attention(q, k, v)._replace(lse=lse), "exact_attention", inputs
            )


def test_conversions_keep_every_bit() -> None:
    pytest.importorskip("torch")
    for dtype in ("float32", "float16", "bfloat16"):
        made = testing.make_inputs(18, dtype=dtype)
        back = testing.to_numpy(testing.to_library(made, "torch"))
        for a, b in zip(made[:5], back[:5], strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for field in dataclasses.fields(CompressedBlocks):
            a, b = getattr(made.blocks, field.name), getattr(back.blocks, field.name)
            if field.name == "format" or a is None:
                assert a == b
            else:
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
    assert testing.to_library(None, "torch") is None and testing.to_numpy([None]) == [None]
    with pytest.raises(ValueError, match="library must be one of"):
        testing.to_library(np.zeros(1), "cupy")
    with pytest.raises(TypeError, match="NumPy, torch or mlx arrays, got str"):
        testing.to_numpy("x")
