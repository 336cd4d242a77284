"""Masks that transformers gives: a DKV layer attends causally, and takes of a mask what is padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from dkv.cache import LayerCache


class SeenLength(int):
    """A key length that a DKV layer reported: the mask function then keeps the padding mask, not a square one."""

    padded = False  # whether there is padding among what was seen


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask ``[B, kv_length]`` for a DKV layer (None without padding), transformers' own for any other."""
    if not isinstance(kv_length, SeenLength):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    if not allow_is_causal_skip:
        raise NotImplementedError("DKVCache attends causally; this model asked for another mask pattern")
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] < kv_length:
        raise ValueError(f"attention_mask must cover {int(kv_length)} positions, got {attention_mask.shape[-1]}")
    mask = attention_mask[:, :kv_length].bool()
    return None if bool(mask.all()) and not kv_length.padded else mask


def padding_of(mask: Tensor | None, state: LayerCache, length: int) -> Tensor | None:
    """The chunk's columns of the padding mask, ``[B, length]``.

    A prepared 4-D mask must be causal with padding; no mask may hide or show a stored position other than it was.
    """
    if mask is None:
        return None
    offset = state.offset
    if mask.ndim not in (2, 4):
        raise ValueError(f"attention_mask must have 2 axes or 4, got shape {list(mask.shape)}")
    if mask.ndim == 4:
        keep = _kept(mask)
        if keep.shape[1:] != (1, length, offset + length):
            raise ValueError(f"attention_mask must be [B, 1, {length}, {offset + length}], got {list(mask.shape)}")
        keep = keep[:, 0]
        new = keep[:, :, offset:].diagonal(dim1=1, dim2=2)  # a real position sees itself
        past = (keep[:, :, :offset] & new[:, :, None]).any(1)
        if not bool(new.any(1).all()):  # a sequence of padding alone tells nothing of its past
            past = torch.where(new.any(1, keepdim=True), past, True if state.real is None else state.real)
        mask = torch.cat([past, new], dim=1)
        causal = torch.ones(length, offset + length, dtype=torch.bool, device=mask.device).tril(offset)
        if bool(((keep != (causal & mask[:, None])) & new[:, :, None]).any()):
            raise NotImplementedError("DKVCache takes causal masks with padding only; this 4-D mask is another pattern")
    stored = mask[:, :offset]
    if not bool((stored if state.real is None else stored == state.real).all()):
        raise NotImplementedError("attention_mask differs from the padding these positions were stored with")
    return mask[:, offset : offset + length]


def _kept(mask: Tensor) -> Tensor:
    """An additive mask (0 keeps, the dtype's minimum or -inf drops) or a boolean one as booleans, True keeps."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask of 4 axes must hold bools or floats, got {mask.dtype}")
    dropped = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((dropped | (mask == 0)).all()):
        raise NotImplementedError("DKVCache takes masks that keep or drop; this one adds a bias to the logits")
    return ~dropped
