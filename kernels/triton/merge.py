"""Merge attention states by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._dots import rounded
from ._launch import INTERPRETED, launch, power_of_two
from ._rows import NONE

ROWS = 32 if INTERPRETED else 4  # of a program, whatever the batch


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge states in float32.

    Parameters
    ----------
    outs : sequence of Tensor [B, Hq, Sq, Dv]
        Any strides; the result has the dtype of the first.
    lses : sequence of Tensor [B, Hq, Sq]
        Natural log. -inf or +inf marks an empty state, whatever its output holds.
    """
    equal = all(part.dtype == outs[0].dtype for part in outs)
    stacked = torch.stack([part if equal else part.float() for part in outs])
    return merge_parts(stacked, torch.stack([part.float() for part in lses]), outs[0].dtype)


def merge_parts(outs: Tensor, lses: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge contiguous ``outs [n, ..., Dv]`` and ``lses [n, ...]`` float32; the output is in ``dtype``."""
    count, *shape, dim = outs.shape
    out = torch.empty(*shape, dim, dtype=dtype, device=outs.device)
    lse = torch.empty(shape, dtype=torch.float32, device=outs.device)
    rows = lse.numel()
    grid = (triton.cdiv(rows, ROWS),)
    width = power_of_two(dim)
    launch(
        *(_merge, grid, outs, lses, out, lse, rows, count),
        DIM=dim, WIDTH=width, ROWS=ROWS, num_warps=1 if width <= 64 else 4, num_stages=2,
    )  # fmt: skip
    return out, lse


@triton.jit
def _merge(
    outs, lses, out, lse, rows, count,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    live, pitch = row < rows, tl.full([], 0, tl.int64) + rows
    inside = live[:, None] & (column < DIM)[None, :]
    place = row[:, None] * DIM + column[None, :]

    peak = tl.full([ROWS], NONE, tl.float32)
    for part in range(count):
        one = tl.load(lses + part * pitch + row, mask=live, other=NONE)
        one = tl.where(one == -NONE, NONE, one)
        peak = tl.maximum(peak, one, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(peak == NONE, 0.0, peak)

    total = tl.full([ROWS], 0, tl.float32)
    joined = tl.full([ROWS, WIDTH], 0, tl.float32)
    for part in range(count):
        one = tl.load(lses + part * pitch + row, mask=live, other=NONE)
        weight = tl.exp(tl.where(one == -NONE, NONE, one) - base)
        total += weight
    whole = tl.where(total == 0, 1.0, total)
    for part in range(count):
        one = tl.load(lses + part * pitch + row, mask=live, other=NONE)
        weight = tl.exp(tl.where(one == -NONE, NONE, one) - base) / whole  # at most 1: no sum overflows
        taken = inside & (weight != 0)[:, None]
        x = tl.load(outs + part * pitch * DIM + place, mask=taken, other=0.0).to(tl.float32)
        joined += tl.where(taken, weight[:, None] * x, 0.0)
    tl.store(out + place, rounded(joined, out.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(total == 0, NONE, base + tl.log(whole)), mask=live)
