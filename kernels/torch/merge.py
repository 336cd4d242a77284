"""Merge attention states by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; what lies beyond its range becomes its largest number, as in the reference."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As :func:`saturated`, but an infinity, which overflowed or came in, stays one."""
    return x if x.dtype == dtype else torch.where(x.isinf(), x.to(dtype), saturated(x, dtype))


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """outs ``[..., Dv]``, lses ``[...]`` (natural log). An lse of -inf or +inf marks an empty state."""
    lse = torch.stack([part.double() if part.dtype == torch.float64 else part.float() for part in lses])
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    peak = lse.amax(0)
    safe_peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = (lse - safe_peak).exp()  # exp(-inf) is exactly 0
    total = weight.sum(0)
    wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    out = torch.zeros(outs[0].shape, dtype=wide, device=outs[0].device)
    for part, share in zip(outs, weight / torch.where(total > 0, total, 1.0), strict=True):
        # select, do not multiply: an empty state's output may hold anything
        out = out + torch.where((share == 0)[..., None], 0.0, share[..., None] * part.to(wide))
    return rounded(out, outs[0].dtype), torch.where(peak == -torch.inf, -torch.inf, safe_peak + total.log()).float()
