"""Storage codes shared by the ops: units, coded rows, int8 factors, and the gather of selected blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dkv.types import CLIPS, HALF_TOP, RESIDUAL_GROUP, CompressedBlocks, code_parts

from ._scratch import scratch

Segments = tuple[tuple[int, int], ...]  # (channels, bits) of each run of equally wide channels


def power_of_two_above(x: Tensor, shift: int = 0) -> Tensor:
    """Smallest power of two at or above ``x``, divided by ``2**shift``; 1 where ``x`` is zero. Float32."""
    mantissa, exponent = torch.frexp(x.double())
    exponent = exponent - (mantissa == 0.5).int() - shift
    unit = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-126, 127))
    return torch.where(x > 0, unit, 1.0).float()


def quantise_signed(x: Tensor, scale: Tensor) -> Tensor:
    """Int8 codes of ``x / scale``, zero where the scale is zero."""
    scale = scale.double()
    ratio = torch.where(scale > 0, x / torch.where(scale > 0, scale, 1.0), 0.0)
    return ratio.round().clamp(-127, 127).to(torch.int8)


def rounded_half(x: Tensor) -> Tensor:
    """Float64 ``x`` rounded once to float16 numbers, as float64; ``x.half()`` rounds twice, to float32 first."""
    _, exponent = torch.frexp(x)
    quantum = torch.ldexp(torch.ones_like(x), (exponent - 11).clamp(min=-24))
    return (x / quantum).round() * quantum


def quantise_rows(
    x: Tensor, segments: Segments, importance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Codes of rows ``x [n, H, D, R]``, float64 and contiguous; see the law, "Stored residual rows".

    Parameters
    ----------
    segments : runs of equally wide channels, in stored order.
    importance : Tensor [H, D], optional
        Factor of each channel's squared spread; the stored order is the channels' own where None.

    Returns
    -------
    packed codes uint8 ``[n, H, R, bytes]``, scale and min float16 ``[n, H, Q, D]``, unit float32 ``[n, H]`` and the
    stored order ``[n, H, D]`` or None.
    """
    count, heads, dim, kept = x.shape
    groups = x.split(RESIDUAL_GROUP, dim=3) if kept else ()
    low, high = (x.new_zeros(count, heads, dim, len(groups)) for _ in range(2))
    for index, rows in enumerate(groups):
        low[..., index], high[..., index] = rows.amin(3), rows.amax(3)
    order = None
    if importance is not None:
        lost = importance * (high - low).square().sum(3)
        order = lost.sort(dim=2, descending=True, stable=True).indices
        low, high, x = (part.gather(2, order[..., None].expand_as(part)) for part in (low, high, x))
    levels = [max(2**bits - 1, 1) for size, bits in segments for _ in range(size)]
    steps = (high - low) / torch.tensor(levels, device=x.device)[:, None]
    largest = torch.maximum(torch.maximum(low.abs(), high.abs()), steps).flatten(2)
    largest = largest.amax(2) if kept else x.new_zeros(count, heads)
    unit = power_of_two_above(largest, HALF_TOP)
    wide_unit = unit.double()[..., None, None]
    x, low, high = x / wide_unit, low / wide_unit, high / wide_unit

    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale16, low16 = torch.empty_like(low), torch.empty_like(low)
    for index in range(len(groups)):
        rows, start = slice(index * RESIDUAL_GROUP, (index + 1) * RESIDUAL_GROUP), 0
        for size, bits in segments:
            run = slice(start, start + size)
            start += size
            codes[:, :, run, rows], scale16[:, :, run, index], low16[:, :, run, index] = _clipped_codes(
                x[:, :, run, rows].contiguous(), low[:, :, run, index], high[:, :, run, index], bits
            )
    packed = pack(codes, segments).mT.contiguous()
    scale16, low16 = (part.mT.half().contiguous() for part in (scale16, low16))
    return packed, scale16, low16, unit, order


