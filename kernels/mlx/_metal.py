"""The one place where Metal kernels are built: from the ``.metal`` texts beside this file, each once."""

from __future__ import annotations

import functools
import importlib.resources
import struct
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

MAX_THREADS = 256  # of a threadgroup; register pressure lowers what Metal allows from 1024
CONSTANT_BELOW = 8  # MLX passes smaller arrays in another address space, and so builds the kernel once more

# What builds a kernel; its arguments are those of mx.fast.metal_kernel.
builder: Callable[..., Any] = mx.fast.metal_kernel


def available() -> bool:
    """Whether Metal kernels can run here."""
    return bool(mx.metal.is_available())


def kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source_file: str,
    header_files: Sequence[str] = (),
) -> Callable[..., list[mx.array]]:
    """The kernel of a source text, called like what ``mx.fast.metal_kernel`` returns.

    Parameters
    ----------
    name : str
        Of its own for each source: MLX keeps compiled kernels by name, template and dtypes.
    input_names, output_names : sequence of str
    source_file : str
        Kernel body, a file of this folder.
    header_files : sequence of str
        Device functions, files of this folder, in order.
    """
    return _built(builder, name, tuple(input_names), tuple(output_names), source_file, tuple(header_files))


@functools.cache
def _built(
    build: Callable[..., Any],
    name: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    source_file: str,
    header_files: tuple[str, ...],
) -> Callable[..., list[mx.array]]:
    return build(
        name=f"dkv_{name}",
        input_names=list(input_names),
        output_names=list(output_names),
        source=_located(source_file),
        header="".join(_located(file) for file in header_files),
        ensure_row_contiguous=True,
        **_pinned(),
    )


def _located(file: str) -> str:
    """A text marked with its file, so that what compiles it names file and line."""
    return f'#line 1 "{file}"\n{text(file)}\n'


def text(file: str) -> str:
    """A source text of this folder."""
    return importlib.resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


@functools.cache
def _pinned() -> dict[str, Any]:
    """IEEE arithmetic, by name where MLX has the option; without it, it has no other mode."""
    known = "compile_options" in (mx.fast.metal_kernel.__doc__ or "")
    return {"compile_options": {"math_mode": "safe"}} if known else {}


@functools.lru_cache(maxsize=1024)
def integers(*values: int) -> mx.array:
    """Run-time scalars of a kernel, int32; fewer than 8 arrive in the constant address space, more in device memory."""
    return mx.array(values, dtype=mx.int32)


def float_bits(x: float) -> int:
    """A float32 number among :func:`integers`."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def padded(x: mx.array) -> mx.array:
    """``x``, or its numbers followed by zeros, so that it never is one of the small arrays."""
    if x.size >= CONSTANT_BELOW:
        return x
    return mx.concatenate([x.reshape(-1), mx.zeros(CONSTANT_BELOW - x.size, x.dtype)])


@functools.cache
def absent(dtype: mx.Dtype) -> mx.array:
    """What stands for a part that is not there; never read."""
    return mx.zeros(CONSTANT_BELOW, dtype)
