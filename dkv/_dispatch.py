"""Which backend runs an op: the arrays' own library decides, or an explicit name that is used or refused."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import sys
import warnings
from types import ModuleType
from typing import Any

# backend -> (array library it takes, package that holds its ops)
BACKENDS = {
    "reference": ("numpy", "dkv.reference"),
    "torch": ("torch", "dkv.kernels.torch"),
    "triton": ("torch", "dkv.kernels.triton"),
    "mlx": ("mlx", "dkv.kernels.mlx"),  # the Metal kernels where Metal is found, else the twin
    "mlx-metal": ("mlx", "dkv.kernels.mlx"),
    "mlx-twin": ("mlx", "dkv.kernels.mlx.twin"),
}
DEFAULTS = {"numpy": "reference", "torch": "torch", "mlx": "mlx"}
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # drivers of NVIDIA, AMD and WSL


def library_of(array: Any) -> str:
    """Name of the array's library: "numpy", "torch", "mlx", or the root of whatever module its type comes from."""
    return type(array).__module__.partition(".")[0]


def unavailable_reason(backend: str) -> str | None:
    """Why a backend cannot run here; None when it can."""
    library, package = BACKENDS[backend]
    if not _installed(package):
        return f"this version of dkv has no {backend} kernels"
    for needed in (library, "triton") if backend == "triton" else (library,):
        if not _installed(needed):
            return f'{needed} is not installed: pip install "dkv[{backend.partition("-")[0]}]"'
    if backend == "triton" and not _interpreted() and not _gpu_found():
        return "no GPU was found; set TRITON_INTERPRET=1 before Python starts to run its kernels on the CPU, slowly"
    if backend == "mlx-metal" and not _metal_found():
        return "Metal was not found: it needs macOS on Apple silicon"
    return None


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def _gpu_found() -> bool:
    return any(os.path.exists(path) for path in GPU_FILES)


def _metal_found() -> bool:
    """MLX is asked where it is loaded anyway; else the machine's name must do."""
    if not _installed("dkv.kernels.mlx._metal"):
        return False
    if "mlx.core" in sys.modules:
        return bool(importlib.import_module("dkv.kernels.mlx._metal").available())
    return sys.platform == "darwin" and platform.machine() == "arm64"


def which_mlx() -> str:
    """What backend "mlx" runs here: "mlx-metal" or, without Metal or where its kernels compute wrongly, "mlx-twin"."""
    return "mlx-metal" if unavailable_reason("mlx-metal") is None and _metal_is_right() else "mlx-twin"


@functools.cache
def _metal_is_right() -> bool:
    """Whether the kernels, as this machine compiles them, agree with the reference; tried once, on two blocks.

    A warning says what is wrong where they do not.
    """
    from dkv import testing

    inputs = testing.make_inputs(0, num_blocks=2, library="mlx")
    try:
        for op in ("route_blocks", "decode_attention"):
            testing.assert_matches_reference("mlx-metal", op, inputs)
    except (AssertionError, RuntimeError) as error:
        warnings.warn(
            f'the Metal kernels do not agree with the reference here: backend "mlx" runs plain MLX operations: {error}',
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def available_backends() -> dict[str, str | None]:
    """Every backend by name, with None where it can run and the reason where it cannot.

    Imports no array library.
    """
    return {name: unavailable_reason(name) for name in BACKENDS}


def check_backend(backend: str | None) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in BACKENDS):
        raise ValueError(f"backend must be one of {tuple(BACKENDS)} or None, got {backend!r:.200}")


def resolve(backend: str | None, **arrays: Any) -> str:
    """The backend to use for these arguments (None values are ignored).

    Raises
    ------
    TypeError
        When the arrays are of no known library, of different ones, or of another than the named backend takes.
    ValueError
        When the name is unknown.
    ImportError
        When the named backend cannot run here; the message holds the reason.
    """
    check_backend(backend)
    if backend is not None:
        _check_available(backend)
    given = {name: library_of(array) for name, array in arrays.items() if array is not None}
    for name, library in given.items():
        if library not in DEFAULTS:
            raise TypeError(f"{name} must be a NumPy, torch or mlx array, got {type(arrays[name]).__qualname__}")
    if len(set(given.values())) > 1:
        raise TypeError(f"arrays must come from one library, got {given}")
    library = next(iter(given.values()))
    chosen = backend or _default(library, next(array for array in arrays.values() if array is not None))
    if BACKENDS[chosen][0] != library:
        raise TypeError(f"backend {chosen!r} takes {BACKENDS[chosen][0]} arrays, got {library}")
    _check_available(chosen)
    return chosen


def _check_available(backend: str) -> None:
    reason = unavailable_reason(backend)
    if reason is not None:
        raise ImportError(f"backend {backend!r} is not available: {reason}")


def _default(library: str, array: Any) -> str:
    """GPU tensors go to the Triton kernels where Triton is installed."""
    if library == "torch" and array.device.type == "cuda" and unavailable_reason("triton") is None:
        return "triton"
    return DEFAULTS[library]


def op_module(backend: str, op: str) -> ModuleType:
    """The backend's module of that basename."""
    backend = which_mlx() if backend == "mlx" else backend
    return importlib.import_module(f"{BACKENDS[backend][1]}.{op}")