def _clipped_codes(x: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and minimum of ``x [..., rows]`` by the clip factor of the least squared error."""
    if bits == 0:
        return torch.zeros(x.shape, dtype=torch.uint8, device=x.device), torch.zeros_like(low), rounded_half(x.mean(-1))
    levels = 2**bits - 1
    middle, spread = (low + high) / 2, high - low
    spare = torch.empty_like(x)
    best = None
    for factor in CLIPS[bits]:
        low16 = rounded_half(middle - factor * spread / 2)
        scale16 = rounded_half(factor * spread / levels)
        if len(CLIPS[bits]) == 1:
            break
        _codes(x, scale16, low16, levels, spare)
        error = spare.mul_(scale16[..., None]).add_(low16[..., None]).sub_(x).square_().sum(-1)
        if best is not None:
            better = error < best[0]
            error, scale16, low16 = (
                torch.where(better, new, old) for new, old in zip((error, scale16, low16), best, strict=True)
            )
        best = error, scale16, low16
    if best is not None:
        _, scale16, low16 = best
    return _codes(x, scale16, low16, levels, spare).to(torch.uint8), scale16, low16


def _codes(x: Tensor, scale: Tensor, low: Tensor, levels: int, out: Tensor) -> Tensor:
    """Codes as float64 into ``out``; 0 where the scale is 0."""
    divisor = torch.where(scale > 0, scale, torch.inf)[..., None]
    return torch.sub(x, low[..., None], out=out).div_(divisor).round_().clamp_(0, levels)


def pack(codes: Tensor, segments: Segments) -> Tensor:
    """Codes ``[..., D, R]`` as bytes ``[..., bytes, R]``; see the law, "Packing"."""
    fields, start = [], 0
    for size, bits in segments:
        run, left = codes[..., start : start + size, :], bits
        start += size
        for width in code_parts(bits):
            left -= width
            lanes = 8 // width
            field = (run >> left) & (2**width - 1)
            field = torch.nn.functional.pad(field, (0, 0, 0, -size % lanes))
            stacked = field.unflatten(-2, (lanes, -1))
            packed = stacked[..., 0, :, :].clone()
            for lane in range(1, lanes):
                packed |= stacked[..., lane, :, :] << (width * lane)
            fields.append(packed)
    return torch.cat(fields, dim=-2) if fields else codes[..., :0, :]


def unpack(packed: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    """Codes of rows ``[..., R, bytes]`` as numbers ``[..., Q, group_rows(R), C]``; rows beyond ``R`` are zero.

    ``C`` counts the channels in stored order up to the last of any width: those of width 0 stand at the end.
    """
    lanes = unpacked_lanes(packed, segments, dtype)
    return lanes[0] if len(lanes) == 1 else torch.cat(lanes, dim=-1)


def unpacked_lanes(
    packed: Tensor, segments: Segments, dtype: torch.dtype, reuse: bool = False, padded: bool = True
) -> list[Tensor]:
    """:func:`unpack` in runs of channels that are contiguous each: a byte's low and high code lie far apart.

    With ``reuse`` they lie in room that the next call with it overwrites. Rows beyond ``R`` may be anything where not
    ``padded``.
    """
    segments = tuple((size, bits) for size, bits in segments if bits)
    *lead, kept, width = packed.shape
    groups, length = group_count(kept), group_rows(kept)

    def room(name: str, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if reuse:
            return scratch(name, (*lead, *shape), dtype, packed.device)
        return torch.empty(*lead, *shape, dtype=dtype, device=packed.device)

    if len(segments) != 1 or segments[0][1] not in (4, 8):
        codes = _unpack_across_rows(packed, segments, room).mT
        return [room("codes", *codes.shape[-3:]).copy_(codes)]
    size, bits = segments[0]
    lanes = []
    for lane in range(8 // bits):
        field = packed >> (bits * lane) if lane else packed
        if bits * (lane + 1) < 8:
            field = field & (2**bits - 1)
        run = room(f"lane {lane}", groups * length, min(width, size - lane * width))
        if padded:
            run[..., kept:, :] = 0
        run[..., :kept, :] = field[..., : run.shape[-1]]
        lanes.append(run.unflatten(-2, (groups, length)))
    return lanes


def _unpack_across_rows(packed: Tensor, segments: Segments, room: Callable[..., Tensor]) -> Tensor:
    """Any runs, whose lanes may be a byte long: the bytes of a group's rows side by side, four of them to an int32.

    uint8 codes ``[..., Q, C, group_rows(R)]``.
    """
    kept, width = packed.shape[-2:]
    groups, length = group_count(kept), group_rows(kept)
    columns = room("columns", groups, width, length, dtype=torch.uint8)
    for index, rows in enumerate(packed.split(RESIDUAL_GROUP, dim=-2) if kept else ()):
        columns[..., index, :, : rows.shape[-2]] = rows.mT
        columns[..., index, :, rows.shape[-2] :] = 0
    words = columns.view(torch.int32)
    channels = sum(size for size, _ in segments)
    codes = room("words", groups, channels, words.shape[-1], dtype=torch.int32).zero_()
    start = byte = 0
    for size, left in segments:
        run = codes[..., start : start + size, :]
        start += size
        for part in code_parts(left):
            left -= part
            stop = byte + -(-size * part // 8)
            places = torch.arange(0, 8, part, dtype=torch.int32, device=packed.device)[:, None, None]
            field = words[..., None, byte:stop, :] >> places
            field = field.flatten(-3, -2)[..., :size, :]
            byte = stop
            if part < 8:
                field &= 0x01010101 * (2**part - 1)
            run |= field << left if left else field
    return codes.view(torch.uint8)


def group_count(num_residuals: int) -> int:
    return -(-num_residuals // RESIDUAL_GROUP)


def group_rows(num_residuals: int) -> int:
    """Rows of a group of decoded codes, the same for all groups of a block and a multiple of four."""
    return min(RESIDUAL_GROUP, max(-(-num_residuals // 4), 1) * 4)


PER_ROW = frozenset(("u", "u_scale", "basis_k", "basis_v", "residual_k", "residual_v", "residual_indices"))


class Selected:
    """The parts of the selected blocks, laid out ``[B, H, W, ...]``; parts of unused slots read as zero.

    ``block_indices`` of None takes every block as a view, without a copy. Else the small parts, those not in
    ``PER_ROW``, are gathered once for all who ask. ``whole`` is True only where every slot is used.
    """

    def __init__(self, blocks: CompressedBlocks, block_indices: Tensor | None) -> None:
        self.blocks = blocks
        self._gathered: dict[tuple[str, torch.dtype | None], Tensor] = {}
        device = blocks.anchor_k.device
        batch, count, heads = blocks.anchor_k.shape[:3]
        if block_indices is None:
            slots = torch.arange(count, device=device)
            valid = torch.ones(batch, 1, count, dtype=torch.bool, device=device)
            if blocks.block_counts is not None:
                valid = slots < blocks.block_counts.view(-1, 1, 1)
            self.index = None
            self.valid = valid.expand(batch, heads, count)
            self.whole = blocks.block_counts is None
        else:
            self.valid = block_indices >= 0
            self.whole = device.type == "cpu" and bool(self.valid.all())  # elsewhere asking would wait for the device
            self.index = block_indices.long() if self.whole else block_indices.long().clamp(min=0)
            row = self.index
            if batch > 1:
                row = torch.arange(batch, device=device).view(-1, 1, 1) * count + row
            head = torch.arange(heads, device=device).view(1, -1, 1)
            self._shared_place = row.flatten()  # in a part's leading axes, flattened
            self._head_place = torch.add(head, row, alpha=heads).flatten()

    def cut(self, start: int, count: int) -> Selected:
        """``count`` slots of the selection from ``start``."""
        assert self.index is not None
        slots = slice(start, start + count)
        return Selected(self.blocks, torch.where(self.valid, self.index, -1)[:, :, slots])

    def per_head(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A part ``[B, N, H, ...]`` as ``[B, H, W, ...]``."""
        part = getattr(self.blocks, name)
        if self.index is None:
            return self._masked(part.transpose(1, 2), dtype)
        return self._gather(name, part.flatten(0, 2), self._head_place, dtype)

    def shared(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A part ``[B, N, ...]`` that all heads share, as ``[B, H or 1, W, ...]``."""
        part = getattr(self.blocks, name)
        if self.index is None:
            return self._masked(part.unsqueeze(1), dtype)
        return self._gather(name, part.flatten(0, 1), self._shared_place, dtype)

    def order(self) -> Tensor:
        """``residual_k_order`` as an index ``[B, H, W, D]``; unused slots may hold places that no key has."""
        order = self.per_head("residual_k_order").long()
        return torch.where(self.valid[..., None], order, 0)

    def _gather(self, name: str, part: Tensor, place: Tensor, dtype: torch.dtype | None) -> Tensor:
        key = name, dtype
        if key in self._gathered:
            return self._gathered[key]
        # index_select copies whole slices where indexing by several tensors copies numbers
        part = self._masked(part.index_select(0, place).unflatten(0, self.valid.shape), dtype)
        if name not in PER_ROW:
            self._gathered[key] = part
        return part

    def _masked(self, part: Tensor, dtype: torch.dtype | None) -> Tensor:
        floating = part.is_floating_point()
        if dtype is not None:
            part = part.to(dtype)
        if not floating or self.whole:
            return part
        valid = self.valid[:, : part.shape[1]]
        return torch.where(valid.reshape(*valid.shape, *([1] * (part.ndim - 3))), part, 0)
