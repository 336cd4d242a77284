"""Faults that users of other kernels met when kernels were compiled, started or registered. Each names its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import BACKENDS

import dkv
from dkv import _dispatch, testing
from dkv._dispatch import op_module
from dkv.types import AttentionState, BlockFormat

ROOT = Path(__file__).resolve().parent.parent
SMALLEST_DOT = 16  # rows and columns that tl.dot takes on every target


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``bench.launches`` of the checkout, whose kernels are cut as for a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # last: the checkout's own dkv would lack its kernels
    for module in ("decode", "route", "_launch"):
        monkeypatch.setattr(op_module("triton", module), "INTERPRETED", False, raising=False)
    return pytest.importorskip("bench.launches")


def test_i05_no_dot_is_smaller_than_compilers_take(launches: Any) -> None:
    """triton#10141, #5504, #4197: dots of a few rows run in the interpreter and do not compile."""
    names = ("BLOCK_M", "TILE", "WIDTH", "WIDTH_V", "RANKS", "SLOTS_WIDTH", "KEPTS")
    seen: set[str] = set()
    for index, (dim, rank) in enumerate((dim, rank) for dim in (64, 80, 96, 128) for rank in (8, 16, 32)):
        for group in range(1, 9) if index % 3 == 0 else (1, 8):
            fmt = BlockFormat(rank=rank, num_residuals=64 if index % 2 else 255)
            geometry = launches.Geometry(group=group, head_dim=dim, format=fmt, num_blocks=4)
            for launch in launches.decode_step(geometry):
                for name in names:
                    size = launch.options.get(name)
                    assert size is None or size == 0 or size >= SMALLEST_DOT, f"{launch.name} {name} {geometry}"
                    seen |= {name} if size else set()
    assert {"BLOCK_M", "TILE", "WIDTH", "WIDTH_V", "RANKS"} <= seen


def test_i07_interpreted_kernels_are_not_compiled_in_the_same_process() -> None:
    """triton#8735: the interpreter patches the language and does not undo it, and later compilations break."""
    if "triton" not in BACKENDS:
        pytest.skip("no interpreted kernels here")
    script = f"""
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch, dkv
rows = torch.ones(1, 1, 3, 4)
print(dkv.exact_attention(rows, rows, rows, backend="triton").lse.shape)
sys.path.append({str(ROOT)!r})
try:
    from bench import aot
    aot.main(["--json", os.devnull, "--quick", "--ops", "merge_states", "--targets", "sm_90", "--geometries", "1"])
except RuntimeError as error:
    print(error)
"""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {[x for x in sys.path if x]!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch.Size" in done.stdout and "compile them in a process of their own" in done.stdout


@pytest.mark.parametrize("backend", ["mlx-metal"])
def test_i12_every_element_is_written_by_one_thread(backend: str) -> None:
    """mlx#4534: a grid counted in threads was given groups, and the kernel did a part of the work and looked fast."""
    pytest.importorskip("mlx.core")
    import metal_host

    if metal_host.msl_host.unavailable() is not None:
        pytest.skip(metal_host.msl_host.unavailable())
    rng = np.random.default_rng(0)
    parts = [
        AttentionState(rng.standard_normal((1, 24, 1, 256)).astype(np.float32), np.zeros((1, 24, 1), np.float32))
        for _ in range(2)
    ]
    with metal_host.metal("checked") as host:  # refuses what is not written, and what two threads write
        merged = testing.to_numpy(dkv.merge_states(testing.to_library(parts, "mlx"), backend=backend))
    assert host.report is not None
    np.testing.assert_allclose(merged.out, (parts[0].out + parts[1].out) / 2, atol=1e-6)


def test_i16_metal_that_computes_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx#3797: the same source was right when compiled before, and garbage by a machine's own toolchain."""
    pytest.importorskip("mlx.core")
    import metal_host

    if metal_host.msl_host.unavailable() is not None:
        pytest.skip(metal_host.msl_host.unavailable())
    from dkv.kernels.mlx import _metal

    real = _metal.text
    monkeypatch.setattr(_dispatch, "_metal_is_right", _dispatch._metal_is_right.__wrapped__)
    with metal_host.metal("plain"):
        assert _dispatch.which_mlx() == "mlx-metal"

    def broken(file: str) -> str:
        return real(file).replace("base + metal", "1.0f + base + metal") if file == "merge.metal" else real(file)

    with metal_host.metal("plain", broken), pytest.warns(RuntimeWarning, match="Metal kernels do not agree"):
        assert _dispatch.which_mlx() == "mlx-twin"


def test_i17_no_metal_kernel_is_built_by_an_import() -> None:
    """mlx-lm#387, mlx#3240, mlx-examples#1306: kernels that were built at import crashed machines without Metal."""
    pytest.importorskip("mlx.core")
    script = """
import mlx.core as mx
built = []
mx.fast.metal_kernel = lambda **given: built.append(given["name"])
import dkv
from dkv.kernels.mlx import _metal, compress, decode, merge, prefill, route
import dkv.integrations.mlx_lm
assert not built, built
rows = mx.ones((1, 1, 3, 4))
print(dkv.exact_attention(rows, rows, rows).lse)
try:
    dkv.exact_attention(rows, rows, rows, backend="mlx-metal")
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {[x for x in sys.path if x]!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "array(" in done.stdout
    assert "Metal was not found" in done.stdout or dkv.available_backends()["mlx-metal"] is None
