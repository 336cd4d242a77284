"""Decode attention with a sequence's blocks on several processes (context parallel), or its heads (tensor parallel).

Every rank holds some of the blocks and gives the same queries. What is exchanged is two numbers for each query head,
``top_k`` candidates for each kv head and one attention state, whatever the length of the context. See
``docs/distributed.md``.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dkv import _checks as check
from dkv.config import ROUTERS, SHARES, DKVConfig
from dkv.decode import decode_attention as local_attention
from dkv.kernels.torch.route import route_scores
from dkv.merge import merge_states
from dkv.types import AttentionState, CompressedBlocks

MOST_SETTINGS = 8  # that ranks compare
UNUSED, LOWEST = -2.0, -1.0  # as keys of the selection: below every block, and of a block without a probability


def decode_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    *,
    config: DKVConfig | None = None,
    block_indices: Tensor | None = None,
    positions: Tensor | None = None,
    window_rank: int = 0,
    seq_lens: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    sm_scale: float | None = None,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> AttentionState:
    """:func:`dkv.decode_attention` over the blocks of all ranks of ``group`` and the window of one of them.

    Every rank must call it, with the same ``q``, ``config`` and other settings; each returns the same state.

    Parameters
    ----------
    q : Tensor [B, Hq, Sq, D]
    blocks : CompressedBlocks
        This rank's, of torch tensors; there may be none (``N = 0``).
    k_window, v_window : Tensor [B, Hkv, Sw, D or Dv], optional
        Used on ``window_rank`` alone. Other ranks may give a copy or nothing.
    config : DKVConfig, optional
        Gives top_k (of all ranks together), router, share, sink_blocks and recent_blocks.
    block_indices : Tensor [B, Hkv, W], int32, optional
        This rank's blocks as :func:`route_blocks` returned them; on every rank or on none. Nothing is routed then.
    positions : Tensor [N], int64, optional
        As in :func:`route_blocks`.
    window_rank : int
        The rank within ``group`` whose ``k_window``, ``v_window``, ``seq_lens``, ``window`` and ``sink`` count.
    seq_lens, window, softcap, sink, sm_scale, backend
        As in :func:`dkv.decode_attention`.
    group : ProcessGroup, optional
        The default group when None.

    Returns
    -------
    AttentionState
        Equal bit for bit on all ranks.

    Raises
    ------
    ValueError
        When the ranks' arguments differ where they must not, on every rank.
    RuntimeError
        When a rank is gone, after the timeout of the group at the latest; the group is of no use then.
    """
    config = DKVConfig() if config is None else config
    check.check_config(config, plain=True)
    check.check_count("window_rank", window_rank)
    _check_kinds(group, q=q, k_window=k_window, v_window=v_window, positions=positions, blocks=blocks)
    ranks = dist.get_world_size(group)
    if window_rank >= ranks:
        raise ValueError(f"window_rank must be 0..{ranks - 1}, got {window_rank}")
    routing = _Routing(
        config.top_k, config.router, config.share, sm_scale, config.sink_blocks, config.recent_blocks, positions
    )
    scale = routing.check(q, blocks)
    _agree(
        group,
        q.device,
        op="decode_attention",
        q=tuple(q.shape),
        blocks=(blocks.num_kv_heads, blocks.head_dim_v),
        config=routing[:-1],
        positions=positions is None,
        block_indices=block_indices is None,
        window_rank=window_rank,
        softcap=softcap,
    )
    if block_indices is None:
        block_indices = _route(q, blocks, routing, scale, group)
    mine = dist.get_rank(group) == window_rank
    k_window, v_window = (k_window, v_window) if mine else (None, None)
    seq_lens, sink = (seq_lens, sink) if mine else (None, None)
    state = local_attention(
        q.float(),  # partial outputs stay float32 until the merge
        blocks,
        k_window,
        v_window,
        config=config,
        block_indices=block_indices,
        seq_lens=seq_lens,
        window=window,
        softcap=softcap,
        sink=sink,
        sm_scale=sm_scale,
        backend=backend,
    )
    parts = _all_gather(torch.cat([state.out, state.lse[..., None]], dim=-1), group)  # [B, Hq, Sq, Dv + 1] of each rank
    merged = merge_states([AttentionState(part[..., :-1], part[..., -1]) for part in parts])
    limit = torch.finfo(q.dtype).max
    return AttentionState(merged.out.clamp(-limit, limit).to(q.dtype), merged.lse)


def route_blocks(
    q: Tensor,
    blocks: CompressedBlocks,
    *,
    top_k: int = 16,
    router: str = "lowrank",
    share: str = "kv_head",
    sm_scale: float | None = None,
    sink_blocks: int = 1,
    recent_blocks: int = 0,
    positions: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's part of the ``top_k`` blocks that :func:`dkv.route_blocks` selects among those of all ranks.

    Every rank must call it. Ties go to the block that comes first in the sequence.

    Parameters
    ----------
    q, blocks, top_k, router, share, sm_scale, sink_blocks, recent_blocks
        As in :func:`dkv.route_blocks`; ``blocks`` are this rank's.
    positions : Tensor [N], int64, optional
        Which blocks of the sequence these are, ascending, for shards that are not consecutive (every rank takes each
        n-th block, say). On every rank or on none, and for sequences of equal counts. When None, the sequence is the
        blocks of rank 0, then those of rank 1 and so on.
    group : ProcessGroup, optional

    Returns
    -------
    Tensor [B, Hkv, top_k], int32
        Indices into this rank's blocks, ascending, then -1.
    """
    _check_kinds(group, q=q, positions=positions, blocks=blocks)
    routing = _Routing(top_k, router, share, sm_scale, sink_blocks, recent_blocks, positions)
    scale = routing.check(q, blocks)
    heads = blocks.num_kv_heads
    _agree(
        group,
        q.device,
        op="route_blocks",
        q=tuple(q.shape),
        blocks=heads,
        config=routing[:-1],
        positions=positions is None,
    )
    return _route(q, blocks, routing, scale, group)


