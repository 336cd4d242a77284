"""A cache of transformers under any order of operations, beside plain rows: equal at every step, at exact formats."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lifecycle_dense import DIM, HEADS, QUERY_HEADS, Dense, drawn, exact
from synthetic import profile_of

from dkv import DKVConfig, HeadTier
from dkv.integrations.transformers import DKVCache

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.soak import attended, model_config

LAYERS, MOST_POSITIONS, MOST_CACHES, MOST_SEQUENCES = 2, 700, 3, 6
MODEL = model_config(LAYERS, QUERY_HEADS, HEADS, DIM)
TIERS = (HeadTier(0.5), HeadTier(0.5, routed=False, rank=2))
SPARSE = {"prefill_mass": 1.0, "prefill_block": 16, "prefill_key_block": 8, "prefill_window": 8, "prefill_tail": 4}

numbers = st.integers(0, 2**20)
lengths = st.sampled_from([1, 2, 5, 15, 16, 17, 33, 60]) | st.integers(1, 300)
paddings = st.sampled_from(["none", "left", "right", "holes"])
cuts = st.integers(1, 8) | st.integers(0, 25) | st.integers(0, 25) | st.integers(0, 700)
limits = st.sampled_from([(None, "error"), (2, "drop_oldest"), (1, "drop_oldest"), (4, "error")])


@st.composite
def configs(draw: st.DrawFn, steps: tuple[int, ...] = (1, 3)) -> DKVConfig:
    """Exact formats; ``steps`` is what ``route_every`` may be."""
    limit, when_full = draw(limits)
    config = DKVConfig(
        block_size=16,
        format="fp32",
        rank=3,
        top_k=1000,
        window=draw(st.sampled_from([24, 40, 8, 1])),
        sink_tokens=draw(st.sampled_from([4, 0, 20])),
        max_blocks=limit,
        when_full=when_full,
        route_every=draw(st.sampled_from(steps)),
        prefill_dense_below=draw(st.sampled_from([8192, 40])),
        tiers=draw(st.sampled_from([(), TIERS])),
        **SPARSE,
    )
    return config.with_profile(profile_of([[0.0, 0.9], [0.6, 0.3]])) if config.tiers else config


class Pair:
    """A cache and what it must equal; ``real [B, offset]`` says which positions were no padding."""

    def __init__(self, config: DKVConfig) -> None:
        self.cache = DKVCache(MODEL, config)
        self.forget()

    def forget(self) -> None:
        self.dense = Dense(self.cache.config, LAYERS)
        self.real = np.zeros((0, 0), bool)

    def beside(self, cache: DKVCache) -> Pair:
        """The same rows beside another cache."""
        twin = copy.copy(self)
        twin.cache, twin.dense = cache, self.dense.copy()
        return twin

    @property
    def offset(self) -> int:
        return self.real.shape[1]

    def fingerprint(self) -> list[Any]:
        """Every byte held, and the lengths."""
        return [
            [(name, bytes(part.contiguous().view(torch.uint8).numpy())) for name, part in state.tensors().items()]
            + [state.offset, state.tokens, state.rows, state.block_counts, state.dropped]
            for state in self.cache.dkv_layers
        ]

    def refuses(self, kind: type[Exception], call: Any) -> None:
        """The call is refused and nothing has changed."""
        before = self.fingerprint()
        try:
            call()
        except kind:
            assert self.fingerprint() == before
        else:
            raise AssertionError("the call was not refused")

    def step(self, rng: np.random.Generator, length: int, padding: str = "none", batch: int = 1) -> None:
        """Give the cache and the rows a chunk, whose outputs must be equal."""
        batch = len(self.dense.rows) or batch
        real = chunk_of(rng, padding, batch, length)
        q, k, v = drawn(rng, LAYERS, batch, length)
        before = np.ones((batch, 0), bool) if self.offset == 0 else self.real
        mask = np.concatenate([before, real], axis=1)
        fresh = not self.dense.rows
        if fresh:
            self.dense.start(batch)
        if not self.dense.has_room(real.sum(1).tolist(), self.cache.config.window):
            if fresh:
                self.dense.rows = []
            return self.refuses(ValueError, lambda: self.attend(q, k, v, mask))
        out, wanted = self.attend(q, k, v, mask), self.dense.step(q, k, v, real)
        self.real = mask
        exact(np.where(real[:, None, :, None], out, 0), wanted)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """As the layers of a model do; ``[layers, B, Hq, n, D]``."""
        given = None if mask.all() else torch.from_numpy(mask)
        return attended(self.cache, *(torch.from_numpy(part) for part in (q, k, v)), given).numpy()


def chunk_of(rng: np.random.Generator, padding: str, batch: int, length: int) -> np.ndarray:
    """Which positions of a chunk are real ``[batch, length]``."""
    if padding == "none":
        return np.ones((batch, length), bool)
    if padding == "holes":
        return rng.random((batch, length)) < 0.7
    real = np.arange(length) < rng.integers(0, length + 1, (batch, 1))
    return real if padding == "right" else ~real


class CacheMachine(RuleBasedStateMachine):
    """Rules pick one of a few caches; every change is followed by a decode step of what it changed."""

    @initialize(config=configs(), seed=numbers, length=st.integers(0, 200), padding=paddings, batch=st.integers(1, 3))
    def begin(self, config: DKVConfig, seed: int, length: int, padding: str, batch: int) -> None:
        self.config, self.rng = config, np.random.default_rng(seed)
        self.pairs = [Pair(config)]
        self.folder = tempfile.TemporaryDirectory()
        self.saved: Pair | None = None
        if length:
            self.append(0, length, padding, batch)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @property
    def path(self) -> str:
        return os.path.join(self.folder.name, "cache.safetensors")

    def pair(self, which: int) -> Pair:
        return self.pairs[which % len(self.pairs)]

    def after(self, pair: Pair) -> None:
        if pair.offset:
            pair.step(self.rng, 1)

    @rule(which=numbers, length=lengths, padding=paddings, batch=st.integers(1, 3))
    def append(self, which: int, length: int, padding: str, batch: int) -> None:
        pair = self.pair(which)
        if pair.offset + length <= MOST_POSITIONS:
            pair.step(self.rng, length, padding, batch)

    @rule(which=numbers, count=st.integers(1, 20))
    def decode(self, which: int, count: int) -> None:
        for _ in range(count):
            self.pair(which).step(self.rng, 1)

    @rule(which=numbers, count=cuts)
    def crop(self, which: int, count: int) -> None:
        pair = self.pair(which)
        if count >= pair.offset:
            pair.cache.crop(-count)
            return pair.forget() if count else None
        lost = pair.real[:, pair.offset - count :].sum(1).tolist()
        if not pair.dense.can_lose(lost):
            pair.refuses(ValueError, lambda: pair.cache.crop(-count))
        else:
            pair.cache.crop(-count)
            pair.dense.lose(lost)
            pair.real = pair.real[:, : pair.offset - count]
        self.after(pair)

    @rule(which=numbers, beyond=st.integers(0, 2))
    def crop_to_a_block(self, which: int, beyond: int) -> None:
        """As many as no block holds, or a few more."""
        pair = self.pair(which)
        ends = [pair.real[:, pair.offset - count :].sum(1).tolist() for count in range(1, pair.offset)]
        if any(pair.dense.held):
            self.crop(which, sum(map(pair.dense.can_lose, ends)) + beyond)

    def select(self, pair: Pair, index: list[int]) -> None:
        if not index:
            return pair.forget()
        pair.dense.select(index)
        pair.real = pair.real[index]
        self.after(pair)

    @rule(which=numbers, seed=numbers)
    def reorder(self, which: int, seed: int) -> None:
        pair = self.pair(which)
        batch = len(pair.dense.rows)
        index = np.random.default_rng(seed).integers(0, max(batch, 1), batch)
        pair.cache.reorder_cache(torch.from_numpy(index))
        if batch:
            self.select(pair, index.tolist())

    @rule(which=numbers, repeats=st.integers(1, 3))
    def repeat(self, which: int, repeats: int) -> None:
        pair = self.pair(which)
        batch = len(pair.dense.rows)
        if batch * repeats <= MOST_SEQUENCES:
            pair.cache.batch_repeat_interleave(repeats)
            if batch:
                self.select(pair, [row for row in range(batch) for _ in range(repeats)])

    @rule(which=numbers, seed=numbers, by=st.sampled_from(["numbers", "from the end", "bools"]))
    def pick(self, which: int, seed: int, by: str) -> None:
        pair, rng = self.pair(which), np.random.default_rng(seed)
        batch = len(pair.dense.rows)
        if not batch:
            return
        if by == "bools":
            chosen = rng.random(batch) < 0.7
            index = chosen.nonzero()[0]
        else:
            index = rng.integers(0, batch, rng.integers(1, batch + 1))
            chosen = index - batch if by == "from the end" else index
        pair.cache.batch_select_indices(torch.from_numpy(chosen))
        self.select(pair, index.tolist())

    @rule(which=numbers)
    def copy(self, which: int) -> None:
        pair = self.pair(which)
        twin = pair.beside(copy.deepcopy(pair.cache))
        self.pairs = [*self.pairs[-MOST_CACHES + 1 :], twin]
        self.after(twin)
        self.after(pair)

    @rule(which=numbers)
    def save(self, which: int) -> None:
        pair = self.pair(which)
        pair.cache.save(self.path)
        self.saved = pair.beside(pair.cache)
        self.after(pair)

    @rule(which=numbers, fresh=st.booleans())
    def load(self, which: int, fresh: bool) -> None:
        if self.saved is None:
            return
        place = which % len(self.pairs)
        cache = DKVCache(MODEL, self.config) if fresh else self.pairs[place].cache
        self.pairs[place] = self.saved.beside(cache.load(self.path))
        self.after(self.pairs[place])

    @rule(which=numbers, length=lengths, padding=paddings, batch=st.integers(1, 3))
    def reset(self, which: int, length: int, padding: str, batch: int) -> None:
        self.pair(which).cache.reset()
        self.pair(which).forget()
        self.append(which, length, padding, batch)

    @rule(which=numbers, window=st.integers(0, 30))
    def compress(self, which: int, window: int) -> None:
        pair = self.pair(which)
        if not pair.dense.has_room([0] * len(pair.dense.rows), window):
            pair.refuses(ValueError, lambda: pair.cache.compress(window))
        else:
            pair.cache.compress(window)
            pair.dense.close(window)
        self.after(pair)

    @invariant()
    def lengths_are_those_of_the_rows(self) -> None:
        for pair in getattr(self, "pairs", ()):
            assert pair.cache.get_seq_length() == pair.offset
            assert pair.cache.dropped_tokens == pair.dense.dropped
            for state in pair.cache.dkv_layers:
                assert (state.tokens, state.block_counts) == (pair.dense.tokens, pair.dense.held)
