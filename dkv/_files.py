"""Versioned safetensors files: one clear error for whatever is wrong, and never half a file or half a load."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from typing import Any

from dkv.types import BlockFormat, CompressedBlocks

VERSION = 1
REQUIRED = {"anchor_k", "anchor_v", "u", "u_unit", "basis_k", "residual_indices", "residual_k", "residual_v"}


def write(path: str | os.PathLike[str], tensors: dict[str, Any], header: dict[str, Any], library: str) -> None:
    """Write through a temporary file in the same folder and an atomic rename."""
    save = _safetensors(library).save_file
    metadata = {"dkv": json.dumps({"version": VERSION, **header})}
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=os.path.basename(path) + ".", suffix=".part")
    os.close(handle)
    try:
        save(tensors, temporary, metadata=metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str], kind: str, library: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and header of a file of this kind."""
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file: {os.fspath(path)}")
    framework = {"numpy": "numpy", "torch": "pt"}[library]
    try:
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata["dkv"])
            _check_header(header, kind, path)
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"{os.fspath(path)} is not a whole dkv {kind} file: {error}") from error


def _check_header(header: Any, kind: str, path: Any) -> None:
    if not isinstance(header, dict):
        raise ValueError(f"{os.fspath(path)} is not a dkv {kind} file")
    if header.get("version") != VERSION:
        raise ValueError(f"version of {os.fspath(path)} is {header.get('version')!r}, this dkv reads {VERSION}")
    if header.get("kind") != kind:
        raise ValueError(f"{os.fspath(path)} holds {header.get('kind')!r}, not {kind!r}")


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
    if library not in ("numpy", "torch"):
        raise NotImplementedError(f"saving {library} blocks is not offered")
    contiguous = blocks.map(lambda part: part.contiguous() if library == "torch" else part.copy(order="C"))
    write(path, dict(contiguous.parts()), {"kind": "blocks", "format": dataclasses.asdict(blocks.format)}, library)


def load_blocks(path: str | os.PathLike[str], backend: str | None = None) -> CompressedBlocks:
    libraries = {None: "numpy", "reference": "numpy", "torch": "torch", "triton": "torch"}
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
    dtypes = ("float32", "float32")  # only the shapes matter here
    layout = block_layout(fmt, blocks.num_kv_heads, blocks.head_dim, blocks.head_dim_v, *dtypes)
    wanted = {name: (blocks.batch_size, blocks.num_blocks, *shape) for name, (shape, _) in layout.items()}
    given = {name: tuple(part.shape) for name, part in blocks.parts() if name != "block_counts"}
    if given != wanted:
        wrong = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
        name = wrong[0]
        raise ValueError(f"{name} of the file must have shape {wanted.get(name)}, got {given.get(name)}")
    if blocks.block_counts is not None and tuple(blocks.block_counts.shape) != (blocks.batch_size,):
        raise ValueError(f"block_counts of the file must have shape ({blocks.batch_size},)")
    return blocks


# caches of dkv.integrations.transformers


def save_cache(cache: Any, path: str | os.PathLike[str]) -> None:
    tensors: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        state = getattr(layer, "state", None)
        if state is None:
            layers.append(
                {"kind": type(layer).__name__, "seen": int(layer.get_seq_length()) if layer.is_initialized else 0}
            )
            held = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
        else:
            fields = ("offset", "tokens", "rows", "block_counts")
            layers.append({"kind": "DKVLayer", **{name: getattr(state, name) for name in fields}})
            held = state.tensors()
            stored = max(state.rows, default=0)
            held.update({name: held[name][:, :, :stored] for name in ("k_rows", "v_rows") if name in held})
        tensors.update({f"{index}.{name}": tensor.contiguous().clone() for name, tensor in held.items()})
    write(path, tensors, {"kind": "cache", "config": cache.config.to_dict(), "layers": layers}, "torch")


