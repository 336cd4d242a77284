"""One attention layer's cache in mlx arrays. The state after N tokens depends on the tokens alone, not on chunks.

Rows of a sequence, oldest first: ``sink_tokens`` exact rows, closed blocks, exact recency window. Padding is never
stored, so the rows of a batch may hold different numbers of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import ModuleType

import mlx.core as mx
import numpy as np

from dkv._checks import check_count
from dkv._dispatch import op_module
from dkv.cache.closing import close_blocks
from dkv.cache.heads import check_groups, one_group, pick, put_back
from dkv.cache.lengths import check_crop, check_room
from dkv.cache.mlx_prefill import attend_past, every_row
from dkv.cache.pool import cut_blocks, stack_rows, with_counts
from dkv.config import DKVConfig, HeadGroup
from dkv.types import CompressedBlocks

FLOATS = (mx.float16, mx.bfloat16, mx.float32)
REBUILT_FROM = 16  # queries of a chunk from which its blocks' rows are rebuilt once rather than decoded per query

Spans = Sequence[tuple[int, int]]  # (first, count): where each sequence's real tokens lie in a padded chunk


class LayerCache:
    """Compressed blocks and exact rows of one layer, for a batch of sequences.

    Parameters
    ----------
    config : DKVConfig
        Says when blocks close, and how they are stored and routed where no groups are given.
    groups : sequence of HeadGroup, optional
        As ``config.head_groups`` gives them; each has blocks of its own. One group of all heads when None.
    selects : sequence of bool, optional
        As ``config.prefill_heads`` gives them. All heads select when None.

    Attributes
    ----------
    tokens : list of int
        Tokens seen by each sequence.
    rows : list of int
        Exact rows stored for each sequence: sink rows, then the window.
    block_counts : list of int
        Closed blocks of each sequence.
    dropped : list of int
        Closed blocks of each sequence that have left for good, by the config's ``when_full``.
    blocks : tuple of CompressedBlocks
        Those of each stored group; empty while no block is closed.
    rewinds : bool
        Whether the newest chunk can always be cropped: what it makes due then closes only as the next one comes.
    k_rows, v_rows : array [B, Hkv, capacity, D or Dv] or None
        Exact rows; those beyond ``rows`` are spare room.
    """

    def __init__(
        self, config: DKVConfig, groups: Sequence[HeadGroup] | None = None, selects: Sequence[bool] | None = None
    ) -> None:
        if selects is None and config.prefill_share not in (0, 1):
            raise ValueError("config has a prefill_share: give its config.prefill_heads(layer, heads) as selects")
        if groups is None and config.splits_heads:
            raise ValueError("config splits the heads: give its config.head_groups(layer, num_kv_heads) as groups")
        if config.route_every != 1:
            raise ValueError(f"route_every must be 1 in mlx, where every step selects, got {config.route_every}")
        self.config = config
        self.groups = None if groups is None else tuple(map(_stored, check_groups(groups, config)))
        self.selects = None if selects is None else tuple(selects)
        self.rewinds = False
        self.reset()

    def reset(self, batch_size: int = 0) -> None:
        """Forget everything. The next chunk starts a batch of ``batch_size``, of any size where that is 0."""
        self.tokens = [0] * batch_size
        self.rows = [0] * batch_size
        self.block_counts = [0] * batch_size
        self.dropped = [0] * batch_size
        self.blocks: tuple[CompressedBlocks, ...] = ()
        self.k_rows: mx.array | None = None
        self.v_rows: mx.array | None = None

    def like(self) -> LayerCache:
        """An empty cache with the same settings."""
        return LayerCache(self.config, self.groups, self.selects)

    def head_groups(self) -> tuple[HeadGroup, ...]:
        """All groups, once keys were seen."""
        if self.groups is not None or self.k_rows is None:
            return self.groups or ()
        return one_group(self.config, self.k_rows.shape[1])

    def stored_groups(self) -> list[HeadGroup]:
        """The groups that ``blocks`` go by: those of heads that see sink and window alone have none."""
        return [group for group in self.head_groups() if group.config is not None]

    # what it holds

    @property
    def batch_size(self) -> int:
        return len(self.tokens)

    def _arrays(self) -> Iterator[mx.array]:
        yield from (rows for rows in (self.k_rows, self.v_rows) if rows is not None)
        for blocks in self.blocks:
            yield from (part for _, part in blocks.parts())

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, spare room included."""
        return sum(array.nbytes for array in self._arrays())

    @property
    def _row_nbytes(self) -> int:
        held = [rows for rows in (self.k_rows, self.v_rows) if rows is not None]
        return sum(rows.shape[1] * rows.shape[3] * rows.dtype.size for rows in held)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of dense K and V of every token seen, in the cache's dtype."""
        return sum(self.tokens) * self._row_nbytes

    @property
    def compressed_nbytes(self) -> int:
        """Bytes of the closed blocks."""
        return sum(blocks.nbytes for blocks in self.blocks)

    @property
    def compressed_dense_nbytes(self) -> int:
        """Bytes of the dense rows that the closed blocks stand for, of heads that forget them too."""
        return sum(self.block_counts) * self.config.block_size * self._row_nbytes

    @property
    def dropped_tokens(self) -> list[int]:
        """Tokens of each sequence whose blocks have left for good."""
        return [count * self.config.block_size for count in self.dropped]

    # appending

    def append(self, k: mx.array, v: mx.array, spans: Spans | None = None) -> None:
        """Store a chunk's rows, ``k [B, Hkv, n, D]`` and ``v [B, Hkv, n, Dv]``; of a padded one those of ``spans``."""
        batch, heads, length, _ = k.shape
        if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or k.dtype not in FLOATS:
            raise ValueError(
                f"values must be as the keys, {k.shape[:3]} of float16, bfloat16 or float32; "
                f"got {v.shape[:3]} of {v.dtype} for keys of {k.dtype}"
            )
        if self.tokens and self.batch_size != batch:
            raise ValueError(f"keys must have the cache's batch size {self.batch_size}, got {batch}")
        if self.groups is not None and sum(len(group.heads) for group in self.groups) != heads:
            raise ValueError(f"keys must have the kv heads of {[list(g.heads) for g in self.groups]}, got {heads}")
        if self.selects is not None and len(self.selects) != heads:
            raise ValueError(f"keys must have the {len(self.selects)} kv heads that selects names, got {heads}")
        for name, held, new in (("keys", self.k_rows, k), ("values", self.v_rows, v)):
            if held is not None and (held.shape[1], held.shape[3], held.dtype) != (heads, new.shape[3], new.dtype):
                raise ValueError(
                    f"{name} must be as the cache's: {held.shape[1]} heads of {held.shape[3]} channels, {held.dtype}; "
                    f"got {heads} of {new.shape[3]}, {new.dtype}"
                )
        if self.rewinds and self.tokens:
            self.close(self.config.window)
        added = [length] * batch if spans is None else [count for _, count in spans]
        lengths = (self.tokens, self.rows, self.block_counts) if self.tokens else ([0] * batch,) * 3
        check_room(self.config, *lengths, added)
        if not self.tokens:
            self.reset(batch)
        self._grow(k, v, max(self.rows) + length)
        assert self.k_rows is not None and self.v_rows is not None
        if len(set(self.rows)) == 1 and set(added) == {length}:
            start = self.rows[0]
            self.k_rows[:, :, start : start + length] = k
            self.v_rows[:, :, start : start + length] = v
        else:
            where = (mx.array(self.rows)[:, None] + mx.arange(length))[:, None, :, None]
            if spans is not None:  # the real rows first; what follows them lies in spare room
                k, v = (_rolled(chunk, [-first for first, _ in spans]) for chunk in (k, v))
            self.k_rows = mx.put_along_axis(self.k_rows, where, k, axis=2)
            self.v_rows = mx.put_along_axis(self.v_rows, where, v, axis=2)
        self.rows = [row + count for row, count in zip(self.rows, added, strict=True)]
        self.tokens = [token + count for token, count in zip(self.tokens, added, strict=True)]

    def _grow(self, k: mx.array, v: mx.array, needed: int) -> None:
        if self.k_rows is not None and self.k_rows.shape[2] >= needed:
            return
        capacity = -(-needed // self.config.block_size) * self.config.block_size
        self.k_rows, self.v_rows = _resized(self.k_rows, k, capacity), _resized(self.v_rows, v, capacity)

    # attending

    def attend(
        self, q: mx.array, spans: Spans | None = None, sm_scale: float | None = None, sink: mx.array | None = None
    ) -> mx.array:
        """Attend the newest rows' queries ``q [B, Hq, n, D]`` causally to everything seen, then close what is due.

        ``spans`` are those that the rows were appended with; the output of padding is 0.
        """
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        if spans is None and len(set(self.rows)) == 1 and len(set(self.tokens)) == 1:
            out = self._attend_even(q, scale, sink)
        else:
            length = q.shape[2]
            shift = [0] * self.batch_size if spans is None else [length - first - count for first, count in spans]
            # the last real query stands at the last row, so that causality is the plain one
            out = _rolled(self._attend_uneven(_rolled(q, shift), spans, scale, sink), [-each for each in shift])
        if spans is not None:
            out = mx.where(real_positions(spans, q.shape[2])[:, None, :, None], out, mx.array(0, dtype=out.dtype))
        if not self.rewinds:
            self.close(self.config.window)
        return out

    def _sparse_queries(self, length: int, tokens: int) -> int:
        """How many of a chunk's newest queries attend the key blocks that they select."""
        if length == 1 or self.config.chunk_top_k is not None:
            return 0
        return min(length, max(0, tokens - self.config.prefill_dense_below))

    def _attend_even(self, q: mx.array, scale: float, sink: mx.array | None) -> mx.array:
        length = q.shape[2]
        sparse = self._sparse_queries(length, self.tokens[0])
        if not sparse:
            return self._attend(q, None, scale, sink)
        out = self._attend_sparsely(q[:, :, length - sparse :], slice(0, self.batch_size), scale, sink)
        if sparse == length:
            return out
        return mx.concatenate([self._attend(q[:, :, : length - sparse], None, scale, sink, sparse), out], axis=2)

    def _attend_uneven(self, q: mx.array, spans: Spans | None, scale: float, sink: mx.array | None) -> mx.array:
        length = q.shape[2]
        counts = [length] * self.batch_size if spans is None else [count for _, count in spans]
        sparse = [
            min(count, self._sparse_queries(length, tokens)) for count, tokens in zip(counts, self.tokens, strict=True)
        ]
        if sparse == counts:
            assert self.v_rows is not None
            out = mx.zeros((*q.shape[:3], self.v_rows.shape[3]), dtype=q.dtype)
        else:
            out = self._attend(q, spans, scale, sink)
        for row, count in enumerate(sparse):
            if count:
                one = slice(row, row + 1)
                out[one, :, length - count :] = self._attend_sparsely(q[one, :, length - count :], one, scale, sink)
        return out

    def _attend_sparsely(self, q: mx.array, sequences: slice, scale: float, sink: mx.array | None) -> mx.array:
        """The newest queries of sequences of equal length over the key blocks that they select."""
        assert self.k_rows is not None and self.v_rows is not None
        row, stored, pasts = sequences.start, iter(self.blocks), []
        sinks, closed = min(self.tokens[row], self.config.sink_tokens), self.block_counts[row]
        for heads, config, _ in self.head_groups():
            k, v = (pick(x[sequences, :, : self.rows[row]], heads, x.shape[1]) for x in (self.k_rows, self.v_rows))
            blocks = next(stored) if self.blocks and config is not None else None
            if blocks is not None and closed:
                every = dataclasses.replace(blocks, block_counts=None)
                pasts.append(every_row(heads, k, v, sinks, every.map(lambda part: part[sequences, :closed])))
            else:
                pasts.append(every_row(heads, k, v, sinks, None))
        selects = self.selects or (self.config.prefill_share == 1,) * self.k_rows.shape[1]
        tail = min(self.config.prefill_tail, q.shape[2])  # attends everything
        head, outs = q.shape[2] - tail, []
        if head:
            older = [past.without(tail) for past in pasts]
            outs.append(attend_past(q[:, :, :head], older, selects, self.config, scale, sink))
        if tail:
            unlimited = self.config.unlimited_prefill()
            outs.append(attend_past(q[:, :, head:], pasts, (True,) * len(selects), unlimited, scale, sink))
        return mx.concatenate(outs, axis=2)

    def _attend(
        self, q: mx.array, spans: Spans | None, scale: float, sink: mx.array | None, behind: int = 0
    ) -> mx.array:
        """A chunk's queries over all rows; ``behind`` rows at the end come after them."""
        assert self.k_rows is not None and self.v_rows is not None
        stored, length = max(self.rows) - behind, q.shape[2]
        k, v = self.k_rows[:, :, :stored], self.v_rows[:, :, :stored]
        lens = mx.array(self.rows) if len(set(self.rows)) > 1 or spans is not None else None
        if not self.blocks:
            return _exact(q, k, v, lens, scale, sink)
        even = len(set(self.block_counts)) == 1
        groups, blocks_of = self.head_groups(), iter(self.blocks)
        heads_kv, heads_q = k.shape[1], q.shape[1]
        outs = []
        for heads, config, _ in groups:
            own_q, own_k, own_v = (pick(part, heads, heads_kv) for part in (q, k, v))
            own_sink = None if sink is None else pick(sink.reshape(1, heads_q), heads, heads_kv).reshape(-1)
            blocks = None if config is None else next(blocks_of)
            if config is None or blocks is None:
                outs.append(_exact(own_q, own_k, own_v, lens, scale, own_sink))
            elif length >= REBUILT_FROM and config.chunk_top_k is None and lens is None and even:
                rebuilt = _ops("compress").reconstruct_blocks(blocks)
                every_k, every_v = (mx.concatenate([a, b], axis=2) for a, b in zip(rebuilt, (own_k, own_v)))
                outs.append(_exact(own_q, every_k, every_v, None, scale, own_sink))
            else:
                chosen = self._route(config, blocks, own_q, spans, scale, length + behind)
                decode = _ops("decode").decode_attention
                state = decode(own_q, blocks, own_k, own_v, chosen, lens, None, None, own_sink, scale)
                outs.append(state[0])
        return put_back(outs, [group.heads for group in groups])

    def _route(
        self,
        config: DKVConfig,
        blocks: CompressedBlocks,
        q: mx.array,
        spans: Spans | None,
        scale: float,
        length: int,
    ) -> mx.array:
        """The blocks that queries of a chunk of ``length`` attend."""
        total = blocks.num_blocks
        top_k = config.top_k if length == 1 else (config.chunk_top_k or total)
        if top_k >= total:
            every = mx.arange(total, dtype=mx.int32)[None]
            every = mx.where(every < mx.array(self.block_counts)[:, None], every, mx.array(-1, dtype=mx.int32))
            return mx.broadcast_to(every[:, None], (self.batch_size, blocks.num_kv_heads, total))
        if spans is not None:  # padding, which lies before the real queries here, has no say in the selection
            first = mx.array([q.shape[2] - count for _, count in spans])[:, None, None, None]
            q = mx.where(mx.arange(q.shape[2])[:, None] >= first, q, q[:, :, -1:])
        sinks = 0 if config.sink_tokens else min(config.sink_blocks, top_k)
        route = _ops("route").route_blocks
        return route(q, blocks, top_k, config.router, config.share, scale, sinks, config.recent_blocks)

    # closing blocks

    def close(self, window: int) -> None:
        """Compress the oldest full blocks behind the sink tokens, leaving at least ``window`` rows exact.

        A block closes once the window holds ``window + block_size`` rows, so the same blocks close at the same tokens
        however the tokens came.
        """
        close_blocks(self, window)

    # surgery: each of these walks every part

    def crop(self, count: int) -> int:
        """Remove the newest ``count`` tokens of every sequence, all that it has where it has fewer; how many at most.

        Raises
        ------
        ValueError
            When a removed token lies in a closed block. Nothing was changed then.
        """
        check_count("count", count)
        gone = [min(count, token) for token in self.tokens]
        check_crop(self.config, self.tokens, self.rows, self.block_counts, gone, f"trim of {count} tokens")
        self.rows = [row - lost for row, lost in zip(self.rows, gone, strict=True)]
        self.tokens = [token - lost for token, lost in zip(self.tokens, gone, strict=True)]
        if not any(self.tokens):
            self.reset(self.batch_size)
        return max(gone, default=0)

    def select(self, index: Sequence[int]) -> None:
        """Make the batch the sequences of ``index``, repeats allowed."""
        if any(not 0 <= i < self.batch_size for i in index):
            raise IndexError(f"index must name sequences 0..{self.batch_size - 1}, got {list(index)}")
        where = mx.array(list(index), dtype=mx.int32)
        self.tokens, self.rows, self.block_counts, self.dropped = (
            [values[i] for i in index] for values in (self.tokens, self.rows, self.block_counts, self.dropped)
        )
        if not any(self.tokens):
            self.reset(len(index))
            return
        capacity = -(-max(self.rows) // self.config.block_size) * self.config.block_size
        assert self.k_rows is not None and self.v_rows is not None
        self.k_rows, self.v_rows = (
            mx.take(part[:, :, :capacity], where, axis=0) for part in (self.k_rows, self.v_rows)
        )
        most = max(self.block_counts)
        self.blocks = tuple(
            with_counts(cut_blocks(blocks.map(lambda part: mx.take(part, where, axis=0)), most), self.block_counts)
            for blocks in (self.blocks if most else ())
        )


def joined(layers: Sequence[LayerCache]) -> LayerCache:
    """One batch of the sequences of several caches with the same settings; a cache may have seen nothing yet."""
    one = layers[0].like()
    one.reset(sum(layer.batch_size for layer in layers))
    full = [layer for layer in layers if layer.k_rows is not None]
    if not full:
        return one
    for layer in layers:
        if (layer.config, layer.groups, layer.selects) != (one.config, one.groups, one.selects):
            raise ValueError("caches of one batch must have the same config and head groups")
        if layer.k_rows is not None and not _same_rows(layer, full[0]):
            raise ValueError("caches of one batch must have the same kv heads, channels and dtype")
    for name in ("tokens", "rows", "block_counts", "dropped"):
        setattr(one, name, [value for layer in layers for value in getattr(layer, name)])
    stored = max(one.rows)
    capacity = -(-stored // one.config.block_size) * one.config.block_size
    for name in ("k_rows", "v_rows"):
        like = getattr(full[0], name)
        rows = mx.zeros((one.batch_size, like.shape[1], capacity, like.shape[3]), dtype=like.dtype)
        first = 0
        for layer in layers:
            held, batch = getattr(layer, name), layer.batch_size
            if held is not None:
                most = min(max(layer.rows), held.shape[2])
                rows[first : first + batch, :, :most] = held[:, :, :most]
            first += batch
        setattr(one, name, rows)
    if any(one.block_counts):
        one.blocks = tuple(
            with_counts(
                stack_rows([_single(layer, group, row) for layer in layers for row in range(layer.batch_size)]),
                one.block_counts,
            )
            for group in range(len(one.stored_groups()))
        )
    return one


def _stored(group: HeadGroup) -> HeadGroup:
    """The group with its weights as mlx computes and saves them, so that a loaded one is equal."""
    if group.channel_weight is None:
        return group
    weight = np.array(group.channel_weight, np.float32).tolist()
    return group._replace(channel_weight=tuple(map(tuple, weight)))


def _single(layer: LayerCache, group: int, row: int) -> CompressedBlocks | None:
    """The blocks of one sequence, None where it has none."""
    count = layer.block_counts[row]
    if not count:
        return None
    every = dataclasses.replace(layer.blocks[group], block_counts=None)
    return every.map(lambda part: part[row : row + 1, :count])


def _same_rows(layer: LayerCache, other: LayerCache) -> bool:
    pairs = ((layer.k_rows, other.k_rows), (layer.v_rows, other.v_rows))
    return all((a.shape[1], a.shape[3], a.dtype) == (b.shape[1], b.shape[3], b.dtype) for a, b in pairs)  # type: ignore[union-attr]


def _ops(name: str) -> ModuleType:
    """The Metal kernels where Metal is found, else their twin."""
    return op_module("mlx", name)


def real_positions(spans: Spans, length: int) -> mx.array:
    """Which positions of a padded chunk hold tokens, bool ``[B, length]``."""
    first, count = (mx.array(values)[:, None] for values in zip(*spans, strict=True))
    return (mx.arange(length) >= first) & (mx.arange(length) < first + count)


def _exact(
    q: mx.array, k: mx.array, v: mx.array, lens: mx.array | None, scale: float, sink: mx.array | None
) -> mx.array:
    """Attention over plain rows, causal and bottom-right aligned; mlx's own where all sequences are as long."""
    if lens is not None:
        return _ops("decode").exact_attention(q, k, v, True, lens, None, None, sink, scale)[0]
    mask, dtype = "causal" if q.shape[2] > 1 else None, q.dtype
    if dtype != mx.float32 and mx.default_device().type == mx.DeviceType.cpu:  # where mlx would round every step
        q, k, v = (x.astype(mx.float32) for x in (q, k, v))
        sink = None if sink is None else sink.astype(mx.float32)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sink).astype(dtype)


def _rolled(x: mx.array, shifts: Sequence[int]) -> mx.array:
    """``x [B, H, n, D]`` with each sequence's rows moved on by its shift, round the end."""
    if not any(shifts):
        return x
    index = (mx.arange(x.shape[2]) - mx.array(list(shifts))[:, None]) % x.shape[2]
    return mx.take_along_axis(x, index[:, None, :, None], axis=2)


def _resized(buffer: mx.array | None, like: mx.array, capacity: int) -> mx.array:
    grown = mx.zeros((*like.shape[:2], capacity, like.shape[3]), dtype=like.dtype)
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown
