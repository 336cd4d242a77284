"""Storage codes shared by the ops: units, 8- and 4-bit rows, int8 factors, and the gather of selected blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from dkv.types import RESIDUAL_GROUP, CompressedBlocks

HALF_TOP = 14  # units put the largest stored number of a group near 2**14, well inside float16


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


def quantise_affine(
    x: Tensor, dim: int, unit_dims: tuple[int, ...], bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Asymmetric codes along ``dim``; the unit is shared over ``unit_dims`` of the scales.

    Returns
    -------
    codes uint8 shaped as ``x``; scale and min float16 and unit float32, ``dim`` (and ``unit_dims``) kept with size 1.
    """
    levels = 2**bits - 1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / levels
    largest = torch.maximum(low.abs(), step)
    unit = power_of_two_above(largest.amax(unit_dims, keepdim=True), HALF_TOP)
    low16, step16 = (low / unit).half(), (step / unit).half()
    step64 = step16.double()
    codes = (x / unit - low16.double()) / torch.where(step64 > 0, step64, 1.0)
    codes = torch.where(step64 > 0, codes, 0.0).round().clamp(0, levels).to(torch.uint8)
    return codes, step16, low16, unit


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: channel ``d`` low, channel ``half + d`` high. ``[..., D] -> [..., ceil(D / 2)]``."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def codes_to_float(codes: Tensor, width: int, bits: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Codes ``[..., R, :]`` as numbers ``[..., rows, width]``; rows beyond ``R`` are zero."""
    stored = codes.shape[-2]
    half = codes.shape[-1]
    span = 2 * half if bits == 4 else half
    out = torch.empty(*codes.shape[:-2], rows, span, dtype=dtype, device=codes.device)
    out[..., stored:, :] = 0
    if bits == 4:
        out[..., :stored, :half] = codes & 15
        out[..., :stored, half:] = codes >> 4
    else:
        out[..., :stored, :] = codes
    return out[..., :width]


def group_count(num_residuals: int) -> int:
    return -(-num_residuals // RESIDUAL_GROUP)


class Selected:
    """The parts of the selected blocks, laid out ``[B, H, W, ...]``; parts of unused slots read as zero.

    ``block_indices`` of None takes every block as a view, without a copy.
    """

    def __init__(self, blocks: CompressedBlocks, block_indices: Tensor | None) -> None:
        self.blocks = blocks
        device = blocks.anchor_k.device
        batch, count, heads = blocks.anchor_k.shape[:3]
        if block_indices is None:
            slots = torch.arange(count, device=device)
            valid = torch.ones(batch, 1, count, dtype=torch.bool, device=device)
            if blocks.block_counts is not None:
                valid = slots < blocks.block_counts.view(-1, 1, 1)
            self.index = None
            self.valid = valid.expand(batch, heads, count)
        else:
            self.index = block_indices.long().clamp(min=0)
            self.valid = block_indices >= 0
        self._batch = torch.arange(batch, device=device).view(-1, 1, 1)
        self._head = torch.arange(heads, device=device).view(1, -1, 1)

    def per_head(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A part ``[B, N, H, ...]`` as ``[B, H, W, ...]``."""
        part = getattr(self.blocks, name)
        part = part.transpose(1, 2) if self.index is None else part[self._batch, self.index, self._head]
        return self._masked(part, dtype)

    def shared(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A part ``[B, N, ...]`` that all heads share, as ``[B, H or 1, W, ...]``."""
        part = getattr(self.blocks, name)
        part = part.unsqueeze(1) if self.index is None else part[self._batch, self.index]
        return self._masked(part, dtype)

    def _masked(self, part: Tensor, dtype: torch.dtype | None) -> Tensor:
        floating = part.is_floating_point()
        if dtype is not None:
            part = part.to(dtype)
        if not floating or (self.index is None and self.blocks.block_counts is None):
            return part
        valid = self.valid[:, : part.shape[1]]
        return torch.where(valid.reshape(*valid.shape, *([1] * (part.ndim - 3))), part, 0)
