"""What is the MLX backend's own: which kernels run, conversions, files, and the bytes that all backends share."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS, library

import dkv
from dkv import _dispatch, testing
from dkv._dispatch import op_module
from dkv.config import PRESETS
from dkv.types import BlockFormat, CompressedBlocks

mx = pytest.importorskip("mlx.core")
OPS = ("compress", "route", "decode", "merge", "prefill")


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_blocks(a: CompressedBlocks, b: CompressedBlocks) -> None:
    a, b = testing.to_numpy(a), testing.to_numpy(b)
    assert a.format == b.format and [name for name, _ in a.parts()] == [name for name, _ in b.parts()]
    for (name, x), (_, y) in zip(a.parts(), b.parts(), strict=True):
        assert same_bits(x, y), name


@pytest.mark.parametrize("metal", [False, True])
def test_mlx_runs_metal_where_it_is_found_and_the_twin_elsewhere(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("dkv.kernels.mlx._metal"), "available", lambda: metal)
    monkeypatch.setattr(_dispatch, "_metal_is_right", lambda: True)
    assert _dispatch.which_mlx() == ("mlx-metal" if metal else "mlx-twin")
    available = dkv.available_backends()
    assert available["mlx"] is None and available["mlx-twin"] is None and (available["mlx-metal"] is None) == metal
    for op in OPS:
        twin, chosen = op_module("mlx-twin", op), op_module("mlx", op)
        assert chosen is (op_module("mlx-metal", op) if metal else twin)
        assert twin is not op_module("mlx-metal", op)
    inputs = testing.make_inputs(0, library="mlx")
    if not metal:
        with pytest.raises(ImportError, match="backend 'mlx-metal' is not available: Metal was not found"):
            dkv.exact_attention(inputs.q, inputs.k, inputs.v, backend="mlx-metal")
        state = dkv.exact_attention(inputs.q, inputs.k, inputs.v)
        twin = dkv.exact_attention(inputs.q, inputs.k, inputs.v, backend="mlx-twin")
        assert same_bits(np.array(state.out), np.array(twin.out))


def test_conversions_keep_every_bit() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        made = testing.make_inputs(1, dtype=dtype)
        there = testing.to_library(made, "mlx")
        assert str(there.q.dtype) == f"mlx.core.{dtype}"
        back = testing.to_numpy(there)
        assert all(same_bits(a, b) for a, b in zip(made[:5], back[:5], strict=True))
        assert_same_blocks(made.blocks, back.blocks)
    for dtype in (np.float64, np.int64, np.int8, np.uint8, np.bool_):
        for x in (np.arange(6).reshape(2, 3).astype(dtype).T, np.zeros((0, 2), dtype), np.array(1, dtype)):
            assert same_bits(testing.to_numpy(testing.to_library(x, "mlx")), np.ascontiguousarray(x).reshape(x.shape))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_files_pass_between_libraries(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    fmt = BlockFormat(16, 5, 6, factor_bits=16, minmax=True)
    made = testing.make_inputs(2, dtype=dtype, config=fmt)
    counts = np.array([1, 3], np.int32)
    want, path = dataclasses.replace(made.blocks, block_counts=counts), str(tmp_path / "blocks.dkv")
    blocks = testing.to_library(want, "mlx")
    strided = blocks.map(lambda part: part.swapaxes(0, -1) + 0 if part.ndim > 1 else part)
    blocks = strided.map(lambda part: part.swapaxes(0, -1) if part.ndim > 1 else part)
    blocks.save(path)
    for backend in ("torch", "mlx", "mlx-twin"):
        assert_same_blocks(CompressedBlocks.load(path, backend=backend), want)
    testing.to_library(want, "torch").save(path)
    loaded = CompressedBlocks.load(path, backend="mlx")
    Path(path).write_bytes(b"")  # what was loaded is in memory
    assert_same_blocks(loaded, want)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / "blocks.dkv"
    testing.make_inputs(3, library="mlx").blocks.save(str(path))
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 9, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a whole dkv blocks file"):
            CompressedBlocks.load(str(path), backend="mlx")


def test_counted_bytes_are_those_of_the_other_libraries() -> None:
    blocks = testing.make_inputs(4, dtype="bfloat16").blocks
    there = testing.to_library(blocks, "mlx")
    assert (there.nbytes, there.dense_nbytes) == (blocks.nbytes, blocks.dense_nbytes)


def preset_configs() -> dict[str, dkv.DKVConfig]:
    """The presets, those with a ratio as one of the head groups that a profile makes of them."""
    profile = dkv.HeadProfile.load(str(Path(dkv.__file__).parent / "profiles" / "smollm2-135m.json"))
    found = {}
    for name in PRESETS:
        config = dkv.DKVConfig.preset(name)
        if config.splits_heads:
            groups = config.with_profile(profile).head_groups(0, 3)
            config = next(group.config for group in groups if group.config is not None)
        found[name] = config
    return found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_give_the_same_bytes_from_every_library(preset: str, dtype: str) -> None:
    """All but the factors bit by bit; those up to the rounding of their product. Triton codes rows in float32."""
    config = preset_configs()[preset]
    shape = {"batch": 1, "num_q_heads": 2, "num_kv_heads": 2, "head_dim": 64, "head_dim_v": 64, "window": 0}
    made = testing.make_inputs(5, **shape, num_blocks=1, dtype=dtype, config=config)
    weight = np.random.default_rng(6).random((2, 64)).astype(np.float32)
    want = dkv.compress_blocks(made.k, made.v, config=config, channel_weight=weight)
    for backend in [name for name in BACKENDS if name in ("torch", "mlx-twin")]:
        inputs = testing.to_library(made, library(backend))
        got = testing.assert_matches_reference(backend, "compress_blocks", inputs, channel_weight=weight)
        assert got.nbytes == want.nbytes
        for name, part in testing.to_numpy(got).parts():
            if not name.startswith(("u", "basis")):
                assert same_bits(part, getattr(want, name)), name


@pytest.mark.parametrize("rank", [4, 16, 30])
def test_small_singular_values_beside_large_ones(rank: int) -> None:
    """Sizes from 1 down to 1e-6: a Gram matrix in float32 would lose all below 3e-4."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((96, n)))[0] for n in (96, 40))
    rows = (left[:, :40] * np.geomspace(1, 1e-6, 40)) @ right[:40].T
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)  # norms of rows are divided out
    exact = np.linalg.svd(rows, compute_uv=False)
    k = np.concatenate([np.zeros((1, 40)), rows])[None, None].astype(np.float32)
    arrays = testing.to_library([k, np.zeros((1, 1, 97, 4), np.float32)], "mlx")
    blocks = op_module("mlx-twin", "compress").compress_blocks(*arrays, BlockFormat(97, rank, 0, 32, 16), "error", None)
    u, basis = (np.array(x, np.float64) for x in (blocks.u[0, 0], blocks.basis_k[0, 0, 0]))
    error = np.square(k[0, 0] - blocks.u_unit.item() * u @ basis).sum()
    assert error <= 1.001 * np.square(exact[rank:]).sum() + 2.0**-46 * 96


