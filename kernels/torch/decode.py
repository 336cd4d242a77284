"""Attention over compressed blocks and over exact rows, without rebuilding K or V."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dkv.types import CompressedBlocks

from ._storage import Segments, Selected, group_count, group_rows, unpacked_lanes
from .merge import merge_states, rounded

WORKSPACE_BYTES = 64 << 20  # logits and decoded codes held at one time; more selected blocks are taken in pieces
HEADROOM = 256.0  # what a value is added up from may be larger than the value, and than float32 holds
CODE_BYTES = 4 << 20  # decoded codes on a CPU at one time: what stays in a core's cache

# logits [B, H, M, n] of some keys, and the sum of their values for weights of that shape
Part = tuple[Tensor, Callable[[Tensor], Tensor]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_queries(q: Tensor, num_kv_heads: int) -> Tensor:
    """``[B, Hq, Sq, D] -> [B, Hkv, G * Sq, D]`` in the accumulation dtype."""
    batch, heads, length, dim = q.shape
    return q.to(accumulation_dtype(q.dtype)).reshape(batch, num_kv_heads, heads // num_kv_heads * length, dim)


def ungrouped(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, Hkv, G * Sq, Dv] -> [B, Hq, Sq, Dv]`` in q's dtype; lse float32."""
    batch, heads, length = q.shape[:3]
    out = rounded(out.reshape(batch, heads, length, out.shape[-1]), q.dtype)
    return out, lse.reshape(batch, heads, length).float()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def softmax_weights(logits: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Normalised weights over ``dims`` and their lse; an all -inf row gives zero weights and lse -inf."""
    peak = logits.amax(dims, keepdim=True)
    safe_peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = (logits - safe_peak).exp()
    total = weight.sum(dims, keepdim=True)
    lse = torch.where(peak == -torch.inf, -torch.inf, safe_peak + total.log())
    lse = lse.squeeze(dims)
    return weight / torch.where(total == 0, 1.0, total), lse


def softmax_with_sink(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights over the last axis and their lse; ``sink``, which broadcasts to ``[..., 1]``, joins the denominator."""
    if sink is None:
        return softmax_weights(logits, (-1,))
    extra = sink.to(logits.dtype).expand(*logits.shape[:-1], 1)
    weight, lse = softmax_weights(torch.cat([logits, extra], dim=-1), (-1,))
    return weight[..., :-1], lse


def empty_state(q: Tensor, dim_v: int, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """State of ``q [B, Hq, Sq, D]`` over no rows."""
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
    lse = lse if sink is None else sink.float().view(1, -1, 1).expand_as(lse).clone()
    return q.new_zeros(*q.shape[:3], dim_v), lse


def lowrank_attention(
    q: Tensor, blocks: CompressedBlocks, block_indices: Tensor, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Anchors and non-residual rows of the selected blocks, scored and summed in the rank space."""
    return _over_pieces(lowrank_part, q, choose(blocks, block_indices), sm_scale, softcap)


def residual_attention(
    q: Tensor, blocks: CompressedBlocks, block_indices: Tensor, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The stored residual rows of the selected blocks."""
    if blocks.num_residuals == 0:
        return empty_state(q, blocks.head_dim_v, None)
    return _over_pieces(residual_part, q, choose(blocks, block_indices), sm_scale, softcap)


def _over_pieces(make, q, chosen, sm_scale, softcap):
    blocks = chosen.blocks
    grouped = grouped_queries(q, blocks.num_kv_heads)
    if chosen.valid.shape[2] == 0 or blocks.num_blocks == 0:
        return empty_state(q, blocks.head_dim_v, None)
    states = []
    for piece in cut_selection(grouped, chosen):
        logits, values = make(grouped, blocks, piece, sm_scale, softcap)
        weight, lse = softmax_weights(logits, (3,))
        states.append((values(weight), lse))
    out, lse = states[0] if len(states) == 1 else merge_states([s[0] for s in states], [s[1] for s in states])
    return ungrouped(q, out, lse)


def cut_selection(q: Tensor, chosen: Selected) -> list[Selected]:
    """The selection in pieces that bound the workspace for grouped ``q [B, H, M, D]``."""
    batch, heads, rows, _ = q.shape
    blocks, width = chosen.blocks, chosen.valid.shape[2]
    channels, groups = blocks.head_dim + blocks.head_dim_v, group_count(blocks.num_residuals)
    padded = max(blocks.block_size, groups * group_rows(blocks.num_residuals))
    scaled = groups * rows * channels  # queries and sums of each scale group
    per_block = 4 * batch * heads * (padded * (2 * rows + channels) + scaled)
    step = max(1, WORKSPACE_BYTES // max(1, per_block))
    return [chosen] if width <= step else [chosen.cut(i, step) for i in range(0, width, step)]


def choose(blocks: CompressedBlocks, block_indices: Tensor) -> Selected:
    """The blocks that ``block_indices`` names: each once, none that is not valid."""
    limit = blocks.num_blocks if blocks.block_counts is None else blocks.block_counts.view(-1, 1, 1)
    return Selected(blocks, distinct(block_indices, limit))


def distinct(indices: Tensor, limit: int | Tensor) -> Tensor:
    """Indices along the last axis as a set: ascending, with -1 for repeats and for what is not below ``limit``."""
    order = indices.sort(dim=-1).values
    repeated = torch.nn.functional.pad(order[..., 1:] == order[..., :-1], (1, 0))
    return torch.where(repeated | (order >= limit) | (order < 0), -1, order)


def lowrank_logits(q: Tensor, blocks: CompressedBlocks, chosen: Selected, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Scaled logits of the low-rank rows, ``[B, H, W, M, S]``, and ``u`` as numbers up to its scales."""
    dtype = q.dtype
    anchor = anchor_logits(q, chosen).mT  # [B, H, W, M]
    query = rank_queries(q, blocks, chosen)
    u = chosen.shared("u", dtype)  # [B, H, W, S, r]
    scores = (query @ u.mT) * u_row_scale(blocks, chosen, dtype)[..., None, :]
    return (anchor[..., None] + scores) * sm_scale, u


def rank_queries(q: Tensor, blocks: CompressedBlocks, chosen: Selected) -> Tensor:
    """Queries in each block's rank space, ``[B, H, W, M, r]``."""
    query = q[:, :, None] @ chosen.per_head("basis_k", q.dtype).mT
    return query if blocks.basis_k_scale is None else query * chosen.shared("basis_k_scale", q.dtype)[..., None, :]


def u_row_scale(blocks: CompressedBlocks, chosen: Selected, dtype: torch.dtype) -> Tensor:
    """What multiplies the stored rows of ``u``, ``[B, H, W, S or 1]``."""
    unit = chosen.shared("u_unit", dtype)[..., None]
    return unit if blocks.u_scale is None else unit * chosen.shared("u_scale", dtype)


def residual_mask(blocks: CompressedBlocks, chosen: Selected) -> Tensor:
    """True at the positions of residual rows, ``[B, H, W, S]``."""
    if blocks.residual_indices is None:
        every = torch.arange(blocks.block_size, device=chosen.valid.device) > 0
        return (chosen.valid[..., None] & every) if chosen.index is not None else (chosen.valid[:, :1, :, None] & every)
    where = chosen.shared("residual_indices").long()
    mask = torch.zeros(*where.shape[:3], blocks.block_size, dtype=torch.bool, device=where.device)
    # what lies beyond block_counts may hold positions that no block has
    where = torch.where(chosen.valid[:, : where.shape[1], :, None], where, 0)
    return mask.scatter_(3, where, True)


def lowrank_part(q: Tensor, blocks: CompressedBlocks, chosen: Selected, sm_scale: float, softcap: float | None) -> Part:
    """Anchors and rows that are not residual, for grouped ``q [B, H, M, D]``."""
    dtype = q.dtype
    if blocks.format.keeps_every_row:
        logits = capped(anchor_logits(q * sm_scale, chosen), softcap)
        if not chosen.whole:
            logits = torch.where(chosen.valid[:, :, None], logits, -torch.inf)
        return logits, lambda weight: weight @ chosen.per_head("anchor_v", dtype)
    logits, u = lowrank_logits(q, blocks, chosen, sm_scale)
    hidden = residual_mask(blocks, chosen) | ~chosen.valid[..., None]
    logits = torch.where(hidden[..., None, :], -torch.inf, capped(logits, softcap))  # [B, H, W, M, S]

    def values(weight: Tensor) -> Tensor:
        weight = weight.unflatten(3, (-1, blocks.block_size)).transpose(2, 3)
        row_scale = u_row_scale(blocks, chosen, dtype) / HEADROOM
        rank_space = (weight * row_scale[..., None, :]) @ u  # [B, H, W, M, r]
        if blocks.basis_v_scale is not None:
            rank_space = rank_space * chosen.shared("basis_v_scale", dtype)[..., None, :]
        gain = chosen.shared("v_gain", dtype)[..., None, None]
        rank_space = rank_space / torch.where(gain > 0, gain, 1.0)
        out = (rank_space @ chosen.per_head("basis_v", dtype)).sum(2)
        anchors = torch.einsum("bhwm,bhwd->bhmd", weight.sum(-1) / HEADROOM, chosen.per_head("anchor_v", dtype))
        return (out + anchors) * HEADROOM

    return logits.transpose(2, 3).flatten(3), values


def anchor_logits(q: Tensor, chosen: Selected) -> Tensor:
    """``[B, H, M, W]``."""
    return q @ chosen.per_head("anchor_k", q.dtype).mT


def residual_logits(q: Tensor, blocks: CompressedBlocks, chosen: Selected, sm_scale: float) -> Tensor:
    """Scaled logits of the residual rows, ``[B, H, M, W, R]``, codes scored without decoding the rows."""
    dtype, fmt = q.dtype, blocks.format
    q = q * sm_scale
    if fmt.exact_rows:
        return (q[:, :, None] @ chosen.per_head("residual_k", dtype).mT).transpose(2, 3)
    unit = chosen.per_head("residual_k_unit", dtype)[..., None, None]
    low = chosen.per_head("residual_k_min", dtype) * unit  # [B, H, W, Q, D]
    scale = chosen.per_head("residual_k_scale", dtype)  # times its unit it may be out of range
    anchor = anchor_logits(q, chosen)[..., None]  # [B, H, M, W, 1]
    if fmt.orders_channels:
        order = chosen.order()[..., None, :].expand(-1, -1, -1, q.shape[2], -1)
        query = q[:, :, None].expand(-1, -1, order.shape[2], -1, -1).gather(4, order)  # [B, H, W, M, D]
        constant = (query @ low.mT).transpose(2, 3) + anchor  # [B, H, M, W, Q]
    else:
        query = q[:, :, None]
        constant = (q @ low.flatten(2, 3).mT).unflatten(3, low.shape[2:4]) + anchor
    segments = fmt.key_segments(q.shape[-1])
    coded = sum(size for size, bits in segments if bits)
    query = (query * unit)[:, :, :, None, :, :coded] * scale[..., None, :coded]  # [B, H, W, Q, M, C]
    scores = coded_product(query, chosen.per_head("residual_k"), segments, rows=True)  # [B, H, W, Q, M, S]
    scores = scores.permute(0, 1, 4, 2, 3, 5) + constant[..., None]  # [B, H, M, W, Q, S]
    return scores.flatten(4, 5)[..., : blocks.num_residuals]


def coded_product(x: Tensor, packed: Tensor, segments: Segments, rows: bool) -> Tensor:
    """``x [B, H, W, Q, M, C]`` times the codes of ``packed [B, H, W, R, bytes]``, ``[B, H, W, Q, M, S]``.

    The other way round where not ``rows``. Some blocks at a time on a CPU.
    """
    batch, heads, width, groups = x.shape[:4]
    channels = sum(size for size, bits in segments if bits)
    per_block = batch * heads * groups * group_rows(packed.shape[3]) * channels * x.element_size()
    on_cpu = x.device.type == "cpu"
    step = max(1, CODE_BYTES // max(1, per_block)) if on_cpu else width
    reuse = on_cpu and not (torch.is_grad_enabled() and x.requires_grad)
    parts = []
    for start in range(0, width, step):
        piece = x[:, :, start : start + step]
        lanes = unpacked_lanes(packed[:, :, start : start + step], segments, x.dtype, reuse, padded=not rows)
        if rows:
            widths = [lane.shape[-1] for lane in lanes]
            products = [part @ lane.mT for part, lane in zip(piece.split(widths, dim=-1), lanes, strict=True)]
            parts.append(functools.reduce(Tensor.add, products))
        else:
            products = [piece @ lane for lane in lanes]
            parts.append(products[0] if len(lanes) == 1 else torch.cat(products, dim=-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def residual_part(
    q: Tensor, blocks: CompressedBlocks, chosen: Selected, sm_scale: float, softcap: float | None
) -> Part:
    """The stored residual rows, of which there are some, for grouped ``q [B, H, M, D]``."""
    dtype, kept, fmt = q.dtype, blocks.num_residuals, blocks.format
    logits = capped(residual_logits(q, blocks, chosen, sm_scale), softcap)
    if not chosen.whole:
        logits = torch.where(chosen.valid[:, :, None, :, None], logits, -torch.inf)

    def values(weight: Tensor) -> Tensor:
        weight = weight.unflatten(3, (-1, kept))  # [B, H, M, W, R]
        if fmt.exact_rows:
            return (weight.transpose(2, 3) @ chosen.per_head("residual_v", dtype)).sum(2)
        unit = chosen.per_head("residual_v_unit", dtype)[..., None, None] / HEADROOM
        low, scale = (chosen.per_head(f"residual_v_{name}", dtype) * unit for name in ("min", "scale"))
        groups, length = group_count(kept), group_rows(kept)
        weight = torch.nn.functional.pad(weight, (0, groups * length - kept)).unflatten(4, (groups, length))
        out = weight.sum(5).flatten(3) @ low.flatten(2, 3)  # [B, H, M, Dv]
        segments = fmt.value_segments(blocks.head_dim_v)
        if segments[0][1]:
            weight = weight.permute(0, 1, 3, 4, 2, 5)  # [B, H, W, Q, M, S]
            coded = coded_product(weight, chosen.per_head("residual_v"), segments, rows=False)
            out = out + (coded * scale[..., None, :]).sum((2, 3))
        return out * HEADROOM

    return logits.flatten(3), values


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    seq_lens: Tensor | None,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Dense rows; bottom-right causal inside ``seq_lens``."""
    length, keys = q.shape[2], k.shape[2]
    ragged = seq_lens is not None
    ends = torch.full((q.shape[0],), keys, device=q.device) if seq_lens is None else seq_lens.long()
    position = ends[:, None] - length + torch.arange(length, device=q.device)  # [B, Sq]
    last = torch.minimum(position, ends[:, None] - 1) if causal else (ends[:, None] - 1).expand(-1, length)
    first = None if window is None else position - window + 1
    bounded = ragged or (causal and length > 1)
    return attend_rows(q, k, v, last if bounded else None, first, softcap, sink, sm_scale, clean=not ragged)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor | None,
    first: Tensor | None,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
    clean: bool = True,
) -> tuple[Tensor, Tensor]:
    """Query ``[b, i]`` sees the keys ``first[b, i] .. last[b, i]``; every key where both are None.

    ``clean=False`` says that rows beyond the largest ``last`` may hold NaN and must not be multiplied in; rows before
    the smallest ``first`` always may.
    """
    batch, heads, length, _ = q.shape
    heads_kv, keys = k.shape[1], k.shape[2]
    if keys == 0 or batch == 0 or length == 0:
        return empty_state(q, v.shape[-1], sink)
    step = max(1, WORKSPACE_BYTES // max(1, 8 * batch * heads * keys))
    wide = accumulation_dtype(q.dtype)
    k, v = k.to(wide), v.to(wide)
    outs, lses = [], []
    for i in range(0, length, step):
        rows = slice(i, i + step)
        logits, values = row_part(
            grouped_queries(q[:, :, rows], heads_kv),
            k,
            v,
            None if last is None else last[:, rows],
            None if first is None else first[:, rows],
            sm_scale,
            softcap,
            clean,
        )
        weight, lse = softmax_with_sink(logits, None if sink is None else sink_rows(sink, logits))
        outs.append(values(weight).reshape(batch, heads, -1, v.shape[-1]))
        lses.append(lse.reshape(batch, heads, -1))
    return rounded(torch.cat(outs, dim=2), q.dtype), torch.cat(lses, dim=2).float()


def sink_rows(sink: Tensor, logits: Tensor) -> Tensor:
    """``sink [Hq]`` beside grouped logits ``[B, H, M, ...]``, ``[H, M, 1]``."""
    heads_kv, rows = logits.shape[1:3]
    group = len(sink) // heads_kv
    return sink.view(heads_kv, group, 1).expand(-1, -1, rows // group).reshape(heads_kv, rows, 1)


def row_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor | None,
    first: Tensor | None,
    sm_scale: float,
    softcap: float | None,
    clean: bool = True,
) -> Part:
    """Plain rows for grouped ``q [B, H, G * Sq, D]``; ``last`` and ``first [B, Sq]`` as in :func:`attend_rows`."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    logits = capped((q * sm_scale) @ k.mT, softcap)
    bounds = first if last is None else last
    if bounds is None:
        return logits, lambda weight: weight @ v
    slots = torch.arange(k.shape[2], device=q.device)
    if not clean and last is not None:
        v = torch.where((slots <= last.amax(1)[:, None])[:, None, :, None], v, 0.0)
    if first is not None:
        v = torch.where((slots >= first.amin(1)[:, None])[:, None, :, None], v, 0.0)
    logits = logits.unflatten(2, (-1, bounds.shape[1]))
    logits = torch.where(_seen(slots, last, first), logits, -torch.inf).flatten(2, 3)
    return logits, lambda weight: weight @ v


def _seen(slots: Tensor, last: Tensor | None, first: Tensor | None) -> Tensor:
    seen = torch.ones((), dtype=torch.bool, device=slots.device)
    if last is not None:
        seen = seen & (slots <= last[..., None])
    if first is not None:
        seen = seen & (slots >= first[..., None])
    return seen[:, None, None]  # [B, 1, 1, Sq, Sk]


def decode_attention(
    q: Tensor,
    blocks: CompressedBlocks,
    k_window: Tensor | None,
    v_window: Tensor | None,
    block_indices: Tensor,
    seq_lens: Tensor | None,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
    sm_scale: float,
) -> tuple[Tensor, Tensor]:
    """Low-rank, residual and window parts, merged."""
    wide = q.to(accumulation_dtype(q.dtype))  # partial outputs stay wide until the merge
    if k_window is None or v_window is None:
        exact = empty_state(wide, blocks.head_dim_v, sink)
    else:
        exact = exact_attention(wide, k_window, v_window, True, seq_lens, window, softcap, sink, sm_scale)
    out, lse = merge_selected(exact, wide, choose(blocks, block_indices), sm_scale, softcap)
    return rounded(out, q.dtype), lse


def merge_selected(
    exact: tuple[Tensor, Tensor], q: Tensor, chosen: Selected, sm_scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The state of the exact rows merged with both parts of the selected blocks."""
    states = [exact]
    if chosen.blocks.num_blocks and chosen.valid.shape[2]:
        states.append(_over_pieces(lowrank_part, q, chosen, sm_scale, softcap))
        if chosen.blocks.num_residuals:
            states.append(_over_pieces(residual_part, q, chosen, sm_scale, softcap))
    return merge_states([s[0] for s in states], [s[1] for s in states])


def block_parts(q: Tensor, chosen: Selected, sm_scale: float, softcap: float | None) -> list[Part]:
    """Both parts of the selected blocks for grouped ``q [B, H, M, D]``, in pieces that bound the workspace."""
    makers = (lowrank_part, residual_part) if chosen.blocks.num_residuals else (lowrank_part,)
    return [make(q, chosen.blocks, piece, sm_scale, softcap) for piece in cut_selection(q, chosen) for make in makers]