def load_cache(cache: Any, path: str | os.PathLike[str], device: Any) -> None:
    from dkv.cache import LayerCache

    tensors, header = read(path, "cache", "torch")
    saved, own = header.get("config"), cache.config.to_dict()
    if not isinstance(saved, dict):
        raise ValueError(f"config of the file is {saved!r}, not a mapping")
    differing = [name for name in own if saved.get(name) != own[name]]
    if differing or set(saved) - set(own):
        name = (differing or sorted(set(saved) - set(own)))[0]
        raise ValueError(f"{name} of the file is {saved.get(name)!r}, this cache has {own.get(name)!r}")
    layers = header.get("layers")
    if not isinstance(layers, list) or len(layers) != len(cache.layers):
        raise ValueError(f"the file holds {len(layers or [])} layers, this cache has {len(cache.layers)}")
    loaded: list[tuple[Any, Any]] = []
    for index, (layer, entry) in enumerate(zip(cache.layers, layers, strict=True)):
        kind = "DKVLayer" if hasattr(layer, "state") else type(layer).__name__
        if entry.get("kind") != kind:
            raise ValueError(f"layer {index} of the file is a {entry.get('kind')!r}, this cache has a {kind!r}")
        prefix = f"{index}."
        parts = {name[len(prefix) :]: t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
        if kind == "DKVLayer":
            state = LayerCache(cache.config)
            _fill_state(state, entry, parts, index)
            loaded.append((layer, state))
        else:
            loaded.append((layer, (parts, int(entry["seen"]))))
    _check_heads(cache, loaded)
    for layer, content in loaded:
        if isinstance(content, LayerCache):
            layer.state, layer.is_initialized = content, content.offset > 0
        elif content[0]:
            layer.lazy_initialization(content[0]["keys"], content[0]["values"])
            layer.keys, layer.values = content[0]["keys"], content[0]["values"]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = content[1]


def _fill_state(state: Any, entry: dict[str, Any], parts: dict[str, Any], index: int) -> None:
    where = f"layer {index} of the file"
    names = ("offset", "tokens", "rows", "block_counts")
    lengths: list[Any] = [entry.get(name) for name in names]
    offset, tokens, rows, counts = lengths
    lists = (tokens, rows, counts)
    if not isinstance(offset, int) or any(not isinstance(x, list) or len(x) != len(tokens) for x in lists):
        raise ValueError(f"{where} has no lengths")
    batch, size, sink = len(tokens), state.config.block_size, state.config.sink_tokens
    for token, row, count in zip(tokens, rows, counts, strict=True):
        whole = all(isinstance(x, int) and x >= 0 for x in (token, row, count))
        if not whole or row + count * size != token or token > offset or (count and row < sink):
            raise ValueError(f"{where} has lengths that do not fit: {token} tokens, {row} rows, {count} blocks")
    for name in ("k_rows", "v_rows"):
        part = parts.get(name)
        if batch and (part is None or part.ndim != 4 or part.shape[0] != batch or part.shape[2] != max(rows)):
            raise ValueError(f"{where}: {name} must be [{batch}, Hkv, {max(rows)}, D]")
    real = parts.get("real")
    if real is not None and tuple(real.shape) != (batch, offset):
        raise ValueError(f"{where}: real must have shape ({batch}, {offset}), got {tuple(real.shape)}")
    named = {name[len("blocks.") :]: part for name, part in parts.items() if name.startswith("blocks.")}
    if bool(named) != any(counts):
        raise ValueError(f"{where} has {'no ' if not named else ''}blocks, its lengths say otherwise")
    if named:
        blocks = build_blocks(dataclasses.asdict(state.config.block_format), named)
        if (blocks.batch_size, blocks.num_kv_heads, blocks.num_blocks) != (
            batch,
            parts["k_rows"].shape[1],
            max(counts),
        ):
            raise ValueError(f"{where}: blocks do not fit its rows")
        state.blocks = blocks
    state.offset, state.tokens, state.rows, state.block_counts = offset, tokens, rows, counts
    state.k_rows, state.v_rows, state.real = parts.get("k_rows"), parts.get("v_rows"), real


def _check_heads(cache: Any, loaded: list[Any]) -> None:
    """Every compressed layer of the file has the heads, head dims and batch size that the model's config gives."""
    expected = cache.kv_shape
    for index, (_, content) in enumerate(loaded):
        if hasattr(content, "k_rows") and content.k_rows is not None:
            got = (content.k_rows.shape[1], content.k_rows.shape[3])
            if expected is not None and got != expected:
                raise ValueError(f"layer {index} of the file has (kv heads, head dim) {got}, the model has {expected}")
