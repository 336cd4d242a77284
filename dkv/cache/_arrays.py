"""The few array operations that torch and mlx spell differently."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from dkv._dispatch import library_of

Array = Any  # torch.Tensor or mlx.core.array


def _is_torch(array: Array) -> bool:
    return library_of(array) == "torch"


def _mx() -> Any:
    return importlib.import_module("mlx.core")


def cat(parts: Sequence[Array], axis: int) -> Array:
    if _is_torch(parts[0]):
        return importlib.import_module("torch").cat(list(parts), dim=axis)
    return _mx().concatenate(list(parts), axis=axis)


def zeros(like: Array, shape: Sequence[int]) -> Array:
    """Zeros of a shape, in the dtype and on the device of ``like``."""
    return like.new_zeros(tuple(shape)) if _is_torch(like) else _mx().zeros(tuple(shape), dtype=like.dtype)


def integers(values: Sequence[int], like: Array) -> Array:
    """int32 numbers where ``like`` lives."""
    if _is_torch(like):
        torch = importlib.import_module("torch")
        return torch.tensor(list(values), dtype=torch.int32, device=like.device)
    mx = _mx()
    return mx.array(list(values), dtype=mx.int32)


def weights(values: Sequence[Sequence[float]], like: Array) -> Array:
    """Numbers beside ``like``: float64 in torch, float32 in mlx, whose GPU has no wider one."""
    if _is_torch(like):
        torch = importlib.import_module("torch")
        return torch.tensor(values, dtype=torch.float64, device=like.device)
    mx = _mx()
    return mx.array(values, dtype=mx.float32)


def copied(part: Array) -> Array:
    """A part of an array on its own, so that the whole is freed."""
    return part.clone() if _is_torch(part) else _mx().contiguous(part)
