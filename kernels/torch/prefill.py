"""Block-sparse causal attention of a chunk of queries over dense keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .decode import (
    WORKSPACE_BYTES,
    accumulation_dtype,
    capped,
    distinct,
    empty_state,
    softmax_weights,
    softmax_with_sink,
)
from .merge import saturated

KEY_SUB_BLOCK = 32
QUERY_SUB_BLOCK = 16


def _sub_means(x: Tensor, size: int) -> Tensor:
    """Means of consecutive rows, ``[..., L, D] -> [..., ceil(L / size), D]``; the last one over what is left."""
    length = x.shape[-2]
    pad = -length % size
    sums = torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(-2, (-1, size)).sum(-2)
    rows = torch.full((sums.shape[-2],), size, dtype=x.dtype, device=x.device)
    rows[-1] = size - pad
    return sums / rows[:, None]


def select_key_blocks(
    q: Tensor, k: Tensor, block_size: int, prefill_block: int, top_k: int, prefill_window: int, sm_scale: float
) -> Tensor:
    """Key blocks of every query block, ``[B, Hkv, ceil(Sq / prefill_block), W]`` int32, ascending, -1 where unused."""
    batch, heads, length, dim = q.shape
    heads_kv, keys = k.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    count, query_blocks = -(-keys // block_size), -(-length // prefill_block)
    starts = torch.arange(query_blocks, device=q.device) * prefill_block + keys - length
    ends = torch.clamp(starts + prefill_block - 1, max=keys - 1)  # last visible key of each query block
    if batch == 0 or length == 0 or keys == 0:
        width = _width(count, block_size, prefill_block, top_k, prefill_window)
        return torch.full((batch, heads_kv, query_blocks, width), -1, dtype=torch.int32, device=q.device)
    # a block's own sub-blocks and a query block's own sub-blocks: both are padded apart, never across a border
    key_means = [_sub_means(part.to(wide), KEY_SUB_BLOCK) for part in k.split(block_size, dim=2)]
    widest = key_means[0].shape[2]
    key_means = torch.stack([_repeat_last(m, widest) for m in key_means], dim=2)  # [B, Hkv, N, s, D]
    stops = (torch.arange(1, widest + 1, device=q.device) * KEY_SUB_BLOCK).clamp(max=block_size)
    stops = stops + torch.arange(count, device=q.device)[:, None] * block_size  # [N, s]
    query_means = [_sub_means(part.to(wide), QUERY_SUB_BLOCK) for part in q.split(prefill_block, dim=2)]
    score = []
    for index, means in enumerate(query_means):
        means = means.reshape(batch, heads_kv, -1, dim)  # [B, Hkv, G * t, D]
        logits = (means @ key_means.flatten(2, 3).mT * sm_scale).unflatten(-1, (count, widest))
        # a sub-block that reaches beyond the last query would let later keys decide
        best = torch.where(stops <= ends[index] + 1, logits, -torch.inf).amax(-1)
        score.append(softmax_weights(torch.where(best.isnan(), -torch.inf, best), (3,))[0].mean(2))
    scores = torch.stack(score, dim=2)  # [B, Hkv, n, N]
    slots = torch.arange(count, device=q.device)
    candidate = slots * block_size <= ends[:, None]
    near = (slots + 1) * block_size > (starts - prefill_window)[:, None]
    pinned = candidate & (near | (slots == 0))
    width = _width(count, block_size, prefill_block, top_k, prefill_window)
    room = pinned.sum(-1, keepdim=True).clamp(min=top_k)  # pinned blocks are never dropped
    key = torch.where(pinned, torch.inf, torch.where(candidate, scores, -1.0))
    order = key.sort(dim=-1, descending=True, stable=True).indices[..., :width]
    usable = (order * block_size <= ends[:, None]) & (torch.arange(width, device=q.device) < room)
    chosen = torch.where(usable, order, count).sort(dim=-1).values
    return torch.where(chosen < count, chosen, -1).int()


def _width(count: int, block_size: int, prefill_block: int, top_k: int, prefill_window: int) -> int:
    """Room for ``top_k``, or for the first block and every block that a window and a query block can touch."""
    return min(count, max(top_k, 2 + (prefill_window + prefill_block + block_size - 2) // block_size))


def _repeat_last(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[2]
    return torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], dim=2) if missing else x


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
    batch, heads, length, dim = q.shape
    heads_kv, keys, dim_v = k.shape[1], k.shape[2], v.shape[-1]
    group, wide = heads // heads_kv, accumulation_dtype(q.dtype)
    query_blocks, width = block_indices.shape[2:]
    if batch == 0 or length == 0 or keys == 0 or width == 0:
        return empty_state(q, dim_v, sink)
    block_indices = distinct(block_indices, -(-keys // block_size))
    pad_q, pad_k = -length % prefill_block, -keys % block_size
    # [B, Hkv, n, G, s, D]
    grouped = torch.nn.functional.pad(q, (0, 0, 0, pad_q)).unflatten(2, (query_blocks, prefill_block))
    grouped = grouped.unflatten(1, (heads_kv, group)).transpose(2, 3)
    k = torch.nn.functional.pad(k, (0, 0, 0, pad_k)).unflatten(2, (-1, block_size))
    v = torch.nn.functional.pad(v, (0, 0, 0, pad_k)).unflatten(2, (-1, block_size))
    row = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
    head = torch.arange(heads_kv, device=q.device).view(1, -1, 1, 1)
    inside = torch.arange(block_size, device=q.device)
    step = max(
        1, WORKSPACE_BYTES // (4 * batch * heads_kv * width * block_size * (2 * group * prefill_block + dim + dim_v))
    )
    outs, lses = [], []
    for i in range(0, query_blocks, step):
        chosen = block_indices[:, :, i : i + step].long()  # [B, Hkv, n, W]
        part_k = k[row, head, chosen.clamp(min=0)].flatten(3, 4).to(wide)  # [B, Hkv, n, W * S, D]
        part_v = v[row, head, chosen.clamp(min=0)].flatten(3, 4).to(wide)
        part_q = grouped[:, :, i : i + step].to(wide)
        logits = capped(part_q.flatten(3, 4) @ part_k.mT * sm_scale, softcap).unflatten(3, (group, prefill_block))
        position = (torch.arange(i, i + chosen.shape[2], device=q.device) * prefill_block + keys - length)[:, None]
        position = position + torch.arange(prefill_block, device=q.device)  # [n, s]
        slot = (chosen[..., None] * block_size + inside).flatten(3)  # [B, Hkv, n, W * S]
        used = (chosen >= 0)[..., None].expand(*chosen.shape, block_size).flatten(3)
        seen = used[..., None, None, :] & (slot[..., None, None, :] <= position[:, None, :, None])
        seen = seen & (slot < keys)[..., None, None, :]
        part_v = torch.where(used[..., None], part_v, 0.0)  # unused slots point at a block that was not selected
        logits = torch.where(seen, logits, -torch.inf)
        weight, lse = softmax_with_sink(logits, None if sink is None else sink.view(heads_kv, 1, group, 1, 1))
        outs.append((weight.flatten(3, 4) @ part_v).unflatten(3, (group, prefill_block)))
        lses.append(lse)
    # [B, Hkv, n, G, s, Dv] -> [B, Hq, Sq, Dv]
    out = torch.cat(outs, dim=2).transpose(2, 3).reshape(batch, heads, -1, dim_v)[:, :, :length]
    lse = torch.cat(lses, dim=2).transpose(2, 3).reshape(batch, heads, -1)[:, :, :length]
    return saturated(out, q.dtype), lse.float()
