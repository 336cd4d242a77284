"""How a DKV cache gets its queries: mlx-lm's attention function, replaced where a model's layers look it up.

Every attention layer of mlx-lm calls ``scaled_dot_product_attention(queries, keys, values, cache=cache, ...)``, a name
that its module imported from ``mlx_lm.models.base``. :func:`hook` binds that name to :func:`attention`, which calls
mlx-lm's own function unless the keys are a DKV cache's :class:`DKVRows`. Nothing of mlx-lm is edited on the disk.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

attend_dense = base.scaled_dot_product_attention
hooked: set[str] = set()  # names of the modules that attend through dkv


class DKVRows:
    """What a DKV cache hands to the attention function instead of keys and values; no array operation takes it."""

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.cache, self.shape, self.dtype, self.ndim = cache, shape, dtype, len(shape)


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """As ``mlx_lm.models.base.scaled_dot_product_attention``; what a DKV cache handed out goes back to that cache."""
    if isinstance(keys, DKVRows):
        return keys.cache.attend(queries, scale, mask, sinks)
    return attend_dense(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def hook(model: nn.Module) -> bool:
    """Bind the attention function in every module where a layer of ``model`` is computed; whether there is any."""
    found = False
    for layer in model.modules():
        names = getattr(type(layer).__call__, "__globals__", {})
        for name in [name for name, value in names.items() if value is attend_dense or value is attention]:
            names[name] = attention
            hooked.add(names["__name__"])
            found = True
    return found
