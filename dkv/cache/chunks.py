"""What a layer of torch is given must fit what it holds: chunks with their padding, and numbers of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dkv._checks import check_array, check_heads, dtype_name


def check_chunk(layer: Any, q: Any, k: Any, v: Any, padding: Any) -> None:
    """Before anything is stored; rows of another shape or dtype would be broadcast or rounded without a word.

    Raises
    ------
    TypeError
        When ``k`` and ``v`` are not of one dtype, that of the rows that are held, or ``padding`` not of bools.
    ValueError
        When a shape does not fit.
    """
    check_array("k", k, "B Hkv n D")
    batch, heads, length, dim = k.shape
    check_array("v", v, "B Hkv n Dv", B=batch, Hkv=heads, n=length)
    if dtype_name(v) != dtype_name(k):
        raise TypeError(f"v must have the dtype of k ({dtype_name(k)}), got {dtype_name(v)}")
    check_array("q", q, "B Hq n D", B=batch, n=length, D=dim)
    check_heads(q, heads)
    for name, held, new in (("k", layer.k_rows, k), ("v", layer.v_rows, v)):
        if held is None:
            continue
        if (held.shape[1], held.shape[3]) != (new.shape[1], new.shape[3]):
            raise ValueError(
                f"{name} must be as the cache's, {held.shape[1]} kv heads of {held.shape[3]} channels, "
                f"got {new.shape[1]} of {new.shape[3]}"
            )
        if held.dtype != new.dtype:
            raise TypeError(f"{name} must have the cache's dtype {dtype_name(held)}, got {dtype_name(new)}")
    if padding is not None:
        check_array("padding", padding, "B n", B=None if padding.shape[0] == 1 else batch, n=length)
        if dtype_name(padding) != "bool":
            raise TypeError(f"padding must be of bools, False at padding, got {dtype_name(padding)}")


def sequence_numbers(index: Any, batch_size: int, mask: bool = False) -> Tensor:
    """``index`` as sequence numbers 0..B-1; with ``mask`` it may be a bool for every sequence."""
    index = torch.as_tensor(index)
    if index.dtype == torch.bool and mask and tuple(index.shape) == (batch_size,):
        index = index.nonzero().flatten()
    numbers = index.dtype != torch.bool and not index.is_floating_point() and not index.is_complex()
    if not numbers and index.numel():  # an empty list has no dtype of its own
        raise TypeError(f"index must hold sequence numbers, got {dtype_name(index)}s")
    if index.ndim != 1:
        raise ValueError(f"index must have one axis, got shape {list(index.shape)}")
    picked = index.long().cpu()
    if bool(((picked < -batch_size) | (picked >= batch_size)).any()):
        raise IndexError(f"index must name sequences 0..{batch_size - 1}, got {picked.tolist()}")
    return picked % batch_size if batch_size else picked
