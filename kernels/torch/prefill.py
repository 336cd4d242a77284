"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dkv.config import sampled_queries, selection_width

from .decode import accumulation_dtype, capped, distinct, empty_state, softmax_weights
from .merge import merge_states, rounded

WORKSPACE_BYTES = 64 << 20  # gathered keys and values held at one time
SCORED_QUERIES = 64  # per head, in one product
SCORED_NUMBERS = 2 << 20  # logits of one product, few enough to stay in a cache


def select_key_blocks(
    q: Tensor,
    k: Tensor,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    sm_scale: float,
    stride: int,
    ratio: float,
    mass: float,
) -> Tensor:
    """Key blocks of every query block, ``[B, Hkv, ceil(Sq / prefill_block), W]`` int32, ascending, -1 where unused."""
    keys, length = k.shape[2], q.shape[2]
    if q.shape[0] == 0 or length == 0 or keys == 0:
        width = selection_width(-(-keys // block_size), block_size, prefill_block, top_k, prefill_window, ratio)
        size = (q.shape[0], k.shape[1], -(-length // prefill_block), width)
        return torch.full(size, -1, dtype=torch.int32, device=q.device)
    scores = sampled_scores(q, k, block_size, prefill_block, stride, sm_scale, keys - length, 0)
    share = block_shares(scores, length, prefill_block, stride)
    return choose_blocks(share, keys, length, block_size, prefill_block, top_k, prefill_window, ratio, mass)


def sampled_scores(
    q: Tensor,
    k: Tensor,
    block_size: int,
    prefill_block: int,
    stride: int,
    sm_scale: float,
    first: int,
    offset: int,
) -> Tensor:
    """Log of the mass of every key block for the sampled queries, ``[B, Hkv, G, M, N]``; -inf where none is visible.

    The first query stands at position ``first``, the first key at ``offset``.
    """
    batch, heads, length, dim = q.shape
    heads_kv, keys = k.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    places = sampled_queries(length, prefill_block, stride)
    at = torch.tensor(places, dtype=torch.long, device=q.device)
    count = -(-keys // block_size)
    scores = q.new_full((batch, heads_kv, heads // heads_kv, len(at), count), -torch.inf, dtype=wide)
    if scores.numel() == 0:
        return scores
    rows = q[:, :, at].to(wide).mul(sm_scale).unflatten(1, (heads_kv, -1))  # [B, Hkv, G, M, D]
    inside = torch.arange(keys, device=q.device) + offset
    step = max(1, SCORED_NUMBERS // (batch * heads * min(len(at), SCORED_QUERIES) * block_size)) * block_size
    for low in range(0, len(at), SCORED_QUERIES):
        part, here = rows[:, :, :, low : low + SCORED_QUERIES], places[low : low + SCORED_QUERIES]
        position = at[low : low + SCORED_QUERIES] + first
        for start in range(0, min(keys, here[-1] + first - offset + 1), step):  # no key beyond the last query
            tile = k[:, :, start : start + step].to(wide)
            logits = (part.flatten(2, 3) @ tile.mT).unflatten(2, part.shape[2:4])
            if here[0] + first < offset + start + tile.shape[2] - 1:
                logits.masked_fill_(inside[start : start + step] > position[:, None], -torch.inf)
            if tile.shape[2] % block_size:
                logits = torch.nn.functional.pad(logits, (0, -tile.shape[2] % block_size), value=-torch.inf)
            logits = logits.unflatten(-1, (-1, block_size))
            peak = logits.amax(-1)
            peak = torch.where(peak == -torch.inf, 0.0, peak)
            total = logits.sub_(peak[..., None]).exp_().sum(-1).log_()
            blocks = slice(start // block_size, start // block_size + peak.shape[-1])
            scores[:, :, :, low : low + SCORED_QUERIES, blocks] = total + peak
    return scores


def block_shares(scores: Tensor, length: int, prefill_block: int, stride: int) -> Tensor:
    """Mean share of the attention of a query block's sampled queries that each key block has, ``[B, Hkv, n, N]``."""
    share, _ = softmax_weights(torch.where(scores.isnan(), -torch.inf, scores), (4,))
    share = share.mean(2)  # [B, Hkv, M, N]
    per, whole = -(-prefill_block // stride), max(0, -(-length // prefill_block) - 1)
    first, last = share[:, :, : per * whole], share[:, :, per * whole :]
    parts = [first.unflatten(2, (whole, per)).mean(3)] if whole else []
    return torch.cat([*parts, last.mean(2, keepdim=True)], dim=2) if last.shape[2] else share


def choose_blocks(
    share: Tensor,
    keys: int,
    length: int,
    block_size: int,
    prefill_block: int,
    top_k: int,
    prefill_window: int,
    ratio: float,
    mass: float,
) -> Tensor:
    """The first block, the window's, and the best others by ``share [B, Hkv, n, N]``; as ``select_key_blocks``."""
    query_blocks, count = share.shape[2:]
    width = selection_width(count, block_size, prefill_block, top_k, prefill_window, ratio)
    starts = torch.arange(query_blocks, device=share.device) * prefill_block + keys - length
    ends = torch.clamp(starts + prefill_block - 1, max=keys - 1)  # last visible key of each query block
    slots = torch.arange(count, device=share.device)
    candidate = slots * block_size <= ends[:, None]
    near = (slots + 1) * block_size > (starts - prefill_window)[:, None]
    pinned = candidate & (near | (slots == 0))
    limit = (ratio * candidate.sum(-1, keepdim=True).double()).ceil().long().clamp(max=top_k)
    room = torch.maximum(pinned.sum(-1, keepdim=True), limit)  # pinned blocks are never dropped
    key = torch.where(pinned, torch.inf, torch.where(candidate, share, -1.0))
    order = key.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    rank = torch.arange(order.shape[-1], device=share.device)
    usable = (order * block_size <= ends[:, None]) & (rank < room)
    if mass < 1:
        share = torch.where(candidate & (slots > 0), share, 0.0)  # the first block takes what a head has no use for
        taken = share.gather(-1, order)
        enough = taken.cumsum(-1) - taken >= mass * share.sum(-1, keepdim=True)
        usable &= ~enough | (rank < pinned.sum(-1, keepdim=True))
    chosen = torch.where(usable, order, count).sort(dim=-1).values
    return torch.where(chosen < count, chosen, -1).int()


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    prefill_block: int,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Each query block attends its key blocks, causally, bottom-right aligned."""
    keys = k.shape[2]
    if 0 in q.shape[:3] or keys == 0 or block_indices.shape[3] == 0:
        return empty_state(q, v.shape[-1], sink)
    block_indices = distinct(block_indices, -(-keys // block_size))
    first = keys - q.shape[2]
    out, lse = attend_blocks(q, k, v, block_indices, block_size, prefill_block, first, softcap, sm_scale)
    if sink is not None:
        out, lse = with_sink(out, lse, sink)
    return rounded(out, q.dtype), lse.float()


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """A state whose denominator holds one more logit per head, without a value."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1))
    total = torch.where(total == torch.inf, torch.nan, total)
    keep = torch.where(total == -torch.inf, 0.0, (lse - total).exp())
    return out * keep[..., None], total


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_size: int,
    prefill_block: int,
    first: int,
    softcap: float | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """State over the selected blocks, in the accumulation dtype.

    The first query stands at row ``first`` of ``k``; every list names a block once, -1 is unused. Blocks that all
    queries of a query block see take no mask, and the heads of a group are then rows of one product.
    """
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[-1]
    group, wide = heads // heads_kv, accumulation_dtype(q.dtype)
    query_blocks = block_indices.shape[2]
    pad_q, pad_k = query_blocks * prefill_block - length, -keys % block_size
    grouped = torch.nn.functional.pad(q, (0, 0, 0, pad_q)) if pad_q else q
    grouped = grouped.unflatten(2, (query_blocks, prefill_block)).unflatten(1, (heads_kv, group)).transpose(2, 3)
    rows_q = grouped.flatten(3, 4).flatten(0, 2)  # [T, G * P, D], T = B * Hkv * n
    rows_k, rows_v = (
        (torch.nn.functional.pad(x, (0, 0, 0, pad_k)) if pad_k else x).reshape(-1, block_size, x.shape[-1])
        for x in (k, v)
    )
    lists = block_indices.reshape(len(rows_q), -1).long()
    start = (torch.arange(query_blocks, device=q.device) * prefill_block + first).repeat(batch * heads_kv)
    base = torch.arange(batch * heads_kv, device=q.device).repeat_interleave(query_blocks) * -(-keys // block_size)
    out = torch.zeros(*rows_q.shape[:2], dim_v, dtype=wide, device=q.device)
    lse = torch.full(rows_q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    query, inside = torch.arange(prefill_block, device=q.device), torch.arange(block_size, device=q.device)
    past = (lists + 1) * block_size <= start[:, None] + 1
    for part, masked in ((torch.where(past, lists, -1), False), (torch.where(past, -1, lists), True)):
        part = part.sort(dim=1, descending=True).values
        per_key = wide.itemsize * (dim + dim_v + (1 + group) * prefill_block * (3 if masked else 2))
        for task, width in _pieces(part, WORKSPACE_BYTES // (per_key * block_size)):
            chosen = part[task, :width]
            used = chosen >= 0
            chosen = torch.where(used, chosen, chosen[:, :1])  # an unused slot reads a block that is selected
            place = (chosen + base[task, None]).flatten()
            part_k, part_v = (
                rows.index_select(0, place).view(len(task), -1, rows.shape[-1]).to(wide) for rows in (rows_k, rows_v)
            )
            seen = None if bool(used.all()) else used.repeat_interleave(block_size, dim=1)[:, None]  # [T, 1, W * S]
            if masked:
                slot = (chosen[..., None] * block_size + inside).flatten(1)[:, None]
                last = (start[task, None] + query).clamp(max=keys - 1)[..., None]
                seen = (slot <= last) if seen is None else seen & (slot <= last)  # [T, P, W * S]
                seen = seen.repeat(1, group, 1)
            state = _attend(rows_q[task].to(wide), part_k, part_v, seen, softcap, sm_scale)
            if masked and bool(past.any()):
                state = merge_states([out[task], state[0]], [lse[task], state[1]])
            out[task], lse[task] = state
    blocks = (batch, heads_kv, query_blocks)
    out = out.unflatten(1, (group, prefill_block)).unflatten(0, blocks).transpose(2, 3).reshape(batch, heads, -1, dim_v)
    lse = lse.unflatten(1, (group, prefill_block)).unflatten(0, blocks).transpose(2, 3).reshape(batch, heads, -1)
    return out[:, :, :length], lse[:, :, :length]


def _pieces(lists: Tensor, budget: int) -> Iterator[tuple[Tensor, int]]:
    """Lists of nearly equal length, in pieces of at most ``budget`` blocks; those without a block are left out."""
    counts, order = (lists >= 0).sum(1).sort(descending=True, stable=True)
    widths = counts.tolist()
    start = 0
    while start < len(widths) and widths[start]:
        width, stop = widths[start], start + 1
        most = min(len(widths), start + max(1, budget // width))
        while stop < most and widths[stop] and widths[stop] * 8 >= width * 7:
            stop += 1
        yield order[start:stop], width
        start = stop


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, softcap: float | None, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """``q [T, M, D]`` over ``k [T, L, D]``, where ``seen [T, M or 1, L]``."""
    if q.device.type == "cpu" and softcap is None and q.shape[-1] == v.shape[-1]:
        bias = None if seen is None else torch.where(seen, torch.zeros((), dtype=q.dtype), -torch.inf)[:, None]
        out, lse = (
            x[:, 0]
            for x in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, None], k[:, None], v[:, None], attn_mask=bias, scale=sm_scale
            )
        )
        if seen is None:
            return out, lse
        blind = ~seen.any(-1)
        return torch.where(blind[..., None], 0.0, out), torch.where(blind, -torch.inf, lse)
    logits = capped((q @ k.mT) * sm_scale, softcap)
    weight, lse = softmax_weights(logits if seen is None else torch.where(seen, logits, -torch.inf), (2,))
    return weight @ v, lse
