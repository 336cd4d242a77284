"""Spoilt files: each is refused by one clear error, or is what it was. Valid files by kind, mutants of them, one trial.

A mutant is cut, flipped, spliced or grown anywhere, or says something else in its header; some are forged, with a
checksum that fits. A forged file may load as other numbers: then what was loaded must work.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dkv
from dkv import _files, testing
from dkv._bytes import view
from dkv._checks import dtype_name
from dkv._json import digest
from dkv.types import BlockFormat

ROOM = 8 << 20  # bytes that a load may take beside 64 for each of the file's
OUTCOMES = ("accepted, equal", "refused", "forged, works")
HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 16, 255, 2**31, 2**40, 2**63, 2**64, -(2**63), 10**30, 1.5, 1e308, -0.0),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "\0", "\ud800", "F64", "BF16", "u", "0.k_rows", "x" * 5000),
    *([], {}, [[]], {"a": 1}, [0], [1, 2, 3], [2**40, 2**40], [-1], [0, 2**62], [[[[1]]]], "__reduce__", "cos\nsystem"),
]


class Kind:
    """A kind of file: a whole one, how it is loaded, and what must be as before when it is not.

    ``load`` gives what can be compared; ``use`` tries what was loaded last; ``held`` is what a refusal must leave as it
    was when ``load`` began; ``saves`` write two files that differ, None
    where a fork cannot write them.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        load: Callable[[str], Any],
        use: Callable[[], None],
        saves: tuple[Callable[[str], Any], Callable[[str], Any]] | None,
        held: Callable[[], Any] = lambda: None,
        container: bool = True,
        key: str = _files.CHECKSUM,
    ) -> None:
        self.name, self.load, self.use, self.held, self.saves = name, load, use, held, saves
        self.container, self.key, self.suffix = container, key, path.suffix
        self.before = held()
        self.whole, self.content = path.read_bytes(), load(str(path))


class Spoilt(AssertionError):
    """A spoilt file was neither refused nor what it was."""


# valid files


def blocks_kind(folder: Path, library: str = "numpy") -> Kind:
    config = BlockFormat(8, 2, 3, residual_bits=4, key_bits=(6, 5, 4, 4, 3, 2, 2, 2), minmax=True)
    made = testing.make_inputs(1, num_blocks=2, head_dim=8, head_dim_v=6, config=config).blocks
    counts = np.array([1, 2], np.int32)
    blocks = testing.to_library(dataclasses.replace(made, block_counts=counts), library)
    other = testing.to_library(made, library)
    blocks.save(str(folder / "blocks"))
    last: list[Any] = []

    def load(path: str) -> Any:
        last[:] = [dkv.CompressedBlocks.load(path, backend="reference" if library == "numpy" else library)]
        return last[0].format, _content(last[0].parts())

    def use() -> None:
        with np.errstate(all="ignore"):
            dkv.reconstruct_blocks(testing.to_numpy(last[0]))

    return Kind(f"blocks, {library}", folder / "blocks", load, use, (blocks.save, other.save))


def cache_kind(folder: Path) -> Kind:
    import torch
    import transformers

    from dkv.integrations.transformers import DKVCache

    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.LlamaConfig(**shape, hidden_size=16, intermediate_size=16, vocab_size=8)
    config = dkv.DKVConfig(block_size=4, window=4, sink_tokens=2, rank=2, num_residuals=2)

    def filled(tokens: int) -> Any:
        cache, rng = DKVCache(model, config), torch.Generator().manual_seed(tokens)
        for layer in cache.layers:
            q, k, v = (torch.randn(2, heads, tokens, 8, generator=rng) for heads in (2, 1, 1))
            padding = torch.ones(2, tokens, dtype=torch.bool)
            padding[0, :3] = False
            layer.state.attend(q, k, v, padding=padding)
            layer.is_initialized = True
        return cache

    def content(cache: Any) -> Any:
        states = [layer.state for layer in cache.layers]
        lengths = [[getattr(state, name) for name in ("offset", "tokens", "rows", "block_counts")] for state in states]
        return lengths, [_content(stored(state)) for state in states]

    def stored(state: Any) -> Any:
        most = max(state.rows, default=0)  # what lies beyond is spare room
        return [(name, part[:, :, :most] if "_rows" in name else part) for name, part in state.tensors().items()]

    whole, other = filled(21), filled(17)
    whole.save(str(folder / "cache"))
    cache, start = filled(9), filled(9)
    states = [layer.state for layer in start.layers]

    def load(path: str) -> Any:
        for layer, state in zip(cache.layers, states, strict=True):
            layer.state = copy.copy(state)
        cache.load(path)
        return content(cache)

    def use() -> None:
        for layer in cache.layers:
            batch = max(1, layer.state.batch_size)
            q, k, v = (torch.ones(batch, heads, 1, 8) for heads in (2, 1, 1))
            layer.state.attend(q, k, v)

    return Kind("cache", folder / "cache", load, use, (whole.save, other.save), lambda: content(cache))


def profile_kind(folder: Path) -> Kind:
    rng = np.random.default_rng(0)

    def numbers(*sizes: int) -> Any:
        return rng.random(sizes).round(4).tolist()

    widths = ((4,) * 8, (2,) * 8)
    profile = dkv.HeadProfile(
        *("a model", 2, 2, 3, numbers(2, 2), widths, (4, 2)),
        *(
            numbers(2, 2, 2),
            numbers(2, 2, 2),
            numbers(2, 2),
            numbers(2, 2, 3),
            "a text",
            {"seed": 0, "lengths": [3, 4]},
        ),
    )
    profile.save(folder / "profile")
    other = dataclasses.replace(profile, text="another text, which is longer")
    last: list[Any] = []

    def load(path: str) -> Any:
        last[:] = [dkv.HeadProfile.load(path)]
        return last[0]

    def use() -> None:
        last[0].ranked_heads()
        last[0].to_dict()

    return Kind("profile", folder / "profile", load, use, (profile.save, other.save), container=False)


def prompt_cache_kind(folder: Path) -> Kind:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.cache import KVCache

    from dkv.integrations import mlx_lm

    mx.random.seed(0)
    config = dkv.DKVConfig(block_size=4, window=4, sink_tokens=2, rank=2, num_residuals=2)
    ours, plain = mlx_lm.DKVCache(config), KVCache()
    q, k, v = (mx.random.normal((1, heads, 21, 8)) for heads in (2, 1, 1))
    ours.layer.append(k, v)
    ours.layer.attend(q, None, 0.3, None)
    plain.update_and_fetch(k, v)
    path, last = str(folder / "cache.safetensors"), [ours]
    mlx_lm.save_prompt_cache(path, [ours, plain], {"by": "dkv"})

    def load(path: str) -> Any:
        last[:] = mlx_lm.load_prompt_cache(path)
        flat = [(name, part) for name, part in tree_flatten([each.state for each in last]) if hasattr(part, "dtype")]
        return [type(each).__name__ for each in last], _content(flat)

    def use() -> None:
        for each in last:
            each.size()

    return Kind("prompt cache", Path(path), load, use, None, key=f"0.{_files.CHECKSUM}")


def _content(parts: Any) -> Any:
    return [(name, dtype_name(part), tuple(part.shape), view(part).tobytes()) for name, part in parts]


def kinds(folder: Path) -> list[Kind]:
    """Those whose packages are installed."""
    made = [blocks_kind(folder), profile_kind(folder)]
    if find_spec("torch"):
        made.append(blocks_kind(folder, "torch"))
    if find_spec("transformers"):
        made.append(cache_kind(folder))
    if find_spec("mlx_lm"):
        made.append(prompt_cache_kind(folder))
    return made


# mutants


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def closed(entries: dict[str, Any], payload: bytes, key: str | None = None) -> bytes:
    """The inverse; with a checksum that fits where its key is given."""
    if key is not None and isinstance(entries.get("__metadata__"), dict):
        entries["__metadata__"][key] = _files.UNSEALED
        entries["__metadata__"][key] = digest(entries, [payload])
    head = json.dumps(entries).encode()
    return len(head).to_bytes(8, "little") + head + payload


def mutant(rng: Random, kind: Kind) -> tuple[bytes, bool]:
    """A spoilt file, and whether its checksum was made to fit."""
    forged = rng.random() < 0.4
    if rng.random() < 0.05:
        return rng.choice([b"", pickle.dumps({"a": print}), rng.randbytes(rng.randrange(200))]), False
    if not forged and rng.random() < 0.6:
        data = kind.whole
        for _ in range(rng.choice([1, 1, 2, 4])):
            data = _raw(rng, data, kind.container)
        return data, False
    if not kind.container:
        values = json.loads(kind.whole)
        _respoken(rng, values)
        if forged:
            values.pop("sha256", None)
            values["sha256"] = digest(values)
        return json.dumps(values).encode(), forged
    entries, payload = opened(kind.whole)
    for _ in range(rng.choice([1, 1, 2])):
        choice = rng.random()
        if choice < 0.25 and payload:
            payload = _raw(rng, payload, False)
        elif choice < 0.5 and "dkv" in entries.get("__metadata__", {}):
            header = json.loads(entries["__metadata__"]["dkv"])
            _respoken(rng, header)
            entries["__metadata__"]["dkv"] = json.dumps(header)
        else:
            _respoken(rng, entries)
        if not isinstance(entries.get("__metadata__"), dict):
            break
    return closed(entries, payload, kind.key if forged else None), forged


def _raw(rng: Random, data: bytes, container: bool) -> bytes:
    """One change of bytes wherever it falls."""
    size = len(data)
    at, length = rng.randrange(size + 1), rng.choice([1, 2, 8, 100, 1 + size // 2])
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[at:],
        lambda: _flipped(data, rng.randrange(max(1, 8 * size))),
        lambda: _flipped(data, rng.randrange(max(1, 8 * size))),
        lambda: data[:at] + rng.randbytes(min(length, 100)) + data[at:],
        lambda: data[:at] + data[at + length :],
        lambda: data[:at] + bytes(min(length, size - at)) + data[at + length :],
        lambda: data[:at] + data[rng.randrange(size + 1) :][:length] + data[at + length :],
        lambda: data + rng.randbytes(min(length, 100)),
        lambda: (
            data[:at] + rng.choice([b"NaN", b"Infinity", b"\xff\xfe", b"\0", b"[" * 3000, b'{"a":' * 3000]) + data[at:]
        ),
    ]
    if container and size > 8:
        length_field = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, size, size - 8, rng.randrange(2 * size)])
        ways.append(lambda: length_field.to_bytes(8, "little") + data[8:])
    return rng.choice(ways)()


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _respoken(rng: Random, value: Any) -> None:
    """One change somewhere within nested lists and mappings, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], (dict, list)):
                walk(part[key])

    walk(value)
    if not places:
        return
    part, key = rng.choice(places)
    old = part[key]
    way = rng.randrange(6)
    if way == 0:
        del part[key]
    elif way == 1 and isinstance(part, dict):
        part[rng.choice([f"{key}x", "", "\0", "0.k_rows", "u"])] = part.pop(key)
    elif way == 2:
        other, there = rng.choice(places)
        if there in other if isinstance(other, dict) else there < len(other):
            part[key] = copy.deepcopy(other[there])
    elif way == 3 and type(old) is int:
        part[key] = old + rng.choice([-1, 1, 8, 2**32, 2**64, -(2**40)])
    elif way == 4 and isinstance(old, list):
        old.extend(rng.choice([[1], [0], copy.deepcopy(old), [2**31] * 3]))
    else:
        part[key] = copy.deepcopy(rng.choice(HOSTILE))


# one trial


def tried(kind: Kind, data: bytes, forged: bool, folder: Path) -> str:
    """One of ``OUTCOMES``.

    Raises
    ------
    Spoilt
        For any other.
    """
    path = folder / f"spoilt{kind.suffix}"
    path.write_bytes(data)
    refused, loaded = None, None
    tracemalloc.start()
    try:
        loaded = kind.load(str(path))
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        raise Spoilt(f"{kind.name}: {type(error).__qualname__} instead of a ValueError: {error!s:.300}") from error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if peak > ROOM + 64 * len(data):
        raise Spoilt(f"{kind.name}: to load {len(data)} bytes took {peak} bytes of memory")
    if refused is not None:
        if path.name not in refused or len(refused) > 1500:
            raise Spoilt(f"{kind.name}: the error does not name the file, or is long: {refused:.300}")
        if kind.held() != kind.before:
            raise Spoilt(f"{kind.name}: a refused file changed what was held: {refused:.300}")
        return OUTCOMES[1]
    if loaded == kind.content:
        return OUTCOMES[0]
    if not forged:
        raise Spoilt(f"{kind.name}: loaded as something else than was saved")
    try:
        kind.use()
    except Exception as error:
        raise Spoilt(f"{kind.name}: what a forged file gave fails with {error!r:.300}") from error
    return OUTCOMES[2]


def fuzzed(kind: Kind, folder: Path, examples: int, seed: int) -> tuple[Counter[str], str | None]:
    """Outcomes by their number; and what failed first, if anything did, with the shrunk file kept in ``folder``."""
    counts: Counter[str] = Counter()
    last = [b""]

    @hypothesis.seed(seed)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def trial(rng: Random) -> None:
        last[0], forged = mutant(rng, kind)
        counts[tried(kind, last[0], forged, folder)] += 1

    try:
        trial()
    except Spoilt as error:
        kept = folder / f"{kind.name.replace(' ', '-').replace(',', '')}-{seed}{kind.suffix}"
        kept.write_bytes(last[0])
        return counts, f"{error} (seed {seed}, kept as {kept})"
    return counts, None