def test_pieces_of_the_workspace_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = testing.make_inputs(7, num_blocks=5, window=40, q_len=7, library="mlx")
    indices = mx.broadcast_to(mx.arange(5), (2, 2, 5))
    config = dataclasses.replace(inputs.config, prefill_block=3)

    def run() -> list[Any]:
        q, k, v, k_window, v_window, blocks, _ = inputs
        compressed = dkv.compress_blocks(k, v, config=config, backend="mlx-twin")
        states = [
            dkv.decode_attention(q, blocks, k_window, v_window, block_indices=indices, backend="mlx-twin"),
            dkv.decode_attention(q, blocks, k_window, v_window, config=config, backend="mlx-twin"),
            dkv.prefill_attention(q, k, v, config=config, backend="mlx-twin"),
        ]
        return testing.to_numpy([compressed, *states])

    whole = run()
    for op in ("compress", "route", "decode", "prefill"):
        monkeypatch.setattr(op_module("mlx-twin", op), "WORKSPACE_BYTES", 1)
    pieces = run()
    assert_same_blocks(pieces[0], whole[0])
    for got, want in zip(pieces[1:], whole[1:], strict=True):
        np.testing.assert_allclose(got.out, want.out, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got.lse, want.lse, rtol=2e-6, atol=2e-6)
