"""One attention layer's cache. The state after N tokens depends on the tokens alone, not on how they were chunked.

Rows of a sequence, oldest first: ``sink_tokens`` exact rows, closed blocks, exact recency window. Padding is never
stored, so the rows of a batch may hold different numbers of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dkv.cache.chunks import check_chunk, sequence_numbers
from dkv.cache.closing import close_blocks
from dkv.cache.heads import check_groups, codec_of, one_group, pick, put_back
from dkv.cache.lengths import check_crop, check_room
from dkv.cache.pool import cut_blocks, with_counts
from dkv.cache.prefill import FEWEST_QUERIES, Past, alike, attend_past, dense_causal
from dkv.cache.routing import Routing, chunk_blocks
from dkv.config import EVERY_POSITION, DKVConfig, HeadGroup
from dkv.kernels.torch.decode import (
    attend_rows,
    block_parts,
    grouped_queries,
    merge_selected,
    row_part,
    sink_rows,
    softmax_with_sink,
)
from dkv.kernels.torch.merge import rounded
from dkv.types import CompressedBlocks


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
    offset : int
        Positions seen per sequence, padding included; what a framework calls the sequence length.
    tokens : list of int
        Real tokens seen by each sequence.
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
    visited, visible : int
        Key blocks that query blocks attended in block-sparse prefill, and those that they could see.
    k_rows, v_rows : Tensor [B, Hkv, capacity, D or Dv] or None
        Exact rows; those beyond ``rows`` are spare room.
    """

    def __init__(
        self, config: DKVConfig, groups: Sequence[HeadGroup] | None = None, selects: Sequence[bool] | None = None
    ) -> None:
        self.config = config
        self.groups: tuple[HeadGroup, ...] | None = None
        self.rewinds = False
        self.reset()
        self.configure(config, groups, selects)

    def configure(
        self, config: DKVConfig, groups: Sequence[HeadGroup] | None = None, selects: Sequence[bool] | None = None
    ) -> None:
        """Go on with other settings; those of the codec may differ only while no block is closed."""
        if selects is None and config.prefill_share not in (0, 1):
            raise ValueError("config has a prefill_share: give its config.prefill_heads(layer, heads) as selects")
        if groups is None and config.splits_heads:
            raise ValueError("config splits the heads: give its config.head_groups(layer, num_kv_heads) as groups")
        groups = None if groups is None else check_groups(groups, config)
        held = max(self.block_counts, default=0)
        if config.max_blocks is not None and held > config.max_blocks:
            raise ValueError(f"config has a max_blocks of {config.max_blocks}, a sequence holds {held} closed blocks")
        if any(self.block_counts):
            assert self.k_rows is not None
            heads = self.k_rows.shape[1]
            now, then = (
                [codec_of(group) for group in each or one_group(own, heads)]
                for each, own in ((self.groups, self.config), (groups, config))
            )
            if now != then:
                raise ValueError("config stores blocks in another way than the closed ones are stored")
        self.config, self.groups = config, groups
        self.selects = None if selects is None else tuple(selects)
        self._routing = Routing()

    def reset(self) -> None:
        """Forget everything; the next append starts a new batch of any size."""
        self.offset = 0
        self.tokens: list[int] = []
        self.rows: list[int] = []
        self.block_counts: list[int] = []
        self.dropped: list[int] = []
        self.blocks: tuple[CompressedBlocks, ...] = ()
        self.k_rows: Tensor | None = None
        self.v_rows: Tensor | None = None
        self.visited = self.visible = 0
        self.real: Tensor | None = None  # [B, offset] bool, None while there is no padding
        self._routing = Routing()

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

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name. Whatever copies, counts or saves a cache walks this."""
        held = {"k_rows": self.k_rows, "v_rows": self.v_rows, "real": self.real}
        for index, blocks in enumerate(self.blocks):
            held.update({f"groups.{index}.{name}": part for name, part in blocks.parts()})
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def _row_nbytes(self) -> int:
        held = [rows for rows in (self.k_rows, self.v_rows) if rows is not None]
        return sum(rows.shape[1] * rows.shape[3] * rows.element_size() for rows in held)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of dense K and V of every position seen, in the cache's dtype."""
        return self.batch_size * self.offset * self._row_nbytes

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

    # appending and attending

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        padding: Tensor | None = None,
        sm_scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Append a chunk, attend it causally to everything seen, then close what is due.

        Parameters
        ----------
        q : Tensor [B, Hq, n, D]
        k, v : Tensor [B, Hkv, n, D or Dv]
        padding : Tensor [B or 1, n], bool, optional
            False where a position is padding; it is not stored and its output is 0.
        sm_scale, softcap, sink
            As in :func:`dkv.exact_attention`.

        Returns
        -------
        Tensor [B, Hq, n, Dv]
        """
        check_chunk(self, q, k, v, padding)
        padding = None if padding is None or bool(padding.all()) else padding.expand(q.shape[0], -1)
        if self.rewinds:
            self.close(self.config.window)
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        fresh = self.offset == 0
        last = self._append(k, v, padding)
        if q.shape[2] > 1:
            self._routing = Routing()
        dense = self._dense_queries(q.shape[2], padding)
        decodes = bool(self.blocks) and dense >= FEWEST_QUERIES and self._chunks_attend_all()
        if dense == 0 or decodes:
            out = q.new_zeros(*q.shape[:2], 0, v.shape[3])
        elif fresh and last is None and softcap is None and sink is None:
            out = dense_causal(q[:, :, :dense], k[:, :, :dense], v[:, :, :dense], scale)
        else:
            out = self._attend(q, last, padding, scale, softcap, sink, dense)
        if decodes or self._sparse(q.shape[2]):
            done = out.shape[2]
            out = torch.nn.functional.pad(out, (0, 0, 0, q.shape[2] - done))
            self._attend_decoded(out, q, padding, scale, softcap, sink, done)
        if not self.rewinds:
            self.close(self.config.window)
        return out if padding is None else torch.where(padding[:, None, :, None], out, out.new_zeros(()))

    def _chunks_attend_all(self) -> bool:
        configs = (self.config, *(group.config for group in self.head_groups()))
        return all(config is None or config.chunk_top_k is None for config in configs)

    def _sparse(self, length: int) -> bool:
        return length > 1 and self.config.chunk_top_k is None and max(self.tokens) > self.config.prefill_dense_below

    def _dense_queries(self, length: int, padding: Tensor | None) -> int:
        """How many queries of the chunk come before the last one that attends everything."""
        if not self._sparse(length):
            return length
        if padding is not None or len(set(self.tokens)) > 1:
            return length if min(self.tokens) - length < self.config.prefill_dense_below else 0
        return min(length, max(0, self.config.prefill_dense_below - self.tokens[0] + length))

    def _attend_decoded(
        self,
        out: Tensor,
        q: Tensor,
        padding: Tensor | None,
        scale: float,
        softcap: float | None,
        sink: Tensor | None,
        done: int,
    ) -> None:
        """Into ``out``, over decoded rows: dense queries from ``done`` on, and all that select key blocks."""
        dense_below = self.config.prefill_dense_below if self._sparse(q.shape[2]) else EVERY_POSITION
        for sequences, real in alike(self.tokens, q, padding):
            first = max(0, len(real) - max(0, self.tokens[sequences.start] - dense_below))
            pasts = self._pasts(sequences)
            for at, config, selects, newer, sparse in self._stretches(real, first, done):
                state, visited, visible = attend_past(
                    q[sequences].index_select(2, at),
                    [(heads, past.without(newer)) for heads, past in pasts],
                    selects,
                    config,
                    scale,
                    softcap,
                    sink,
                )
                out[sequences].index_copy_(2, at, rounded(state, out.dtype))
                if sparse:
                    self.visited += visited
                    self.visible += visible

    def _stretches(
        self, real: Tensor, first: int, done: int
    ) -> list[tuple[Tensor, DKVConfig, tuple[bool, ...], int, bool]]:
        """Queries of a sequence, the limits of their selection, who selects, the rows newer than the last, if sparse.

        The ``real`` ones before ``first`` attend everything, and so do the last ``prefill_tail`` of the others.
        """
        end = len(real) - min(self.config.prefill_tail, len(real) - first)
        every, selects = self.config.unlimited_prefill(), self._selects()
        all_heads = (True,) * len(selects)
        dense = real[:first]
        parts = [
            (dense[dense >= done], every, all_heads, len(real) - first, False),
            (real[first:end], self.config, selects, len(real) - end, True),
            (real[end:], every, all_heads, 0, True),
        ]
        return [part for part in parts if len(part[0])]

    def _selects(self) -> tuple[bool, ...]:
        assert self.k_rows is not None
        return self.selects or (self.config.prefill_share == 1,) * self.k_rows.shape[1]

    def _pasts(self, sequences: slice) -> list[tuple[tuple[int, ...], Past]]:
        """The kv heads of every group and the rows that they have of some sequences of equal length."""
        assert self.k_rows is not None and self.v_rows is not None
        row, stored, found = sequences.start, iter(self.blocks), []
        sinks = min(self.tokens[row], self.config.sink_tokens)
        for heads, config, _ in self.head_groups():
            k, v = (pick(x[sequences, :, : self.rows[row]], heads, x.shape[1]) for x in (self.k_rows, self.v_rows))
            blocks = next(stored) if self.blocks and config is not None else None
            count = self.block_counts[row]
            if blocks is not None:
                blocks = blocks.map(functools.partial(_part_of, sequences=sequences, count=count))
            found.append((heads, Past(k, v, sinks, blocks if count else None)))
        return found

    def _attend(
        self,
        q: Tensor,
        last: Tensor | None,
        padding: Tensor | None,
        scale: float,
        softcap: float | None,
        sink: Tensor | None,
        count: int,
    ) -> Tensor:
        """The first ``count`` queries of a chunk over all rows."""
        assert self.k_rows is not None and self.v_rows is not None
        length, stored = q.shape[2], max(self.rows)
        if last is None and length > 1:
            last = torch.arange(stored - length, stored, device=q.device).expand(q.shape[0], -1)
        ragged = len(set(self.rows)) > 1
        if ragged and last is None:
            last = torch.tensor(self.rows, device=q.device)[:, None] - 1
        if count < length:
            assert last is not None
            q, last = q[:, :, :count], last[:, :count]
            padding = None if padding is None else padding[:, :count]
        wide = q.float()  # partial outputs stay float32 until the end
        k, v = self.k_rows[:, :, :stored], self.v_rows[:, :, :stored]
        if self.blocks and length == 1:
            out = self._attend_step(wide, k, v, last, scale, softcap, sink, clean=not ragged)
            return rounded(out, q.dtype)
        state = attend_rows(wide, k, v, last, None, softcap, sink, scale, clean=not ragged)
        if self.blocks:
            state = self._merge_blocks(state, wide, padding, scale, softcap)
        return rounded(state[0], q.dtype)

    def _attend_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        last: Tensor | None,
        scale: float,
        softcap: float | None,
        sink: Tensor | None,
        clean: bool,
    ) -> Tensor:
        """One query over the exact rows ``k, v`` and the blocks it selects, in one softmax."""
        groups, heads_kv = self.head_groups(), k.shape[1]
        chosen = self._routing.step(self.config, groups, self.blocks, self.block_counts, q, scale)
        grouped = grouped_queries(q, heads_kv)
        logits, values = row_part(grouped, k, v, last, None, scale, softcap, clean)
        extra = None if sink is None else sink_rows(sink, logits)[None]
        weights, outs = [], []
        for (heads, _, _), selected in zip(groups, chosen, strict=True):
            exact, own = pick(logits, heads, heads_kv), pick(grouped, heads, heads_kv)
            parts = [] if selected is None else block_parts(own, selected, scale, softcap)
            weight, _ = softmax_with_sink(
                torch.cat([exact, *(part for part, _ in parts)], dim=3) if parts else exact,
                None if extra is None else pick(extra, heads, heads_kv),
            )
            exact, *others = weight.split([exact.shape[3], *(part.shape[3] for part, _ in parts)], dim=3)
            weights.append(exact)
            found = [each(part) for (_, each), part in zip(parts, others, strict=True)]
            outs.append(sum(found) if found else own.new_zeros(*own.shape[:3], v.shape[3]))
        order = [group.heads for group in groups]
        out = values(put_back(weights, order)) + put_back(outs, order)
        return out.reshape(*q.shape[:3], v.shape[3])

    def _merge_blocks(
        self, exact: tuple[Tensor, Tensor], q: Tensor, padding: Tensor | None, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """The state of a chunk's exact rows merged with that of the blocks, every group of heads on its own."""
        groups, stored = self.head_groups(), iter(self.blocks)
        heads_kv = sum(len(group.heads) for group in groups)
        states = []
        for heads, config, _ in groups:
            out, lse, queries = (pick(part, heads, heads_kv) for part in (*exact, q))
            if config is None:
                states.append((out, lse))
                continue
            chosen = chunk_blocks(config, next(stored), self.block_counts, queries, padding, scale)
            states.append(merge_selected((out, lse), queries, chosen, scale, softcap))
        order = [group.heads for group in groups]
        return put_back([out for out, _ in states], order), put_back([lse for _, lse in states], order)

    def _append(self, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor | None:
        """Store a chunk's real rows; gives the last row a query sees ``[B, n]``, None where plain causal is right."""
        batch, length = k.shape[0], k.shape[2]
        if self.tokens and self.batch_size != batch:
            raise ValueError(f"k must have the cache's batch size {self.batch_size}, got {batch}")
        if self.groups is not None and sum(len(group.heads) for group in self.groups) != k.shape[1]:
            raise ValueError(f"k must have the kv heads of {[list(g.heads) for g in self.groups]}, got {k.shape[1]}")
        self.check_room(k, padding)
        if not self.tokens:
            self.tokens, self.rows, self.block_counts, self.dropped = ([0] * batch for _ in range(4))
        if padding is not None or self.real is not None:
            new = torch.ones(batch, length, dtype=torch.bool, device=k.device) if padding is None else padding
            old = self.real
            if old is None:
                old = torch.ones(batch, self.offset, dtype=torch.bool, device=k.device)
            self.real = torch.cat([old, new], dim=1)
        self.offset += length
        if padding is None and len(set(self.rows)) == 1:
            self._write_uniform(k, v)
            self.rows = [row + length for row in self.rows]
            self.tokens = [token + length for token in self.tokens]
            return None
        real = torch.ones(batch, length, dtype=torch.bool, device=k.device) if padding is None else padding
        rank = real.long().cumsum(1)
        start = torch.tensor(self.rows, device=k.device)[:, None]
        order = (~real).long().argsort(dim=1, stable=True)  # real rows first, in order
        added = rank[:, -1].tolist()
        self._grow(k, v, max(self.rows) + length)
        assert self.k_rows is not None and self.v_rows is not None
        where = (start + torch.arange(length, device=k.device))[:, None, :, None]
        for rows, chunk in ((self.k_rows, k), (self.v_rows, v)):
            packed = chunk.gather(2, order[:, None, :, None].expand_as(chunk))
            rows.scatter_(2, where.expand_as(packed), packed)
        self.rows = [a + b for a, b in zip(self.rows, added, strict=True)]
        self.tokens = [a + b for a, b in zip(self.tokens, added, strict=True)]
        return start + rank - 1

    def check_room(self, k: Tensor, padding: Tensor | None = None) -> None:
        """Refuse a chunk that would close more blocks than the config's ``max_blocks``, where that is an error."""
        batch = k.shape[0]
        added = [k.shape[2]] * batch if padding is None else padding.sum(1).tolist()
        lengths = (self.tokens, self.rows, self.block_counts) if self.tokens else ([0] * batch,) * 3
        check_room(self.config, *lengths, added)

    def _write_uniform(self, k: Tensor, v: Tensor) -> None:
        start, length = self.rows[0], k.shape[2]
        self._grow(k, v, start + length)
        assert self.k_rows is not None and self.v_rows is not None
        self.k_rows[:, :, start : start + length] = k
        self.v_rows[:, :, start : start + length] = v

    def _grow(self, k: Tensor, v: Tensor, needed: int) -> None:
        """Make room for ``needed`` rows; buffers are never shared with what the caller holds."""
        held = self.k_rows
        sealed = held is not None and held.is_inference() and not torch.is_inference_mode_enabled()
        if held is not None and not sealed and held.shape[2] >= needed:
            return
        room = self.config.block_size
        capacity = -(-needed // room) * room
        self.k_rows, self.v_rows = _resized(self.k_rows, k, capacity), _resized(self.v_rows, v, capacity)

    # closing blocks

    def close(self, window: int) -> None:
        """Compress the oldest full blocks behind the sink tokens, leaving at least ``window`` rows exact.

        A block closes once the window holds ``window + block_size`` rows, so the same blocks close at the same tokens
        however the tokens came.
        """
        if close_blocks(self, window):
            self._routing = self._routing.forgotten()

    # surgery: each of these walks every part

    def crop(self, count: int) -> None:
        """Remove the newest ``count`` positions; all of them when fewer were seen.

        Raises
        ------
        ValueError
            When a removed token lies in a closed block. Nothing was changed then.
        """
        if count < 0:
            raise ValueError(f"count must be 0 or more, got {count}")
        if count == 0 or self.offset == 0:
            return
        if count >= self.offset:
            self.reset()
            return
        gone = [count] * self.batch_size if self.real is None else self.real[:, -count:].sum(1).tolist()
        check_crop(self.config, self.tokens, self.rows, self.block_counts, gone, f"crop of {count} positions")
        self._routing = Routing()
        self.offset -= count
        self.rows = [row - lost for row, lost in zip(self.rows, gone, strict=True)]
        self.tokens = [token - lost for token, lost in zip(self.tokens, gone, strict=True)]
        if self.real is not None:
            self.real = self.real[:, :-count].clone()

    def select(self, index: Sequence[int] | Tensor, mask: bool = False) -> None:
        """Make the batch the sequences of ``index``, repeats allowed (beam search, batch selection).

        With ``mask`` it may also be a bool for every sequence.
        """
        if not self.tokens:
            return
        numbers = sequence_numbers(index, self.batch_size, mask)
        picked = numbers.tolist()
        if not picked:
            self.reset()
            return
        assert self.k_rows is not None
        self._routing = self._routing.forgotten()
        where = numbers.to(self.k_rows.device)
        self.k_rows, self.v_rows, self.real = (
            None if part is None else part.index_select(0, where) for part in (self.k_rows, self.v_rows, self.real)
        )
        self.tokens, self.rows, self.block_counts, self.dropped = (
            [values[i] for i in picked] for values in (self.tokens, self.rows, self.block_counts, self.dropped)
        )
        most = max(self.block_counts, default=0)
        self.blocks = tuple(
            with_counts(cut_blocks(blocks.map(lambda part: part.index_select(0, where)), most), self.block_counts)
            for blocks in (self.blocks if most else ())
        )


def _part_of(part: Tensor, sequences: slice, count: int) -> Tensor:
    """What some sequences have of a part of blocks, of their first ``count``."""
    return part[sequences] if part.ndim == 1 else part[sequences, :count]


def _resized(buffer: Tensor | None, like: Tensor, capacity: int) -> Tensor:
    grown = like.new_zeros(*like.shape[:2], capacity, like.shape[3])
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown
