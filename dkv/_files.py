"""Versioned safetensors files: one clear error for whatever is wrong, and never half a file or half a load."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from dkv._checks import DTYPES, dtype_name
from dkv.types import BlockFormat, CompressedBlocks

VERSIONS = {"blocks": 2, "cache": 4}  # by kind
CACHE_DTYPE = "float64"  # stands for the cache's dtype in a layout: no part is float64
REQUIRED = {"anchor_k", "anchor_v", "u", "u_unit", "basis_k", "residual_k", "residual_v"}


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name in the same folder; what was written there takes the place of ``path``, whole or not at all."""
    folder = os.path.dirname(os.path.abspath(path))
    temporary = os.path.join(folder, f".{uuid.uuid4().hex}.part")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write(path: str | os.PathLike[str], tensors: dict[str, Any], header: dict[str, Any], library: str) -> None:
    """A safetensors file of a kind; ``header`` names it."""
    metadata = {"dkv": json.dumps({"version": VERSIONS[header["kind"]], **header})}
    with replaced(path) as temporary:
        if library == "mlx":  # MLX's own writer knows bfloat16
            import mlx.core

            with open(temporary, "wb") as file:
                mlx.core.save_safetensors(file, tensors, metadata=metadata)
        else:
            _safetensors(library).save_file(tensors, temporary, metadata=metadata)


def read(path: str | os.PathLike[str], kind: str, library: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and header of a file of this kind."""
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file: {os.fspath(path)}")
    framework = {"numpy": "numpy", "torch": "pt", "mlx": "numpy"}[library]
    try:
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata["dkv"])
            _check_header(header, kind, path)
            if library == "mlx":
                return _read_mlx(path), header
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError, RecursionError, OSError) as error:
        raise ValueError(f"{os.fspath(path)} is not a whole dkv {kind} file: {error}") from error


def _read_mlx(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Tensors of a file that safetensors has opened; read now, for MLX would read them when they are first used."""
    import mlx.core

    tensors = mlx.core.load(os.fspath(path), format="safetensors")
    mlx.core.eval(tensors)
    return tensors


def _check_header(header: Any, kind: str, path: Any) -> None:
    if not isinstance(header, dict):
        raise ValueError(f"{os.fspath(path)} is not a dkv {kind} file")
    if header.get("kind") != kind:
        raise ValueError(f"{os.fspath(path)} holds {header.get('kind')!r}, not {kind!r}")
    version = header.get("version")
    if version != VERSIONS[kind]:
        raise ValueError(
            f"version of {os.fspath(path)} is {version!r}, this dkv reads {kind} files of {VERSIONS[kind]}"
        )


def _safetensors(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"safetensors.{library}")
    except ImportError as error:
        raise ImportError('saving and loading need safetensors: pip install "dkv[transformers]"') from error


# compressed blocks


def save_blocks(blocks: CompressedBlocks, path: str | os.PathLike[str]) -> None:
    from dkv._dispatch import library_of

    library = library_of(blocks.anchor_k)
    if library == "torch":
        contiguous = blocks.map(lambda part: part.contiguous())
    else:
        contiguous = blocks if library == "mlx" else blocks.map(lambda part: part.copy(order="C"))
    write(path, dict(contiguous.parts()), {"kind": "blocks", "format": dataclasses.asdict(blocks.format)}, library)


def load_blocks(path: str | os.PathLike[str], backend: str | None = None) -> CompressedBlocks:
    libraries = {None: "numpy", "reference": "numpy", "torch": "torch", "triton": "torch"}
    libraries |= {name: "mlx" for name in ("mlx", "mlx-metal", "mlx-twin")}
    if backend not in libraries:
        raise ValueError(f"backend must be one of {tuple(libraries)}, got {backend!r}")
    tensors, header = read(path, "blocks", libraries[backend])
    return build_blocks(header.get("format"), tensors)


def build_blocks(format_fields: Any, tensors: dict[str, Any]) -> CompressedBlocks:
    """Blocks from named arrays, every shape checked against the format."""
    from dkv.reference.storage import block_layout

    try:
        fmt = BlockFormat(**format_fields)
    except TypeError as error:
        raise ValueError(f"format of the file is not this version's: {error}") from error
    known = {field.name for field in dataclasses.fields(CompressedBlocks)} - {"format"}
    if set(tensors) - known or REQUIRED - set(tensors):
        raise ValueError(f"parts of the file must be among {sorted(known)}, got {sorted(tensors)}")
    if tensors["anchor_k"].ndim != 4 or tensors["anchor_v"].ndim != 4:
        raise ValueError("anchors of the file must have 4 axes")
    blocks = CompressedBlocks(format=fmt, **tensors)
    layout = block_layout(fmt, blocks.num_kv_heads, blocks.head_dim, blocks.head_dim_v, CACHE_DTYPE, CACHE_DTYPE)
    wanted = {name: (blocks.batch_size, blocks.num_blocks, *shape) for name, (shape, _) in layout.items()}
    given = {name: tuple(part.shape) for name, part in blocks.parts() if name != "block_counts"}
    if given != wanted:
        wrong = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
        name = wrong[0]
        raise ValueError(f"{name} of the file must have shape {wanted.get(name)}, got {given.get(name)}")
    cache = dtype_name(blocks.anchor_k)
    if cache not in DTYPES:
        raise ValueError(f"anchor_k of the file must be one of {DTYPES}, got {cache}")
    for name, part in blocks.parts():
        dtype = "int32" if name == "block_counts" else np.dtype(layout[name][1]).name
        if dtype == CACHE_DTYPE:
            dtype = cache
        elif dtype == "float16" and cache == "bfloat16" and name in ("u", "basis_k", "basis_v"):
            dtype = "bfloat16"
        if dtype_name(part) != dtype:
            raise ValueError(f"{name} of the file must be {dtype}, got {dtype_name(part)}")
    _check_positions(blocks)
    return blocks


def _check_positions(blocks: CompressedBlocks) -> None:
    """Counts, residual positions and channels that name what exists."""
    counts = [blocks.num_blocks] * blocks.batch_size
    if blocks.block_counts is not None:
        if tuple(blocks.block_counts.shape) != (blocks.batch_size,):
            raise ValueError(f"block_counts of the file must have shape ({blocks.batch_size},)")
        counts = [int(count) for count in blocks.block_counts]
        if any(not 0 <= count <= blocks.num_blocks for count in counts):
            raise ValueError(f"block_counts of the file must be 0..{blocks.num_blocks}, got {counts}")
    for row, count in enumerate(counts):
        if blocks.residual_indices is not None:
            positions = np.asarray(blocks.residual_indices[row, :count]).astype(np.int64)
            stepped = np.diff(positions, axis=-1, prepend=0)
            if positions.size and (stepped.min() < 1 or positions.max() >= blocks.block_size):
                raise ValueError(f"residual_indices of the file must ascend within 1..{blocks.block_size - 1}")
        if blocks.residual_k_order is not None:
            order = np.sort(np.asarray(blocks.residual_k_order[row, :count]), axis=-1)
            if (order != np.arange(blocks.head_dim)).any():
                raise ValueError(f"residual_k_order of the file must hold each of {blocks.head_dim} channels once")
