"""Save and load whole caches of ``dkv.integrations.transformers``; all is checked before anything is replaced."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from dkv._files import named, read, write
from dkv._paths import check_path
from dkv.cache.layer import LayerCache
from dkv.cache.loading import check_lengths, fitting_blocks

LENGTHS = ("offset", "tokens", "rows", "block_counts", "dropped")


def save_cache(cache: Any, path: str | os.PathLike[str]) -> None:
    tensors: dict[str, Any] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        state = getattr(layer, "state", None)
        if state is None:
            seen = int(layer.get_seq_length()) if layer.is_initialized else 0
            layers.append({"kind": type(layer).__name__, "seen": seen})
            held = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
            held = {name: rows[:, :, max(0, rows.shape[2] - _bound(layer, seen)) :] for name, rows in held.items()}
        else:
            layers.append({"kind": "DKVLayer", **{name: getattr(state, name) for name in LENGTHS}})
            held = state.tensors()
            stored = max(state.rows, default=0)
            held.update({name: held[name][:, :, :stored] for name in ("k_rows", "v_rows") if name in held})
        tensors.update({f"{index}.{name}": tensor for name, tensor in held.items()})
    write(path, tensors, {"kind": "cache", "config": cache.config.to_dict(), "layers": layers})


def load_cache(cache: Any, path: str | os.PathLike[str], device: Any) -> None:
    tensors, header = read(path, "cache", "torch")
    with named(check_path(path)):
        loaded = _loaded(cache, tensors, header, device)
    for layer, content in loaded:
        layer.reset()
        if isinstance(content, LayerCache):
            layer.state, layer.is_initialized = content, content.offset > 0
        elif content[0]:
            parts, seen = content
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = seen


def _loaded(cache: Any, tensors: dict[str, Any], header: dict[str, Any], device: Any) -> list[tuple[Any, Any]]:
    """Every layer of the cache, and what the file holds of it."""
    _check_config(header.get("config"), json.loads(json.dumps(cache.config.to_dict())))  # a tuple is a list there
    layers = header.get("layers")
    if not isinstance(layers, list) or not all(isinstance(entry, dict) for entry in layers):
        raise ValueError(f"layers of the file must be a list of mappings, got {layers!r:.60}")
    if len(layers) != len(cache.layers):
        raise ValueError(f"the file holds {len(layers)} layers, this cache has {len(cache.layers)}")
    by_layer: dict[str, dict[str, Any]] = {str(index): {} for index in range(len(layers))}
    for name, part in tensors.items():
        number, _, rest = name.partition(".")
        if number not in by_layer:
            raise ValueError(f"the file holds {name!r:.60}, which belongs to none of its {len(layers)} layers")
        by_layer[number][rest] = part
    loaded: list[tuple[Any, Any]] = []
    shapes = set()
    for index, (layer, entry) in enumerate(zip(cache.layers, layers, strict=True)):
        where = f"layer {index} of the file"
        own = "DKVLayer" if hasattr(layer, "state") else type(layer).__name__
        if entry.get("kind") != own:
            raise ValueError(f"{where} is a {entry.get('kind')!r}, this cache has a {own!r}")
        parts = {name: part.to(device) for name, part in by_layer[str(index)].items()}
        if own == "DKVLayer":
            state = _state(cache.config, layer.state.groups, entry, parts, where)
            loaded.append((layer, state))
            shapes.add((state.offset, state.batch_size))
        else:
            loaded.append((layer, (parts, _seen(layer, entry, parts, where))))
            if parts:
                shapes.add((entry["seen"], parts["keys"].shape[0]))
        for name in ("k_rows", "v_rows", "keys", "values"):
            _check_rows(parts.get(name), cache.kv_shape, cache.kv_dtype, where)
    if len(shapes) > 1:
        raise ValueError(f"layers of the file must hold the same (tokens, batch size), got {sorted(shapes)}")
    return loaded


def _check_config(saved: Any, own: dict[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise ValueError(f"config of the file is {saved!r:.60}, not a mapping")
    for name in [*own, *sorted(set(saved) - set(own))]:
        if saved.get(name) != own.get(name):
            if name == "profile" and saved.get(name) and own[name]:
                raise ValueError("profile of the file has other scores than this cache's")
            raise ValueError(f"{name} of the file is {saved.get(name)!r:.200}, this cache has {own.get(name)!r:.200}")


def _check_rows(rows: Any, expected: tuple[int, int], dtype: Any, where: str) -> None:
    if rows is None:
        return
    if (rows.shape[1], rows.shape[3]) != expected:
        got = (rows.shape[1], rows.shape[3])
        raise ValueError(f"{where} has (kv heads, head dim) {got}, the model has {expected}")
    if dtype is not None and rows.dtype != dtype:
        raise ValueError(f"{where} has rows of {rows.dtype}, the model computes in {dtype}")


def _bound(layer: Any, seen: int) -> int:
    """Rows that a layer of transformers needs to go on; it may hold more while drafts are taken back."""
    return seen if getattr(layer, "sliding_window", None) is None else min(seen, layer.sliding_window - 1)


def _seen(layer: Any, entry: dict[str, Any], parts: dict[str, Any], where: str) -> int:
    """Tokens that a bounded layer of transformers has seen, its parts checked against it."""
    seen = entry.get("seen")
    if not isinstance(seen, int) or isinstance(seen, bool) or seen < 0 or bool(parts) != (seen > 0):
        raise ValueError(f"{where} must say how many tokens it has seen, got {seen!r} with {sorted(parts)}")
    if not parts:
        return 0
    stored = _bound(layer, seen)
    if set(parts) != {"keys", "values"} or any(part.ndim != 4 or part.shape[2] != stored for part in parts.values()):
        raise ValueError(f"{where} must hold keys and values of {stored} tokens, got {sorted(parts)}")
    if parts["keys"].shape[:3] != parts["values"].shape[:3] or parts["keys"].dtype != parts["values"].dtype:
        raise ValueError(f"{where}: keys and values do not fit each other")
    return seen


def _state(config: Any, groups: Any, entry: dict[str, Any], parts: dict[str, Any], where: str) -> LayerCache:
    offset, tokens, rows, counts, dropped = _lengths(config, entry, where)
    batch = len(tokens)
    state = LayerCache(config, groups)
    if not batch:
        if offset or parts:
            raise ValueError(f"{where} holds rows of no sequence")
        return state
    for name in ("k_rows", "v_rows"):
        part = parts.get(name)
        if part is None or part.ndim != 4 or part.shape[0] != batch or part.shape[2] != max(rows):
            raise ValueError(f"{where}: {name} must be [{batch}, Hkv, {max(rows)}, D]")
    k_rows, v_rows = parts["k_rows"], parts["v_rows"]
    if k_rows.dtype not in (torch.float16, torch.bfloat16, torch.float32) or v_rows.dtype != k_rows.dtype:
        raise ValueError(f"{where}: k_rows and v_rows must be of one float dtype, got {k_rows.dtype}, {v_rows.dtype}")
    real = parts.get("real")
    if real is None:
        real_tokens = [offset] * batch
    elif tuple(real.shape) != (batch, offset) or real.dtype != torch.bool:
        raise ValueError(f"{where}: real must be bool [{batch}, {offset}], got {real.dtype} {tuple(real.shape)}")
    else:
        real_tokens = real.sum(1).tolist()
    if tokens != real_tokens:
        raise ValueError(f"{where} counts {tokens} tokens in {offset} positions, its padding says {real_tokens}")
    state.offset, state.tokens, state.rows, state.block_counts, state.dropped = offset, tokens, rows, counts, dropped
    state.k_rows, state.v_rows, state.real = k_rows, v_rows, real
    by_group: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        if name not in ("k_rows", "v_rows", "real"):
            what, index, part_name = (*name.split(".", 2), "", "")[:3]
            by_group.setdefault(index if what == "groups" else name, {})[part_name] = part
    wanted = [str(index) for index in range(len(state.stored_groups()))] if any(counts) else []
    if sorted(by_group) != sorted(wanted):
        raise ValueError(f"{where} has blocks of the groups {sorted(by_group)!s:.200}, its lengths ask for {wanted}")
    state.blocks = tuple(
        fitting_blocks(group, by_group[index], (k_rows, v_rows), counts, where)
        for index, group in zip(wanted, state.stored_groups(), strict=False)
    )
    return state


def _lengths(config: Any, entry: dict[str, Any], where: str) -> tuple[Any, ...]:
    values: list[Any] = [entry.get(name) for name in LENGTHS]
    offset, tokens, rows, counts, dropped = values
    if type(offset) is not int:
        raise ValueError(f"{where} has no lengths")
    check_lengths(config, tokens, rows, counts, dropped, where)
    if any(token > offset for token in tokens):
        raise ValueError(f"{where} has lengths that do not fit: {max(tokens)} tokens in {offset} positions")
    return offset, tokens, rows, counts, dropped
