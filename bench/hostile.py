"""Bad arguments to every public function: a result, or an error that names the argument; inputs stay as they were."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np

import dkv
from dkv import testing
from dkv._bytes import view
from dkv._dispatch import library_of
from dkv.types import AttentionState, CompressedBlocks

ALLOWED = (ValueError, TypeError, NotImplementedError)
RESULT, REFUSED = "a result", "an error that names it"
PLAIN: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, -(10**30), 0.5, -1.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), float("-inf"), 1j, "", "x", "\0", "x" * 3000, b"x", "lowrank", "kv_head"),
    *([], [1, 2], [[1.0]], (), {}, {"a": 1}, {1}, object(), len, int, Ellipsis, np.float64("nan"), np.int64(3)),
    *(np.array(2), np.array("x"), np.array([None]), range(3)),
]


FIELDS = tuple(field.name for kind in (dkv.DKVConfig, dkv.HeadProfile) for field in dataclasses.fields(kind))
NAMED = {  # what else names the argument
    "DKVConfig.preset": ("preset",),
    "DKVConfig.from_dict": (*FIELDS, "a config", "config must be a mapping", "config fields"),
    "HeadProfile.from_dict": (*FIELDS, "profile must be a mapping", "fields of a profile"),
    "HeadProfile.shipped": ("ships",),
}


class Misbehaved(AssertionError):
    """A bad argument met neither a result nor an error that names it."""


def calls(library: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public callable, and arguments by name that it takes; arrays of a library."""
    made = testing.make_inputs(0, window=13, library=library)
    indices = testing.to_library(np.zeros((2, 2, 2), np.int32), library)
    lengths = testing.to_library(np.array([3, 13], np.int32), library)
    sink = testing.to_library(np.zeros(6, np.float32), library)
    weight = testing.to_library(np.ones((2, 48), np.float32), library)
    empty = AttentionState(np.zeros((2, 6, 1, 20), np.float32), np.zeros((2, 6, 1), np.float32))
    state = testing.to_library(empty, library)
    q, blocks, config = made.q, made.blocks, made.config
    rows = {"q": q, "k": made.k_window, "v": made.v_window}
    backend: dict[str, Any] = {"backend": None}
    indexed: dict[str, Any] = {"block_indices": None}
    logits: dict[str, Any] = {"sm_scale": 0.3, "softcap": 9.0, **backend}
    selected = {"q": q, "blocks": blocks, "block_indices": indices, **logits}
    pins = {"top_k": 2, "router": "lowrank", "share": "kv_head", "sink_blocks": 1, "recent_blocks": 0}
    window = {"seq_lens": lengths, "window": 5, "sink": sink, **logits}
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "scores": [[0.5]], "drop_loss": [[1.0]]}
    losses = {"key_options": [[4] * 8], "value_options": [4], "key_loss": [[[1.0]]], "value_loss": [[[1.0]]]}
    profile = {"model": "m", **shape, **losses, "channel_weight": [[[1.0]]], "text": "t", "settings": {"seed": 0}}
    weights = {"token_weight": weight, "channel_weight": None}
    windows = {"k_window": made.k_window, "v_window": made.v_window}
    tier = {"share": 1.0, "routed": True, "rank": 2, "num_residuals": 3, "residual_bits": 4, "key_bits": [4] * 8}
    ours = dkv.HeadProfile(**profile)
    return {
        "compress_blocks": (dkv.compress_blocks, {"k": made.k, "v": made.v, "config": config, **weights, **backend}),
        "reconstruct_blocks": (dkv.reconstruct_blocks, {"blocks": blocks, **backend}),
        "route_blocks": (dkv.route_blocks, {"q": q, "blocks": blocks, **pins, "sm_scale": 0.3, **backend}),
        "lowrank_attention": (dkv.lowrank_attention, selected),
        "residual_attention": (dkv.residual_attention, selected),
        "exact_attention": (dkv.exact_attention, {**rows, "causal": True, "lse_base": "e", **window}),
        "decode_attention": (dkv.decode_attention, {**selected, **windows, "config": config, **window}),
        "prefill_attention": (dkv.prefill_attention, {**rows, "config": config, **indexed, "sink": sink, **logits}),
        "merge_states": (dkv.merge_states, {"states": [state, state], **backend}),
        "DKVConfig": (dkv.DKVConfig, dataclasses.asdict(config)),
        "DKVConfig.preset": (dkv.DKVConfig.preset, {"name": "default", "profile": None}),
        "DKVConfig.paper": (dkv.DKVConfig.paper, {"num_residuals": 64}),
        "DKVConfig.from_dict": (dkv.DKVConfig.from_dict, {"values": config.to_dict()}),
        "DKVConfig.with_profile": (config.with_profile, {"profile": ours}),
        "HeadTier": (dkv.HeadTier, {**tier, "value_bits": 4}),
        "BlockFormat": (dkv.BlockFormat, dataclasses.asdict(blocks.format)),
        "HeadProfile": (dkv.HeadProfile, profile),
        "HeadProfile.from_dict": (dkv.HeadProfile.from_dict, {"values": ours.to_dict()}),
        "HeadProfile.load": (dkv.HeadProfile.load, {"path": "none"}),
        "HeadProfile.shipped": (dkv.HeadProfile.shipped, {"name": "smollm2-135m"}),
        "CompressedBlocks.load": (CompressedBlocks.load, {"path": "none", **backend}),
    }


def libraries() -> list[str]:
    return ["numpy", *(name for name, module in (("torch", "torch"), ("mlx", "mlx")) if find_spec(module))]


