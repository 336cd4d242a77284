"""mlx-lm's caches under any order of its operations, single ones and batches, beside plain rows."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lifecycle_dense import DIM, HEADS, QUERY_HEADS, Dense, drawn, exact
from lifecycle_machine import MOST_CACHES, MOST_SEQUENCES, chunk_of, configs, cuts, lengths, numbers
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models import llama

from dkv import DKVConfig
from dkv.integrations.mlx_lm import BatchDKVCache, DKVCache, attach

MOST_TOKENS = 400


def hook() -> None:
    """mlx-lm's llama attends through dkv."""
    shape = {"hidden_size": QUERY_HEADS * DIM, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": DIM}
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": HEADS}
    attach(llama.Model(llama.ModelArgs("llama", rms_norm_eps=1e-5, vocab_size=8, **shape, **heads)))


class Pair:
    """A cache of one layer and what it must equal."""

    def __init__(self, cache: DKVCache, dense: Dense) -> None:
        self.cache, self.dense = cache, dense

    @property
    def batched(self) -> bool:
        return isinstance(self.cache, BatchDKVCache)

    def fingerprint(self) -> list[Any]:
        """Every byte held, the lengths and the padding to come."""
        held = [(name, bytes(memoryview(part))) for name, part in tree_flatten(self.cache.state)]
        return [held, getattr(self.cache, "_left", None), getattr(self.cache, "_real", None)]

    def refuses(self, call: Any) -> None:
        """The call is refused and nothing has changed."""
        before = self.fingerprint()
        try:
            call()
        except ValueError:
            assert self.fingerprint() == before
        else:
            raise AssertionError("the call was not refused")

    def step(self, rng: np.random.Generator, length: int, padding: str = "none") -> None:
        """Give the cache and the rows a chunk, whose outputs must be equal."""
        batch = len(self.dense.rows)
        if not self.batched or (padding == "left" and any(self.dense.tokens)):
            padding = "none"
        real = chunk_of(rng, padding, batch, length)
        if padding == "left":
            self.cache.prepare(left_padding=(~real).sum(1).tolist())
        elif padding == "right":
            self.cache.prepare(lengths=real.sum(1).tolist(), right_padding=(~real).sum(1).tolist())
        q, k, v = drawn(rng, 1, batch, length)
        if self.dense.has_room(real.sum(1).tolist(), self.dense.config.window):
            out, wanted = self.attend(q, k, v), self.dense.step(q, k, v, real)
            exact(np.where(real[:, None, :, None], out, 0), wanted[0])
        else:
            self.refuses(lambda: self.attend(q, k, v))
            if padding == "left":  # it is still to come
                self.cache = BatchDKVCache(self.cache.layer.config, self.cache.layer.groups, batch)
        if padding == "right":
            self.cache.finalize()

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """As a layer of a model does; ``[B, Hq, n, D]``."""
        self.cache.update_and_fetch(mx.array(k[0]), mx.array(v[0]))
        return np.array(self.cache.attend(mx.array(q[0]), DIM**-0.5, "causal" if q.shape[3] > 1 else None, None))


class MlxCacheMachine(RuleBasedStateMachine):
    """Rules pick one of a few caches; every change is followed by a decode step of what it changed."""

    @initialize(config=configs(steps=(1,)), seed=numbers, length=st.integers(1, 200), batch=st.integers(1, 3))
    def begin(self, config: DKVConfig, seed: int, length: int, batch: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.groups = config.head_groups(0, HEADS) if config.splits_heads else None
        self.config = dataclasses.replace(config, tiers=(), profile=None)
        self.pairs: list[Pair] = []
        self.folder = tempfile.TemporaryDirectory()
        for batched in (False, True):
            self.fresh(batched, batch)
            self.pairs[-1].step(self.rng, length)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def pair(self, which: int, batched: bool | None = None) -> Pair | None:
        pairs = [pair for pair in self.pairs if batched is None or pair.batched == batched]
        return pairs[which % len(pairs)] if pairs else None

    def add(self, cache: DKVCache, dense: Dense) -> None:
        self.pairs = [*self.pairs[-MOST_CACHES:], Pair(cache, dense)]
        self.pairs[-1].step(self.rng, 1)

    @rule(batched=st.booleans(), batch=st.integers(1, 3))
    def fresh(self, batched: bool, batch: int) -> None:
        cache = BatchDKVCache(self.config, self.groups, batch) if batched else DKVCache(self.config, self.groups)
        self.pairs = [*self.pairs[-MOST_CACHES:], Pair(cache, Dense(self.config, 1).start(batch if batched else 1))]

    @rule(which=numbers, length=lengths, padding=st.sampled_from(["none", "left", "right"]))
    def append(self, which: int, length: int, padding: str) -> None:
        pair = self.pair(which)
        if max(pair.dense.tokens) + length <= MOST_TOKENS:
            pair.step(self.rng, length, padding)

    @rule(which=numbers, count=st.integers(1, 10))
    def decode(self, which: int, count: int) -> None:
        for _ in range(count):
            self.pair(which).step(self.rng, 1)

    @rule(which=numbers, count=cuts)
    def trim(self, which: int, count: int) -> None:
        pair = self.pair(which)
        lost = [min(count, tokens) for tokens in pair.dense.tokens]
        if pair.dense.can_lose(lost):
            assert pair.cache.trim(count) == max(lost)
            pair.dense.lose(lost)
        else:
            pair.refuses(lambda: pair.cache.trim(count))
        pair.step(self.rng, 1)

    @rule(which=numbers, beyond=st.integers(0, 2))
    def trim_to_a_block(self, which: int, beyond: int) -> None:
        """As many as no block holds, or a few more."""
        dense = self.pair(which).dense
        ends = [[min(count, own) for own in dense.tokens] for count in range(1, max(dense.tokens))]
        if any(dense.held):
            self.trim(which, sum(map(dense.can_lose, ends)) + beyond)

    @rule(which=numbers)
    def copy(self, which: int) -> None:
        pair = self.pair(which)
        self.add(copy.deepcopy(pair.cache), pair.dense.copy())
        pair.step(self.rng, 1)

    @rule(which=numbers)
    def save_and_load(self, which: int) -> None:
        pair, path = self.pair(which), os.path.join(self.folder.name, "cache.safetensors")
        mlx_cache.save_prompt_cache(path, [pair.cache])
        self.add(mlx_cache.load_prompt_cache(path)[0], pair.dense.copy())
        pair.step(self.rng, 1)

    @rule(first=numbers, second=numbers)
    def merge(self, first: int, second: int) -> None:
        pairs = [self.pair(which, False) for which in (first, second)]
        if None in pairs:
            return
        dense = Dense(self.config, 1)
        dense.rows = [row for pair in pairs for row in pair.dense.copy().rows]
        self.add(DKVCache.merge([pair.cache for pair in pairs]), dense)
        for pair in pairs:
            pair.step(self.rng, 1)

    @rule(first=numbers, second=numbers)
    def extend(self, first: int, second: int) -> None:
        one, other = self.pair(first, True), self.pair(second, True)
        if one is None or one is other or len(one.dense.rows) + len(other.dense.rows) > MOST_SEQUENCES:
            return
        one.cache.extend(other.cache)
        one.dense.rows = one.dense.rows + other.dense.copy().rows
        one.step(self.rng, 1)
        other.step(self.rng, 1)

    @rule(which=numbers, seed=numbers)
    def filter(self, which: int, seed: int) -> None:
        pair = self.pair(which, True)
        if pair is None:
            return
        batch = len(pair.dense.rows)
        order = np.random.default_rng(seed)
        index = order.permutation(batch)[: order.integers(1, batch + 1)].tolist()
        pair.cache.filter(index)
        pair.dense.select(index)
        pair.step(self.rng, 1)

    @rule(which=numbers, row=numbers)
    def extract(self, which: int, row: int) -> None:
        pair = self.pair(which, True)
        if pair is None:
            return
        dense = pair.dense.copy()
        dense.select([row % len(dense.rows)])
        self.add(pair.cache.extract(row % len(pair.dense.rows)), dense)
        pair.step(self.rng, 1)

    @invariant()
    def lengths_are_those_of_the_rows(self) -> None:
        for pair in getattr(self, "pairs", ()):
            layer = pair.cache.layer
            if layer.tokens:
                assert (layer.tokens, layer.block_counts) == (pair.dense.tokens, pair.dense.held)
                assert pair.cache.dropped_tokens == pair.dense.dropped
