"""Which key blocks a sample of a query block's queries attends most: matrix products, so torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from dkv.config import sampled_queries, selection_width

SCORED_QUERIES = 512  # per head, in one product
SCORED_NUMBERS = 64 << 20  # logits of one product


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
    places = sampled_queries(length, prefill_block, stride)
    at = torch.tensor(places, dtype=torch.long, device=q.device)
    count = -(-keys // block_size)
    scores = q.new_full((batch, heads_kv, heads // heads_kv, len(at), count), -torch.inf, dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    rows = q[:, :, at].float().mul(sm_scale).unflatten(1, (heads_kv, -1))  # [B, Hkv, G, M, D]
    inside = torch.arange(keys, device=q.device) + offset
    step = max(1, SCORED_NUMBERS // (batch * heads * min(len(at), SCORED_QUERIES) * block_size)) * block_size
    for low in range(0, len(at), SCORED_QUERIES):
        part, here = rows[:, :, :, low : low + SCORED_QUERIES], places[low : low + SCORED_QUERIES]
        position = at[low : low + SCORED_QUERIES] + first
        for start in range(0, min(keys, here[-1] + first - offset + 1), step):  # no key beyond the last query
            tile = k[:, :, start : start + step].float()
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
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores
    weight = (scores - torch.where(peak == -torch.inf, 0.0, peak)).exp()
    share = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
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
