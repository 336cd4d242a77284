"""Masks that models of mlx-lm make or give: a DKV cache attends causally, so they must say just that."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dkv.cache.mlx_layer import Spans, real_positions


def causal_mask(before: Sequence[int], spans: Spans, length: int, columns: int) -> mx.array:
    """What a chunk's queries see, bool ``[B, 1, length, columns]``.

    The last ``length`` columns are the chunk's; the ``before[b]`` ones ahead of them the tokens seen of sequence ``b``,
    and all else is padding, as are the first ``spans[b][0]`` of the chunk.
    """
    start = [columns - length - tokens + first for tokens, (first, _) in zip(before, spans, strict=True)]
    at, last = mx.arange(columns), mx.arange(columns - length, columns)[:, None]
    return (at >= mx.array(start)[:, None, None, None]) & (at <= last)


def says_causal(mask: mx.array, before: Sequence[int], spans: Spans, length: int) -> bool:
    """Whether a mask, of bools or added to the logits, lets the real queries of a chunk see all before them."""
    if mask.dtype != mx.bool_:
        dropped = mask <= mx.finfo(mask.dtype).min / 2  # its minimum or -inf
        if not bool(mx.all(dropped | (mask == 0))):
            return False  # a bias
        mask = ~dropped
    if mask.ndim == 2:
        mask = mask[None, None]
    batch, columns = len(before), mask.shape[-1]
    fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[2] == length
    if not fits or columns < max(before) + length:
        return False
    wanted = causal_mask(before, spans, length, columns)
    real = real_positions(spans, length)[:, None, :, None]
    return bool(mx.all((mask == wanted) | ~real))
