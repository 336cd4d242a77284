"""A chunk of queries, keys and values must fit itself, its padding and the rows that a layer of torch holds."""

from __future__ import annotations

from typing import Any

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
