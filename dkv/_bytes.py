"""The bytes of arrays of NumPy, torch and mlx, and arrays of them from bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTHS = {
    **{"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2},
    **{"uint32": 4, "int32": 4, "float32": 4, "int64": 8, "float64": 8},
}


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    if dtype not in WIDTHS:
        raise TypeError(f"arrays of a file must be of {', '.join(WIDTHS)}, got {dtype}")
    return WIDTHS[dtype]


def view(part: Any) -> np.ndarray:
    """An array's bytes in row order, uint8; copied only where they do not lie so."""
    from dkv._dispatch import library_of

    if 0 in part.shape:
        return np.empty(0, np.uint8)
    library = library_of(part)
    if library == "torch":
        import torch

        return np.asarray(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    if library == "mlx":
        import mlx.core as mx

        return np.array(mx.contiguous(part).reshape(-1).view(mx.uint8))
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def array(dtype: str, shape: tuple[int, ...], data: np.ndarray, library: str) -> Any:
    """The inverse of :func:`view`; the bytes are handed over."""
    if dtype == "bool" and data.size and data.max() > 1:
        raise ValueError("an array of bools holds other bytes than 0 and 1")
    if library == "torch":
        import torch

        kind = getattr(torch, dtype)
        return torch.from_numpy(data).view(kind).reshape(shape) if data.size else torch.empty(shape, dtype=kind)
    if dtype != "bfloat16":
        plain = data.view(dtype).reshape(shape)
    elif library == "numpy":
        plain = data.view(_bfloat16()).reshape(shape)
    else:
        plain = data.view(np.uint16).reshape(shape)
    if library == "numpy":
        return plain
    import mlx.core as mx

    made = mx.array(plain)
    return made.view(mx.bfloat16) if dtype == "bfloat16" else made


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ValueError(
            'it holds bfloat16, which NumPy alone has not: load it with backend="torch" or "mlx"'
        ) from error
    return ml_dtypes.bfloat16
