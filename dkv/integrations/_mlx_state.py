"""The state of a DKV cache as mlx-lm saves it: a mapping of arrays, checked before any of it is taken."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np

from dkv.cache.loading import check_lengths, fitting_blocks
from dkv.cache.mlx_layer import FLOATS, LayerCache
from dkv.config import DKVConfig, HeadGroup

VERSION = 2
WHERE = "state of a DKV cache"


def state_of(layer: LayerCache) -> dict[str, Any]:
    """``header``, JSON as bytes, and every array held; exact rows without their spare room."""
    groups = layer.groups
    header = {
        "dkv": VERSION,
        "config": layer.config.to_dict(),
        "tokens": layer.tokens,
        "rows": layer.rows,
        "block_counts": layer.block_counts,
        "dropped": layer.dropped,
        "groups": groups
        if groups is None
        else [[group.heads, None if group.config is None else group.config.to_dict()] for group in groups],
        "selects": layer.selects,
    }
    state: dict[str, Any] = {"header": mx.array(np.frombuffer(json.dumps(header).encode(), dtype=np.uint8))}
    for index, group in enumerate(groups or ()):
        if group.channel_weight is not None:
            state[f"weight{index}"] = mx.array(group.channel_weight, dtype=mx.float32)
    if layer.k_rows is not None and layer.v_rows is not None and any(layer.tokens):
        stored = max(layer.rows)
        state["k_rows"], state["v_rows"] = layer.k_rows[:, :, :stored], layer.v_rows[:, :, :stored]
    for index, blocks in enumerate(layer.blocks):
        state.update({f"blocks{index}_{name}": part for name, part in blocks.parts()})
    return state


def layer_of(state: Any) -> LayerCache:
    """The inverse of :func:`state_of`.

    Raises
    ------
    ValueError
        When this is no state of a DKV cache, is of another version, or its parts do not fit each other.
    """
    if not isinstance(state, dict) or not all(isinstance(part, mx.array) for part in state.values()):
        raise ValueError(f"{WHERE} must be a mapping of arrays, got {type(state).__qualname__}")
    mx.eval(list(state.values()))  # a file is read when its arrays are first used, and may have been replaced by then
    if "header" not in state or state["header"].dtype != mx.uint8:
        raise ValueError(f"{WHERE} must have a header of bytes, got {sorted(state)}")
    mx.eval(state)  # read now: the file that they come from may be another one when they are first used
    try:
        header = json.loads(bytes(np.array(state["header"])))
    except ValueError as error:
        raise ValueError(f"{WHERE} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("dkv") != VERSION:
        got = header.get("dkv") if isinstance(header, dict) else header
        raise ValueError(f"version of the {WHERE} is {got!r:.60}, this dkv reads {VERSION}")
    parts = {name: part for name, part in state.items() if name != "header"}
    try:
        config = DKVConfig.from_dict(header["config"])
        layer = LayerCache(config, _groups(header["groups"], parts), _selects(header["selects"]))
        tokens, rows, counts, dropped = (header[name] for name in ("tokens", "rows", "block_counts", "dropped"))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{WHERE} is not this version's: {error!r}") from error
    check_lengths(config, tokens, rows, counts, dropped, WHERE)
    layer.reset(len(tokens))
    if not any(tokens):
        if parts:
            raise ValueError(f"{WHERE} holds {sorted(parts)} of no token")
        return layer
    _check_rows(parts, len(tokens), max(rows))
    layer.tokens, layer.rows, layer.block_counts, layer.dropped = tokens, rows, counts, dropped
    layer.k_rows, layer.v_rows = (mx.array(parts.pop(name)) for name in ("k_rows", "v_rows"))
    heads = sum(len(group.heads) for group in layer.head_groups())
    if heads != layer.k_rows.shape[1]:
        raise ValueError(f"{WHERE} groups {heads} heads, its rows have {layer.k_rows.shape[1]}")
    if layer.selects is not None and len(layer.selects) != heads:
        raise ValueError(f"{WHERE} says of {len(layer.selects)} heads whether they select, its rows have {heads}")
    groups = layer.stored_groups() if any(counts) else []
    named = [_taken(parts, f"blocks{index}_") for index in range(len(groups))]
    if parts:
        raise ValueError(f"{WHERE} holds {sorted(parts)}, which its lengths do not ask for")
    held = (layer.k_rows, layer.v_rows)
    layer.blocks = tuple(
        fitting_blocks(group, own, held, counts, WHERE) for group, own in zip(groups, named, strict=True)
    )
    return layer


def _groups(saved: Any, parts: dict[str, Any]) -> list[HeadGroup] | None:
    if saved is None:
        return None
    groups = []
    for index, (heads, config) in enumerate(saved):
        weight = parts.pop(f"weight{index}", None)
        rows = None if weight is None else tuple(map(tuple, weight.tolist()))
        groups.append(HeadGroup(tuple(heads), None if config is None else DKVConfig.from_dict(config), rows))
    return groups


def _selects(saved: Any) -> list[bool] | None:
    if saved is not None and not (isinstance(saved, list) and all(isinstance(one, bool) for one in saved)):
        raise ValueError(f"selects of the {WHERE} must be a list of bools, got {saved!r:.60}")
    return saved


def _check_rows(parts: dict[str, Any], batch: int, stored: int) -> None:
    for name in ("k_rows", "v_rows"):
        part = parts.get(name)
        if part is None or part.ndim != 4 or (part.shape[0], part.shape[2]) != (batch, stored):
            raise ValueError(f"{WHERE}: {name} must be [{batch}, Hkv, {stored}, D]")
    k, v = parts["k_rows"], parts["v_rows"]
    if k.dtype not in FLOATS or v.dtype != k.dtype or v.shape[1] != k.shape[1]:
        raise ValueError(f"{WHERE}: k_rows and v_rows must have the same heads and one float dtype")


def _taken(parts: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The parts whose name has a prefix, taken out."""
    return {name[len(prefix) :]: parts.pop(name) for name in [name for name in parts if name.startswith(prefix)]}