def spoilt(rng: Random, value: Any) -> Any:
    """Something else in an argument's place."""
    if isinstance(value, CompressedBlocks) and rng.random() < 0.8:
        return _spoilt_blocks(rng, value)
    if isinstance(value, list) and value and isinstance(value[0], AttentionState) and rng.random() < 0.8:
        changed = [list(state) for state in value]
        changed[rng.randrange(len(changed))][rng.randrange(2)] = spoilt(rng, value[0][rng.randrange(2)])
        return [AttentionState(*state) for state in changed]
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        return {**value, key: rng.choice(PLAIN)}
    if hasattr(value, "dtype") and hasattr(value, "shape") and rng.random() < 0.8:
        return _spoilt_array(rng, value)
    return rng.choice(PLAIN)


def _spoilt_blocks(rng: Random, blocks: CompressedBlocks) -> CompressedBlocks:
    name, part = rng.choice(list(blocks.parts()))
    return dataclasses.replace(blocks, **{name: _spoilt_array(rng, part) if rng.random() < 0.7 else rng.choice(PLAIN)})


def _spoilt_array(rng: Random, array: Any) -> Any:
    """Another rank, size, dtype, library or order, or numbers at the edge."""
    library, plain = library_of(array), np.array(testing.to_numpy(array))
    axis = rng.randrange(plain.ndim) if plain.ndim else 0
    edge = rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-45, -1, -(2**31), 2**31 - 1])
    ways: list[Callable[[], Any]] = [
        lambda: plain[None],
        lambda: plain.reshape(-1),
        lambda: plain[0] if plain.ndim and len(plain) else plain,
        lambda: np.repeat(plain, 2, axis) if plain.ndim else plain,
        lambda: np.take(plain, [], axis) if plain.ndim else plain,
        lambda: np.take(plain, [0], axis) if plain.size else plain,
        lambda: plain.swapaxes(0, -1) if plain.ndim else plain,
        lambda: plain.astype(rng.choice([np.int8, np.int32, np.int64, np.uint8, np.bool_, np.float16, np.float64])),
        lambda: plain.astype(np.complex64),
    ]
    if plain.dtype.kind == "f" or -(2**31) <= edge < 2**31:
        ways.append(lambda: np.where(np.arange(plain.size).reshape(plain.shape) == 0, edge, plain).astype(plain.dtype))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        changed = rng.choice(ways)()
    if rng.random() < 0.1:
        return changed if library != "numpy" else changed.astype(object)
    try:
        return testing.to_library(changed, library)
    except (TypeError, ValueError):  # the library has no such dtype
        return changed


def tried(rng: Random, name: str, call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """One call with one or two arguments spoilt; ``RESULT`` or ``REFUSED``.

    Raises
    ------
    Misbehaved
        For another error, one that names no argument, or inputs that changed.
    """
    given = dict(arguments)
    wrong = rng.sample(sorted(given), min(len(given), rng.choice([1, 1, 1, 2])))
    for argument in wrong:
        given[argument] = spoilt(rng, given[argument])
    before = {argument: _bits(value) for argument, value in given.items()}
    what = ", ".join(f"{argument}={_short(given[argument], arguments[argument])}" for argument in wrong)
    allowed = (*ALLOWED, OSError) if "path" in given else (*ALLOWED, ImportError) if "backend" in wrong else ALLOWED
    outcome = RESULT
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(**given)
    except allowed as error:
        outcome = REFUSED
        words = [*_names(call), *arguments, *NAMED.get(name, ()), _name(given.get("path", "blocks"))]
        if not any(re.search(rf"(?<!\w){re.escape(word)}", str(error)) for word in words):
            raise Misbehaved(f"{name}({what}): no argument is named by {error!r:.300}") from error
    except Exception as error:
        raise Misbehaved(f"{name}({what}): {error!r:.300}") from error
    changed = [argument for argument, value in given.items() if _bits(value) != before[argument]]
    if changed:
        raise Misbehaved(f"{name}({what}): {changed} changed")
    return outcome


def run(seed: int, each: int, library: str) -> tuple[Counter[str], list[str]]:
    """``each`` calls of every public function; outcomes by their number, and what failed, each kind once."""
    counts, failed = Counter[str](), {}
    for name, (call, arguments) in calls(library).items():
        rng = Random(f"{seed} {library} {name}")
        for _ in range(each):
            try:
                counts[tried(rng, name, call, arguments)] += 1
            except Misbehaved as error:
                counts["failed"] += 1
                failed.setdefault((name, type(error.__cause__), str(error.__cause__)[:40]), f"{library}: {error}")
    return counts, list(failed.values())


def _names(call: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(call).parameters)
    except ValueError:
        return []


def _name(path: Any) -> str:
    return os.fsdecode(path) if isinstance(path, bytes) else str(path)


def _bits(value: Any) -> Any:
    """What can be compared later."""
    if isinstance(value, CompressedBlocks):
        return [(name, _bits(part)) for name, part in value.parts()]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value) if "object" in str(value.dtype) else (tuple(value.shape), _raw(value))
    if isinstance(value, (list, tuple)):
        return [_bits(part) for part in value]
    return repr(value)


def _raw(value: Any) -> bytes:
    return np.asarray(value).tobytes() if library_of(value) == "numpy" else view(value).tobytes()


def _short(value: Any, given: Any = None) -> str:
    """In a few words; of blocks the parts that differ from those that were given."""
    if isinstance(value, CompressedBlocks):
        parts = [(name, part) for name, part in value.parts() if part is not getattr(given, name)]
        return "blocks with " + " ".join(f"{name}:{type(part).__module__} {_short(part)}" for name, part in parts)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{value!r:.60}"