def _check_kinds(group: Any, blocks: CompressedBlocks, **arrays: Any) -> None:
    """Refuse what no process group can take."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, got {type(group).__qualname__}")
    check.check_blocks(blocks)
    for name, array in {**arrays, "blocks": blocks.anchor_k}.items():
        if array is not None and not isinstance(array, Tensor):
            raise TypeError(f"{name} must be of torch tensors, got {type(array).__qualname__}")


class _Routing(NamedTuple):
    """Arguments of :func:`route_blocks`."""

    top_k: int
    router: str
    share: str
    sm_scale: float | None
    sink_blocks: int
    recent_blocks: int
    positions: Tensor | None

    def check(self, q: Tensor, blocks: CompressedBlocks) -> float:
        """Refuse what one rank can see alone; the scale of the logits."""
        check.check_blocks(blocks)
        check.check_query(q, blocks)
        for name, low in (("top_k", 1), ("sink_blocks", 0), ("recent_blocks", 0)):
            check.check_count(name, getattr(self, name), low)
        pinned = self.sink_blocks + self.recent_blocks
        if pinned > self.top_k:
            raise ValueError(f"sink_blocks + recent_blocks ({pinned}) must not exceed top_k={self.top_k}")
        check.check_choice("router", self.router, ROUTERS)
        check.check_choice("share", self.share, SHARES)
        if self.router == "minmax" and blocks.k_min is None:
            raise ValueError("router 'minmax' needs k_min and k_max: compress with router='minmax' in the config")
        if self.positions is not None:
            check.check_integers("positions", self.positions, "N", N=blocks.num_blocks)
            if blocks.block_counts is not None:
                raise ValueError("positions are for sequences of equal counts: block_counts must be None")
            if bool((self.positions.diff() <= 0).any()) or bool((self.positions < 0).any()):
                raise ValueError("positions must ascend, from 0 or more")
        return check.check_logits(q, self.sm_scale, None)


def _route(q: Tensor, blocks: CompressedBlocks, routing: _Routing, scale: float, group: Any) -> Tensor:
    top_k, router, share, _, sink_blocks, recent_blocks, positions = routing
    place, total = _places(blocks, positions, group)  # [B, N], [B]
    valid = torch.arange(blocks.num_blocks, device=q.device) < _counts(blocks)[:, None]  # [B, N]
    share_of_mass = _probabilities(q, blocks, valid, router, share, scale, group)  # [B, Hkv, N]

    pinned = valid & ((place < sink_blocks) | (place >= (total - recent_blocks)[:, None]))
    key = torch.where(share_of_mass.isnan(), -torch.inf, share_of_mass).clamp(LOWEST, torch.finfo(torch.float32).max)
    key = torch.where(pinned[:, None], torch.inf, torch.where(valid[:, None], key, UNUSED))
    best = key.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]  # places ascend: ties to the first
    offered = q.new_full((2, *key.shape[:2], top_k), UNUSED, dtype=torch.float64)  # keys and places, exact in float64
    offered[0, ..., : best.shape[-1]] = key.gather(-1, best).double()
    offered[1, ..., : best.shape[-1]] = place[:, None].expand_as(key).gather(-1, best).double()
    keys, places = torch.cat(_all_gather(offered, group), dim=-1)  # [B, Hkv, ranks * top_k] each
    order = places.sort(dim=-1, stable=True).indices
    order = order.gather(-1, keys.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)[..., :top_k]
    taken = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, order, True) & (keys > UNUSED)
    mine = taken[..., dist.get_rank(group) * top_k :][..., : best.shape[-1]]
    chosen = torch.where(mine, best, blocks.num_blocks).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[-1]), value=blocks.num_blocks)
    return torch.where(chosen < blocks.num_blocks, chosen, -1).int()


def head_shard(blocks: CompressedBlocks, start: int, stop: int) -> CompressedBlocks:
    """The kv heads ``start`` to ``stop - 1`` of blocks, for a rank that has these heads (tensor parallel).

    Parts that all heads of a block share (``u`` and its scales) are the same on every rank. A rank with its own heads
    attends them by :func:`dkv.decode_attention`; nothing is exchanged.
    """
    check.check_blocks(blocks)
    check.check_count("start", start)
    check.check_count("stop", stop, start + 1)
    if stop > blocks.num_kv_heads:
        raise ValueError(f"stop must be at most {blocks.num_kv_heads} (kv heads), got {stop}")
    return blocks.map_heads(lambda part: part[:, :, start:stop])


def _probabilities(
    q: Tensor, blocks: CompressedBlocks, valid: Tensor, router: str, share: str, scale: float, group: Any
) -> Tensor:
    """Share of the attention mass of all ranks' blocks that each of these carries, ``[B, Hkv, N]``."""
    batch, heads = q.shape[0], blocks.num_kv_heads
    per_group = (q.shape[1] // heads, q.shape[2])
    if blocks.num_blocks and q.shape[2]:
        scores = route_scores(q, blocks, router, scale).float()  # [B, Hkv, G * Sq, N]
    else:
        scores = q.new_empty((batch, heads, per_group[0] * per_group[1], blocks.num_blocks), dtype=torch.float32)
    scores = torch.where(valid[:, None, None] & ~scores.isnan(), scores, -torch.inf)
    peak = torch.cat([scores, scores.new_full((*scores.shape[:3], 1), -torch.inf)], dim=-1).amax(-1)
    total = _relative(scores, peak[..., None]).sum(-1)
    peaks, totals = torch.stack(_all_gather(torch.stack([peak, total]), group), dim=1)  # [ranks, B, Hkv, G * Sq] each
    peak = peaks.amax(0)
    total = (totals * _relative(peaks, peak)).sum(0)
    weight = _relative(scores, peak[..., None]) / torch.where(total > 0, total, 1.0)[..., None]
    weight = weight.unflatten(2, per_group)  # [B, Hkv, G, Sq, N]
    if not q.shape[2]:
        return weight.new_zeros(batch, heads, blocks.num_blocks)
    if share == "all":
        return weight.mean((1, 2, 3))[:, None].expand(-1, heads, -1)
    return weight.amax(2).mean(2)


def _relative(score: Tensor, peak: Tensor) -> Tensor:
    """``exp(score - peak)``, 1 where both are the same infinity unless that is -inf."""
    weight = torch.where(score == peak, 1.0, (score - peak).exp())
    return torch.where(score == -torch.inf, 0.0, weight)


def _counts(blocks: CompressedBlocks) -> Tensor:
    """Valid blocks of each sequence, ``[B]`` int64."""
    if blocks.block_counts is not None:
        return blocks.block_counts.long()
    return torch.full((blocks.batch_size,), blocks.num_blocks, device=blocks.anchor_k.device)


def _places(blocks: CompressedBlocks, positions: Tensor | None, group: Any) -> tuple[Tensor, Tensor]:
    """Where in their sequences these blocks are ``[B, N]``, and how many blocks all ranks have ``[B]``."""
    counts = _counts(blocks)
    given = torch.arange(blocks.num_blocks, device=counts.device) if positions is None else positions.long()
    sums = torch.stack([given.sum(), given.square().sum()])
    told = torch.stack(_all_gather(torch.cat([counts, sums]), group))  # [ranks, B + 2]
    total = told[:, :-2].sum(0)
    if positions is None:
        before = told[: dist.get_rank(group), :-2].sum(0)
        return before[:, None] + given, total
    n = int(total[0]) if len(total) else 0
    if told[:, -2:].sum(0).tolist() != [n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6]:
        raise ValueError(f"positions of all ranks must name each of {n} blocks once")
    return given.expand(len(counts), -1), total


def _agree(group: Any, device: torch.device, **settings: Any) -> None:
    """Raise on every rank, naming the setting, where the ranks do not call the same thing."""
    sums = [zlib.crc32(repr(value).encode()) for value in settings.values()]
    own = torch.tensor(sums + [0] * (MOST_SETTINGS - len(sums)), device=device)
    differs = (torch.stack(_all_gather(own, group)) != own).any(0).tolist()
    for (name, value), other in zip(settings.items(), differs, strict=False):
        if other:
            raise ValueError(f"{name} must be the same on all ranks, got {value!r} on rank {dist.get_rank(group)}")


def _all_gather(x: Tensor, group: Any) -> list[Tensor]:
    """``x`` of every rank, all of one shape."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts
