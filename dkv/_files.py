"""Versioned safetensors files with a checksum: one clear error for whatever is wrong, never half a file or half a load.

The container is read and written here: bytes come straight into arrays of the wanted library, and nothing is allocated
that the file does not hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dkv import _bytes
from dkv._checks import DTYPES, dtype_name
from dkv._json import digest, read_json
from dkv._paths import readable, replaced
from dkv.types import BlockFormat, CompressedBlocks

VERSIONS = {"blocks": 3, "cache": 4}  # by kind
CACHE_DTYPE = "float64"  # stands for the cache's dtype in a layout: no part is float64
REQUIRED = {"anchor_k", "anchor_v", "u", "u_unit", "basis_k", "residual_k", "residual_v"}
MAX_HEADER = 16 << 20  # bytes of JSON; a header with the profile of a large model takes about 3 MB
CHUNK = 1 << 20
CHECKSUM = "sha256"  # of the file with zeros in its place
UNSEALED = "0" * 64
NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U32": "uint32", "I32": "int32", "I64": "int64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
}
SHORT = {name: short for short, name in NAMES.items()}


class Part(NamedTuple):
    """Where an array lies behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """What is wrong with a file, said with its name, however much of the file the reason quotes."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {str(error):.1000}") from error


# writing


def write(path: str | os.PathLike[str], tensors: dict[str, Any], header: dict[str, Any]) -> None:
    """A file of the kind that ``header`` names, with arrays of any library."""
    text = json.dumps({"version": VERSIONS[header["kind"]], **header}, allow_nan=False)
    entries: dict[str, Any] = {"__metadata__": {"dkv": text, CHECKSUM: UNSEALED}}
    start = 0
    ordered = sorted(tensors, key=lambda name: (-_bytes.itemsize(dtype_name(tensors[name])), name))  # keeps alignment
    for name in ordered:
        part, dtype = tensors[name], dtype_name(tensors[name])
        stop = start + math.prod(part.shape) * _bytes.itemsize(dtype)
        entries[name] = {"dtype": SHORT[dtype], "shape": list(part.shape), "data_offsets": [start, stop]}
        start = stop
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with replaced(path) as temporary:
        with open(temporary, "xb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in ordered:
                file.write(_bytes.view(tensors[name]).data)
        seal(temporary)


def seal(name: str, key: str = CHECKSUM) -> None:
    """Write the checksum of a file whose metadata holds zeros for it under ``key``."""
    with open(name, "rb+") as file:
        head, size = _head(file)
        zeros = re.search(rf'{re.escape(key)}"\s*:\s*"({UNSEALED})"'.encode(), head)
        assert zeros is not None
        found = _digest(read_json(head), _chunks(file, size), key)
        file.seek(8 + zeros.start(1))
        file.write(found.encode())


def check_sealed(path: str | os.PathLike[str], what: str, key: str = CHECKSUM) -> dict[str, str]:
    """The metadata of a sealed file, every byte of which is as it was sealed."""
    name = readable(path)
    with named(f"{name} is not a whole {what}"), open(name, "rb") as file:
        head, size = _head(file)
        entries = read_json(head)
        _layout(entries, size)
        _check_memory(size)
        _check_digest(entries, _digest(entries, _chunks(file, size), key), key)
        metadata: dict[str, str] = entries["__metadata__"]
        return metadata


# reading


def read(path: str | os.PathLike[str], kind: str, library: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a library, and the header, of a file of this kind."""
    name = readable(path)
    with named(f"{name} is not a whole dkv {kind} file"), open(name, "rb") as file:
        head, size = _head(file)
        entries = read_json(head)
        layout = _layout(entries, size)
        header = _header(entries, kind)
        _check_memory(size)
        data = {}
        for part, (dtype, shape, start, stop) in layout.items():
            data[part] = (dtype, shape, _filled(file, stop - start))
        _check_digest(entries, _digest(entries, (each for _, _, each in data.values())))
        return {part: _bytes.array(*each, library) for part, each in data.items()}, header


def _head(file: BinaryIO) -> tuple[bytes, int]:
    """The header's bytes, and how many bytes follow it."""
    whole = os.fstat(file.fileno()).st_size
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > whole - 8:
        raise ValueError(f"{whole:,} bytes do not hold the header that they announce")
    if length > MAX_HEADER:
        raise ValueError(f"its header of {length:,} bytes is larger than one can be ({MAX_HEADER:,})")
    head = file.read(length)
    if len(head) < length:
        raise ValueError("its header is cut short")
    return head, whole - 8 - length


def _layout(entries: dict[str, Any], size: int) -> dict[str, Part]:
    """Every array by name, in the order in which they fill the bytes behind the header."""
    metadata = entries.setdefault("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no mapping of strings")
    parts = {name: _part(name, entry) for name, entry in entries.items() if name != "__metadata__"}
    ordered = dict(sorted(parts.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, part in ordered.items():
        if part.start != end:
            raise ValueError(f"{name!r:.60} begins at byte {part.start}, not at {end}")
        end = part.stop
    if end != size:
        raise ValueError(f"its arrays take {end:,} bytes, it holds {size:,}")
    return ordered


def _part(name: str, entry: Any) -> Part:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.60} must have dtype, shape and data_offsets, got {entry!r:.100}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise ValueError(f"dtype of {name!r:.60} must be one of {', '.join(NAMES)}, got {dtype!r:.60}")
    for what, values, most in (("shape", shape, 8), ("data_offsets", offsets, 2)):
        whole = isinstance(values, list) and len(values) <= most and all(type(x) is int and x >= 0 for x in values)
        if not whole:
            raise ValueError(f"{what} of {name!r:.60} must be whole numbers, {most} at most, got {values!r:.100}")
    needed = math.prod(shape) * _bytes.itemsize(NAMES[dtype])
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise ValueError(f"{name!r:.60} of shape {shape!r:.100} does not fill the bytes {offsets!r:.100}")
    return Part(NAMES[dtype], tuple(shape), *offsets)


def _header(entries: dict[str, Any], kind: str) -> dict[str, Any]:
    if "dkv" not in entries["__metadata__"]:
        raise ValueError("its metadata does not name dkv")
    header = read_json(entries["__metadata__"]["dkv"].encode())
    if header.get("kind") != kind:
        raise ValueError(f"it holds {header.get('kind')!r:.60}, not {kind!r}")
    version = header.get("version")
    if type(version) is not int or version != VERSIONS[kind]:
        raise ValueError(f"its version is {version!r:.60}, this dkv reads {kind} files of version {VERSIONS[kind]}")
    return header


def _check_memory(size: int) -> None:
    """Before anything is allocated: a file of holes may have any size, and memory be promised that is not there."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise ValueError(f"its arrays take {size:,} bytes, this machine has {memory:,}")


def _filled(file: BufferedReader, size: int) -> np.ndarray:
    try:
        data = np.empty(size, np.uint8)
    except MemoryError as error:
        raise ValueError(f"an array of {size:,} bytes does not fit into memory") from error
    if file.readinto(data.data) != size:
        raise ValueError("it ends before its last array does")
    return data


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0:
        chunk = file.read(min(size, CHUNK))
        if not chunk:
            raise ValueError("it ends before its last array does")
        size -= len(chunk)
        yield chunk


def _digest(entries: dict[str, Any], payload: Iterable[Any], key: str = CHECKSUM) -> str:
    """Of what the header says, its checksum aside, and of every byte behind it."""
    unsealed = {**entries, "__metadata__": {**entries["__metadata__"], key: UNSEALED}}
    return digest(unsealed, payload)


def _check_digest(entries: dict[str, Any], found: str, key: str = CHECKSUM) -> None:
    if entries["__metadata__"].get(key) != found:
        raise ValueError("its checksum is not that of its bytes: it was damaged or changed after it was written")


# compressed blocks


def save_blocks(blocks: CompressedBlocks, path: str | os.PathLike[str]) -> None:
    write(path, dict(blocks.parts()), {"kind": "blocks", "format": dataclasses.asdict(blocks.format)})


def load_blocks(path: str | os.PathLike[str], backend: str | None = None) -> CompressedBlocks:
    from dkv._dispatch import BACKENDS, check_backend

    check_backend(backend)
    tensors, header = read(path, "blocks", "numpy" if backend is None else BACKENDS[backend][0])
    with named(readable(path)):
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
